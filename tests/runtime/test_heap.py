"""Paths from what has a name down to a tensor, and that looking for them leaves nothing behind."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from memlint.runtime.heap import Search, holder_of  # noqa: E402
from memlint.runtime.session import Tracing  # noqa: E402

kept_global: list[Any] = []


def path_to(*targets: Any, labels: dict[int, str] | None = None) -> tuple[str, frozenset[str]]:
    """The path to one tensor, or to several that one container holds."""
    chains = Search(labels or {}, {}, [targets]).chains(list(targets))
    holder = holder_of([chain for chain in chains if chain is not None])
    return holder.path, holder.kinds


def tensor() -> Any:
    return torch.zeros(4)


class Trainer:
    shared: dict[str, Any] = {}

    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.state: dict[str, Any] = {}


class Slotted:
    __slots__ = ("held",)
    held: Any


def in_a_global() -> Iterator[tuple[Any, str, str]]:
    kept_global.append(tensor())
    yield kept_global[0], "`kept_global[*]` (a global of ", "global"
    kept_global.clear()


def in_a_local() -> Iterator[tuple[Any, str, str]]:
    history = [tensor() for _ in range(3)]
    yield history[1], "`history[*]` (a local of in_a_local (", "generator"


def in_a_closure() -> Iterator[tuple[Any, str, str]]:
    activations = [tensor()]

    def hook() -> Any:
        return activations

    kept_global.append(hook)
    yield activations[0], "closure variable of `in_a_closure.<locals>.hook` > `activations[*]`", "closure"
    kept_global.clear()


def in_a_default() -> Iterator[tuple[Any, str, str]]:
    def collect(history: list[Any] = [tensor()]) -> Any:  # noqa: B006, B008
        return history

    kept_global.append(collect)
    assert collect.__defaults__ is not None
    yield collect.__defaults__[0][0], "default argument of `in_a_default.<locals>.collect` > `history[*]`", "default"
    kept_global.clear()


def in_nested_containers() -> Iterator[tuple[Any, str, str]]:
    trainer = Trainer()
    trainer.state["epoch"] = ({"out": tensor()},)
    kept_global.append(trainer)
    yield trainer.state["epoch"][0]["out"], ".state['epoch'][0]['out']`", "attribute"
    kept_global.clear()


def in_a_slot() -> Iterator[tuple[Any, str, str]]:
    slotted = Slotted()
    slotted.held = tensor()
    kept_global.append(slotted)
    yield slotted.held, ".held`", "attribute"
    kept_global.clear()


def in_a_deque() -> Iterator[tuple[Any, str, str]]:
    kept_global.append(deque([tensor()], maxlen=7))
    yield kept_global[0][0], "(a global of ", "global"
    kept_global.clear()


def in_a_class() -> Iterator[tuple[Any, str, str]]:
    Trainer.shared["x"] = tensor()
    yield Trainer.shared["x"], "Trainer.shared['x']`", "class"
    Trainer.shared.clear()


def in_a_cache() -> Iterator[tuple[Any, str, str]]:
    @functools.lru_cache
    def features(step: int) -> Any:
        return tensor()

    yield features(1), "the cache of `in_a_cache.<locals>.features` (functools.lru_cache, 1 entries)", "lru_cache"


def in_a_traceback() -> Iterator[tuple[Any, str, str]]:
    def fails() -> None:
        activation = tensor()
        kept_global.append(weakref.ref(activation))
        raise ValueError

    try:
        fails()
    except ValueError as error:
        kept_global.append(error)
    found = kept_global.pop(0)()
    yield found, "> traceback > frame of in_a_traceback.<locals>.fails", "traceback"
    kept_global.clear()


def in_a_partial() -> Iterator[tuple[Any, str, str]]:
    kept_global.append(functools.partial(print, tensor()))
    yield kept_global[0].args[0], "functools.partial of `print`", "global"
    kept_global.clear()


KINDS: list[Callable[[], Iterator[tuple[Any, str, str]]]] = [
    in_a_global, in_a_closure, in_a_default, in_nested_containers, in_a_slot, in_a_deque, in_a_class, in_a_cache,
    in_a_traceback, in_a_partial,
]  # fmt: skip


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_a_path_names_its_kind_and_keeps_nothing(make: Callable[[], Iterator[tuple[Any, str, str]]]) -> None:
    held = make()
    # the tensor goes straight into the search: a name for it here would be the nearer holder
    found: list[Any] = list(next(held))
    reference = weakref.ref(found[0])
    box = [found.pop(0)]
    search = Search({}, {}, [box, found])
    search._locals = {}
    (chain,) = search.chains(box)
    assert chain is not None
    holder = holder_of([chain])
    expected, kind = found
    assert expected in holder.path
    assert kind in holder.kinds
    del chain, search
    box.clear()
    next(held, None)
    held.close()  # type: ignore[attr-defined]
    gc.collect()
    assert reference() is None


def test_a_running_frame_is_named_and_its_locals_are_let_go() -> None:
    def work() -> weakref.ref[Any]:
        history = [tensor(), tensor()]
        path, kinds = path_to(*history)
        assert path.startswith("`history[*]` (a local of test_a_running_frame")
        assert "local" in kinds
        reference = weakref.ref(history[0])
        del history
        gc.collect()
        assert reference() is None  # reading a frame's locals must not keep them
        return reference

    work()


def test_labels_come_first() -> None:
    trainer = Trainer()
    trainer.losses.append(tensor())
    path, kinds = path_to(trainer.losses[0], labels={id(trainer): "trainer"})
    assert path == "`trainer.losses[*]` (a fixture, list, 1 item)"
    assert "fixture" in kinds


def test_a_traced_run_keeps_nothing_and_leaves_no_mode() -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    net, kept = torch.nn.Linear(8, 8), []
    tracing = Tracing("cpu", 4)
    tracing.start()
    for _ in range(4):
        with tracing.step():
            kept.append(net(torch.randn(2, 8)))
    found = tracing.finish()
    assert found.leaks[0].holder is not None
    assert "kept[*]" in found.leaks[0].holder.path
    references = [weakref.ref(item) for item in kept]
    kept.clear()
    gc.collect()
    assert not any(reference() is not None for reference in references)
    assert not _get_current_dispatch_mode_stack()
    assert gc.isenabled()
