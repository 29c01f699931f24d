"""The report as GitHub's workflow commands, which become annotations of a pull request's lines.

GitHub shows ten of each severity a step and fifty a run, so the gravest come first.
"""

from __future__ import annotations

from memlint.lint.model import Failure, Finding, Report, Severity
from memlint.reporters import View, summary

_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}


def render(report: Report, view: View) -> str:
    """`report` as a line a finding."""
    findings = sorted(report.findings, key=lambda finding: -finding.severity)
    lines = [_failure(failure) for failure in report.all_failures] + [_finding(finding) for finding in findings]
    return "".join(f"{line}\n" for line in lines)


def _finding(finding: Finding) -> str:
    span = finding.span
    said = [finding.message]
    place = {"file": finding.path}
    if finding.cell is None:
        place["line"] = str(span.line)
        place["endLine"] = str(span.end_line)
        if span.line == span.end_line:  # GitHub takes columns in one line only
            place["col"] = str(span.column)
            place["endColumn"] = str(span.end_column)
    else:
        # the lines of a cell are not those of the file
        place["line"] = "1"
        said[0] = f"cell {finding.cell}, line {span.line}: {finding.message}"
    said += [
        f"{summary.place(other.path, other.cell, other.span.line, other.span.column)}: {other.message}"
        for other in finding.related
    ]
    return _command(_COMMANDS[finding.severity], place, f"{finding.code} {finding.name}", "\n".join(said))


def _failure(failure: Failure) -> str:
    place = {"file": failure.path}
    if failure.line is not None and not failure.path.endswith(".ipynb"):
        place["line"] = str(failure.line)
    return _command("error", place, f"memlint cannot check this file ({failure.kind.value})", failure.detail)


def _command(command: str, place: dict[str, str], title: str, message: str) -> str:
    properties = ",".join(f"{key}={_property(value)}" for key, value in {**place, "title": title}.items())
    return f"::{command} {properties}::{_data(message)}"


def _data(text: str) -> str:
    """A command ends with its line, and a percent sign starts an escape."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
