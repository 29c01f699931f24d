"""ML205: gradient accumulation and the synchronisation of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow.facts import BackwardKind, FunctionFlow, runs_in
from memlint.lint.flow.syntax import walk
from memlint.lint.flow.values import known_constant
from memlint.lint.flow.windows import windows
from memlint.lint.imports import dotted
from memlint.lint.model import Severity
from memlint.rules import wording
from memlint.rules.base import Draft, Rule
from memlint.rules.loaders import argument
from memlint.rules.training import assignments, body_of

DDP = "torch.nn.parallel.DistributedDataParallel"
_DDP = frozenset((DDP, "torch.nn.parallel.distributed.DistributedDataParallel"))
_FSDP = frozenset(
    (
        "torch.distributed.fsdp.FullyShardedDataParallel",
        "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel",
    )
)


class AccumulationSync(Rule):
    """Gradient accumulation synchronises on every micro-step, or keeps whole gradients to avoid it.

    DistributedDataParallel reduces the gradients across ranks in every backward; in an accumulation window only the
    last reduction is needed, and `no_sync()` skips the others. The result is the same, the time is not.

    With FullyShardedDataParallel it is the other way round for memory: under `no_sync()` every rank accumulates the
    gradients of the full model instead of its shard (torch 2.13, FullyShardedDataParallel.no_sync: "likely results in
    higher memory usage"). A job that fits may run out of memory.

    `find_unused_parameters=True` walks the graph after each forward pass, and DDP's outputs go through a function that
    clones them (torch 2.13, torch/nn/parallel/distributed.py, `_DDPSink`): large outputs are there twice. It is needed
    where parameters are left out in some steps; leave it off otherwise, and return only what the loss needs.

    All of these are notes: the code is right.
    """

    code, name, severity = "ML205", "accumulation-sync", Severity.NOTE
    triggers = ("no_sync", "find_unused_parameters", "DistributedDataParallel", "DDP(")
    bad = """
from torch.nn.parallel import DistributedDataParallel

def train(model, loader, criterion, optimizer, accum_steps):
    model = DistributedDataParallel(model)
    for i, (inputs, targets) in enumerate(loader):
        (criterion(model(inputs), targets) / accum_steps).backward()
        if (i + 1) % accum_steps == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
"""
    good = """
from contextlib import nullcontext
from torch.nn.parallel import DistributedDataParallel

def train(model, loader, criterion, optimizer, accum_steps):
    model = DistributedDataParallel(model)
    for i, (inputs, targets) in enumerate(loader):
        last = (i + 1) % accum_steps == 0
        with nullcontext() if last else model.no_sync():
            (criterion(model(inputs), targets) / accum_steps).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
"""

    def check(self, flow: Flow) -> Iterator[Draft]:
        sharded, replicated = self.wrapped(flow, _FSDP), self.wrapped(flow, _DDP)
        for function in list(flow.functions):
            yield from self.flags(function)
            if sharded:
                yield from self.unsharded(function, sharded - replicated)
            if replicated and not handles_sync(flow, function):
                yield from self.synchronised(function, replicated)

    @staticmethod
    def wrapped(flow: Flow, classes: frozenset[str]) -> set[str]:
        """The places that hold a wrapped model."""
        found: set[str] = set()
        for function in flow.functions:
            if any(call.qualified in classes for call in function.calls.values()):
                for assigned in assignments(body_of(function.node)):
                    call = function.calls.get(id(assigned.value))
                    if call is not None and call.qualified in classes and (text := dotted(assigned.target)):
                        found.add(text)
        return found

    def flags(self, function: FunctionFlow) -> Iterator[Draft]:
        """`find_unused_parameters=True`."""
        for call in function.calls.values():
            name = (call.qualified or call.text).rsplit(".", 1)[-1]
            if name in ("DistributedDataParallel", "DDPStrategy", "DistributedDataParallelKwargs", "DDP"):
                given = argument(call, "find_unused_parameters")
                static = argument(call, "static_graph")
                if static is not None and known_constant(static[1]) is not False:
                    continue  # then DDP clones in the first step only
                if given is not None and known_constant(given[1]) is True:
                    yield self.finding(
                        given[0],
                        "find_unused_parameters=True walks the graph after every forward pass, and DDP clones the "
                        "outputs of the model: large outputs are there twice. Leave it off unless steps really leave "
                        "parameters out.",
                    )

    def unsharded(self, function: FunctionFlow, models: set[str]) -> Iterator[Draft]:
        """`no_sync()` of an FSDP model."""
        for call in function.calls.values():
            func = call.node.func
            if isinstance(func, cst.Attribute) and func.attr.value == "no_sync" and dotted(func.value) in models:
                whole = wording.short(dotted(func.value))
                yield self.finding(
                    call.node,
                    f"under no_sync() each rank accumulates the gradients of the whole `{whole}` instead "
                    "of its shard. If memory is tight, synchronise in every micro-step.",
                )

    def synchronised(self, function: FunctionFlow, models: set[str]) -> Iterator[Draft]:
        """An accumulation window of a DDP model that synchronises in every micro-step."""
        for window in windows(function):
            if window.backward.kind not in (BackwardKind.TENSOR, BackwardKind.AUTOGRAD) or not window.named:
                continue
            runs = (call for call in function.calls.values() if runs_in(call.path, window.loop))
            if not any(dotted(item) in models for call in runs for item in walk(call.node.func)):
                continue
            yield self.finding(
                window.backward.node,
                "DDP reduces the gradients across ranks in every micro-step; only the last one of a window needs it. "
                "Run the others under model.no_sync().",
            )


def handles_sync(flow: Flow, function: FunctionFlow) -> bool:
    """Whether a function says itself when ranks synchronise: `no_sync()`, a helper called so, or DDP's own flag."""
    if "require_backward_grad_sync" in flow.code:
        return True
    return any("sync" in call.text.rsplit(".", 1)[-1] for call in function.calls.values())
