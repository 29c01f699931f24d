"""One file as the rules see it: text, syntax tree, comments, and the way back to the file's own coordinates.

What is parsed is not always what lies on the disk. Newlines are made uniform, a form feed before the code of a line is
dropped (libcst drops it from its tree, too), and of a notebook the code cells are joined, with what only IPython
understands blanked out. Lines always correspond one to one, so `place` needs no more than a shift.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tokenize import detect_encoding
from typing import TYPE_CHECKING

from memlint.lint import notebook
from memlint.lint.model import Edit, FailureKind, Finding, Fix, Span
from memlint.lint.textedit import NEWLINE, apply

if TYPE_CHECKING:
    import libcst as cst

_FORM_FEEDS = re.compile(r"^([ \t]*)\f[ \t\f]*(?=[^\s])", re.MULTILINE)
_DIRECTIVE_WORD = re.compile(rb"memlint|noqa", re.IGNORECASE)


class SourceError(Exception):
    """The file cannot be judged; `kind`, `detail` and `line` are those of the failure."""

    def __init__(self, kind: FailureKind, detail: str, line: int | None = None) -> None:
        super().__init__(detail)
        self.kind, self.detail, self.line = kind, detail, line


@dataclass(frozen=True, slots=True)
class Comment:
    """A COMMENT token.

    `covers` are the lines of the statement that the comment ends, or, for a comment on a line of its own or between
    brackets, its own line.
    """

    text: str
    span: Span
    covers: tuple[int, int]


class SourceFile:
    """A Python file or a notebook, decoded at once and parsed when first asked for."""

    def __init__(self, path: str, data: bytes) -> None:
        """Raises SourceError (unreadable) where `data` cannot be decoded."""
        self.path = path
        self.data = data
        self.notebook: notebook.Notebook | None = None
        if path.endswith(".ipynb"):
            try:
                self.notebook = notebook.Notebook(data)
            except notebook.NotebookError as error:
                raise SourceError(FailureKind.UNREADABLE, str(error)) from error
            self.encoding, self.newline = "utf-8", "\n"
            #: the decoded file with its own newlines (of a notebook: the joined code)
            self.raw = self.notebook.code
        else:
            self.encoding, self.raw = decode(data)
            found = NEWLINE.search(self.raw)
            self.newline = found.group() if found else "\n"
        #: the text that is parsed
        self.text, self._shifts = _uniform(self.raw)

    @functools.cached_property
    def module(self) -> cst.Module:
        """The syntax tree of `text`. Raises SourceError (syntax)."""
        import libcst as cst

        from memlint.lint.parsing import parse

        try:
            return parse(self.text)
        except cst.ParserSyntaxError as error:
            raise self._syntax_error(error) from None

    @property
    def is_faithful(self) -> bool:
        """Whether the tree gives the text back, so that places in it can be trusted to the column.

        libcst loses a space here and there (1.9: the one in `except OSError :`).
        """
        try:
            return self.module.code == self.text
        except RecursionError:
            return False

    @property
    def may_hold_directives(self) -> bool:
        """Whether a word that starts a directive occurs."""
        return _DIRECTIVE_WORD.search(self.data) is not None

    def comments(self) -> tuple[Comment, ...]:
        """All comments, in order; none where no directive can be among them, since that is all they are read for."""
        return tuple(_comments(self.module)) if self.may_hold_directives else ()

    def place(self, span: Span) -> tuple[int | None, Span]:
        """A span of `text` in the file's own coordinates: the cell (of a notebook), and the lines in it."""
        if self.notebook is not None:
            cell, first = self.notebook.cell_at(span.line)
            return cell, replace(span, line=span.line - first + 1, end_line=span.end_line - first + 1)
        return None, self.to_raw(span)

    def to_raw(self, span: Span) -> Span:
        """A span of `text` as one of `raw`."""
        if not self._shifts:
            return span
        start, end = self._shifts.get(span.line, 0), self._shifts.get(span.end_line, 0)
        return replace(span, column=span.column + start, end_column=span.end_column + end)

    def placed(self, finding: Finding) -> Finding:
        """A finding, and all that belongs to it, in the file's own coordinates."""
        cell, span = self.place(finding.span)
        related = []
        for other in finding.related:
            other_cell, other_span = self.place(other.span)
            related.append(replace(other, cell=other_cell, span=other_span))
        fix = finding.fix
        if fix is not None:
            fix = Fix(fix.label, tuple(replace(e, span=self.place(e.span)[1]) for e in fix.edits), fix.safe)
        return replace(finding, cell=cell, span=span, related=tuple(related), fix=fix)

    def edited(self, edits: Iterable[Edit]) -> bytes:
        """The file's bytes after edits to `text`: same encoding, BOM and newlines; of a notebook only lines change.

        Raises ValueError where the edits overlap or reach out of the text or a cell.
        """
        if self.notebook is not None:
            return self.notebook.edited(edits)
        raw = apply(self.raw, (replace(edit, span=self.to_raw(edit.span)) for edit in edits), self.newline)
        return raw.encode(self.encoding)

    def _syntax_error(self, error: cst.ParserSyntaxError) -> SourceError:
        """What is wrong, in CPython's words where it agrees: libcst lists every token that it would have taken."""
        import ast
        import warnings

        line, detail = error.raw_line, ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ast.parse(self.text)
        except SyntaxError as python:
            line, detail = python.lineno or line, python.msg
        except (ValueError, RecursionError, MemoryError):
            pass
        if not detail:
            detail = " ".join(error.message.removeprefix("parser error: ").split())
            at = re.match(r"error at (\d+):\d+: ", detail)
            if at:
                line, detail = int(at.group(1)), detail[at.end() :]
            detail = detail if len(detail) < 100 else detail[:97] + "..."
        if self.notebook is not None and self.notebook.cells:
            cell, first = self.notebook.cell_at(line)
            return SourceError(FailureKind.SYNTAX, f"cell {cell}: {detail}", line - first + 1)
        return SourceError(FailureKind.SYNTAX, detail, line)


