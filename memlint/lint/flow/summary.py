"""What a function does, as its callers see it."""

from __future__ import annotations

from dataclasses import dataclass, field

from memlint.lint.flow.facts import Store
from memlint.lint.flow.values import UNKNOWN, Origin, Value


@dataclass(slots=True)
class Summary:
    """The effects of calling a function of this file.

    returns: what it returns, in terms of its own origins and parameters.
    fields: the contents of the containers in `returns`.
    consumed: origins whose graph a backward has freed by the time it returns.
    backwards: parameters that a backward runs on.
    keeps: parameters that end up in something that outlives the call, and the store that keeps each.
    behind: parameters whose graphs run into returned origins, found when they are asked for.
    steps, zeroes, runs_backward: whether it steps an optimizer, clears gradients, runs a backward at all.
    """

    returns: Value = UNKNOWN
    fields: dict[Origin, dict[str, Value]] = field(default_factory=dict)
    consumed: frozenset[Origin] = frozenset()
    backwards: set[str] = field(default_factory=set)
    keeps: dict[str, Store] = field(default_factory=dict)
    steps: bool = False
    zeroes: bool = False
    runs_backward: bool = False
    returns_nothing: bool = False
    behind: dict[frozenset[Origin], frozenset[str]] = field(default_factory=dict)
