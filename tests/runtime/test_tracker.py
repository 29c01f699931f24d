"""Counting the storages behind tensors."""

from __future__ import annotations

import contextlib
import gc
import mmap
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack  # noqa: E402

from memlint.runtime.tracker import OldStorages, StorageTracker, remove_mode, storages  # noqa: E402

BOOTSTRAP = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]


class Other(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode of somebody else's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Pair(torch.Tensor):  # type: ignore[misc,name-defined]
    """A wrapper subclass of two tensors."""

    @staticmethod
    def __new__(cls, first: Any, second: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=first.dtype, device=first.device)

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        firsts = [arg.first if isinstance(arg, Pair) else arg for arg in args]
        seconds = [arg.second if isinstance(arg, Pair) else arg for arg in args]
        return cls(func(*firsts, **(kwargs or {})), func(*seconds, **(kwargs or {})))


class OpenPair(Pair):
    """One that torch can take apart."""

    def __tensor_flatten__(self) -> Any:
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: Any, size: Any, stride: Any) -> Any:
        return OpenPair(parts["first"], parts["second"])


@pytest.fixture
def tracker() -> Iterator[StorageTracker]:
    gc.collect()
    made = StorageTracker()
    made.start()
    yield made
    made.stop()
    assert not _get_current_dispatch_mode_stack()
    assert threading.Thread._bootstrap_inner is BOOTSTRAP  # type: ignore[attr-defined]


def live(tracker: StorageTracker) -> int:
    tracker.settle()
    return tracker.live


# -- what counts -------------------------------------------------------------------------------------------------------


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


def test_tensors_that_share_a_storage_count_once(tracker: StorageTracker) -> None:
    x = torch.zeros(1000)
    others = [x.detach(), x.data, x.t(), x.view(torch.int32), torch.empty(0).set_(x.untyped_storage())]
    assert live(tracker) == 4000
    assert tracker.count() == 1
    del x
    assert live(tracker) == 4000
    others.clear()
    assert (live(tracker), tracker.count()) == (0, 0)


def test_the_peak_starts_again(tracker: StorageTracker) -> None:
    x = torch.zeros(1000)
    (x + 1).sum()
    assert tracker.peak == 8004
    tracker.reset_peak()
    assert tracker.peak == 4000
    y = x + 1
    del y
    assert tracker.peak == 8000


def test_in_place_operators_make_nothing(tracker: StorageTracker) -> None:
    x = torch.zeros(1000)
    x.add_(1).mul_(2).copy_(x).zero_()
    torch.sin(x, out=x)
    assert live(tracker) == tracker.peak == 4000


def test_saved_tensors_live_until_backward(tracker: StorageTracker) -> None:
    x = torch.ones(1000, requires_grad=True)
    y = x.exp().sum()
    assert live(tracker) == 8000 + 4
    y.backward()
    assert live(tracker) == 8000 + 4  # the result of exp is gone, the gradient has come
    x.grad = None
    assert live(tracker) == 4000 + 4


def test_a_graph_that_is_dropped_lets_its_saved_tensors_go(tracker: StorageTracker) -> None:
    x = torch.ones(1000, requires_grad=True)
    y = x.exp().exp().sum()
    assert live(tracker) == 12_000 + 4
    del y
    assert live(tracker) == 4000


def test_a_checkpoint_keeps_only_its_input(tracker: StorageTracker) -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(1000, requires_grad=True)
    y = checkpoint(lambda t: t.exp().exp(), x, use_reentrant=False)
    assert live(tracker) == 8000
    y.sum().backward()
    assert x.grad is not None
    assert tracker.peak >= 16_000


def test_resize_of_a_tensor_is_seen(tracker: StorageTracker) -> None:
    x = torch.zeros(100)
    x.resize_(1000)
    assert tracker.live == 4000  # at once, without settling
    x.resize_(10)
    assert live(tracker) == 4000  # torch keeps what it has
    del x
    assert live(tracker) == 0


def test_resize_of_a_storage_is_seen_when_settling(tracker: StorageTracker) -> None:
    x = torch.zeros(1000)
    x.untyped_storage().resize_(0)
    assert live(tracker) == 0
    x.untyped_storage().resize_(8000)
    assert live(tracker) == 8000
    del x
    assert live(tracker) == 0


