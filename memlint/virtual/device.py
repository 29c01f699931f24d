"""A CUDA device that is not there: programs see it, the caching allocator's rules keep its books, no data is computed.

Tensors "on the device" are meta tensors: they have shapes, storages, views and autograd graphs, and no memory behind
them. A function mode shows them to the program as CUDA tensors and takes its wishes for a device; a dispatch mode sees
every operator below autograd, asks the allocator for what CUDA would ask for (`kernels` knows where that is more than
the results), and gives back what is freed, when it is freed. Tensors on the CPU stay what they are, with their values;
only those of a MiB and more that a program makes there are without data too, so that a model of any size can be built.

Values that a program reads off the device are stand-ins: 1.0, 1 and False (True for what `all()` gives), unless a
constant was put there. `nonzero`, masks and `unique` find all elements: the most memory that they can take.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._meta_registrations  # what many operators do to meta tensors
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode
from torch.utils import _device as default_device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from memlint.virtual import cards
from memlint.virtual.allocator import AllocatorSettings, CachingAllocator, OutOfMemory
from memlint.virtual.autocast import CAST, Autocast
from memlint.virtual.cards import Card

aten = torch.ops.aten
#: tensors of so many bytes that are made on the CPU are made without data
LARGE = 2**20
#: what is copied from the device to the CPU gets stand-in values up to this size, and no data beyond it
MOST_STAND_IN = 64 * 2**20

CPU = -1  # a tensor without data that is "on the CPU"
META = -2  # one that the program itself put on the meta device


class _Ref(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that knows which one it was."""

    __slots__ = ("key",)
    key: int


class _Place:
    """Where a storage lies. index: the device, or CPU or META."""

    __slots__ = ("address", "index", "nbytes", "ref", "value")

    def __init__(self, ref: _Ref, index: int, nbytes: int, address: int) -> None:
        self.ref, self.index, self.nbytes, self.address = ref, index, nbytes, address
        #: the one number in it, where that is known
        self.value: Any = None


