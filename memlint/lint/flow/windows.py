"""Accumulation windows: several backwards to one optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from memlint.lint.flow import knowledge as know
from memlint.lint.flow.facts import (
    Backward,
    BackwardKind,
    FunctionFlow,
    Guard,
    Loop,
    OptimizerCall,
    OptimizerEvent,
    Path,
    Region,
    inside,
    runs_in,
)
from memlint.lint.flow.frameworks import runs_each_batch
from memlint.lint.flow.index import small_statements, statements
from memlint.lint.flow.syntax import holds, modulus, names_in

#: backwards whose framework neither divides the loss nor defers the step by itself
_BY_HAND = (BackwardKind.TENSOR, BackwardKind.AUTOGRAD, BackwardKind.MANUAL, BackwardKind.FABRIC)


@dataclass(frozen=True, slots=True)
class Window:
    """A backward that runs several times before the optimizer steps.

    loop: the loop of the micro-steps; None where a framework calls the function once a micro-step.
    guard: the `if` under which the step runs, where it is in the same loop.
    named: whether the code calls the number of micro-steps by a name that says so. length: its expression.
    """

    backward: Backward
    step: OptimizerEvent
    loop: Loop | None
    guard: Guard | None
    named: bool
    length: cst.BaseExpression | None


def windows(function: FunctionFlow, *, divided: bool = False) -> Iterator[Window]:
    """The accumulation windows of a function.

    divided: also those of an Accelerator, which may divide the loss by itself.
    """
    kinds = (*_BY_HAND, BackwardKind.ACCELERATOR) if divided else _BY_HAND
    steps = [event for event in function.optimizer if event.what is OptimizerCall.STEP]
    driven = runs_each_batch(function)
    for backward in function.backwards:
        if backward.kind not in kinds or not steps:
            continue
        window = None
        if backward.loops:
            loop = backward.loops[-1]
            window = _guarded(backward, loop, steps) or _nested(backward, loop, steps)
        elif driven:
            window = _guarded(backward, None, steps)
        if window is not None:
            yield window


def _guarded(backward: Backward, loop: Loop | None, steps: list[OptimizerEvent]) -> Window | None:
    """`if (i + 1) % n == 0: optimizer.step()` in the loop of the backward (None: that of a framework)."""
    guard: Guard | None = None
    chosen: OptimizerEvent | None = None
    mine = {id(frame.node) for frame in inside(backward.path, loop) if isinstance(frame, Guard)}
    for step in steps:
        if not runs_in(step.path, loop):
            continue
        found = periodic_guard(inside(step.path, loop))
        if found is None:
            return None  # some optimizer steps in every iteration
        if id(found.node) in mine:
            return None  # the backward waits as well
        guard, chosen = found, step
    if guard is None or chosen is None:
        return None
    length = modulus(guard.test)
    named = any(know.WINDOW_NAME.search(name) for name in names_in(guard.test))
    return Window(backward, chosen, loop, guard, named, length)


def _nested(backward: Backward, loop: Loop, steps: list[OptimizerEvent]) -> Window | None:
    """`for micro in range(n): backward()`, then `optimizer.step()` after that loop."""
    if any(loop in step.path for step in steps):
        return None
    after = [step for step in steps if step.order > backward.order and step.loops == backward.loops[:-1]]
    if not after or not isinstance(loop.node, cst.For) or tries_again(loop.node, backward):
        return None
    named = any(know.WINDOW_NAME.search(name) for name in names_in(loop.node.iter))
    length: cst.BaseExpression | None = None
    if isinstance(loop.node.iter, cst.Call) and loop.count and loop.node.iter.args:
        length = loop.node.iter.args[-1].value
    return Window(backward, after[0], loop, None, named, length)


def tries_again(loop: cst.For, backward: Backward) -> bool:
    """Whether a loop may end by a `break` behind the backward: it tries until something fits."""
    small = list(small_statements(statements(loop.body), but=(cst.For, cst.While)))
    ran = next((i for i, each in enumerate(small) if holds(each, backward.node)), len(small))
    return any(isinstance(each, cst.Break) for each in small[ran:])


def deferred(path: Path) -> bool:
    """Whether a place is inside `with accelerator.accumulate(...)`.

    There the optimizers of accelerate act at the end of a window only (1.15.0, optimizer.py, `AcceleratedOptimizer`).
    """
    return any(
        isinstance(frame, Region) and any(manager.endswith(".accumulate") for manager in frame.managers)
        for frame in path
    )


def periodic_guard(path: Path) -> Guard | None:
    """The innermost branch on a path that is taken once in a while."""
    for frame in reversed(path):
        if isinstance(frame, Guard) and frame.periodic:
            return frame
    return None
