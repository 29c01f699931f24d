"""What reports look like."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlint.lint.model import (
    Edit,
    Failure,
    FailureKind,
    FileResult,
    Finding,
    Fix,
    Related,
    Report,
    Severity,
    Span,
)
from memlint.reporters import FORMATS, View, render
from memlint.reporters.frames import cells, frame

CODE = """\
import torch

def train(model, loader):
    total = 0
    for x in loader:
        loss = model(x)
        # a line
        # another
        # and another
        total += loss
    return total
"""
FIX = Fix("add .detach()", (Edit(Span(10, 22, 10, 22), ".detach()"),), safe=True)
MADE = Related("the graph is made here", "train.py", Span(6, 16, 6, 24))
ELSEWHERE = Related("it is called here", "main.py", Span(3, 5, 3, 9))
ERROR = Finding(
    "ML101",
    "accumulated-graph",
    Severity.ERROR,
    "`total` keeps the graph of every iteration.",
    "train.py",
    Span(10, 18, 10, 22),
    fix=FIX,
    related=(MADE, ELSEWHERE),
)
UNSAFE = replace(ERROR, code="ML401", name="evaluation", severity=Severity.WARNING, fix=replace(FIX, safe=False))
NOTE = replace(ERROR, code="ML203", name="zeroing", severity=Severity.NOTE, message="Look.", fix=None, related=())
CELL = replace(NOTE, path="n.ipynb", cell=3, span=Span(2, 1, 2, 4), severity=Severity.WARNING)
FAILURE = Failure("broken.py", FailureKind.SYNTAX, "invalid\nsyntax", 7)


def lines(path: str, cell: int | None) -> list[str]:
    return {"train.py": CODE.split("\n"), "n.ipynb": ["x", "bad"]}.get(path, [])


def report(*findings: Finding, failures: tuple[Failure, ...] = (), suppressed: int = 0, fixed: int = 0) -> Report:
    paths = sorted({f.path for f in findings} | {"train.py"})
    results = [FileResult(path, tuple(f for f in findings if f.path == path)) for path in paths]
    results[0] = replace(results[0], suppressed=suppressed, fixed=fixed)
    return Report((*results, FileResult("broken.py", failures=failures)) if failures else tuple(results))


def text(*findings: Finding, name: str = "text", **view: object) -> str:
    return render(name, report(*findings), View(**{"width": 80, "lines": lines, **view}))  # type: ignore[arg-type]


def test_text() -> None:
    assert text(ERROR) == (
        """\
error[ML101] accumulated-graph: `total` keeps the graph of every iteration.
  --> train.py:10:18
   |
 6 |         loss = model(x)
   |                -------- the graph is made here
...
 8 |         # another
 9 |         # and another
10 |         total += loss
   |                  ^^^^
11 |     return total
   |
  = main.py:3:5: it is called here
  = fix: add .detach() (--fix)