class Device:
    """The state of the virtual device: its cards, and what lies where. Sizes in bytes."""

    def __init__(self, card: Card, count: int, settings: AllocatorSettings | None, capacity: int | None) -> None:
        self.card = card
        self.context, self.context_source = cards.context_bytes(card, torch.__version__)
        room = card.total_bytes - self.context if capacity is None else capacity
        self.allocators = [CachingAllocator(settings, room) for _ in range(count)]
        self.current = 0
        self.stream = 0
        #: where what is made now goes, whatever it is made from; None to decide by the arguments
        self.target: int | None = None
        self.workspaces: set[tuple[int, str, int]] = set()
        self.autocast = Autocast(self.is_here)
        #: told of each allocation and free: (action, index, address, nbytes, operator)
        self.listener: Callable[[str, int, int, int, str], None] | None = None
        self.operator = ""
        #: by operator ("packet" or "packet.overload"): CUDA's way, above autograd
        self.overrides: dict[str, Callable[..., Any]] = {}
        self._places: dict[int, _Place] = {}
        self._freed: deque[_Ref] = deque()

    # -- places --------------------------------------------------------------------------------------------------

    def place(self, tensor: torch.Tensor) -> _Place | None:
        """Where the storage of a meta tensor lies; None for tensors with data, and unknown ones."""
        if not tensor.is_meta:
            return None
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError, ValueError):  # ValueError: a parameter of a lazy module
            return None
        found = self._places.get(storage._cdata)
        return found if found is not None and found.ref() is storage else None

    def index_of(self, tensor: torch.Tensor) -> int | None:
        """The device that a tensor is on: its number, CPU or META; None for a tensor with data."""
        if not tensor.is_meta:
            return None
        found = self.place(tensor)
        return self.current if found is None else found.index

    def is_here(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on one of the virtual cards."""
        index = self.index_of(tensor)
        return index is not None and index >= 0

    def shown(self, tensor: torch.Tensor) -> torch.device:
        """The device that the program sees."""
        index = self.index_of(tensor)
        if index is None:
            return tensor.device
        return torch.device("cuda", index) if index >= 0 else torch.device("cpu" if index == CPU else "meta")

    def keep(self, tensor: torch.Tensor, index: int) -> None:
        """Note where a new storage lies, and take its memory."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError, ValueError):
            return
        key = storage._cdata
        known = self._places.get(key)
        if known is not None:
            if known.ref() is storage:
                return
            if known.address:  # a storage that was freed within the operator, and whose address is in use again
                self.free(known.address, known.index)
        ref = _Ref(storage, self._freed.append)
        ref.key = key
        nbytes = storage.nbytes()
        address = self.malloc(nbytes, index) if index >= 0 and nbytes else 0
        self._places[key] = _Place(ref, index, nbytes, address)

    def drain(self) -> None:
        """Give back what was freed."""
        while self._freed:
            ref = self._freed.popleft()
            place = self._places.get(ref.key)
            if place is not None and place.ref is ref:
                del self._places[ref.key]
                if place.address:
                    self.free(place.address, place.index)

    def forget(self) -> None:
        """Forget all tensors."""
        self._places.clear()
        self._freed.clear()

    # -- memory --------------------------------------------------------------------------------------------------

    def malloc(self, nbytes: int, index: int) -> int:
        """Take memory. Raises torch.OutOfMemoryError."""
        try:
            address = self.allocators[index].malloc(nbytes, self.stream)
        except OutOfMemory as error:
            raise torch.OutOfMemoryError(f"{error} (virtual {self.card.title})") from None
        if self.listener is not None:
            self.listener("alloc", index, address, nbytes, self.operator)
        return address

    def free(self, address: int, index: int) -> None:
        """Give memory back."""
        self.allocators[index].free(address)
        if self.listener is not None:
            self.listener("free", index, address, 0, self.operator)

    def temporary(self, sizes: list[int], index: int) -> None:
        """Take memory that a kernel gives back at its end."""
        taken = [self.malloc(size, index) for size in sizes if size]
        for address in reversed(taken):
            self.free(address, index)

    def attempt(self, nbytes: int, index: int) -> None:
        """Take memory that a kernel can do without: cuDNN's next plan is tried (`try_configs`, cudnn/Conv_v8.cpp)."""
        if nbytes:
            with contextlib.suppress(torch.OutOfMemoryError):
                self.free(self.malloc(nbytes, index), index)

    def workspace(self, kind: str, nbytes: int, index: int, *, by_thread: bool = True) -> None:
        """A workspace that a library keeps: one a kind, thread and stream; or one a kind."""
        thread = "backward" if in_backward() else "forward"
        key = (index, f"{kind} {thread}", self.stream) if by_thread else (index, kind, 0)
        if key not in self.workspaces:
            self.workspaces.add(key)
            self.malloc(nbytes, index)


def in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)


