"""What every backend offers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Reading:
    """What a device says right after a step. Sizes in bytes, above what there was at `start()`.

    allocated: alive now, on all devices together. peak: at most at one time in the step, on the device with most.
    reserved_peak: the same of what the allocator held. None where the device cannot say.
    """

    allocated: int
    peak: int | None
    reserved_peak: int | None = None


class Backend(Protocol):
    """Measures the memory of one kind of device between `start()` and `stop()`."""

    #: what reports call it, such as "cpu" or "cuda"
    name: str
    #: the type of its tensors' device, as torch writes it
    device_type: str

    @property
    def leftover(self) -> int:
        """Bytes that were alive at the start."""

    def unavailable(self) -> str | None:
        """Why it cannot be used here; None if it can."""

    def start(self) -> None:
        """Count from here."""

    def begin_step(self) -> None:
        """The peak starts again."""

    def end_step(self) -> Reading:
        """What the step did."""

    def allocated(self) -> int:
        """Bytes alive now, above those at the start."""

    def pause(self) -> None:
        """Stop watching; what `start()` found stays."""

    def resume(self) -> None:
        """Watch again."""

    def stop(self) -> None:
        """Leave torch as it was."""

    def details(self) -> Details:
        """What else can be said at the end of a run."""


@dataclass(frozen=True, slots=True)
class Details:
    """Facts beside the judged ones. Sizes in bytes.

    device: the card's name. values: such as the cuBLAS workspaces or the peak of the process's resident memory.
    """

    device: str
    values: Mapping[str, Any] = field(default_factory=dict)
