"""ML204: losses divided by the wrong number."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow import knowledge as know
from memlint.lint.flow.facts import Backward, BackwardKind, Division, FunctionFlow, runs_in
from memlint.lint.flow.syntax import names_in
from memlint.lint.flow.values import Source
from memlint.lint.flow.windows import Window, windows
from memlint.lint.model import Severity
from memlint.rules import wording
from memlint.rules.base import Draft, Rule


class WrongDivisor(Rule):
    """The loss of an accumulation window is divided by the wrong number, or twice.

    A window of n micro-steps wants each loss divided by n, once. Divided by a counter that runs (`loss / (step + 1)`),
    later micro-batches weigh less and less. Divided by hand and again by a framework
    (`accelerator.backward` of an `Accelerator(gradient_accumulation_steps=n)`, `backward` of a DeepSpeed engine), the
    gradient is n times too small.

    A mean over tokens that is divided by n is right when all micro-batches have equally many tokens that count;
    otherwise short ones weigh too much (note). Then sum the token losses and divide once by the window's token count.

    Divide by the number of micro-steps, at one place.
    """

    code, name, severity = "ML204", "wrong-divisor", Severity.WARNING
    triggers = (".backward(", "manual_backward(")
    bad = """
def train(model, loader, criterion, optimizer, accum_steps):
    for step, (inputs, targets) in enumerate(loader):
        loss = criterion(model(inputs), targets) / (step + 1)
        loss.backward()
        if (step + 1) % accum_steps == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
"""
    good = bad.replace("/ (step + 1)", "/ accum_steps")

    def check(self, flow: Flow) -> Iterator[Draft]:
        for function in flow.functions:
            for window in windows(function):
                yield from self.in_window(flow, function, window)
            for event in function.backwards:
                yield from self.twice(flow, function, event)

    def in_window(self, flow: Flow, function: FunctionFlow, window: Window) -> Iterator[Draft]:
        """Divisions of the loss of a window."""
        for division in divisions(function, window.backward):
            if not runs_in(division.path, window.loop):
                continue
            counters = counters_of(window)
            if counters & set(names_in(division.divisor)) and window.named:
                text = wording.short(flow.text(division.divisor))
                yield self.finding(
                    division.node,
                    f"the loss is divided by `{text}`, which grows with the steps: later micro-batches weigh less and "
                    f"less. Divide by the number of micro-steps of a window.",
                    related=[(window.step.node, "the optimizer steps once a window")],
                )
            elif self.mean_over_tokens(window.backward) and window.named:
                yield self.finding(
                    division.node,
                    "the model's loss is a mean over the tokens of its micro-batch: averaged over the window, "
                    "micro-batches with few tokens weigh too much. It is exact only if all have equally many.",
                    severity=Severity.NOTE,
                )

    @staticmethod
    def mean_over_tokens(event: Backward) -> bool:
        """Whether the loss is the `.loss` of a model that was given labels."""
        for origin in event.value.graph:
            base = origin.site.base
            if base is None or origin.key not in (".loss", "['loss']", "[0]") or not isinstance(base.node, cst.Call):
                continue
            if any(arg.keyword is not None and arg.keyword.value == "labels" for arg in base.node.args):
                return base.source in (Source.MODEL_CALL, Source.CALL)
        return False

    def twice(self, flow: Flow, function: FunctionFlow, event: Backward) -> Iterator[Draft]:
        """`accelerator.backward(loss / n)` of an Accelerator, or an engine, that divides by itself."""
        if event.kind not in (BackwardKind.ACCELERATOR, BackwardKind.ENGINE) or not isinstance(event.node, cst.Call):
            return
        func = event.node.func
        if not isinstance(func, cst.Attribute) or not event.value.divided:
            return  # a division on another branch is not one of this loss
        if any(arg.keyword is not None and arg.keyword.value == "scale_wrt_gas" for arg in event.node.args):
            return
        holder = function.seen.get(id(func.value))
        divides = holder is not None and holder.info == ("accelerate", True)
        for division in divisions(function, event):
            text = flow.text(division.divisor)
            own = text.removesuffix("()") == f"{event.receiver_text}.gradient_accumulation_steps"
            if own or (divides and any(know.WINDOW_NAME.search(name) for name in names_in(division.divisor))):
                whose = "the engine" if event.kind is BackwardKind.ENGINE else "the Accelerator"
                yield self.finding(
                    division.node,
                    f"the loss is divided by `{wording.short(text)}` here and again by "
                    f"{event.receiver_text}.backward(), which divides by {whose}'s own gradient_accumulation_steps. "
                    f"Divide once.",
                    related=[(event.node, "this backward divides as well")],
                )


def divisions(function: FunctionFlow, event: Backward) -> Iterator[Division]:
    """The divisions of what a backward runs on."""
    roots = event.value.graph
    for division in function.divisions.values():
        if division.divided.graph & roots and division.divided.terms & (event.value.terms or roots):
            yield division


def counters_of(window: Window) -> set[str]:
    """The names that count the iterations of the window's loop."""
    if window.loop is None:
        return {"batch_idx"}
    node = window.loop.node
    if not isinstance(node, cst.For):
        return set()
    if window.loop.count and isinstance(node.target, cst.Name):
        return {node.target.value}
    if isinstance(node.iter, cst.Call) and isinstance(node.target, cst.Tuple) and node.target.elements:
        first = node.target.elements[0].value
        if isinstance(node.iter.func, cst.Name) and node.iter.func.value == "enumerate" and isinstance(first, cst.Name):
            return {first.value}
    return set()
