"""`torch.cuda` as it looks with a card, answered by the virtual device. All of it is put back at the end."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo  # looks at torch.cuda when it is loaded, which has to be before that is patched

from memlint.virtual.device import Device


class Properties(types.SimpleNamespace):
    """What `torch.cuda.get_device_properties` gives."""


class Generator(torch._C.Generator):
    """A generator of the CPU, also where one of the device is asked for: its numbers go nowhere."""

    def __new__(cls, device: Any = None) -> Generator:
        made = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        made.shown = torch.device("cpu" if device is None else device)  # type: ignore[attr-defined]
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device that was asked for."""
        return self.shown  # type: ignore[attr-defined,no-any-return]


class Stream:
    """A stream: what is allocated within it comes from its own blocks. Nothing runs, so nothing waits."""

    _last = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        Stream._last += 1
        self.number = Stream._last
        self.device = torch.device("cuda", 0)

    cuda_stream = property(lambda self: self.number)
    stream_id = cuda_stream

    def wait_stream(self, stream: Any) -> None:
        """Nothing runs."""

    def wait_event(self, event: Any) -> None:
        """Nothing runs."""

    def record_event(self, event: Any = None) -> Any:
        """An event that has happened."""
        return event or Event()

    def synchronize(self) -> None:
        """Nothing runs."""

    def query(self) -> bool:
        """All is done."""
        return True

    def is_capturing(self) -> bool:
        """CUDA graphs are not modelled."""
        return False