# -- operators ---------------------------------------------------------------------------------------------------


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators without data and keeps the allocator's books."""

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self._compositions: dict[Any, Callable[..., Any] | None] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors: list[torch.Tensor] = []
        _collect(args, tensors)
        if kwargs:
            _collect(tuple(kwargs.values()), tensors)
        device = self.device
        index: int | None = None
        without_data = with_data = False
        apart = False
        for tensor in tensors:
            found = device.index_of(tensor)
            if found is None:
                with_data = True
                continue
            without_data = True
            apart = apart or (index is not None and index != found and bool(tensor.dim()))
            if (found >= 0 and (index is None or index < 0 or tensor.dim())) or index is None:
                index = found
        asked = kwargs.get("device")
        if not without_data and (asked is None or torch.device(asked).type != "meta"):
            return func(*args, **kwargs)
        if device.target is not None:
            index = device.target
        elif index is None or (asked is not None and torch.device(asked).type == "meta" and index < 0):
            index = device.current
        if torch.is_inference_mode_enabled():
            composed = self._composed(func)
            if composed is not None:
                with self:
                    return composed(*args, **kwargs)
        device.drain()
        device.operator = func._schema.name
        special = _SPECIAL.get(func)
        if special is not None:
            out = special(device, index, func, args, kwargs)
        else:
            if (with_data or apart) and index >= 0 and func not in _MIXING:
                _refuse_mixed(device, tensors)
            if with_data:
                args, kwargs = tree_map_only(torch.Tensor, _without_data, (args, kwargs))
            out = self._run(func, index, args, kwargs)
        self._note_values(func, args, out)
        return out

    def _composed(self, func: Any) -> Callable[..., Any] | None:
        """How an operator is made of others, where it is. In inference mode nothing above has taken it apart."""
        if func not in self._compositions:
            name = func._schema.name.removeprefix("aten::")
            overload = func._schema.overload_name
            found = self.device.overrides.get(f"{name}.{overload}" if overload else name)
            key = torch._C.DispatchKey.CompositeImplicitAutograd
            if found is None and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
                found = functools.partial(func._op_dk, key)
            self._compositions[func] = found
        return self._compositions[func]

    def _run(self, func: Any, index: int, args: Any, kwargs: Any) -> Any:
        from memlint.virtual import kernels, shortcuts

        device = self.device
        rule = kernels.RULES.get(func._overloadpacket) if index >= 0 else None
        plan = rule(device, index, func, args, kwargs) if rule is not None else None
        if plan is not None:
            plan.begin()
        try:
            out = shortcuts.result(func, args, kwargs)
            if out is shortcuts.NONE:
                out = func(*args, **kwargs)
        except NotImplementedError:
            decomposed = func.decompose(*args, **kwargs)
            if decomposed is NotImplemented:
                raise NotImplementedError(
                    f"{func} is not known to the virtual device: it cannot tell what it would allocate"
                ) from None
            out = decomposed
        if isinstance(out, torch.Tensor):
            device.keep(out, index)
        else:
            made: list[torch.Tensor] = []
            _collect(out, made)
            for tensor in made:
                device.keep(tensor, index)
        if plan is not None:
            plan.end(out)
        return out

    def _note_values(self, func: Any, args: Any, out: Any) -> None:
        """Follow single numbers that are put on the device: a scale, a flag that is set to zero."""
        if not isinstance(out, torch.Tensor) or out.numel() != 1 or not out.is_meta:
            return
        place = self.device.place(out)
        if place is None:
            return
        if func in _CONSTANT:
            place.value = _CONSTANT[func](args)
        elif func in _COPYING and isinstance(args[0], torch.Tensor):
            source = self.device.place(args[0])
            place.value = source.value if source is not None else None
        elif func._overloadpacket in (aten.all, aten._is_all_true):
            place.value = True
        elif func._schema.is_mutable:
            place.value = None


_CONSTANT: dict[Any, Callable[[Any], Any]] = {
    aten.full.default: lambda args: args[1],
    aten.zeros.default: lambda args: 0,
    aten.zeros_like.default: lambda args: 0,
    aten.ones.default: lambda args: 1,
    aten.ones_like.default: lambda args: 1,
    aten.scalar_tensor.default: lambda args: args[0],
    aten.fill_.Scalar: lambda args: args[1],
    aten.zero_.default: lambda args: 0,
}
_COPYING = frozenset((aten._to_copy.default, aten.clone.default))


#: what takes tensors of the CPU beside those of the device
_MIXING = frozenset(
    (
        aten.copy_.default,
        aten._to_copy.default,
        aten.index.Tensor,
        aten.index_put_.default,
        aten.index_put.default,
        aten._index_put_impl_.default,
        aten.set_.source_Tensor,
    )
)


