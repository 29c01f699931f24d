"""ML401: evaluation that builds graphs."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow.calls import reach
from memlint.lint.flow.facts import CallEvent, FunctionFlow, Loop
from memlint.lint.flow.frameworks import evaluates
from memlint.lint.flow.values import Grad, Grade, Source
from memlint.lint.model import Severity
from memlint.rules import wording
from memlint.rules.base import Draft, DraftFix, NodeEdit, Rule
from memlint.rules.ml403_volatile_ignored import NO_GRAD_SINCE
from memlint.rules.statements import bound_names
from memlint.rules.training import in_tests

#: methods that run the model of a Trainer of transformers, or of a net of skorch
_FORWARDS = frozenset(("self.compute_loss", "self.infer"))
#: functions that try a model out on a few made-up inputs
_CHECKS = re.compile(r"_?(?:test|check|verify)_|_test$")
#: models of atoms and molecules differentiate energies for forces, in evaluation too
_FORCES = re.compile(r"(?<![a-z])forces?(?![a-z])", re.I)


class EvalWithoutNoGrad(Rule):
    """An evaluation or inference loop runs the model with autograd on.

    `model.eval()` changes dropout and batch norm, nothing else: every forward pass still saves its activations for a
    backward that never comes. They are freed when the outputs go, so nothing grows by itself, but the peak of the
    evaluation is that of a training step (often twice what it needs), and outputs that are collected keep it all.

    It is right where gradients are wanted (attacks, saliency, forces from energies), for a model whose parameters are
    all frozen, and where every caller runs it under `torch.no_grad()`. memlint is silent there.

    Write `@torch.no_grad()` above the function, or `with torch.no_grad():` around the loop.
    `torch.inference_mode()` is a little faster, but its tensors can never be used in training.
    """

    code, name, severity = "ML401", "eval-without-no-grad", Severity.WARNING
    triggers = (
        ".eval()",
        "train(False)",
        "train(mode=False)",
        ("Trainer", "def prediction_step"),
        ("skorch", "def validation_step"),
    )
    bad = """
import torch

def validate(model, loader, criterion):
    model.eval()
    total = 0.0
    for inputs, targets in loader:
        total += criterion(model(inputs), targets).item()
    return total / len(loader)