def decode(data: bytes) -> tuple[str, str]:
    """(encoding, text) of a Python file as PEP 263 says. Raises SourceError (unreadable)."""
    try:
        encoding = detect_encoding(io.BytesIO(data).readline)[0]
    except SyntaxError as error:
        # an encoding that does not exist, or a BOM that disagrees with the comment; or, where nothing is declared,
        # bytes that are not UTF-8, of which the decoder below says more
        if not error.msg.startswith("invalid or missing encoding declaration"):
            raise SourceError(FailureKind.UNREADABLE, error.msg) from error
        encoding = "utf-8"
    try:
        return encoding, data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SourceError(FailureKind.UNREADABLE, f"not {error.encoding}: {error.reason}", line) from error
    except (LookupError, ValueError) as error:  # a codec that gives no text
        raise SourceError(FailureKind.UNREADABLE, str(error)) from error


def _uniform(raw: str) -> tuple[str, dict[int, int]]:
    """`raw` with "\\n" as its only newline and without form feeds before code; the columns dropped, by line."""
    text = NEWLINE.sub("\n", raw) if "\r" in raw else raw
    shifts: dict[int, int] = {}
    if "\f" in text:

        def drop(match: re.Match[str]) -> str:
            # whitespace before a form feed counts for nothing: CPython starts the column anew
            kept = match.group().rpartition("\f")[2]
            shifts[text.count("\n", 0, match.start()) + 1] = len(match.group()) - len(kept)
            return kept

        text = _FORM_FEEDS.sub(drop, text)
    return text, shifts


def _comments(module: cst.Module) -> Iterator[Comment]:
    """Comments with the lines they speak for."""
    import libcst as cst

    from memlint.lint.locate import spans

    @functools.cache
    def fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(kind))

    clauses = (cst.Else, cst.ExceptHandler, cst.ExceptStarHandler, cst.Finally, cst.MatchCase)
    statements = (cst.SimpleStatementLine, cst.BaseCompoundStatement, *clauses)
    found: list[tuple[cst.Comment, cst.CSTNode | None]] = []
    # (node, the statement that a comment at its end belongs to)
    pending: list[tuple[cst.CSTNode, cst.CSTNode | None]] = [(module, None)]
    while pending:
        node, statement = pending.pop()
        if isinstance(node, cst.Comment):
            found.append((node, statement))
        elif isinstance(node, statements):
            statement = node
        elif isinstance(node, (cst.EmptyLine, cst.ParenthesizedWhitespace)):
            statement = None
        for name in fields(type(node)):
            value = getattr(node, name)
            if isinstance(value, cst.CSTNode):
                pending.append((value, statement))
            elif isinstance(value, (tuple, list)):
                pending += [(item, statement) for item in value if isinstance(item, cst.CSTNode)]
    places = spans(module, [node for pair in found for node in pair if node is not None])
    comments = []
    for comment, statement in found:
        span = places[id(comment)]
        first = places[id(statement)].line if statement is not None else span.line
        comments.append(Comment(comment.value, span, (min(first, span.line), span.line)))
    yield from sorted(comments, key=lambda comment: comment.span)


class SourceLines:
    """Lines of files for code frames, read when they are asked for. `given` holds what is not on the disk."""

    def __init__(self, given: Mapping[str, bytes]) -> None:
        self._given = given
        self._path = ""
        self._source: SourceFile | None = None

    def __call__(self, path: str, cell: int | None) -> list[str]:
        """The lines of a file or of a notebook's cell, without their ends; none where they cannot be read."""
        if path != self._path:
            self._path, self._source = path, self._read(path)
        if self._source is None:
            return []
        if cell is None or self._source.notebook is None:
            return NEWLINE.split(self._source.raw)
        cells = self._source.notebook.cells
        return NEWLINE.split(cells[cell - 1].source) if cell <= len(cells) else []

    def _read(self, path: str) -> SourceFile | None:
        try:
            data = self._given[path] if path in self._given else Path(path).read_bytes()
            return SourceFile(path, data)
        except (OSError, SourceError):
            return None
