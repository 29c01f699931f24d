"""Notebooks: which code they hold, where it stands, and fixes that touch nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlint.lint.model import Edit, FailureKind, Span
from memlint.lint.source import SourceError, SourceFile
from tests.fakes import notebook


def read(text: str) -> SourceFile:
    return SourceFile("n.ipynb", text.encode())


def code(*cells: str) -> str:
    return read(notebook(*cells)).text


def test_code_cells_are_joined_in_order() -> None:
    file = read(notebook("a = 1\nb = 2", "", "c = 3\n", "d = 4"))
    assert file.text == "a = 1\nb = 2\n\nc = 3\n\nd = 4\n"
    assert [file.place(Span(line, 1, line, 2)) for line in (1, 2, 4, 6)] == [
        (1, Span(1, 1, 1, 2)),
        (1, Span(2, 1, 2, 2)),
        (3, Span(1, 1, 1, 2)),
        (4, Span(1, 1, 1, 2)),
    ]


def test_source_may_be_text_or_a_list_of_lines() -> None:
    content = json.loads(notebook("a = 1\nb = 2"))
    content["cells"][1]["source"] = "a = 1\nb = 2"
    assert read(json.dumps(content)).text == code("a = 1\nb = 2")


@pytest.mark.parametrize("language", ["R", "julia", "c++17"])
def test_other_languages_have_no_code(language: str) -> None:
    assert read(notebook("x <- 1", language=language)).text == ""


@pytest.mark.parametrize(
    ("cell", "python"),
    [
        ("%matplotlib inline\nx = 1", "pass\nx = 1\n"),
        ("!pip install torch\nx = 1", "pass\nx = 1\n"),
        ("!pip install \\\n  torch\nx = 1", "pass\n\nx = 1\n"),
        ("?torch.no_grad", "pass\n"),
        ("torch.no_grad?", "pass\n"),
        ("torch.no_grad??  ", "pass\n"),
        ("if x:\n    !ls\nelse:\n    %cd y", "if x:\n    pass\nelse:\n    pass\n"),
        ("files = !ls\nt = %timeit -o f()", "files = None\nt = None\n"),
        ("%%time\nx = 1", "pass\nx = 1\n"),
        ("%%capture out\nx = 1", "pass\nx = 1\n"),
        ("%%bash\nls | wc\nfoo", "\n\n\n"),
        ("\n%%html\n<p>", "\n\n\n"),
        ("x = 7 \\\n% 2", "x = 7 \\\n% 2\n"),
        ("x = (7\n% 2)", "x = (7\n% 2)\n"),
        ('s = """\n%s\n!\n"""', 's = """\n%s\n!\n"""\n'),
        ("await f()", "await f()\n"),
        ("x != y", "x != y\n"),
        ("%time y = f(x)", "pass\n"),
        ("# what?", "# what?\n"),
    ],
)
def test_magic_is_blanked_and_lines_stay(cell: str, python: str) -> None:
    assert code(cell) == python
    assert code(cell).count("\n") == cell.count("\n") + 1
    assert read(notebook(cell)).module.code == python


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[1]", "no list of cells"),
        ("{}", "no list of cells"),
        ('{"worksheets": []}', "no list of cells"),
        ('{"cells": [{"cell_type": "code", "source": 3}]}', "neither text nor a list"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_what_is_no_notebook_is_unreadable(text: str, detail: str) -> None:
    with pytest.raises(SourceError) as caught:
        read(text)
    assert caught.value.kind is FailureKind.UNREADABLE
    assert detail in caught.value.detail


@pytest.mark.parametrize("text", ['{"cells": []}', '{"cells": [3, {"cell_type": "code"}, {"cell_type": "raw"}]}'])
def test_odd_notebooks_are_read(text: str) -> None:
    assert read(text).text.strip() == ""


def test_a_syntax_error_names_its_cell() -> None:
    with pytest.raises(SourceError) as caught:
        _ = read(notebook("x = 1\ny = 2", "z = 3\ndef f(:\n    pass")).module
    assert (caught.value.kind, caught.value.line) == (FailureKind.SYNTAX, 2)
    assert caught.value.detail == "cell 2: invalid syntax"


@pytest.mark.parametrize(
    "style", [{}, {"indent": None}, {"indent": 4}, {"indent": "\t"}, {"ensure_ascii": True}, {"separators": (",", ":")}]
)
def test_an_edit_changes_its_line_and_no_other_byte(style: dict[str, Any]) -> None:
    before = notebook('s = "é ☃"\nx = bad\n', "y = 1\nz = bad + bad\nlast", "bad", **style)
    file = read(before)
    edits = [
        Edit(Span(2, 5, 2, 8), "good"),
        Edit(Span(5, 5, 5, 8), "good"),
        Edit(Span(5, 11, 5, 14), 'f("é")'),
        Edit(Span(7, 1, 7, 4), "good"),
    ]
    quoted = json.dumps('z = good + f("é")\n', ensure_ascii=style.get("ensure_ascii", False))
    expected = before.replace("x = bad", "x = good").replace('"z = bad + bad\\n"', quoted).replace('"bad"', '"good"')
    assert file.edited(edits).decode() == expected


def test_inserted_and_deleted_lines_keep_the_form_of_the_list() -> None:
    file = read(notebook("a\nb\nc", "d"))
    edits = [Edit(Span(1, 1, 1, 1), "new\n"), Edit(Span(2, 1, 3, 1), ""), Edit(Span(4, 2, 4, 2), "\ne\nf")]
    assert file.edited(edits).decode() == notebook("new\na\nc", "d\ne\nf")


def test_a_source_that_is_text_stays_text() -> None:
    content = json.loads(notebook("a = 1\nb = 2"))
    content["cells"][1]["source"] = "a = 1\nb = 2"
    after = json.loads(read(json.dumps(content)).edited([Edit(Span(2, 1, 2, 2), "c")]))
    assert after["cells"][1]["source"] == "a = 1\nc = 2"


def test_a_bom_stays() -> None:
    data = b"\xef\xbb\xbf" + notebook("a").encode()
    assert SourceFile("n.ipynb", data).edited([Edit(Span(1, 1, 1, 2), "b")]) == data.replace(b'"a"', b'"b"')


@pytest.mark.parametrize(
    "span", [Span(1, 1, 3, 2), Span(2, 1, 2, 3), Span(1, 1, 2, 1)], ids=["other cell", "magic", "into magic"]
)
def test_edits_that_leave_the_python_of_a_cell_are_refused(span: Span) -> None:
    with pytest.raises(ValueError, match="an edit"):
        read(notebook("a\n%magic", "b")).edited([Edit(span, "")])


@given(st.lists(st.lists(st.sampled_from(["x = 1\n", 's = "\\"é{"\n', "\n", "# ]}\n", "y"]), max_size=4), max_size=4))
def test_any_cell_can_be_found_again(cells: list[list[str]]) -> None:
    cells = [["".join(lines)] if "y" in lines[:-1] else lines for lines in cells]
    text = notebook(*cells)
    file = read(text)
    assert file.notebook is not None
    for cell in filter(lambda cell: cell.source, file.notebook.cells):
        edited = file.edited([Edit(Span(cell.first, 1, cell.first, 1), "new = 1;")])
        after = read(edited.decode())
        assert after.notebook is not None
        assert after.notebook.cells[file.notebook.cells.index(cell)].source == "new = 1;" + cell.source