def _refuse_mixed(device: Device, tensors: list[torch.Tensor]) -> None:
    """As TensorIterator does: only single numbers of the CPU may stand beside tensors of the device."""
    places = {device.shown(tensor) for tensor in tensors if tensor.dim()}
    if len(places) > 1:
        names = ", ".join(sorted(map(str, places), reverse=True))
        raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices, {names}!")


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the CPU as the operators of the device take it."""
    if tensor.is_meta:
        return tensor
    if isinstance(tensor, UninitializedTensorMixin):  # of a lazy module: it has no shape yet
        return torch.empty(0, dtype=tensor.dtype, device="meta")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


# -- operators that ask for values ---------------------------------------------------------------------------------

_Special = Callable[[Device, int, Any, Any, Any], Any]
_SPECIAL: dict[Any, _Special] = {}


def _special(*ops: Any) -> Callable[[_Special], _Special]:
    def take(function: _Special) -> _Special:
        for op in ops:
            _SPECIAL[op] = function
        return function

    return take


def stand_in(dtype: torch.dtype) -> Any:
    """What a program reads off the device: 1.0, 1 or False."""
    if dtype is torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else complex(1.0) if dtype.is_complex else 1


@_special(aten._local_scalar_dense.default)
def _item(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    place = device.place(args[0])
    if place is not None and place.value is not None:
        value = place.value
        return bool(value) if args[0].dtype is torch.bool else value
    return stand_in(args[0].dtype)


@_special(aten.equal.default)
def _equal(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    return True


def _read(tensor: torch.Tensor, dtype: torch.dtype, device: Device) -> torch.Tensor:
    """What arrives on the CPU when `tensor` is copied from the device."""
    nbytes = tensor.numel() * dtype.itemsize
    if nbytes > MOST_STAND_IN:
        out = torch.empty(tensor.shape, dtype=dtype, device="meta")
        device.keep(out, CPU)
        return out
    place = device.place(tensor)
    value = stand_in(dtype) if place is None or place.value is None else place.value
    return torch.full(tensor.shape, value, dtype=dtype)


@_special(aten._to_copy.default)
def _to_copy(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    source, asked = args[0], kwargs.get("device")
    if asked is not None and torch.device(asked).type == "cpu" and source.is_meta:
        return _read(source, kwargs.get("dtype") or source.dtype, device)
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    source = _without_data(source)
    if asked is not None:
        kwargs["device"] = torch.device("meta")
    out = func(source, **kwargs)
    if out is source or out.untyped_storage()._cdata == source.untyped_storage()._cdata:
        out = source.clone()
    device.keep(out, index)
    return out


@_special(aten.copy_.default)
def _copy(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    target, source = args[0], args[1]
    if target.is_meta:
        func(target, _without_data(source), **kwargs)
    return target


@_special(aten.nonzero.default)
def _nonzero(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    """All elements count as true: the most memory that it can take."""
    out = torch.empty((args[0].numel(), max(args[0].dim(), 0)), dtype=torch.int64, device="meta")
    device.keep(out, index)
    return out


@_special(aten.masked_select.default)
def _masked_select(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
    out = torch.empty((math.prod(shape),), dtype=args[0].dtype, device="meta")
    device.keep(out, index)
    return out


@_special(aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)
def _index(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    positions: list[Any] = []
    for item in args[1]:
        if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
            count = item.numel()
            positions += [torch.empty((count,), dtype=torch.int64, device="meta") for _ in range(item.dim())]
        else:
            positions.append(item)
    args = tree_map_only(torch.Tensor, _without_data, (args[0], positions, *args[2:]))
    if (
        len(args) > 2
        and isinstance(args[2], torch.Tensor)
        and any(isinstance(item, torch.Tensor) and item.dtype is torch.bool for item in args[1])
    ):
        return args[0]
    out = func(*args, **kwargs)
    device.keep(out, index)
    return out


@_special(aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default)
def _unique(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    """All elements count as different."""
    flat = args[0].reshape(-1) if func is not aten.unique_dim.default else args[0]
    parts = (
        torch.empty_like(flat),
        torch.empty_like(flat, dtype=torch.int64),
        torch.empty_like(flat, dtype=torch.int64),
    )
    for part in parts:
        device.keep(part, index)
    return parts


@_special(aten.bincount.default)
def _bincount(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    least = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
    out = torch.empty((max(int(least), 1),), dtype=torch.int64, device="meta")
    device.keep(out, index)
    return out


@_special(torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default)
def _unscale(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    return None


@_special(torch.ops.aten._amp_update_scale_.default)
def _update_scale(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    return args[0]


# -- what the program sees -----------------------------------------------------------------------------------------

_SIZED = frozenset((torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full))


class Functions(TorchFunctionMode):
    """Shows tensors without data as CUDA tensors, and takes the program's wishes for a device."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        tensor = torch.Tensor
        self._known: dict[Any, Callable[..., Any]] = {
            tensor.device.__get__: lambda func, args, kwargs: device.shown(args[0]),
            tensor.is_cuda.__get__: lambda func, args, kwargs: device.is_here(args[0]),  # type: ignore[attr-defined]
            tensor.is_cpu.__get__: lambda func, args, kwargs: device.shown(args[0]).type == "cpu",  # type: ignore[attr-defined]
            tensor.is_meta.__get__: lambda func, args, kwargs: device.shown(args[0]).type == "meta",  # type: ignore[attr-defined]
            tensor.data_ptr: self._data_ptr,
            tensor.get_device: lambda func, args, kwargs: _number(device.shown(args[0])),
            tensor.to: self._to,
            tensor.cuda: self._cuda,
            tensor.cpu: self._cpu,
            tensor.numpy: self._numpy,
            tensor.__array__: self._numpy,
            tensor.tolist: self._tolist,
            tensor.pin_memory: lambda func, args, kwargs: args[0],
            tensor.is_pinned: lambda func, args, kwargs: False,
            tensor.data.__set__: self._set_data,  # type: ignore[attr-defined]
            tensor.__repr__: self._repr,
            tensor.type: self._type,
            torch.tensor: self._from_values,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        default = default_device.CURRENT_DEVICE
        if default is not None and kwargs.get("device") is None and func in default_device._device_constructors():
            # this mode comes before the one that torch.set_default_device puts below all others
            kwargs = {**kwargs, "device": default}
        if kwargs.get("generator") is not None and args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            kwargs = _no_generator(kwargs)
        known = self._known.get(func)
        if known is not None:
            return known(func, args, kwargs)
        device = self.device
        device.autocast.look()
        name = getattr(func, "__name__", "")
        if name in CAST and device.autocast.on:
            args, kwargs = device.autocast.arguments(name, args, kwargs)
            with device.autocast.paused():
                return func(*args, **kwargs)
        asked = kwargs.get("device")
        if asked is not None:
            return self._made_on(asked, func, args, kwargs)
        if func in _SIZED and _nbytes(args, kwargs) >= LARGE:
            return self._made_on("cpu", func, args, kwargs, large=True)
        return func(*args, **kwargs)

    def _made_on(self, asked: Any, func: Any, args: Any, kwargs: Any, *, large: bool = False) -> Any:
        """Run something that makes tensors on the device that it asks for."""
        wish = torch.device("cuda", asked) if isinstance(asked, int) else torch.device(asked)
        kwargs = dict(kwargs)
        if wish.type == "cuda":
            index = self._index(wish)
            with self._aimed(index):
                out = func(*args, **{**_no_generator(kwargs), "device": "meta"})
            if isinstance(out, torch.Tensor) and out.is_meta:
                self.device.keep(out, index)  # torch.tensor makes its result without an operator
            return out
        if wish.type == "cpu" and (large or (func in _SIZED and _nbytes(args, kwargs) >= LARGE)):
            with self._aimed(CPU):
                return func(*args, **{**_no_generator(kwargs), "device": "meta"})
        if wish.type == "meta":
            with self._aimed(META):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def _aimed(self, index: int) -> Iterator[None]:
        before, self.device.target = self.device.target, index
        try:
            yield
        finally:
            self.device.target = before

    def _index(self, wish: torch.device) -> int:
        index = self.device.current if wish.index is None else wish.index
        if index >= len(self.device.allocators):
            raise RuntimeError("CUDA error: invalid device ordinal")
        return index

    def _to(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        rest = args[1:]
        copy = bool(kwargs.get("copy", False))
        kwargs = {key: value for key, value in kwargs.items() if key != "copy"}
        if (rest and isinstance(rest[0], torch.Tensor)) or isinstance(kwargs.get("other"), torch.Tensor):
            other = kwargs.pop("other") if "other" in kwargs else rest[0]
            wish, dtype, form = self.device.shown(other), other.dtype, None
        else:
            if len(rest) > 1 and isinstance(rest[-1], bool) and len(rest) >= 3 + (not isinstance(rest[0], torch.dtype)):
                copy, rest = rest[-1], rest[:-1]
            wish, dtype, _, form = torch._C._nn._parse_to(*rest, **kwargs)
        return self._moved(tensor, wish, dtype or tensor.dtype, form, copy)

    def _moved(
        self, tensor: torch.Tensor, wish: torch.device | None, dtype: torch.dtype, form: Any, copy: bool
    ) -> torch.Tensor:
        now = self.device.index_of(tensor)
        extra = {} if form is None else {"memory_format": form}
        if wish is None:
            return torch.Tensor.to(tensor, dtype, copy=copy, **extra)
        if wish.type == "cuda":
            index = self._index(wish)
            if now == index:
                return torch.Tensor.to(tensor, dtype, copy=copy, **extra)
            with self._aimed(index):
                if now is None:
                    return torch.Tensor.to(tensor, "meta", dtype, copy=True, **extra)
                return torch.Tensor.to(tensor, dtype, copy=True, **extra)
        if wish.type == "cpu":
            if now is None or now == CPU:
                return torch.Tensor.to(tensor, dtype, copy=copy, **extra)
            return torch.Tensor.to(tensor, "cpu", dtype, **extra)
        with self._aimed(META):
            return torch.Tensor.to(tensor, wish, dtype, copy=copy, **extra)

    def _set_data(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`parameter.data = tensor`: from the CPU to the device, too, and the parameter stays the object that it is."""
        tensor, value = args
        if tensor.is_meta == value.is_meta:
            return func(tensor, value)
        gradient = tensor.grad
        torch._C._swap_tensor_impl(tensor, value.detach().requires_grad_(tensor.requires_grad))
        if gradient is not None:  # it follows: Module._apply sets its data next
            tensor.grad = torch.empty_like(value)
        return None

    def _data_ptr(self, func: Any, args: Any, kwargs: Any) -> Any:
        place = self.device.place(args[0])
        if place is None or not place.address:
            return func(*args, **kwargs)
        return place.address + args[0].storage_offset() * args[0].dtype.itemsize

    def _cuda(self, func: Any, args: Any, kwargs: Any) -> Any:
        asked = args[1] if len(args) > 1 else kwargs.get("device")
        wish = torch.device("cuda", asked) if isinstance(asked, int) else torch.device(asked or "cuda")
        return self._moved(args[0], wish, args[0].dtype, kwargs.get("memory_format"), False)

    def _cpu(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self._moved(args[0], torch.device("cpu"), args[0].dtype, kwargs.get("memory_format"), False)

    def _numpy(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        if self.device.is_here(tensor):
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory "
                "first."
            )
        if tensor.is_meta:
            return torch.ones(tensor.shape, dtype=tensor.dtype).numpy()
        return func(*args, **kwargs)

    def _tolist(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0].detach()
        return _read(tensor, tensor.dtype, self.device).tolist() if tensor.is_meta else func(*args, **kwargs)

    def _repr(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        if not tensor.is_meta:
            return func(*args, **kwargs)
        return f"tensor(..., device='{self.device.shown(tensor)}', size={tuple(tensor.shape)}, dtype={tensor.dtype})"

    def _type(self, func: Any, args: Any, kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and args[0].is_meta:
            return func(*args).replace("torch.", "torch.cuda.") if self.device.is_here(args[0]) else func(*args)
        if isinstance(args[1], torch.dtype):
            return self._moved(args[0], None, args[1], None, False)
        name = str(args[1]).replace("torch.cuda.", "torch.")
        return func(args[0], name)

    def _from_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        asked = kwargs.get("device")
        if asked is None:
            return func(*args, **kwargs)
        out = self._made_on(asked, func, args, kwargs)
        place = self.device.place(out)
        if place is not None and out.numel() == 1 and isinstance(args[0], (bool, int, float)):
            place.value = args[0]
        return out


def _no_generator(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key not in ("generator", "pin_memory")}


def _number(device: torch.device) -> int:
    return device.index if device.type == "cuda" and device.index is not None else -1


def _nbytes(args: Any, kwargs: Any) -> int:
    """The size of what a factory makes, from its arguments."""
    size = kwargs.get("size", args)
    if args and isinstance(args[0], (tuple, list, torch.Size)):
        size = args[0]
    try:
        count = math.prod(int(item) for item in size if not isinstance(item, bool))
    except (TypeError, ValueError):
        return 0
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return count * dtype.itemsize if dtype.is_floating_point else 0


# -- the way in ----------------------------------------------------------------------------------------------------


class VirtualCuda:
    """Within this context programs see `devices` CUDA cards of one model, and what they would allocate is counted.

    card: a name of `memlint.virtual.cards`. settings: what PYTORCH_ALLOC_CONF would say. capacity: bytes that torch can
    have of the card; by default all but the CUDA context. Raises ConfigError for a card that is not known.
    """

    def __init__(self, card: str = "t4", *, devices: int = 1, settings: str = "", capacity: int | None = None) -> None:
        parsed = AllocatorSettings.parse(settings) if settings else None
        self.device = Device(cards.card(card), devices, parsed, capacity)
        self._stack: contextlib.ExitStack | None = None

    @property
    def card(self) -> Card:
        """The card that is stood in for."""
        return self.device.card

    @property
    def allocator(self) -> CachingAllocator:
        """The books of the first card."""
        return self.device.allocators[0]

    def __enter__(self) -> VirtualCuda:
        from memlint.virtual import kernels, surface

        global _active
        if _active is not None:
            raise RuntimeError("a virtual CUDA device is already active")
        kernels.learn_references(self.device.card)
        with contextlib.ExitStack() as stack:
            stack.enter_context(surface.patched(self.device))
            stack.enter_context(kernels.overridden(self.device))
            stack.enter_context(Operators(self.device))
            stack.enter_context(Functions(self.device))
            stack.enter_context(_in_threads(self.device))
            self._stack = stack.pop_all()
        _active = self
        return self

    def __exit__(self, *error: Any) -> None:
        global _active
        stack, self._stack, _active = self._stack, None, None
        assert stack is not None
        stack.__exit__(*error)

    def settle(self) -> None:
        """Take in what was freed since the last operator."""
        self.device.drain()


@contextlib.contextmanager
def _in_threads(device: Device) -> Iterator[None]:
    """Threads that start within this see the device, too: torch keeps its modes for each thread."""
    original: Any = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def bootstrap(thread: threading.Thread) -> None:
        with Operators(device), Functions(device):
            original(thread)

    threading.Thread._bootstrap_inner = bootstrap  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if threading.Thread._bootstrap_inner is bootstrap:  # type: ignore[attr-defined]
            threading.Thread._bootstrap_inner = original  # type: ignore[attr-defined]


_active: VirtualCuda | None = None


def active() -> VirtualCuda | None:
    """The virtual device that is in use, if there is one."""
    return _active