"""
    good = bad.replace("def validate", "@torch.no_grad()\ndef validate")

    def check(self, flow: Flow) -> Iterator[Draft]:
        if _FORCES.search(flow.code) and "energ" in flow.code.lower() and not self.needs_inner_grad(flow):
            return  # the model itself may differentiate
        capped = flow.settings.capped_torch if flow.settings is not None else None
        if capped is not None and capped <= NO_GRAD_SINCE:
            return
        for function in flow.functions:
            framework = evaluates(function)
            if not (function.evals or framework) or self.wants_grad(flow, function):
                continue
            seen: set[str] = set()
            for event in sorted(function.calls.values(), key=lambda event: event.order):
                if event.text not in seen and self.builds_graph(flow, function, event, driven=bool(framework)):
                    if flow.may_run_without_grad(function):
                        break
                    seen.add(event.text)
                    yield self.draft(flow, function, event, framework)

    @staticmethod
    def wants_grad(flow: Flow, function: FunctionFlow) -> bool:
        """Whether the function asks for gradients, or trains."""
        if function.is_forward or function.backwards or function.asks_grad:
            return True
        if any(e.what.value == "step" for e in function.optimizer):
            return True
        return flow.grad_of(function) is not Grad.ON

    def builds_graph(self, flow: Flow, function: FunctionFlow, event: CallEvent, *, driven: bool) -> bool:
        """Whether a call runs a model in eval mode, in a loop, with autograd on.

        driven: both the mode and the loop are those of the framework that calls the function.
        """
        if event.grad is not Grad.ON or (not driven and (event.mode != "eval" or not self.loops(event))):
            return False
        origins = [origin for origin in event.result.graph if origin.node is event.node]
        if not origins or not (self.runs_model(event) or (driven and event.text in _FORWARDS)):
            return False
        if any(flow.grade(origin) is Grade.NO for origin in origins):
            return False
        model = event.text.removesuffix(".forward").removesuffix(".module")
        for other in function.calls.values():
            if other.text == event.text and other.grad is Grad.OFF:
                return False  # the author knows: this call is outside the block on purpose
        if not driven and (self.trained_here(flow, function, event) or of_an_ensemble(function, event)):
            return False
        return not any(self.same_model(model, frozen) for each in flow.functions for frozen in each.frozen)

    @staticmethod
    def loops(event: CallEvent) -> tuple[Loop, ...]:
        """The loops of statements around a call."""
        return tuple(loop for loop in event.loops if isinstance(loop.node, (cst.For, cst.While)))

    @staticmethod
    def runs_model(event: CallEvent) -> bool:
        """Whether the call is one of the very thing that eval() was called on."""
        path = event.text.removesuffix(".forward").removesuffix(".module")
        return path in event.function.evals or any(o.source is Source.MODEL_CALL for o in event.result.graph)

    @staticmethod
    def same_model(one: str, other: str) -> bool:
        """Whether two paths may name the same module."""
        return one == other or one.rsplit(".", 1)[-1] == other.rsplit(".", 1)[-1]

    @staticmethod
    def trained_here(flow: Flow, function: FunctionFlow, event: CallEvent) -> bool:
        """Whether something else of the file may backward what the call gives: it is returned as it is."""
        for _, value, _ in function.returns.values():
            if any(origin in value.graph for origin in event.result.graph):
                return True
            children = {child for origin in event.result.graph for child in origin.site.children.values()}
            if value.graph & children:
                return True
        del flow
        return False

    def draft(self, flow: Flow, function: FunctionFlow, event: CallEvent, framework: str) -> Draft:
        """The finding."""
        evaluated = function.evals.get(event.text) or next(iter(function.evals.values()), None)
        fix = self.fix(flow, function)
        name = "this script" if function.is_module else f"`{function.name}`"
        if framework:
            why = f": {framework} calls {name} in eval mode, but leaves it to the method to switch it off"
        else:
            why = f" in {wording.loop_name(self.loops(event)[-1])}: eval() does not switch it off"
        message = (
            f"`{wording.short(event.text)}` runs with autograd on{why}, so every forward pass of {name} saves "
            f"its activations for a backward that never comes (peak). Run it under torch.no_grad()."
        )
        if self.needs_inner_grad(flow):
            message = message.replace(
                "Run it under torch.no_grad().",
                "A module of this file calls autograd.grad, so torch.no_grad() also needs torch.enable_grad() there.",
            )
            fix = None
        tiny = in_tests(flow.path) or _CHECKS.match(function.name)  # a peak is no concern there
        severity = Severity.NOTE if tiny else self.severity
        return self.finding(
            event.node, message, severity=severity, fix=fix, related=[(evaluated, "eval() is called here")]
        )

    @staticmethod
    def needs_inner_grad(flow: Flow) -> bool:
        """Whether a function of the file calls autograd.grad: plain no_grad would make it raise."""
        return any(call.qualified == "torch.autograd.grad" for call in flow.calls())

    @staticmethod
    def fix(flow: Flow, function: FunctionFlow) -> DraftFix | None:
        """`@torch.no_grad()` above the function."""
        if not isinstance(function.node, cst.FunctionDef) or flow.index.imports.get("torch") != "torch":
            return None
        if function.info is not None and function.info.generator:
            return None
        edit = NodeEdit(function.node, before="@torch.no_grad()\0")
        return DraftFix("add @torch.no_grad()", (edit,), False)


def of_an_ensemble(function: FunctionFlow, event: CallEvent) -> bool:
    """`for net in nets: net.eval(); outputs.append(net(x))`, and what is made of them returned, graph and all.

    The loop is over models, not over data: whoever calls it may differentiate the result by its input.
    """
    loop = event.loops[-1].node
    if not isinstance(loop, cst.For) or event.text not in bound_names(loop.target) or function.info is None:
        return False
    summary = function.info.summary
    if summary is None:
        return False
    returned = set(summary.returns.graph)
    for origin in summary.returns.objects:
        returned |= {each for held in summary.fields.get(origin, {}).values() for each in held.graph}
    sites = {origin.site for origin in reach(frozenset(returned))}
    return any(origin.site in sites for origin in event.result.graph)
