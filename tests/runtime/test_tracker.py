"""Counting storages, and remembering them."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack  # noqa: E402

from memlint.runtime.trace import GRADIENT, OPTIMIZER, PARAMETER, TracingTracker  # noqa: E402
from memlint.runtime.tracker import StorageTracker, remove_mode  # noqa: E402


@pytest.fixture
def tracker() -> Iterator[StorageTracker]:
    made = StorageTracker()
    made.start()
    yield made
    made.stop()
    assert not _get_current_dispatch_mode_stack()
    assert threading.Thread._bootstrap_inner.__module__ == "threading"  # type: ignore[attr-defined]


def live(tracker: StorageTracker) -> int:
    tracker.settle()
    return tracker.live


def test_views_count_once_and_a_view_keeps_its_base(tracker: StorageTracker) -> None:
    base = torch.zeros(1000)
    assert live(tracker) == 4000
    row = base.view(10, 100)[0]
    assert live(tracker) == 4000
    del base
    assert live(tracker) == 4000
    del row
    assert live(tracker) == 0
    assert tracker.peak == 4000


def test_saved_tensors_live_until_backward(tracker: StorageTracker) -> None:
    x = torch.ones(1000, requires_grad=True)
    y = x.exp().sum()
    assert live(tracker) == 8000 + 4
    y.backward()
    assert live(tracker) == 8000 + 4  # the result of exp is gone, the gradient has come
    x.grad = None
    assert live(tracker) == 4000 + 4


def test_a_storage_may_change_its_size(tracker: StorageTracker) -> None:
    x = torch.zeros(100)
    x.resize_(1000)
    assert live(tracker) == 4000
    x.untyped_storage().resize_(0)
    assert live(tracker) == 0


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_tensor_counts_its_parts(tracker: StorageTracker, layout: object) -> None:
    sparse = torch.eye(10).to_sparse(layout=layout)
    assert 40 + 80 <= live(tracker) <= 300  # values, indices, and what the conversion keeps
    del sparse
    assert live(tracker) == 0


def test_a_jagged_tensor_counts_its_parts(tracker: StorageTracker) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(3, 8), torch.zeros(5, 8)], layout=torch.jagged)
    assert live(tracker) >= 8 * 8 * 4
    del nested
    gc.collect()
    assert live(tracker) <= 64  # torch keeps the offsets of a jagged layout


def test_what_no_operator_made_counts_when_it_is_used(tracker: StorageTracker) -> None:
    x = torch.frombuffer(bytearray(4000), dtype=torch.float32)
    y = x + 1
    assert live(tracker) == 8000
    del x, y
    assert live(tracker) == 0


def test_threads_that_start_are_seen(tracker: StorageTracker) -> None:
    made = []
    thread = threading.Thread(target=lambda: made.append(torch.zeros(500)))
    thread.start()
    thread.join()
    assert live(tracker) == 2000


def test_other_modes_may_lie_on_top() -> None:
    class Other(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    tracker = StorageTracker()
    tracker.start()
    with Other() as other:  # type: ignore[no-untyped-call]
        tracker.stop()
        assert _get_current_dispatch_mode_stack() == [other]
    remove_mode(Other())  # type: ignore[no-untyped-call]  # not on the stack: nothing happens


def test_compiled_and_transformed_functions_run_under_it(tracker: StorageTracker) -> None:
    x = torch.ones(100)
    compiled = torch.compile(lambda x: x * 2, backend="eager")
    assert compiled(x).sum().item() == 200
    assert torch.func.vmap(torch.sin)(x).shape == (100,)
    assert torch.func.grad(lambda x: x.pow(2).sum())(x)[0].item() == 2
    with torch.inference_mode():
        assert (x + 1).sum().item() == 200


def test_nothing_is_kept_alive(tracker: StorageTracker) -> None:
    x = torch.zeros(10)
    reference = weakref.ref(x)
    del x
    assert reference() is None


def test_what_was_there_is_leftover() -> None:
    old = torch.zeros(1000)
    tracker = StorageTracker()
    tracker.start()
    assert tracker.leftover >= 4000
    assert live(tracker) == 0
    old.add_(1)
    assert live(tracker) == 0
    tracker.stop()


def test_a_trace_knows_what_things_are() -> None:
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.Adam(model.parameters())
    tracker = TracingTracker()
    tracker.start()
    try:
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()
        tracker.categorise()
        kinds = {block.category for block in tracker.blocks if block.died is None}
        assert {PARAMETER, GRADIENT, OPTIMIZER} <= kinds
        state = [block for block in tracker.survivors() if block.category == OPTIMIZER and block.shape == (16, 16)]
        assert len(state) == 2
        assert state[0].phase == "optimizer step"
        assert state[0].site is not None
        assert state[0].site.function.endswith("test_a_trace_knows_what_things_are")
        assert sum(block.nbytes for block in tracker.live_at_peak()) == tracker._top
    finally:
        tracker.stop()
