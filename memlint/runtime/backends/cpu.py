"""The CPU: torch has no counters for it, so the storages behind the tensors are counted."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from pathlib import Path
from typing import Any

from memlint.runtime.backends.base import Details, Reading
from memlint.runtime.tracker import StorageTracker


class CpuBackend:
    """Live and peak bytes of tensors on the CPU. What the allocator reserves is unknown here."""

    name = "cpu"
    device_type = "cpu"

    def __init__(self) -> None:
        self.tracker = StorageTracker("cpu")

    @property
    def leftover(self) -> int:
        return self.tracker.leftover

    def unavailable(self) -> str | None:
        return None

    def start(self) -> None:
        self.tracker.start()

    def begin_step(self) -> None:
        self.tracker.reset_peak()

    def end_step(self) -> Reading:
        self.tracker.settle()
        return Reading(self.tracker.live, self.tracker.peak)

    def allocated(self) -> int:
        self.tracker.settle()
        return self.tracker.live

    def pause(self) -> None:
        self.tracker.pause()

    def resume(self) -> None:
        self.tracker.resume()

    def stop(self) -> None:
        self.tracker.stop()

    def details(self) -> Details:
        values = {"storages": self.tracker.count()}
        if (peak := peak_resident()) is not None:
            values["peak_resident"] = peak
        return Details(platform.processor() or platform.machine(), values)


class HeapBackend:
    """What the C library's malloc has given out, which torch's CPU allocator takes from (c10/core/impl/alloc_cpu.cpp).

    A few microseconds a reading, and no watching of operators; other users of malloc are counted too, Python's small
    objects are not (they come from arenas of their own). Without glibc, the resident memory stands in.
    """

    name = "cpu"
    device_type = "cpu"

    def __init__(self) -> None:
        self._at_start = 0

    @property
    def leftover(self) -> int:
        return 0

    def unavailable(self) -> str | None:
        return None

    def start(self) -> None:
        self._at_start = heap_in_use()

    def begin_step(self) -> None:
        """Nothing to reset."""

    def end_step(self) -> Reading:
        return Reading(self.allocated(), None)

    def allocated(self) -> int:
        return heap_in_use() - self._at_start

    def pause(self) -> None:
        """Nothing watches."""

    def resume(self) -> None:
        """Nothing watches."""

    def stop(self) -> None:
        """Nothing to undo."""

    def details(self) -> Details:
        values = {"reads": "malloc" if _mallinfo2() is not None else "resident memory"}
        return Details(platform.processor() or platform.machine(), values)


class _Mallinfo2(ctypes.Structure):
    """struct mallinfo2 of malloc.h, glibc 2.33 and later; mallinfo(3). In bytes."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


@functools.cache
def _mallinfo2() -> Any:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):
        return None
    function.restype = _Mallinfo2
    return function


def heap_in_use() -> int:
    """Bytes that malloc has given out: in its arenas (uordblks), and mapped one by one (hblkhd)."""
    function = _mallinfo2()
    if function is not None:
        info = function()
        return int(info.uordblks + info.hblkhd)
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError):
        return peak_resident() or 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_resident() -> int | None:
    """The most bytes of memory that the process has held (VmHWM); None where the system does not say."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
