"""What a run of steps comes to: the limits that held or not, and what goes with them into every report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from memlint.runtime.budget import Budget
from memlint.runtime.series import Growth, Series, Trend
from memlint.units import format_bytes

if TYPE_CHECKING:
    from memlint.runtime.attribution import Cycle, Leak, PeakBreakdown


@dataclass(frozen=True, slots=True)
class Verdict:
    """One limit. Sizes in bytes, growth and cycles in bytes a step.

    limit: "peak", "reserved", "growth", "cycles" or "baseline". observed: what was measured, None where the device
    cannot say. allowed: the limit's value, None where nothing was asked.
    """

    limit: str
    passed: bool
    observed: float | None
    allowed: float | None
    message: str


@dataclass(frozen=True, slots=True)
class Traced:
    """What traced steps found: who holds what leaks, which cycles there are, what the peak consists of."""

    leaks: tuple[Leak, ...] = ()
    cycles: tuple[Cycle, ...] = ()
    peak: PeakBreakdown | None = None
    steps: int = 0
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that is known after a run of steps.

    series: the steps. verdicts: the limits, failed ones first. traced: what the traced steps said, where some ran.
    notes: what a person should know besides. leftover: bytes that were alive on the device before.
    """

    device: str
    card: str
    torch: str
    budget: Budget
    series: Series
    growth: Growth
    verdicts: tuple[Verdict, ...]
    leftover: int = 0
    details: dict[str, Any] = field(default_factory=dict)
    traced: Traced = Traced()
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> list[Verdict]:
        """The limits that did not hold."""
        return [verdict for verdict in self.verdicts if not verdict.passed]

    @property
    def passed(self) -> bool:
        """Whether every limit held."""
        return not self.failed

    def with_trace(self, traced: Traced) -> Outcome:
        """The same with what traced steps found."""
        notes = self.notes if traced.note is None else (*self.notes, traced.note)
        return _with_bounds(replace(self, traced=traced, notes=notes))

    def also(self, verdict: Verdict) -> Outcome:
        """The same with one more verdict."""
        return replace(self, verdicts=failed_first((verdict, *self.verdicts)))

    def noted(self, note: str) -> Outcome:
        """The same with one more note."""
        return replace(self, notes=(*self.notes, note))

    def without(self, limit: str, note: str) -> Outcome:
        """The same with a limit no longer held against the run, and a note that says why."""
        verdicts = tuple(replace(v, passed=True) if v.limit == limit else v for v in self.verdicts)
        return replace(self, verdicts=verdicts, notes=(*self.notes, note))


def _with_bounds(outcome: Outcome) -> Outcome:
    """Growth that ends by itself, in a deque with a length, is not held against the run."""
    leaks = [leak for leak in outcome.traced.leaks if leak.bytes_per_step > 0]
    if not leaks or not any(verdict.limit == "growth" and not verdict.passed for verdict in outcome.verdicts):
        return outcome
    endless = sum(leak.bytes_per_step for leak in leaks if not leak.bounded)
    bounded = [leak for leak in leaks if leak.bounded]
    if not bounded or endless > (outcome.budget.growth or 0):
        return outcome
    most = sum(leak.bytes_per_step * (leak.holder.bound or 0) for leak in bounded if leak.holder is not None)
    holders = ", ".join(leak.holder.path for leak in bounded if leak.holder is not None)
    return outcome.without("growth", f"memory grows until {holders} is full, by {format_bytes(most)} in all")


def failed_first(verdicts: Iterable[Verdict]) -> tuple[Verdict, ...]:
    """The verdicts in the order of a report."""
    return tuple(sorted(verdicts, key=lambda verdict: verdict.passed))


def judge(budget: Budget, series: Series, growth: Growth) -> Iterator[Verdict]:
    """The verdicts on what was measured, one for each limit that was set or overrun."""
    yield from _ceiling("peak", budget.peak, series.peak, "allocated")
    yield from _ceiling("reserved", budget.reserved, series.reserved_peak, "reserved")
    yield from _growth(budget, growth)
    cyclic = series.cyclic
    if cyclic > 0 and budget.cycles != "ignore":
        message = f"{format_bytes(cyclic)} a step are freed by a garbage collection only: objects hold each other"
        yield Verdict("cycles", budget.cycles != "fail", cyclic, 0, message)


def _ceiling(limit: str, allowed: int | None, observed: int | None, word: str) -> Iterator[Verdict]:
    if allowed is None:
        return
    if observed is None:
        yield Verdict(limit, True, None, allowed, f"the {word} peak is unknown on this device, so it was not judged")
    elif observed <= allowed:
        message = f"the {word} peak is {format_bytes(observed)}, within the budget of {format_bytes(allowed)}"
        yield Verdict(limit, True, observed, allowed, message)
    else:
        over = format_bytes(observed - allowed)
        message = f"the {word} peak is {format_bytes(observed)}, {over} above the budget of {format_bytes(allowed)}"
        yield Verdict(limit, False, observed, allowed, message)


def _growth(budget: Budget, growth: Growth) -> Iterator[Verdict]:
    if budget.growth is None:
        return
    leaking = growth.trend is Trend.LEAK and growth.rate > budget.growth
    if leaking:
        allowed = f"{format_bytes(budget.growth)} may stay" if budget.growth else "nothing may stay"
        message = f"memory grows by {format_bytes(growth.rate)} a step, where {allowed}"
        yield Verdict("growth", False, growth.rate, budget.growth, message)
        return
    yield Verdict("growth", True, growth.rate if growth.trend is Trend.LEAK else 0.0, budget.growth, _calm(growth))


def _calm(growth: Growth) -> str:
    size = format_bytes(growth.total)
    said = {
        Trend.FLAT: "memory does not grow",
        Trend.LEAK: f"memory grows by {format_bytes(growth.rate)} a step, as the budget allows",
        Trend.JUMP: f"memory grew once, by {size}, and then stayed",
        Trend.LATE_WARMUP: f"memory grew by {size} at first and then stayed: a longer warmup would not see it",
        Trend.UNSETTLED: f"memory grew by {size} without a pattern: more steps would tell",
        Trend.UNKNOWN: "too few steps to tell whether memory grows",
    }
    return said[growth.trend]
