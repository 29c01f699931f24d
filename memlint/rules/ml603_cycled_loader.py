"""ML603: itertools.cycle over a DataLoader."""

from __future__ import annotations

from collections.abc import Iterator

from memlint.lint.flow import Flow
from memlint.lint.flow.facts import CallEvent
from memlint.lint.model import Severity
from memlint.rules import wording
from memlint.rules.base import Draft, Rule
from memlint.rules.loaders import loader_of, named_loader


class CycledLoader(Rule):
    """`itertools.cycle` over a DataLoader keeps every batch of the first pass.

    `cycle` saves a copy of everything that it yields, to repeat it: after one pass a whole data set of batches is in
    memory (pinned memory with `pin_memory=True`, the GPU where `accelerate` moves the batches). The later passes
    repeat the same batches in the same order, so shuffling and random augmentation stop as well. Measured on torch
    2.13: all batches of the first pass stay alive, and the second pass yields the very same objects.

    A generator of your own that is called `cycle` is right, and so is cycling over a `range` or a short list; memlint
    is silent there. For a data set of a few batches it does no harm.

    Write a generator that starts the loader again: `while True: yield from loader`.
    """

    code, name, severity = "ML603", "cycled-loader", Severity.WARNING
    triggers = ("cycle(",)
    bad = """
import itertools

from torch.utils.data import DataLoader

def train(dataset, step, steps):
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    batches = itertools.cycle(loader)
    for _ in range(steps):
        step(next(batches))
"""
    good = """
from torch.utils.data import DataLoader

def forever(loader):
    while True:
        yield from loader

def train(dataset, step, steps):
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    batches = forever(loader)
    for _ in range(steps):
        step(next(batches))
"""

    def check(self, flow: Flow) -> Iterator[Draft]:
        for call in list(flow.calls()):
            if call.qualified == "itertools.cycle" and len(call.node.args) == 1 and not call.node.args[0].star:
                made = loader_of(flow, call.args[0])
                if made is not None or named_loader(flow, call.node.args[0].value, call.args[0]):
                    yield self.draft(flow, call, made)

    def draft(self, flow: Flow, call: CallEvent, made: CallEvent | None) -> Draft:
        """The finding."""
        given = wording.short(flow.text(call.node.args[0].value))
        message = (
            f"itertools.cycle keeps every batch of its first pass over `{given}`, a whole data set in memory, and then "
            "repeats those same batches: no more shuffling or augmentation. Write a generator instead: "
            "`def forever(loader): while True: yield from loader`."
        )
        return self.finding(call.node, message, related=[(made.node if made else None, "the loader is made here")])
