"""Directives: what they silence, and what is said of those that silence nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memlint.lint.engine import check_text
from memlint.lint.model import Report
from tests.fakes import RULES, config, notebook, places


def check(code: str, path: str = "a.py", **settings: Any) -> Report:
    return check_text(code.encode(), path, config(Path.cwd(), **settings), rules=RULES)[0]


def fixed(code: str, path: str = "a.py", **settings: Any) -> str:
    return check_text(code.encode(), path, config(Path.cwd(), fix=True, **settings), rules=RULES)[1].decode()


def said(code: str, **settings: Any) -> list[tuple[int, str, str]]:
    return [(f.span.line, f.code, f.message) for f in check(code, **settings).findings]


@pytest.mark.parametrize(
    "comment",
    [
        "# memlint: ignore[ML901] why not",
        "# memlint: ignore[ML902, ML901]",
        "# memlint: ignore[ ml901 ]",
        "#memlint:ignore[ML901]",
        "# memlint: ignore",
        "# memlint: ignore because it is right",
        "# MEMLINT: IGNORE[ML901]",
        "# noqa",
        "# NOQA",
        "#noqa",
        "# noqa: ML901",
        "# noqa:ML901",
        "# noqa: E501, ML901",
        "# noqa: E501 ML901 F401",
        "# type: ignore # noqa: ML901",
        "# type: ignore[attr] # memlint: ignore[ML901] why # noqa: E501",
        "# why  # memlint: ignore[ML901]",
    ],
)
def test_what_silences(comment: str) -> None:
    report = check(f"x = bad  {comment}\n", ignore=("ML001",))
    assert places(report) == []
    assert report.results[0].suppressed == 1


@pytest.mark.parametrize(
    "comment",
    [
        "# memlint: ignore[ML902]",
        "# memlint: ignore[]",
        "# memlint ignore[ML901]",
        "# memlint: disable[ML901]",
        "# noqa: E501",
        "# noqa: ML902",
        "# see ML901",
        "# nonoqa",
    ],
)
def test_what_does_not(comment: str) -> None:
    assert places(check(f"x = bad  {comment}\n", ignore=("ML001",))) == [("a.py", 1, "ML901")]


def test_text_in_strings_is_no_comment() -> None:
    assert places(check('x = bad, "# memlint: ignore"\n')) == [("a.py", 1, "ML901")]
    assert places(check('"""\n# memlint: ignore-file[ML901]\n"""\nx = bad\n')) == [("a.py", 4, "ML901")]


def test_a_statement_of_several_lines() -> None:
    inside = "f(\n    bad,  # memlint: ignore[ML901]\n    bad,\n)\n"
    assert places(check(inside)) == [("a.py", 3, "ML901")]
    at_its_end = "f(\n    bad,\n    bad,\n)  # memlint: ignore[ML901]\nbad\n"
    assert places(check(at_its_end)) == [("a.py", 5, "ML901")]


def test_a_comment_at_a_header_speaks_for_the_header_only() -> None:
    code = "for x in f(\n    bad,\n):  # memlint: ignore[ML901]\n    bad\nelse:  # memlint: ignore[ML901]\n    bad\n"
    assert places(check(code)) == [("a.py", 4, "ML901"), ("a.py", 5, "ML001"), ("a.py", 6, "ML901")]


def test_a_comment_on_a_line_of_its_own_speaks_for_no_neighbour() -> None:
    assert places(check("# memlint: ignore[ML901]\nbad\n")) == [("a.py", 1, "ML001"), ("a.py", 2, "ML901")]


def test_a_whole_file() -> None:
    assert places(check("bad\ngrave\nbad\n# memlint: ignore-file[ML901] generated\n")) == [("a.py", 2, "ML902")]
    assert places(check("bad\ngrave\n# memlint: ignore-file\n")) == []


def test_notebook_cells() -> None:
    cells = notebook("bad\nbad  # memlint: ignore[ML901]", "x = 1  # noqa: ML901")
    report = check(cells, "n.ipynb")
    assert [(f.cell, f.span.line, f.code) for f in report.findings] == [(1, 1, "ML901"), (2, 1, "ML001")]


