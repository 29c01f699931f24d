"""Steps of a loop that memlint does not run itself: it is told where each one ends.

Shared by `MemoryMonitor` (the loop says so) and `memlint run` (the optimizers say so). Readings of a long run are
thinned: when there are too many, every second one goes, and from then on only every second step is read.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

from memlint.runtime.backends.base import Backend
from memlint.runtime.budget import Budget
from memlint.runtime.series import Growth, Series, StepRecord, Trend
from memlint.runtime.session import ALWAYS, NEVER, ON_FAILURE, TRACED_STEPS, Frozen, Tracing, outcome_of, traced_steps
from memlint.runtime.verdict import Outcome, Traced, judge

_MOST_RECORDS = 128
_FEWEST_MEASURED = 10
_JUDGED_EVERY = 5


class Loop:
    """Measures from `start()` on; `boundary()` ends one step and begins the next.

    collects: whether a garbage collection goes before each reading (slower; without one, garbage counts as alive).
    noise: growth below this many bytes a step is not believed. on_growth is called once, when growth is certain and,
    if `trace` allows it, after the steps that say who holds it.
    """

    def __init__(
        self,
        backend: Backend,
        budget: Budget,
        warmup: int,
        trace: str = ON_FAILURE,
        collects: bool = True,
        noise: int = 0,
        on_growth: Callable[[], object] | None = None,
    ) -> None:
        self.backend, self.budget, self.warmup = backend, budget, warmup
        self.steps = 0
        self.records: list[StepRecord] = []
        self.traced = Traced()
        self.tracing: Tracing | None = None
        self._trace, self._collects, self._noise, self._on_growth = trace, collects, noise, on_growth
        self._every = 1
        self._frozen = Frozen()
        self._before = 0
        self._began = 0.0
        self._told = False
        self._running = False

    @property
    def running(self) -> bool:
        """Between start and stop."""
        return self._running

    def start(self) -> None:
        """Count from here."""
        self.backend.start()
        self._running = True
        self._begin()

    def stop(self) -> None:
        """Leave torch as it was. What was measured stays."""
        if not self._running:
            return
        self._end_tracing("the run ended")
        self._frozen.thaw()
        self._running = False
        self.backend.pause()

    def boundary(self) -> None:
        """A step has ended."""
        self.steps += 1
        if self.tracing is not None:
            self._traced_step()
            return
        if self.steps > self.warmup and (self.steps - self.warmup) % self._every:
            return
        self._read()
        if self._trace == ALWAYS and self.steps == self.warmup:
            self.trace(TRACED_STEPS, with_cycles=True)
        else:
            self._judge()
        if self.tracing is None:
            self._begin()

    def series(self) -> Series:
        """The readings so far."""
        return Series(min(self.warmup, len(self.records)), tuple(self.records))

    def growth(self) -> Growth:
        """What they say; sizes in bytes a step of the loop, whatever part of the steps was read."""
        found = self.series().growth()
        every = self._every
        rate = found.rate / every
        trend = Trend.FLAT if found.trend is Trend.LEAK and rate <= self._noise else found.trend
        return Growth(trend, rate, found.total, found.period)

    def outcome(self) -> Outcome:
        """The verdict so far."""
        found = outcome_of(self.backend, self.budget, self.series(), self.growth())
        return found.with_trace(self.traced)

    def last(self) -> StepRecord | None:
        """The latest reading."""
        return self.records[-1] if self.records else None

    # -- one step --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._before = self.records[-1].kept if self.records else self.backend.allocated()
        self.backend.begin_step()
        self._began = time.perf_counter()

    def _read(self) -> None:
        seconds = time.perf_counter() - self._began
        reading = self.backend.end_step()
        collected = None
        if self._collects:
            gc.collect()
            collected = self.backend.allocated()
            if self.steps == max(self.warmup, 1):
                self._frozen.freeze()  # what the warm-up made stays, and need not be looked at again
        self.records.append(
            StepRecord(
                self.steps - 1, seconds, self._before, reading.allocated, reading.peak, collected, reading.reserved_peak
            )
        )
        if len(self.records) - self.warmup > _MOST_RECORDS:
            self._thin()

    def _thin(self) -> None:
        measured = self.records[self.warmup :]
        self.records[self.warmup :] = measured[1::2]
        self._every *= 2

    def _judge(self) -> None:
        measured = len(self.records) - self.warmup
        if self._told or measured < _FEWEST_MEASURED or measured % _JUDGED_EVERY:
            return
        growth = self.growth()
        leaking = growth.trend is Trend.LEAK and growth.rate > (self.budget.growth or 0)
        over = any(not verdict.passed for verdict in judge(self.budget, self.series(), growth))
        if not leaking and not over:
            return
        self._told = True
        if self._trace == NEVER:
            if leaking:
                self._tell()
            return
        self.trace(traced_steps(growth), with_cycles=self.series().cyclic > 0)

    # -- traced steps ----------------------------------------------------------------------------------------------

    def trace(self, steps: int, with_cycles: bool = False) -> None:
        """Remember everything for the next `steps` steps."""
        if self.tracing is not None:
            return
        self.backend.pause()
        self._frozen.thaw()
        self.tracing = Tracing(self.backend.device_type, steps, with_cycles=with_cycles)
        self.tracing.start()
        self._open: Any = self.tracing.step()
        self._open.__enter__()

    def _traced_step(self) -> None:
        tracing = self.tracing
        assert tracing is not None
        self._open.__exit__(None, None, None)
        if tracing.found is not None:
            self._end_tracing(None)
            self.backend.resume()
            self._begin()
            return
        self._open = tracing.step()
        self._open.__enter__()

    def _end_tracing(self, why: str | None) -> None:
        tracing, self.tracing = self.tracing, None
        if tracing is None:
            return
        note = None if why is None else f"{why} in the traced step {tracing.done + 1} of {tracing.steps}"
        if tracing.found is None:
            gc.enable()
        self.traced = tracing.finish(note)
        if self.growth().trend is Trend.LEAK:
            self._tell()

    def _tell(self) -> None:
        if self._on_growth is not None:
            self._on_growth()
