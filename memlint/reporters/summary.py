"""The parts that text and concise share: failures, folded notes, statistics, and the closing line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from memlint.lint.model import Failure, Finding, Report, Severity
from memlint.reporters import View
from memlint.reporters.styled import STYLES, Line


def place(path: str, cell: int | None, line: int, column: int | None = None) -> str:
    """path:line:column, with the cell of a notebook between."""
    where = path if cell is None else f"{path}:cell {cell}"
    return f"{where}:{line}" if column is None else f"{where}:{line}:{column}"


def shown(report: Report, view: View) -> tuple[list[Finding], list[Finding]]:
    """The findings to show one by one, and the notes to fold."""
    if view.show_notes:
        return list(report.findings), []
    loud = [f for f in report.findings if f.severity is not Severity.NOTE]
    return loud, [f for f in report.findings if f.severity is Severity.NOTE]


def failure_lines(failures: Iterable[Failure]) -> list[Line]:
    """A line for each failure."""
    return [
        [
            ("cannot check ", STYLES[Severity.ERROR]),
            (failure.path if failure.line is None else f"{failure.path}:{failure.line}", "bold"),
            (f": {failure.kind.value}: {' '.join(failure.detail.split())}", ""),
        ]
        for failure in failures
    ]


def folded(notes: Sequence[Finding]) -> list[Line]:
    """A line for each code among the notes."""
    out: list[Line] = []
    for code in sorted({note.code for note in notes}):
        own = [note for note in notes if note.code == code]
        first = place(own[0].path, own[0].cell, own[0].span.line)
        where = first if len(own) == 1 else f"{len(own)} places, the first {first}"
        out.append([(f"note[{code}]", STYLES[Severity.NOTE]), (f" {own[0].name}: {where}", "")])
    return out


def statistics(report: Report) -> list[Line]:
    """How often each code was found, the most frequent first."""
    counts = Counter((f.code, f.name, f.severity) for f in report.findings)
    width = max((len(str(count)) for count in counts.values()), default=0)
    rows = sorted(counts.items(), key=lambda item: (-item[1], item[0][0], -item[0][2]))
    return [
        [(f"{count:>{width}}  ", "bold"), (f"{code}  ", STYLES[severity]), (f"{severity.label:<8}{name}", "")]
        for (code, name, severity), count in rows
    ]


def closing(report: Report, view: View) -> list[Line]:
    """What it all comes to."""
    findings, failures = report.findings, report.all_failures
    fixed = sum(result.fixed for result in report.results)
    suppressed = sum(result.suppressed for result in report.results)
    out: list[Line] = []
    if fixed:
        out.append([(f"Fixed {plural(fixed, 'finding')}.", "bold green")])
    checked = f"{plural(len(report.results), 'file')} checked"
    if suppressed:
        checked += f", {suppressed} suppressed"
    if report.baselined:
        checked += f", {report.baselined} in the baseline"
    if findings:
        by = Counter(finding.severity for finding in findings)
        said = ", ".join(plural(by[s], s.label) for s in sorted(Severity, reverse=True) if by[s])
        hidden = by[Severity.NOTE] and not view.show_notes and not view.statistics
        out.append(
            [
                ("Found ", "bold"),
                (said, STYLES[max(by)]),
                (f" ({checked}){' (--show-notes shows the notes)' * bool(hidden)}.", ""),
            ]
        )
        out += _fixable(findings, view)
    elif not failures and report.results:
        out.append([("All checks passed", "bold green"), (f" ({checked}).", "")])
    if failures:
        out.append([(f"{plural(len(failures), 'failure')}", STYLES[Severity.ERROR]), (" (see above).", "")])
    return out


def _fixable(findings: Sequence[Finding], view: View) -> list[Line]:
    safe = sum(f.fix is not None and f.fix.safe for f in findings)
    unsafe = sum(f.fix is not None and not f.fix.safe for f in findings)
    said = []
    if safe:
        said.append(f"{safe} with --fix")
    if unsafe:
        said.append(f"{unsafe}{' more' * bool(safe)} with --fix --unsafe-fixes")
    return [[(f"Fixable: {', '.join(said)}.", "")]] if said else []


def plural(count: int, word: str) -> str:
    """`3 errors`, `1 error`."""
    return f"{count} {word}{'' if count == 1 else 's'}"
