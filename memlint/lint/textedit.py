"""Edits to text by line and column."""

from __future__ import annotations

import re
from collections.abc import Iterable

from memlint.lint.model import Edit, Span

#: what ends a line for Python; not all that str.splitlines takes for an end
NEWLINE = re.compile(r"\r\n|\r|\n")
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


def split_lines(text: str) -> list[str]:
    """The lines of `text` with their ends."""
    return _LINE.findall(text)


class Lines:
    """Where the lines of a text start."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.starts = [0, *(match.end() for match in NEWLINE.finditer(text))]

    def offset(self, line: int, column: int) -> int:
        """The index of a place (both counted from 1). Raises ValueError where the text has no such place."""
        if not 1 <= line <= len(self.starts):
            raise ValueError(f"no line {line}")
        offset = self.starts[line - 1] + column - 1
        if column < 1 or offset > len(self.text):
            raise ValueError(f"no column {column} in line {line}")
        return offset

    def range(self, span: Span) -> tuple[int, int]:
        """The indexes of a span."""
        return self.offset(span.line, span.column), self.offset(span.end_line, span.end_column)


def apply(text: str, edits: Iterable[Edit], newline: str) -> str:
    """`text` after edits that do not overlap; newlines in what they insert become `newline`.

    Of several insertions at one place the first comes first.
    """
    lines = Lines(text)
    done, out = 0, []
    for start, end, new in sorted(((*lines.range(e.span), e.text) for e in edits), key=lambda item: item[:2]):
        if start < done or end < start:
            raise ValueError("edits overlap")
        out += [text[done:start], NEWLINE.sub(newline, new)]
        done = end
    return "".join([*out, text[done:]])
