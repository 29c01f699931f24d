"""One contract for every backend; a simulated card stands in for CUDA's counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from memlint.errors import BackendUnavailable  # noqa: E402
from memlint.runtime.backends import find  # noqa: E402
from memlint.runtime.backends.base import Backend  # noqa: E402
from memlint.runtime.backends.cpu import CpuBackend, HeapBackend  # noqa: E402
from memlint.runtime.backends.cuda import AcceleratorStatistics, CountersBackend, CudaStatistics  # noqa: E402
from memlint.runtime.backends.virtual import VirtualBackend  # noqa: E402


class Card:
    """Counts as torch.cuda's allocator does: blocks of 512 bytes, segments of 2 MiB that stay reserved."""

    def __init__(self, devices: int = 1) -> None:
        self.count = devices
        self.now: dict[int, Counter[str]] = {device: Counter() for device in range(devices)}
        self.peak: dict[int, Counter[str]] = {device: Counter() for device in range(devices)}
        self.workspace = 0
        self.older = False  # torch before 2.1 counted no requested bytes
        self.calls: Counter[str] = Counter()
        self.graph_segments: list[dict[str, Any]] = []

    def alloc(self, nbytes: int, device: int = 0) -> Callable[[], None]:
        rounded = -(-nbytes // 512) * 512
        now, peak = self.now[device], self.peak[device]
        now.update(allocated_bytes=rounded, requested_bytes=nbytes)
        now["reserved_bytes"] = max(now["reserved_bytes"], -(-now["allocated_bytes"] // 2**21) * 2**21)
        for name, value in now.items():
            peak[name] = max(peak[name], value)
        return lambda: now.subtract({"allocated_bytes": rounded, "requested_bytes": nbytes})

    def unavailable(self) -> str | None:
        return None

    def devices(self) -> Sequence[int]:
        return range(self.count)

    def memory_stats(self, device: int) -> Mapping[str, int]:
        stats = {f"{name}.all.current": value for name, value in self.now[device].items()}
        stats.update({f"{name}.all.peak": value for name, value in self.peak[device].items()})
        if self.older:
            stats = {name: value for name, value in stats.items() if not name.startswith("requested")}
        counts = {"num_ooms": self.calls["oom"], "num_alloc_retries": self.calls["retry"]}
        return {**stats, **counts, "inactive_split_bytes.all.current": 7}

    def reset_peak(self, device: int) -> None:
        self.peak[device] = Counter(self.now[device])

    def synchronize(self, device: int) -> None:
        self.calls["synchronize"] += 1

    def empty_cache(self) -> None:
        self.calls["empty"] += 1

    def clear_workspaces(self) -> None:
        self.now[0].subtract({"allocated_bytes": self.workspace})

    def segments(self) -> Sequence[Mapping[str, Any]]:
        return self.graph_segments

    def name_of(self, device: int) -> str:
        return "Simulated"


Allocate = Callable[[int], Callable[[], None]]


def on_the_cpu(nbytes: int) -> Callable[[], None]:
    kept = [torch.zeros(nbytes, dtype=torch.uint8)]
    return kept.clear


def on_the_virtual_card(nbytes: int) -> Callable[[], None]:
    kept = [torch.zeros(nbytes, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")]
    return kept.clear


def on_the_card(nbytes: int) -> Callable[[], None]:
    kept = [torch.zeros(nbytes, dtype=torch.uint8, device="cuda")]
    return kept.clear


@pytest.fixture(params=["cpu", "simulated", "virtual", pytest.param("cuda", marks=pytest.mark.cuda)])
def measured(request: pytest.FixtureRequest) -> Iterator[tuple[Backend, Allocate]]:
    card = Card()
    backend: Backend
    if request.param == "cpu":
        backend, allocate = CpuBackend(), on_the_cpu
    elif request.param == "virtual":
        backend, allocate = VirtualBackend("t4"), on_the_virtual_card
    elif request.param == "simulated":
        backend, allocate = CountersBackend("cuda", card), card.alloc
    else:
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        backend, allocate = find("cuda"), on_the_card
    assert backend.unavailable() is None
    early = allocate(512 * 10)
    backend.start()
    yield backend, allocate
    early()
    backend.stop()


def test_the_contract_of_a_backend(measured: tuple[Backend, Allocate]) -> None:
    backend, allocate = measured
    assert backend.leftover >= 5120 or backend.name == "virtual:t4"  # nothing is on that card before
    assert backend.allocated() == 0
    backend.begin_step()
    kept, gone = allocate(512 * 4), allocate(512 * 100)
    gone()
    reading = backend.end_step()
    assert reading.allocated == 512 * 4
    assert reading.peak == 512 * 104
    assert reading.reserved_peak is None or reading.reserved_peak >= 0
    backend.begin_step()
    assert backend.end_step().peak == 512 * 4
    kept()
    assert backend.allocated() == 0
    assert backend.details().device
    backend.pause()
    backend.resume()


def test_growth_is_counted_in_what_was_asked_for_and_the_peak_in_blocks() -> None:
    card = Card()
    backend = CountersBackend("cuda", card)
    backend.start()
    backend.begin_step()
    card.alloc(4)
    reading = backend.end_step()
    assert (reading.allocated, reading.peak, reading.reserved_peak) == (4, 512, 2**21)


def test_the_device_with_most_gives_the_peak_and_all_of_them_the_growth() -> None:
    card = Card(devices=2)
    backend = CountersBackend("cuda", card)
    backend.start()
    backend.begin_step()
    card.alloc(512, 0)
    card.alloc(2048, 1)
    reading = backend.end_step()
    assert (reading.allocated, reading.peak) == (2560, 2048)
    assert backend.details().values["peaks"] == {"cuda:0": 512, "cuda:1": 2048}


def test_workspaces_and_pools_of_graphs_are_told_apart() -> None:
    card = Card()
    backend = CountersBackend("cuda", card)
    backend.start()
    card.alloc(8_519_680)
    card.workspace = 8_519_680
    card.calls["oom"] = 2
    card.graph_segments = [
        {"total_size": 100, "segment_pool_id": (0, 0)},
        {"total_size": 4096, "segment_pool_id": (0, 1)},
    ]
    values = backend.details().values
    assert (values["workspaces"], values["graph_pools"], values["ooms"]) == (8_519_680, 4096, 2)


def started(card: Card, devices: Sequence[int] | None = None, waits: bool = True) -> CountersBackend:
    backend = CountersBackend("cuda", card, devices, waits)
    backend.start()
    backend.begin_step()
    return backend


def test_only_what_happened_since_the_start_is_told() -> None:
    card = Card()
    card.calls.update(oom=3, retry=5)
    card.alloc(4096)
    backend = started(card)
    card.calls.update(oom=1, retry=2)
    values = backend.details().values
    assert (values["ooms"], values["retries"], values["inactive_split"]) == (1, 2, 7)
    assert values["peaks"] == {"cuda:0": 0}
    assert backend.leftover == 4096


def test_an_older_torch_without_requested_bytes_gives_growth_in_blocks() -> None:
    card = Card()
    card.older = True
    backend = started(card)
    card.alloc(4)
    assert backend.end_step().allocated == 512


def test_one_device_may_be_named_and_the_others_do_not_count() -> None:
    card = Card(devices=3)
    backend = started(card, [1])
    card.alloc(512 * 100, 0)
    card.alloc(512, 1)
    reading = backend.end_step()
    assert (backend.name, backend.device_type) == ("cuda:1", "cuda")
    assert (reading.allocated, reading.peak) == (512, 512)
    assert backend.details().values["peaks"] == {"cuda:1": 512}


def test_leftover_is_that_of_all_devices() -> None:
    card = Card(devices=2)
    card.alloc(512, 0)
    card.alloc(1024, 1)
    assert started(card).leftover == 1536


def test_the_peak_of_what_is_reserved_is_above_that_at_the_start() -> None:
    card = Card()
    card.alloc(512)
    backend = started(card)
    card.alloc(3 * 2**20)()
    reading = backend.end_step()
    assert (reading.allocated, reading.peak, reading.reserved_peak) == (0, 3 * 2**20, 2**21)
    backend.begin_step()
    assert backend.end_step().reserved_peak == 2**21  # it stays reserved


def test_unused_segments_are_given_back_first_and_kernels_waited_for() -> None:
    card = Card(devices=2)
    backend = CountersBackend("cuda", card)
    backend.start()
    assert card.calls["empty"] == 1
    before = card.calls["synchronize"]
    backend.begin_step()
    backend.end_step()
    assert card.calls["synchronize"] == before + 4


def test_a_light_one_waits_for_nothing() -> None:
    card = Card()
    backend = started(card, waits=False)
    backend.end_step()
    backend.allocated()
    backend.details()
    assert card.calls["synchronize"] == 0


def test_workspaces_that_are_freed_are_no_loss_to_what_is_counted() -> None:
    card = Card()
    backend = started(card)
    card.alloc(2048)
    assert backend.details().values["workspaces"] == 0
    assert backend.end_step().allocated == 2048


def test_a_device_that_is_not_there_is_named() -> None:
    assert CountersBackend("cuda", Card(), [3]).unavailable() == "there is no device cuda:3 here"
    assert CountersBackend("cuda", Card(devices=2), [1]).unavailable() is None
    assert CountersBackend("cuda", Card(devices=2)).unavailable() is None


def test_the_reason_of_the_counters_goes_first() -> None:
    card = Card()
    card.unavailable = lambda: "on holiday"  # type: ignore[method-assign]
    assert CountersBackend("cuda", card, [3]).unavailable() == "on holiday"


# -- finding one -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_card_the_reason_is_given_and_auto_takes_the_fallback() -> None:
    with pytest.raises(BackendUnavailable, match="CUDA"):
        find("cuda")
    assert find("auto").name == "cpu"
    assert isinstance(find("auto", light=True), HeapBackend)
    with pytest.raises(BackendUnavailable, match="CUDA"):
        find("auto", fallback="cuda")


def test_cpu_is_cpu_whatever_else_there_is() -> None:
    assert isinstance(find("cpu"), CpuBackend)
    assert isinstance(find("cpu:0"), CpuBackend)
    assert isinstance(find("auto", fallback="auto"), CpuBackend) or torch.accelerator.is_available()


def test_a_card_that_is_there_is_found_by_auto_and_by_index(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(devices=2)
    monkeypatch.setattr("memlint.runtime.backends.cuda.statistics_of", lambda kind: card)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert find("auto").name == "cuda"
    assert find("cuda:1").name == "cuda:1"
    with pytest.raises(BackendUnavailable, match="there is no device cuda:7 here"):
        find("cuda:7")


def test_a_build_without_cuda_and_one_without_a_card_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    assert CudaStatistics().unavailable() == "this build of torch has no CUDA, and there is no device"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert CudaStatistics().unavailable() == "no CUDA device is available"
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert CudaStatistics().unavailable() == "no CUDA device is available"


def test_cuda_that_nothing_has_used_yet_can_be_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: int) -> None:
        raise RuntimeError("Invalid device argument 0: did you call init?")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", refuse)
    CudaStatistics().reset_peak(0)


def test_the_counters_of_cuda_are_read_from_the_nested_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    nested = {
        "num_ooms": 1, "num_alloc_retries": 2, "other": 3,
        "allocated_bytes": {"all": {"current": 4, "peak": 5}, "small_pool": {"current": 9}},
        "requested_bytes": {"all": {"current": 6}}, "reserved_bytes": {"all": {"peak": 7}},
    }  # fmt: skip
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: nested if device == 0 else {})
    assert CudaStatistics().memory_stats(0) == {
        "num_ooms": 1, "num_alloc_retries": 2, "allocated_bytes.all.current": 4, "allocated_bytes.all.peak": 5,
        "requested_bytes.all.current": 6, "reserved_bytes.all.peak": 7,
    }  # fmt: skip
    assert CudaStatistics().memory_stats(1) == {}  # CUDA is not in use yet


# -- other accelerators ------------------------------------------------------------------------------------------------


class Accelerator:
    """What torch.accelerator offers, as far as it is asked."""

    def __init__(
        self, kind: str = "xpu", stats: Mapping[str, int] | Exception | None = None, there: bool = True
    ) -> None:
        self.kind, self.stats, self.there = kind, {"allocated_bytes.all.current": 1} if stats is None else stats, there

    def is_available(self) -> bool:
        return self.there

    def current_accelerator(self) -> object:
        return torch.device(self.kind)

    def device_count(self) -> int:
        return 1

    def memory_stats(self, device: int) -> Mapping[str, int]:
        if isinstance(self.stats, Exception):
            raise self.stats
        return self.stats


@pytest.mark.parametrize(
    ("accelerator", "reason"),
    [
        (Accelerator(), None),
        (Accelerator(there=False), "no xpu device is available"),
        (Accelerator("mps"), "no xpu device is available"),
        (Accelerator(stats={}), "xpu: its allocator keeps no counters"),
        (Accelerator(stats=RuntimeError("not a DeviceAllocator")), "keeps no counters (not a DeviceAllocator)"),
        (Accelerator(stats=NotImplementedError("soon")), "xpu: its allocator keeps no counters (soon)"),
        (object(), "has no torch.accelerator.memory_stats (torch 2.9 has)"),
        (None, "has no torch.accelerator.memory_stats (torch 2.9 has)"),
    ],
)
def test_an_accelerator_says_why_it_cannot_be_measured(
    monkeypatch: pytest.MonkeyPatch, accelerator: object, reason: str | None
) -> None:
    monkeypatch.setattr(torch, "accelerator", accelerator)
    said = AcceleratorStatistics("xpu").unavailable()
    assert said == reason or (reason is not None and said is not None and reason in said)


def test_auto_takes_an_accelerator_that_counts_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "accelerator", Accelerator())
    assert find("auto").name == "xpu"
    assert find("xpu:0").name == "xpu:0"
    with pytest.raises(BackendUnavailable, match="there is no device xpu:1 here"):
        find("xpu:1")
    monkeypatch.setattr(torch, "accelerator", Accelerator("mps", stats={}))
    assert find("auto").name == "cpu"


# -- the CPU -----------------------------------------------------------------------------------------------------------


def test_the_cpu_tells_how_many_storages_there_are_and_what_the_process_held() -> None:
    backend = CpuBackend()
    backend.start()
    kept = [torch.zeros(10), torch.zeros(10)]
    values = backend.details().values
    backend.stop()
    assert values["storages"] == len(kept)
    assert values["peak_resident"] > 50 * 2**20


def test_a_paused_cpu_sees_no_operators_and_a_resumed_one_does() -> None:
    backend = CpuBackend()
    backend.start()
    backend.pause()
    unseen = torch.zeros(100)
    backend.resume()
    seen = torch.zeros(10)
    assert backend.allocated() == seen.nbytes
    backend.stop()
    assert unseen.numel() == 100


def test_the_heap_shows_a_large_tensor() -> None:
    backend = HeapBackend()
    backend.start()
    kept = torch.zeros(50_000_000, dtype=torch.uint8)
    assert 45_000_000 < backend.allocated() < 60_000_000
    assert backend.end_step().peak is None
    del kept
    assert backend.allocated() < 5_000_000
