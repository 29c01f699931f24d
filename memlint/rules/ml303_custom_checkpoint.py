"""ML303: recomputation written by hand, without the random state."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow.facts import CallEvent, Path
from memlint.lint.flow.index import ClassInfo, FunctionInfo
from memlint.lint.flow.syntax import names_in, walk
from memlint.lint.flow.values import Grad, Value
from memlint.lint.imports import dotted
from memlint.lint.model import Severity
from memlint.rules.base import Draft, Rule
from memlint.rules.statements import assignments, body_of

#: what a class says that handles random numbers: `fork_rng`, `get_rng_state`, `CudaRNGStatesTracker`, a generator
_RANDOM = re.compile(r"rng|generator|seed|random_?state|determinis", re.I)

#: what draws random numbers
_DRAWS = re.compile(r"dropout|drop_?path|\brandn?\b|randn?_like|bernoulli|gumbel|noise", re.I)


class CustomCheckpoint(Rule):
    """An autograd.Function re-runs a function of its forward in backward, with other random numbers.

    This is activation checkpointing written by hand. Where the function draws random numbers (dropout, drop path,
    noise), the second run draws others than the first, and the gradients belong to a network that never ran. Nothing
    fails, the loss only gets worse: measured with torch 2.13 on a dropout layer, half of the gradient stands at
    elements that the forward had dropped.

    It is right where the class saves and restores the state (`get_rng_state`, `set_rng_state`, `fork_rng`), and for a
    fixed function without randomness; memlint only speaks where the function is handed in by the caller, as an error
    where the file speaks of dropout or noise, and as a note for functions that are inverted, which draw none.

    Write `torch.utils.checkpoint.checkpoint(fn, *inputs, use_reentrant=False)`, which does all of this, or save
    `torch.get_rng_state()` and the device's state in forward and restore them under `torch.random.fork_rng` in
    backward.
    """

    code, name, severity = "ML303", "custom-checkpoint", Severity.ERROR
    triggers = (("enable_grad", "Function"), ("set_grad_enabled", "Function"))
    bad = """
import torch

class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        return None, torch.autograd.grad(y, x, grad)[0]
"""
    good = """
import torch
from torch.utils.checkpoint import checkpoint

def recompute(function, x):
    return checkpoint(function, x, use_reentrant=False)
