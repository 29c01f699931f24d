"""Paths from what has a name down to a tensor, and that looking for them leaves nothing behind."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from memlint.runtime.attribution import leaks  # noqa: E402
from memlint.runtime.heap import Search, holder_of, read_locals, running_locals  # noqa: E402
from memlint.runtime.session import Tracing  # noqa: E402
from memlint.runtime.verdict import Traced  # noqa: E402

kept_global: list[Any] = []
alone: Any = None
#: what a scenario gives: the tensor in a list that is emptied by whoever takes it, text in the path, a kind
Held = Generator[tuple[list[Any], str, str], None, None]


def tensor() -> Any:
    return torch.zeros(4)


class Trainer:
    shared: dict[str, Any] = {}
    latest: Any = None

    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.state: dict[str, Any] = {}

    def hook(self) -> None: ...


class Slotted:
    __slots__ = ("held",)
    held: Any


@dataclasses.dataclass(slots=True)
class Record:
    loss: Any


class Point(collections.namedtuple("Point", "x y")):
    pass


class Double(torch.autograd.Function):  # type: ignore[misc,name-defined]
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.kept = torch.zeros(9)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 2


# -- one scenario a kind -----------------------------------------------------------------------------------------------


def in_a_global() -> Held:
    global alone
    alone = tensor()
    yield [alone], f"`alone` (a global of {__name__})", "global"
    alone = None


def in_a_list_of_a_global() -> Held:
    kept_global.append(tensor())
    yield [kept_global[0]], f"`kept_global[*]` (a global of {__name__}, list, 1 item)", "global"
    kept_global.clear()


def in_a_closure() -> Held:
    activations = [tensor()]

    def hook() -> Any:
        return activations

    kept_global.append(hook)
    yield [activations[0]], "closure variable of `in_a_closure.<locals>.hook` > `activations[*]`", "closure"
    kept_global.clear()


def in_a_default() -> Held:
    def collect(history: list[Any] = [tensor()]) -> Any:  # noqa: B006, B008
        return history

    kept_global.append(collect)
    assert collect.__defaults__ is not None
    found = "default argument of `in_a_default.<locals>.collect` > `history[*]`"
    yield [collect.__defaults__[0][0]], found, "default"
    kept_global.clear()


def in_a_keyword_default() -> Held:
    def collect(*, weight: Any = tensor()) -> Any:  # noqa: B008
        return weight

    kept_global.append(collect)
    assert collect.__kwdefaults__ is not None
    found = "default argument of `in_a_keyword_default.<locals>.collect` > `weight`"
    yield [collect.__kwdefaults__["weight"]], found, "default"
    kept_global.clear()


def in_an_attribute() -> Held:
    trainer = Trainer()
    trainer.losses.append(tensor())
    kept_global.append(trainer)
    yield [trainer.losses[0]], ".losses[*]` (a global of ", "attribute"
    kept_global.clear()


def in_nested_containers() -> Held:
    trainer = Trainer()
    trainer.state["epoch"] = ({"out": tensor()},)
    kept_global.append(trainer)
    yield [trainer.state["epoch"][0]["out"]], ".state['epoch'][0]['out']`", "attribute"
    kept_global.clear()


def in_a_dict_by_number() -> Held:
    kept_global.append({1: tensor()})
    yield [kept_global[0][1]], "`kept_global[*][1]`", "global"
    kept_global.clear()


def in_a_set() -> Held:
    kept_global.append({tensor()})
    yield [next(iter(kept_global[0]))], "> an element", "global"
    kept_global.clear()


def in_a_slot() -> Held:
    slotted = Slotted()
    slotted.held = tensor()
    kept_global.append(slotted)
    yield [slotted.held], ".held`", "attribute"
    kept_global.clear()


def in_a_dataclass() -> Held:
    kept_global.append(Record(tensor()))
    yield [kept_global[0].loss], "`kept_global[*].loss`", "attribute"
    kept_global.clear()


def in_a_named_tuple() -> Held:
    kept_global.append(Point(1, tensor()))
    yield [kept_global[0].y], "`kept_global[*][1]`", "global"
    kept_global.clear()


def in_a_deque() -> Held:
    kept_global.append(deque([tensor()], maxlen=7))
    yield [kept_global[0][0]], "deque, 1 of at most 7 items)", "global"
    kept_global.clear()


def in_a_default_dict() -> Held:
    kept_global.append(collections.defaultdict(list))
    kept_global[0]["train"].append(tensor())
    yield [kept_global[0]["train"][0]], "`kept_global[*]['train'][*]`", "global"
    kept_global.clear()


def in_a_class() -> Held:
    Trainer.shared["x"] = tensor()
    yield [Trainer.shared["x"]], "Trainer.shared['x']` (a class)", "class"
    Trainer.shared.clear()


def in_a_class_attribute() -> Held:
    Trainer.latest = tensor()
    yield [Trainer.latest], "Trainer.latest` (a class)", "class"
    Trainer.latest = None


def in_a_cache() -> Held:
    @functools.lru_cache
    def features(step: int) -> Any:
        return tensor()

    found = "the cache of `in_a_cache.<locals>.features` (functools.lru_cache, 1 entries)"
    yield [features(1)], found, "lru_cache"


def as_a_key_of_a_cache() -> Held:
    @functools.lru_cache(maxsize=4)
    def norm(x: Any) -> int:
        return 1

    made = tensor()
    norm(made)
    yield [made], "the cache of `as_a_key_of_a_cache.<locals>.norm`", "lru_cache"


def in_a_traceback() -> Held:
    def fails() -> None:
        activation = tensor()
        kept_global.append(weakref.ref(activation))
        raise ValueError

    try:
        fails()
    except ValueError as error:
        kept_global.append(error)
    found = [kept_global.pop(0)()]
    yield found, "> traceback > frame of in_a_traceback.<locals>.fails", "traceback"
    kept_global.clear()


def in_a_generator() -> Held:
    def batches() -> Any:
        current = tensor()
        kept_global.append(weakref.ref(current))
        yield 1
        del current

    waiting = batches()
    next(waiting)
    found = [kept_global.pop(0)()]
    kept_global.append(waiting)
    yield found, "frame of in_a_generator.<locals>.batches", "generator"
    kept_global.clear()
    waiting.close()


def in_a_partial() -> Held:
    kept_global.append(functools.partial(print, tensor()))
    yield [kept_global[0].args[0]], "functools.partial of `print`", "global"
    kept_global.clear()


def in_a_bound_method() -> Held:
    trainer = Trainer()
    trainer.losses.append(tensor())
    kept_global.append(trainer.hook)
    yield [trainer.losses[0]], "bound method `Trainer.hook` > `self.losses[*]`", "method"
    kept_global.clear()


def in_a_hook_of_a_module() -> Held:
    net = torch.nn.Linear(1, 1)
    seen = [tensor()]
    net.register_forward_hook(lambda module, args, out: seen.append(out))
    kept_global.append(net)
    yield [seen[0]], "closure variable of `in_a_hook_of_a_module.<locals>.<lambda>` > `seen[*]`", "hook"
    kept_global.clear()


def in_a_buffer_of_a_module() -> Held:
    net = torch.nn.Sequential(torch.nn.Linear(1, 1))
    net[0].register_buffer("history", tensor())
    kept_global.append(net)
    yield [net[0].history], "`kept_global[*][0].history`", "attribute"
    kept_global.clear()


def in_the_state_of_an_optimizer() -> Held:
    parameter = torch.nn.Parameter(tensor())
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones(4)
    optimizer.step()
    kept_global.append(optimizer)
    yield [optimizer.state[parameter]["momentum_buffer"]], ".state[*]['momentum_buffer']`", "attribute"
    kept_global.clear()


KINDS: list[Callable[[], Held]] = [
    in_a_global, in_a_list_of_a_global, in_a_closure, in_a_default, in_a_keyword_default, in_an_attribute,
    in_nested_containers, in_a_dict_by_number, in_a_set, in_a_slot, in_a_dataclass, in_a_named_tuple, in_a_deque,
    in_a_default_dict, in_a_class, in_a_class_attribute, in_a_cache, as_a_key_of_a_cache, in_a_traceback,
    in_a_generator, in_a_partial, in_a_bound_method, in_a_hook_of_a_module, in_a_buffer_of_a_module,
    in_the_state_of_an_optimizer,
]  # fmt: skip


@pytest.fixture(autouse=True)
def _let_go() -> Iterator[None]:
    yield
    kept_global.clear()
    Trainer.shared.clear()
    Trainer.latest = None


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_a_path_names_its_kind_and_keeps_nothing(make: Callable[[], Held]) -> None:
    scenario = make()
    box, expected, kind = next(scenario)
    reference = weakref.ref(box[0])
    path, kinds = look(box, scenario)
    box.clear()
    assert expected in path
    assert kind in kinds
    next(scenario, None)
    scenario.close()
    del scenario
    gc.collect()
    assert reference() is None


def look(box: list[Any], scenario: Any) -> tuple[str, frozenset[str]]:
    """The path to the tensor in `box`, by nothing of the test's own."""
    search = Search({}, {}, [box, scenario, scenario.gi_frame])
    search._locals = {}
    (chain,) = search.chains(box)
    assert chain is not None
    holder = holder_of([chain])
    return holder.path, holder.kinds


