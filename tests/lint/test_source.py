"""Decoding, parsing, comments, and the way back to a file's own coordinates."""

from __future__ import annotations

import codecs
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlint.lint.locate import spans
from memlint.lint.model import Edit, FailureKind, Span
from memlint.lint.source import SourceError, SourceFile, SourceLines
from memlint.lint.textedit import NEWLINE, apply, split_lines
from tests.fakes import notebook


def source(text: str | bytes, path: str = "a.py") -> SourceFile:
    return SourceFile(path, text.encode() if isinstance(text, str) else text)


def error(data: bytes | str, path: str = "a.py") -> SourceError:
    with pytest.raises(SourceError) as caught:
        _ = source(data, path).module
    return caught.value


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        (b"x = 1\n", "utf-8"),
        (codecs.BOM_UTF8 + b"x = 1\n", "utf-8-sig"),
        ("# coding: latin-1\nx = 'é'\n".encode("latin-1"), "iso-8859-1"),
        ("#!/usr/bin/python\n# -*- coding: cp1251 -*-\nx = 'Я'\n".encode("cp1251"), "cp1251"),
        ("# vim: set fileencoding=shift_jis :\nx = '表'\n".encode("shift_jis"), "shift_jis"),
        ("x = 'é'\n".encode(), "utf-8"),
        (b"", "utf-8"),
        (b"\x0c\n", "utf-8"),
    ],
)
def test_encodings(data: bytes, encoding: str) -> None:
    file = source(data)
    assert file.encoding == encoding
    assert file.module.code == file.text
    end = Span(1, 1, 1, 1)
    assert file.edited([Edit(end, "")]) == data
    assert file.edited([Edit(end, "y\n")]).decode(encoding) == "y\n" + data.decode(encoding)


@pytest.mark.parametrize(
    ("data", "detail", "line"),
    [
        (b"x = '\xff'\n", "not utf-8: invalid start byte", 1),
        (b"\n\nx = '\xe9'\n", "not utf-8: invalid continuation byte", 3),
        (b"# coding: no-such-thing\n", "unknown encoding: no-such-thing", None),
        (codecs.BOM_UTF8 + b"# coding: latin-1\n", "encoding problem", None),
        (b"# coding: rot13\n", "not a text encoding", None),
        (b"\x80\x03}q\x00", "not utf-8: invalid start byte", 1),
        (codecs.BOM_UTF16 + "x = 1\n".encode("utf-16"), "not utf-8: invalid start byte", 1),
    ],
)
def test_what_cannot_be_decoded_is_unreadable(data: bytes, detail: str, line: int | None) -> None:
    caught = error(data)
    assert (caught.kind, caught.line) == (FailureKind.UNREADABLE, line)
    assert detail in caught.detail
    assert "\n" not in caught.detail


@pytest.mark.parametrize(
    ("code", "detail", "line"),
    [
        ("def f(:\n    pass\n", "invalid syntax", 1),
        ("x = 1\nprint 'a'\n", "Missing parentheses", 2),
        ("if x:\npass\n", "expected an indented block", 2),
        ("x = (\n", "'(' was never closed", 1),
        ("x = 'a\n", "unterminated string literal", 1),
        ("if x:\n\ty\n        z\n", "inconsistent use of tabs", 3),
        ("x = 1\n\0\n", "", 1),
        ("x = 1 \\", "unexpected", 1),
        ("\x1a", "", 1),
    ],
)
def test_syntax_errors_are_one_line_in_pythons_words(code: str, detail: str, line: int) -> None:
    caught = error(code)
    assert (caught.kind, caught.line) == (FailureKind.SYNTAX, line)
    assert detail in caught.detail
    assert caught.detail
    assert "\n" not in caught.detail


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_newlines_change_no_place_and_survive_edits(newline: str) -> None:
    text = newline.join(["x = 1", "", "if x:", "    y = (x +", "         2)", ""])
    file = source(text)
    places = spans(file.module, [file.module.body[1], file.module.body[1].body.body[0]])  # type: ignore[union-attr]
    assert sorted(span.line for span in places.values()) == [3, 4]
    edited = file.edited([Edit(Span(1, 1, 1, 2), "z"), Edit(Span(2, 1, 2, 1), "a\nb")])
    assert edited.decode() == newline.join(["z = 1", "a", "b", "if x:", "    y = (x +", "         2)", ""])


def test_mixed_newlines_stay_mixed() -> None:
    file = source(b"a = 1\r\nb = 2\nc = 3\r\rd = 4")
    assert [s.line for s in spans(file.module, file.module.body).values()] == [1, 2, 3, 5]
    assert file.edited([Edit(Span(3, 1, 3, 2), "cc")]) == b"a = 1\r\nb = 2\ncc = 3\r\rd = 4"


