"""Who holds an object: the path from something that has a name in the program down to it.

The search goes upward from the objects, level by level, with one `gc.get_referrers` a level for all of them, until it
meets what a person can point at: a labelled object (a fixture), a module's global, a local of a running frame, a class,
a cache. Edges that the collector does not see are added by hand: a graph is held by the tensor at its end, a running
frame's locals by the frame.
"""

from __future__ import annotations

import functools
import gc
import re
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CellType, CodeType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType, TracebackType
from typing import Any

from memlint.runtime.sites import Site, function_name, is_ours, shown_path

_DEEPEST = 16
_MOST_KEYS = 3
_MOST_VISITED = 20_000
_CO_OPTIMIZED = 0x1
#: how torch.nn.Module keeps what reads as a plain attribute
_MODULE_PART = re.compile(r"\._(?:modules|buffers|parameters)\['(?P<name>\w+)'\]")
_LRU = type(functools.lru_cache(lambda: None))


@dataclass(frozen=True, slots=True)
class Holder:
    """One path to what is held.

    path: as text, such as "`trainer.history[*]` (list, 7 items)". kinds: what it goes through ("global", "local",
    "closure", "fixture", "lru_cache", "hook", "traceback", "ctx", "graph", ...). container and length: the container
    that grows, where there is one; bound: how many items it can hold at most.
    """

    path: str
    kinds: frozenset[str] = frozenset()
    container: str | None = None
    length: int | None = None
    bound: int | None = None


@dataclass(slots=True)
class Chain:
    """Objects from a root down to a target, each holding the next."""

    label: str
    kind: str
    objects: list[Any] = field(default_factory=list)


class Search:
    """Finds chains to `targets`. `labels` names objects by id; `owners` gives what else holds an object, by id.

    Make one, ask it, drop it: it keeps what it found alive.
    """

    def __init__(self, labels: Mapping[int, str], owners: Mapping[int, Any], hidden: Iterable[Any] = ()) -> None:
        self._labels = labels
        self._owners = owners
        self._hidden = {id(item) for item in hidden}
        self._modules: dict[int, str] = {}
        for name, module in list(sys.modules.items()):
            if isinstance(module, ModuleType) and not name.startswith("memlint."):
                self._modules.setdefault(id(vars(module)), name)
        self._locals = running_locals()
        self._objects: dict[int, Any] = {}
        self._down: dict[int, list[int]] = defaultdict(list)
        self._up: dict[int, int] = {}
        self._root: dict[int, tuple[str, str]] = {}

    def chains(self, targets: Sequence[Any]) -> list[Chain | None]:
        """A chain to each target, None where nobody with a name was found."""
        wanted = {id(target) for target in targets}
        frontier = [self._remember(target) for target in targets]
        for key in list(self._objects):
            self._try_as_root(key)
        for _ in range(_DEEPEST):
            frontier = [key for key in dict.fromkeys(frontier) if not self._resolved(key)]
            if not frontier or all(map(self._resolved, wanted)) or len(self._objects) > _MOST_VISITED:
                break
            frontier = self._climb(frontier)
        return [self._chain(id(target)) for target in targets]

    # -- the climb -------------------------------------------------------------------------------------------------

    def _remember(self, item: Any) -> int:
        self._objects.setdefault(id(item), item)
        return id(item)

    def _resolved(self, key: int) -> bool:
        return key in self._up or key in self._root

    def _climb(self, frontier: list[int]) -> list[int]:
        children = {key: self._objects[key] for key in frontier}
        values = list(children.values())
        found = gc.get_referrers(*values)
        own = {id(children), id(values), id(found), id(self._objects), id(vars(self)), *self._hidden}
        higher: list[int] = []
        edges: list[tuple[Any, int]] = [
            (referrer, id(child))
            for referrer in found
            if id(referrer) not in own and not _is_mine(referrer)
            for child in gc.get_referents(referrer)
            if id(child) in children
        ]
        edges.extend((self._owners[key], key) for key in frontier if key in self._owners)
        own.add(id(edges))
        found.clear()
        for referrer, child in edges:
            key = id(referrer)
            new = key not in self._objects
            self._remember(referrer)
            self._down[key].append(child)
            if new:
                higher.append(key)
        # what has the better name first: two roots of one level compete for the same child
        for key in sorted(higher, key=lambda key: _rank(self._naming(key))):
            self._try_as_root(key)
        for referrer, child in edges:
            if self._resolved(id(referrer)):
                self._resolve(child, id(referrer))
        return higher

    def _try_as_root(self, key: int) -> None:
        name = self._naming(key)
        if name is not None and key not in self._root:
            self._root[key] = name
            for child in self._down[key]:
                self._resolve(child, key)

    def _resolve(self, key: int, parent: int) -> None:
        waiting = [(key, parent)]
        while waiting:
            key, parent = waiting.pop()
            if self._resolved(key):
                continue
            self._up[key] = parent
            waiting.extend((child, key) for child in self._down[key])

    def _naming(self, key: int) -> tuple[str, str] | None:
        """What a person calls this object, and the kind of name; None if one must look further up."""
        item = self._objects[key]
        if key in self._labels:
            return self._labels[key], "fixture"
        if key in self._modules:
            return self._modules[key], "global"
        if isinstance(item, ModuleType):
            return item.__name__, "module"
        if isinstance(item, type):
            return f"{item.__module__}.{item.__qualname__}", "class"
        if isinstance(item, _LRU):
            return _called(item), "lru_cache"
        if key in self._locals:
            return self._locals[key], "local"
        return None

    def _chain(self, key: int) -> Chain | None:
        if not self._resolved(key):
            return None
        keys = [key]
        while key not in self._root:
            key = self._up[key]
            keys.append(key)
        label, kind = self._root[key]
        return Chain(label, kind, [self._objects[key] for key in reversed(keys)])


