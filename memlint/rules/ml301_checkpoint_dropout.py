"""ML301: activation checkpointing without the random state."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.imports import dotted
from memlint.lint.model import Severity
from memlint.rules import edits
from memlint.rules.base import Draft, Rule

CHECKPOINTS = ("torch.utils.checkpoint.checkpoint", "torch.utils.checkpoint.checkpoint_sequential")


class CheckpointDropout(Rule):
    """Activation checkpointing runs the forward twice; dropout must draw the same mask both times.

    By default `torch.utils.checkpoint` stashes the state of the random number generators before the first run and
    restores it for the second, so the gradients are right, with dropout too. `preserve_rng_state=False` switches that
    off: the recomputation draws another mask, and the gradients belong to a network that never ran. No error, no
    warning: the training is silently wrong. Without anything random in the region, switching it off is right and
    saves a little time.

    The stashing has a price and a limit: it synchronises with the device to read the generator's state, and covers
    the devices of the arguments only, not a device that the region moves to by itself.
    """

    code, name, severity = "ML301", "checkpoint-dropout", Severity.ERROR
    triggers = ("utils.checkpoint", "utils import checkpoint", "preserve_rng_state", "use_reentrant")
    bad = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1))

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False, preserve_rng_state=False)
"""
    good = bad.replace(", preserve_rng_state=False", "")

    def check(self, flow: Flow) -> Iterator[Draft]:
        random = "ropout" in flow.code or "rop_path" in flow.code
        for node, args in checkpoint_calls(flow):
            given = next((arg for arg in args if arg.keyword and arg.keyword.value == "preserve_rng_state"), None)
            if given is not None:
                yield from self.given(flow, node, given, random)
            elif random and not partial(node):
                yield self.finding(
                    node,
                    "with dropout in the region, checkpoint() stashes and restores the random state (the default): the "
                    "gradients are right, at the price of a synchronisation, and only for the arguments' devices.",
                    severity=Severity.NOTE,
                )

    def given(self, flow: Flow, node: cst.Call, given: cst.Arg, random: bool) -> Iterator[Draft]:
        """`preserve_rng_state=...` is written."""
        value = flow.constant(given.value)
        if value is True:
            return
        if value is False:
            if random:
                yield self.finding(
                    given,
                    "preserve_rng_state=False: the recomputation draws another dropout mask, so the gradients are "
                    "silently wrong. Drop it.",
                    fix=edits.remove_argument(node, given, "drop preserve_rng_state=False", safe=False),
                )
            else:
                yield self.finding(
                    given,
                    "preserve_rng_state=False is right only if nothing in the region is random (dropout, drop path, "
                    "noise): otherwise the gradients are silently wrong.",
                    severity=Severity.NOTE,
                )
            return
        yield self.finding(
            given,
            f"preserve_rng_state=`{flow.text(given.value)}` decides whether the recomputation draws the same dropout "
            f"mask: it must be True wherever dropout is active, or the gradients are silently wrong.",
            severity=Severity.NOTE,
        )


def checkpoint_calls(flow: Flow) -> Iterator[tuple[cst.Call, list[cst.Arg]]]:
    """Calls of torch's checkpoint functions, and partial() of them, with the arguments that are theirs."""
    for call in flow.calls():
        if call.qualified in CHECKPOINTS:
            yield call.node, list(call.node.args)
        elif call.qualified.endswith("partial") and call.args and call.args[0].qualified in CHECKPOINTS:
            yield call.node, list(call.node.args[1:])


def partial(node: cst.Call) -> bool:
    """Whether a call only prepares another."""
    return dotted(node.func).rsplit(".", 1)[-1] == "partial"
