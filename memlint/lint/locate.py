"""Where nodes stand in the file.

libcst's trees carry no positions and its PositionProvider records one for every node, which costs several times the
parse. Findings are rare, so this generates the code once, with a state that only notes the nodes asked for and stops
after the last of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import libcst as cst
from libcst._nodes.internal import CodegenState

from memlint.lint.model import Span


class _Done(Exception):  # noqa: N818
    """All nodes asked for have been passed."""


class _Recorder(CodegenState):
    """A code generation state that counts lines and columns as the tokens go by."""

    def __init__(self, module: cst.Module, wanted: set[int]) -> None:
        super().__init__(default_indent=module.default_indent, default_newline=module.default_newline)
        self.wanted = wanted
        self.found: dict[int, Span] = {}
        self.line, self.column = 1, 1
        self._starts: dict[int, tuple[int, int]] = {}

    def add_token(self, value: str) -> None:
        if "\n" in value or "\r" in value:
            lines = value.replace("\r\n", "\n").replace("\r", "\n").split("\n")
            self.line += len(lines) - 1
            self.column = len(lines[-1]) + 1
        else:
            self.column += len(value)

    def add_indent_tokens(self) -> None:
        for token in self.indent_tokens:
            self.column += len(token)

    def before_codegen(self, node: cst.CSTNode) -> None:
        if id(node) in self.wanted:
            self._starts[id(node)] = (self.line, self.column)

    def after_codegen(self, node: cst.CSTNode) -> None:
        key = id(node)
        if key in self.wanted:
            start = self._starts.pop(key)
            # a syntactic position that was recorded inside is the better one
            self.found.setdefault(key, Span(*start, self.line, self.column))
            if len(self.found) == len(self.wanted):
                raise _Done

    def pop_trailing_newline(self) -> None:
        """Tokens are not kept, so there is none to remove."""

    @contextmanager
    def record_syntactic_position(self, node: cst.CSTNode, **_: Any) -> Iterator[None]:
        line, column = self.line, self.column
        yield
        if id(node) in self.wanted:
            self.found[id(node)] = Span(line, column, self.line, self.column)


def spans(module: cst.Module, nodes: Iterable[cst.CSTNode]) -> dict[int, Span]:
    """The spans of `nodes` in the code of `module`, keyed by `id(node)`.

    Compound statements get a span that reaches to the end of their last line. A node that is not part of `module`
    is absent from the answer.
    """
    wanted = {id(node) for node in nodes}
    if not wanted:
        return {}
    recorder = _Recorder(module, wanted)
    with suppress(_Done):
        module._codegen(recorder)
    return recorder.found