def test_another_storage_behind_a_tensor(tracker: StorageTracker) -> None:
    x, y = torch.zeros(1000), torch.zeros(10)
    x.data = y
    assert live(tracker) == 40
    x.set_(torch.zeros(500))
    assert live(tracker) == 2040


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_a_sparse_tensor_counts_its_parts(tracker: StorageTracker, layout: Any) -> None:
    dense = torch.eye(100)
    sparse = dense.to_sparse(layout=layout)
    parts = sorted(storage.nbytes() for _, storage in storages(sparse))
    assert parts == ([400, 1600] if layout is torch.sparse_coo else [400, 808, 1600])
    assert live(tracker) == 40_000 + sum(parts)
    del sparse
    assert live(tracker) == 40_000


def test_a_sparse_gradient_counts(tracker: StorageTracker) -> None:
    embedding = torch.nn.Embedding(1000, 16, sparse=True)
    before = live(tracker)
    embedding(torch.arange(10)).sum().backward()
    assert before + 10 * 16 * 4 + 10 * 8 <= live(tracker) <= before + 4 * 1000
    embedding.weight.grad = None
    assert live(tracker) == before


def test_a_jagged_tensor_counts_its_parts(tracker: StorageTracker) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(3, 8), torch.zeros(5, 8)], layout=torch.jagged)
    assert live(tracker) >= 8 * 8 * 4
    del nested
    gc.collect()
    assert live(tracker) <= 64  # torch keeps the offsets of a jagged layout


def test_a_wrapper_subclass_counts_what_it_wraps(tracker: StorageTracker) -> None:
    pair = OpenPair(torch.zeros(1000), torch.zeros(1000))
    assert live(tracker) == 8000
    double = pair * 2
    assert live(tracker) == 16_000
    del pair
    assert live(tracker) == 8000
    del double
    assert live(tracker) == 0


def test_a_wrapper_that_torch_cannot_take_apart_is_no_memory_of_its_own(tracker: StorageTracker) -> None:
    first, second = torch.zeros(1000), torch.zeros(1000)
    pair = Pair(first, second)
    assert (pair * 2).first.numel() == 1000  # type: ignore[attr-defined]
    assert live(tracker) == 8000


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_quantized_tensor_counts_its_bytes(tracker: StorageTracker) -> None:
    x = torch.zeros(1000)
    quantized = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
    del x
    assert live(tracker) == 1000
    del quantized
    assert live(tracker) == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn])
def test_an_element_counts_its_size(tracker: StorageTracker, dtype: Any) -> None:
    x = torch.empty(1000, dtype=dtype)
    assert live(tracker) == 1000 * x.element_size()


def test_other_devices_do_not_count(tracker: StorageTracker) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.empty(1000, device="meta") + 1
    with FakeTensorMode():
        y = torch.empty(1000) + 1
    assert (x.device.type, y.device.type) == ("meta", "cpu")
    assert live(tracker) == tracker.peak == 0


# -- what no operator made ---------------------------------------------------------------------------------------------


def test_memory_from_outside_counts_when_it_is_used(tracker: StorageTracker) -> None:
    x = torch.frombuffer(bytearray(4000), dtype=torch.float32)
    y = x + 1
    assert live(tracker) == 8000
    del x, y
    assert live(tracker) == 0


def test_memory_of_numpy_counts_when_it_is_used(tracker: StorageTracker) -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.zeros(1000, dtype=numpy.float32)
    x = torch.from_numpy(array)
    x.add_(1)
    x.t().view(10, 100).mul_(2)
    assert live(tracker) == 4000
    del x
    assert live(tracker) == 0


def test_shared_memory_counts_once(tracker: StorageTracker) -> None:
    x = torch.zeros(1000)
    x.share_memory_()
    assert x.is_shared()
    x.add_(1)
    assert live(tracker) == 4000
    del x
    assert live(tracker) == 0


def test_a_mapped_file_counts_when_it_is_used(tracker: StorageTracker, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(mmap.PAGESIZE))
    x = torch.from_file(str(tmp_path / "data"), size=1000, dtype=torch.float32)
    x.sum()
    assert live(tracker) >= 4000
    del x
    assert live(tracker) == 0


def test_a_loaded_checkpoint_counts(tracker: StorageTracker, tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(1000)}, tmp_path / "x.pt")
    assert live(tracker) == 0
    loaded = torch.load(tmp_path / "x.pt")
    assert live(tracker) == 4000
    loaded.clear()
    assert live(tracker) == 0


# -- what was there before ---------------------------------------------------------------------------------------------


def test_what_was_there_is_leftover_and_its_end_is_no_gain() -> None:
    gc.collect()
    old = torch.zeros(1000)
    tracker = StorageTracker()
    tracker.start()
    assert tracker.leftover >= 4000
    assert live(tracker) == 0
    old.add_(1)
    view = old[:10]
    assert live(tracker) == 0
    old.resize_(2000)
    del old, view
    assert (live(tracker), tracker.peak, tracker.count()) == (0, 0, 0)
    tracker.stop()


