"""The measured steps of a run, and what they say about growth.

Let a_0 be the bytes alive before the first measured step and a_i those alive after step i, each after a garbage
collection. One difference says little: caches fill, a list of buffers doubles, batch shapes alternate, gradients pile
up until the window ends. So

1. *Whole windows.* If for some period p, at most a third of the steps, all sums over p steps in a row are equal
   (a_{i+p} - a_i is the same for all i), the run repeats itself every p steps, and grows by that sum over p. p = 1 is
   the plain leak, p = 4 an accumulation window, p = 2 alternating shapes.
2. *The floor.* Otherwise take f_i = min(a_i, ..., a_n): bytes that were alive after step i and never went away again.
   What comes and goes (a sawtooth) is not in it. The steps are cut into three stretches; a leak raises the floor in all
   three, and its rate is the middle one of the three rates, so that a jump in one stretch does not count. What rises at
   first and then no more is a late warm-up; what jumps once is a jump.
3. *The order.* The floor of pure noise (random batch sizes) rises too, toward its end. So most pairs of readings must
   also be in rising order: Kendall's tau of the readings with time is at least 0.6 (below one in 300 for eleven
   readings of noise).

If only some stretches rose and the quiet since then is no longer than the longest wait before, or if the order is not
clear, n steps cannot tell a leak that shows every few steps from a cache that fills: `settled` is False then, and the
caller measures more steps if it can.
"""

from __future__ import annotations

import enum
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

_STRETCHES = 3
#: sums over whole windows count as equal within this share of the largest one (sizes follow the data a little)
_EQUAL = 0.01
_CLEAR_ORDER = 0.6


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did to the memory. All sizes in bytes, above what was alive when the measuring began.

    allocated_before, allocated_after: alive before and after the step, before a collection.
    collected: alive after the step and a garbage collection; None where none was made.
    peak: allocated at most at one time within the step, on the device with most; None where the device cannot say.
    reserved_peak: the same of what the allocator held; None where the device cannot say.
    """

    index: int
    seconds: float
    allocated_before: int
    allocated_after: int
    peak: int | None
    collected: int | None = None
    reserved_peak: int | None = None

    @property
    def kept(self) -> int:
        """Bytes alive after the step that are not garbage, as far as is known."""
        return self.allocated_after if self.collected is None else self.collected

    @property
    def cyclic(self) -> int:
        """Bytes that only the collection freed."""
        return max(self.allocated_after - self.kept, 0)


class Trend(enum.Enum):
    """What the bytes alive do over the steps."""

    FLAT = "flat"
    LEAK = "leak"
    LATE_WARMUP = "late warm-up"
    JUMP = "one jump"
    UNSETTLED = "unsettled"
    UNKNOWN = "too few steps"


@dataclass(frozen=True, slots=True)
class Growth:
    """The slope of the bytes that stay alive. `rate` is in bytes a step, `total` in bytes over the measured steps.

    period: after how many steps the run repeats itself; None where it does not.
    """

    trend: Trend
    rate: float
    total: int
    period: int | None = None

    @property
    def settled(self) -> bool:
        """Whether more steps would not change the verdict."""
        return self.trend is not Trend.UNSETTLED and self.trend is not Trend.UNKNOWN


@dataclass(frozen=True, slots=True)
class Series:
    """All steps of a run, the first `warmup` of them not judged."""

    warmup: int
    records: tuple[StepRecord, ...] = field(default=())

    @property
    def measured(self) -> tuple[StepRecord, ...]:
        """The steps that count."""
        return self.records[self.warmup :]

    @property
    def kept(self) -> list[int]:
        """a_0, a_1, ..., a_n: bytes alive before the first measured step and after each, without garbage."""
        if not self.measured:
            return []
        first = self.records[self.warmup - 1].kept if self.warmup else self.measured[0].allocated_before
        return [first, *(record.kept for record in self.measured)]

    @property
    def peak(self) -> int | None:
        """The highest peak of a measured step, in bytes."""
        return max((r.peak for r in self.measured if r.peak is not None), default=None)

    @property
    def warmup_peak(self) -> int | None:
        """The highest peak of a warm-up step, in bytes."""
        return max((r.peak for r in self.records[: self.warmup] if r.peak is not None), default=None)

    @property
    def reserved_peak(self) -> int | None:
        """The most that the allocator held in a measured step, in bytes; None where unknown."""
        return max((r.reserved_peak for r in self.measured if r.reserved_peak is not None), default=None)

    @property
    def cyclic(self) -> float:
        """Bytes a step that only a collection frees: the median of the measured steps, so that one odd step is none."""
        return statistics.median(record.cyclic for record in self.measured) if self.measured else 0.0

    def growth(self) -> Growth:
        """What the measured steps say."""
        return growth(self.kept)


def growth(alive: Sequence[int]) -> Growth:
    """What `alive`, the bytes before the first step and after each, says; see the module."""
    steps = len(alive) - 1
    if steps < _STRETCHES:
        total = alive[-1] - alive[0] if alive else 0
        return Growth(Trend.UNKNOWN, total / steps if steps > 0 else 0.0, total)
    total = alive[-1] - alive[0]
    for period in range(1, steps // _STRETCHES + 1):
        sums = [alive[i + period] - alive[i] for i in range(steps - period + 1)]
        widest = max(map(abs, sums))
        if max(sums) - min(sums) <= _EQUAL * widest:
            rate = statistics.median(sums) / period
            return Growth(Trend.LEAK if rate > 0 else Trend.FLAT, rate if rate > 0 else 0.0, total, period)
    return _by_the_floor(alive, total)


def floor(alive: Sequence[int]) -> list[int]:
    """f_i = min(a_i, ..., a_n)."""
    lowest = list(alive)
    for i in range(len(lowest) - 2, -1, -1):
        lowest[i] = min(lowest[i], lowest[i + 1])
    return lowest


def _by_the_floor(alive: Sequence[int], total: int) -> Growth:
    lowest = floor(alive)
    steps = len(alive) - 1
    edges = [round(steps * part / _STRETCHES) for part in range(_STRETCHES + 1)]
    rates = [(lowest[b] - lowest[a]) / (b - a) for a, b in itertools.pairwise(edges)]
    rising = [rate > 0 for rate in rates]
    middle = statistics.median(rates)
    if all(rising):
        clear = _kendall(alive) >= _CLEAR_ORDER
        return Growth(Trend.LEAK if clear else Trend.UNSETTLED, middle, total)
    if not any(rising):
        return Growth(Trend.FLAT, 0.0, total)
    if rising[-1]:
        return Growth(Trend.UNSETTLED, middle, total)
    rises = [i for i in range(1, steps + 1) if lowest[i] > lowest[i - 1]]
    longest_gap = max(b - a for a, b in zip([0, *rises], rises, strict=False))
    if steps - rises[-1] <= longest_gap:
        return Growth(Trend.UNSETTLED, middle, total)  # the next rise may be due
    return Growth(Trend.JUMP if len(rises) == 1 else Trend.LATE_WARMUP, 0.0, total)


def _kendall(alive: Sequence[int]) -> float:
    """Pairs of readings in rising order less those in falling order, as a share of all pairs."""
    signs = [(b > a) - (b < a) for i, a in enumerate(alive) for b in alive[i + 1 :]]
    return sum(signs) / len(signs)
