"""Reports as text: one module a format, each with `render(report, view) -> str`, which is pure."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memlint.lint.model import Report, Severity

#: for people and their programs
FORMATS = ("text", "concise", "json")
#: for the dashboards of CI systems; in a file they leave the terminal to the text
CI_FORMATS = ("sarif", "github", "gitlab", "junit")
ALL_FORMATS = FORMATS + CI_FORMATS

#: the lines of a file, or of one cell of a notebook, without their ends; empty where they cannot be had
Lines = Callable[[str, "int | None"], Sequence[str]]


def no_lines(path: str, cell: int | None) -> Sequence[str]:
    """The lines of nothing: reports come without code frames."""
    return ()


@dataclass(frozen=True, slots=True)
class RuleText:
    """What a rule says about itself: `text` and `markdown` say all, examples included.

    Reporters do not know the rules, which need libcst.
    """

    code: str
    name: str
    severity: Severity
    summary: str
    description: str
    text: str
    markdown: str


@dataclass(frozen=True, slots=True)
class View:
    """How a report is to be shown. `width` counts columns.

    `fail_on` is the severity from which findings fail the run, `exit_code` what the process will return, and `rules`
    are the rules that could have found something; only formats that tell them need them.
    """

    width: int = 100
    colour: bool = False
    show_notes: bool = False
    statistics: bool = False
    unsafe_fixes: bool = False
    lines: Lines = no_lines
    fail_on: Severity = Severity.WARNING
    exit_code: int | None = None
    rules: tuple[RuleText, ...] = ()


def render(name: str, report: Report, view: View) -> str:
    """`report` in the format `name`."""
    module = importlib.import_module(f"memlint.reporters.{name}")
    text: str = module.render(report, view)
    return text
