"""ML001: a directive that suppresses nothing."""

from __future__ import annotations

from collections.abc import Iterator

from memlint.lint.flow import Flow
from memlint.lint.model import Severity
from memlint.rules.base import Draft, Rule


class UnusedSuppression(Rule):
    """A directive that suppresses nothing.

    `# memlint: ignore[ML101]`, `# memlint: ignore-file[ML101]` and `# noqa: ML101` silence a finding that somebody has
    judged. Once the code is mended the comment is a lie: it says that the line is wrong, and it would hide the next
    defect there. The same holds for a code that does not exist and for a directive that memlint does not know, which
    silence nothing although they seem to.

    A directive speaks for the statement that it ends, or for the line that it stands on. Codes that are switched off
    by `--ignore` or `per-file-ignores` are not counted as unused, nor is a bare `# noqa`, which belongs to every
    tool. The fix deletes what is unused and nothing else: other codes and other tools' comments stay.
    """

    code, name, severity = "ML001", "unused-suppression", Severity.WARNING
    triggers = ("memlint", "noqa", "NOQA", "NoQA")
    bad = """
def average(values):
    return sum(values) / len(values)  # memlint: ignore[ML101] the values are floats
"""
    good = """
def average(values):
    return sum(values) / len(values)
"""

    def check(self, flow: Flow) -> Iterator[Draft]:
        """Nothing: whether a directive is used is known only after all rules have spoken (lint/suppress.py)."""
        return iter(())