_RANKS = {"fixture": 0, "global": 1, "lru_cache": 2, "local": 3, "class": 4, "module": 5}


def _rank(name: tuple[str, str] | None) -> int:
    return len(_RANKS) if name is None else _RANKS[name[1]]


def _is_mine(item: Any) -> bool:
    if isinstance(item, FrameType):
        return is_ours(item.f_code.co_filename)
    return type(item).__module__.startswith("memlint.runtime")


def running_locals() -> dict[int, str]:
    """The locals of all running frames outside memlint: the id of each value, and a name for it."""
    found: dict[int, str] = {}
    for frame in sys._current_frames().values():
        walked: FrameType | None = frame
        while walked is not None:
            code = walked.f_code
            if not is_ours(code.co_filename) and code.co_flags & _CO_OPTIMIZED:
                for name, value in read_locals(walked, code):
                    found.setdefault(id(value), f"{name}\0{_function(code, walked.f_lineno)}")
            walked = walked.f_back
    # this function's own frame is among them: a local that names it would be a cycle that holds all frames below
    del frame, walked
    return found


def read_locals(frame: FrameType, code: CodeType) -> list[tuple[str, Any]]:
    """The locals of a frame, with nothing left behind.

    Before Python 3.13, reading `f_locals` leaves a dict on the frame that keeps the values alive (PEP 667), so it is
    emptied; later a write to it would change the frame itself.
    """
    seen = frame.f_locals
    values = list(seen.items())
    if sys.version_info < (3, 13) and code.co_flags & _CO_OPTIMIZED:
        seen.clear()
    return values


def _function(code: CodeType, line: int) -> str:
    return f"{function_name(code)} ({shown_path(code.co_filename)}:{line})"


def _called(item: Any) -> str:
    for name in ("__qualname__", "__name__"):
        value = getattr(item, name, None)
        if isinstance(value, str):
            return value
    return type(item).__qualname__