# -- frames ------------------------------------------------------------------------------------------------------------


def path_to(*targets: Any, labels: dict[int, str] | None = None) -> tuple[str, frozenset[str]]:
    """The path to one tensor, or to several that one container holds."""
    chains = Search(labels or {}, {}, [targets]).chains(list(targets))
    holder = holder_of([chain for chain in chains if chain is not None])
    return holder.path, holder.kinds


def test_a_local_of_a_running_frame_is_named_with_its_line() -> None:
    history = [tensor(), tensor()]
    path, kinds = path_to(*history)
    assert path.startswith("`history[*]` (a local of test_a_local_of_a_running_frame_is_named_with_its_line (")
    assert path.endswith(", list, 2 items)")
    assert "test_heap.py:" in path
    assert "local" in kinds


def test_the_locals_of_a_running_frame_are_let_go() -> None:
    history = [tensor(), tensor()]
    path_to(*history)
    reference = weakref.ref(history[0])
    del history
    gc.collect()
    assert reference() is None


def test_what_a_frame_shows_of_its_locals_is_not_kept_by_it() -> None:
    """Before Python 3.13 `frame.f_locals` is a dict that stays on the frame, with the values that it had."""

    def inner() -> weakref.ref[Any]:
        value = tensor()
        frame = sys._getframe()
        names = [name for name, _ in read_locals(frame, frame.f_code)]
        assert "value" in names
        del frame
        return weakref.ref(value)

    assert inner()() is None


