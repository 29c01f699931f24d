"""The report for programs: everything, notes included, as one JSON object. Its shape is versioned."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from memlint.lint.model import Failure, Finding, Fix, Related, Report, Severity, Span
from memlint.reporters import View

VERSION = 1


def render(report: Report, view: View) -> str:
    """`report` as JSON. Keys may be added within a version; none goes or changes its meaning."""
    content = {
        "version": VERSION,
        "findings": [_finding(finding) for finding in report.findings],
        "failures": [_failure(failure) for failure in report.all_failures],
        "summary": _summary(report),
    }
    return json.dumps(content, indent=2) + "\n"


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "code": finding.code,
        "name": finding.name,
        "severity": finding.severity.label,
        "message": finding.message,
        "path": finding.path,
        **_span(finding.span),
        "cell": finding.cell,
        "fixable": finding.fix is not None,
        "fix": None if finding.fix is None else _fix(finding.fix),
        "related": [_related(other) for other in finding.related],
        **({"fingerprint": finding.fingerprint} if finding.fingerprint else {}),
    }


def _span(span: Span) -> dict[str, int]:
    return {"line": span.line, "column": span.column, "end_line": span.end_line, "end_column": span.end_column}


def _fix(fix: Fix) -> dict[str, Any]:
    edits = [{**_span(edit.span), "text": edit.text} for edit in fix.edits]
    return {"label": fix.label, "safe": fix.safe, "edits": edits}


def _related(other: Related) -> dict[str, Any]:
    return {"message": other.message, "path": other.path, **_span(other.span), "cell": other.cell}


def _failure(failure: Failure) -> dict[str, Any]:
    return {"path": failure.path, "kind": failure.kind.value, "detail": failure.detail, "line": failure.line}


def _summary(report: Report) -> dict[str, Any]:
    severities = Counter(finding.severity for finding in report.findings)
    return {
        "files": len(report.results),
        **{f"{severity.label}s": severities[severity] for severity in sorted(Severity, reverse=True)},
        "failures": len(report.all_failures),
        "suppressed": sum(result.suppressed for result in report.results),
        "fixed": sum(result.fixed for result in report.results),
        # only with a baseline, so that nobody takes "none left out" for "none there"
        **({} if report.stale is None else {"baselined": report.baselined, "stale": report.stale}),
        "codes": dict(sorted(Counter(finding.code for finding in report.findings).items())),
    }
