"""Walks over statements, for rules whose question is about the shape of the code rather than about values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import libcst as cst

from memlint.lint.flow.index import FunctionInfo, blocks, statements


def flat(body: Sequence[cst.CSTNode]) -> Iterator[cst.CSTNode]:
    """All statements below `body` in the order of the text, simple ones unpacked; not those of nested definitions."""
    for statement in body:
        if isinstance(statement, cst.SimpleStatementLine):
            yield from statement.body
        elif isinstance(statement, (cst.FunctionDef, cst.ClassDef)):
            yield statement
        else:
            yield statement
            for block in blocks(statement):
                yield from flat(block)


def body_of(info: FunctionInfo) -> list[cst.CSTNode]:
    """All statements of a function; a lambda's expression as one statement."""
    if isinstance(info.node, cst.Lambda):
        return [cst.Expr(info.node.body)]
    return list(flat(statements(info.node.body)))


def assignments(statement: cst.CSTNode) -> Iterator[tuple[cst.BaseExpression, cst.BaseExpression]]:
    """The (target, value) pairs of an assignment; `a, b = x, y` gives two."""
    if isinstance(statement, cst.Assign):
        for target in statement.targets:
            yield from paired(target.target, statement.value)
    elif isinstance(statement, cst.AnnAssign) and statement.value is not None:
        yield statement.target, statement.value


def paired(
    target: cst.BaseExpression, value: cst.BaseExpression
) -> Iterator[tuple[cst.BaseExpression, cst.BaseExpression]]:
    """A target and its value; tuples are taken apart where both sides are displays."""
    if isinstance(target, (cst.Tuple, cst.List)) and isinstance(value, (cst.Tuple, cst.List)):
        if len(target.elements) == len(value.elements):
            for left, right in zip(target.elements, value.elements, strict=True):
                yield from paired(left.value, right.value)
            return
    yield target, value


def bound_names(target: cst.BaseExpression) -> Iterator[str]:
    """The names that binding `target` binds."""
    if isinstance(target, cst.Name):
        yield target.value
    elif isinstance(target, (cst.Tuple, cst.List)):
        for element in target.elements:
            yield from bound_names(element.value)


def parts(node: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """What a value holds by reference: itself, or the elements of the displays, `list(...)` and branches that it is."""
    if isinstance(node, (cst.Tuple, cst.List, cst.Set)):
        for element in node.elements:
            yield from parts(element.value)
    elif isinstance(node, cst.Dict):
        for entry in node.elements:
            yield from parts(entry.value)
    elif isinstance(node, cst.IfExp):
        yield from parts(node.body)
        yield from parts(node.orelse)
    elif (
        isinstance(node, cst.Call) and isinstance(node.func, cst.Name) and node.func.value in ("tuple", "list", "dict")
    ):
        for arg in node.args:
            yield from parts(arg.value)
    else:
        yield node
