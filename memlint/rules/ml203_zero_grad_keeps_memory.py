"""ML203: gradients zeroed in place rather than dropped."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst
from packaging.version import Version

from memlint.lint.flow import Flow
from memlint.lint.flow import knowledge as know
from memlint.lint.flow.facts import Backward, CallEvent, FunctionFlow, OptimizerCall, OptimizerEvent
from memlint.lint.flow.syntax import names_in, walk
from memlint.lint.flow.values import Instance, Kind, Origin, Source, Value
from memlint.lint.model import Severity
from memlint.rules import wording
from memlint.rules.base import Draft, DraftFix, NodeEdit, Rule
from memlint.rules.training import in_tests, trains

#: `set_to_none=True` is the default of Optimizer.zero_grad and Module.zero_grad since this version (release notes of
#: torch 2.0; torch/optim/optimizer.py and torch/nn/modules/module.py of 2.13 say `set_to_none: bool = True`).
DEFAULT_SINCE = Version("2.0")

#: `set_to_none` exists since this version (pytorch/pytorch#42754).
ARGUMENT_SINCE = Version("1.7")
#: a captured graph adds to the gradient tensors that it saw
_CUDA_GRAPHS = re.compile(r"CUDAGraph|\bcuda\.graphs?\b|make_graphed_callables")
#: gradients that are put in place by hand stay whatever zero_grad does
_BY_HAND = re.compile(r"\.grad\s*=\s*(?!None|=)")
#: what makes one number of several; and methods of results, which have no name
_SUMS = frozenset(("", "sum", "max", "min", "mean"))


class ZeroGradKeepsMemory(Rule):
    """Gradients are set to zero rather than dropped, so their memory stays during the next forward pass.

    With `set_to_none=True` the gradients are freed until the next backward makes them anew: the peak is lower by the
    size of the parameters where it falls into the forward pass, and the optimizer need not read them. It is the
    default since torch 2.0. `set_to_none=False` keeps the old way; a bare `zero_grad()` keeps it where older versions
    of torch are supported. memlint takes the oldest supported version from `--target-torch`, the configuration or
    the project's metadata.

    Between forward and backward the call comes too late for that: the forward pass has run beside the gradients,
    whatever becomes of them (a note).

    Code that reads `.grad` after zero_grad() finds None instead of zeros: the fix is unsafe where the file reads it.
    """

    code, name, severity = "ML203", "zero-grad-keeps-memory", Severity.WARNING
    triggers = ("zero_grad", ".grad.zero_(", ".grad.data.zero_(")
    bad = """
def train(model, loader, criterion, optimizer):
    for inputs, targets in loader:
        optimizer.zero_grad(set_to_none=False)
        criterion(model(inputs), targets).backward()
        optimizer.step()