# -- chains as text -------------------------------------------------------------------------------------------------


class _Text:
    """Writes a chain: an expression that one could type as far as that goes, then words."""

    def __init__(self, expression: str, extra: str = "") -> None:
        self.parts: list[str] = []
        self.expression = expression
        self.notes = [extra] if extra else []
        self.kinds: set[str] = set()

    def access(self, text: str) -> None:
        self.expression += text

    def step(self, words: str, expression: str = "") -> None:
        """Go on in words; what was an expression so far is finished."""
        self.finish()
        self.parts.append(words)
        self.expression = expression

    def finish(self) -> None:
        if self.expression:
            notes = f" ({', '.join(self.notes)})" if self.notes else ""
            self.parts.append(f"`{self.expression}`{notes}")
        self.expression, self.notes = "", []

    def text(self) -> str:
        self.finish()
        return _MODULE_PART.sub(_module_access, " > ".join(self.parts))


def _module_access(match: re.Match[str]) -> str:
    name = match["name"]
    return f"[{name}]" if name.isdigit() else f".{name}"


def holder_of(chains: Sequence[Chain]) -> Holder:
    """One holder for chains that go the same way: the container in which they part is the one that grows."""
    first = chains[0]
    growing = where_they_part(chains)
    if growing > 0 and _is_registry(first.objects[growing - 1], first.objects[growing]):
        growing = -1
    text, bound, container, length = _start(first), None, None, None
    objects = first.objects
    position = 0
    while position < len(objects) - 1:
        parent, child = objects[position], objects[position + 1]
        grandchild = objects[position + 2] if position + 2 < len(objects) else None
        if position == growing and (size := _size(parent)) is not None:
            container, length = type(parent).__name__, size
            bound = parent.maxlen if isinstance(parent, deque) else None
            limit = f"{size} of at most {bound}" if bound is not None else f"{size}"
            text.notes.append(f"{container}, {limit} {'item' if limit == '1' else 'items'}")
        before = text.expression
        position += _hop(text, parent, child, grandchild, star=position == growing)
        if position - 1 > growing >= 0 and text.expression != before:
            _name_all_keys(text, before, [chain.objects for chain in chains], position - 1)
    return Holder(text.text(), frozenset({first.kind, *text.kinds}), container, length, bound)


def _name_all_keys(text: _Text, before: str, chains: Sequence[Sequence[Any]], position: int) -> None:
    """Below the container that grows, one chain goes by ['loss'] and another by ['output']: name them all."""
    keys = {
        _short(_key_of(objects[position], objects[position + 1]))
        for objects in chains
        if position + 1 < len(objects) and isinstance(objects[position], dict)
    }
    if len(keys) > 1 and text.expression.startswith(before):
        text.expression = before + (f"[{' | '.join(sorted(keys))}]" if len(keys) <= _MOST_KEYS else "[*]")


def shape_of(chain: Chain) -> tuple[Any, ...]:
    """What two chains share that go the same way: the root and the kinds of objects, without indices."""
    root = id(chain.objects[0]) if len(chain.objects) > 1 else 0
    return (chain.label.partition(":")[0], chain.kind, root, *(type(item).__name__ for item in chain.objects[1:]))


def where_they_part(chains: Sequence[Chain]) -> int:
    """The position of the last object that all chains go through; of one chain, of the container that may grow."""
    first = chains[0].objects
    if len(chains) == 1:
        # the last container that grows by appending; a key of a dict says more than that there are others
        sized = [i for i, item in enumerate(first[:-1]) if isinstance(item, list | set | deque)]
        return sized[-1] if sized else -1
    shared = min(len(chain.objects) for chain in chains)
    common = 0
    while common < shared and all(chain.objects[common] is first[common] for chain in chains):
        common += 1
    return common - 1


