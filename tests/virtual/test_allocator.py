"""The caching allocator's rules: against a recorded run, and by their invariants."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlint.virtual.allocator import (
    AllocatorSettings,
    CachingAllocator,
    OutOfMemory,
    SettingsError,
)

ROOT = Path(__file__).parents[2]
MIB = 2**20


def test_a_recorded_run_is_replayed_to_the_last_address() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "allocator_replay.py"), str(ROOT / "fixtures" / "traces")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == "all 1 traces: addresses 1935 of 1935, segments 17 of 17 right"


def test_requests_are_rounded_and_segments_are_larger() -> None:
    allocator = CachingAllocator()
    allocator.malloc(1)
    assert allocator.stats()["allocated_bytes.all.current"] == 512
    assert allocator.stats()["requested_bytes.all.current"] == 1
    assert allocator.reserved == 2 * MIB
    allocator.malloc(MIB + 1)
    assert allocator.reserved == 22 * MIB
    allocator.malloc(21 * MIB + 5)
    assert allocator.reserved == 44 * MIB
    assert allocator.stats()["segment.all.current"] == 3


def test_a_freed_block_is_used_again_and_merges() -> None:
    allocator = CachingAllocator()
    one, two = allocator.malloc(4 * MIB), allocator.malloc(4 * MIB)
    allocator.free(one)
    assert allocator.malloc(3 * MIB) == one
    allocator.free(one)
    allocator.free(two)
    assert allocator.inactive_split_bytes() == 0
    assert allocator.empty_cache() == 20 * MIB
    assert allocator.reserved == 0


def test_a_rest_of_a_mebibyte_is_not_cut_off_in_the_large_pool() -> None:
    allocator = CachingAllocator()
    allocator.malloc(19 * MIB)  # takes a segment of 20 MiB for requests up to 10, and its own size above
    assert allocator.reserved == 20 * MIB
    assert allocator.allocated == 20 * MIB


def test_streams_do_not_share_blocks() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(2 * MIB, stream=1))
    allocator.malloc(2 * MIB, stream=2)
    assert allocator.reserved == 40 * MIB


def test_out_of_memory_comes_after_the_cache_was_given_back() -> None:
    allocator = CachingAllocator(capacity=64 * MIB)
    allocator.free(allocator.malloc(40 * MIB))
    allocator.malloc(50 * MIB)
    assert (allocator.retries, allocator.ooms, allocator.reserved) == (1, 0, 50 * MIB)
    with pytest.raises(OutOfMemory, match=r"Tried to allocate 20\.0 MiB, 14\.0 MiB of 64\.0 MiB are free"):
        allocator.malloc(2 * MIB)
    assert allocator.stats()["num_ooms"] == 1


def test_large_blocks_are_not_cut_above_the_split_size() -> None:
    allocator = CachingAllocator(AllocatorSettings.parse("max_split_size_mb:32"))
    allocator.free(allocator.malloc(64 * MIB))
    allocator.malloc(4 * MIB)
    assert allocator.reserved == 84 * MIB
    allocator.malloc(48 * MIB)  # 64 is within 20 MiB of it
    assert (allocator.reserved, allocator.allocated) == (84 * MIB, 68 * MIB)


def test_garbage_collection_gives_back_what_was_not_used_for_long() -> None:
    allocator = CachingAllocator(AllocatorSettings.parse("garbage_collection_threshold:0.5"), capacity=100 * MIB)
    first, second = allocator.malloc(20 * MIB), allocator.malloc(22 * MIB)
    allocator.free(second)
    allocator.free(first)
    allocator.malloc(24 * MIB)
    assert allocator.reserved == 46 * MIB
    assert allocator.retries == 0


@pytest.mark.parametrize(
    ("text", "request_", "rounded"),
    [
        ("", 1025, 1536),
        ("roundup_power2_divisions:4", 1200 * 1024, 1280 * 1024),
        ("roundup_power2_divisions:[256:1,512:2,>:8]", 300 * MIB, 384 * MIB),
        ("roundup_power2_divisions:[256:1,512:2,>:8]", 1100 * MIB, 1152 * MIB),
    ],
)
def test_rounding_follows_the_settings(text: str, request_: int, rounded: int) -> None:
    assert AllocatorSettings.parse(text).round(request_) == rounded


@pytest.mark.parametrize(
    "text",
    [
        "max_split_size_mb:5",
        "roundup_power2_divisions:3",
        "expandable_segments:yes",
        "max_split_size_mb:x",
    ],
)
def test_settings_that_torch_refuses_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="PYTORCH_ALLOC_CONF"):
        AllocatorSettings.parse(text)


EXPANDABLE = AllocatorSettings.parse("expandable_segments:True")
TRACES = sorted((ROOT / "fixtures" / "expandable_traces").glob("*.json.gz"))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_expandable_segments_grow_and_shrink_as_recorded(path: Path) -> None:
    """Every address, and what is mapped and unmapped when; `empty_cache()` is called once in each."""
    with gzip.open(path) as file:
        recorded = json.load(file)
    events = [tuple(event) for event in recorded["events"]]
    wanted = [event for event in events if event[0].startswith("segment")]
    starts = iter(dict.fromkeys(address for action, address, _ in wanted if address % 2**30 == 0))
    allocator = CachingAllocator(EXPANDABLE, recorded["capacity"], place=lambda nbytes: next(starts))
    seen: list[tuple[str, int, int]] = []
    allocator.listener = lambda *event: seen.append(event)
    emptied = False
    for action, address, size in events:
        if action == "alloc":
            assert allocator.malloc(size) == address
        elif action == "free_completed":
            allocator.free(address)
        elif action == "segment_unmap" and not emptied:
            emptied = True
            allocator.empty_cache()
    assert seen == wanted
    assert allocator.reserved == sum(size if action == "segment_map" else -size for action, _, size in wanted)


def test_an_expandable_segment_needs_no_more_than_its_pages() -> None:
    allocator = CachingAllocator(EXPANDABLE, capacity=100 * MIB)
    addresses = [allocator.malloc(15 * MIB) for _ in range(5)]
    assert allocator.reserved == 80 * MIB
    with pytest.raises(OutOfMemory):
        allocator.malloc(30 * MIB)
    for address in addresses:
        allocator.free(address)
    assert allocator.empty_cache() == 80 * MIB
    assert allocator.reserved == 0
    assert not allocator.segments()


actions = st.lists(st.tuples(st.integers(1, 48 * MIB), st.booleans(), st.integers(0, 1)), max_size=60)


@pytest.mark.parametrize("settings", [AllocatorSettings(), EXPANDABLE], ids=["segments", "expandable"])
@given(requests=actions)
def test_blocks_fill_their_segments_and_never_overlap(
    settings: AllocatorSettings, requests: list[tuple[int, bool, int]]
) -> None:
    allocator = CachingAllocator(settings)
    alive: list[int] = []
    for size, frees, stream in requests:
        alive.append(allocator.malloc(size, stream))
        if frees:
            allocator.free(alive.pop(len(alive) // 2))
        for segment, blocks in allocator.segments():
            position = segment.address
            for block, following in zip(blocks, [*blocks[1:], None], strict=True):
                assert block.address == position
                assert following is None or not (block.free and following.free) or block.mapped != following.mapped
                position += block.size
            assert position == segment.address + segment.size
    stats = allocator.stats()
    assert stats["allocated_bytes.all.current"] >= stats.get("requested_bytes.all.current", 0)
    assert allocator.reserved >= allocator.allocated + allocator.inactive_split_bytes()
    for address in alive:
        allocator.free(address)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.allocated) == (0, 0)
