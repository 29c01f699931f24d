"""The tracker that remembers: what things are, when and where they were made, and what the peak consists of."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack  # noqa: E402

from memlint.runtime.attribution import group, peak_breakdown  # noqa: E402
from memlint.runtime.trace import (  # noqa: E402
    ACTIVATION,
    BACKWARD,
    ELSEWHERE,
    FORWARD,
    GRADIENT,
    INPUT,
    LEFTOVER,
    OPTIMIZER,
    PARAMETER,
    STEP,
    TEMPORARY,
    TracingTracker,
    hooks,
)  # fmt: skip
from memlint.runtime.tracker import OldStorages  # noqa: E402

BATCH, WIDTH, OUT = 32, 64, 16


class Trainer:
    """Two layers and Adam; every size is one of its own."""

    def __init__(self) -> None:
        self.first, self.second = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, OUT)
        self.optimizer = torch.optim.Adam([*self.first.parameters(), *self.second.parameters()])

    def step(self) -> None:
        x = torch.randn(BATCH, WIDTH)
        loss = self.second(self.first(x).relu()).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


PARAMETERS = 4 * (2 * WIDTH * WIDTH + 2 * WIDTH + 2 * WIDTH * OUT + OUT)


@pytest.fixture
def tracker() -> Iterator[TracingTracker]:
    gc.collect()
    old = OldStorages("cpu")
    made = TracingTracker()
    made.start()
    made.leave_out(old.keys())
    yield made
    made.stop()
    assert not _get_current_dispatch_mode_stack()
    assert not hooks._handles


def bytes_by_category(tracker: TracingTracker) -> Counter[str]:
    found: Counter[str] = Counter()
    for block in tracker.blocks:
        if block.died is None and block.category != LEFTOVER:
            found[block.category] += block.nbytes
    return found


# -- categories and phases ---------------------------------------------------------------------------------------------


def test_parameters_gradients_and_state_are_told_apart(tracker: TracingTracker) -> None:
    trainer = Trainer()
    trainer.step()
    trainer.step()
    gc.collect()
    tracker.survivors()
    tracker.categorise()
    found = bytes_by_category(tracker)
    assert found[PARAMETER] == PARAMETERS
    assert found[GRADIENT] == PARAMETERS
    assert 2 * PARAMETERS <= found[OPTIMIZER] <= 2 * PARAMETERS + 4 * 8  # and a step count a parameter
    assert set(found) == {PARAMETER, GRADIENT, OPTIMIZER}


def test_what_was_there_before_the_trace_is_named_too() -> None:
    trainer = Trainer()
    trainer.step()
    tracker = TracingTracker()
    tracker.start()
    try:
        trainer.step()
        tracker.categorise()
        found = {block.category for block in tracker.blocks if block.shape == (2 * WIDTH, WIDTH) and block.died is None}
        assert found == {PARAMETER, GRADIENT, OPTIMIZER}
        by_category = bytes_by_category(tracker)
        assert by_category[PARAMETER] >= PARAMETERS
        assert by_category[OPTIMIZER] >= 2 * PARAMETERS
    finally:
        tracker.stop()


def test_phases_follow_the_step(tracker: TracingTracker) -> None:
    trainer = Trainer()
    trainer.step()
    tracker.categorise()
    by_shape = {(block.shape, block.category): block for block in tracker.blocks}
    assert by_shape[(BATCH, WIDTH), INPUT].phase == ELSEWHERE
    assert by_shape[(BATCH, 2 * WIDTH), ACTIVATION].phase == FORWARD
    assert by_shape[(2 * WIDTH, WIDTH), GRADIENT].phase == BACKWARD
    assert by_shape[(2 * WIDTH, WIDTH), OPTIMIZER].phase == STEP


def test_an_activation_is_what_backward_finds_and_the_rest_is_temporary(tracker: TracingTracker) -> None:
    net = torch.nn.Linear(8, 8)
    out = net(torch.ones(4, 8))
    loss = (out.exp() + 1).sum()  # exp saves its result, the sum keeps nothing of the addition
    loss.backward()
    categories = [block.category for block in tracker.blocks if block.shape == (4, 8) and block.phase == FORWARD]
    assert categories.count(ACTIVATION) == 2  # out is held here, exp's result by the graph
    assert categories.count(TEMPORARY) == 1


def test_evaluation_makes_no_activations(tracker: TracingTracker) -> None:
    net = torch.nn.Linear(8, 8)
    with torch.no_grad():
        out = net(torch.ones(4, 8))
    tracker.categorise()
    (block,) = [block for block in tracker.survivors() if block.shape == (4, 8)]
    assert (block.category, block.phase) == (TEMPORARY, ELSEWHERE)
    assert out.shape == (4, 8)


def test_leftovers_are_left_out() -> None:
    old = torch.zeros(12_345)
    storages = OldStorages("cpu")
    fresh = torch.zeros(54_321)
    tracker = TracingTracker()
    tracker.start()
    tracker.leave_out(storages.keys())
    try:
        by_shape = {block.shape: block.category for block in tracker.blocks}
        assert by_shape[(12_345,)] == LEFTOVER
        assert by_shape[(54_321,)] != LEFTOVER
        tracker.categorise()
        shown = peak_breakdown(tracker, most=100)
        assert not any(shape == (12_345,) for item in shown.groups for _, shape, _ in item.shapes)
        assert (old.numel(), fresh.numel()) == (12_345, 54_321)
    finally:
        tracker.stop()


# -- lines -------------------------------------------------------------------------------------------------------------


def test_a_block_knows_its_line_and_step(tracker: TracingTracker) -> None:
    tracker.step = 3
    kept = torch.zeros(77)
    frame = inspect.currentframe()
    assert frame is not None
    line = frame.f_lineno - 3
    (block,) = [block for block in tracker.survivors() if block.shape == (77,)]
    assert block.site is not None
    assert (block.site.path, block.site.line) == (__file__, line)
    assert block.site.function.endswith("test_a_block_knows_its_line_and_step")
    assert block.site.source == "kept = torch.zeros(77)"
    assert (block.step, block.dtype, block.nbytes) == (3, "float32", 308)
    assert kept.numel() == 77


def test_what_a_library_makes_has_the_line_of_the_caller_too(tracker: TracingTracker) -> None:
    net = torch.nn.Linear(8, 8)
    kept = net(torch.ones(77, 8))
    (block,) = [block for block in tracker.survivors() if block.shape == (77, 8) and block.phase == FORWARD]
    assert block.site is not None
    assert block.site.source == "kept = net(torch.ones(77, 8))"  # not a line of torch
    assert block.caller == block.site
    assert kept.shape == (77, 8)


def test_groups_gather_what_one_line_made(tracker: TracingTracker) -> None:
    kept = [torch.zeros(77 + i % 2) for i in range(5)]
    (found,) = group([block for block in tracker.survivors() if block.shape in ((77,), (78,))])
    assert (found.count, found.nbytes) == (5, 4 * (3 * 77 + 2 * 78))
    assert found.shapes == (("float32", (77,), 3), ("float32", (78,), 2))
    assert len(kept) == 5


# -- the peak ----------------------------------------------------------------------------------------------------------


def check_peak(tracker: TracingTracker) -> None:
    """The breakdown accounts for every byte of the peak, by category and by line."""
    peak = tracker.peak
    shown = peak_breakdown(tracker, most=1000)
    assert shown.nbytes == peak
    assert sum(nbytes for _, nbytes in shown.categories) == peak
    assert sum(item.nbytes for item in shown.groups) == peak


def test_the_breakdown_of_training_sums_to_the_peak(tracker: TracingTracker) -> None:
    trainer = Trainer()
    for step in range(3):
        tracker.step = step
        trainer.step()
    check_peak(tracker)
    shown = dict(peak_breakdown(tracker).categories)
    assert shown[PARAMETER] == PARAMETERS
    assert shown[OPTIMIZER] >= PARAMETERS


def test_the_breakdown_with_tensors_held_at_the_end_sums_to_the_peak(tracker: TracingTracker) -> None:
    kept = [torch.zeros(1000 * i) for i in range(1, 5)]
    check_peak(tracker)
    assert len(kept) == 4


def test_the_peak_of_the_last_operator_is_broken_down_after_its_tensors_are_gone(tracker: TracingTracker) -> None:
    def evaluate() -> None:
        x = torch.zeros(1000)
        torch.cat([x] * 8)

    evaluate()
    check_peak(tracker)


def test_the_peak_of_a_step_that_ends_with_it_is_broken_down_after_other_steps(tracker: TracingTracker) -> None:
    def evaluate() -> None:
        x = torch.zeros(1000)
        torch.cat([x] * 8)

    for step in range(3):
        tracker.step = step
        evaluate()
        gc.collect()
        tracker.survivors()  # as the tracing does after each step
    check_peak(tracker)


def test_the_breakdown_of_a_peak_in_the_optimizer_sums_to_it(tracker: TracingTracker) -> None:
    parameter = torch.nn.Parameter(torch.zeros(100_000))
    optimizer = torch.optim.Adam([parameter], foreach=False)
    parameter.sum().backward()
    optimizer.step()
    optimizer.step()
    assert peak_breakdown(tracker).phase == STEP
    check_peak(tracker)


def test_a_peak_can_be_forgotten(tracker: TracingTracker) -> None:
    large = torch.zeros(100_000)
    del large
    tracker.reset_peak()
    tracker.forget_peak()
    small = torch.zeros(10)
    check_peak(tracker)
    assert tracker.peak == small.nbytes


def test_a_resized_storage_counts_with_its_new_size(tracker: TracingTracker) -> None:
    x = torch.zeros(10)
    x.resize_(1000)
    check_peak(tracker)
    (block,) = tracker.survivors()
    assert block.nbytes == 4000


# -- nothing stays -----------------------------------------------------------------------------------------------------


def test_nothing_is_kept_alive(tracker: TracingTracker) -> None:
    trainer = Trainer()
    trainer.step()
    references: list[Any] = [
        weakref.ref(trainer), weakref.ref(trainer.first.weight), weakref.ref(trainer.first.weight.grad),
        weakref.ref(trainer.optimizer), weakref.ref(trainer.first.weight.untyped_storage()),
    ]  # fmt: skip
    del trainer
    gc.collect()
    assert [reference() for reference in references] == [None] * 5
    assert not tracker.survivors()


def test_hooks_of_torch_are_registered_once_for_all_and_removed_by_the_last() -> None:
    first, second = TracingTracker(), TracingTracker()
    first.start()
    handles = list(hooks._handles)
    second.start()
    assert hooks._handles == handles
    first.stop()
    first.stop()
    assert hooks._handles == handles
    second.stop()
    assert not hooks._handles
    from torch.nn.modules import module
    from torch.optim import optimizer

    assert not optimizer._global_optimizer_pre_hooks
    assert not optimizer._global_optimizer_post_hooks
    assert not module._global_parameter_registration_hooks