def test_old_storages_are_those_that_are_still_there() -> None:
    gone, stays = torch.zeros(7), torch.zeros(7)
    key = stays.untyped_storage()._cdata
    old = OldStorages("cpu")
    assert {key, gone.untyped_storage()._cdata} <= old.keys()
    del gone
    new = [torch.zeros(7) for _ in range(20)]  # may take the address of what is gone
    assert key in old.keys()  # noqa: SIM118
    assert not old.keys() & {item.untyped_storage()._cdata for item in new}


# -- threads -----------------------------------------------------------------------------------------------------------


def test_threads_that_start_are_seen(tracker: StorageTracker) -> None:
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(torch.zeros(500)))
    thread.start()
    thread.join()
    assert live(tracker) == 2000


def test_many_threads_at_once(tracker: StorageTracker) -> None:
    kept: list[Any] = []

    def work() -> None:
        for _ in range(50):
            torch.zeros(100).add(1)
        kept.append(torch.zeros(100))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (live(tracker), tracker.count()) == (8 * 400, 8)


def test_a_thread_that_outlives_the_tracker_counts_no_more() -> None:
    tracker = StorageTracker()
    tracker.start()
    go, kept = threading.Event(), []

    def work() -> None:
        go.wait(10)
        kept.append(torch.zeros(500))

    thread = threading.Thread(target=work)
    thread.start()
    tracker.stop()
    go.set()
    thread.join()
    assert len(kept) == 1
    assert tracker.live == 0
    assert threading.Thread._bootstrap_inner is BOOTSTRAP  # type: ignore[attr-defined]


def test_two_trackers_leave_threads_as_they_were_in_either_order() -> None:
    for order in ((0, 1), (1, 0)):
        trackers = [StorageTracker(), StorageTracker()]
        for tracker in trackers:
            tracker.start()
        kept = torch.zeros(100)
        assert [live(tracker) for tracker in trackers] == [400, 400]
        for index in order:
            trackers[index].stop()
        assert kept.numel() == 100
        assert not _get_current_dispatch_mode_stack()
        assert threading.Thread._bootstrap_inner is BOOTSTRAP  # type: ignore[attr-defined]


# -- modes -------------------------------------------------------------------------------------------------------------


def test_the_stack_is_left_as_it_was_with_other_modes_above_and_below() -> None:
    below, above, top = Other(), Other(), Other()  # type: ignore[no-untyped-call]
    tracker = StorageTracker()
    with below:
        tracker.start()
        with above, top:
            x = torch.zeros(10)
            assert live(tracker) == 40
            tracker.stop()
            assert _get_current_dispatch_mode_stack() == [below, above, top]
            remove_mode(Other())  # type: ignore[no-untyped-call]  # not on the stack: nothing happens
            assert _get_current_dispatch_mode_stack() == [below, above, top]
        assert _get_current_dispatch_mode_stack() == [below]
    assert x.numel() == 10
    assert not _get_current_dispatch_mode_stack()


def test_a_mode_that_is_popped_in_the_wrong_order_is_missed_and_stopping_still_works() -> None:
    tracker, other = StorageTracker(), Other()  # type: ignore[no-untyped-call]
    with contextlib.ExitStack() as stack:
        stack.enter_context(other)
        tracker.start()
        remove_mode(other)
        stack.pop_all()
        assert [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()] == ["TrackingMode"]
        tracker.stop()
    assert not _get_current_dispatch_mode_stack()


def test_pausing_sees_frees_and_no_operators_and_resuming_sees_both(tracker: StorageTracker) -> None:
    x = torch.zeros(100)
    tracker.pause()
    y = torch.zeros(100)
    assert live(tracker) == 400
    del x
    assert live(tracker) == 0
    assert not _get_current_dispatch_mode_stack()
    assert threading.Thread._bootstrap_inner is BOOTSTRAP  # type: ignore[attr-defined]
    tracker.resume()
    z = y + 1
    assert live(tracker) == 800
    assert z.numel() == 100


def test_stopping_twice_or_before_the_start_is_harmless(tracker: StorageTracker) -> None:
    StorageTracker().stop()
    tracker.stop()
    tracker.stop()
    assert torch.zeros(3).numel() == 3
    assert tracker.count() == 0


