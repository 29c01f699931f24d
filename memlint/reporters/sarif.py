"""The report as SARIF 2.1.0, for code scanning and IDEs.

A finding in a notebook has no region of the file to point at, since its lines are those of a cell. Its location is the
file's first line, a place that every consumer takes, and the cell stands beside it: as a logical location of the kind
"cell", and with the line and columns in the location's properties.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

import memlint
from memlint.lint.model import Edit, Failure, Finding, Fix, Related, Report, Severity, Span
from memlint.reporters import RuleText, View

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
#: under this name the fingerprints of fingerprint.py; a change of how they are made needs a new one
FINGERPRINT = "memlint/v1"
_ROOT = "%SRCROOT%"
#: `[text](target)` is a link in a SARIF message, and `losses[i](x)` looks like one
_LINK = re.compile(r"\[([^\[\]]*)\](?=\()")
_DRIVE = re.compile(r"[A-Za-z]:/")


def render(report: Report, view: View) -> str:
    """`report` as a SARIF log with one run."""
    known = {rule.code: rule for rule in view.rules}
    names = {finding.code: finding.name for finding in report.findings}
    rules = [_rule(known.get(code), code, name) for code, name in sorted(names.items())]
    index = {rule["id"]: number for number, rule in enumerate(rules)}
    failures = report.all_failures
    driver: dict[str, Any] = {"name": "memlint", "version": memlint.__version__, "rules": rules}
    if failures:
        kinds = sorted({failure.kind.value for failure in failures})
        driver["notifications"] = [{"id": kind, "shortDescription": {"text": _kind(kind)}} for kind in kinds]
    run = {
        "tool": {"driver": driver},
        "invocations": [_invocation(report, failures, view)],
        # says what the addresses are relative to, and not where that is: a report tells nothing about the machine
        "originalUriBaseIds": {_ROOT: {"description": {"text": "The folder in which memlint ran."}}},
        "columnKind": "unicodeCodePoints",
        "results": [_result(finding, index[finding.code], view) for finding in report.findings],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


# -- the run ---------------------------------------------------------------------------------------------------------


def _rule(rule: RuleText | None, code: str, name: str) -> dict[str, Any]:
    if rule is None:
        return {"id": code, "name": name}
    return {
        "id": rule.code,
        "name": rule.name,
        "shortDescription": {"text": rule.summary},
        "fullDescription": {"text": rule.description},
        "help": {"text": rule.text, "markdown": rule.markdown},
        "defaultConfiguration": {"level": rule.severity.label},
        "properties": {"tags": ["pytorch", "memory"]},
    }


def _invocation(report: Report, failures: Sequence[Failure], view: View) -> dict[str, Any]:
    made: dict[str, Any] = {"executionSuccessful": not failures}
    if view.exit_code is not None:
        made["exitCode"] = view.exit_code
    made["toolExecutionNotifications"] = [_notification(failure) for failure in failures]
    if report.stale:
        text = f"The baseline allows {report.stale} findings that are not there any more."
        made["toolConfigurationNotifications"] = [{"level": "note", "message": {"text": text}}]
    made["properties"] = {
        "files": len(report.results),
        "suppressed": sum(result.suppressed for result in report.results),
        "fixed": sum(result.fixed for result in report.results),
        "baselined": report.baselined,
    }
    return made


def _notification(failure: Failure) -> dict[str, Any]:
    physical: dict[str, Any] = {"artifactLocation": _artifact(failure.path)}
    if failure.line is not None and not failure.path.endswith(".ipynb"):
        physical["region"] = {"startLine": failure.line}
    return {
        "descriptor": {"id": failure.kind.value},
        "level": "error",
        "message": {"text": _message(failure.detail)},
        "locations": [{"physicalLocation": physical}],
    }


def _kind(kind: str) -> str:
    return f"A file, or a part of it, was not judged: {kind}."


# -- results ---------------------------------------------------------------------------------------------------------


def _result(finding: Finding, index: int, view: View) -> dict[str, Any]:
    made: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": _level(finding.severity),
        "message": {"text": _message(finding.message)},
        "locations": [_location(finding.path, finding.cell, finding.span, _snippet(finding, view))],
    }
    if finding.related:
        made["relatedLocations"] = [_related(number, other) for number, other in enumerate(finding.related, 1)]
    if finding.fingerprint:
        made["partialFingerprints"] = {FINGERPRINT: finding.fingerprint}
    # what a fix changes in a cell is no region of the file
    if finding.fix is not None and finding.cell is None:
        made["fixes"] = [_fix(finding.fix, finding.path)]
    return made


def _level(severity: Severity) -> str:
    return severity.label  # SARIF's words are ours


def _related(number: int, other: Related) -> dict[str, Any]:
    place = _location(other.path, other.cell, other.span)
    return {"id": number, **place, "message": {"text": _message(other.message)}}


def _location(path: str, cell: int | None, span: Span, snippet: str | None = None) -> dict[str, Any]:
    if cell is not None:
        return {
            "physicalLocation": {"artifactLocation": _artifact(path), "region": {"startLine": 1}},
            "logicalLocations": [{"name": f"cell {cell}", "kind": "cell"}],
            "properties": {"cell": cell, **_region(span)},
        }
    region: dict[str, Any] = _region(span)
    if snippet:
        region["snippet"] = {"text": snippet}
    return {"physicalLocation": {"artifactLocation": _artifact(path), "region": region}}


def _region(span: Span) -> dict[str, int]:
    return {
        "startLine": span.line,
        "startColumn": span.column,
        "endLine": span.end_line,
        "endColumn": span.end_column,
    }


def _snippet(finding: Finding, view: View) -> str | None:
    """The code of a finding's region."""
    span = finding.span
    code = view.lines(finding.path, finding.cell)[span.line - 1 : span.end_line]
    if finding.cell is not None or len(code) != span.end_line - span.line + 1:
        return None
    code = [*code[:-1], code[-1][: span.end_column - 1]]
    code[0] = code[0][span.column - 1 :]
    return _sound("\n".join(code))


def _fix(fix: Fix, path: str) -> dict[str, Any]:
    change = {"artifactLocation": _artifact(path), "replacements": _replacements(fix.edits)}
    return {
        "description": {"text": _message(fix.label)},
        "artifactChanges": [change],
        "properties": {"safe": fix.safe},
    }


def _replacements(edits: Iterable[Edit]) -> list[dict[str, Any]]:
    return [{"deletedRegion": _region(edit.span), "insertedContent": {"text": edit.text}} for edit in edits]


# -- text ------------------------------------------------------------------------------------------------------------


def _artifact(path: str) -> dict[str, str]:
    """Where a file is: relative to the root, or a file address where it lies elsewhere."""
    address = quote(path.encode("utf-8", "surrogateescape"), safe="/")
    if _DRIVE.match(path):
        return {"uri": f"file:///{path[:2]}{address[address.index('/') :]}"}
    if path.startswith("/"):
        return {"uri": f"file://{address}"}
    return {"uri": address, "uriBaseId": _ROOT}


def _message(text: str) -> str:
    return _LINK.sub(r"\\[\1\\]", _sound(text))


def _sound(text: str) -> str:
    """Text without halves of surrogate pairs, which are no Unicode and which strict readers of JSON refuse."""
    return text.encode("utf-8", "backslashreplace").decode()