def _is_registry(parent: Any, child: Any) -> bool:
    """Whether `child` is the dict in which a module keeps its parameters, buffers or modules."""
    names = ("_parameters", "_buffers", "_modules")
    own = parent if isinstance(parent, dict) else _own_dict(parent) or {}
    return isinstance(child, dict) and any(own.get(name) is child for name in names)


def _is_container(item: Any) -> bool:
    return isinstance(item, list | tuple | dict | set | frozenset | deque)


def _size(item: Any) -> int | None:
    return len(item) if _is_container(item) else None


def _start(chain: Chain) -> _Text:
    root = chain.objects[0]
    if chain.kind == "global":
        return _Text("", f"a global of {chain.label}")
    if chain.kind == "local":
        name, _, where = chain.label.partition("\0")
        return _Text(name, f"a local of {where}")
    if chain.kind == "fixture":
        return _Text(chain.label, "a fixture")
    if chain.kind == "lru_cache":
        text = _Text("")
        info = root.cache_info()
        text.parts.append(f"the cache of `{chain.label}` (functools.lru_cache, {info.currsize} entries)")
        return text
    if chain.kind == "class":
        return _Text(chain.label.removeprefix("__main__."), "a class")
    return _Text(chain.label)


def _hop(text: _Text, parent: Any, child: Any, grandchild: Any, star: bool) -> int:
    """Write the step from `parent` to `child`; how many objects it took."""
    if isinstance(parent, _LRU):
        text.kinds.add("lru_cache")
        return 1
    if isinstance(parent, ModuleType) and child is vars(parent):
        text.expression, text.notes = "", [f"a global of {parent.__name__}"]
        return 1
    if isinstance(parent, type) and isinstance(child, dict) and grandchild is not None:
        text.access(f".{_key_of(child, grandchild)}")
        return 2
    if isinstance(child, dict) and _own_dict(parent) is child and grandchild is not None:
        if _is_ctx(parent):
            _name_ctx(text, parent, _key_of(child, grandchild))
            return 2
        text.access(f".{_key_of(child, grandchild)}")
        _name_attribute(text, parent, _key_of(child, grandchild))
        return 2
    if isinstance(parent, dict):
        key = _key_of(parent, child)
        if not text.expression and text.notes:  # the globals of a module
            text.access(str(key))
        else:
            text.access("[*]" if star else f"[{_short(key)}]")
        return 1
    if isinstance(parent, list | tuple | deque):
        if star or not isinstance(parent, tuple):
            text.access("[*]")
        else:
            text.access(f"[{next((i for i, item in enumerate(parent) if item is child), '*')}]")
        return 1
    if isinstance(parent, set | frozenset):
        text.step("an element")
        return 1
    return _hop_through_code(text, parent, child, grandchild)


def _hop_through_code(text: _Text, parent: Any, child: Any, grandchild: Any) -> int:
    if isinstance(parent, FunctionType):
        if isinstance(child, tuple) and child is parent.__closure__ and isinstance(grandchild, CellType):
            text.step(f"closure variable of `{_called(parent)}`", _free_name(parent, grandchild))
            text.kinds.add("closure")
            return 3
        if child is parent.__defaults__ or child is parent.__kwdefaults__:
            text.step(f"default argument of `{_called(parent)}`", _default_name(parent, grandchild))
            text.kinds.add("default")
            return 2
        text.step(f"function `{_called(parent)}`")
        return 1
    if isinstance(parent, CellType):
        return 1
    if isinstance(parent, MethodType):
        text.step(f"bound method `{_called(parent)}`", "self" if child is parent.__self__ else "")
        text.kinds.add("method")
        return 1
    if isinstance(parent, FrameType | GeneratorType):
        frame = parent if isinstance(parent, FrameType) else parent.gi_frame
        if frame is not None:
            name = next((name for name, value in read_locals(frame, frame.f_code) if value is child), "?")
            site = Site(frame.f_code.co_filename, frame.f_lineno, "")
            text.step(f"frame of {function_name(frame.f_code)} ({site})", name)
        text.kinds.add("generator" if isinstance(parent, GeneratorType) else "frame")
        return 1
    if isinstance(parent, TracebackType):
        if not (text.parts and text.parts[-1] == "traceback"):
            text.step("traceback")
        text.kinds.add("traceback")
        return 1
    if isinstance(parent, BaseException):
        text.step(type(parent).__name__)
        text.kinds.add("exception")
        return 1
    if isinstance(parent, functools.partial):
        text.step(f"functools.partial of `{_called(parent.func)}`")
        return 1
    return _hop_through_object(text, parent, child)


