"""ML602: device tensors made in a Dataset or collate function."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow.facts import CallEvent, FunctionFlow, Guard
from memlint.lint.flow.index import FunctionInfo
from memlint.lint.flow.values import Kind, Method
from memlint.lint.imports import dotted
from memlint.lint.model import Severity
from memlint.rules import wording
from memlint.rules.base import Draft, Rule
from memlint.rules.loaders import (
    accelerator_device,
    argument,
    is_torch_dataset,
    loaded_by,
    loaders,
    parameter,
    surely_loaded_by,
    workers,
)
from memlint.rules.ml501_empty_cache_in_loop import availability
from memlint.rules.training import keyword

_ENTRIES = ("__getitem__", "__getitems__")
#: torch functions that make a tensor on the device they are given
_MAKERS = frozenset(
    "torch." + name
    for name in """
    tensor as_tensor zeros ones full empty rand randn randint arange linspace eye zeros_like ones_like full_like
    rand_like randn_like empty_like load
    """.split()
)


#: of these, the ones that are given no data
_EMPTY = _MAKERS - {"torch.tensor", "torch.as_tensor", "torch.load"}


class CudaInDataset(Rule):
    """Tensors are moved to the GPU inside a Dataset or collate function that workers run.

    A worker is a process of its own. Forked, it cannot use CUDA at all ("Cannot re-initialize CUDA in forked
    subprocess"); spawned, every worker makes a CUDA context of its own (hundreds of MiB of GPU memory each) and
    prefetches `prefetch_factor` batches of GPU tensors, which are kept alive across processes. Without workers the
    copies run one sample at a time and the GPU waits for them.

    It is right where the device is the CPU, and where a small data set that lives on the GPU is read with
    `num_workers=0`; memlint is silent where the file says so.

    Return CPU tensors; move the whole batch in the training loop, with `pin_memory=True` and `non_blocking=True`.
    """

    code, name, severity = "ML602", "cuda-in-dataset", Severity.WARNING
    triggers = (
        ("__getitem__", ".cuda()"),
        ("__getitem__", ".to("),
        ("__getitem__", "device="),
        ("collate", ".cuda()"),
        ("collate", ".to("),
        ("collate", "device="),
        ("__getitems__", ".to("),
    )
    bad = """
import torch
from torch.utils.data import DataLoader, Dataset

class Pictures(Dataset):
    def __init__(self, arrays):
        self.arrays = arrays

    def __len__(self):
        return len(self.arrays)

    def __getitem__(self, index):
        return torch.from_numpy(self.arrays[index]).cuda()

def batches(arrays):
    return DataLoader(Pictures(arrays), batch_size=32, num_workers=4)
"""
    good = bad.replace(".cuda()", "").replace("num_workers=4", "num_workers=4, pin_memory=True")

    def check(self, flow: Flow) -> Iterator[Draft]:
        seen: set[int] = set()
        for cls in flow.index.classes.values():
            entries = [cls.methods[name] for name in _ENTRIES if name in cls.methods]
            if entries and is_torch_dataset(cls):
                given = surely_loaded_by(flow, cls) or loaded_by(flow, cls)
                counts = [workers(call) for call in given]
                if 0 in counts and not any(counts):
                    continue  # read in the main process
                for entry in entries:
                    yield from self.calls(flow, entry, f"`{cls.name}.{entry.name}`", seen, counts)
        for call in loaders(flow):
            if workers(call) != 0 and (collate := collate_of(call)) is not None:
                yield from self.calls(flow, collate, f"the collate function `{collate.name}`", seen)

    def calls(
        self, flow: Flow, entry: FunctionInfo, where: str, seen: set[int], counts: Sequence[int | None] = (None,)
    ) -> Iterator[Draft]:
        """The first device call that runs when `entry` does: in it, or in methods and functions of the file it calls.

        counts: the workers of each DataLoader of the file that may run it; None where that is not known. Without a
        loader in sight, moving a row of what the data set holds in memory is a note; without workers, so is making a
        tensor: such data sets are often read in the main process.
        """
        stack, visited = [entry], set()
        while stack:
            info = stack.pop()
            if id(info) in visited or info.flow is None:
                continue
            visited.add(id(info))
            for call in sorted(info.flow.calls.values(), key=lambda event: event.order):
                if call.target is not None and len(visited) < 20:
                    stack.append(call.target)
                if id(call.node) not in seen and (what := moves(flow, info.flow, call)):
                    seen.add(id(call.node))
                    chosen = any(isinstance(f, Guard) and not availability(flow, f.test) for f in call.path)
                    alone = (not counts and of_table(call)) or (not any_workers(counts) and call.qualified in _EMPTY)
                    yield self.draft(call, what, where, asked=chosen or alone)
                    return

    def draft(self, call: CallEvent, what: str, where: str, *, asked: bool) -> Draft:
        """The finding."""
        message = (
            f"`{wording.short(what)}` runs in {where}, so in every worker of a DataLoader: a forked worker cannot use "
            "CUDA, a spawned one holds a CUDA context and GPU batches of its own. Return CPU tensors and move the "
            "batch in the training loop (pin_memory=True, non_blocking=True), or load with num_workers=0."
        )
        return self.finding(call.node, message, severity=Severity.NOTE if asked else self.severity)


def of_table(call: CallEvent) -> bool:
    """Whether what is moved is a row of something that `self` holds: `self.rows[i].to(self.device)`."""
    func = call.node.func
    moved = func.value if isinstance(func, cst.Attribute) else None
    while isinstance(moved, cst.Call) and isinstance(moved.func, cst.Attribute):
        moved = moved.func.value  # `.long()`
    return isinstance(moved, cst.Subscript) and dotted(moved.value).startswith("self.")


def any_workers(counts: Sequence[int | None]) -> bool:
    """Whether one of the loaders of a file has workers, or may have. counts: those of each; None where not known."""
    return any(count is None or count > 0 for count in counts)


def moves(flow: Flow, function: FunctionFlow, call: CallEvent) -> str:
    """How a call puts a tensor on an accelerator; empty where it does not, or where that is not known."""
    func = call.node.func
    if isinstance(func, cst.Attribute) and not call.qualified:
        if call.target is not None:
            return ""  # a method of the file: what it does is looked at itself
        if func.attr.value == "cuda" and not (call.node.args and call.node.args[0].star):
            return f".cuda({flow.text(call.node.args[0].value) if call.node.args else ''})"
        if func.attr.value == "to" and call.node.args:
            arg = keyword(call.node, "device", 0)
            if arg is not None and on_device(flow, function, call, arg):
                return f".to({flow.text(arg.value)})"
    if call.qualified in _MAKERS:
        name = "map_location" if call.qualified == "torch.load" else "device"
        arg = keyword(call.node, name)
        if arg is not None and on_device(flow, function, call, arg):
            return f"{call.text}(..., {name}={flow.text(arg.value)})"
    return ""


def on_device(flow: Flow, function: FunctionFlow, call: CallEvent, arg: cst.Arg) -> bool:
    """Whether an argument means an accelerator."""
    value = call.args[next(i for i, other in enumerate(call.node.args) if other is arg)]
    if not value.objects and parameter(function, arg.value).graph:
        value = parameter(function, arg.value)
    return accelerator_device(flow, function, arg.value, value)


def collate_of(call: CallEvent) -> FunctionInfo | None:
    """The function of this file that a loader collates with."""
    given = argument(call, "collate_fn", 6)
    if given is None:
        return None
    value = given[1]
    if value.kind is Kind.FUNCTION and isinstance(value.info, FunctionInfo):
        return value.info
    if value.kind is Kind.METHOD and isinstance(value.info, Method):
        return value.info.function
    return None