"""

    def check(self, flow: Flow) -> Iterator[Draft]:
        for cls in flow.index.classes.values():
            if not cls.is_autograd_function:
                continue
            forward, backward = cls.methods.get("forward"), cls.methods.get("backward")
            if forward is None or backward is None or forward.flow is None or backward.flow is None:
                continue
            kept = kept_inputs(forward, cls.methods.get("setup_context"))
            first = {
                text
                for event in forward.flow.calls.values()
                if (text := of_input(forward, kept, event)) and is_returned(forward, event)
                if not seeks_a_fixed_point(forward, event)
            }
            for event in sorted(backward.flow.calls.values(), key=lambda event: event.order):
                text = of_context(backward, kept, event)
                if text and text in first and recorded(backward, event) and not handles_random(flow, cls):
                    yield from self.draft(flow, cls, backward, event)
                    break

    def draft(self, flow: Flow, cls: ClassInfo, backward: FunctionInfo, event: CallEvent) -> Iterator[Draft]:
        """The finding, as grave as what the file says of randomness."""
        assert isinstance(backward.node, cst.FunctionDef)
        if re.search(r"inver[st]", flow.text(cls.node), re.I):
            severity = Severity.NOTE  # what can be inverted draws no random numbers
        else:
            severity = self.severity if _DRAWS.search(flow.code) else Severity.WARNING
        yield self.finding(
            backward.node.name,
            f"this backward runs `{event.text}` a second time without the random state of the first: with dropout or "
            f"noise in it, the gradients are silently wrong. Save and restore the RNG state, or use "
            f"torch.utils.checkpoint.",
            severity=severity,
            related=[(event.node, "the second run")],
        )


def kept_inputs(forward: FunctionInfo, setup: FunctionInfo | None) -> dict[str, str]:
    """The inputs of a forward that its context keeps: attribute of ctx to parameter."""
    found: dict[str, str] = {}
    names = {param.name.value for param in forward.parameters}
    for info in (forward, setup):
        if info is None or not info.parameters:
            continue
        ctx = info.parameters[0].name.value
        given: dict[str, str] = {name: name for name in names}
        for statement in body_of(info):
            for target, value in assignments(statement):
                head, _, attribute = dotted(target).partition(".")
                if head == ctx and attribute and dotted(value) in given:
                    found[attribute] = given[dotted(value)]
    return found


def of_input(forward: FunctionInfo, kept: dict[str, str], event: CallEvent) -> str:
    """What a call in forward runs, in terms of its inputs: `fn`, or `block.layer` for a part of one."""
    ctx = forward.parameters[0].name.value if forward.parameters else ""
    head, _, rest = event.text.partition(".")
    if head == ctx:
        head, _, rest = rest.partition(".")
        head = kept.get(head, "")
    if head not in kept.values():
        return ""
    return f"{head}.{rest}" if rest else head


def is_returned(forward: FunctionInfo, event: CallEvent) -> bool:
    """Whether what a call gives is part of what the forward returns.

    A solver that only asks where its function is positive, and differentiates at the solution, recomputes nothing.
    """
    if isinstance(forward.node, cst.Lambda):
        return False
    tainted: set[str] = set()

    def holds(node: cst.CSTNode) -> bool:
        if node is event.node or (isinstance(node, cst.Name) and node.value in tainted):
            return True
        if isinstance(node, cst.Comparison):
            return False
        return any(holds(child) for child in node.children)

    changed = True
    while changed:
        changed = False
        for statement in body_of(forward):
            for target, value in assignments(statement):
                names = {part.value for part in walk(target) if isinstance(part, cst.Name)} - {"self", "ctx"}
                if not names <= tainted and holds(value):
                    tainted |= names
                    changed = True
    return any(node.value is not None and holds(node.value) for node, _, _ in flow_returns(forward))


def seeks_a_fixed_point(forward: FunctionInfo, event: CallEvent) -> bool:
    """`for ...: z = f(z, x)`: backward differentiates at the solution, and runs nothing again."""
    given = {name for arg in event.node.args for name in names_in(arg.value)}
    return bool(event.loops) and any(
        value is event.node and isinstance(target, cst.Name) and target.value in given
        for statement in body_of(forward)
        for target, value in assignments(statement)
    )


def flow_returns(info: FunctionInfo) -> list[tuple[cst.Return, Value, Path]]:
    """The return statements of a function that was run."""
    return list(info.flow.returns.values()) if info.flow is not None else []


def of_context(backward: FunctionInfo, kept: dict[str, str], event: CallEvent) -> str:
    """What a call in backward runs, in terms of the inputs of forward."""
    ctx = backward.parameters[0].name.value if backward.parameters else ""
    names = {f"{ctx}.{attribute}": param for attribute, param in kept.items()}
    for statement in body_of(backward):
        for target, value in assignments(statement):
            if isinstance(target, cst.Name) and dotted(value) in names:
                names[target.value] = names[dotted(value)]
    for place, param in names.items():
        if event.text == place:
            return param
        if event.text.startswith(f"{place}."):
            return f"{param}{event.text.removeprefix(place)}"
    return ""


def recorded(backward: FunctionInfo, event: CallEvent) -> bool:
    """Whether autograd records the second run."""
    if event.grad is Grad.ON:
        return True
    return any(dotted(d.func if isinstance(d, cst.Call) else d).endswith("enable_grad") for d in backward.decorators)


def handles_random(flow: Flow, cls: ClassInfo) -> bool:
    """Whether a class, or what its methods call in this file, speaks of random states."""
    nodes: dict[int, cst.CSTNode] = {id(each.node): each.node for each in cls.ancestry()}
    for method in cls.methods.values():
        for event in method.flow.calls.values() if method.flow is not None else ():
            if event.target is not None:
                nodes[id(event.target.node)] = event.target.node
    return any(_RANDOM.search(flow.text(node)) for node in nodes.values())
