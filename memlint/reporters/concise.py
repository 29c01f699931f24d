"""The report for editors and grep: a line a finding."""

from __future__ import annotations

from memlint.lint.model import Finding, Report
from memlint.reporters import View, summary
from memlint.reporters.styled import STYLES, Line, emit


def render(report: Report, view: View) -> str:
    """`report` as lines of `path:line:column: severity[code] message`."""
    if view.statistics:
        lines = summary.statistics(report)
    else:
        findings, notes = summary.shown(report, view)
        lines = [_finding(finding, view) for finding in findings] + summary.folded(notes)
    lines += summary.failure_lines(report.all_failures)
    return emit([*lines, *summary.closing(report, view)], view.colour)


def _finding(finding: Finding, view: View) -> Line:
    span = finding.span
    star = " [*]" if finding.fix is not None and (finding.fix.safe or view.unsafe_fixes) else ""
    return [
        (summary.place(finding.path, finding.cell, span.line, span.column), "bold"),
        (": ", ""),
        (f"{finding.severity.label}[{finding.code}]", STYLES[finding.severity]),
        (f"{star} {' '.join(finding.message.split())}", ""),
    ]
