"""Code frames: the lines around a finding with its span underlined, and the other places that make the case."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from memlint.lint.model import Finding, Span
from memlint.reporters import Lines
from memlint.reporters.styled import STYLES, Line, wrap

_BEFORE, _AFTER = 2, 1
_TAB = "    "
_GUTTER = "blue"
_ELLIPSIS = "…"


@dataclass(frozen=True, slots=True)
class Mark:
    """A span to underline, and what to say about it."""

    span: Span
    sign: str
    style: str
    label: str = ""


def frame(finding: Finding, lines: Lines, width: int) -> list[Line]:
    """The frame of a finding, or nothing where its code cannot be had."""
    code = lines(finding.path, finding.cell)
    if not 1 <= finding.span.line <= len(code):
        return []
    style = STYLES[finding.severity]
    marks = [Mark(finding.span, "^", style)]
    marks += [
        Mark(other.span, "-", "cyan", other.message)
        for other in finding.related
        if (other.path, other.cell) == (finding.path, finding.cell) and 1 <= other.span.line <= len(code)
    ]
    numbers = _numbers(finding.span.line, marks, len(code))
    gutter = len(str(numbers[-1]))
    room = max(width - gutter - 3, 20)
    out: list[Line] = [_margin(gutter)]
    previous = numbers[0] - 1
    for number in numbers:
        if number > previous + 1:
            out.append([("." * min(gutter + 1, 3), _GUTTER)])
        previous = number
        here = sorted((mark for mark in marks if mark.span.line == number), key=lambda mark: mark.span.column)
        shown = _Shown(code[number - 1], here, room)
        out.append([(f"{number:>{gutter}} | ", _GUTTER), (shown.text, "")])
        for mark in here:
            out += [[(" " * gutter + " | ", _GUTTER), *line] for line in shown.underline(mark)]
    out.append(_margin(gutter))
    return out


def _margin(gutter: int) -> Line:
    return [(" " * gutter + " |", _GUTTER)]


def _numbers(line: int, marks: Sequence[Mark], last: int) -> list[int]:
    """The numbers of the lines to show: a few around the finding, and each marked line."""
    around = range(max(line - _BEFORE, 1), min(line + _AFTER, last) + 1)
    return sorted({*around, *(mark.span.line for mark in marks)})


class _Shown:
    """One line of code as it is shown: tabs widened, cut to the room with the first mark in sight."""

    def __init__(self, code: str, marks: Sequence[Mark], room: int) -> None:
        self._code = code
        self._room = room
        text = _visible(code)
        self._skipped = 0
        if cells(text) > room:
            text = self._cut(text, marks)
        self.text = text

    def _cut(self, text: str, marks: Sequence[Mark]) -> str:
        at = self._column(marks[0].span.column) if marks else 0
        if at > self._room * 2 // 3:
            self._skipped = at - self._room // 3
            text = _ELLIPSIS + _drop(text, self._skipped + 1)
        kept = _take(text, self._room)
        return kept if kept == text else _take(text, self._room - 1) + _ELLIPSIS

    def underline(self, mark: Mark) -> list[Line]:
        """The line of signs under a span, with its label behind or below."""
        start = self._column(mark.span.column)
        single = mark.span.line == mark.span.end_line
        end = self._column(mark.span.end_column if single else len(self._code.rstrip()) + 1)
        left = min(max(start - self._skipped, 0), self._room - 1)
        length = max(min(end - self._skipped, self._room) - left, 1)
        signs: Line = [(" " * left, ""), (mark.sign * length, mark.style)]
        if not mark.label:
            return [signs]
        if left + length + 1 + cells(mark.label) <= self._room:
            return [[*signs, (f" {mark.label}", mark.style)]]
        indent = " " * min(left, self._room // 4)
        return [signs, *([(line, mark.style)] for line in wrap(mark.label, self._room, indent, indent))]

    def _column(self, column: int) -> int:
        """How many cells stand before a column of the code."""
        return cells(_visible(self._code[: column - 1]))


def _visible(code: str) -> str:
    """Code with tabs as spaces and without control characters, which could garble a terminal."""
    return "".join(_TAB if c == "\t" else c if c.isprintable() or c == " " else "\ufffd" for c in code)


def cells(text: str) -> int:
    """How many columns of a terminal `text` takes."""
    if text.isascii():
        return len(text)
    return sum(_cell(c) for c in text)


def _cell(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _take(text: str, width: int) -> str:
    """As much of the start of `text` as fits."""
    used = 0
    for index, character in enumerate(text):
        used += _cell(character)
        if used > width:
            return text[:index]
    return text


def _drop(text: str, width: int) -> str:
    """`text` without its first `width` columns; half a wide character becomes a space."""
    used = 0
    for index, character in enumerate(text):
        if used >= width:
            return " " * (used - width) + text[index:]
        used += _cell(character)
    return ""