"""
    good = bad.replace("set_to_none=False", "set_to_none=True")

    def check(self, flow: Flow) -> Iterator[Draft]:
        for function in flow.functions:
            for event in function.optimizer:
                if event.what is OptimizerCall.ZERO_GRAD and is_torch(event):
                    yield from self.zero_grad(flow, event)
            for call in function.calls.values():
                if call.text.endswith((".grad.zero_", ".grad.data.zero_")):
                    yield self.finding(
                        call.node,
                        f"`{wording.short(call.text)}()` keeps the gradient's memory during the next forward pass; "
                        f"`{call.text.split('.grad')[0]}.grad = None` frees it.",
                        severity=Severity.NOTE,
                    )

    def zero_grad(self, flow: Flow, event: OptimizerEvent) -> Iterator[Draft]:
        """The finding on one `zero_grad` call."""
        where = wording.short(event.receiver_text)
        given = [arg for arg in event.node.args if arg.keyword is None or arg.keyword.value == "set_to_none"]
        if many_backwards_of_one_forward(event):
            return
        late = follows_forward(event)
        if given:
            if not isinstance(given[0].value, cst.Name) or given[0].value.value != "False":
                return
            if late:
                yield self.late(event, where)
                return
            if _CUDA_GRAPHS.search(flow.code):
                return  # what is captured adds to the gradients that were there then
            yield self.finding(
                event.node,
                f"`{where}.zero_grad(set_to_none=False)` keeps the memory of all gradients during the next forward "
                f"pass. Set them to None.",
                fix=self.fix(flow, NodeEdit(given[0].value, replace="True")),
            )
            return
        if event.node.args:
            return
        oldest = flow.settings.oldest_torch if flow.settings is not None else None
        if oldest is not None and oldest >= DEFAULT_SINCE:
            return
        if oldest is not None and late:
            yield self.late(event, where)
            return
        if oldest is None or oldest < ARGUMENT_SINCE or not between_steps(flow, event):
            known = f"torch {oldest} is supported here" if oldest is not None else "it is not known (--target-torch)"
            yield self.finding(
                event.node,
                f"`{where}.zero_grad()` frees the gradients since torch 2.0; before, it keeps their memory during the "
                f"next forward pass unless set_to_none=True (since 1.7) is given. Which torch this project supports: "
                f"{known}.",
                severity=Severity.NOTE,
            )
            return
        yield self.finding(
            event.node,
            f"`{where}.zero_grad()` keeps the memory of all gradients during the next forward pass on torch {oldest}, "
            f"the oldest that this project supports (None is the default only since 2.0). Pass set_to_none=True.",
            severity=Severity.NOTE if in_tests(flow.path) else self.severity,
            fix=self.fix(
                flow,
                NodeEdit(event.node, replace=f"{flow.text(event.node.func)}(set_to_none=True)"),
            ),
        )

    def late(self, event: OptimizerEvent, where: str) -> Draft:
        """The note on a call between forward and backward: None or zeros, the forward pass ran beside the gradients."""
        return self.finding(
            event.node,
            f"`{where}.zero_grad()` runs after the forward pass, so that the gradients of the step before lie beside "
            f"its activations. Call it right after step(), with set_to_none=True (the default since torch 2.0).",
            severity=Severity.NOTE,
        )

    @staticmethod
    def fix(flow: Flow, edit: NodeEdit) -> DraftFix:
        """Safe where the file never reads `.grad`."""
        return DraftFix("set gradients to None", (edit,), safe=".grad" not in flow.code.replace(".grad_", ""))


def made_by(function: FunctionFlow, backward: Backward, *, old: bool = False) -> list[CallEvent]:
    """The calls of a function whose results are in the graph that a backward runs through.

    old: those of earlier iterations of a loop, too, such as the terms of a sum.
    """
    nodes = {id((origin.site.base or origin.site).node) for origin in backward.reach if old or not origin.old}
    for name in names_in(backward.root) if backward.root is not None else ():
        for value, _, _ in function.bindings.get(name, {}).values():  # it may be bound anew for the log
            nodes |= {id(node) for node in walk(value) if isinstance(node, cst.Call)}
    found = [function.calls[node] for node in nodes if node in function.calls]
    return [call for call in found if call.order < backward.order]


def follows_forward(event: OptimizerEvent) -> bool:
    """Whether the forward pass of the loss that is backwarded next has run already."""
    function = event.function
    for backward in function.backwards:
        if backward.order < event.order or backward.loops != event.loops:
            continue
        calls = made_by(function, backward)
        same = len(event.loops)
        before = [call for call in calls if call.order < event.order and call.loops[:same] == event.loops]
        if not event.loops and handed_in(function, backward, calls):
            return True
        given = {origin.site for call in before for origin in call.result.graph}
        after = [call for call in calls if call.order > event.order]
        if any(map(is_model, before)):
            after = [call for call in after if is_model(call)]  # the others make a loss of what the model gave
        if before and not any(runs_forward(call, given) for call in after):
            return True
    return False


def handed_in(function: FunctionFlow, backward: Backward, calls: list[CallEvent]) -> bool:
    """Whether a function is given the loss, or the output that it makes a loss of: the forward pass ran before.

    calls: those of the function whose results are in the graph.
    """
    params = function.info.params if function.info is not None else {}
    if not calls:
        whole = {origin.whole.site for origin in backward.value.graph}
        return bool(whole) and whole <= set(params.values())
    outputs = {origin for name, origin in params.items() if know.OUTPUT_NAME.search(name)}
    return bool(outputs) and not any(runs_forward(call, outputs) for call in calls)


def runs_forward(call: CallEvent, given: set[Origin]) -> bool:
    """Whether a call may run a model, rather than make a loss of what a model gave.

    given: what a forward pass made.
    """
    tail = call.text.rsplit(".", 1)[-1]
    if tail in _SUMS or call.qualified.startswith("torch."):
        return False
    made_of_it = comes_from(call, given)
    if made_of_it and (know.LOSS_NAME.search(tail) or is_loss(call.callee)):
        return False
    named = know.MODEL_NAME.match(tail) or (len(tail) == 1 and tail.isupper())
    return not made_of_it or call.callee.kind is Kind.MODULE or bool(named)


def comes_from(call: CallEvent, given: set[Origin]) -> bool:
    """Whether an argument of a call is made of what is given."""
    seen: set[Origin] = set()
    stack = [origin for value in call.args for origin in value.graph]
    while stack:
        origin = stack.pop()
        if origin.site in given:
            return True
        if origin not in seen:
            seen.add(origin)
            stack += origin.parents
    return False


def is_model(call: CallEvent) -> bool:
    """Whether a call is one of a model, as far as its name or its value tells."""
    tail = call.text.rsplit(".", 1)[-1]
    if know.LOSS_NAME.search(tail) or is_loss(call.callee):
        return False
    return call.callee.kind is Kind.MODULE or bool(know.MODEL_NAME.match(tail))


def is_loss(callee: Value) -> bool:
    """Whether a module is one of torch's losses."""
    return isinstance(callee.info, str) and bool(know.LOSS_CLASS.match(callee.info))


