"""ML101: a running sum of tensors that carry their graphs."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow import knowledge as know
from memlint.lint.flow.facts import CallEvent, FunctionFlow, Life, Store, StoreKind
from memlint.lint.flow.judge import Cost, Kept, judge
from memlint.lint.flow.values import Grad, Grade, Kind
from memlint.lint.imports import dotted
from memlint.lint.model import Severity
from memlint.rules import edits, wording
from memlint.rules.base import Draft, DraftFix, Rule


class AccumulatedGraph(Rule):
    """A loop adds a tensor that still carries its autograd graph to a running value.

    Every addition records a node that holds the old sum and the new term, so the graphs of all iterations hang
    together and stay until the sum goes. After `backward()` (without `retain_graph`) the saved activations are freed
    and only the graph's nodes stay: tens of KiB an iteration. Without a backward, all activations stay. Whatever the
    backwarded loss did not depend on keeps its activations in either case.

    It is right where one later backward needs the sum: losses of several tasks, time steps or micro-batches that are
    added up and backwarded once. memlint is silent there.

    Write `total += loss.detach()`: it stays a tensor on the device and costs no synchronisation. `loss.item()` is as
    good where a Python number is wanted at once, at the price of waiting for the device.
    """

    code, name, severity = "ML101", "accumulated-graph", Severity.ERROR
    triggers = (
        ".backward(",
        "manual_backward(",
        ".eval()",
        "train(False)",
        "training_step",
        "compute_loss",
        "get_loss",
        ("autograd.grad", "loss"),
        *know.HELPED_TRAINING,
    )
    bad = """
def train(model, loader, criterion, optimizer):
    total = 0.0
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss
    return total / len(loader)
"""
    good = bad.replace("+= loss", "+= loss.detach()")

    def check(self, flow: Flow) -> Iterator[Draft]:
        for store in flow.stores():
            if store.kind is not StoreKind.ACCUMULATE or is_running_statistic(store):
                continue
            kept = judge(flow, store)
            if kept is None:
                continue
            yield self.draft(flow, kept)
            yield from self.first_terms(flow, kept)
        for function in flow.functions:
            yield from self.odd_meters(flow, function)

    def odd_meters(self, flow: Flow, function: FunctionFlow) -> Iterator[Draft]:
        """`meter.update(loss, n)` where the meters beside it are given `.item()`.

        What such a meter does is not known here; that its author hands numbers to all the others is.
        """
        updates = [
            call
            for call in function.calls.values()
            if is_meter_update(call) and call.loops and flow.library_of(call) not in know.METRIC_LIBRARIES
        ]
        if not any(takes_item(call) for call in updates):
            return
        for call in updates:
            given = call.args[0]
            origins = [o for o in given.graph if flow.grade(o) >= Grade.LIKELY]
            if not given.direct or not origins or call.grad is not Grad.ON:
                continue
            what = wording.short(flow.text(call.node.args[0].value))
            message = (
                f"`{call.text}` is given `{what}` with its autograd graph, while the meters beside it get `.item()`: "
                f"if the meter sums what it is given, it keeps the graph of every iteration of "
                f"{wording.loop_name(call.loops[-1])}. Give it `{what}.item()`."
            )
            fix = DraftFix("add .item()", (edits.call_on(call.node.args[0].value, "item()"),), False)
            yield self.finding(call.node, message, severity=Severity.WARNING, fix=fix)

    def draft(self, flow: Flow, kept: Kept) -> Draft:
        """The finding for one running sum."""
        store = kept.store
        what = wording.short(flow.text(store.expression))
        holder = f"`{store.helper}` of `{store.holder_text}`" if store.helper else f"`{store.holder_text}`"
        message = (
            f"{holder} sums `{what}` with its autograd graph {wording.until(store)}: {wording.cost(kept)}. "
            f"{'Return' if isinstance(store.node, cst.Return) else 'Add'} `{edits.detached(store.expression, what)}` "
            f"instead."
        )
        certain = kept.grade is Grade.CERTAIN and kept.whole
        return self.finding(
            store.node,
            message,
            severity=severity_of(kept),
            fix=edits.detach(store.expression, safe=certain) if kept.whole else None,
            related=wording.related(flow, kept),
        )

    def first_terms(self, flow: Flow, kept: Kept) -> Iterator[Draft]:
        """`smooth = loss` in the same loop, where another branch adds to `smooth`: the first term is kept as well."""
        for other in flow.first_terms(kept.store):
            message = (
                f"`{kept.store.holder_text}` starts as a tensor with its autograd graph, and the running value keeps "
                f"it. Start from a detached value."
            )
            yield self.finding(
                other, message, severity=severity_of(kept), fix=edits.detach(other, safe=kept.grade is Grade.CERTAIN)
            )


def is_meter_update(call: CallEvent) -> bool:
    """`some_meter.update(value, n)` of a class that this file does not define."""
    method = call.node.func
    if not isinstance(method, cst.Attribute) or method.attr.value not in ("update", "add") or not call.node.args:
        return False
    if call.target is not None or call.node.args[0].keyword is not None or call.callee.kind is Kind.CONTAINER:
        return False
    return bool(know.METER_NAME.search(dotted(method.value).rsplit(".", 1)[-1]))


def takes_item(call: CallEvent) -> bool:
    """Whether a call is given `x.item()`."""
    given = call.node.args[0].value
    return isinstance(given, cst.Call) and isinstance(given.func, cst.Attribute) and given.func.attr.value == "item"


def severity_of(kept: Kept) -> Severity:
    """error where activations pile up and that is sure, otherwise warning."""
    if kept.cost is Cost.ACTIVATIONS and kept.grade >= Grade.LIKELY:
        return Severity.ERROR
    return Severity.WARNING


def is_running_statistic(store: Store) -> bool:
    """Whether a module keeps the sum on itself (that is ML103)."""
    cls = store.function.cls
    return store.life is Life.SELF and cls is not None and cls.is_module and not store.function.backwards
