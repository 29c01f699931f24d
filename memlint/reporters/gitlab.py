"""The report for GitLab's Code Quality, which shows what a merge request adds and what it mends.

GitLab compares the fingerprints of two reports, so a finding that only moved is none that is new.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from memlint.lint.model import Failure, Finding, Report, Severity
from memlint.reporters import View

#: of info, minor, major, critical, blocker
_SEVERITIES = {Severity.ERROR: "critical", Severity.WARNING: "minor", Severity.NOTE: "info"}
_UNJUDGED = "blocker"


def render(report: Report, view: View) -> str:
    """`report` as a list of Code Quality issues."""
    issues = [_finding(finding) for finding in report.findings] + [_failure(f) for f in report.all_failures]
    return json.dumps(issues, indent=2) + "\n"


def _finding(finding: Finding) -> dict[str, Any]:
    span, cell = finding.span, finding.cell
    where = "" if cell is None else f"cell {cell}, line {span.line}: "
    # the lines of a cell are not those of the file
    begin, end = (span.line, span.end_line) if cell is None else (1, 1)
    return _issue(
        finding.code,
        f"{finding.code} {finding.name}: {where}{finding.message}",
        _SEVERITIES[finding.severity],
        finding.fingerprint or _hash(finding.code, finding.path, str(cell), str(span), finding.message),
        (finding.path, begin, end),
    )


def _failure(failure: Failure) -> dict[str, Any]:
    line = 1 if failure.line is None or failure.path.endswith(".ipynb") else failure.line
    return _issue(
        failure.kind.value,
        f"memlint cannot check this file: {failure.kind.value}: {failure.detail}",
        _UNJUDGED,
        _hash(failure.path, failure.kind.value, failure.detail),
        (failure.path, line, line),
    )


def _issue(
    check: str, description: str, severity: str, fingerprint: str, place: tuple[str, int, int]
) -> dict[str, Any]:
    path, begin, end = place
    return {
        "type": "issue",
        "check_name": check,
        "description": description,
        "categories": ["Bug Risk"],
        "severity": severity,
        "fingerprint": fingerprint,
        "location": {"path": path, "lines": {"begin": begin, "end": end}},
    }


def _hash(*parts: str) -> str:
    text = "\0".join(parts).encode("utf-8", "backslashreplace")
    return hashlib.blake2b(text, digest_size=16).hexdigest()
