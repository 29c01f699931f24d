"""GitLab's Code Quality."""

from __future__ import annotations

import json

from memlint.lint.model import Report
from memlint.reporters import render
from tests.reporters.samples import REPORT, VIEW


def test_gitlab() -> None:
    issues = json.loads(render("gitlab", REPORT, VIEW))
    assert issues[1] == {
        "type": "issue",
        "check_name": "ML101",
        "description": "ML101 accumulated-graph: 100 % of `losses[0](x)`,\nevery time.",
        "categories": ["Bug Risk"],
        "severity": "critical",
        "fingerprint": "0123456789abcdef:1",
        "location": {"path": "src/ein ß.py", "lines": {"begin": 3, "end": 3}},
    }
    assert [(issue["severity"], issue["location"]["lines"]["begin"]) for issue in issues] == [
        ("minor", 1),
        ("critical", 3),
        ("minor", 4),
        ("info", 1),
        ("blocker", 1),
        ("blocker", 7),
    ]
    assert issues[0]["description"] == "ML101 accumulated-graph: cell 3, line 2: In a cell."
    assert json.loads(render("gitlab", Report(), VIEW)) == []


def test_fingerprints_differ_and_are_never_empty() -> None:
    fingerprints = [issue["fingerprint"] for issue in json.loads(render("gitlab", REPORT, VIEW))]
    assert all(fingerprints)
    assert len(set(fingerprints)) == len(fingerprints)
