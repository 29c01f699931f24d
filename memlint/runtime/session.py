"""Runs steps, measures them, judges them, and traces a few more when something is wrong."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from memlint.runtime.backends.base import Backend
from memlint.runtime.budget import STEPS, WARMUP, Budget
from memlint.runtime.series import Growth, Series, StepRecord, Trend
from memlint.runtime.verdict import Outcome, Traced, Verdict, failed_first, judge
from memlint.units import format_bytes

if TYPE_CHECKING:
    from memlint.runtime.sites import Site
    from memlint.runtime.tracker import OldStorages

#: where growth is judged and not settled, this many times the steps are measured at most
_MOST_TIMES = 3
TRACED_STEPS = 5
_MOST_TRACED = 25
ON_FAILURE, ALWAYS, NEVER = "on-failure", "always", "never"
TRACE = (ON_FAILURE, ALWAYS, NEVER)


class Frozen:
    """Keeps what is there now out of the collections to come: with torch loaded, a tenth of a second less for each.

    The collector shows no frozen objects either, so `thaw()` comes before anything is searched for.
    """

    def __init__(self) -> None:
        self._ours = False

    def freeze(self) -> None:
        """Leave out what is there; nothing if the program froze its objects itself."""
        self._ours = gc.get_freeze_count() == 0
        if self._ours:
            gc.freeze()

    def thaw(self) -> None:
        """Let the collector see everything again."""
        if self._ours:
            gc.unfreeze()
            self._ours = False


class Session:
    """One run of steps on one device. `start()` before what is to be counted is made, `stop()` at the end."""

    def __init__(self, backend: Backend, budget: Budget, trace: str = ON_FAILURE) -> None:
        self.backend = backend
        self.budget = budget
        self.trace_when = trace
        self.records: list[StepRecord] = []
        self._frozen = Frozen()
        self._old: OldStorages | None = None
        self._elsewhere = 0

    def start(self) -> None:
        """Count from here on."""
        gc.collect()  # what earlier tests left as garbage is not this one's
        self.backend.start()
        try:
            if self.trace_when != NEVER:
                from memlint.runtime.tracker import OldStorages

                self._old = OldStorages(self.backend.device_type)
        except BaseException:
            self.backend.stop()
            raise
        self._frozen.freeze()

    def stop(self) -> None:
        """Leave torch as it was."""
        self._frozen.thaw()
        self.backend.stop()

    @property
    def warmup(self) -> int:
        """Steps before measuring."""
        return WARMUP if self.budget.warmup is None else self.budget.warmup

    @property
    def steps(self) -> int:
        """Measured steps."""
        return STEPS if self.budget.steps is None else self.budget.steps

    def allocated(self) -> int:
        """Bytes alive now that count."""
        return self.backend.allocated() - self._elsewhere

    def leave_out(self, nbytes: int) -> None:
        """So many bytes that are alive now do not count: they are not of this run alone."""
        self._elsewhere += nbytes

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One step. An exception passes through, and the step does not count then."""
        before = self.allocated()
        with collector_off():
            self.backend.begin_step()
            began = time.perf_counter()
            yield
            seconds = time.perf_counter() - began
            reading = self.backend.end_step()
        gc.collect()
        self.records.append(
            StepRecord(
                index=len(self.records),
                seconds=seconds,
                allocated_before=before,
                allocated_after=reading.allocated - self._elsewhere,
                peak=None if reading.peak is None else reading.peak - self._elsewhere,
                collected=self.allocated(),
                reserved_peak=reading.reserved_peak,
            )
        )

    def run(self, body: Callable[[], object]) -> None:
        """Run `body` as often as the budget says; and more often, where growth is judged and not settled yet."""
        for _ in range(self.warmup + self.steps):
            with self.step():
                body()
        if self.budget.growth is None:
            return
        for _ in range((_MOST_TIMES - 1) * self.steps):
            if self.series().growth().settled:
                break
            try:
                with self.step():
                    body()
            except StopIteration:
                break  # the body had as many batches as were asked for: that it has no more is no failure

    def series(self) -> Series:
        """The steps so far."""
        warmup = self.warmup if len(self.records) > self.warmup else 0
        return Series(warmup, tuple(self.records))

    def outcome(
        self,
        body: Callable[[Tracing], Traced] | None = None,
        labels: Callable[[], Mapping[int, str]] = dict,
        extra: Callable[[Outcome], Sequence[Verdict]] = lambda outcome: (),
    ) -> Outcome:
        """Judge the steps. Where a limit failed, `body` runs a few of them again, traced, to say why (`again`).

        labels names objects by id for the reports, such as fixtures. extra gives further verdicts, such as those of
        baselines.
        """
        series = self.series()
        growth = series.growth()
        outcome = outcome_of(self.backend, self.budget, series, growth)
        for verdict in extra(outcome):
            outcome = outcome.also(verdict)
        if body is None or not self._wants_trace(outcome):
            return outcome
        self.backend.pause()
        self._frozen.thaw()
        traced = body(Tracing(self.backend.device_type, traced_steps(growth), labels, bool(series.cyclic), self._old))
        return outcome.with_trace(traced)

    def _wants_trace(self, outcome: Outcome) -> bool:
        if self.trace_when == ON_FAILURE:
            # cycles pass with a warning that names them
            return bool(outcome.failed) or any(verdict.limit == "cycles" for verdict in outcome.verdicts)
        return self.trace_when == ALWAYS


