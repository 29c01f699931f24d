"""JUnit XML."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

from memlint.lint.model import FileResult, Report, Severity
from memlint.reporters import View, render
from tests.reporters.samples import NOTE, REPORT, VIEW


def suite(report: Report = REPORT, view: View = VIEW) -> ET.Element:
    suites = ET.fromstring(render("junit", report, view).encode())
    (only,) = suites
    assert {key: suites.get(key) for key in ("tests", "failures", "errors")} == {
        key: only.get(key) for key in ("tests", "failures", "errors")
    }
    return only


def test_junit() -> None:
    made = suite()
    assert (made.get("tests"), made.get("failures"), made.get("errors")) == ("6", "2", "2")
    assert [(case.get("name"), [child.tag for child in case]) for case in made] == [
        ("broken.py", ["error"]),
        ("clean.py", []),
        ("n.ipynb", ["failure"]),
        ("src/ein ß.py", ["failure"]),
        ("z.py", ["system-out"]),
        ("nowhere", ["error"]),
    ]
    failure = made[3][0]
    assert (failure.get("type"), failure.get("message")) == ("ML101, ML401", "1 error, 1 warning: ML101, ML401")
    assert failure.text == (
        "src/ein ß.py:3:10: error[ML101] accumulated-graph: 100 % of `losses[0](x)`,\nevery time.\n"
        "    main.py:3:5: made, here\n"
        "src/ein ß.py:4:1: warning[ML401] evaluation: Look <here> & \ufffd."
    )
    error = made[0][0]
    assert (error.get("type"), error.get("message")) == ("syntax", "invalid\nsyntax")
    assert error.text == "broken.py:7: syntax: invalid\nsyntax"
    assert made[2][0].text is not None
    assert "n.ipynb:cell 3:2:1" in made[2][0].text


def test_what_fails_is_what_fails_the_run() -> None:
    assert suite(view=replace(VIEW, fail_on=Severity.NOTE)).get("failures") == "3"
    strict = suite(view=replace(VIEW, fail_on=Severity.ERROR))
    assert strict.get("failures") == "1"
    assert [child.tag for child in strict[3]] == ["failure", "system-out"]


def test_what_xml_cannot_hold() -> None:
    odd = replace(NOTE, path='a"<\ud800\x00>.py', message="]]>\ufffe")
    made = suite(Report((FileResult(odd.path, (odd,)),)))
    assert made[0].get("name") == 'a"<\ufffd\ufffd>.py'
    assert made[0][0].text is not None
    assert made[0][0].text.endswith("zeroing: ]]>\ufffd")


def test_nothing() -> None:
    assert suite(Report()).get("tests") == "0"
