"""ML114: small views that pin large tensors."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow.facts import CallEvent
from memlint.lint.flow.values import Kind, Source
from memlint.lint.model import Severity
from memlint.rules import wording
from memlint.rules.base import Draft, DraftFix, NodeEdit, Rule


class KeptView(Rule):
    """A small detached slice kept across iterations pins the whole tensor that it is a view of.

    `out[:, 0].detach()` shares its storage with `out`: a list of such slices keeps every `out` in full. Nothing in
    the slice's own size shows it.

    It is right where the slice is most of the tensor, and where it is copied on the way: `.cpu()` from another device,
    `.clone()`, `.item()`, arithmetic, an index tensor instead of a slice.

    Write `out[:, 0].detach().clone()`.
    """

    code, name, severity = "ML114", "kept-view", Severity.NOTE
    triggers = ("].detach())", "].data)")
    bad = """
def collect(model, loader):
    firsts = []
    for batch in loader:
        out = model(batch)
        firsts.append(out[:, 0].detach())
    return firsts
"""
    good = bad.replace(".detach())", ".detach().clone())")

    def check(self, flow: Flow) -> Iterator[Draft]:
        for call in flow.calls():
            func = call.node.func
            if not isinstance(func, cst.Attribute) or func.attr.value != "append" or len(call.node.args) != 1:
                continue
            kept = call.node.args[0].value
            view = self.view(kept)
            if view is None or not self.outlives(call):
                continue
            text, base = wording.short(flow.text(kept)), wording.short(flow.text(view.value))
            yield self.finding(
                kept,
                f"`{text}` is a view: as long as `{wording.short(flow.text(func.value))}` keeps it, all of `{base}` "
                f"stays in memory. `.clone()` keeps the slice alone.",
                fix=DraftFix("add .clone()", (NodeEdit(kept, after=".clone()"),), True),
            )

    @staticmethod
    def view(node: cst.BaseExpression) -> cst.Subscript | None:
        """The slice in `x[...].detach()` or `x[...].data`, where it takes a part by plain numbers and slices."""
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and not node.args:
            if node.func.attr.value != "detach":
                return None
            inner = node.func.value
        elif isinstance(node, cst.Attribute) and node.attr.value == "data":
            inner = node.value
        else:
            return None
        if not isinstance(inner, cst.Subscript):
            return None
        indexes = [e.slice.value for e in inner.slice if isinstance(e.slice, cst.Index)]
        slices = [e.slice for e in inner.slice if isinstance(e.slice, cst.Slice)]
        numbers = all(
            isinstance(i, cst.Integer)
            or (isinstance(i, cst.UnaryOperation) and isinstance(i.expression, cst.Integer))
            or isinstance(i, cst.Ellipsis)
            for i in indexes
        )
        # `x["name"]` is an entry of a dict, and one plain index may be an element of a list
        return inner if numbers and slices and indexes else None

    @staticmethod
    def outlives(call: CallEvent) -> bool:
        """Whether the list outlives the iteration."""
        if not call.loops:
            return False
        holders = call.callee.objects
        if call.callee.kind is Kind.CONTAINER:
            return all(call.loops[-1] not in origin.loops for origin in holders)
        return any(origin.source in (Source.PARAM, Source.NAME, Source.ITEM) for origin in holders)