class Tracing:
    """A few steps with everything remembered; `found` is there once `steps` of them have run, or after `finish()`."""

    def __init__(
        self,
        device_type: str,
        steps: int,
        labels: Callable[[], Mapping[int, str]] = dict,
        with_cycles: bool = False,
        old: OldStorages | None = None,
    ) -> None:
        from memlint.runtime.trace import TracingTracker

        self.steps = steps
        self.done = 0
        self.found: Traced | None = None
        self._labels = labels
        self._with_cycles = with_cycles
        self._old = old
        self._history: list[Mapping[Site | None, int]] = []
        self._tracker = TracingTracker(device_type)
        self._frozen = Frozen()

    def start(self) -> None:
        """Remember from here on."""
        gc.collect()
        self._tracker.start()
        if self._old is not None:
            self._tracker.leave_out(self._old.keys())
        self._frozen.freeze()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One step. After the last one, everything that it needs is still alive, and looked at."""
        from memlint.runtime.attribution import alive_by_line

        if self.found is not None:
            yield
            return
        self._tracker.step = self.done
        with collector_off():
            yield
            self.done += 1
            if self.done == self.steps:
                self._examine()
            else:
                gc.collect()
                self._history.append(alive_by_line(self._tracker))

    def finish(self, note: str | None = None) -> Traced:
        """What was found; also if the steps ended early, which `note` explains."""
        if self.found is None:
            gc.collect()
            self._examine()
        found = self.found or Traced()
        self._tracker.stop()
        return replace(found, note=note)

    def _examine(self) -> None:
        from memlint.runtime import attribution

        self._frozen.thaw()
        tracker = self._tracker
        tracker.pause()
        breakdown = attribution.peak_breakdown(tracker)
        cycles = attribution.cycles(tracker) if self._with_cycles and self.done else []
        gc.collect()
        self._history.append(attribution.alive_by_line(tracker))
        leaks = attribution.leaks(tracker, self.done, self._labels(), self._history) if self.done > 1 else []
        self.found = Traced(tuple(leaks), tuple(cycles), breakdown, self.done)


def outcome_of(backend: Backend, budget: Budget, series: Series, growth: Growth) -> Outcome:
    """The verdicts on a series, with what goes beside them; nothing is traced yet."""
    import torch

    details = backend.details()
    return Outcome(
        device=backend.name,
        card=details.device,
        torch=str(torch.__version__),
        budget=budget,
        series=series,
        growth=growth,
        verdicts=failed_first(judge(budget, series, growth)),
        leftover=backend.leftover,
        details=dict(details.values),
        notes=tuple(_notes(budget, series, growth)),
    )


def out_of_memory(error: BaseException, step: int) -> Verdict | None:
    """The verdict that an out-of-memory error in `step` (from 1) comes to; None for any other error."""
    import torch

    kinds = (torch.cuda.OutOfMemoryError, getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError))
    if not isinstance(error, kinds):
        return None
    first = str(error).partition(". ")[0]
    return Verdict("oom", False, None, None, f"step {step} ran out of memory: {first}")


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """No automatic collection within: when it comes is chance, and a budget should not depend on that."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def again(body: Callable[[], object]) -> Callable[[Tracing], Traced]:
    """Runs `body` for every step of a tracing; an exception ends it early."""

    def steps(tracing: Tracing) -> None:
        for _ in range(tracing.steps):
            with tracing.step():
                body()

    return traced_through(steps)


def traced_through(run: Callable[[Tracing], None]) -> Callable[[Tracing], Traced]:
    """Traces what `run` does in steps; whatever ends it early is a note, and nothing of the tracing stays behind."""

    def traced(tracing: Tracing) -> Traced:
        tracing.start()
        note = None
        try:
            run(tracing)
        except KeyboardInterrupt:
            tracing.finish()
            raise
        except BaseException as error:  # pytest.skip() and pytest.fail() raise no Exception
            note = f"tracing stopped in its step {tracing.done + 1}: {type(error).__name__}: {error}"
        return tracing.finish(note)

    return traced


def traced_steps(growth: Growth) -> int:
    """How many steps show what grows."""
    if growth.trend is not Trend.LEAK:
        return TRACED_STEPS
    if growth.period is None:
        return 2 * TRACED_STEPS + 2
    return min(max(TRACED_STEPS, 3 * growth.period + 1), _MOST_TRACED)


def _notes(budget: Budget, series: Series, growth: Growth) -> Iterator[str]:
    if growth.trend in (Trend.LATE_WARMUP, Trend.JUMP, Trend.UNSETTLED) and budget.growth is not None:
        yield {
            Trend.LATE_WARMUP: f"late warm-up: memory grew by {format_bytes(growth.total)} at first, then no more",
            Trend.JUMP: f"memory grew once, by {format_bytes(growth.total)}, then no more",
            Trend.UNSETTLED: f"memory grew by {format_bytes(growth.total)} in {len(series.measured)} steps without a"
            " pattern; not judged as a leak (more steps= would tell)",
        }[growth.trend]
    if budget.growth is None and growth.trend is Trend.LEAK:
        yield f"memory grows by {format_bytes(growth.rate)} a step; growth=0 would hold the test to that"
    if growth.period is not None and growth.period > 1:
        yield f"the run repeats itself every {growth.period} steps; growth is judged over whole windows"
    peak, warmup = series.peak, series.warmup_peak
    if peak is not None and warmup is not None and warmup > peak:
        yield f"the peak of the warm-up was higher: {format_bytes(warmup)}"
