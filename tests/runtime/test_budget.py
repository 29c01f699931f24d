"""The arguments of a mark."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memlint
from memlint.errors import BudgetError, MemlintError
from memlint.runtime.budget import STEPS, WARMUP, Budget, memory_budget, parse_device, parse_tolerance

SIZE = "is no size: write a number of bytes, or text such as '1.5 GiB'"
DEVICE = "it wants 'auto', 'cpu', 'cuda', 'cuda:0', 'virtual:t4', or another device of torch"
CYCLES = "it wants one of 'warn', 'fail', 'ignore'"
TOLERANCE = "it wants a tolerance such as '5%'"
COUNT = "it wants a whole number of steps"


def complaint(values: dict[str, object]) -> list[str]:
    with pytest.raises(BudgetError) as caught:
        Budget.parse(values)
    return str(caught.value).splitlines()


# -- good values -------------------------------------------------------------------------------------------------------


def test_a_budget_is_read() -> None:
    said = {
        "peak": "1.5 GiB", "reserved": 2**31, "growth": 0, "warmup": 0, "steps": 3, "device": "cuda:1",
        "baseline": "10%", "cycles": "fail",
    }  # fmt: skip
    assert Budget.parse(said) == Budget(1_610_612_736, 2**31, 0, 0, 3, "cuda:1", 0.1, "fail")


def test_nothing_said_is_nothing_judged() -> None:
    assert Budget.parse({}) == Budget()
    assert not Budget().judges
    assert (WARMUP, STEPS) == (3, 10)


def test_none_says_nothing() -> None:
    names = ("peak", "reserved", "growth", "warmup", "steps", "baseline")
    assert Budget.parse(dict.fromkeys(names)) == Budget()


@pytest.mark.parametrize("name", ["peak", "reserved", "growth"])
@pytest.mark.parametrize(("value", "size"), [(0, 0), ("1 KiB", 1024), ("2MB", 2_000_000), (7, 7)])
def test_sizes_are_read(name: str, value: object, size: int) -> None:
    budget = Budget.parse({name: value})
    assert getattr(budget, name) == size
    assert budget.judges


@pytest.mark.parametrize("value", ["auto", "cpu", "cuda", "cuda:0", "cuda:12", "xpu", "mps", "privateuseone:1"])
def test_devices_are_read(value: str) -> None:
    assert Budget.parse({"device": value}).device == value == parse_device(value)


@pytest.mark.parametrize(
    ("value", "read"), [(None, None), (True, True), (False, False), ("5%", 0.05), (0.1, 0.1), (0, 0.0), (1, 1.0)]
)
def test_the_three_kinds_of_baseline_are_told_apart(value: object, read: object) -> None:
    found = Budget.parse({"baseline": value}).baseline
    assert found == read
    assert isinstance(found, bool) == isinstance(read, bool)


# -- bad values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("peak", "12 parsecs", f"peak='12 parsecs': '12 parsecs' {SIZE} or '512MB'"),
        ("peak", 1.5, f"peak=1.5: 1.5 {SIZE}"),
        ("peak", True, f"peak=True: True {SIZE}"),
        ("peak", "1.5", "peak='1.5': '1.5' is no size: there is no part of a byte"),
        ("reserved", [1], f"reserved=[1]: [1] {SIZE}"),
        ("growth", -1, "growth=-1: -1 is no size: it is negative"),
        ("growth", "", f"growth='': '' {SIZE} or '512MB'"),
        ("warmup", -1, "warmup=-1: it wants at least 0"),
        ("warmup", "three", f"warmup='three': {COUNT}"),
        ("warmup", True, f"warmup=True: {COUNT}"),
        ("warmup", 3.0, f"warmup=3.0: {COUNT}"),
        ("steps", 2, "steps=2: it wants at least 3"),
        ("steps", 0, "steps=0: it wants at least 3"),
        ("steps", "5", f"steps='5': {COUNT}"),
        ("device", "gpu 1", f"device='gpu 1': {DEVICE}"),
        ("device", "CUDA", f"device='CUDA': {DEVICE}"),
        ("device", "cuda:", f"device='cuda:': {DEVICE}"),
        ("device", "cuda:-1", f"device='cuda:-1': {DEVICE}"),
        ("device", "", f"device='': {DEVICE}"),
        ("device", None, f"device=None: {DEVICE}"),
        ("device", 0, f"device=0: {DEVICE}"),
        ("baseline", "lots", f"baseline='lots': {TOLERANCE}"),
        ("baseline", -0.1, f"baseline=-0.1: {TOLERANCE}"),
        ("baseline", "-5%", f"baseline='-5%': {TOLERANCE}"),
        ("baseline", "%", f"baseline='%': {TOLERANCE}"),
        ("baseline", 10, f"baseline=10: {TOLERANCE}"),
        ("baseline", float("nan"), f"baseline=nan: {TOLERANCE}"),
        ("baseline", [0.1], f"baseline=[0.1]: {TOLERANCE}"),
        ("cycles", "maybe", f"cycles='maybe': {CYCLES}"),
        ("cycles", None, f"cycles=None: {CYCLES}"),
        ("cycles", False, f"cycles=False: {CYCLES}"),
        ("peek", 1, "peek=1: there is no such argument; did you mean 'peak'?"),
        ("step", 5, "step=5: there is no such argument; did you mean 'steps'?"),
        ("colour", 1, "colour=1: there is no such argument; it takes peak, reserved, growth, warmup, steps, device, "
                      "baseline, cycles"),
    ],
)  # fmt: skip
def test_a_bad_value_is_one_line_that_names_it(name: str, value: object, said: str) -> None:
    assert complaint({name: value}) == [said]


def test_all_bad_values_are_listed() -> None:
    lines = complaint({"peak": "x", "growth": "y", "device": "cpu", "peek": 1, "steps": 1})
    assert [line.partition("=")[0] for line in lines] == ["peak", "growth", "peek", "steps"]


@given(
    st.sampled_from(["peak", "reserved", "growth", "warmup", "steps", "device", "baseline", "cycles", "other"]),
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=3),
        st.lists(st.integers(), max_size=2),
    ),
)  # fmt: skip
def test_any_value_is_read_or_refused(name: str, value: object) -> None:
    try:
        Budget.parse({name: value})
    except MemlintError as error:
        assert str(error).startswith(f"{name}={value!r}: ")  # noqa: PT017


# -- the decorator -----------------------------------------------------------------------------------------------------


def test_the_decorator_is_the_mark() -> None:
    @memlint.memory_budget(peak="1 GiB", growth=0)
    def test() -> None: ...

    (mark,) = test.pytestmark  # type: ignore[attr-defined]
    assert mark == pytest.mark.memory_budget(peak="1 GiB", growth=0).mark
    assert memlint.memory_budget is memory_budget


def test_the_decorator_without_arguments_is_the_mark_too() -> None:
    @memlint.memory_budget()
    def test() -> None: ...

    assert test.pytestmark == [pytest.mark.memory_budget.mark]  # type: ignore[attr-defined]


def test_the_decorator_stands_on_a_class() -> None:
    @memory_budget(growth=0)
    class Test:
        pass

    assert Test.pytestmark == [pytest.mark.memory_budget(growth=0).mark]  # type: ignore[attr-defined]


def test_the_decorator_works_without_parentheses_as_the_mark_does() -> None:
    def test() -> None: ...

    decorate: object = memory_budget
    assert callable(decorate)
    decorate(test)
    assert test.pytestmark == [pytest.mark.memory_budget.mark]  # type: ignore[attr-defined]


def test_the_decorator_says_at_once_what_is_wrong() -> None:
    with pytest.raises(BudgetError, match="peak='lots'"):
        memlint.memory_budget(peak="lots")


# -- tolerances --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "share"),
    [("5%", 0.05), (" 5 % ", 0.05), (0.1, 0.1), ("0.2", 0.2), (0, 0.0), ("0%", 0.0), ("12.5%", 0.125), ("200%", 2.0)],
)
def test_a_tolerance_is_read(text: object, share: float) -> None:
    assert parse_tolerance(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "five", "5 percent", "-1%", "nan", "inf", "1000%", True, None, 10, -0.5])
def test_what_is_no_tolerance_is_refused(text: object) -> None:
    with pytest.raises(BudgetError, match="it wants a tolerance such as '5%'"):
        parse_tolerance(text)
