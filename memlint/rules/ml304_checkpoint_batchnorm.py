"""ML304: BatchNorm inside a checkpointed region."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow.facts import CallEvent, FunctionFlow, Guard
from memlint.lint.flow.index import ClassInfo, FunctionInfo
from memlint.lint.flow.syntax import nodes
from memlint.lint.flow.values import Instance, Kind, Method
from memlint.lint.imports import dotted
from memlint.lint.model import Severity
from memlint.rules.base import Draft, Rule
from memlint.rules.ml301_checkpoint_dropout import CHECKPOINTS
from memlint.rules.statements import bound_names, parts

_NORM = re.compile(r"^torch\.nn\.(?:Lazy)?(?:BatchNorm[123]d|SyncBatchNorm)(?:\.convert_sync_batchnorm)?$")
_DEEPEST = 16


class CheckpointBatchnorm(Rule):
    """BatchNorm in a checkpointed region updates its running statistics twice for each batch.

    The region runs once in the forward pass and once more in backward, and BatchNorm updates `running_mean`,
    `running_var` and `num_batches_tracked` in both (measured on torch 2.13 with both variants: two batches are counted
    after one step). The gradients are right; the statistics that evaluation uses follow the batches at nearly twice
    the momentum (0.19 for the default 0.1), and with `momentum=None` each batch counts double.

    It is right with `track_running_stats=False`, in eval mode (frozen statistics), and with GroupNorm or LayerNorm.
    Where the file does not tell what is checkpointed, or a flag decides whether it is, memlint only notes it.

    Leave the norms out of the region, halve what the momentum does (`1 - sqrt(1 - momentum)`), or use a norm without
    running statistics.
    """

    code, name, severity = "ML304", "checkpoint-batchnorm", Severity.WARNING
    triggers = (
        *(("BatchNorm", "utils.checkpoint"), ("BatchNorm", "utils import checkpoint")),
        *(("BatchNorm", "preserve_rng_state"), ("BatchNorm", "use_reentrant")),
    )
    bad = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False)
"""
    good = bad.replace("nn.BatchNorm2d(8)", "nn.GroupNorm(4, 8)")

    def check(self, flow: Flow) -> Iterator[Draft]:
        if "BatchNorm" not in flow.code:
            return
        for function in flow.functions:
            for event in function.calls.values():
                if event.qualified not in CHECKPOINTS or not event.node.args or event.node.args[0].star:
                    continue
                region = event.node.args[0].value
                norm = _Region(flow).norm(region, function)
                if norm is not None:
                    yield self.finding(
                        event.node,
                        f"`{flow.text(region)[:60]}` holds BatchNorm, and checkpoint() runs it twice: its running "
                        f"statistics count every batch twice. Leave the norm out of the region.",
                        # whether the flag is ever on is not known here
                        severity=Severity.NOTE if optional(event) else self.severity,
                        related=[(norm, "this norm is run twice")],
                    )
                else:
                    yield self.finding(
                        event.node,
                        "BatchNorm inside a checkpointed region counts every batch twice in its running statistics: "
                        "leave the norms out of the region.",
                        severity=Severity.NOTE,
                    )


def optional(event: CallEvent) -> bool:
    """Whether a branch decides if the region is checkpointed at all."""
    if any(isinstance(frame, Guard) for frame in event.path):
        return True
    return any(
        isinstance(node, cst.IfExp) and event.node in (node.body, node.orelse) for node in nodes(event.function.node)
    )


