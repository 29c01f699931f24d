"""The tracker that remembers: for each storage where it was made, in which step and phase, and what it is.

Slower than counting (a stack is walked for each new storage), so it runs for a few steps, when a question is open.
Like the counting one it holds no tensor and no storage.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memlint.runtime.sites import Site, made_at
from memlint.runtime.tracker import Live, StorageTracker, live_tensors, objects_of, storages

PARAMETER, GRADIENT, OPTIMIZER = "parameter", "gradient", "optimizer state"
ACTIVATION, INPUT, TEMPORARY, OTHER = "activation", "input", "temporary", "other"
#: alive before the run began: of earlier tests
LEFTOVER = "leftover"
FORWARD, BACKWARD, STEP, ELSEWHERE = "forward", "backward", "optimizer step", "other"


class Block:
    """One storage, alive or gone.

    nbytes: its size. shape, dtype: those of the tensor that first showed it. site: the line outside torch that made it;
    caller: the line of user code that led there. changed_at: the same two lines of the last change in place in forward
    code, of what was there before. step: the traced step, -1 for what was there before.
    born, died: moments, counted in events; died is None while it lives.
    """

    __slots__ = (
        "born", "caller", "category", "changed_at", "died", "dtype", "from_parameters",
        "key", "nbytes", "phase", "shape", "site", "step",
    )  # fmt: skip

    def __init__(self, key: int, nbytes: int, tensor: torch.Tensor, step: int, phase: str, born: int) -> None:
        self.key, self.nbytes, self.step, self.phase, self.born = key, nbytes, step, phase, born
        self.shape, self.dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        self.category = OTHER
        self.site: Site | None = None
        self.caller: Site | None = None
        self.changed_at: tuple[Site | None, Site | None] | None = None
        self.died: int | None = None
        self.from_parameters = False


class TracingTracker(StorageTracker):
    """Remembers every storage from `start()` to `stop()`.

    blocks: all of them, in the order of their making. live_at_peak() lists those that were alive when most was.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        super().__init__(device_type)
        self.step = 0
        self.blocks: list[Block] = []
        self.phase_at_peak = ELSEWHERE
        self._by_key: dict[int, Block] = {}
        self._clock = 0
        self._top = 0
        self._in_all = 0
        self._peak_moment = 0
        self._optimizing = 0
        self._in_backward = False
        self._from_parameters = False
        self._leaves: dict[int, weakref.ref[torch.Tensor]] = {}

    def start(self) -> None:
        super().start()
        hooks.add(self)
        self._name_what_is_there()
        self.forget_peak()

    def stop(self) -> None:
        hooks.discard(self)
        super().stop()
        self._by_key.clear()

    def leave_out(self, keys: Iterable[int]) -> None:
        """What was alive before the run began, by the addresses of the storages, is not of this run."""
        for key in keys:
            block = self._by_key.get(key)
            if block is not None and block.step < 0:
                block.category = LEFTOVER

    def forget_peak(self) -> None:
        """Look for the peak from here on."""
        with self._lock:
            self._drain()
            self._top, self._peak_moment, self.phase_at_peak = self._in_all, self._clock, ELSEWHERE

    def live_at_peak(self) -> list[Block]:
        """The blocks that were alive when most bytes were."""
        with self._lock:
            self._drain()
            moment = self._peak_moment
        return [b for b in self.blocks if b.born <= moment and (b.died is None or b.died > moment)]

    def survivors(self) -> list[Block]:
        """The blocks made since the start that are alive."""
        with self._lock:
            self._drain()
            return [block for block in self.blocks if block.died is None and block.step >= 0]

    def block_of(self, storage: Any) -> Block | None:
        """The block of a storage that is alive."""
        return self._by_key.get(storage._cdata) if self._known(storage) is not None else None

    def block_at(self, key: int) -> Block | None:
        """The block of the storage that is alive at this address."""
        return self._by_key.get(key)

    def categorise(self) -> None:
        """Say of what is alive now whether it is a parameter, a gradient, or an activation."""
        with self._lock:
            self._drain()
            self._name_activations()
            self._name_gradients()

    # -- what happens --------------------------------------------------------------------------------------------

    def saw(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        with self._lock:
            if not self._running:
                return
            backward = torch._C._current_graph_task_id() != -1
            if self._in_backward and not backward:
                self._drain()
                self._name_gradients()
            if backward and not self._in_backward:
                self._name_activations()
            self._in_backward = backward
            self._from_parameters = any(map(self._comes_from_parameters, args))
            super().saw(func, args, kwargs, out)
            if func._schema.is_mutable and self._phase() == FORWARD:
                self._note_change(out)
            self._clock += 1  # what dies from here on was alive at this operator's moment

    def _note_change(self, out: Any) -> None:
        for _, storage in storages(out) if isinstance(out, torch.Tensor) else ():
            block = self.block_of(storage)
            if block is not None and block.step < 0:
                block.changed_at = made_at(sys._getframe(1))

    def _born(self, key: int, item: Live, tensor: torch.Tensor, func: Any) -> None:
        block = Block(key, item.nbytes, tensor, -1 if item.before else self.step, self._phase(), self._clock)
        block.from_parameters = self._from_parameters and func is not None
        self._by_key[key] = block
        self.blocks.append(block)
        if not item.before:
            block.category = self._category(block)
            block.site, block.caller = made_at(sys._getframe(1))
        self._count(item.nbytes, block.phase)

    def _died(self, key: int, item: Live) -> None:
        block = self._by_key.pop(key, None)
        if block is not None:
            block.died = self._clock
            self._in_all -= block.nbytes

    def _resized(self, key: int, item: Live, nbytes: int) -> None:
        block = self._by_key.get(key)
        if block is not None:
            self._count(nbytes - block.nbytes, self._phase())
            block.nbytes = nbytes
        super()._resized(key, item, nbytes)

    def _count(self, nbytes: int, phase: str) -> None:
        self._in_all += nbytes
        if self._in_all > self._top:
            self._top, self._peak_moment, self.phase_at_peak = self._in_all, self._clock, phase

    def _phase(self) -> str:
        if self._in_backward:
            return BACKWARD
        if self._optimizing:
            return STEP
        return FORWARD if self._from_parameters and torch.is_grad_enabled() else ELSEWHERE

    def _category(self, block: Block) -> str:
        if block.phase == FORWARD:
            return TEMPORARY  # an activation if it is still there when backward begins
        if block.phase == ELSEWHERE and not block.from_parameters:
            return INPUT
        return TEMPORARY

    def _comes_from_parameters(self, value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            for _, storage in storages(value):
                block = self._by_key.get(storage._cdata)
                if block is not None and (block.from_parameters or block.category == PARAMETER):
                    return True
            return isinstance(value, torch.nn.Parameter)
        return isinstance(value, list | tuple) and any(map(self._comes_from_parameters, value))

    # -- what things are -----------------------------------------------------------------------------------------

    def _name_what_is_there(self) -> None:
        for optimizer in objects_of(torch.optim.Optimizer):
            self._name_state(optimizer)
        for tensor in live_tensors():
            if tensor.is_leaf and tensor.requires_grad:
                self._add_leaf(tensor)
        self._name_gradients()

    def _add_leaf(self, tensor: torch.Tensor) -> None:
        self._leaves[id(tensor)] = weakref.ref(tensor)

    def _name_state(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._name(parameter, PARAMETER)
                self._add_leaf(parameter)
        for state in list(optimizer.state.values()):
            for tensor in _tensors_in(state):
                self._name(tensor, OPTIMIZER)

    def _name_gradients(self) -> None:
        for key, reference in list(self._leaves.items()):
            tensor = reference()
            if tensor is None:
                del self._leaves[key]
                continue
            if isinstance(tensor, torch.nn.Parameter):
                self._name(tensor, PARAMETER)
            if tensor.grad is not None:
                self._name(tensor.grad, GRADIENT)

    def _name_activations(self) -> None:
        for block in self._by_key.values():
            if block.phase == FORWARD and block.category == TEMPORARY:
                block.category = ACTIVATION

    def _name(self, tensor: torch.Tensor, category: str) -> None:
        for _, storage in storages(tensor):
            block = self._by_key.get(storage._cdata)
            if block is not None and block.category != LEFTOVER:
                block.category = category

    def _before_optimizer(self, optimizer: Any) -> None:
        self._optimizing += 1

    def _after_optimizer(self, optimizer: Any) -> None:
        self._optimizing = max(self._optimizing - 1, 0)
        with self._lock:
            self._drain()
            self._name_state(optimizer)


class _Hooks:
    """Torch's global hooks, registered once and for all tracers that run: torch iterates over them as it calls them."""

    def __init__(self) -> None:
        self._tracers: weakref.WeakSet[TracingTracker] = weakref.WeakSet()
        self._handles: list[Any] = []
        self._wanted = 0

    def install(self) -> None:
        """Register them. Each call needs an `uninstall()`."""
        self._wanted += 1
        if not self._handles:
            self._handles = [
                register_optimizer_step_pre_hook(self._before),
                register_optimizer_step_post_hook(self._after),
                register_module_parameter_registration_hook(self._registered),
            ]

    def uninstall(self) -> None:
        """The last one removes them."""
        self._wanted -= 1
        if not self._wanted:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def add(self, tracer: TracingTracker) -> None:
        """Tell `tracer` from now on."""
        self._tracers.add(tracer)
        self.install()

    def discard(self, tracer: TracingTracker) -> None:
        """Tell it no more."""
        if tracer in self._tracers:
            self._tracers.discard(tracer)
            self.uninstall()

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for tracer in list(self._tracers):
            tracer._before_optimizer(optimizer)

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for tracer in list(self._tracers):
            tracer._after_optimizer(optimizer)

    def _registered(self, module: Any, name: str, parameter: Any) -> None:
        if isinstance(parameter, torch.Tensor):
            for tracer in list(self._tracers):
                tracer._add_leaf(parameter)


hooks = _Hooks()


def _tensors_in(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item, depth - 1)
