"""ML112: live losses in metrics dicts."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow import knowledge as know
from memlint.lint.flow.facts import CallEvent, FunctionFlow
from memlint.lint.flow.frameworks import keeps_log
from memlint.lint.flow.values import Grad, Grade, Kind, Origin, Source
from memlint.lint.imports import dotted
from memlint.lint.model import Severity
from memlint.rules import wording
from memlint.rules.base import Draft, Rule

_LOGGERS = frozenset("log log_metrics log_dict log_metric add_scalars report track record".split())


class LoggedGraph(Rule):
    """A metrics dict takes in live losses, beside entries that were reduced to numbers.

    Most loggers convert what they are given at once; one that stores it (a list of dicts, a smoothing window, a queue
    to another thread) keeps the graph of every step. Where the entries beside it are `.item()` values, the live one
    is an oversight.

    It is right where the dict only hands the loss to a later backward, and with loggers that are known to convert
    (`self.log` of Lightning detaches). A dict with a live loss that goes straight to a logger is a note.

    Write `{"loss": loss.item()}`, or `.detach()` where the logger reduces on the device.
    """

    code, name, severity = "ML112", "logged-graph", Severity.WARNING
    triggers = (
        (".mean().item()", ".update(", ".items()"),
        ("wandb", ".backward("),
        (".log(", ".backward("),
        (".log(", "def compute_loss"),
        ("log_metrics", ".backward("),
    )
    bad = """
def report(out, meter):
    losses = out["losses"]
    updates = {}
    for name, value in losses.items():
        updates[name + "/mean"] = value.mean().item()
    updates.update(losses)
    meter.update(updates)
"""
    good = bad.replace("    updates.update(losses)\n", "")

    def check(self, flow: Flow) -> Iterator[Draft]:
        for function in flow.functions:
            for call in function.calls.values():
                if call.grad is not Grad.ON or flow.grad_of(function) is not Grad.ON:
                    continue
                func = call.node.func
                if isinstance(func, cst.Attribute) and func.attr.value == "update" and len(call.args) == 1:
                    yield from self.whole_dict(flow, function, call, func)
                elif call.text.rsplit(".", 1)[-1] in _LOGGERS:
                    yield from self.to_a_logger(flow, function, call)

    def whole_dict(self, flow: Flow, function: FunctionFlow, call: CallEvent, func: cst.Attribute) -> Iterator[Draft]:
        """`metrics.update(losses)` where the same losses were reduced one by one."""
        if call.callee.kind is not Kind.CONTAINER or not call.args[0].direct:
            return
        given = {origin.site for origin in call.args[0].graph if origin.source is not Source.ALLOC}
        if not given or not self.reduced(flow, given) or not self.handed_on(function, call):
            return
        text = wording.short(flow.text(call.node.args[0].value))
        holder = wording.short(flow.text(func.value))
        yield self.finding(
            call.node,
            f"`{holder}` gets the live tensors of `{text}` beside the numbers made of them: whoever keeps "
            f"`{holder}` keeps their autograd graphs. Update it with `.item()` (or detached) values.",
        )

    @staticmethod
    def reduced(flow: Flow, given: set[Origin]) -> bool:
        """Whether elements of the same thing are reduced by `.item()`."""
        return any(origin.detached for origin in flow.elements_of(given))

    @staticmethod
    def handed_on(function: FunctionFlow, call: CallEvent) -> bool:
        """Whether the container is given to somebody afterwards."""
        holders = call.callee.objects
        return any(
            other.order > call.order and any(value.objects & holders for value in other.args)
            for other in function.calls.values()
        ) or any(value.objects & holders for _, value, _ in function.returns.values())

    def to_a_logger(self, flow: Flow, function: FunctionFlow, call: CallEvent) -> Iterator[Draft]:
        """`wandb.log({"loss": loss})`."""
        if function.cls is not None and function.cls.is_lightning:
            return
        receiver = call.text.rsplit(".", 2)[-2] if "." in call.text else ""
        if know.FABRIC_NAME.match(receiver):
            return  # Fabric.log_dict makes numbers of tensors (2.6.6, fabric.py)
        kept = keeps_log(function, call.text)
        for arg in call.node.args:
            if not isinstance(arg.value, cst.Dict) or not (call.loops or kept):
                continue
            for element in arg.value.elements:
                if not isinstance(element, cst.DictElement) or not isinstance(element.value, (cst.Name, cst.Attribute)):
                    continue
                if self.held(flow, function, element.value):
                    text = wording.short(flow.text(element.value))
                    keeps = (
                        "the Trainer appends the dict to state.log_history as it is, and"
                        if kept
                        else "if it stores what it is given, it"
                    )
                    yield self.finding(
                        element.value,
                        f"`{dotted(call.node.func)}` is given `{text}` with its autograd graph: {keeps} keeps the "
                        f"graph of every step. `{text}.item()` or `.detach()` keeps a number.",
                        severity=Severity.NOTE,
                    )

    @staticmethod
    def held(flow: Flow, function: FunctionFlow, node: cst.BaseExpression) -> bool:
        """Whether a name surely holds a tensor with a graph: backward runs on it."""
        value = function.seen.get(id(node))
        if value is None or not value.graph:
            return False
        return all(flow.grade(origin) is Grade.CERTAIN or origin.site.term for origin in value.graph)
