"""What rules ask about weights: which state_dict is behind an expression, and is it a copy."""

from __future__ import annotations

import enum

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow import knowledge as know
from memlint.lint.flow.syntax import walk
from memlint.lint.imports import dotted
from memlint.rules.training import keyword


class Copied(enum.Enum):
    """How an expression takes the tensors of a state_dict.

    Measured on torch 2.13 with a step of SGD between: `state_dict()`, its `.copy()`, `dict()` and `copy.copy()`, and a
    comprehension over its items hold the weights themselves; `.cpu()` copies only from another device.
    """

    NO = "the weights themselves"
    ON_DEVICE = "a copy on the device of the weights"
    ELSEWHERE = "a copy, or weights that are on the CPU anyway"


_SHALLOW = frozenset(("dict", "collections.OrderedDict", "OrderedDict", "copy.copy"))


def state_of(flow: Flow, node: cst.BaseExpression) -> tuple[cst.Call, Copied] | None:
    """The `x.state_dict()` call whose tensors an expression holds, and how it took them; None for anything else."""
    if isinstance(node, cst.DictComp):
        return _comprehended(flow, node)
    if not isinstance(node, cst.Call):
        return None
    func = node.func
    if isinstance(func, cst.Attribute):
        if func.attr.value == "state_dict" and all(arg.keyword is not None for arg in node.args):
            moved = any(isinstance(item, cst.Call) and _to_cpu(item) for item in walk(func.value))
            return node, Copied.ELSEWHERE if moved else Copied.NO
        if func.attr.value == "get_state_dict" and handed_on(node) is not None:
            return node, Copied.NO
        if func.attr.value == "copy" and not node.args:
            return state_of(flow, func.value)
    name = flow.qualify(dotted(func))
    if len(node.args) == 1 and name in _SHALLOW:
        return state_of(flow, node.args[0].value)
    if node.args and name in ("copy.deepcopy", "deepcopy"):
        inner = state_of(flow, node.args[0].value)
        return None if inner is None else (inner[0], Copied.ON_DEVICE if inner[1] is Copied.NO else inner[1])
    return None


def handed_on(node: cst.Call) -> cst.BaseExpression | None:
    """The model of `accelerator.get_state_dict(model)`.

    Accelerate 1.15.0, accelerator.py, `Accelerator.get_state_dict`: it returns `model.state_dict()`, but for
    DeepSpeed's stage 3 and FSDP, which gather copies.
    """
    func = node.func
    if not isinstance(func, cst.Attribute) or func.attr.value != "get_state_dict":
        return None
    receiver = dotted(func.value).rsplit(".", 1)[-1]
    model = keyword(node, "model", 0)
    return model.value if model is not None and know.ACCELERATOR_NAME.match(receiver) else None


def _comprehended(flow: Flow, node: cst.DictComp) -> tuple[cst.Call, Copied] | None:
    """`{k: v.cpu() for k, v in model.state_dict().items()}`."""
    over, target = node.for_in.iter, node.for_in.target
    if node.for_in.inner_for_in is not None or not isinstance(target, cst.Tuple) or len(target.elements) != 2:
        return None
    if not isinstance(over, cst.Call) or not isinstance(over.func, cst.Attribute) or over.func.attr.value != "items":
        return None
    inner = state_of(flow, over.func.value)
    item = target.elements[1].value
    if inner is None or not isinstance(item, cst.Name):
        return None
    value, copied = node.value, inner[1]
    if not any(isinstance(part, cst.Name) and part.value == item.value for part in walk(value)):
        return None
    for part in walk(value):
        if isinstance(part, cst.Attribute) and part.attr.value not in ("detach", "data", "to", "cpu", "clone"):
            return None
        if isinstance(part, cst.Call):
            if _to_cpu(part):
                copied = Copied.ELSEWHERE
            elif isinstance(part.func, cst.Attribute) and part.func.attr.value == "detach":
                continue
            elif copied is Copied.NO:
                method = part.func.attr.value if isinstance(part.func, cst.Attribute) else ""
                name = flow.qualify(dotted(part.func))
                if method != "clone" and name not in ("copy.deepcopy", "deepcopy", "torch.clone"):
                    return None
                copied = Copied.ON_DEVICE
    return inner[0], copied


def _to_cpu(call: cst.Call) -> bool:
    if not isinstance(call.func, cst.Attribute):
        return False
    if call.func.attr.value == "cpu":
        return True
    if call.func.attr.value != "to":
        return False
    arg = keyword(call, "device", 0)
    return arg is not None and isinstance(arg.value, cst.SimpleString) and arg.value.evaluated_value == "cpu"