def test_the_locals_of_running_frames_end_with_them_without_a_collection() -> None:
    def inner() -> weakref.ref[Any]:
        value = tensor()
        running_locals()
        return weakref.ref(value)

    assert inner()() is None


def test_reading_locals_changes_none_of_them() -> None:
    value, other = tensor(), [1, 2]
    frame = sys._getframe()
    read_locals(frame, frame.f_code)
    running_locals()
    assert value.numel() == 4
    assert other == [1, 2]


def test_the_locals_of_a_module_and_a_class_body_are_not_emptied() -> None:
    seen: list[str] = []

    class Body:
        attribute = 5
        running_locals()
        seen.extend(name for name in locals() if name == "attribute")

    assert seen == ["attribute"]
    assert Body.attribute == 5
    assert "kept_global" in globals()


# -- names -------------------------------------------------------------------------------------------------------------


def test_labels_come_first() -> None:
    trainer = Trainer()
    trainer.losses.append(tensor())
    path, kinds = path_to(trainer.losses[0], labels={id(trainer): "trainer"})
    assert path == "`trainer.losses[*]` (a fixture, list, 1 item)"
    assert "fixture" in kinds


def test_the_container_in_which_the_paths_part_is_the_one_that_grows() -> None:
    trainer = Trainer()
    trainer.state["history"] = [{"loss": tensor(), "out": tensor()} for _ in range(3)]
    targets = [step[name] for step, name in zip(trainer.state["history"], ("loss", "out", "loss"), strict=True)]
    chains = Search({id(trainer): "trainer"}, {}, [targets]).chains(targets)
    holder = holder_of([chain for chain in chains if chain is not None])
    assert holder.path == "`trainer.state['history'][*]['loss' | 'out']` (a fixture, list, 3 items)"
    assert (holder.container, holder.length, holder.bound) == ("list", 3, None)


def test_a_deque_says_how_much_it_can_hold() -> None:
    window = deque([tensor(), tensor()], maxlen=50)
    chains = Search({id(window): "window"}, {}).chains([window[0], window[1]])
    holder = holder_of([chain for chain in chains if chain is not None])
    assert (holder.container, holder.length, holder.bound) == ("deque", 2, 50)
    assert "2 of at most 50 items" in holder.path


def test_what_nobody_holds_has_no_chain() -> None:
    found = Search({}, {}).chains([tensor()])
    assert found == [None]


# -- through graphs, in a traced run -----------------------------------------------------------------------------------


def traced(step: Callable[[], object], steps: int = 5, **labels: Any) -> Traced:
    tracing = Tracing("cpu", steps, labels=lambda: {id(value): name for name, value in labels.items()})
    tracing.start()
    for _ in range(steps):
        with tracing.step():
            step()
    return tracing.finish()


