"""Jupyter notebooks: the code cells as one Python module, and edits written back without touching anything else.

A notebook is JSON that people keep under version control, so a fix must leave every byte outside the changed lines as
it is. The JSON is therefore read twice: once for its meaning, and once, where a fix is written, for the places of the
strings that hold the source.

Cells are numbered from 1 among the code cells, which is how people count what they run.
"""

from __future__ import annotations

import ast
import bisect
import codecs
import json
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

from memlint.lint.model import Edit, Span
from memlint.lint.textedit import NEWLINE, apply

#: cell magics whose body is Python that runs as if they were not there; all others hide their cell
_TRANSPARENT = frozenset({"capture", "debug", "prun", "time", "timeit", "memit", "mprun", "lprun", "notify"})
_CELL_MAGIC = re.compile(r"\s*%%(\w+)")
#: `%magic`, `!command`, `?help`, `,call a b` and such at the start of a line
_LINE_MAGIC = re.compile(r"(?P<indent>[ \t]*)(?:[%!][^=]|\?|(?:%?[\w.*]+)\?{1,2}\s*$)")
#: `name = !command`, `name = %magic`
_ASSIGNED = re.compile(r"(?P<indent>[ \t]*)(?P<target>[A-Za-z_][\w.,\s]*)=\s*(?:!|%(?=[A-Za-z]))")
#: a cell without any of this holds no magic
_SUSPECT = re.compile(r"^[ \t]*[%!?]|\?[ \t]*$|=[ \t]*[%!]", re.MULTILINE)
_BRACKET_OR_STRING = re.compile(r'[{}\[\]"]')
_SPACE = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r"[^\s,\]}]+")


class NotebookError(Exception):
    """The file is no notebook that can be read."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A code cell: its source, what is parsed of it, and its first line in the joined module."""

    source: str
    code: str
    first: int

    @property
    def lines(self) -> int:
        """How many lines of the joined module are its own."""
        return self.code.count("\n")

    def check(self, span: Span) -> None:
        """Raise ValueError where an edit (relative to the cell) would leave the cell or touch what is not Python."""
        if not self.source:
            raise ValueError("an edit touches an empty cell")
        if span.end_line > self.lines:
            raise ValueError("an edit crosses the border of its cell")
        was, now = NEWLINE.split(self.source), self.code.split("\n")
        touched = slice(span.line - 1, span.end_line)
        if was[touched] != now[touched]:
            raise ValueError("an edit touches a line that is not Python")


class Notebook:
    """A notebook's code cells. `code` is the joined module; every cell ends with a newline there."""

    def __init__(self, data: bytes) -> None:
        """Raises NotebookError where `data` is no notebook. A notebook in another language has no cells."""
        try:
            self._text = data.decode("utf-8-sig")
            self._content = json.loads(self._text)
        except UnicodeDecodeError as error:
            raise NotebookError(f"not utf-8: {error.reason}") from error
        except (ValueError, RecursionError) as error:
            raise NotebookError(f"not JSON: {error}") from error
        self._bom = data.startswith(b"\xef\xbb\xbf")
        self.cells: list[Cell] = []
        first = 1
        for source in _code_sources(self._content):
            cell = Cell(source, _python(source), first)
            self.cells.append(cell)
            first += cell.lines
        self.code = "".join(cell.code for cell in self.cells)
        self._firsts = [cell.first for cell in self.cells]

    def cell_at(self, line: int) -> tuple[int, int]:
        """The number of the cell that holds a line of the joined module, and the cell's first line there."""
        index = max(bisect.bisect_right(self._firsts, line) - 1, 0)
        return index + 1, self._firsts[index]

    def lines_of_cell(self, line: int) -> range:
        """The lines of the joined module that belong to the cell which holds `line`."""
        number, first = self.cell_at(line)
        end = self._firsts[number] if number < len(self._firsts) else sys.maxsize
        return range(first, end)

    def edited(self, edits: Iterable[Edit]) -> bytes:
        """The notebook's bytes after edits to the joined module.

        Raises ValueError where an edit crosses the border of its cell or touches what is not Python.
        """
        by_cell: dict[int, list[Edit]] = {}
        for edit in edits:
            number, first = self.cell_at(edit.span.line)
            span = replace(edit.span, line=edit.span.line - first + 1, end_line=edit.span.end_line - first + 1)
            self.cells[number - 1].check(span)
            by_cell.setdefault(number - 1, []).append(replace(edit, span=span))
        places = _places(self._text)
        out, done = [], 0
        for index, cell_edits in sorted(by_cell.items()):
            place = places[index]
            out += [self._text[done : place.start], place.rewritten(apply(place.source, cell_edits, "\n"))]
            done = place.end
        text = "".join([*out, self._text[done:]])
        return (codecs.BOM_UTF8 if self._bom else b"") + text.encode("utf-8")


def _code_sources(content: Any) -> Iterator[str]:
    """The sources of the code cells, where the notebook is one of Python."""
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        raise NotebookError("not a notebook of format 4: it has no list of cells")
    metadata = content.get("metadata")
    if _language(metadata if isinstance(metadata, dict) else {}) != "python":
        return
    for cell in content["cells"]:
        if _is_code(cell):
            source = cell.get("source", "")
            yield source if isinstance(source, str) else "".join(source)


def _is_code(cell: Any) -> bool:
    if not isinstance(cell, dict) or cell.get("cell_type") != "code":
        return False
    source = cell.get("source", "")
    if not isinstance(source, str) and not (isinstance(source, list) and all(isinstance(s, str) for s in source)):
        raise NotebookError("a code cell's source is neither text nor a list of lines")
    return True


