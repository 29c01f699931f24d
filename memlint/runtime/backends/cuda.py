"""Devices whose allocator counts for itself: CUDA, ROCm by the same calls, others through `torch.accelerator`.

The counters are those of `torch.cuda.memory_stats` (torch/cuda/memory.py). `allocated_bytes` counts blocks, rounded up
to 512 bytes and with what was not worth splitting off, up to 1 MiB a block: right for a peak, too coarse for a slope.
`requested_bytes` counts what was asked for (torch 2.1 and later), so growth is taken from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from memlint.runtime.backends.base import Details, Reading

_ALLOCATED, _REQUESTED, _RESERVED = "allocated_bytes.all", "requested_bytes.all", "reserved_bytes.all"


class Statistics(Protocol):
    """The counters of one kind of device. All sizes in bytes."""

    def unavailable(self) -> str | None:
        """Why there are none; None if there are."""

    def devices(self) -> Sequence[int]:
        """The indices of the devices that this process sees."""

    def memory_stats(self, device: int) -> Mapping[str, int]:
        """As `torch.cuda.memory_stats`."""

    def reset_peak(self, device: int) -> None:
        """As `torch.cuda.reset_peak_memory_stats`."""

    def synchronize(self, device: int) -> None:
        """Wait for all kernels."""

    def empty_cache(self) -> None:
        """Give unused segments back, so that what is reserved belongs to the run."""

    def clear_workspaces(self) -> None:
        """Free the workspaces of cuBLAS, which are blocks of the allocator."""

    def segments(self) -> Sequence[Mapping[str, Any]]:
        """As `torch.cuda.memory_snapshot()`, without traces; empty where there is no such thing."""

    def name_of(self, device: int) -> str:
        """What the card is called."""


class CountersBackend:
    """Measures with an allocator's own counters, on all devices of the kind that this process sees."""

    def __init__(
        self, kind: str, statistics: Statistics, devices: Sequence[int] | None = None, waits: bool = True
    ) -> None:
        self.name = kind if not devices else f"{kind}:{devices[0]}"
        self.device_type = kind
        self._statistics = statistics
        self._wanted = devices
        #: whether kernels are waited for before reading; the host counts, so only frees across streams come later
        self._waits = waits
        self._devices: Sequence[int] = ()
        self._at_start: dict[int, Mapping[str, int]] = {}

    @property
    def leftover(self) -> int:
        return sum(stats.get(f"{_ALLOCATED}.current", 0) for stats in self._at_start.values())

    def unavailable(self) -> str | None:
        reason = self._statistics.unavailable()
        if reason is not None:
            return reason
        missing = [index for index in self._wanted or () if index not in self._statistics.devices()]
        return f"there is no device {self.device_type}:{missing[0]} here" if missing else None

    def start(self) -> None:
        self._devices = self._wanted or self._statistics.devices()
        self._statistics.empty_cache()
        self._at_start = {device: self._read(device) for device in self._devices}

    def begin_step(self) -> None:
        for device in self._devices:
            if self._waits:
                self._statistics.synchronize(device)
            self._statistics.reset_peak(device)

    def end_step(self) -> Reading:
        now = {device: self._read(device) for device in self._devices}
        peaks = [self._above(device, stats, f"{_ALLOCATED}.peak") for device, stats in now.items()]
        reserved = [self._above(device, stats, f"{_RESERVED}.peak") for device, stats in now.items()]
        return Reading(sum(self._kept(d, stats) for d, stats in now.items()), max(peaks), max(reserved))

    def allocated(self) -> int:
        return sum(self._kept(device, self._read(device)) for device in self._devices)

    def pause(self) -> None:
        """Nothing watches: the allocator counts anyway."""

    def resume(self) -> None:
        """Nothing watches."""

    def stop(self) -> None:
        self._at_start = {}

    def details(self) -> Details:
        now = {device: self._read(device) for device in self._devices}
        values: dict[str, Any] = {
            "retries": sum(self._since_start(device, stats, "num_alloc_retries") for device, stats in now.items()),
            "ooms": sum(self._since_start(device, stats, "num_ooms") for device, stats in now.items()),
            "inactive_split": sum(s.get("inactive_split_bytes.all.current", 0) for s in now.values()),
            "graph_pools": _graph_pools(self._statistics.segments()),
        }
        before = sum(s.get(f"{_ALLOCATED}.current", 0) for s in now.values())
        self._statistics.clear_workspaces()
        after = sum(self._read(device).get(f"{_ALLOCATED}.current", 0) for device in self._devices)
        values["workspaces"] = max(before - after, 0)
        values["peaks"] = {f"{self.device_type}:{d}": self._above(d, s, f"{_ALLOCATED}.peak") for d, s in now.items()}
        return Details(", ".join(dict.fromkeys(map(self._statistics.name_of, self._devices))), values)

    def _read(self, device: int) -> Mapping[str, int]:
        if self._waits:
            self._statistics.synchronize(device)
        return self._statistics.memory_stats(device)

    def _since_start(self, device: int, stats: Mapping[str, int], key: str) -> int:
        return stats.get(key, 0) - self._at_start[device].get(key, 0)

    def _above(self, device: int, stats: Mapping[str, int], key: str) -> int:
        """A peak above what was there at the start."""
        start = self._at_start[device].get(key.replace(".peak", ".current"), 0)
        return max(stats.get(key, 0) - start, 0)

    def _kept(self, device: int, stats: Mapping[str, int]) -> int:
        key = f"{_REQUESTED}.current" if f"{_REQUESTED}.current" in stats else f"{_ALLOCATED}.current"
        return stats.get(key, 0) - self._at_start[device].get(key, 0)


