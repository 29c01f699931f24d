"""The CPU: torch has no counters for it, so the storages behind the tensors are counted."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

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