def _hop_through_object(text: _Text, parent: Any, child: Any) -> int:
    if _is_ctx(parent):
        _name_ctx(text, parent, next((name for name, value in vars(parent).items() if value is child), None))
        return 1
    if _is_node(parent):
        text.step(type(parent).__name__)
        text.kinds.add("graph")
        return 1
    if _is_gradient(parent, child):
        text.access(".grad")
        text.kinds.add("gradient")
        return 1
    for name, value in _attributes(parent):
        if value is child:
            if not text.expression:
                text.step(type(parent).__name__, "")
            text.access(f".{name}")
            _name_attribute(text, parent, name)
            return 1
    if isinstance(parent, type):
        for name, value in vars(parent).items():
            if value is child:
                text.access(f".{name}")
                return 1
    if _is_node(child):
        text.kinds.add("graph")
        return 1
    text.step(type(parent).__name__)
    return 1


def _name_ctx(text: _Text, node: Any, name: Any) -> None:
    """A Python node of a graph is the `ctx` of its Function, which is named after the class of the Function."""
    text.step(f"ctx of {type(node).__name__.removesuffix('Backward')}", "ctx" if name is None else f"ctx.{name}")
    text.kinds.add("ctx")


def _name_attribute(text: _Text, parent: Any, name: Any) -> None:
    text.kinds.add("attribute")
    if isinstance(name, str) and "hook" in name:
        text.kinds.add("hook")


def _is_gradient(parent: Any, child: Any) -> bool:
    import torch

    return isinstance(parent, torch.Tensor) and parent.is_leaf and parent.grad is child


def _is_node(item: Any) -> bool:
    import torch

    return isinstance(item, torch.autograd.graph.Node)


def _is_ctx(item: Any) -> bool:
    import torch

    return isinstance(item, torch.autograd.function.BackwardCFunction)


def _own_dict(item: Any) -> Any:
    if isinstance(item, type | ModuleType):
        return None
    try:
        return object.__getattribute__(item, "__dict__")
    except AttributeError:
        return None


def _attributes(item: Any) -> Iterable[tuple[str, Any]]:
    own = _own_dict(item)
    if isinstance(own, dict):
        yield from list(own.items())
    for kind in type(item).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            descriptor = kind.__dict__.get(name)
            if descriptor is not None and hasattr(descriptor, "__get__"):
                try:
                    yield name, descriptor.__get__(item, kind)
                except AttributeError:
                    continue


def _key_of(holder: Mapping[Any, Any], child: Any) -> Any:
    found = next((key for key, value in list(holder.items()) if value is child), None)
    if found is not None:
        return found
    return next((key for key in list(holder) if key is child), "?")


def _short(key: Any) -> str:
    if isinstance(key, str | int | bool | float | type(None)):
        text = repr(key)
        return text if len(text) <= 40 else f"{text[:37]}..."
    return "*"


def _free_name(function: FunctionType, cell: Any) -> str:
    for name, other in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        if other is cell:
            return name
    return "?"


def _default_name(function: FunctionType, child: Any) -> str:
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    for name, value in zip(names[len(names) - len(defaults) :], defaults, strict=True):
        if value is child:
            return name
    return next((name for name, value in (function.__kwdefaults__ or {}).items() if value is child), "?")
