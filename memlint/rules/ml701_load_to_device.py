"""ML701: checkpoints loaded to a device instead of the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow.facts import CallEvent, FunctionFlow
from memlint.lint.flow.values import Kind, known_constant
from memlint.lint.model import Severity
from memlint.rules import wording
from memlint.rules.base import Draft, Rule
from memlint.rules.loaders import accelerator_device, argument
from memlint.rules.training import in_tests, starred


class LoadToDevice(Rule):
    """`torch.load` without `map_location`, or with the device that trains.

    Without `map_location` every tensor goes back to the device that it was saved from (torch 2.13,
    torch/serialization.py): in a distributed job all ranks put a copy on GPU 0, and a machine without that GPU raises.
    With the training device the checkpoint lies beside the model, its optimizer state too, until the last reference
    goes: the peak at start-up is that of two models, or more.

    It is right for small files, for tensors that were saved from the CPU, and where no model is on the device yet.

    Write `torch.load(path, map_location="cpu", weights_only=True)`: `load_state_dict` copies from the CPU into the
    parameters where they are. `mmap=True` reads only what is copied.
    """

    code, name, severity = "ML701", "load-to-device", Severity.NOTE
    triggers = ("torch.load(", ("import torch as ", ".load("))
    bad = """
import torch

def resume(path, model, optimizer):
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
"""
    good = bad.replace("torch.load(path)", 'torch.load(path, map_location="cpu", weights_only=True)')

    def check(self, flow: Flow) -> Iterator[Draft]:
        if in_tests(flow.path):
            return
        for function in list(flow.functions):
            for call in function.calls.values():
                if call.qualified == "torch.load" and call.node.args and not starred(call.node):
                    yield from self.judge(flow, function, call)

    def judge(self, flow: Flow, function: FunctionFlow, call: CallEvent) -> Iterator[Draft]:
        """The finding for one call, where there is one."""
        mapped = argument(call, "mmap")
        if mapped is not None and known_constant(mapped[1]) is not False:
            return
        given = argument(call, "map_location", 1)
        if given is None or given[1].kind is Kind.NONE:
            yield self.finding(
                call.node,
                "torch.load without map_location puts every tensor back on the device that it was saved from (all "
                'ranks of a distributed job on GPU 0). Load with map_location="cpu"; load_state_dict copies from '
                "there.",
            )
        elif "load_state_dict" in flow.code and to_accelerator(flow, function, call):
            text = wording.short(flow.text(given[0].value))
            yield self.finding(
                call.node,
                f"torch.load puts the whole checkpoint on `{text}`, beside the model: about twice the memory until it "
                'is freed. Load with map_location="cpu"; load_state_dict copies from there.',
            )


def to_accelerator(flow: Flow, function: FunctionFlow, call: CallEvent) -> bool:
    """Whether a `torch.load` call loads to a device that may be an accelerator."""
    given = argument(call, "map_location", 1)
    return given is not None and accelerator_device(flow, function, given[0].value, given[1])


def surely_to_accelerator(call: CallEvent) -> bool:
    """Whether a `torch.load` call says that it loads to an accelerator."""
    given = argument(call, "map_location", 1)
    if given is None:
        return False
    node = given[0].value
    if isinstance(node, cst.Call) and len(node.args) == 1:  # torch.device("cuda")
        node = node.args[0].value
    text = node.evaluated_value if isinstance(node, cst.SimpleString) else known_constant(given[1])
    return isinstance(text, str) and text.split(":")[0] in ("cuda", "xpu", "mps")
