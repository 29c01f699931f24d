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
from memlint.runtime.backends.cuda import AcceleratorStatistics, CountersBackend  # noqa: E402


class Card:
    """Counts as torch.cuda's allocator does: blocks of 512 bytes, segments of 2 MiB that stay reserved."""

    def __init__(self, devices: int = 1) -> None:
        self.count = devices
        self.now: dict[int, Counter[str]] = {device: Counter() for device in range(devices)}
        self.peak: dict[int, Counter[str]] = {device: Counter() for device in range(devices)}
        self.workspace = 0
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
        return {**stats, "num_ooms": self.calls["oom"], "num_alloc_retries": 0, "inactive_split_bytes.all.current": 7}

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


def on_the_card(nbytes: int) -> Callable[[], None]:
    kept = [torch.zeros(nbytes, dtype=torch.uint8, device="cuda")]
    return kept.clear


@pytest.fixture(params=["cpu", "simulated", pytest.param("cuda", marks=pytest.mark.cuda)])
def measured(request: pytest.FixtureRequest) -> Iterator[tuple[Backend, Allocate]]:
    card = Card()
    backend: Backend
    if request.param == "cpu":
        backend, allocate = CpuBackend(), on_the_cpu
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
    assert backend.leftover >= 5120
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


def test_a_device_that_is_not_there_is_named() -> None:
    assert CountersBackend("cuda", Card(), [3]).unavailable() == "there is no device cuda:3 here"


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_card_the_reason_is_given_and_auto_takes_the_fallback() -> None:
    with pytest.raises(BackendUnavailable, match="CUDA"):
        find("cuda")
    assert find("auto").name == "cpu"
    assert isinstance(find("auto", light=True), HeapBackend)


def test_an_accelerator_without_counters_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert AcceleratorStatistics("xpu").unavailable() is not None
    monkeypatch.delattr(torch.accelerator, "memory_stats", raising=False)
    assert "torch.accelerator.memory_stats" in str(AcceleratorStatistics("xpu").unavailable())


def test_the_heap_shows_a_large_tensor() -> None:
    backend = HeapBackend()
    backend.start()
    kept = torch.zeros(50_000_000, dtype=torch.uint8)
    assert 45_000_000 < backend.allocated() < 60_000_000
    assert backend.end_step().peak is None
    del kept
    assert backend.allocated() < 5_000_000
