"""What a test asks for: `@pytest.mark.memory_budget(...)`, or `memlint.memory_budget(...)`, which is the same mark."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, overload

from memlint.errors import BudgetError, ConfigError
from memlint.units import SizeError, parse_bytes

MARK = "memory_budget"
#: the first steps allocate what stays for good: optimizer state, workspaces, plans of cuDNN, compiled code
WARMUP, STEPS = 3, 10
#: the slope needs two differences, and a difference two readings; see series.py
FEWEST_STEPS = 3
CYCLES = ("warn", "fail", "ignore")
_DEVICE = re.compile(r"([a-z]+)(:\d+)?")
#: the types of torch.device (c10/core/DeviceType.h) that have memory of their own, and "auto"
DEVICES = ("auto", "cpu", "cuda", "hip", "hpu", "maia", "mps", "mtia", "privateuseone", "vulkan", "xla", "xpu")

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Budget:
    """What one test may use. Sizes are in bytes; None judges nothing.

    peak: bytes allocated at most at one time in a measured step, above what was alive before the test's fixtures.
    reserved: the same of what the allocator holds (`torch.cuda.max_memory_reserved`).
    growth: bytes that may stay alive a step.
    warmup, steps: steps that run before measuring, and steps that are measured; None takes the default.
    device: "auto", a device of torch ("cuda", "cuda:1", "cpu", "xpu"), or a card that is not there ("virtual:t4").
    baseline: how much more than the saved peak is allowed, as a fraction; None: the default, False: not compared.
    cycles: what bytes mean that only a garbage collection frees: "warn", "fail" or "ignore".
    """

    peak: int | None = None
    reserved: int | None = None
    growth: int | None = None
    warmup: int | None = None
    steps: int | None = None
    device: str = "auto"
    baseline: float | bool | None = None
    cycles: str = "warn"

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Budget:
        """The budget that the arguments of a mark say. Raises BudgetError with a line for each bad one."""
        known = [field.name for field in fields(cls)]
        wrong, said = [], {}
        for name, value in values.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
                wrong.append(f"{name}={value!r}: there is no such argument; {hint}")
                continue
            try:
                said[name] = _PARSERS[name](value)
            except (SizeError, BudgetError) as error:
                wrong.append(f"{name}={value!r}: {error}")
        if wrong:
            raise BudgetError("\n".join(wrong))
        return cls(**said)

    @property
    def judges(self) -> bool:
        """Whether it sets any limit."""
        return self.peak is not None or self.reserved is not None or self.growth is not None


@overload
def memory_budget(function: _Function, /) -> _Function: ...


@overload
def memory_budget(**values: Any) -> Callable[[_Function], _Function]: ...


def memory_budget(function: _Function | None = None, /, **values: Any) -> Any:
    """Mark a test as one training step that must keep to a budget; the same as `@pytest.mark.memory_budget(...)`.

    See `Budget` for the arguments. Bad values raise BudgetError where the decorator stands.
    """
    import pytest

    Budget.parse(values)
    mark = getattr(pytest.mark, MARK)
    mark = mark(**values) if values else mark
    return mark if function is None else mark(function)


def parse_tolerance(value: object) -> float:
    """A tolerance as a fraction: "5%" is 0.05, 0.05 is itself. Raises BudgetError."""
    number: float | None = None
    if isinstance(value, str):
        text = value.strip()
        try:
            number = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            number = None
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
    if number is None or not 0 <= number < 10:
        raise BudgetError("it wants a tolerance such as '5%'")
    return number


def _size(value: object) -> int | None:
    return None if value is None else parse_bytes(value)  # type: ignore[arg-type]


def _count(least: int) -> Callable[[object], int | None]:
    def parse(value: object) -> int | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise BudgetError("it wants a whole number of steps")
        if value < least:
            raise BudgetError(f"it wants at least {least}")
        return value

    return parse


def parse_device(value: object) -> str:
    """The name of a device as torch writes it, or "auto". Raises BudgetError."""
    if isinstance(value, str) and (value == "virtual" or value.startswith("virtual:")):
        return _virtual(value)
    match = _DEVICE.fullmatch(value) if isinstance(value, str) else None
    if not isinstance(value, str) or match is None or match[1] not in DEVICES:
        raise BudgetError("it wants 'auto', 'cpu', 'cuda', 'cuda:0', 'virtual:t4', or another device of torch")
    return value


def _virtual(value: str) -> str:
    from memlint.virtual.cards import card

    name = value.partition(":")[2]
    try:
        return f"virtual:{card(name).name}" if name else value
    except ConfigError as error:
        raise BudgetError(str(error)) from None


def _baseline(value: object) -> float | bool | None:
    return value if value is None or isinstance(value, bool) else parse_tolerance(value)


def _cycles(value: object) -> str:
    if not isinstance(value, str) or value not in CYCLES:
        raise BudgetError(f"it wants one of {', '.join(map(repr, CYCLES))}")
    return value


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "peak": _size,
    "reserved": _size,
    "growth": _size,
    "warmup": _count(0),
    "steps": _count(FEWEST_STEPS),
    "device": parse_device,
    "baseline": _baseline,
    "cycles": _cycles,
}
