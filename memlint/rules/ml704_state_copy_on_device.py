"""ML704: the best weights copied on the GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow import knowledge as know
from memlint.lint.flow.facts import CallEvent, FunctionFlow
from memlint.lint.flow.values import Kind
from memlint.lint.imports import dotted
from memlint.lint.model import Severity
from memlint.rules import wording
from memlint.rules.base import Draft, Rule
from memlint.rules.ml703_state_dict_alias import branch
from memlint.rules.state_dicts import Copied, state_of
from memlint.rules.training import assignments, body_of, in_tests, trains_in

#: signs that the file may train on an accelerator at all
_ACCELERATED = re.compile(r"cuda|device|accelerat|\bgpu", re.IGNORECASE)


class StateCopyOnDevice(Rule):
    """The best weights are deep-copied on the device that trains.

    `copy.deepcopy(model)` and `copy.deepcopy(model.state_dict())` copy every tensor where it is: a second set of
    weights stays on the GPU for the rest of the training, and for a moment a third one while the next copy is made.
    A deep copy of a module also copies the gradients that its parameters hold at that time.

    It is right for small models, on the CPU, and where the copy itself computes on the device (an averaged or target
    network).

    Keep the copy on the CPU: `{k: v.detach().cpu().clone() for k, v in model.state_dict().items()}`. Do not drop the
    copy: `state_dict()` alone follows the training (ML703).
    """

    code, name, severity = "ML704", "state-copy-on-device", Severity.NOTE
    triggers = (
        ("deepcopy(", ".backward("),
        ("deepcopy(", "best"),
        ("state_dict()", "best"),
        ("state_dict()", ".backward("),
    )
    bad = """
import copy

def fit(model, epochs, train_epoch, validate, device):
    model.to(device)
    lowest, best = float("inf"), None
    for _ in range(epochs):
        train_epoch(model)
        loss = validate(model)
        if loss < lowest:
            lowest = loss
            best = copy.deepcopy(model.state_dict())
    model.load_state_dict(best)
"""
    good = bad.replace(
        "copy.deepcopy(model.state_dict())", "{k: v.detach().cpu().clone() for k, v in model.state_dict().items()}"
    )

    def check(self, flow: Flow) -> Iterator[Draft]:
        if in_tests(flow.path) or not _ACCELERATED.search(flow.code):
            return
        for function in list(flow.functions):
            for assigned in assignments(body_of(function.node)):
                if isinstance(assigned.value, (cst.Call, cst.DictComp)):
                    event = self.copied(flow, function, assigned.value)
                    if event is not None and kept_best(function, event):
                        yield self.draft(flow, assigned.target, assigned.value)

    @staticmethod
    def copied(flow: Flow, function: FunctionFlow, value: cst.BaseExpression) -> CallEvent | None:
        """The call whose receiver or argument is copied where it is."""
        state = state_of(flow, value)
        if state is not None:
            return function.calls.get(id(state[0])) if state[1] is Copied.ON_DEVICE else None
        event = function.calls.get(id(value))
        if event is None or event.qualified != "copy.deepcopy" or len(event.args) != 1:
            return None
        given = event.args[0]
        tail = dotted(event.node.args[0].value).rsplit(".", 1)[-1]
        if given.kind is Kind.MODULE or (given.kind is Kind.UNKNOWN and tail and know.MODEL_NAME.match(tail)):
            return event
        return None

    def draft(self, flow: Flow, target: cst.BaseExpression, value: cst.BaseExpression) -> Draft:
        """The finding."""
        message = (
            f"`{wording.short(flow.text(target))}` is a copy of the weights on the device that trains: a second model "
            "in GPU memory for the rest of the training. Keep it on the CPU: "
            "{k: v.detach().cpu().clone() for k, v in model.state_dict().items()}."
        )
        return self.finding(value, message)


def kept_best(function: FunctionFlow, event: CallEvent) -> bool:
    """Whether a copy is made now and then in a loop that trains a model from outside the loop."""
    for loop in reversed([each for each in event.loops if isinstance(each.node, (cst.For, cst.While))]):
        if trains_in(function, loop):
            given = event.callee.graph.union(*(value.graph for value in event.args))
            return branch(event, loop) is not None and not any(loop in origin.loops for origin in given)
    return False
