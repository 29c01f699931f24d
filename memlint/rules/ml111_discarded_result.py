"""ML111: detach() as a statement, and copies inside the graph."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow.facts import CallEvent
from memlint.lint.flow.values import Grad, Grade, Instance, Kind
from memlint.lint.model import Severity
from memlint.rules import edits, wording
from memlint.rules.base import Draft, Rule

#: Tensor methods that return a new tensor and leave the receiver as it is.
_PURE = frozenset("detach cpu cuda to float half double clone contiguous".split())


class DiscardedResult(Rule):
    """`loss.detach()` (or `.cpu()`, `.to()`) as a statement on a tensor: nothing happens.

    These methods return a new tensor; only for an `nn.Module` do `.to()`, `.cuda()` and `.cpu()` change the receiver.
    The tensor goes on carrying its graph, or stays on the device, and whoever wrote the line believes that it does
    not.

    It is right on modules and on a project's own classes, whose `detach()` may well change them; memlint speaks only
    where the receiver is known to be a tensor: backward runs on it, or a known module returned it.

    Write `loss = loss.detach()`, or `loss.detach_()`. A copy to the CPU before the cut (`.cpu().data.numpy()`) records
    a node for nothing: detach first (note).
    """

    code, name, severity = "ML111", "discarded-result", Severity.WARNING
    triggers = (".data.numpy()", ".cpu().detach()", (".detach()", ".backward("), (".cpu()", ".backward("))
    bad = """
def train(model, loader, criterion, optimizer):
    for inputs, targets in loader:
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        loss.detach()
"""
    good = bad.replace("        loss.detach()", "        loss = loss.detach()")

    def check(self, flow: Flow) -> Iterator[Draft]:
        for function in flow.functions:
            for call in function.calls.values():
                method = call.node.func.attr.value if isinstance(call.node.func, cst.Attribute) else ""
                if call.discarded and method in _PURE:
                    yield from self.discarded(flow, call, method)
                elif method == "numpy":
                    yield from self.copied_inside(flow, call)

    def discarded(self, flow: Flow, call: CallEvent, method: str) -> Iterator[Draft]:
        """A pure method as a statement."""
        receiver = call.callee
        if receiver.kind not in (Kind.TENSOR, Kind.UNKNOWN) or isinstance(receiver.info, Instance):
            return
        if not receiver.graph or not all(flow.grade(origin) >= Grade.LIKELY for origin in receiver.graph):
            return
        assert isinstance(call.node.func, cst.Attribute)
        target = call.node.func.value
        text = wording.short(flow.text(target))
        fix = None
        if isinstance(target, cst.Name):
            fix = edits.replace(call.node, f"{text} = {flow.text(call.node)}", "bind the result", safe=False)
        yield self.finding(
            call.node,
            f"`{text}.{method}()` returns a new tensor, which is thrown away: `{text}` is as before. "
            f"Write `{text} = {wording.short(flow.text(call.node))}`.",
            fix=fix,
        )

    def copied_inside(self, flow: Flow, call: CallEvent) -> Iterator[Draft]:
        """`out.cpu().data.numpy()`: the copy is part of the graph."""
        func = call.node.func
        assert isinstance(func, cst.Attribute)
        inner = func.value
        if isinstance(inner, cst.Attribute) and inner.attr.value == "data":
            copied = inner.value
        elif (
            isinstance(inner, cst.Call) and isinstance(inner.func, cst.Attribute) and inner.func.attr.value == "detach"
        ):
            copied = inner.func.value
        else:
            return
        if not isinstance(copied, cst.Call) or not isinstance(copied.func, cst.Attribute):
            return
        if copied.func.attr.value != "cpu":
            return
        event = call.function.calls.get(id(copied))
        if event is None or event.grad is not Grad.ON or not call.loops:
            return
        if any(flow.grade(origin) >= Grade.WEAK for origin in event.result.graph):
            text = wording.short(flow.text(copied.func.value))
            yield self.finding(
                copied,
                f"`{text}.cpu()` is copied inside the graph, which is cut only afterwards: "
                f"`{text}.detach().cpu().numpy()` records nothing.",
                severity=Severity.NOTE,
            )