@pytest.mark.parametrize(
    ("comment", "message"),
    [
        ("# memlint: ignore[ML901]", "ML901 is not found here: nothing to suppress."),
        ("# noqa: ML901", "ML901 is not found here: nothing to suppress."),
        ("# noqa: E501,ML901", "ML901 is not found here: nothing to suppress."),
        ("# memlint: ignore[ML901, ML902]", "ML901 and ML902 are not found here: nothing to suppress."),
        ("# memlint: ignore", "This directive suppresses nothing."),
        ("# memlint: ignore-file[ML901]", "ML901 is not found here: nothing to suppress."),
        ("# memlint: ignore[]", "This directive names no code."),
        ("# memlint: ignore[ML909]", "memlint has no rule ML909."),
        ("# noqa: ML909", "memlint has no rule ML909."),
        (
            "# memlint: ignore[ML901, X1]",
            "memlint has no rule X1; ML901 is not found here: nothing to suppress.",
        ),
        ("# memlint: ingore[ML901]", "`memlint: ingore` is no directive: write `ignore[CODE]` or `ignore-file[CODE]`."),
    ],
)
def test_what_is_unused(comment: str, message: str) -> None:
    assert said(f"x = 1  {comment}\n") == [(1, "ML001", message)]


@pytest.mark.parametrize("comment", ["# noqa", "# noqa: E501", "# noqa: X1", "# memlint is good", "# memlint"])
def test_what_is_never_unused(comment: str) -> None:
    assert said(f"x = 1  {comment}\n") == []


def test_codes_that_were_not_looked_for_are_not_unused() -> None:
    code = "x = 1  # memlint: ignore[ML901]\ny = 1  # memlint: ignore\n"
    assert said(code, ignore=("ML901",)) == []
    assert said(code, select=("ML902",)) == []
    assert said(code, per_file_ignores=(("*.py", ("ML901",)),)) == []


def test_nothing_is_unused_where_a_rule_has_crashed() -> None:
    report = check("boom = 1  # memlint: ignore[ML904]\nx = 1  # memlint: ignore[ML901]\n")
    assert places(report) == []
    assert len(report.all_failures) == 1


def test_a_directive_can_silence_its_own_report() -> None:
    assert said("x = 1  # memlint: ignore[ML901, ML001] kept for another version\n") == []
    assert said("# memlint: ignore-file[ML001]\nx = 1  # memlint: ignore[ML901]\n") == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = 1  # memlint: ignore[ML901] why\n", "x = 1\n"),
        ("x = 1  # memlint: ignore[ML901] why", "x = 1"),
        ("x = 1  # noqa: ML901\ny\n", "x = 1\ny\n"),
        ("x = 1  # noqa: E501, ML901\n", "x = 1  # noqa: E501\n"),
        ("x = 1  # noqa: ML901, E501,F1\n", "x = 1  # noqa: E501, F1\n"),
        ("x = 1  # type: ignore # memlint: ignore[ML901] why\n", "x = 1  # type: ignore\n"),
        ("x = 1  # memlint: ignore[ML901] why # noqa: E501\n", "x = 1  # noqa: E501\n"),
        ("x = bad_  # memlint: ignore[ML902, ML901] # noqa\n", "x = bad_  # noqa\n"),
        ("# memlint: ignore-file[ML901]\nx = 1\n", "x = 1\n"),
        ("if x:\n    # memlint: ignore[ML901]\n    y\n", "if x:\n    y\n"),
        ("x = 1\n# memlint: ignore[ML901]", "x = 1\n"),
        ("x = grave  # memlint: ignore[ML901, ML902]\n", "x = grave  # memlint: ignore[ML902]\n"),
        ("x = 1\r\n# memlint: ignore[ML901]\r\ny\r\n", "x = 1\r\ny\r\n"),
        ("x = 1  # memlint: ingore[ML901]\n", "x = 1  # memlint: ingore[ML901]\n"),
        ("x = bad  # memlint: ignore[ML901]\n", "x = bad  # memlint: ignore[ML901]\n"),
    ],
)
def test_the_fix_deletes_what_is_unused_and_nothing_else(before: str, after: str) -> None:
    assert fixed(before) == after
    assert fixed(after) == after


def test_the_fix_of_a_directive_and_of_its_neighbour_go_together() -> None:
    assert fixed("x = bad  # noqa: ML902\n") == "x = good\n"


def test_a_directive_for_a_cell_of_a_notebook() -> None:
    def cell(text: str) -> dict[str, Any]:
        return {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "source": text}

    cells = [cell("bad\ngrave"), cell("x = 1\nbad\n# memlint: ignore-cell[ML901] shown on purpose\ngrave"), cell("bad")]
    text = json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    found = [(f.cell, f.span.line, f.code) for f in check(text, "n.ipynb").findings]
    assert found == [(1, 1, "ML901"), (1, 2, "ML902"), (2, 4, "ML902"), (3, 1, "ML901")]
    assert said("# memlint: ignore-cell[ML901]\nbad\n") == [
        (1, "ML001", "`memlint: ignore-cell` is for notebooks: write `ignore[CODE]` or `ignore-file[CODE]`."),
        (2, "ML901", said("bad\n")[0][2]),
    ]
