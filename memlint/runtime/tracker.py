"""Counts the bytes behind live tensors: which storages exist, when one is made, when it is freed.

A dispatch mode sees the tensors that go into and come out of every operator below autograd, so saved tensors and
gradients too; a weak reference on each storage says when it is gone (torch keeps one Python object a storage alive as
long as the storage, see `THPStorage_Wrap` in torch/csrc/Storage.cpp and "PyObject preservation"). Views share a storage
and count once. What it cannot see: memory that a kernel takes and gives back inside one operator.

The tracker holds no tensor and no storage: numbers and weak references only.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
    is_traceable_wrapper_subclass,
)

#: operators that change the size of a storage that exists, or put another one behind a tensor
_RESIZING = frozenset(
    {"aten::resize_", "aten::resize_as_", "aten::set_", "aten::resize", "inductor::resize_storage_bytes_"}
)
_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


_Kind = TypeVar("_Kind")


class _Ref(weakref.ref[Any]):
    """A weak reference to a storage that knows which one it was."""

    __slots__ = ("key",)
    key: int


def _ref(storage: Any, callback: Callable[[Any], None]) -> _Ref:
    reference = _Ref(storage, callback)
    reference.key = storage._cdata
    return reference


class Live:
    """One storage that is alive."""

    __slots__ = ("before", "nbytes", "ref")

    def __init__(self, ref: Any, nbytes: int, before: bool) -> None:
        self.ref, self.nbytes, self.before = ref, nbytes, before


class StorageTracker:
    """Live and peak bytes of the storages on one kind of device, from `start()` to `stop()`.

    `live` and `peak` leave out what was alive at the start, which is `leftover`. All sizes in bytes.
    """

    def __init__(self, device_type: str = "cpu") -> None:
        self.device_type = device_type
        self.live = 0
        self.peak = 0
        self.leftover = 0
        self._alive: dict[int, Live] = {}
        self._freed: deque[_Ref] = deque()
        self._lock = threading.RLock()
        self._mode: TrackingMode | None = None
        self._running = False

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to count; what is alive now is `leftover`."""
        self._running = True
        for tensor in live_tensors():
            self._meet(tensor, None, before=True)
        self.leftover = sum(item.nbytes for item in self._alive.values())
        self.resume()

    def resume(self) -> None:
        """See the operators of this thread, and of threads that start from now on."""
        if self._mode is not None:
            return
        _uncompiled.begin()
        self._mode = TrackingMode([self])
        _push_mode(self._mode)
        _threads.add(self)

    def pause(self) -> None:
        """See no operators any more; frees are still counted."""
        if self._mode is None:
            return
        _threads.discard(self)
        remove_mode(self._mode)
        self._mode = None
        _uncompiled.end()

    def stop(self) -> None:
        """Forget everything."""
        self.pause()
        self._running = False
        with self._lock:
            self._alive.clear()
            self._freed.clear()

    def reset_peak(self) -> None:
        """The peak starts again from what is alive now."""
        self.settle()
        self.peak = self.live

    def settle(self) -> None:
        """Take in what was freed or resized behind the operators' back (`storage.resize_`)."""
        with self._lock:
            self._drain()
            for key, item in list(self._alive.items()):
                storage = item.ref()
                if storage is not None and (nbytes := _nbytes(storage)) != item.nbytes:
                    self._resized(key, item, nbytes)

    def count(self) -> int:
        """How many storages are alive that were not there at the start."""
        with self._lock:
            self._drain()
            return sum(not item.before for item in self._alive.values())

    # -- what happens --------------------------------------------------------------------------------------------

    def saw(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operator ran."""
        with self._lock:
            if not self._running:
                return
            if self._freed:
                self._drain()
            for value in args:
                self._look(value, None)
            if kwargs:
                for value in kwargs.values():
                    self._look(value, None)
            self._look(out, func)
            if func._schema.name in _RESIZING:
                self._look_again(args)
                self._look_again((out,))

    def _look(self, value: Any, func: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._meet(value, func)
        elif isinstance(value, list | tuple):
            for item in value:
                self._look(item, func)
        elif isinstance(value, dict):
            for item in value.values():
                self._look(item, func)

    def _look_again(self, values: Any) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                for _, storage in storages(value):
                    item = self._known(storage)
                    if item is not None and (nbytes := _nbytes(storage)) != item.nbytes:
                        self._resized(storage._cdata, item, nbytes)

    def _known(self, storage: Any) -> Live | None:
        """What is remembered of a storage that is alive; an address may have had another storage before."""
        item = self._alive.get(storage._cdata)
        return item if item is not None and item.ref() is storage else None

    def _meet(self, tensor: torch.Tensor, func: Any, before: bool = False) -> None:
        """Count the storages behind `tensor` that are not yet known; `func` made it, or None where it was found."""
        for part, storage in storages(tensor):
            if self._known(storage) is not None or storage.device.type != self.device_type:
                continue
            key, nbytes = storage._cdata, _nbytes(storage)
            item = Live(_ref(storage, self._freed.append), nbytes, before)
            self._alive[key] = item
            if not before:
                self._grow(nbytes)
            self._born(key, item, part, func)

    def _drain(self) -> None:
        while self._freed:
            ref = self._freed.popleft()
            item = self._alive.get(ref.key)
            if item is not None and item.ref is ref:
                del self._alive[ref.key]
                if not item.before:
                    self.live -= item.nbytes
                self._died(ref.key, item)

    def _resized(self, key: int, item: Live, nbytes: int) -> None:
        change, item.nbytes = nbytes - item.nbytes, nbytes
        if not item.before:
            self._grow(change)

    def _grow(self, nbytes: int) -> None:
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def _born(self, key: int, item: Live, tensor: torch.Tensor, func: Any) -> None:
        """For the tracker that remembers more."""

    def _died(self, key: int, item: Live) -> None:
        """For the tracker that remembers more."""


class TrackingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows trackers the operators of one thread; which ones may change while the thread runs."""

    def __init__(self, trackers: list[StorageTracker]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trackers = trackers

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch wraps __torch_dispatch__ in a call into torch._dynamo: 4 of 9 microseconds an operator. Nothing is
        # compiled while a tracker watches (`_Uncompiled`).
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
        for tracker in self._trackers:
            tracker.saw(func, args, kwargs, out)
        return out


class _Uncompiled:
    """While a tracker runs, functions under torch.compile run as they are written, also those compiled before.

    By the stance "force_eager" (torch.compiler.set_stance, torch 2.6); older versions leave them compiled.
    """

    def __init__(self) -> None:
        self._wanted = 0
        self._stance: Any = None

    def begin(self) -> None:
        """Each call needs an `end()`."""
        self._wanted += 1
        set_stance: Any = getattr(torch.compiler, "set_stance", None)
        if self._wanted == 1 and set_stance is not None:
            self._stance = set_stance("force_eager")
            self._stance.__enter__()

    def end(self) -> None:
        """The last one leaves torch as it was."""
        self._wanted -= 1
        if not self._wanted and self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None


_uncompiled = _Uncompiled()


def storages(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, Any]]:
    """The storages behind `tensor`, each with the plain tensor that shows it; none where torch shows none.

    A wrapper subclass (DTensor, a jagged nested tensor) is taken apart by its `__tensor_flatten__`, a sparse tensor
    into its indices and values; an opaque one (mkldnn) has no storage that could be seen.
    """
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        if is_traceable_wrapper_subclass(tensor):
            for name in tensor.__tensor_flatten__()[0]:
                part = getattr(tensor, name)
                if isinstance(part, torch.Tensor):
                    yield from storages(part)
            return
        if _is_empty_wrapper(tensor):
            return
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):  # ValueError: a parameter of a lazy module
        pass
    else:
        yield tensor, storage
        return
    for name in _SPARSE_PARTS.get(tensor.layout, ()):
        with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):
            part = getattr(tensor.detach(), name)()
            yield part, part.untyped_storage()


