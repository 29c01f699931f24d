"""ML202: gradients cleared in every micro-step."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow.facts import FunctionFlow, OptimizerCall, OptimizerEvent, inside
from memlint.lint.flow.values import Kind
from memlint.lint.flow.windows import Window, deferred, periodic_guard, windows
from memlint.lint.model import Severity
from memlint.rules import wording
from memlint.rules.base import Draft, Rule


class ZeroGradVoidsAccumulation(Rule):
    """Gradients are cleared in every micro-step while `step()` waits for the end of the window.

    Only the last micro-batch of each window counts; the work of all others is thrown away, and a loss that is divided
    by the number of micro-steps is that many times too small. Nothing fails: the training is silently wrong.

    Clear once a window: right after `optimizer.step()`, under the same condition.
    """

    code, name, severity = "ML202", "zero-grad-voids-accumulation", Severity.ERROR
    triggers = ("zero_grad",)
    bad = """
def train(model, loader, criterion, optimizer, accum_steps):
    for i, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets) / accum_steps
        loss.backward()
        if (i + 1) % accum_steps == 0:
            optimizer.step()
"""
    good = """
def train(model, loader, criterion, optimizer, accum_steps):
    for i, (inputs, targets) in enumerate(loader):
        loss = criterion(model(inputs), targets) / accum_steps
        loss.backward()
        if (i + 1) % accum_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
"""

    def check(self, flow: Flow) -> Iterator[Draft]:
        for function in flow.functions:
            for window in windows(function, divided=True):
                for clear in function.optimizer:
                    if self.voids(function, window, clear):
                        yield self.draft(window, clear)

    @staticmethod
    def voids(function: FunctionFlow, window: Window, clear: OptimizerEvent) -> bool:
        """Whether `clear` throws away what the window accumulates."""
        if deferred(clear.path):
            return False
        if clear.what is not OptimizerCall.ZERO_GRAD or clear.loops[-1:] != (
            () if window.loop is None else (window.loop,)
        ):
            return False
        if clear.receiver_text != window.step.receiver_text and not is_model(clear):
            return False
        if periodic_guard(inside(clear.path, window.loop)) is not None:
            return False
        mine = {id(frame) for frame in inside(window.backward.path, window.loop)}
        conditional = [
            frame for frame in inside(clear.path, window.loop) if hasattr(frame, "taken") and id(frame) not in mine
        ]
        if conditional:
            return False
        if window.guard is None and not window.named and clear.receiver_text != window.step.receiver_text:
            return False
        return window.guard is not None or window.loop is None or not isinstance(window.loop.node, cst.While)

    def draft(self, window: Window, clear: OptimizerEvent) -> Draft:
        """The finding."""
        message = (
            f"`{wording.short(clear.receiver_text)}.zero_grad()` runs in every "
            f"{wording.turn(window.loop)} while `{wording.short(window.step.receiver_text)}.step()` waits for the "
            f"end of the window: only the last micro-batch counts. Clear the gradients after step() instead."
        )
        return self.finding(
            clear.node,
            message,
            related=[
                (window.backward.node, "these gradients are thrown away"),
                (window.step.node, "the optimizer steps once a window"),
            ],
        )


def is_model(clear: OptimizerEvent) -> bool:
    """Whether the gradients of a whole module are cleared."""
    return clear.receiver.kind is Kind.MODULE or "opt" not in clear.receiver_text.lower()