def _language(metadata: dict[str, Any]) -> str:
    for section, key in (("language_info", "name"), ("kernelspec", "language")):
        found = metadata.get(section)
        if isinstance(found, dict) and isinstance(found.get(key), str):
            return str(found[key]).lower()
    return "python"


def _python(source: str) -> str:
    """What a cell says to Python, line for line, ending in a newline."""
    code = NEWLINE.sub("\n", source)
    magic = _CELL_MAGIC.match(code)
    if magic is not None and magic.group(1) not in _TRANSPARENT:
        return "\n" * (code.count("\n") + 1)
    if _SUSPECT.search(code) is not None and not _is_python(code):
        code = "\n".join(_blanked(code.split("\n")))
    return code + "\n"


def _is_python(code: str) -> bool:
    """Whether a cell that looks like magic is not: `%` may start a line of a string or of an expression."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True


def _blanked(lines: list[str]) -> Iterator[str]:
    """Lines with `pass` in place of what only IPython understands: a block must not become empty."""
    continued = False
    for line in lines:
        assigned = _ASSIGNED.match(line)
        magic = _LINE_MAGIC.match(line)
        if continued:
            yield ""
        elif assigned is not None:
            yield f"{assigned['indent']}{assigned['target']}= None"
        elif magic is not None:
            yield f"{magic['indent']}pass"
        else:
            yield line
            continue
        continued = line.endswith("\\")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a cell's source stands in the JSON text: a string, or a list of strings (text range, value)."""

    text: str
    start: int
    end: int
    items: tuple[tuple[int, int, str], ...]
    is_list: bool

    @property
    def source(self) -> str:
        """The source as it was."""
        return "".join(value for _, _, value in self.items)

    def rewritten(self, new: str) -> str:
        """The JSON for a new source; the items that stay are copied as they stand."""
        ascii_only = self.text.isascii()
        if not self.is_list:
            return json.dumps(new, ensure_ascii=ascii_only)
        lines = [part for part in re.split(r"(?<=\n)", new) if part]
        head = _common(lines, [value for _, _, value in self.items])
        tail = _common(lines[head:][::-1], [value for _, _, value in self.items[head:]][::-1])
        kept = [self.text[start:end] for start, end, _ in self.items]
        middle = [json.dumps(line, ensure_ascii=ascii_only) for line in lines[head : len(lines) - tail]]
        items = kept[:head] + middle + kept[len(kept) - tail :]
        opening = self.text[self.start : self.items[0][0]]
        closing = self.text[self.items[-1][1] : self.end]
        between = "," + opening[1:] if len(self.items) == 1 else self.text[self.items[0][1] : self.items[1][0]]
        return opening + between.join(items) + closing


def _common(left: list[str], right: list[str]) -> int:
    """How many items the lists have in common at their start."""
    for count, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return count
    return min(len(left), len(right))


def _places(text: str) -> list[_Place]:
    """Where the sources of the code cells stand, in the order of `_code_sources`. `text` is known to be valid."""
    found = []
    for key, start in _members(text, _skip_space(text, 0)):
        if key == "cells":
            found = [_place(text, cell) for cell in _items(text, start)]
    return [place for place in found if place is not None]


def _place(text: str, cell: int) -> _Place | None:
    members = dict(_members(text, cell)) if text[cell] == "{" else {}
    kind = members.get("cell_type")
    if kind is None or text[kind] != '"' or scanstring(text, kind + 1)[0] != "code":
        return None
    start = members.get("source")
    if start is None:
        return _Place(text, cell, cell, (), False)
    starts = [start] if text[start] == '"' else list(_items(text, start))
    items = []
    for item in starts:
        value, end = scanstring(text, item + 1)
        items.append((item, end, value))
    return _Place(text, start, _skip_value(text, start), tuple(items), text[start] == "[")


def _members(text: str, at: int) -> Iterator[tuple[str, int]]:
    """The keys of the object at `at`, each with the place of its value."""
    at = _skip_space(text, at + 1)
    while text[at] != "}":
        key, at = scanstring(text, at + 1)
        at = _skip_space(text, _skip_space(text, at) + 1)
        yield key, at
        at = _next(text, at)


def _items(text: str, at: int) -> Iterator[int]:
    """The places of the items of the array at `at`."""
    at = _skip_space(text, at + 1)
    while text[at] != "]":
        yield at
        at = _next(text, at)


def _next(text: str, at: int) -> int:
    """Past the value at `at` and the comma behind it."""
    at = _skip_space(text, _skip_value(text, at))
    return _skip_space(text, at + 1) if text[at] == "," else at


def _skip_value(text: str, at: int) -> int:
    if text[at] == '"':
        return _string_end(text, at + 1)
    if text[at] not in "{[":
        scalar = _SCALAR.match(text, at)
        assert scalar is not None
        return scalar.end()
    depth = 0
    while True:
        bracket = _BRACKET_OR_STRING.search(text, at)
        assert bracket is not None
        at = bracket.end()
        if bracket.group() == '"':
            at = _string_end(text, at)
        else:
            depth += 1 if bracket.group() in "{[" else -1
            if depth == 0:
                return at


def _string_end(text: str, at: int) -> int:
    end: int = scanstring(text, at)[1]
    return end


def _skip_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    assert space is not None
    return space.end()
