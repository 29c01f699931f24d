"""The report for people: a frame of code for each finding, and a summary."""

from __future__ import annotations

from memlint.lint.model import Finding, Report
from memlint.reporters import View, summary
from memlint.reporters.frames import frame
from memlint.reporters.styled import STYLES, Line, emit, wrap


def render(report: Report, view: View) -> str:
    """`report` as text, as wide as `view` says."""
    lines: list[Line] = []
    if view.statistics:
        lines += summary.statistics(report)
    else:
        findings, notes = summary.shown(report, view)
        for finding in findings:
            lines += [*_finding(finding, view), []]
        if notes:
            lines += [*summary.folded(notes), []]
    if report.all_failures:
        lines += [*summary.failure_lines(report.all_failures), []]
    return emit([*lines, *summary.closing(report, view)], view.colour)


def _finding(finding: Finding, view: View) -> list[Line]:
    style = STYLES[finding.severity]
    head = f"{finding.severity.label}[{finding.code}]"
    wrapped = wrap(f"{head} {finding.name}: {finding.message}", view.width, rest="  ")
    out: list[Line] = [[(head, style), (wrapped[0].removeprefix(head), "bold")]]
    out += [[(line, "bold")] for line in wrapped[1:]]
    span = finding.span
    out.append([("  --> ", "blue"), (summary.place(finding.path, finding.cell, span.line, span.column), "")])
    framed = frame(finding, view.lines, view.width)
    out += framed
    for other in finding.related:
        if not framed or (other.path, other.cell) != (finding.path, finding.cell):
            where = summary.place(other.path, other.cell, other.span.line, other.span.column)
            out += [[(line, "cyan")] for line in wrap(f"{where}: {other.message}", view.width, "  = ", "    ")]
    if finding.fix is not None:
        how = "--fix" if finding.fix.safe else "--fix --unsafe-fixes"
        out += [[(line, "green")] for line in wrap(f"fix: {finding.fix.label} ({how})", view.width, "  = ", "    ")]
    return out
