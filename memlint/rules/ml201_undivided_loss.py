"""ML201: gradients summed over micro-steps, the loss not divided."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow.facts import Backward, BackwardKind, runs_in
from memlint.lint.flow.values import Source
from memlint.lint.flow.windows import Window, windows
from memlint.lint.model import Severity
from memlint.rules import wording
from memlint.rules.base import Draft, DraftFix, NodeEdit, Rule


class UndividedLoss(Rule):
    """Gradients of several micro-steps are summed, and the loss is not divided by their number.

    `backward()` adds to `.grad`. With a loss that is a mean over its micro-batch, the gradient of a window of n
    micro-steps is then n times that of one large batch: the learning rate is n times what it says with SGD, and
    gradient clipping acts on gradients n times too large. Adam hides the scale, clipping and weight decay do not.

    It is right for a loss that is a sum over its samples (`reduction="sum"`), where the gradients are scaled before
    the step, and with backwards that divide by themselves: DeepSpeed engines, and `accelerator.backward`, whose number
    of steps may come from elsewhere. memlint is silent there.
    """

    code, name, severity = "ML201", "undivided-loss", Severity.WARNING
    triggers = (
        ".backward(",
        "manual_backward(",
    )
    bad = """
def train(model, loader, criterion, optimizer, accum_steps):
    for i, (inputs, targets) in enumerate(loader):
        loss = criterion(model(inputs), targets)
        loss.backward()
        if (i + 1) % accum_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
"""
    good = bad.replace("loss.backward()", "(loss / accum_steps).backward()")

    def check(self, flow: Flow) -> Iterator[Draft]:
        for function in flow.functions:
            if function.scales_grad:
                continue
            for window in windows(function):
                if self.undivided(flow, window):
                    yield self.draft(flow, window)

    @staticmethod
    def undivided(flow: Flow, window: Window) -> bool:
        """Whether the window sums what should be averaged."""
        event = window.backward
        if event.value.divided or not event.value.graph:
            return False
        if isinstance(event.node, cst.Call) and event.kind is BackwardKind.TENSOR and event.node.args:
            if event.node.args[0].keyword is None or event.node.args[0].keyword.value == "gradient":
                return False  # the gradient is given: this is no loss
        if window.guard is None and not window.named:
            return False  # a loop over losses or tasks: a sum is what is meant
        for clear in event.function.optimizer:
            if clear.what.value == "zero_grad" and runs_in(clear.path, window.loop) and not _waits(clear.path, window):
                return False  # cleared every time: that is ML202
        return not any("sum" in origin.site.calls for origin in event.reach if origin.source is Source.LOSS_CALL)

    def draft(self, flow: Flow, window: Window) -> Draft:
        """The finding."""
        event = window.backward
        root = wording.short(flow.text(event.root)) if event.root is not None else "the loss"
        length = wording.short(flow.text(window.length)) if window.length is not None else "the number of micro-steps"
        message = (
            f"the gradients of all micro-steps of a window are summed before `{window.step.receiver_text}.step()`, but "
            f"`{root}` is not divided by `{length}`: the gradient is that many times too large (if the loss is a "
            f"mean). Divide the loss before backward()."
        )
        severity = self.severity
        if not window.named or opaque_loss(event):
            severity = Severity.NOTE
        return self.finding(
            event.node,
            message,
            severity=severity,
            fix=self.fix(flow, window),
            related=[(window.step.node, "the optimizer steps once a window")],
        )

    @staticmethod
    def fix(flow: Flow, window: Window) -> DraftFix | None:
        """Divide where backward is called."""
        event = window.backward
        if event.kind is not BackwardKind.TENSOR or window.length is None or event.root is None:
            return None
        root = event.root
        if isinstance(root, cst.Call) and len(root.args) == 1:
            root = root.args[0].value  # scaler.scale(loss)
            edit = NodeEdit(root, after=f" / {flow.text(window.length)}")
        else:
            edit = NodeEdit(root, before="(", after=f" / {flow.text(window.length)})")
        return DraftFix("divide the loss by the number of micro-steps", (edit,), False)


def _waits(path: tuple[object, ...], window: Window) -> bool:
    return window.guard is not None and any(getattr(frame, "node", None) is window.guard.node for frame in path)


def opaque_loss(event: Backward) -> bool:
    """Whether the loss comes from a function of the project that may divide by itself."""
    for origin in event.value.graph:
        base = origin.whole
        if base.source in (Source.CALL, Source.PARAM) and not base.returned:
            return True
    return False
