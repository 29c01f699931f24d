"""Autograd graphs, walked from the tensors that Python knows: which node holds which storage for a later backward.

Saved tensors are read through `SavedTensor.data` (torch/csrc/autograd/init.cpp), which runs no unpack hook: an unpack
hook may recompute a checkpoint or load from disk. What a pack hook made of a tensor is searched for tensors instead.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch

from memlint.runtime.tracker import storages

#: how far a packed value is searched for tensors
_PACKED_OBJECTS = 2000


@dataclass(frozen=True, slots=True)
class Saved:
    """How a graph holds a storage: the node that saved it, and the tensor through which Python holds the graph."""

    node: Any
    root: torch.Tensor
    gradient_of: torch.Tensor | None = None


class Graphs:
    """All graphs that hang on `tensors`. A node is charged to a tensor at the end of its graph that somebody holds.

    Torch keeps the Python object of a tensor alive as long as C++ has the tensor, so `tensors` holds many that no
    Python code knows of any more. So tensors at the end come before those in the middle of another's graph, and of
    those at the end the ones first that `are_held` picks, by id.

    saved: by the address of a storage, who saved it. roots: by the id of a node or of a packed object that Python code
    may hold, the tensor whose graph it is in.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        are_held: Callable[[list[torch.Tensor]], set[int]] = lambda tensors: set(),
    ) -> None:
        self.saved: dict[int, Saved] = {}
        self.roots: dict[int, torch.Tensor] = {}
        self._kept: list[Any] = []  # so that ids stay theirs while this object lives
        self.size = 0
        starts: list[tuple[Any, torch.Tensor, torch.Tensor | None]] = []
        for tensor in tensors:
            if (node := _grad_fn(tensor)) is not None:
                starts.append((node, tensor, None))
            elif tensor.is_leaf and tensor.requires_grad and tensor.grad is not None:
                gradient = tensor.grad
                if (node := _grad_fn(gradient)) is not None:
                    starts.append((node, gradient, tensor))
        inner = _inner_nodes([node for node, _, _ in starts])
        held = are_held(
            [leaf if leaf is not None else tensor for node, tensor, leaf in starts if id(node) not in inner]
        )

        def order(start: tuple[Any, torch.Tensor, torch.Tensor | None]) -> tuple[bool, bool]:
            node, tensor, leaf = start
            return id(node) in inner, id(leaf if leaf is not None else tensor) not in held

        for node, tensor, leaf in sorted(starts, key=order):
            self._walk(node, tensor, leaf)

    def own_objects(self) -> list[Any]:
        """What this object holds things with, for a search that must not find it."""
        return [self.saved, self.roots, self._kept, vars(self)]

    def _walk(self, start: Any, root: torch.Tensor, leaf: torch.Tensor | None) -> None:
        waiting = [start]
        while waiting:
            node = waiting.pop()
            if id(node) in self.roots:
                continue
            self.roots[id(node)] = root
            self._kept.append(node)
            self.size += 1
            for tensor in self._held_by(node, root, waiting):
                for _, storage in storages(tensor):
                    self.saved.setdefault(storage._cdata, Saved(node, root, leaf))
            waiting.extend(next_node for next_node, _ in node.next_functions if next_node is not None)

    def _held_by(self, node: Any, root: torch.Tensor, waiting: list[Any]) -> Iterator[torch.Tensor]:
        variable = getattr(node, "variable", None)  # AccumulateGrad holds the leaf
        if isinstance(variable, torch.Tensor):
            yield variable
        for name in _raw_names(type(node)):
            try:
                value = getattr(node, name)
            except RuntimeError:
                continue  # freed by backward
            for saved in value if isinstance(value, list | tuple) else (value,):
                yield from self._unpacked(saved, node, root, waiting)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            for value in vars(node).values():
                yield from self._search(value, node, root, waiting)

    def _unpacked(self, saved: Any, node: Any, root: torch.Tensor, waiting: list[Any]) -> Iterator[torch.Tensor]:
        try:
            data = saved.data
            hook = saved.unpack_hook
        except AttributeError:  # torch before these existed: unpack it, which is harmless where there are no hooks
            with torch.no_grad():
                try:
                    data, hook = saved.unpack(node) if hasattr(saved, "unpack") else None, None
                except (RuntimeError, TypeError):
                    return
        except RuntimeError:
            return  # freed
        if isinstance(data, torch.Tensor):
            yield data
        elif data is not None:
            yield from self._search(data, node, root, waiting)
        if hook is not None:
            yield from self._search(hook, node, root, waiting)

    def _search(self, value: Any, node: Any, root: torch.Tensor, waiting: list[Any]) -> Iterator[torch.Tensor]:
        """The tensors that a Python object leads to: what a hook packed, an attribute of a ctx."""
        seen: set[int] = set()
        queue: deque[Any] = deque([value])
        while queue and len(seen) < _PACKED_OBJECTS:
            item = queue.popleft()
            if id(item) in seen or isinstance(item, type | ModuleType | BuiltinFunctionType | str | int | float):
                continue
            seen.add(id(item))
            if isinstance(item, torch.Tensor):
                yield item
                if (node := _grad_fn(item)) is not None:
                    waiting.append(node)
            elif isinstance(item, torch.autograd.graph.Node):
                waiting.append(item)
            elif isinstance(item, torch._C._autograd.SavedTensor):  # a checkpoint keeps its arguments in such
                yield from self._unpacked(item, node, root, waiting)
            elif isinstance(item, torch.nn.Module | torch.optim.Optimizer):
                continue
            else:
                if gc.is_tracked(item) and id(item) not in self.roots:
                    self.roots[id(item)] = root
                    self._kept.append(item)
                queue.extend(_inside(item))


def _inner_nodes(starts: list[Any]) -> set[int]:
    """The ids of the nodes that another node leads to; `starts` must be kept alive by the caller."""
    inner: set[int] = set()
    waiting = list(starts)
    kept = []
    for node in waiting:
        for following, _ in node.next_functions:
            if following is not None and id(following) not in inner:
                inner.add(id(following))
                kept.append(following)
                waiting.append(following)
    return inner


def _inside(item: Any) -> list[Any]:
    if isinstance(item, FunctionType):
        return [cell.cell_contents for cell in item.__closure__ or () if _filled(cell)]
    if isinstance(item, dict):
        return list(item.values())
    return gc.get_referents(item)


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _grad_fn(tensor: torch.Tensor) -> Any:
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view whose base was changed in a way that autograd refuses
        return None


_names: dict[type, tuple[str, ...]] = {}


def _raw_names(kind: type) -> tuple[str, ...]:
    names = _names.get(kind)
    if names is None:
        names = _names[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
    return names
