"""ML403: `volatile=True`, which does nothing."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst
from packaging.version import Version

from memlint.lint.flow import Flow
from memlint.lint.flow.facts import CallEvent, FunctionFlow, Guard
from memlint.lint.flow.index import FunctionInfo
from memlint.lint.flow.syntax import names_in
from memlint.lint.flow.values import Grad, Kind, Source, known_constant
from memlint.lint.imports import dotted
from memlint.lint.model import Severity
from memlint.rules.base import Draft, Rule
from memlint.rules.statements import assignments, body_of

#: the version that dropped it and brought torch.no_grad (PyTorch 0.4.0 migration guide)
NO_GRAD_SINCE = Version("0.4")
_VARIABLE = "torch.autograd.Variable"


class VolatileIgnored(Rule):
    """`volatile=True` has done nothing since torch 0.4: what relies on it builds graphs.

    A volatile Variable switched autograd off for all that was computed from it. Since torch 0.4 the argument only
    warns ("volatile was removed and now has no effect", still so in torch 2.13), and so does the assignment
    `x.volatile = True`: the forward pass that follows records its graph and keeps every activation for as long as
    the output lives, at the price of a training step's memory for an evaluation.

    It is harmless under `torch.no_grad()`, in a branch that only an old torch takes, and for targets and other values
    that no model is applied to; memlint is silent or notes it there.

    Drop it, and put the evaluation under `with torch.no_grad():`.
    """

    code, name, severity = "ML403", "volatile-ignored", Severity.WARNING
    triggers = ("volatile",)
    bad = """
from torch.autograd import Variable

def validate(loader, model, criterion):
    model.eval()
    total = 0
    for inputs, targets in loader:
        inputs = Variable(inputs, volatile=True)
        total += criterion(model(inputs), targets).item()
    return total
"""
    good = """
import torch

def validate(loader, model, criterion):
    model.eval()
    total = 0
    with torch.no_grad():
        for inputs, targets in loader:
            total += criterion(model(inputs), targets).item()
    return total
"""

    def check(self, flow: Flow) -> Iterator[Draft]:
        capped = flow.settings.capped_torch if flow.settings is not None else None
        if capped is not None and capped <= NO_GRAD_SINCE:
            return  # a project for the versions that knew it
        for function in flow.functions:
            for event in function.calls.values():
                yield from self.call(flow, function, event)
            yield from self.attribute(flow, function)

    def call(self, flow: Flow, function: FunctionFlow, event: CallEvent) -> Iterator[Draft]:
        """`Variable(x, volatile=True)`, or a function of the file that passes it on."""
        for arg, value in zip(event.node.args, event.args, strict=False):
            if arg.keyword is None or arg.keyword.value != "volatile" or known_constant(value) is not True:
                continue
            if event.qualified == _VARIABLE or (event.target is not None and passes_on(flow, event.target)):
                yield from self.draft(flow, function, arg, event)

    def attribute(self, flow: Flow, function: FunctionFlow) -> Iterator[Draft]:
        """`x.volatile = True`."""
        if function.info is None:
            return
        for statement in body_of(function.info):
            for target, value in assignments(statement):
                if isinstance(target, cst.Attribute) and target.attr.value == "volatile" and dotted(value) == "True":
                    held = function.seen.get(id(target.value))
                    if held is not None and held.kind in (Kind.UNKNOWN, Kind.TENSOR) and dotted(target.value) != "self":
                        yield from self.draft(flow, function, statement, None)

    def draft(self, flow: Flow, function: FunctionFlow, node: cst.CSTNode, event: CallEvent | None) -> Iterator[Draft]:
        """The finding: a warning where a model is applied with a graph after all."""
        if event is not None and (event.grad is Grad.OFF or any(old_torch(frame) for frame in event.path)):
            return
        if flow.grad_of(function) is Grad.OFF:
            return
        oldest = flow.settings.oldest_torch if flow.settings is not None else None
        ancient = oldest is not None and oldest.release < (0, 4)
        after = event.order if event is not None else 0
        model = next((call for call in function.calls.values() if call.order > after and builds_graph(call)), None)
        if model is not None and not ancient:
            yield self.finding(
                node,
                f"volatile has no effect since torch 0.4, so `{model.text}(...)` builds its graph here and keeps every "
                f"activation of the forward pass. Put it under torch.no_grad().",
                related=[(model.node, "the graph is made here")],
            )
        else:
            yield self.finding(
                node,
                "volatile has no effect since torch 0.4: if a forward pass relies on it to build no graph, that needs "
                "torch.no_grad() now. Drop it.",
                severity=Severity.NOTE,
            )


def builds_graph(call: CallEvent) -> bool:
    """Whether a call applies a model while autograd records."""
    if call.grad is not Grad.ON:
        return False
    return any(origin.site.source is Source.MODEL_CALL for origin in call.result.objects)


def old_torch(frame: object) -> bool:
    """Whether a branch is decided by a version."""
    if not isinstance(frame, Guard):
        return False
    return any(
        "version" in name.lower() or "torch" in name.lower() or name == "hasattr" for name in names_in(frame.test)
    )


def passes_on(flow: Flow, info: FunctionInfo) -> bool:
    """Whether a function hands its `volatile` on to torch's Variable."""
    if info.flow is None:
        return False
    for event in info.flow.calls.values():
        if event.qualified == _VARIABLE:
            for arg in event.node.args:
                if arg.keyword is not None and arg.keyword.value == "volatile" and dotted(arg.value) == "volatile":
                    return True
    return False