def check_nothing_is_left(references: list[weakref.ref[Any]]) -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    gc.collect()
    assert references
    assert [reference() for reference in references] == [None] * len(references)
    assert not _get_current_dispatch_mode_stack()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert not gc.garbage


def test_a_traced_run_keeps_nothing_and_leaves_no_mode() -> None:
    net, kept = torch.nn.Linear(64, 8), []
    found = traced(lambda: kept.append(net(torch.randn(2, 64))), kept=kept)
    assert found.leaks[0].holder is not None
    assert found.leaks[0].holder.path.startswith("`kept[*]`")
    assert found.leaks[0].through == "AddmmBackward0"
    references = [weakref.ref(item) for item in kept]
    kept.clear()
    check_nothing_is_left(references)


def test_a_ctx_that_keeps_a_tensor_is_named() -> None:
    kept: list[Any] = []
    x = torch.zeros(9, requires_grad=True)
    found = traced(lambda: kept.append(Double.apply(x)), kept=kept)
    assert sum(leak.bytes_per_step for leak in found.leaks) == 2 * 36
    holders = [leak.holder for leak in found.leaks if leak.holder is not None]
    assert any("ctx of Double" in holder.path and "ctx" in holder.kinds for holder in holders), found.leaks
    references = [weakref.ref(item) for item in kept]
    kept.clear()
    check_nothing_is_left(references)


def test_a_gradient_with_a_graph_is_charged_to_its_parameter() -> None:
    net = torch.nn.Linear(8, 8)

    def step() -> None:
        out = net(torch.randn(2, 8)).tanh().sum()
        out.backward(create_graph=True)

    with warnings.catch_warnings():  # torch says it once a process, so perhaps not here
        warnings.filterwarnings("ignore", message=".*create_graph=True")
        found = traced(step, net=net)
    path = found.leaks[0].holder.path if found.leaks[0].holder is not None else ""
    reference = weakref.ref(net.weight.grad)
    net.zero_grad()
    del step
    check_nothing_is_left([reference])
    assert path.startswith(("`net.weight.grad`", "`net.bias.grad`"))


def collecting() -> tuple[Any, list[weakref.ref[Any]]]:
    """A module whose hook collects what it makes, and weak references to that."""
    net, seen, references = torch.nn.Linear(8, 8), [], []

    def collect(module: Any, args: Any, out: Any) -> None:
        seen.append(out.detach())
        references.append(weakref.ref(seen[-1]))

    net.register_forward_hook(collect)
    return net, references


def test_a_hook_that_collects_is_a_hook() -> None:
    net, references = collecting()
    with torch.no_grad():
        found = traced(lambda: net(torch.ones(2, 8)), net=net)  # noqa: F821
    assert found.leaks[0].holder is not None
    assert "hook" in found.leaks[0].holder.kinds
    assert found.leaks[0].rule == "ML107"
    del net
    check_nothing_is_left(references)


def test_a_state_that_each_step_replaces_is_no_leak() -> None:
    state: dict[str, Any] = {}

    def step() -> None:
        state["hidden"] = torch.randn(100)

    assert not traced(step, state=state).leaks


def test_a_tracing_that_ends_early_keeps_nothing() -> None:
    kept: list[Any] = []
    tracing = Tracing("cpu", 5)
    tracing.start()
    with contextlib.suppress(KeyError):
        for i in range(5):
            with tracing.step():
                kept.append(torch.zeros(10))
                if i == 3:
                    raise KeyError
    found = tracing.finish("stopped")
    assert (found.steps, found.note) == (3, "stopped")
    assert found.leaks[0].holder is not None
    references = [weakref.ref(item) for item in kept]
    kept.clear()
    check_nothing_is_left(references)


def test_cycles_are_named_and_their_objects_are_let_go() -> None:
    references: list[weakref.ref[Any]] = []

    def step() -> None:
        trainer = Trainer()
        trainer.state["me"] = trainer
        trainer.losses.append(torch.zeros(1000))
        references.append(weakref.ref(trainer.losses[0]))

    tracing = Tracing("cpu", 4, with_cycles=True)
    tracing.start()
    for _ in range(4):
        with tracing.step():
            step()
    (cycle,) = tracing.finish().cycles
    assert cycle.path == "Trainer.state > dict > Trainer"
    assert cycle.bytes_per_step == 4000
    check_nothing_is_left(references)


def test_nothing_survived_is_no_leak() -> None:
    from memlint.runtime.trace import TracingTracker

    tracker = TracingTracker()
    tracker.start()
    try:
        assert leaks(tracker, 5, {}) == []
    finally:
        tracker.stop()