Found 1 error (1 file checked).
Fixable: 1 with --fix.
"""
    )


def test_text_of_all_kinds() -> None:
    made = report(ERROR, UNSAFE, NOTE, NOTE, CELL, failures=(FAILURE,), suppressed=2, fixed=3)
    said = render("text", made, View(width=80)).splitlines()
    assert "note[ML203] zeroing: 2 places, the first train.py:10" in said
    assert "cannot check broken.py:7: syntax: invalid syntax" in said
    assert "  --> n.ipynb:cell 3:2:1" in said
    assert said[-5:] == [
        "",
        "Fixed 3 findings.",
        "Found 1 error, 2 warnings, 2 notes (3 files checked, 2 suppressed) (--show-notes shows the notes).",
        "Fixable: 1 with --fix, 1 more with --fix --unsafe-fixes.",
        "1 failure (see above).",
    ]


def test_clean() -> None:
    assert render("text", report(suppressed=1), View()) == "All checks passed (1 file checked, 1 suppressed).\n"
    assert render("text", Report(), View()) == ""


def test_notes_are_shown_on_demand() -> None:
    assert "note[ML203] zeroing: Look.\n  --> train.py:10:18\n" in text(NOTE, show_notes=True)
    assert "--show-notes" not in text(NOTE, show_notes=True)


def test_without_code_the_related_places_are_still_told() -> None:
    said = text(ERROR, lines=lambda path, cell: [])
    assert "|" not in said
    assert "  = train.py:6:16: the graph is made here\n  = main.py:3:5: it is called here\n" in said


def test_concise() -> None:
    assert text(ERROR, UNSAFE, NOTE, CELL, name="concise").splitlines()[:4] == [
        "n.ipynb:cell 3:2:1: warning[ML203] Look.",
        "train.py:10:18: error[ML101] [*] `total` keeps the graph of every iteration.",
        "train.py:10:18: warning[ML401] `total` keeps the graph of every iteration.",
        "note[ML203] zeroing: train.py:10",
    ]
    assert "warning[ML401] [*]" in text(UNSAFE, name="concise", unsafe_fixes=True)


@pytest.mark.parametrize("name", ["text", "concise"])
def test_statistics(name: str) -> None:
    said = render(name, report(*[NOTE] * 12, ERROR, UNSAFE, failures=(FAILURE,)), View(statistics=True)).splitlines()
    assert said[:3] == [
        "12  ML203  note    zeroing",
        " 1  ML101  error   accumulated-graph",
        " 1  ML401  warning evaluation",
    ]
    assert "cannot check broken.py:7: syntax: invalid syntax" in said


def test_json() -> None:
    made = report(ERROR, NOTE, CELL, failures=(FAILURE,), suppressed=1, fixed=2)
    content = json.loads(render("json", made, View()))
    assert content["version"] == 1
    assert content["findings"][1] == {
        "code": "ML101",
        "name": "accumulated-graph",
        "severity": "error",
        "message": "`total` keeps the graph of every iteration.",
        "path": "train.py",
        "line": 10,
        "column": 18,
        "end_line": 10,
        "end_column": 22,
        "cell": None,
        "fixable": True,
        "fix": {
            "label": "add .detach()",
            "safe": True,
            "edits": [{"line": 10, "column": 22, "end_line": 10, "end_column": 22, "text": ".detach()"}],
        },
        "related": [
            {
                "message": "the graph is made here",
                "path": "train.py",
                "line": 6,
                "column": 16,
                "end_line": 6,
                "end_column": 24,
                "cell": None,
            },
            {
                "message": "it is called here",
                "path": "main.py",
                "line": 3,
                "column": 5,
                "end_line": 3,
                "end_column": 9,
                "cell": None,
            },
        ],
    }
    assert (content["findings"][0]["cell"], content["findings"][0]["fix"]) == (3, None)
    assert content["failures"] == [{"path": "broken.py", "kind": "syntax", "detail": "invalid\nsyntax", "line": 7}]
    assert content["summary"] == {
        "files": 3,
        "errors": 1,
        "warnings": 1,
        "notes": 1,
        "failures": 1,
        "suppressed": 1,
        "fixed": 2,
        "codes": {"ML101": 1, "ML203": 2},
    }


# -- frames ------------------------------------------------------------------------------------------------------------


def framed(code: str, span: Span, width: int = 60, related: tuple[Related, ...] = ()) -> list[str]:
    finding = replace(ERROR, span=span, related=related)
    made = frame(finding, lambda path, cell: code.split("\n"), width)
    return ["".join(piece for piece, _ in line).rstrip() for line in made]


def test_tabs_are_widened_under_the_marks_too() -> None:
    assert framed("\tx = a\tbad", Span(1, 8, 1, 11))[1:3] == ["1 |     x = a    bad", "  |              ^^^"]


def test_wide_and_combining_characters() -> None:
    assert framed("'表e\u0301', bad", Span(1, 8, 1, 11))[1:3] == ["1 | '表e\u0301', bad", "  |        ^^^"]


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert framed("x = '\x1b[31m\x07'", Span(1, 1, 1, 2))[1] == "1 | x = '\ufffd[31m\ufffd'"


def test_long_lines_are_cut_around_the_mark() -> None:
    code = "x = " + " + ".join(f"a{n}" for n in range(200)) + " + bad + " + " + ".join(f"b{n}" for n in range(200))
    _, line, marks, _ = framed(code, Span(1, code.index("bad") + 1, 1, code.index("bad") + 4))
    assert len(line) <= 60
    assert line[4] == line[-1] == "…"
    assert line[marks.index("^") :].startswith("bad")
    assert marks.count("^") == 3


def test_a_span_of_several_lines_is_marked_to_the_end_of_its_first() -> None:
    assert framed("f(a,\n  b)", Span(1, 1, 2, 5))[1:3] == ["1 | f(a,", "  | ^^^^"]


def test_two_marks_on_a_line_each_get_their_own() -> None:
    related = (Related("made here", "train.py", Span(1, 12, 1, 16)),)
    assert framed("total += f(loss)", Span(1, 1, 1, 6), related=related)[1:4] == [
        "1 | total += f(loss)",
        "  | ^^^^^",
        "  |            ---- made here",
    ]


def test_a_label_without_room_goes_below() -> None:
    related = (Related("a longer story about this place here", "train.py", Span(1, 25, 1, 29)),)
    shown = framed(" " * 24 + "loss\nx", Span(2, 1, 2, 2), width=44, related=related)
    assert shown[2].strip(" |") == "----"
    assert " ".join(line.strip(" |") for line in shown[3:5]).startswith("a longer story about this place here")
    assert max(map(len, shown)) <= 44


@given(
    st.lists(st.text(alphabet="ab \t表\u0301\x1b", max_size=90), min_size=1, max_size=6),
    st.integers(1, 8),
    st.integers(1, 99),
    st.integers(0, 60),
    st.integers(20, 90),
)
def test_no_frame_is_wider_than_the_terminal(code: list[str], line: int, column: int, length: int, width: int) -> None:
    shown = framed("\n".join(code), Span(line, column, line, column + length), width)
    assert bool(shown) == (line <= len(code))
    assert all(cells(row) <= max(width, 24) for row in shown)


@pytest.mark.parametrize("width", [20, 40, 60, 100])
def test_messages_are_wrapped(width: int) -> None:
    long = replace(ERROR, message="word " * 60, related=(), fix=None)
    said = text(long, width=width, lines=lambda path, cell: [])
    assert all(len(line) <= max(width, 33) for line in said.splitlines()[:-3])


# -- colours -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_colours_change_no_text(name: str) -> None:
    plain, coloured = text(ERROR, NOTE, CELL, name=name), text(ERROR, NOTE, CELL, name=name, colour=True)
    assert "\x1b" not in plain
    stripped = [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", coloured).splitlines()]
    assert stripped == plain.splitlines()
    assert ("\x1b" in coloured) == (name != "json")


def test_plain_output_does_not_import_rich() -> None:
    code = (
        "import sys; from memlint.lint.model import *; from memlint.reporters import *\n"
        "f = Finding('ML1', 'n', Severity.NOTE, 'm', 'a.py', Span(1, 1, 1, 2))\n"
        "for name in FORMATS: render(name, Report((FileResult('a.py', (f,)),)), View(show_notes=True))\n"
        "print('rich' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert run.stdout == "False\n"