class _Region:
    """Looks for a BatchNorm in what is checkpointed, as far as the file tells."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.seen: set[int] = set()

    def norm(self, node: cst.BaseExpression, function: FunctionFlow, depth: int = 0) -> cst.BaseExpression | None:
        """The BatchNorm in the module or function that an expression of `function` names."""
        if depth > _DEEPEST:
            return None
        if isinstance(node, cst.Lambda):
            info = self.flow.index.by_node.get(id(node))
            return self.in_function(info, function.cls, depth + 1) if info is not None else None
        if isinstance(node, cst.Subscript):
            return self.norm(node.value, function, depth + 1)
        value = function.seen.get(id(node))
        if value is not None and value.kind is Kind.FUNCTION and isinstance(value.info, FunctionInfo):
            return self.in_function(value.info, function.cls, depth + 1)
        if value is not None and isinstance(value.info, Method) and value.info.function is not None:
            return self.in_function(value.info.function, value.info.function.cls, depth + 1)
        if value is not None and isinstance(value.info, Instance):
            return self.in_class(value.info.cls, depth + 1)
        if isinstance(node, cst.Call):
            return self.made(node, depth + 1)
        text = dotted(node)
        if text.startswith("self.") and text.count(".") == 1 and function.cls is not None:
            return self.attribute(function.cls, text[5:], depth + 1)
        if isinstance(node, cst.Name):
            return self.local(node.value, function, depth + 1)
        return None

    def local(self, name: str, function: FunctionFlow, depth: int) -> cst.BaseExpression | None:
        """A name that a loop over a module list binds, or that the file makes at one place."""
        for loop in function.loops:
            if isinstance(loop.node, cst.For) and name in list(bound_names(loop.node.target))[-1:]:
                over = loop.node.iter
                if isinstance(over, cst.Call) and dotted(over.func) == "enumerate" and over.args:
                    over = over.args[0].value
                return self.norm(over, function, depth)
        top = [v for v, _, _ in (self.flow.top.bindings.get(name) or {}).values()]
        own = [v for v, _, _ in (function.bindings.get(name) or {}).values()]
        for value in own or top:
            if isinstance(value, cst.Call) and (found := self.made(value, depth)) is not None:
                return found
        return None

    def attribute(self, cls: ClassInfo, name: str, depth: int) -> cst.BaseExpression | None:
        """An attribute of self."""
        method = cls.method(name)
        if method is not None:
            return self.in_function(method, cls, depth)
        for each in cls.ancestry():
            for value in each.assigned.get(name, []):
                if (found := self.made(value, depth)) is not None:
                    return found
        return None

    def made(self, node: cst.BaseExpression, depth: int) -> cst.BaseExpression | None:
        """The BatchNorm in an expression that makes a module."""
        if depth > _DEEPEST:
            return None
        if isinstance(node, (cst.ListComp, cst.GeneratorExp)):
            return self.made(node.elt, depth + 1)
        if not isinstance(node, cst.Call):
            return None
        name = dotted(node.func)
        if _NORM.match(self.flow.qualify(name)):
            return None if without_statistics(node) else node
        if name in self.flow.index.classes and (found := self.in_class(self.flow.index.classes[name], depth + 1)):
            return found
        for arg in node.args:
            for part in parts(arg.value):
                if (found := self.made(part, depth + 1)) is not None:
                    return found
        return None

    def in_class(self, cls: ClassInfo, depth: int) -> cst.BaseExpression | None:
        """The BatchNorm among the attributes of a module class."""
        if depth > _DEEPEST or id(cls) in self.seen or not cls.is_module:
            return None
        self.seen.add(id(cls))
        for each in cls.ancestry():
            for values in each.assigned.values():
                for value in values:
                    if (found := self.made(value, depth + 1)) is not None:
                        return found
            made = each.methods.get("__init__")
            for event in made.flow.calls.values() if made is not None and made.flow is not None else ():
                if (found := self.made(event.node, depth + 1)) is not None:  # self.add_module("bn", norm)
                    return found
        return None

    def in_function(self, info: FunctionInfo, cls: ClassInfo | None, depth: int) -> cst.BaseExpression | None:
        """The BatchNorm among the modules that a function calls."""
        if depth > _DEEPEST or id(info) in self.seen or info.flow is None:
            return None
        self.seen.add(id(info))
        cls = info.cls or cls
        for event in info.flow.calls.values():
            if event.target is not None:
                found = self.in_function(event.target, event.target.cls or cls, depth + 1)
            elif event.text.startswith("self.") and event.text.count(".") == 1 and cls is not None:
                found = self.attribute(cls, event.text[5:], depth + 1)
            else:
                found = None
            if found is not None:
                return found
        return None


def without_statistics(call: cst.Call) -> bool:
    """Whether a norm keeps no running statistics."""
    return any(
        arg.keyword is not None and arg.keyword.value == "track_running_stats" and dotted(arg.value) == "False"
        for arg in call.args
    )
