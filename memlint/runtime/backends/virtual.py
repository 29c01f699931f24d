"""The virtual CUDA device (memlint.virtual) as a backend: the counters of an allocator that only keeps the books."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memlint.runtime.backends.base import Details, Reading
from memlint.runtime.backends.cuda import CountersBackend
from memlint.runtime.tracker import StorageTracker, _threads

if TYPE_CHECKING:
    from memlint.virtual.device import VirtualCuda

DEFAULT_CARD = "t4"


class VirtualStatistics:
    """The counters of the virtual cards that are in use. All sizes in bytes."""

    def __init__(self) -> None:
        self.virtual: VirtualCuda | None = None

    def unavailable(self) -> str | None:
        return None

    def devices(self) -> Sequence[int]:
        return range(len(self._device.allocators))

    def memory_stats(self, device: int) -> Mapping[str, int]:
        self._device.drain()
        found: dict[str, int] = self._device.allocators[device].stats()
        return found

    def reset_peak(self, device: int) -> None:
        self._device.drain()
        self._device.allocators[device].counters.reset_peak()

    def synchronize(self, device: int) -> None:
        """Nothing runs."""

    def empty_cache(self) -> None:
        self._device.drain()
        for allocator in self._device.allocators:
            allocator.empty_cache()

    def clear_workspaces(self) -> None:
        """They stay: the steps to come count on them."""

    def segments(self) -> Sequence[Mapping[str, Any]]:
        return ()

    def name_of(self, device: int) -> str:
        return f"virtual {self._device.card.title}"

    @property
    def _device(self) -> Any:
        assert self.virtual is not None, "the virtual device is not in use"
        return self.virtual.device


class VirtualBackend(CountersBackend):
    """Measures on a card that is not there: from `start()` to `stop()` programs see it.

    card: a name of memlint.virtual.cards. capacity: bytes that torch can have; by default all of the card
    but the CUDA context.

    Raises ConfigError for a card that is not known.
    """

    def __init__(self, card: str = DEFAULT_CARD, capacity: int | None = None) -> None:
        from memlint.virtual.cards import card as card_of

        self._card = card_of(card)
        self._books = VirtualStatistics()
        super().__init__("cuda", self._books)
        self.name = f"virtual:{self._card.name}"
        #: what tensors without data lie on, for those who look at storages
        self.device_type = "meta"
        self._capacity = capacity
        self._nobody = StorageTracker("meta")
        self._most = 0

    def start(self) -> None:
        from memlint.virtual.device import VirtualCuda

        virtual = VirtualCuda(self._card.name, capacity=self._capacity)
        virtual.__enter__()
        self._books.virtual = virtual
        self._most = 0
        _threads.add(self._nobody)  # so that a tracer that comes later sees threads that start before it
        super().start()

    def end_step(self) -> Reading:
        reading = super().end_step()
        self._most = max(self._most, reading.reserved_peak or 0)
        return reading

    def stop(self) -> None:
        super().stop()
        _threads.discard(self._nobody)
        virtual, self._books.virtual = self._books.virtual, None
        if virtual is not None:
            virtual.__exit__(None, None, None)

    def details(self) -> Details:
        found = super().details()
        virtual = self._books.virtual
        assert virtual is not None
        context = virtual.device.context
        values = {**found.values, "context": context, "process": self._most + context, "virtual": True}
        return Details(found.device, values)
