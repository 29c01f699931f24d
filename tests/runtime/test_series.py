"""What a series of readings says about growth."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from memlint.runtime.series import Growth, Series, StepRecord, Trend, floor, growth

STEPS = 30
leaks = st.integers(1, 10**9)
starts = st.integers(0, 10**12)


@given(starts, leaks, st.integers(3, 60))
def test_a_plain_leak_is_exact(start: int, leak: int, steps: int) -> None:
    assert growth([start + leak * i for i in range(steps + 1)]) == Growth(Trend.LEAK, leak, leak * steps, 1)


@given(starts, leaks, st.integers(1, STEPS - 1), st.integers(1, 10**12))
def test_a_jump_does_not_hide_a_leak_and_does_not_count(start: int, leak: int, at: int, jump: int) -> None:
    alive = [start + leak * i + (jump if i >= at else 0) for i in range(STEPS + 1)]
    found = growth(alive)
    assert found.trend is Trend.LEAK
    assert found.rate == leak


@given(starts, st.integers(1, STEPS - 1), leaks)
def test_one_jump_is_no_leak(start: int, at: int, jump: int) -> None:
    found = growth([start + (jump if i >= at else 0) for i in range(STEPS + 1)])
    assert found.trend in (Trend.JUMP, Trend.UNSETTLED)
    assert found.trend is Trend.UNSETTLED or found.rate == 0


@given(starts, st.integers(2, 10), st.integers(1, 10**9), st.integers(0, 20))
def test_a_sawtooth_is_flat_and_one_that_climbs_leaks(start: int, tooth: int, size: int, shift: int) -> None:
    saw = [start + (i + shift) % tooth * size for i in range(STEPS + 1)]
    assert growth(saw).trend is Trend.FLAT
    climbing = growth([value + 100 * i for i, value in enumerate(saw)])
    assert climbing.trend is Trend.LEAK or size > 10_000  # equal within a share of the tooth
    if size < 1000:
        assert climbing.rate == 100


@given(starts, st.integers(1, 7), st.integers(1, 10**9), st.integers(0, 20))
def test_a_leak_every_few_steps_is_judged_over_whole_windows(start: int, window: int, leak: int, shift: int) -> None:
    found = growth([start + (i + shift) // window * leak for i in range(STEPS + 1)])
    assert found == Growth(Trend.LEAK, leak / window, found.total, window)


@given(starts, st.integers(1, 8), st.integers(1, 10**9))
def test_what_fills_and_then_stays_is_a_late_warm_up(start: int, capacity: int, size: int) -> None:
    found = growth([start + min(i, capacity) * size for i in range(STEPS + 1)])
    assert found.trend in (Trend.LATE_WARMUP, Trend.JUMP)
    assert found.settled


@given(st.lists(st.integers(0, 10**9), min_size=STEPS + 1, max_size=STEPS + 1), st.randoms())
def test_the_order_of_noise_is_no_leak(values: list[int], random: object) -> None:
    found = growth(values)
    if found.trend is Trend.LEAK:  # such a list is sorted, or nearly
        rising = sum(b >= a for a, b in itertools.pairwise(values))
        assert rising > STEPS / 2


@given(st.lists(st.integers(0, 10**6), min_size=4, max_size=40), st.integers(0, 10**9))
def test_what_was_there_before_does_not_matter(alive: list[int], offset: int) -> None:
    assert growth([value + offset for value in alive]) == growth(alive)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=40))
def test_the_floor_never_falls_and_never_exceeds(alive: list[int]) -> None:
    lowest = floor(alive)
    assert all(a <= b for a, b in itertools.pairwise(lowest))
    assert all(low <= value for low, value in zip(lowest, alive, strict=True))


def test_rounding_of_the_allocator_is_no_growth() -> None:
    assert growth([4096, 4096, 4608, 4096, 4608, 4096, 4096, 4608, 4096, 4608, 4096]).trend is not Trend.LEAK


def test_too_few_steps_say_nothing() -> None:
    assert growth([0, 5, 10]).trend is Trend.UNKNOWN
    assert growth([]).trend is Trend.UNKNOWN


def record(index: int, kept: int, garbage: int = 0, peak: int | None = 0) -> StepRecord:
    return StepRecord(index, 0.1, kept, kept + garbage, peak, kept)


def test_the_warm_up_is_not_judged_and_garbage_is_no_leak() -> None:
    records = [record(0, 100, peak=900), *(record(i, 200, garbage=50, peak=300) for i in range(1, 6))]
    series = Series(1, tuple(records))
    assert series.kept == [100, 200, 200, 200, 200, 200]
    assert (series.peak, series.warmup_peak, series.cyclic) == (300, 900, 50)
    assert series.reserved_peak is None
