"""What holds at one point of the program: names, attributes, contents of containers, graphs that are gone."""

from __future__ import annotations

from memlint.lint.flow.facts import Loop
from memlint.lint.flow.values import Grad, Origin, Value, join


class State:
    """The abstract state at one point of one function.

    names: what local names hold.
    fields: what attributes and items of an origin hold, where the function has assigned them; the key `[*]` stands for
        all elements of a container whose place is not known.
    consumed: origins whose saved tensors a backward has freed by now, on every path.
    maybe_consumed: the same, on some path.
    modes: per module (dotted path as written), whether `.eval()` or `.train()` was called last.
    grad: whether autograd records.
    bound: for each local name, the loops around the assignments (other than `+=`) that reach this point.
    """

    __slots__ = ("bound", "consumed", "fields", "grad", "maybe_consumed", "modes", "names")

    def __init__(self) -> None:
        self.names: dict[str, Value] = {}
        self.fields: dict[Origin, dict[str, Value]] = {}
        self.consumed: frozenset[Origin] = frozenset()
        self.maybe_consumed: frozenset[Origin] = frozenset()
        self.modes: dict[str, str] = {}
        self.grad = Grad.ON
        self.bound: dict[str, frozenset[tuple[Loop, ...]]] = {}

    def copy(self) -> State:
        """A state that can go its own way."""
        new = State()
        new.names = dict(self.names)
        new.fields = dict(self.fields)
        new.consumed = self.consumed
        new.maybe_consumed = self.maybe_consumed
        new.modes = dict(self.modes)
        new.grad = self.grad
        new.bound = dict(self.bound)
        return new

    def get(self, origin: Origin, key: str) -> Value | None:
        """What field `key` of `origin` was last set to here, if it was."""
        fields = self.fields.get(origin)
        return None if fields is None else fields.get(key)

    def put(self, origin: Origin, key: str, value: Value, *, weak: bool = False) -> None:
        """Set field `key` of `origin`; weakly where the old content may remain."""
        old = self.fields.get(origin)
        new = dict(old) if old else {}
        new[key] = join(new[key], value) if weak and key in new else value
        self.fields[origin] = new

    def clear(self, origin: Origin) -> None:
        """Empty a container."""
        self.fields.pop(origin, None)

    def same(self, other: State) -> bool:
        """Whether both say the same."""
        return (
            self.names == other.names
            and self.fields == other.fields
            and self.consumed == other.consumed
            and self.maybe_consumed == other.maybe_consumed
            and self.modes == other.modes
            and self.grad is other.grad
            and self.bound == other.bound
        )

    def age(self, loop: Loop) -> State:
        """This state as the next iteration of `loop` finds it: what the loop made belongs to an earlier iteration."""
        new = self.copy()
        new.names = {name: _age(value, loop) for name, value in self.names.items()}
        fields: dict[Origin, dict[str, Value]] = {}
        for origin, content in self.fields.items():
            owner = _age_origin(origin, loop)
            aged = {key: _age(value, loop) for key, value in content.items()}
            if owner in fields:
                merged = dict(fields[owner])
                for key, value in aged.items():
                    merged[key] = join(merged[key], value) if key in merged else value
                aged = merged
            fields[owner] = aged
        new.fields = fields
        new.consumed = frozenset(_age_origin(origin, loop) for origin in self.consumed)
        new.maybe_consumed = frozenset(_age_origin(origin, loop) for origin in self.maybe_consumed)
        return new


def _age_origin(origin: Origin, loop: Loop) -> Origin:
    return origin.twin if loop in origin.loops else origin


def _age(value: Value, loop: Loop) -> Value:
    if not any(loop in origin.loops for origin in value.graph):
        return value
    return value._replace(
        graph=frozenset(_age_origin(origin, loop) for origin in value.graph),
        terms=frozenset(_age_origin(origin, loop) for origin in value.terms),
    )


def merge(a: State | None, b: State | None) -> State | None:
    """The state where two paths meet; None stands for a path that is never taken."""
    if a is None or b is None:
        return b if a is None else a
    if a is b:
        return a
    new = State()
    new.names = _merge_values(a.names, b.names)
    fields = dict(a.fields)
    for origin, content in b.fields.items():
        mine = fields.get(origin)
        fields[origin] = content if mine is None or mine is content else _merge_values(mine, content)
    new.fields = fields
    if a.consumed == b.consumed and a.maybe_consumed == b.maybe_consumed:
        new.consumed, new.maybe_consumed = a.consumed, a.maybe_consumed
    else:
        new.consumed = a.consumed & b.consumed
        new.maybe_consumed = a.maybe_consumed | b.maybe_consumed
        _spare(new, a, b)
    new.modes = {path: mode for path, mode in a.modes.items() if b.modes.get(path) == mode}
    new.grad = a.grad if a.grad is b.grad else Grad.MAYBE
    new.bound = dict(a.bound)
    for name, places in b.bound.items():
        known = new.bound.get(name)
        if known is not places:
            new.bound[name] = places if known is None else known | places
    return new


def _merge_values(a: dict[str, Value], b: dict[str, Value]) -> dict[str, Value]:
    new = dict(a)
    for key, value in b.items():
        mine = new.get(key)
        if mine is None:
            new[key] = value
        elif mine is not value:
            new[key] = join(mine, value)
    return new


def _spare(new: State, a: State, b: State) -> None:
    """Mark the names that one path backwards *and* detaches: with a graph they only come from the other path."""
    for name, value in a.names.items():
        other = b.names.get(name)
        if other is value or other is None or bool(value.graph) is bool(other.graph):
            continue
        with_graph, here, there = (value, a, b) if value.graph else (other, b, a)
        if with_graph.graph & (there.maybe_consumed - here.maybe_consumed):
            new.names[name] = new.names[name]._replace(spared=True)
