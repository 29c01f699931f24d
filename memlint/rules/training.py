"""Structural questions about training code that rules share: what is assigned, what a loop binds, which loop trains."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow.facts import CallEvent, FunctionFlow, Loop, OptimizerCall
from memlint.lint.flow.index import blocks, small_statements, statements
from memlint.lint.flow.syntax import nodes, place
from memlint.rules.statements import paired

#: what functions are called that run training steps
_TRAINS = re.compile(
    r"^_?(?:train|fit)(?:_|$)|(?:^|_)(?:train|fit)_?(?:one_)?(?:epoch|step|batch|loop)|^optimize_param"
)


class Assigned(NamedTuple):
    """One target of an assignment, the value that it gets, and the statement."""

    target: cst.BaseExpression
    value: cst.BaseExpression
    statement: cst.BaseSmallStatement


def body_of(node: cst.CSTNode) -> Sequence[cst.CSTNode]:
    """The statements of a function, a class, a loop or a module."""
    if isinstance(node, cst.Module):
        return node.body
    body = getattr(node, "body", None)
    return statements(body) if isinstance(body, cst.BaseSuite) else ()


def suites(body: Sequence[cst.CSTNode]) -> Iterator[Sequence[cst.CSTNode]]:
    """A block and the blocks in it, from the outside inwards; definitions are not entered."""
    yield body
    for statement in body:
        if not isinstance(statement, (cst.SimpleStatementLine, cst.FunctionDef, cst.ClassDef)):
            for block in blocks(statement):
                yield from suites(block)


def assignments(body: Sequence[cst.CSTNode]) -> Iterator[Assigned]:
    """The assignments in a block: tuples are taken apart where both sides are displays."""
    for statement in small_statements(body):
        if isinstance(statement, cst.Assign):
            for target in statement.targets:
                yield from (Assigned(*pair, statement) for pair in paired(target.target, statement.value))
        elif isinstance(statement, cst.AnnAssign) and statement.value is not None:
            yield Assigned(statement.target, statement.value, statement)


def bound_in(loop: cst.CSTNode) -> set[str]:
    """The places that a loop binds: its target, and what assignments, `for`, `with` and `:=` in it bind."""
    found: set[str] = set()
    for node in nodes(loop):
        if isinstance(node, (cst.AssignTarget, cst.AnnAssign, cst.AugAssign, cst.For, cst.CompFor, cst.NamedExpr)):
            found |= set(_places(node.target))
        elif isinstance(node, cst.AsName):
            found |= set(_places(node.name))
    return found


def _places(target: cst.CSTNode) -> Iterator[str]:
    if isinstance(target, (cst.Tuple, cst.List)):
        for element in target.elements:
            yield from _places(element.value)
    elif isinstance(target, cst.BaseExpression) and (where := place(target)):
        yield where


def mentions(node: cst.CSTNode, names: set[str]) -> bool:
    """Whether a node names one of the places (the slow and complete way)."""
    return any(isinstance(item, (cst.Name, cst.Attribute)) and place(item) in names for item in nodes(node))


def keyword(node: cst.Call, name: str, position: int | None = None) -> cst.Arg | None:
    """The argument of a call with this keyword, or at this position."""
    for where, arg in enumerate(node.args):
        if arg.keyword is not None and arg.keyword.value == name:
            return arg
        if arg.keyword is None and not arg.star and where == position:
            return arg
    return None


def starred(node: cst.Call) -> bool:
    """Whether a call has `*args` or `**kwargs`: what it is given is not known."""
    return any(arg.star for arg in node.args)


def steps_in(function: FunctionFlow, loop: Loop) -> bool:
    """Whether one iteration of the loop is one training step: a backward or an optimizer step of its own."""
    if any(event.loops[-1:] == (loop,) for event in function.backwards):
        return True
    return any(e.what is OptimizerCall.STEP and e.loops[-1:] == (loop,) for e in function.optimizer)


def trains_in(function: FunctionFlow, loop: Loop) -> bool:
    """Whether training happens inside the loop: here, in a function of this file, or in one that is called so."""
    if any(loop in event.path for event in function.backwards):
        return True
    if any(loop in event.path and event.what is OptimizerCall.STEP for event in function.optimizer):
        return True
    return any(loop in call.path and trains(call) for call in function.calls.values())


def trains(call: CallEvent) -> bool:
    """Whether a call trains a model."""
    if call.target is not None:
        summary = call.target.summary
        return summary is not None and (summary.runs_backward or summary.steps)
    return bool(call.node.args) and bool(_TRAINS.search(call.text.rsplit(".", 1)[-1]))


def event_of(flow: Flow, node: cst.BaseExpression, function: FunctionFlow) -> CallEvent | None:
    """The event of a call expression: in this function, or anywhere in the file."""
    if id(node) in function.calls:
        return function.calls[id(node)]
    for other in flow.functions:
        if id(node) in other.calls:
            return other.calls[id(node)]
    return None


def in_tests(path: str) -> bool:
    """Whether a file holds tests."""
    parts = path.replace("\\", "/").split("/")
    return parts[-1].startswith("test_") or parts[-1] == "conftest.py" or "tests" in parts[:-1]
