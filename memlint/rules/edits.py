"""The edits that rules share."""

from __future__ import annotations

import libcst as cst

from memlint.rules.base import DraftFix, NodeEdit

_TIGHT = (cst.Name, cst.Attribute, cst.Subscript, cst.Call)


def detach(node: cst.BaseExpression, *, safe: bool) -> DraftFix:
    """Write `.detach()` behind an expression, in parentheses where it needs them."""
    return DraftFix(
        f"add .detach() {'' if safe else '(check that it is a tensor) '}".strip(), (call_on(node, "detach()"),), safe
    )


def call_on(node: cst.BaseExpression, call: str) -> NodeEdit:
    """Write `.call` behind an expression."""
    if _binds_tight(node):
        return NodeEdit(node, after=f".{call}")
    return NodeEdit(node, before="(", after=f").{call}")


def detached(node: cst.BaseExpression, text: str) -> str:
    """How `text`, the source of an expression, is written once it is detached."""
    return f"{text}.detach()" if _binds_tight(node) else f"({text}).detach()"


def _binds_tight(node: cst.BaseExpression) -> bool:
    return isinstance(node, _TIGHT) or bool(node.lpar)


def remove_argument(call: cst.Call, arg: cst.Arg, label: str, *, safe: bool) -> DraftFix:
    """Take one argument, and the comma that goes with it, out of a call."""
    place = next(i for i, other in enumerate(call.args) if other is arg)
    if place > 0:
        edit = NodeEdit(arg, replace="", since=call.args[place - 1].value)
    elif len(call.args) > 1:
        following = call.args[1]
        edit = NodeEdit(arg, replace="", until=following.keyword or following.value)
    else:
        edit = NodeEdit(arg, replace="")
    return DraftFix(label, (edit,), safe)


def replace(node: cst.CSTNode, text: str, label: str, *, safe: bool) -> DraftFix:
    """Write `text` in place of a node."""
    return DraftFix(label, (NodeEdit(node, replace=text),), safe)