def test_what_ends_no_line_for_python_ends_none_here() -> None:
    text = "a = '\u2028 \x85'  # \x0b \x1c\nb = 2\n"
    file = source(text)
    assert [s.line for s in spans(file.module, file.module.body).values()] == [1, 2]
    assert file.edited([Edit(Span(2, 1, 2, 2), "c")]).decode() == text.replace("b", "c")


@pytest.mark.parametrize(
    ("code", "column"),
    [
        ("a\n\fb = 1\n", 2),
        ("a\n\f\fb = 1\n", 3),
        ("a\n\f\nb = 1\n", 1),
        ("if a:\n\f    b = 1\n", 6),
        ("if a:\n  \f    b = 1\n", 8),
    ],
)
def test_form_feeds(code: str, column: int) -> None:
    file = source(code)
    name: Any = file.module.body[-1]
    while hasattr(name, "body"):
        name = name.body.body[0] if hasattr(name.body, "body") else name.body[0]
    (span,) = spans(file.module, [name]).values()
    cell, placed = file.place(span)
    assert cell is None
    assert code.split("\n")[placed.line - 1][placed.column - 1] == "b"
    assert placed.column == column
    edited = file.edited([Edit(Span(span.line, span.column, span.line, span.column + 1), "long")])
    assert edited.decode() == code.replace("b", "long")


def test_comments_know_the_lines_that_they_speak_for() -> None:
    file = source(
        """\
# memlint one
x = '# memlint two'  # three
y = f(  # four
    # five
    1,
)  # six
for a in g(
    2
):  # seven
    pass  # eight
    # nine
else:  # ten
    pass
# eleven"""
    )
    assert [(c.text.split()[-1], c.covers) for c in file.comments()] == [
        ("one", (1, 1)),
        ("three", (2, 2)),
        ("four", (3, 3)),
        ("five", (4, 4)),
        ("six", (3, 6)),
        ("seven", (7, 9)),
        ("eight", (10, 10)),
        ("nine", (11, 11)),
        ("ten", (12, 12)),
        ("eleven", (14, 14)),
    ]
    assert [c.span.column for c in file.comments()][:3] == [1, 22, 9]


def test_no_comments_are_looked_for_without_a_directives_word() -> None:
    assert source("x = 1  # hello\n").comments() == ()
    assert len(source("x = 1  # NOQA\n").comments()) == 1


def test_lines_for_frames() -> None:
    lines = SourceLines({"a.py": b"a\r\nb\x0c\n", "n.ipynb": notebook("x\ny\n", "z").encode(), "bad.py": b"\xff"})
    assert lines("a.py", None) == ["a", "b\x0c", ""]
    assert lines("n.ipynb", 2) == ["z"]
    assert lines("n.ipynb", 3) == []
    assert lines("bad.py", None) == []
    assert lines("nowhere.py", None) == []


TEXTS = st.text(alphabet=st.sampled_from("ab (\n\r\f\u2028"))


@given(TEXTS)
def test_split_lines_loses_nothing(text: str) -> None:
    lines = split_lines(text)
    assert "".join(lines) == text
    assert len(lines) == len(NEWLINE.findall(text)) + (text[-1:] not in ("", "\n", "\r"))


@given(TEXTS, st.data())
def test_edits_change_what_they_name_and_nothing_else(text: str, data: st.DataObject) -> None:
    """Cut the text at random places: replacing every second piece must give just that."""
    cuts = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=6))})
    # "\r\n" is one newline: no place is between
    cuts = [cut for cut in cuts if text[cut - 1 : cut + 1] != "\r\n" or cut == 0]

    def place(offset: int) -> tuple[int, int]:
        before = text[:offset]
        ends = list(NEWLINE.finditer(before))
        return len(ends) + 1, offset - (ends[-1].end() if ends else 0) + 1

    pieces = [text[a:b] for a, b in itertools.pairwise(cuts)]
    edits, expected = [], []
    for index, piece in enumerate(pieces):
        if index % 2:
            expected.append(piece)
        else:
            expected.append("<new>")
            edits.append(Edit(Span(*place(cuts[index]), *place(cuts[index + 1])), "<new>"))
    assert apply(text, reversed(edits), "\n") == "".join(expected)


@pytest.mark.parametrize(
    "edits",
    [
        [Edit(Span(1, 1, 1, 3), ""), Edit(Span(1, 2, 1, 4), "")],
        [Edit(Span(9, 1, 9, 1), "")],
        [Edit(Span(1, 0, 1, 1), "")],
        [Edit(Span(1, 3, 1, 1), "")],
        [Edit(Span(2, 9, 2, 9), "")],
    ],
)
def test_edits_that_make_no_sense_are_refused(edits: list[Edit]) -> None:
    with pytest.raises(ValueError, match=r"overlap|no line|no column"):
        apply("abcd\nef", edits, "\n")
