"""ML501: emptying the allocator's cache in every step."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow.facts import CallEvent, FunctionFlow, Guard, Loop, OptimizerCall, Path, Region, inside
from memlint.lint.flow.syntax import walk
from memlint.lint.imports import dotted
from memlint.lint.model import Severity
from memlint.rules import wording
from memlint.rules.base import Draft, Rule
from memlint.rules.training import in_tests

_CALLS = {
    "torch.cuda.empty_cache": "torch.cuda.empty_cache()",
    "torch.mps.empty_cache": "torch.mps.empty_cache()",
    "torch.xpu.empty_cache": "torch.xpu.empty_cache()",
    "gc.collect": "gc.collect()",
}
#: methods that a trainer calls once a step
_STEP_METHODS = frozenset(
    """
    training_step train_step train_batch train_one_batch optimize_parameters train_on_batch training_batch
    """.split()
)
_AVAILABILITY = frozenset("is_available device type cuda torch startswith device_type use_cuda gpu".split())


class EmptyCacheInLoop(Rule):
    """`empty_cache()` or `gc.collect()` in every training step.

    `torch.cuda.empty_cache()` gives cached blocks back to the driver; the next step has to allocate them again with
    `cudaMalloc`, which synchronises. It frees nothing that a tensor holds and raises no limit: the allocator does the
    same by itself before it reports out of memory. It costs time on every step, and may hide a leak. `gc.collect()`
    walks all Python objects each time.

    Once an epoch, behind `if step % n == 0`, between phases and in an out-of-memory handler it is fine; memlint is
    silent there.
    """

    code, name, severity = "ML501", "empty-cache-in-loop", Severity.WARNING
    triggers = ("empty_cache", "gc.collect")
    bad = """
import torch

def train(model, loader, criterion, optimizer):
    for inputs, targets in loader:
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()
        torch.cuda.empty_cache()
"""
    good = """
import torch

def train(model, loader, criterion, optimizer):
    for inputs, targets in loader:
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()
    torch.cuda.empty_cache()
"""

    def check(self, flow: Flow) -> Iterator[Draft]:
        for function in flow.functions:
            for call in function.calls.values():
                if call.qualified in _CALLS and (where := self.every_step(flow, function, call)):
                    yield self.draft(call, where, Severity.NOTE if in_tests(flow.path) else self.severity)

    def every_step(self, flow: Flow, function: FunctionFlow, call: CallEvent) -> str:
        """In what the call runs once a training step; empty where it does not."""
        if not call.loops:
            if function.name in _STEP_METHODS and function.backwards and not rare(flow, call.path):
                return f"`{function.name}`, which runs once a step"
            return ""
        loop = call.loops[-1]
        if rare(flow, inside(call.path, loop)) or not self.steps(function, loop) or of_a_trial(function, loop):
            return ""
        return f"every iteration of {wording.loop_name(loop)}"

    @staticmethod
    def steps(function: FunctionFlow, loop: Loop) -> bool:
        """Whether an iteration of the loop is one training step."""
        if any(event.loops[-1:] == (loop,) for event in function.backwards):
            return True
        return any(e.what is OptimizerCall.STEP and e.loops[-1:] == (loop,) for e in function.optimizer)

    def draft(self, call: CallEvent, where: str, severity: Severity) -> Draft:
        """The finding."""
        what = _CALLS[call.qualified]
        if call.qualified == "gc.collect":
            cost = "it walks all Python objects each time and frees nothing that is still referenced"
        else:
            cost = (
                "the next step must allocate again from the driver, which synchronises; no memory is gained that the "
                "allocator would not free by itself before it runs out"
            )
        return self.finding(
            call.node,
            f"`{what}` runs in {where}: {cost}. Remove it, or call it once in a while (`if step % n == 0`).",
            severity=severity,
        )


def of_a_trial(function: FunctionFlow, loop: Loop) -> bool:
    """Whether a loop runs over a few things that are written down, or measures the peak of each turn."""
    peaks = ("reset_peak_memory_stats", "reset_max_memory_allocated")
    return loop.written_down or any(
        loop in call.path and call.text.rsplit(".", 1)[-1] in peaks for call in function.calls.values()
    )


def rare(flow: Flow, path: Path) -> bool:
    """Whether a place on a path is reached only now and then: a branch, or an exception handler."""
    for frame in path:
        if isinstance(frame, Guard) and not availability(flow, frame.test):
            return True
        if isinstance(frame, Region) and frame.part == "handler":
            return True
    return False


def availability(flow: Flow, test: cst.BaseExpression) -> bool:
    """Whether a test only asks which device there is."""
    names: set[str] = set()
    for item in walk(test):
        if isinstance(item, (cst.Name, cst.Attribute)):
            names |= set(flow.qualify(dotted(item)).split("."))
    names -= {"self", "args", "config", "cfg", ""}
    return bool(names) and names <= _AVAILABILITY