class Event:
    """An event that has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Nothing runs."""

    def wait(self, stream: Any = None) -> None:
        """Nothing runs."""

    def synchronize(self) -> None:
        """Nothing runs."""

    def query(self) -> bool:
        """It has happened."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """No time passes on the virtual device."""
        return 0.0


def _names(device: Device) -> dict[str, Any]:
    """What takes the place of each name in `torch.cuda`."""
    card = device.card
    default = Stream()
    default.number = 0
    streams = [default]

    def index(asked: Any = None) -> int:
        if asked is None:
            return device.current
        if isinstance(asked, int):
            return asked if asked >= 0 else device.current
        found = getattr(asked, "index", None) if not isinstance(asked, str) else torch.device(asked).index
        return device.current if found is None else int(found)

    def books(asked: Any = None) -> Any:
        device.drain()
        return device.allocators[index(asked)]

    def counter(name: str, which: str) -> Any:
        def read(asked: Any = None) -> int:
            allocator = books(asked)
            return int(getattr(allocator.counters, which).get(name, 0))

        return read

    def stats(asked: Any = None) -> dict[str, Any]:
        return dict(books(asked).stats())

    def reset_peak(asked: Any = None) -> None:
        books(asked).counters.reset_peak()

    def empty_cache() -> None:
        device.drain()
        for allocator in device.allocators:
            allocator.empty_cache()

    def free_and_total(asked: Any = None) -> tuple[int, int]:
        allocator = books(asked)
        return max(0, (allocator.capacity or card.total_bytes) - allocator.reserved), card.total_bytes

    def set_device(asked: Any) -> None:
        device.current = index(asked)

    def exchange_device(asked: int) -> int:
        before = device.current
        device.current = asked if asked >= 0 else before
        return before

    def properties(asked: Any = None) -> Properties:
        return Properties(
            name=card.title,
            major=card.capability[0],
            minor=card.capability[1],
            total_memory=card.total_bytes,
            multi_processor_count=card.multiprocessors,
            max_threads_per_multi_processor=card.threads_per_multiprocessor,
            shared_memory_per_block_optin=card.shared_bytes_per_block,
            warp_size=32,
            gcnArchName="",
            is_integrated=0,
        )

    @contextlib.contextmanager
    def on_device(asked: Any) -> Iterator[None]:
        before = device.current
        device.current = index(asked)
        try:
            yield
        finally:
            device.current = before

    @contextlib.contextmanager
    def on_stream(stream: Any) -> Iterator[None]:
        if stream is None:
            yield
            return
        streams.append(stream)
        before, device.stream = device.stream, getattr(stream, "number", 0)
        try:
            yield
        finally:
            streams.pop()
            device.stream = before

    nothing = lambda *args, **kwargs: None  # noqa: E731
    seed = lambda *args, **kwargs: 0  # noqa: E731
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": nothing,
        "_lazy_init": nothing,
        "_lazy_call": nothing,
        "device_count": lambda: len(device.allocators),
        "current_device": lambda: device.current,
        "set_device": set_device,
        "device": on_device,
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "get_device_name": lambda asked=None: card.title,
        "get_device_capability": lambda asked=None: card.capability,
        "get_device_properties": properties,
        "get_arch_list": lambda: [f"sm_{card.capability[0]}{card.capability[1]}"],
        "is_bf16_supported": lambda including_emulation=True: card.bf16 or including_emulation,
        "is_tf32_supported": lambda: card.tf32,
        "synchronize": nothing,
        "empty_cache": empty_cache,
        "ipc_collect": nothing,
        "mem_get_info": free_and_total,
        "memory_stats": stats,
        "memory_allocated": counter("allocated_bytes", "current"),
        "max_memory_allocated": counter("allocated_bytes", "peak"),
        "memory_reserved": counter("reserved_bytes", "current"),
        "max_memory_reserved": counter("reserved_bytes", "peak"),
        "memory_cached": counter("reserved_bytes", "current"),
        "max_memory_cached": counter("reserved_bytes", "peak"),
        "reset_peak_memory_stats": reset_peak,
        "reset_max_memory_allocated": reset_peak,
        "reset_max_memory_cached": reset_peak,
        "reset_accumulated_memory_stats": nothing,
        "memory_summary": lambda device=None, abbreviated=False: f"virtual {card.title}: {stats(device)}",
        "memory_snapshot": lambda *args, **kwargs: [],
        "set_per_process_memory_fraction": nothing,
        "manual_seed": nothing,
        "manual_seed_all": nothing,
        "seed": nothing,
        "seed_all": nothing,
        "initial_seed": seed,
        "get_rng_state": lambda *args, **kwargs: torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": lambda *args, **kwargs: [torch.zeros(16, dtype=torch.uint8)],
        "set_rng_state": nothing,
        "set_rng_state_all": nothing,
        "Stream": Stream,
        "Event": Event,
        "stream": on_stream,
        "current_stream": lambda asked=None: streams[-1],
        "default_stream": lambda asked=None: default,
        "set_stream": nothing,
        "current_blas_handle": seed,
        "is_current_stream_capturing": lambda: False,
        "utilization": seed,
    }


def _accelerator(names: dict[str, Any]) -> dict[str, Any]:
    """What takes the place of each name in `torch.accelerator`; its functions take the device by position only."""
    same = """
        device_count is_available synchronize current_stream set_stream empty_cache memory_stats memory_allocated
        max_memory_allocated memory_reserved max_memory_reserved reset_peak_memory_stats
        reset_accumulated_memory_stats
    """.split()
    return {
        **{name: names[name] for name in same},
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": names["current_device"],
        "current_device_idx": names["current_device"],
        "set_device_index": names["set_device"],
        "set_device_idx": names["set_device"],
        "device_index": names["device"],
        "get_memory_info": names["mem_get_info"],
    }


@contextlib.contextmanager
def seen(card: str) -> Iterator[None]:
    """Within this, `torch.cuda` answers for a card; nothing can be put on it yet. For code that only asks."""
    from memlint.virtual import cards

    with patched(Device(cards.card(card), 1, None, None)):
        yield


@contextlib.contextmanager
def patched(device: Device) -> Iterator[None]:
    """`torch.cuda` and what asks about it, answered by `device`."""
    from memlint.virtual import recurrent

    names = _names(device)
    clear = torch.clear_autocast_cache

    def clear_autocast_cache() -> None:
        device.autocast.forget()
        clear()

    load = torch.load

    def load_onto(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        from torch.utils._pytree import tree_map_only

        wish = map_location if isinstance(map_location, (str, torch.device)) else None
        found = load(f, "cpu" if wish is not None or map_location is None else map_location, *args, **kwargs)
        if wish is None or torch.device(wish).type != "cuda":
            return found
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(wish), found)

    places: list[tuple[Any, str, Any]] = [(torch.cuda, name, value) for name, value in names.items()]
    places += [
        (torch.cuda.memory, name, names[name])
        for name in (
            "memory_stats",
            "memory_allocated",
            "max_memory_allocated",
            "memory_reserved",
            "max_memory_reserved",
            "mem_get_info",
            "reset_peak_memory_stats",
            "empty_cache",
        )
    ]
    if hasattr(torch, "accelerator"):  # since torch 2.6
        for name, value in _accelerator(names).items():
            places.append((torch.accelerator, name, value))
            if hasattr(torch.accelerator, "memory"):
                places.append((torch.accelerator.memory, name, value))
    places += [
        (torch, "clear_autocast_cache", clear_autocast_cache),
        (torch, "load", load_onto),
        (torch, "Generator", Generator),
        (torch.Tensor, "record_stream", lambda tensor, stream: None),
        (torch.backends.cudnn, "is_acceptable", recurrent.acceptable),
        (torch.backends.cudnn.rnn, "get_cudnn_mode", lambda mode: recurrent.MODES[mode.lower()]),
        (torch, "_use_cudnn_rnn_flatten_weight", lambda: True),
        (torch, "_cudnn_rnn_flatten_weight", recurrent.flattened),
        # a parameter that goes from the CPU to the device stays the object that the optimizer knows
        (torch, "_has_compatible_shallow_copy_type", lambda tensor, other: True),
        (torch.amp.autocast_mode, "is_autocast_available", lambda kind: True),
        (torch.random, "_seed_custom_device", lambda seed: None),
    ]
    if hasattr(torch.cuda.amp, "common"):
        places.append((torch.cuda.amp.common, "amp_definitely_not_available", lambda: False))
        scaler = __import__("torch.amp.grad_scaler", fromlist=["grad_scaler"])
        if hasattr(scaler, "amp_definitely_not_available"):
            places.append((scaler, "amp_definitely_not_available", lambda: False))
    try:
        with contextlib.ExitStack() as stack:
            for owner, name, value in places:
                if not hasattr(owner, name):
                    continue
                if name in vars(owner):
                    stack.callback(setattr, owner, name, getattr(owner, name))
                else:
                    stack.callback(delattr, owner, name)
                setattr(owner, name, value)
            yield
    finally:
        device.forget()
