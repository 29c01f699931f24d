"""ML106: backward(create_graph=True)."""

from __future__ import annotations

from collections.abc import Iterator

from memlint.lint.flow import Flow
from memlint.lint.flow.facts import Backward, BackwardKind
from memlint.lint.flow.values import Grad
from memlint.lint.model import Severity
from memlint.rules.base import Draft, Rule


class CreateGraphBackward(Rule):
    """`backward(create_graph=True)` ties each parameter and its gradient into a cycle.

    The gradient in `.grad` then has a graph that leads back to the parameter, which holds the gradient: the cycle
    goes through C++ objects, so that not even `gc.collect()` frees it. Each step leaves a whole graph behind unless
    `.grad` is set to None. PyTorch warns about this once at run time.

    `torch.autograd.grad(loss, params, create_graph=True)` returns the gradients without storing them and makes no
    cycle: use it. Where a library wants gradients in `.grad` (second-order optimizers), set them to None after the
    step: `optimizer.zero_grad()` does so since torch 2.0, `set_to_none=False` and `p.grad.zero_()` do not.
    """

    code, name, severity = "ML106", "create-graph-backward", Severity.ERROR
    triggers = ("create_graph",)
    bad = """
def train(model, loader, criterion, optimizer):
    for inputs, targets in loader:
        loss = criterion(model(inputs), targets)
        loss.backward(create_graph=True)
        penalty = sum(p.grad.pow(2).sum() for p in model.parameters())
        penalty.backward()
        optimizer.step()
        for p in model.parameters():
            p.grad.zero_()
"""
    good = """
import torch

def train(model, loader, criterion, optimizer):
    for inputs, targets in loader:
        loss = criterion(model(inputs), targets)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        penalty = sum(g.pow(2).sum() for g in grads)
        (loss + penalty).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
"""

    def check(self, flow: Flow) -> Iterator[Draft]:
        for event in flow.backwards():
            if event.create is None or event.creates is False or event.kind is BackwardKind.HELPER:
                continue
            if event.kind is BackwardKind.GRAD:
                yield from self.in_forward(flow, event)
            elif not event.function.clears_grad:
                yield self.draft(event)

    def draft(self, event: Backward) -> Draft:
        """The finding on a backward."""
        message = (
            "backward(create_graph=True) makes each parameter and its .grad hold each other: the graph of every step "
            "stays, and gc.collect() does not free it, until .grad is set to None. "
            "Use torch.autograd.grad(..., create_graph=True), which stores nothing."
        )
        severity = self.severity
        if event.creates is None:
            severity = Severity.NOTE
        if any(call.text.endswith("zero_grad") and not call.node.args for call in event.function.calls.values()):
            severity = Severity.NOTE  # since torch 2.0 this sets the gradients to None
        if severity is self.severity and not event.loops and event.function.is_module:
            severity = Severity.WARNING
        assert event.create is not None
        return self.finding(event.create, message, severity=severity)

    def in_forward(self, flow: Flow, event: Backward) -> Iterator[Draft]:
        """autograd.grad in a forward: evaluation need not build the second graph."""
        cls = event.function.cls
        if cls is None or not cls.is_module or event.function.name != "forward" or event.creates is not True:
            return
        if flow.grad_of(event.function) is not Grad.ON:
            return
        assert event.create is not None
        yield self.finding(
            event.create,
            "create_graph=True builds the graph of the gradients in evaluation too, where no second backward comes: "
            "create_graph=self.training saves it.",
            severity=Severity.NOTE,
        )