def test_an_error_of_an_operator_passes_through(tracker: StorageTracker) -> None:
    x = torch.zeros(3)
    with pytest.raises(RuntimeError, match="size of tensor"):
        x + torch.zeros(4)
    assert live(tracker) == 12


# -- what runs under it ------------------------------------------------------------------------------------------------


def test_backward_runs_under_it_from_a_thread_too(tracker: StorageTracker) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    parameters = live(tracker)

    def backward() -> None:
        net(torch.ones(4, 8)).sum().backward()

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert live(tracker) == 2 * parameters
    net.zero_grad()
    assert live(tracker) == parameters


def test_transforms_of_functions_run_under_it(tracker: StorageTracker) -> None:
    x = torch.ones(100)
    assert torch.func.vmap(torch.sin)(x).shape == (100,)
    assert torch.func.grad(lambda x: x.pow(2).sum())(x)[0].item() == 2
    assert torch.func.vmap(torch.func.grad(lambda x: x.pow(2)))(x).sum().item() == 200
    gc.collect()
    assert live(tracker) == 400


def test_what_a_transform_makes_counts(tracker: StorageTracker) -> None:
    x = torch.ones(100)
    kept = torch.func.vmap(lambda row: row * 2)(x)
    assert live(tracker) == 800
    gradient = torch.func.grad(lambda x: x.pow(2).sum())(x)
    gc.collect()
    assert live(tracker) == 1200
    assert kept.numel() == gradient.numel() == 100


class Compiler:
    """A backend for torch.compile that counts the graphs that it is given and how often they run."""

    def __init__(self) -> None:
        self.made = self.ran = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.made += 1

        def run(*args: Any) -> Any:
            self.ran += 1
            return graph.forward(*args)

        return run


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    torch._dynamo.reset()
    yield Compiler()
    torch._dynamo.reset()


def test_compiled_functions_give_the_right_result_under_it(tracker: StorageTracker) -> None:
    x = torch.ones(100)
    compiled = torch.compile(lambda x: (x * 2).sin(), backend="eager")
    assert torch.equal(compiled(x), (x * 2).sin())
    assert live(tracker) == 400


def test_compiled_functions_run_uncompiled_under_it(compiler: Compiler) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Tanh(), torch.nn.Linear(10, 10))
    compiled, x = torch.compile(net, backend=compiler), torch.ones(2, 10)
    tracker = StorageTracker()
    tracker.start()
    try:
        compiled(x)
    finally:
        tracker.stop()
    assert (compiler.made, compiler.ran) == (0, 0)


def test_what_was_compiled_before_runs_uncompiled_too(compiler: Compiler) -> None:
    compiled, x = torch.compile(lambda x: x * 2, backend=compiler), torch.ones(10)
    compiled(x)
    assert (compiler.made, compiler.ran) == (1, 1)
    tracker = StorageTracker()
    tracker.start()
    try:
        compiled(x)
    finally:
        tracker.stop()
    assert compiler.ran == 1


def test_inference_mode_runs_under_it(tracker: StorageTracker) -> None:
    with torch.inference_mode():
        x = torch.zeros(100)
        y = x + 1
        assert live(tracker) == 800
        del x
    assert live(tracker) == 400
    assert y.sum().item() == 100


def test_traced_modules_run_under_it(tracker: StorageTracker) -> None:
    net = torch.fx.symbolic_trace(torch.nn.Linear(10, 10))
    before = live(tracker)
    with torch.no_grad():
        out = net(torch.ones(2, 10))
    assert live(tracker) == before + 80
    assert out.shape == (2, 10)


# -- nothing stays -----------------------------------------------------------------------------------------------------


def test_nothing_is_kept_alive(tracker: StorageTracker) -> None:
    x = torch.zeros(10)
    y = (x.requires_grad_() * 2).sum()
    references = [weakref.ref(x), weakref.ref(y), weakref.ref(x.untyped_storage())]
    del x, y
    assert [reference() for reference in references] == [None] * 3


def test_a_tracker_itself_is_let_go() -> None:
    tracker = StorageTracker()
    tracker.start()
    kept = torch.zeros(10)
    tracker.stop()
    reference = weakref.ref(tracker)
    del tracker
    gc.collect()
    assert reference() is None
    assert kept.numel() == 10


def test_thousands_of_tensors_at_addresses_that_come_again(tracker: StorageTracker) -> None:
    kept = []
    for i in range(3000):
        x = torch.empty(1 + i % 7)
        if i % 100 == 0:
            kept.append(x)
        del x
    assert live(tracker) == sum(x.untyped_storage().nbytes() for x in kept)
    assert tracker.count() == len(kept)