def _graph_pools(segments: Sequence[Mapping[str, Any]]) -> int:
    """Bytes in the private pools of CUDA graphs, which stay reserved as long as the graph lives."""
    return sum(int(s.get("total_size", 0)) for s in segments if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0))


def _flat(stats: Mapping[str, Any]) -> dict[str, int]:
    flat = {name: int(stats[name]) for name in ("num_alloc_retries", "num_ooms") if name in stats}
    for name in ("allocated_bytes", "requested_bytes", "reserved_bytes", "inactive_split_bytes"):
        pools = stats.get(name, {}).get("all", {})
        flat.update({f"{name}.all.{word}": int(value) for word, value in pools.items()})
    return flat


def statistics_of(kind: str) -> Statistics:
    """The counters of the devices of this kind."""
    return CudaStatistics() if kind == "cuda" else AcceleratorStatistics(kind)


class CudaStatistics:
    """`torch.cuda`; a ROCm build answers to the same names."""

    def unavailable(self) -> str | None:
        import torch

        if torch.cuda.is_available():
            return None
        built = torch.version.cuda or getattr(torch.version, "hip", None)
        return "no CUDA device is available" if built else "this build of torch has no CUDA, and there is no device"

    def devices(self) -> Sequence[int]:
        import torch

        return range(torch.cuda.device_count())

    def memory_stats(self, device: int) -> Mapping[str, int]:
        import torch

        # flattening all of it in Python, as torch.cuda.memory_stats does, costs more than asking
        return _flat(torch.cuda.memory_stats_as_nested_dict(device))

    def reset_peak(self, device: int) -> None:
        import torch

        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # before the first use there is no peak, and asking for it is an error
            torch.cuda.reset_peak_memory_stats(device)

    def synchronize(self, device: int) -> None:
        import torch

        torch.cuda.synchronize(device)

    def empty_cache(self) -> None:
        import torch

        torch.cuda.empty_cache()

    def clear_workspaces(self) -> None:
        import torch

        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:
            clear()

    def segments(self) -> Sequence[Mapping[str, Any]]:
        import torch

        snapshot: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return snapshot

    def name_of(self, device: int) -> str:
        import torch

        return torch.cuda.get_device_name(device)


class AcceleratorStatistics:
    """`torch.accelerator`, which has the counters of its device since torch 2.9 (torch/accelerator/memory.py)."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def unavailable(self) -> str | None:
        import torch

        accelerator = getattr(torch, "accelerator", None)
        if accelerator is None or not hasattr(accelerator, "memory_stats"):
            return f"{self._kind}: torch {torch.__version__} has no torch.accelerator.memory_stats (torch 2.9 has)"
        if not accelerator.is_available() or accelerator.current_accelerator().type != self._kind:
            return f"no {self._kind} device is available"
        try:
            if not accelerator.memory_stats(0):
                return f"{self._kind}: its allocator keeps no counters"
        except (RuntimeError, NotImplementedError) as error:
            return f"{self._kind}: its allocator keeps no counters ({error})"
        return None

    def devices(self) -> Sequence[int]:
        import torch

        return range(torch.accelerator.device_count())

    def memory_stats(self, device: int) -> Mapping[str, int]:
        import torch

        return torch.accelerator.memory_stats(device)

    def reset_peak(self, device: int) -> None:
        import torch

        torch.accelerator.reset_peak_memory_stats(device)

    def synchronize(self, device: int) -> None:
        import torch

        torch.accelerator.synchronize(device)

    def empty_cache(self) -> None:
        import torch

        with contextlib.suppress(AttributeError, RuntimeError):
            torch.accelerator.empty_cache()

    def clear_workspaces(self) -> None:
        """There are none that could be told apart."""

    def segments(self) -> Sequence[Mapping[str, Any]]:
        return ()

    def name_of(self, device: int) -> str:
        return f"{self._kind}:{device}"