def many_backwards_of_one_forward(event: OptimizerEvent) -> bool:
    """Whether the loop around the call runs backward only through graphs that were made before it: no forward pass."""
    if not event.loops:
        return False
    function, loop = event.function, event.loops[-1]
    inside = [backward for backward in function.backwards if loop in backward.path]
    made = [made_by(function, backward, old=True) for backward in inside]
    return bool(inside) and all(calls and all(loop not in call.path for call in calls) for calls in made)


def is_torch(event: OptimizerEvent) -> bool:
    """Whether `zero_grad` is that of an optimizer or module of torch, as far as can be seen."""
    if isinstance(event.receiver.info, Instance) and event.receiver.info.cls.method("zero_grad") is not None:
        return False
    if event.receiver.kind in (Kind.OPTIMIZER, Kind.MODULE):
        return True
    tail = event.receiver_text.rsplit(".", 1)[-1]
    return bool(know.OPTIMIZER_NAME.search(tail) or know.MODEL_NAME.match(tail))


def between_steps(flow: Flow, event: OptimizerEvent) -> bool:
    """Whether gradients of an earlier step are there when they are cleared: the call repeats, with a backward."""
    function = event.function
    if _BY_HAND.search(flow.code):
        return False
    for origin in event.receiver.graph:
        site = origin.site
        if site.source is Source.CALL and event.receiver.kind is Kind.UNKNOWN and not site.returned:
            return False  # made by something that is not torch's, as far as can be seen
    if event.loops:
        loop = event.loops[-1]
        return any(loop in backward.path for backward in function.backwards) or any(
            loop in call.path and call.target is not None and trains(call) for call in function.calls.values()
        )
    # a method that is one step; a call before the training loop clears what is not there yet
    return event.receiver_text.startswith("self.") and any(not backward.loops for backward in function.backwards)