def _is_empty_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a subclass only stands for other tensors: its storage has a size, and no memory behind it."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError, ValueError):
        return False
    if storage.nbytes() == 0 or storage.device.type == "meta":
        return False
    try:
        return storage.data_ptr() == 0
    except RuntimeError:  # "invalid python storage", says torch of such a one
        return True


def live_tensors() -> list[torch.Tensor]:
    """All tensors that Python knows of; not those that only C++ holds, such as saved tensors of a graph."""
    return objects_of(torch.Tensor)


def objects_of(kind: type[_Kind]) -> list[_Kind]:
    """All objects of class `kind` or one derived from it that the collector tracks and has not frozen.

    Asks the class of each object, not the object: a proxy would answer for what it stands for.
    """
    classes: dict[type, bool] = {}
    found = []
    for item in gc.get_objects():
        own = type(item)
        fits = classes.get(own)
        if fits is None:
            fits = classes[own] = kind in own.__mro__
        if fits:
            found.append(item)
    return found


def _nbytes(storage: Any) -> int:
    return int(storage.nbytes())


class OldStorages:
    """The storages that are alive when this is made; asked later, those of them that still are."""

    def __init__(self, device_type: str) -> None:
        self._references = [
            _ref(storage, _ignore)
            for tensor in live_tensors()
            for _, storage in storages(tensor)
            if storage.device.type == device_type
        ]

    def keys(self) -> set[int]:
        """The addresses of those that are still alive."""
        return {reference.key for reference in self._references if reference() is not None}


def _ignore(reference: Any) -> None:
    """Nothing to do."""


def remove_mode(mode: TorchDispatchMode) -> None:
    """Take `mode` off the stack of this thread, wherever it is: a fixture may have pushed others on top."""
    above = []
    stack = _get_current_dispatch_mode_stack()
    if mode not in stack:
        return
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        _push_mode(other)


class _Threads:
    """Lets the running trackers see threads that start while they run."""

    def __init__(self) -> None:
        self._trackers: list[StorageTracker] = []
        self._original: Any = None

    def add(self, tracker: StorageTracker) -> None:
        self._trackers.append(tracker)
        if self._original is None:
            self._original = original = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]
            trackers = self._trackers

            def bootstrap(thread: threading.Thread) -> None:
                # the list, not its items: a thread may outlive a tracker and see the next
                _push_mode(TrackingMode(trackers))
                original(thread)

            threading.Thread._bootstrap_inner = bootstrap  # type: ignore[attr-defined]

    def discard(self, tracker: StorageTracker) -> None:
        if tracker in self._trackers:
            self._trackers.remove(tracker)
        if not self._trackers and self._original is not None:
            threading.Thread._bootstrap_inner = self._original  # type: ignore[attr-defined]
            self._original = None


_threads = _Threads()
