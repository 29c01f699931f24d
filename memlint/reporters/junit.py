"""The report as JUnit XML: one suite, and a test case for each file.

A file fails where it holds findings that fail the run (`--fail-on`), and is an error where it could not be judged. All
findings of a file go into one failure, for Jenkins reads only the first of a case. Milder ones are the case's output.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

from memlint.lint.model import Failure, Finding, Report, Severity
from memlint.reporters import View, summary

#: characters that XML 1.0 cannot hold, not even as references
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_QUOTED = {'"': "&quot;", "\n": "&#10;", "\r": "&#13;", "\t": "&#9;"}


def render(report: Report, view: View) -> str:
    """`report` as XML."""
    cases = [_Case(r.path, r.findings, r.failures, view.fail_on) for r in report.results]
    alone = {failure.path: failure for failure in report.failures}  # paths that could not be searched
    cases += [_Case(path, (), (failure,), view.fail_on) for path, failure in alone.items()]
    failed, broken = sum(case.fails and not case.failures for case in cases), sum(bool(c.failures) for c in cases)
    counts = f'tests="{len(cases)}" failures="{failed}" errors="{broken}"'
    return "".join(
        [
            '<?xml version="1.0" encoding="utf-8"?>\n',
            f'<testsuites name="memlint" {counts}>\n',
            f'  <testsuite name="memlint" {counts} skipped="0">\n',
            *(line for case in cases for line in case.lines()),
            "  </testsuite>\n</testsuites>\n",
        ]
    )


class _Case:
    """One file."""

    def __init__(self, path: str, findings: Sequence[Finding], failures: Sequence[Failure], fail_on: Severity) -> None:
        self.path, self.failures = path, failures
        self._failing = [finding for finding in findings if finding.severity >= fail_on]
        self._milder = [finding for finding in findings if finding.severity < fail_on]

    @property
    def fails(self) -> bool:
        """Whether it holds a finding that fails the run."""
        return bool(self._failing)

    def lines(self) -> Iterable[str]:
        """The element of the case."""
        name = _attribute(self.path)
        head = f"    <testcase classname={_attribute('memlint')} name={name} file={name}"
        said = list(self._said())
        if not said:
            yield f"{head}/>\n"
            return
        yield f"{head}>\n"
        yield from said
        yield "    </testcase>\n"

    def _said(self) -> Iterable[str]:
        body = "\n".join(map(_line, self._failing))
        if self.failures:
            first = self.failures[0]
            texts = [f"{self._where(f)}: {f.kind.value}: {f.detail}" for f in self.failures]
            text = "\n".join([*texts, body]).rstrip()
            yield f"      <error type={_attribute(first.kind.value)} message={_attribute(first.detail)}>"
            yield f"{_text(text)}</error>\n"
        elif self._failing:
            codes = ", ".join(sorted({finding.code for finding in self._failing}))
            by = Counter(finding.severity for finding in self._failing)
            counted = ", ".join(summary.plural(by[s], s.label) for s in sorted(by, reverse=True))
            yield f"      <failure type={_attribute(codes)} message={_attribute(f'{counted}: {codes}')}>"
            yield f"{_text(body)}</failure>\n"
        if self._milder:
            yield f"      <system-out>{_text(chr(10).join(map(_line, self._milder)))}</system-out>\n"

    def _where(self, failure: Failure) -> str:
        return self.path if failure.line is None else f"{self.path}:{failure.line}"


def _line(finding: Finding) -> str:
    where = summary.place(finding.path, finding.cell, finding.span.line, finding.span.column)
    out = [f"{where}: {finding.severity.label}[{finding.code}] {finding.name}: {finding.message}"]
    for other in finding.related:
        place = summary.place(other.path, other.cell, other.span.line, other.span.column)
        out.append(f"    {place}: {other.message}")
    return "\n".join(out)


def _text(text: str) -> str:
    return escape(_ILLEGAL.sub("\ufffd", text))


def _attribute(text: str) -> str:
    return f'"{escape(_ILLEGAL.sub(chr(0xFFFD), text), _QUOTED)}"'
