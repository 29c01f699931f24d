"""ML103: running statistics and memory banks that keep graphs."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow.calls import reach
from memlint.lint.flow.facts import Guard, Life, Store, StoreKind
from memlint.lint.flow.judge import judge
from memlint.lint.flow.syntax import names_in
from memlint.lint.flow.values import Grad, Grade, Origin, Source
from memlint.lint.model import Severity
from memlint.rules import edits, wording
from memlint.rules.base import Draft, Rule
from memlint.rules.ml101_accumulated_graph import is_running_statistic, severity_of

#: What buffers that hold statistics or a memory bank are called; the state of a spiking neuron or a key-value cache
#: is not among them.
STATISTIC = re.compile(
    r"run|mov|ema|avg|average|mean|var|std|stat|moment|cent|count|usage|cluster|codebook|bank|queue", re.I
)


class StoredGraph(Rule):
    """A module or a buffer keeps tensors with their graphs: running statistics, memory banks, averages.

    A registered buffer that `forward` updates with a batch statistic becomes part of the graph: each forward pass
    adds a node that holds the one before, so all passes hang together for as long as the module lives. There is no
    loop in sight; the training loop that calls the module is the loop.

    It is right under `torch.no_grad()`, with `.detach()` on what is mixed in, and for state that the output depends
    on (recurrent cells, spiking neurons), which a later backward needs. memlint is silent there.
    """

    code, name, severity = "ML103", "stored-graph", Severity.WARNING
    triggers = ("register_buffer", "self.moving")
    bad = """
import torch
from torch import nn

class RunningNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(width))

    def forward(self, x):
        if self.training:
            mean = x.mean(0)
            self.running_mean.mul_(0.9).add_(mean * 0.1)
        else:
            mean = self.running_mean
        return x - mean
"""
    good = bad.replace("add_(mean * 0.1)", "add_(mean.detach() * 0.1)")

    def check(self, flow: Flow) -> Iterator[Draft]:
        for store in flow.stores():
            if store.holder_text.split("[")[0] in flow.index.detached:
                continue  # the file cuts it elsewhere, once a step
            if store.life is not Life.SELF or store.grad is not Grad.ON or flow.grad_of(store.function) is not Grad.ON:
                continue
            if store.kind is StoreKind.UPDATE or (store.kind is StoreKind.ACCUMULATE and is_running_statistic(store)):
                yield from self.update(flow, store)
            elif store.kind is StoreKind.ASSIGN and store.function.name == "forward":
                yield from self.mixed_elsewhere(flow, store)

    def update(self, flow: Flow, store: Store) -> Iterator[Draft]:
        """An attribute of self that takes in a graph."""
        kept = judge(flow, store)
        if kept is None and (store.needed or store.returned or store.passed or store.yielded):
            return
        if kept is None and not (self.is_buffer(store) and self.carries_input(flow, store)):
            return
        if kept is None and self.read_by_a_base(store):
            return
        what = wording.short(flow.text(store.expression))
        message = (
            f"`{store.holder_text}` takes in `{what}` with its autograd graph {wording.until(store)}: "
            f"each update holds the graph of the one before it. Detach what is mixed in, or update under "
            f"torch.no_grad()."
        )
        yield self.finding(
            store.node,
            message,
            severity=severity_of(kept) if kept is not None else self.severity,
            fix=edits.detach(store.expression, safe=False),
        )

    @staticmethod
    def read_by_a_base(store: Store) -> bool:
        """Whether `super().method(...)` is called after the update: it may read the buffer."""
        return any(
            call.order > store.order
            and isinstance(call.node.func, cst.Attribute)
            and isinstance(call.node.func.value, cst.Call)
            and isinstance(call.node.func.value.func, cst.Name)
            and call.node.func.value.func.value == "super"
            for call in store.function.calls.values()
        )

    @staticmethod
    def is_buffer(store: Store) -> bool:
        """Whether the holder is a registered buffer."""
        cls = store.function.cls
        attribute = store.holder_text.removeprefix("self.").split("[")[0]
        if cls is None or not any(attribute in each.buffers for each in cls.ancestry()):
            return False
        in_training = any(isinstance(f, Guard) and "training" in names_in(f.test) for f in store.path)
        return in_training or bool(STATISTIC.search(attribute))

    @staticmethod
    def carries_input(flow: Flow, store: Store) -> bool:
        """Whether the value comes from the inputs of `forward` or from a layer: both carry a graph in training."""
        cls = store.function.cls
        if cls is None or not cls.is_module or store.function.name not in ("forward", "__call__"):
            return any(flow.grade(leaf.origin) >= Grade.LIKELY for leaf in store.leaves)
        origins: list[Origin] = [leaf.origin.site for leaf in store.leaves]
        return any(o.source in (Source.PARAM, Source.MODEL_CALL, Source.LEAF) or o.label == "self" for o in origins)

    def mixed_elsewhere(self, flow: Flow, store: Store) -> Iterator[Draft]:
        """`y, self.mean = f(x, self.mean)`: the new value is computed from the old one, and nothing returned is."""
        old = {
            origin
            for origin in reach(store.value.graph)
            if origin.base is not None and origin.base.label == "self" and f"self{origin.key}" == store.holder_text
        }
        if not old or store.value.graph <= old:
            return
        for _, value, _ in store.function.returns.values():
            if reach(value.graph) & old or store in value.via:
                return
        message = (
            f"`{store.holder_text}` is computed from its own old value and from this call's inputs, and nothing that "
            f"is returned depends on it: if no detach happens on the way, it holds the graphs of all calls. Detach it."
        )
        yield self.finding(store.node, message, severity=Severity.NOTE)
