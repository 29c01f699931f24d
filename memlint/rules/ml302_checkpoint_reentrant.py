"""ML302: which variant of activation checkpointing runs."""

from __future__ import annotations

from collections.abc import Iterator

from memlint.lint.flow import Flow
from memlint.lint.flow.facts import CallEvent
from memlint.lint.flow.values import Kind
from memlint.lint.model import Severity
from memlint.rules.base import Draft, Rule
from memlint.rules.ml301_checkpoint_dropout import CHECKPOINTS


class CheckpointReentrant(Rule):
    """`checkpoint()` without `use_reentrant`, or reentrant with inputs that do not require grad.

    Omitting `use_reentrant` still means True and only warns (torch 2.13, torch/utils/checkpoint.py). The reentrant
    variant computes no gradients at all for a region none of whose inputs requires grad: the first block of a network
    that is fed data, or blocks behind a frozen part, silently stop training. It also cannot be nested in
    `autograd.grad`.

    Write `use_reentrant=False`, the variant that PyTorch recommends. Where the reentrant one is wanted, an input that
    requires grad (`x.requires_grad_()`) makes it right.
    """

    code, name, severity = "ML302", "checkpoint-reentrant", Severity.WARNING
    triggers = ("utils.checkpoint", "utils import checkpoint", "preserve_rng_state", "use_reentrant")
    bad = """
import torch
from torch.utils.checkpoint import checkpoint

def forward(block):
    x = torch.randn(8, 64)
    return checkpoint(block, x, use_reentrant=True)
"""
    good = bad.replace("use_reentrant=True", "use_reentrant=False")

    def check(self, flow: Flow) -> Iterator[Draft]:
        for call in flow.calls():
            if call.qualified not in CHECKPOINTS:
                continue
            keywords = {arg.keyword.value: arg for arg in call.node.args if arg.keyword is not None}
            if any(arg.star == "**" for arg in call.node.args):
                continue
            given = keywords.get("use_reentrant")
            value = flow.constant(given.value) if given is not None else True
            if value is True and self.no_gradient(call):
                yield self.finding(
                    given if given is not None else call.node,
                    "none of the inputs of this checkpoint requires grad, so the reentrant variant computes no "
                    "gradients for the region: it does not train. Pass use_reentrant=False.",
                )
            elif given is None:
                yield self.finding(
                    call.node,
                    "use_reentrant is not said: PyTorch warns and takes True. Pass use_reentrant=False, the variant "
                    "that it recommends and that needs no input with requires_grad.",
                    severity=Severity.NOTE,
                )

    @staticmethod
    def no_gradient(call: CallEvent) -> bool:
        """Whether every input surely has no graph: tensors made here, without requires_grad."""
        given = [
            value
            for arg, value in zip(call.node.args[1:], call.args[1:], strict=False)
            if arg.keyword is None and not arg.star
        ]
        tensors = [value for value in given if value.kind is not Kind.NUMBER and value.kind is not Kind.NONE]
        return bool(tensors) and all(value.kind is Kind.TENSOR and not value.graph for value in tensors)
