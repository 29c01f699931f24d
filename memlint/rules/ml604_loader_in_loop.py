"""ML604: DataLoaders, or their iterators, made again in every step or epoch."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow.facts import CallEvent, FunctionFlow, Loop, inside
from memlint.lint.model import Severity
from memlint.rules import wording
from memlint.rules.base import Draft, Rule
from memlint.rules.loaders import LOADER, loader_of, named_loader, workers
from memlint.rules.ml501_empty_cache_in_loop import rare
from memlint.rules.training import bound_in, in_tests, mentions, steps_in, trains_in


class LoaderInLoop(Rule):
    """A DataLoader with workers, or an iterator over it, is made anew in every step or epoch.

    Each `iter(loader)` starts its worker processes again (torch 2.13, torch/utils/data/dataloader.py: only
    `persistent_workers=True` keeps them, and only with the loader): each is a copy of the process that has to load its
    part of the data set and prefetches `prefetch_factor` batches, of which `next(iter(loader))` takes one and throws
    the rest away. In a training step that often takes longer than the step. With `shuffle=True` it also draws a new
    permutation of the whole data set for one batch.

    It is right where the data set or its order changes from turn to turn, and without workers once an epoch; memlint is
    silent there. `iter(loader)` once an epoch is what a `for` loop does.

    Make the loader once, before the loop, with `persistent_workers=True`; keep one iterator, and make a new one where
    it raises StopIteration.
    """

    code, name, severity = "ML604", "loader-in-loop", Severity.WARNING
    triggers = ("next(iter(", ("DataLoader(", "num_workers"))
    bad = """
from torch.utils.data import DataLoader

def train(model, dataset, criterion, optimizer, steps):
    loader = DataLoader(dataset, batch_size=32, shuffle=True, num_workers=4)
    for _ in range(steps):
        inputs, targets = next(iter(loader))
        optimizer.zero_grad(set_to_none=True)
        criterion(model(inputs), targets).backward()
        optimizer.step()
"""
    good = """
from torch.utils.data import DataLoader

def train(model, dataset, criterion, optimizer, steps):
    loader = DataLoader(dataset, batch_size=32, shuffle=True, num_workers=4, persistent_workers=True)
    batches = iter(loader)
    for _ in range(steps):
        try:
            inputs, targets = next(batches)
        except StopIteration:
            batches = iter(loader)
            inputs, targets = next(batches)
        optimizer.zero_grad(set_to_none=True)
        criterion(model(inputs), targets).backward()
        optimizer.step()
"""

    def check(self, flow: Flow) -> Iterator[Draft]:
        if in_tests(flow.path):
            return
        for function in list(flow.functions):
            for call in list(function.calls.values()):
                loops = [loop for loop in call.loops if isinstance(loop.node, (cst.For, cst.While))]
                if not loops or rare(flow, inside(call.path, loops[-1])):
                    continue
                if call.qualified == LOADER:
                    yield from self.made(flow, function, call, loops[-1])
                elif call.text == "iter" and not call.qualified and len(call.args) == 1:
                    yield from self.iterated(flow, function, call, loops[-1])

    def made(self, flow: Flow, function: FunctionFlow, call: CallEvent, loop: Loop) -> Iterator[Draft]:
        """A loader that is made in a loop."""
        count = workers(call)
        if count == 0 or not trains_in(function, loop):
            return
        if any(loop in origin.loops for value in call.args for origin in value.graph):
            return  # another data set each time
        bound = bound_in(loop.node)
        if any(mentions(arg.value, bound) for arg in call.node.args):
            return
        step = steps_in(function, loop)
        every = "step" if step else "turn"
        message = (
            f"the DataLoader is made anew in every {every} of {wording.loop_name(loop)}, from the same data, and its "
            "workers are started again. Make it once before the loop, with persistent_workers=True."
        )
        sure = step and count is not None
        yield self.finding(call.node, message, severity=self.severity if sure else Severity.NOTE)

    def iterated(self, flow: Flow, function: FunctionFlow, call: CallEvent, loop: Loop) -> Iterator[Draft]:
        """`iter(loader)` in every training step."""
        if not steps_in(function, loop):
            return
        made = loader_of(flow, call.args[0])
        if made is not None:
            if loop in made.loops:
                return  # that of this turn
        elif not named_loader(flow, call.node.args[0].value, call.args[0]):
            return
        if any(loop in origin.loops for origin in call.args[0].graph):
            return
        count = workers(made) if made is not None else None
        what = wording.short(flow.text(call.node.args[0].value))
        if count == 0:
            cost = "with shuffle=True that draws a permutation of the whole data set for one batch"
        else:
            cost = "that starts its workers again, for one batch"
        message = (
            f"iter({what}) runs in every step of {wording.loop_name(loop)}: {cost}. Keep one iterator, and make a new "
            "one where it raises StopIteration."
        )
        sure = count is not None and count > 0
        yield self.finding(call.node, message, severity=self.severity if sure else Severity.NOTE)
