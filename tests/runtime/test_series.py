"""What a series of readings says about growth: the statistics that the docstring of series.py promises."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlint.runtime.series import Growth, Series, StepRecord, Trend, floor, growth

STEPS = 30
sizes = st.integers(1, 10**9)
starts = st.integers(0, 10**12)
seeds = st.integers(0, 2**32)
readings = st.lists(st.integers(0, 10**6), min_size=4, max_size=40)


# -- plain leaks and jumps ---------------------------------------------------------------------------------------------


@given(starts, sizes, st.integers(3, 60))
def test_a_plain_leak_is_exact(start: int, leak: int, steps: int) -> None:
    assert growth([start + leak * i for i in range(steps + 1)]) == Growth(Trend.LEAK, leak, leak * steps, 1)


@given(starts, st.integers(1, 10**6), st.integers(3, 60))
def test_what_shrinks_is_flat(start: int, less: int, steps: int) -> None:
    found = growth([start - less * i for i in range(steps + 1)])
    assert (found.trend, found.rate, found.total) == (Trend.FLAT, 0, -less * steps)


@given(starts, st.integers(3, 60))
def test_nothing_is_flat(start: int, steps: int) -> None:
    assert growth([start] * (steps + 1)) == Growth(Trend.FLAT, 0, 0, 1)


@given(starts, sizes, st.integers(1, STEPS - 1), st.integers(1, 10**12), st.sampled_from([10, 20, STEPS]))
def test_a_jump_does_not_hide_a_leak_and_does_not_count(start: int, leak: int, at: int, jump: int, steps: int) -> None:
    alive = [start + leak * i + (jump if i >= at else 0) for i in range(steps + 1)]
    found = growth(alive)
    assert found.trend is Trend.LEAK
    assert found.rate == leak


@given(starts, sizes, st.integers(1, STEPS - 1), st.integers(1, 10**9))
def test_what_is_let_go_once_does_not_hide_a_leak(start: int, leak: int, at: int, less: int) -> None:
    """A cache that is emptied in the middle: the floor is lower for what came before, the leak goes on."""
    found = growth([start + leak * i - (less if i >= at else 0) for i in range(STEPS + 1)])
    assert found.trend in (Trend.LEAK, Trend.UNSETTLED)
    if less < leak:
        assert (found.trend, found.rate) == (Trend.LEAK, leak)


@given(starts, st.integers(1, STEPS - 1), sizes)
def test_one_jump_is_no_leak(start: int, at: int, jump: int) -> None:
    found = growth([start + (jump if i >= at else 0) for i in range(STEPS + 1)])
    if at <= STEPS // 3:  # the quiet since then is longer than the wait before
        assert found == Growth(Trend.JUMP, 0, jump)
    assert found.trend in (Trend.JUMP, Trend.UNSETTLED)


# -- what comes and goes -----------------------------------------------------------------------------------------------


@given(starts, st.integers(2, 10), sizes, st.integers(0, 20))
def test_a_sawtooth_is_flat(start: int, tooth: int, size: int, shift: int) -> None:
    found = growth([start + (i + shift) % tooth * size for i in range(STEPS + 1)])
    assert (found.trend, found.rate, found.period) == (Trend.FLAT, 0, tooth)


@given(starts, st.integers(2, 10), sizes, st.integers(0, 20), sizes)
def test_a_sawtooth_that_climbs_leaks_and_the_rate_is_exact(
    start: int, tooth: int, size: int, shift: int, leak: int
) -> None:
    found = growth([start + (i + shift) % tooth * size + leak * i for i in range(STEPS + 1)])
    assert found.trend is Trend.LEAK
    if found.period == tooth:
        assert found.rate == leak
    else:  # the tooth is lost in the leak: shorter windows are equal to a hundredth
        assert found.rate == pytest.approx(leak, rel=0.02)


@given(starts, st.integers(11, 14), st.integers(1, 1000), st.integers(0, 20))
def test_a_sawtooth_that_is_too_long_to_be_seen_thrice_is_no_leak(
    start: int, tooth: int, size: int, shift: int
) -> None:
    found = growth([start + (i + shift) % tooth * size for i in range(STEPS + 1)])
    assert found.trend is not Trend.LEAK


@given(starts, st.integers(1, 6), sizes, st.integers(0, 20))
def test_a_leak_every_few_steps_is_judged_over_whole_windows(start: int, window: int, leak: int, shift: int) -> None:
    found = growth([start + (i + shift) // window * leak for i in range(STEPS + 1)])
    assert found == Growth(Trend.LEAK, leak / window, found.total, window)
    assert found.settled


@given(starts, st.integers(2, 6), st.lists(sizes, min_size=6, max_size=6), sizes)
def test_any_pattern_that_repeats_itself_is_judged_over_whole_windows(
    start: int, window: int, pattern: list[int], leak: int
) -> None:
    alive = [start + pattern[i % window] + i // window * leak for i in range(STEPS + 1)]
    found = growth(alive)
    assert found.trend is Trend.LEAK
    assert found.rate == pytest.approx(leak / window, rel=0.02)


# -- what fills and then stays -----------------------------------------------------------------------------------------


@given(starts, st.integers(1, 8), sizes)
def test_what_fills_and_then_stays_is_a_late_warm_up(start: int, capacity: int, size: int) -> None:
    found = growth([start + min(i, capacity) * size for i in range(STEPS + 1)])
    assert found.trend is (Trend.JUMP if capacity == 1 else Trend.LATE_WARMUP)
    assert (found.rate, found.total, found.settled) == (0, capacity * size, True)


@given(starts, st.integers(21, STEPS - 1), sizes)
def test_what_fills_almost_to_the_end_is_not_settled_or_a_leak(start: int, capacity: int, size: int) -> None:
    found = growth([start + min(i, capacity) * size for i in range(STEPS + 1)])
    assert found.trend in (Trend.LEAK, Trend.UNSETTLED)


def test_a_list_that_doubles_is_a_late_warm_up() -> None:
    capacities = [0, 4, 4, 4, 8, 8, 8, 8, *[16] * 23]
    assert growth(capacities).trend is Trend.LATE_WARMUP


@pytest.mark.parametrize(("steps", "settled"), [(5, False), (10, False), (11, True)])
def test_a_rise_waits_for_a_quiet_that_is_longer_than_the_wait_before(steps: int, settled: bool) -> None:
    alive = [0, 0, 0, 0, 0, *[100] * 30][: steps + 1]
    assert growth(alive).settled is settled


# -- noise -------------------------------------------------------------------------------------------------------------


@given(starts, seeds, st.integers(2, 10**9))
def test_noise_is_never_a_leak_over_thirty_steps(start: int, seed: int, width: int) -> None:
    random_of = random.Random(seed)
    found = growth([start + random_of.randrange(width) for _ in range(STEPS + 1)])
    assert found.trend is not Trend.LEAK


def test_noise_is_seldom_a_leak_over_ten_steps_and_rarer_the_more_steps_there_are() -> None:
    random_of = random.Random(0)

    def share(steps: int, tries: int = 4000) -> float:
        series = ([random_of.random() for _ in range(steps + 1)] for _ in range(tries))
        return sum(growth([int(value * 10**9) for value in one]).trend is Trend.LEAK for one in series) / tries

    assert share(10) < 0.01
    assert share(20) < 0.002


def test_the_order_of_eleven_readings_of_noise_is_seldom_clear() -> None:
    """The share of all orders of 11 readings whose tau is at least 0.6: those with at most 11 of 55 inversions."""
    counts = [1]  # orders by their inversions
    for size in range(2, 12):
        counts = [sum(counts[max(0, k - size + 1) : k + 1]) for k in range(size * (size - 1) // 2 + 1)]
    assert sum(counts) == math.factorial(11)
    assert sum(counts[:12]) / math.factorial(11) < 1 / 200


@given(starts, seeds)
def test_rounding_of_the_allocator_is_no_growth(start: int, seed: int) -> None:
    random_of = random.Random(seed)
    alive = [start + 512 * random_of.choice([0, 0, 1]) for _ in range(STEPS + 1)]
    found = growth(alive)
    assert found.trend is not Trend.LEAK


def test_rounding_over_ten_steps_is_no_growth() -> None:
    assert growth([4096, 4096, 4608, 4096, 4608, 4096, 4096, 4608, 4096, 4608, 4096]).trend is not Trend.LEAK


@given(starts, seeds, st.integers(1000, 10**9))
def test_a_leak_with_a_little_rounding_on_top_is_a_leak(start: int, seed: int, leak: int) -> None:
    random_of = random.Random(seed)
    found = growth([start + leak * i + random_of.randrange(leak // 4) for i in range(STEPS + 1)])
    assert found.trend is Trend.LEAK
    assert found.rate == pytest.approx(leak, rel=0.1)


# -- in general --------------------------------------------------------------------------------------------------------


@given(readings, st.integers(-(10**9), 10**9))
def test_what_was_there_before_does_not_matter(alive: list[int], offset: int) -> None:
    assert growth([value + offset for value in alive]) == growth(alive)


@given(readings, st.integers(1, 1000))
def test_the_unit_does_not_matter(alive: list[int], factor: int) -> None:
    small, large = growth(alive), growth([value * factor for value in alive])
    assert (large.trend, large.period, large.total) == (small.trend, small.period, small.total * factor)
    assert large.rate == pytest.approx(small.rate * factor)


@given(readings)
def test_only_a_leak_and_what_is_not_settled_have_a_rate(alive: list[int]) -> None:
    found = growth(alive)
    assert found.total == alive[-1] - alive[0]
    assert found.rate >= 0
    assert (found.rate > 0) <= (found.trend in (Trend.LEAK, Trend.UNSETTLED))
    assert found.rate > 0 or found.trend is not Trend.LEAK


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=40))
def test_the_floor_never_falls_and_never_exceeds(alive: list[int]) -> None:
    lowest = floor(alive)
    assert all(a <= b for a, b in itertools.pairwise(lowest))
    assert all(low <= value for low, value in zip(lowest, alive, strict=True))
    assert lowest[0] == min(alive)
    assert lowest[-1] == alive[-1]
    assert floor(lowest) == lowest


def test_too_few_steps_say_nothing() -> None:
    assert growth([]) == Growth(Trend.UNKNOWN, 0, 0)
    assert growth([7]) == Growth(Trend.UNKNOWN, 0, 0)
    assert growth([0, 5, 10]) == Growth(Trend.UNKNOWN, 5, 10)
    assert not growth([0, 5, 10]).settled


# -- records -----------------------------------------------------------------------------------------------------------


def record(index: int, kept: int, garbage: int = 0, peak: int | None = 0, reserved: int | None = None) -> StepRecord:
    return StepRecord(index, 0.1, kept, kept + garbage, peak, kept, reserved)


def test_the_warm_up_is_not_judged_and_garbage_is_no_leak() -> None:
    records = [record(0, 100, peak=900), *(record(i, 200, garbage=50, peak=300) for i in range(1, 6))]
    series = Series(1, tuple(records))
    assert series.kept == [100, 200, 200, 200, 200, 200]
    assert (series.peak, series.warmup_peak, series.cyclic) == (300, 900, 50)
    assert series.reserved_peak is None
    assert [step.index for step in series.measured] == [1, 2, 3, 4, 5]


def test_without_a_warm_up_the_first_reading_is_the_one_before_the_first_step() -> None:
    first = StepRecord(0, 0.1, 40, 100, 0, 100)
    assert Series(0, (first, record(1, 200))).kept == [40, 100, 200]


def test_one_odd_step_of_garbage_is_none() -> None:
    records = [record(i, 0, garbage=1000 if i == 3 else 0) for i in range(6)]
    assert Series(0, tuple(records)).cyclic == 0


def test_without_a_collection_all_that_is_alive_counts() -> None:
    step = StepRecord(0, 0.1, 0, 700, None)
    assert (step.kept, step.cyclic) == (700, 0)


def test_what_a_device_cannot_say_is_left_out_of_a_peak() -> None:
    assert Series(0, (record(0, 0, peak=None), record(1, 0, peak=5, reserved=9))).peak == 5
    series = Series(0, (record(0, 0, peak=None), record(1, 0, peak=5, reserved=9)))
    assert (series.reserved_peak, series.warmup_peak) == (9, None)


def test_no_records_say_nothing() -> None:
    series = Series(3)
    assert (series.measured, series.kept, series.peak, series.warmup_peak, series.cyclic) == ((), [], None, None, 0)
    assert series.growth().trend is Trend.UNKNOWN
