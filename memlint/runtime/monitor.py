"""The engine outside pytest: a training loop of one's own, watched at a cost that does not show."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from memlint.errors import BudgetError
from memlint.runtime.backends import find
from memlint.runtime.budget import WARMUP, Budget
from memlint.runtime.loop import Loop
from memlint.runtime.report.record import record_of
from memlint.runtime.report.text import text_of
from memlint.runtime.session import NEVER, ON_FAILURE
from memlint.runtime.verdict import Outcome

_Item = TypeVar("_Item")
#: what other users of malloc may add a step: lists of floats, a logger's buffers
_HEAP_NOISE = 2048


class MemoryMonitor:
    """Watches the memory of a training loop.

        monitor = MemoryMonitor()
        for batch in monitor.steps(loader):
            train_step(batch)
        print(monitor.report())

    On an accelerator the allocator's counters are read once a step; on the CPU, what malloc has given out, or with
    `exact=True` the storages behind tensors, which costs a few microseconds an operator. When growth is certain, a few
    steps are traced to find who holds what (`trace=False`: never), and `on_growth(monitor)` is called, once.

    peak, growth: as in a budget, for `passed` and the report. warmup: steps that are not judged.
    Raises BudgetError for a bad value, BackendUnavailable where the device is not there.
    """

    def __init__(
        self,
        device: str = "auto",
        *,
        peak: int | str | None = None,
        growth: int | str = 0,
        warmup: int = WARMUP,
        exact: bool = False,
        trace: bool = True,
        on_growth: Callable[[MemoryMonitor], object] | None = None,
        name: str = "training loop",
    ) -> None:
        self.name = name
        self._budget = Budget.parse({"peak": peak, "growth": growth, "warmup": warmup, "device": device})
        backend = find(device, light=not exact)
        heap = backend.name == "cpu" and not exact
        self._loop = Loop(
            backend,
            self._budget,
            warmup,
            trace=ON_FAILURE if trace else NEVER,
            collects=exact,
            noise=_HEAP_NOISE if heap else 0,
            on_growth=None if on_growth is None else lambda: on_growth(self),
        )

    def steps(self, iterable: Iterable[_Item]) -> Iterator[_Item]:
        """The items of `iterable`; each turn of the loop, with fetching its item, is one step."""
        iterator = iter(iterable)
        self.start()
        try:
            while True:
                try:
                    # not by way of a name: the generator's frame would keep the batch alive into the next step
                    yield next(iterator)
                except StopIteration:
                    return
                self._loop.boundary()
        finally:
            self.stop()

    @contextlib.contextmanager
    def watch(self) -> Iterator[MemoryMonitor]:
        """From here to the end of the block; say `monitor.step()` after each step."""
        self.start()
        try:
            yield self
        finally:
            self.stop()

    def start(self) -> None:
        """Begin to measure. A monitor measures once: raises BudgetError where it already has."""
        if self._loop.running or self._loop.steps:
            raise BudgetError("a MemoryMonitor watches one loop: make another for the next one")
        self._loop.start()

    def stop(self) -> None:
        """Stop measuring; the report stays."""
        self._loop.stop()

    def step(self) -> None:
        """A step has ended. Raises BudgetError before start()."""
        if not self._loop.running:
            raise BudgetError("MemoryMonitor.step() before start(): use monitor.steps(loader) or with monitor.watch()")
        self._loop.boundary()

    def trace(self, steps: int = 5) -> None:
        """Remember everything for the next `steps` steps, for the report to say who holds what."""
        self._loop.trace(steps, with_cycles=True)

    @property
    def outcome(self) -> Outcome:
        """The verdict so far."""
        return self._loop.outcome()

    @property
    def passed(self) -> bool:
        """Whether the loop keeps to its budget so far."""
        return self.outcome.passed

    def record(self) -> dict[str, Any]:
        """The verdict as data: one test of the JSON report."""
        return record_of(self.name, self.outcome)

    def report(self) -> str:
        """The verdict as text, with the leaks where steps were traced."""
        return text_of(self.record())
