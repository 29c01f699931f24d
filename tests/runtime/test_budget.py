"""The arguments of a mark."""

from __future__ import annotations

import pytest

import memlint
from memlint.errors import BudgetError
from memlint.runtime.budget import Budget, parse_tolerance


def test_a_budget_is_read() -> None:
    budget = Budget.parse({"peak": "1.5 GiB", "growth": 0, "steps": 5, "baseline": "10%", "device": "cuda:1"})
    assert (budget.peak, budget.growth, budget.steps, budget.baseline) == (1_610_612_736, 0, 5, 0.1)
    assert budget.judges
    assert not Budget().judges


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"peek": 1}, "did you mean 'peak'"),
        ({"colour": 1}, "it takes peak, reserved"),
        ({"peak": "12 parsecs"}, "peak='12 parsecs'"),
        ({"growth": -1}, "negative"),
        ({"steps": 2}, "at least 3"),
        ({"warmup": "three"}, "a whole number"),
        ({"device": "gpu 1"}, "'cuda:0'"),
        ({"cycles": "maybe"}, "'warn', 'fail', 'ignore'"),
        ({"baseline": "lots"}, "tolerance"),
    ],
)
def test_a_bad_value_is_named(values: dict[str, object], said: str) -> None:
    with pytest.raises(BudgetError) as caught:
        Budget.parse(values)
    assert said in str(caught.value)


def test_all_bad_values_are_listed() -> None:
    with pytest.raises(BudgetError) as caught:
        Budget.parse({"peak": "x", "growth": "y"})
    assert len(str(caught.value).splitlines()) == 2


def test_the_decorator_is_the_mark() -> None:
    @memlint.memory_budget(peak="1 GiB", growth=0)
    def test() -> None: ...

    (mark,) = test.pytestmark  # type: ignore[attr-defined]
    assert mark == pytest.mark.memory_budget(peak="1 GiB", growth=0).mark


def test_the_decorator_says_at_once_what_is_wrong() -> None:
    with pytest.raises(BudgetError):
        memlint.memory_budget(peak="lots")


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), (0.1, 0.1), ("0.2", 0.2), (0, 0.0)])
def test_a_tolerance_is_read(text: object, share: float) -> None:
    assert parse_tolerance(text) == share
