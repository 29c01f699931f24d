"""The errors that memlint raises for expected trouble; each prints as one clear line."""

from __future__ import annotations


class MemlintError(Exception):
    """Trouble that the user can act on: what is wrong, where, and what to do."""


class ConfigError(MemlintError):
    """The configuration or the command line asks for something that does not exist."""


class UsageError(MemlintError):
    """The command line names something that is not there."""


class BudgetError(MemlintError):
    """A memory budget that makes no sense."""


class BackendUnavailable(MemlintError):  # noqa: N818
    """The device that was asked for cannot be measured here; the text says why."""
