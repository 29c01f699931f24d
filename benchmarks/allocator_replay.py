"""Replay recorded events of CUDA's caching allocator through memlint's, and compare every address and segment.

    python benchmarks/allocator_replay.py DIR

DIR holds *.json or *.json.gz: `events` as [action, address, size, stream] and `segments_at_end`. The state before the
first event is had by taking back what the events did. Last line: what is right of how many; exit 1 on any difference.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memlint.virtual.allocator import AllocatorSettings, CachingAllocator


def load(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    trace: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return trace


def state_before(trace: Mapping[str, Any]) -> list[tuple[int, int, int, bool, dict[int, tuple[int, int]]]]:
    """The segments before the first event, each with the blocks that were in use."""
    made, given, alive = set(), {}, set()
    for action, address, size, stream in trace["events"]:
        if action == "segment_alloc":
            made.add(address)
        elif action == "segment_free":
            if address not in made:
                given[address] = (size, stream)
            made.discard(address)
        elif action == "alloc":
            alive.add(address)
        elif action == "free_completed":
            alive.discard(address)
    segments = []
    for segment in trace["segments_at_end"]:
        if segment["address"] in made:
            continue
        used = {
            block["address"]: (block["size"], block["requested_size"])
            for block in segment["blocks"]
            if block["state"] != "inactive" and block["address"] not in alive
        }
        small = segment["segment_type"] == "small"
        segments.append((segment["address"], segment["total_size"], segment["stream"], small, used))
    # what was given back was unused then; the pool follows from the size, which only the small pool's segments have
    segments.extend((address, size, stream, size <= 2 * 2**20, {}) for address, (size, stream) in given.items())
    return segments


def replay(trace: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Addresses right and in all, segments right and in all."""
    said = (trace.get("allocator_settings") or {}).get("PYTORCH_CUDA_ALLOC_CONF", "")
    waiting: list[tuple[int, int]] = []
    wrong_segments = 0

    def place(size: int) -> int:
        nonlocal wrong_segments
        if not waiting:
            wrong_segments += 1
            return fresh()
        address, recorded = waiting.pop()
        wrong_segments += recorded != size
        return address

    unknown = [1 << 50]

    def fresh() -> int:
        unknown[0] += 1 << 40
        return unknown[0]

    allocator = CachingAllocator(AllocatorSettings.parse(said), place=place)
    allocator.restore(state_before(trace))
    right = allocations = segments = 0
    names: dict[int, int] = {}
    for action, address, size, stream in trace["events"]:
        if action == "segment_alloc":
            segments += 1
            wrong_segments += len(waiting)  # one that nobody asked for
            waiting[:] = [(address, size)]
        elif action == "segment_free":
            segments += 1
            try:
                wrong_segments += allocator.release(address) != size
            except (KeyError, ValueError):
                wrong_segments += 1
        elif action == "alloc":
            allocations += 1
            names[address] = allocator.malloc(size, stream)
            right += names[address] == address
        elif action == "free_completed":
            allocator.free(names.pop(address))
    final = {segment.address: segment.size for segment, _ in allocator.segments()}
    recorded = {segment["address"]: segment["total_size"] for segment in trace["segments_at_end"]}
    wrong_segments += len(set(final.items()) ^ set(recorded.items()))
    segments += len(recorded)
    return right, allocations, segments - wrong_segments, segments


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    paths = sorted([*folder.glob("*.json"), *folder.glob("*.json.gz")])
    if not paths:
        print(f"error: {folder}: no *.json or *.json.gz there", file=sys.stderr)
        return 2
    total = [0, 0, 0, 0]
    for path in paths:
        counts = replay(load(path))
        total = [a + b for a, b in zip(total, counts, strict=True)]
        print(f"{path.name}: addresses {counts[0]} of {counts[1]}, segments {counts[2]} of {counts[3]}")
    print(f"all {len(paths)} traces: addresses {total[0]} of {total[1]}, segments {total[2]} of {total[3]} right")
    return 0 if total[0] == total[1] and total[2] == total[3] else 1


if __name__ == "__main__":
    sys.exit(main())
