"""ML702: a loaded checkpoint stays in memory while training runs."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow.facts import CallEvent, FunctionFlow
from memlint.lint.flow.index import small_statements
from memlint.lint.flow.syntax import holds, nodes, place
from memlint.lint.flow.values import known_constant
from memlint.lint.imports import dotted
from memlint.lint.model import Severity
from memlint.rules import wording
from memlint.rules.base import Draft, Rule
from memlint.rules.loaders import argument
from memlint.rules.ml701_load_to_device import surely_to_accelerator
from memlint.rules.training import assignments, body_of, in_tests, mentions, trains


class CheckpointKept(Rule):
    """A loaded checkpoint stays bound while the training of the same function runs.

    The name keeps the whole dict, weights and optimizer state (three times the model for Adam in full precision), for
    as long as the function runs; at the top of a script until it ends. `load_state_dict` has copied all of it. On the
    CPU that is host memory, on the GPU it is taken from every step.

    It is right where the checkpoint is read again later, and with `load_state_dict(..., assign=True)`, which makes its
    tensors the parameters; memlint is silent there. In a helper function that returns before the training the
    checkpoint goes by itself.

    Write `del checkpoint` after the last `load_state_dict`, or load in a function of its own.
    """

    code, name, severity = "ML702", "checkpoint-kept", Severity.NOTE
    triggers = ("torch.load(", ("import torch as ", ".load("))
    bad = """
import torch

def main(model, optimizer, epochs, train_epoch, path):
    checkpoint = torch.load(path, map_location="cuda:0")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    for epoch in range(epochs):
        train_epoch(model, optimizer)
"""
    good = bad.replace('"cuda:0"', '"cpu"').replace("    for epoch", "    del checkpoint\n    for epoch")

    def check(self, flow: Flow) -> Iterator[Draft]:
        if in_tests(flow.path):
            return
        for function in list(flow.functions):
            if any(call.qualified == "torch.load" for call in function.calls.values()):
                yield from self.judge(flow, function)

    def judge(self, flow: Flow, function: FunctionFlow) -> Iterator[Draft]:
        """The checkpoints that a function loads and keeps."""
        order = list(small_statements(body_of(function.node)))
        for assigned in assignments(body_of(function.node)):
            node = assigned.value
            while isinstance(node, cst.Subscript):
                node = node.value
            call = function.calls.get(id(node))
            if call is None or call.qualified != "torch.load" or not isinstance(assigned.target, cst.Name):
                continue
            loaded = next(i for i, each in enumerate(order) if each is assigned.statement)
            training = self.training(function, call, order)
            if training is None:
                continue
            start, first = training
            name = {assigned.target.value}
            if start > loaded and self.kept(function, order, loaded, start, name):
                yield self.draft(call, assigned.target.value, first)

    @staticmethod
    def training(
        function: FunctionFlow, call: CallEvent, order: list[cst.BaseSmallStatement]
    ) -> tuple[int, cst.CSTNode] | None:
        """The place of the first statement of the training after a load, and what trains."""
        events: list[tuple[int, tuple[object, ...], cst.CSTNode]] = [
            (e.order, e.loops, e.node) for e in function.backwards if e.order > call.order
        ]
        events += [(c.order, c.loops, c.node) for c in function.calls.values() if c.order > call.order and trains(c)]
        if not events:
            return None
        _, loops, node = min(events, key=lambda event: event[0])
        outer = [loop for loop in loops if loop not in call.loops]
        if len(outer) == len(loops) - len(call.loops) and outer:
            top = getattr(outer[0], "node")  # noqa: B009
            if isinstance(top, (cst.For, cst.While)):
                inner = {id(each) for each in small_statements(body_of(top))}
                return next(((i, top) for i, each in enumerate(order) if id(each) in inner), None)
        elif not outer:
            for i, each in enumerate(order):
                if holds(each, node):
                    return (i, node) if not isinstance(each, cst.Return) else None
        return None

    @staticmethod
    def kept(
        function: FunctionFlow, order: list[cst.BaseSmallStatement], loaded: int, start: int, name: set[str]
    ) -> bool:
        """Whether the name still holds what was loaded when the training starts, and nobody reads it from then on."""
        used = False
        for statement in order[loaded + 1 : start]:
            if isinstance(statement, cst.Del) and mentions(statement, name):
                return False
            if isinstance(statement, (cst.Assign, cst.AnnAssign)):
                targets = (
                    [t.target for t in statement.targets] if isinstance(statement, cst.Assign) else [statement.target]
                )
                if any(place(target) in name for target in targets):
                    return False
                if statement.value is not None and place(statement.value) in name:
                    return False  # under another name, or on self
        if any(mentions(statement, name) for statement in order[start:]):
            return False
        for call in function.calls.values():
            if dotted(call.node.func).rsplit(".", 1)[-1] == "load_state_dict" and call.node.args:
                if mentions(call.node.args[0].value, name):
                    assign = argument(call, "assign")
                    if assign is not None and known_constant(assign[1]) is not False:
                        return False
                    used = True
        nested = (part for part in nodes(function.node) if isinstance(part, (cst.FunctionDef, cst.Lambda)))
        return used and not any(each is not function.node and mentions(each, name) for each in nested)

    def draft(self, call: CallEvent, name: str, training: cst.CSTNode) -> Draft:
        """The finding."""
        sure = surely_to_accelerator(call)
        where = "GPU memory, taken from every step" if sure else "memory (GPU memory if it was saved from there)"
        if not sure and argument(call, "map_location", 1) is not None:
            where = "memory"
        message = (
            f"`{wording.short(name)}` keeps the whole checkpoint, optimizer state included, in {where} while the "
            f"training runs; load_state_dict has copied it. Write `del {wording.short(name)}` before the training."
        )
        severity = Severity.WARNING if sure else self.severity
        related = [(training, "the training runs here")] if isinstance(training, cst.Call) else []
        return self.finding(call.node, message, severity=severity, related=related)
