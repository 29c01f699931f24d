"""The rules of torch's caching allocator for CUDA (c10/cuda/CUDACachingAllocator.cpp), on numbers instead of memory.

A request is rounded to a block, a block is cut from the smallest free one that fits, a segment is asked of the card
only when none fits, and freed blocks merge with their neighbours and stay reserved. With expandable segments, each
pool of a stream has one segment of addresses as large as the card, and memory is mapped to its end as it is needed.
All sizes and addresses in bytes.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from memlint.errors import MemlintError
from memlint.units import format_bytes

#: constants of the same names in c10/core/AllocatorConfig.h (before: CUDACachingAllocator.cpp)
MIN_BLOCK_SIZE = 512
SMALL_SIZE = 2**20
SMALL_BUFFER = 2 * 2**20
LARGE_BUFFER = 20 * 2**20
MIN_LARGE_ALLOC = 10 * 2**20
ROUND_LARGE = 2 * 2**20


class SettingsError(MemlintError):
    """An allocator setting that torch would not take."""


class OutOfMemory(MemlintError):  # noqa: N818
    """The card has no room left, even after unused segments were given back."""


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """What PYTORCH_ALLOC_CONF (before: PYTORCH_CUDA_ALLOC_CONF) says.

    max_split_size: blocks of at least so many bytes are not cut; None cuts all. roundup_power2_divisions: into how many
    steps each power of two is divided, by the power in MiB up to which it holds; 0 rounds to 512 bytes only.
    garbage_collection_threshold: the share of the limit above which old unused segments are given back; 0 never.
    """

    max_split_size: int | None = None
    roundup_power2_divisions: tuple[tuple[int, int], ...] = ()
    garbage_collection_threshold: float = 0.0
    large_segment_size: int = LARGE_BUFFER
    expandable_segments: bool = False

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """The settings that a text such as "max_split_size_mb:128,expandable_segments:True" says. Raises SettingsError.

        Settings without a part in what is allocated where (backend, pinned memory) are passed over.
        """
        found = cls()
        for name, value in re.findall(r"(\w+)\s*:\s*(\[[^\]]*\]|[^,]+)", text):
            try:
                found = found._with(name, value.strip())
            except ValueError:
                raise SettingsError(f"PYTORCH_ALLOC_CONF: {name}:{value} is no value that torch takes") from None
        return found

    def _with(self, name: str, value: str) -> AllocatorSettings:
        if name == "max_split_size_mb":
            megabytes = int(value)
            if megabytes <= LARGE_BUFFER // 2**20:  # CUDAAllocatorConfig::parseMaxSplitSize
                raise ValueError(value)
            return replace(self, max_split_size=megabytes * 2**20)
        if name == "garbage_collection_threshold":
            share = float(value)
            if not 0 < share < 1:
                raise ValueError(value)
            return replace(self, garbage_collection_threshold=share)
        if name == "expandable_segments":
            if value not in ("True", "False"):
                raise ValueError(value)
            return replace(self, expandable_segments=value == "True")
        if name == "large_segment_size_mb":
            return replace(self, large_segment_size=int(value) * 2**20)
        if name == "roundup_power2_divisions":
            if not value.startswith("["):
                return replace(self, roundup_power2_divisions=((0, _power_of_two(value)),))
            pairs = [pair.split(":") for pair in value.strip("[]").split(",")]
            table = tuple((0 if size.strip() == ">" else int(size), _power_of_two(count)) for size, count in pairs)
            return replace(self, roundup_power2_divisions=table)
        return self

    def divisions(self, size: int) -> int:
        """The divisions that hold for a request of `size` bytes."""
        last = 0
        for megabytes, count in self.roundup_power2_divisions:
            if megabytes == 0 or size <= megabytes * 2**20:
                return count
            last = count
        return last

    def round(self, size: int) -> int:
        """The size of the block for a request (`round_size`)."""
        if size < MIN_BLOCK_SIZE:
            return MIN_BLOCK_SIZE
        divisions = self.divisions(size)
        if divisions > 1 and size > MIN_BLOCK_SIZE * divisions:
            power = 1 << (size.bit_length() - 1)
            if power == size:
                return size
            return -(-size // (power // divisions)) * (power // divisions)
        return -(-size // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE

    def segment_size(self, size: int) -> int:
        """How much is asked of the card for a block of `size` bytes (`get_allocation_size`)."""
        if size <= SMALL_SIZE:
            return SMALL_BUFFER
        if size < MIN_LARGE_ALLOC:
            return self.large_segment_size
        return -(-size // ROUND_LARGE) * ROUND_LARGE


def _room(block: Block) -> int:
    """The size of a block with what can be mapped behind it."""
    behind = block.after
    return block.size + (behind.size if behind is not None and not behind.mapped else 0)


def _power_of_two(text: str) -> int:
    number = int(text)
    if number < 1 or number & (number - 1):
        raise ValueError(text)
    return number


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment. requested: bytes asked for, 0 while it is free. mapped: whether memory is behind it."""

    address: int
    size: int
    segment: Segment
    requested: int = 0
    free: bool = True
    before: Block | None = None
    after: Block | None = None
    mapped: bool = True

    @property
    def key(self) -> tuple[int, int, int]:
        """The order of the free lists: by stream, then the smallest, then the lowest."""
        return self.segment.stream, self.size, self.address


@dataclass(slots=True, eq=False)
class Segment:
    """What the card gave in one piece. page: what an expandable one grows by; 0 for the others."""

    address: int
    size: int
    stream: int
    small: bool
    last_used: int = 0
    page: int = 0


_COUNTED = ("allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes", "allocation", "segment")


@dataclass(slots=True)
class Counters:
    """Current values and peaks, by the names of `torch.cuda.memory_stats`."""

    current: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0))
    peak: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0))

    def add(self, name: str, amount: int) -> None:
        """Count; the peak follows."""
        value = self.current[name] = self.current.get(name, 0) + amount
        if value > self.peak.get(name, 0):
            self.peak[name] = value

    def reset_peak(self) -> None:
        """Peaks start again from what is."""
        self.peak = dict(self.current)


class CachingAllocator:
    """One card's allocator.

    capacity: bytes that the card can give in all; None for no limit. place: where a new segment of that many bytes
    lies; by default one after the other.
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        capacity: int | None = None,
        place: Callable[[int], int] | None = None,
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.capacity = capacity
        self.counters = Counters()
        self.retries = 0
        self.ooms = 0
        self._place = place or self._next_place
        self._next = 1 << 40
        self._free: dict[bool, list[tuple[tuple[int, int, int], Block]]] = {True: [], False: []}
        #: the parts of expandable segments that have no memory
        self._unmapped: list[Block] = []
        #: told of what is mapped and unmapped: (action, address, nbytes)
        self.listener: Callable[[str, int, int], None] | None = None
        self._used: dict[int, Block] = {}
        self._segments: dict[int, Segment] = {}
        self._first: dict[int, Block] = {}
        self._clock = 0

    # -- what a program does -------------------------------------------------------------------------------------

    def malloc(self, nbytes: int, stream: int = 0) -> int:
        """The address of a block for `nbytes` bytes. Raises OutOfMemory."""
        self._clock += 1
        size = self.settings.round(nbytes)
        small = size <= SMALL_SIZE
        block = self._best_fit(size, stream, small)
        if block is None:
            expandable = self.settings.expandable_segments
            block = self._expanded(size, stream, small) if expandable else self._new_segment(size, stream, small)
        self._take(block, size, nbytes)
        return block.address

    def free(self, address: int) -> None:
        """Give a block back. Raises KeyError where there is none."""
        block = self._used.pop(address)
        self._count(block, -1)
        block.free, block.requested = True, 0
        self._remember(self._joined(block))

    def empty_cache(self) -> int:
        """Give all unused segments back; how many bytes that were."""
        before = self.reserved
        for block in [block for small in (False, True) for _, block in self._free[small]]:
            if block.segment.page:
                self._unmap(block)
            elif self._is_whole(block):
                self.release(block.segment.address)
        return before - self.reserved

    def release(self, address: int) -> int:
        """Give one unused segment back; its bytes. Raises KeyError where there is none, ValueError where it is used."""
        segment, block = self._segments[address], self._first[address]
        if not block.free or block.size != segment.size:
            raise ValueError(f"the segment at {address} is in use")
        self._forget(block)
        del self._segments[address], self._first[address]
        self.counters.add("reserved_bytes", -segment.size)
        self.counters.add("segment", -1)
        return segment.size

    # -- what it says --------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """As `torch.cuda.memory_stats`: `allocated_bytes.all.current` and `.peak`, and so on."""
        found = {f"{name}.all.current": value for name, value in self.counters.current.items()}
        found["inactive_split_bytes.all.current"] = self.inactive_split_bytes()
        found.update({f"{name}.all.peak": value for name, value in self.counters.peak.items()})
        return {**found, "num_alloc_retries": self.retries, "num_ooms": self.ooms}

    def inactive_split_bytes(self) -> int:
        """Free bytes in segments that are in use: what fragmentation costs."""
        free = (block for blocks in self._free.values() for _, block in blocks)
        return sum(block.size for block in free if not block.segment.page and not self._is_whole(block))

    def segments(self) -> list[tuple[Segment, list[Block]]]:
        """All segments by address, each with its blocks."""
        found = []
        for address in sorted(self._segments):
            blocks, block = [], self._first.get(address)
            while block is not None:
                blocks.append(block)
                block = block.after
            found.append((self._segments[address], blocks))
        return found

    def restore(self, segments: Iterable[tuple[int, int, int, bool, Mapping[int, tuple[int, int]]]]) -> None:
        """Take over a state: for each segment its address, size, stream, whether it is of the small pool, and the
        blocks in use as address: (size, requested). Everything between is free.
        """
        for address, size, stream, small, used in segments:
            segment = self._add_segment(address, size, stream, small)
            last: Block | None = None
            position = address
            for start in [*sorted(used), address + size]:
                if start > position:
                    last = self._append(last, Block(position, start - position, segment))
                    self._remember(last)
                if start < address + size:
                    length, requested = used[start]
                    last = self._append(last, Block(start, length, segment, requested, free=False))
                    self._used[start] = last
                    self._count(last, 1)
                    position = start + length
        self.counters.reset_peak()

    # -- rules ---------------------------------------------------------------------------------------------------

    def _best_fit(self, size: int, stream: int, small: bool) -> Block | None:
        blocks = self._free[small]
        at = bisect.bisect_left(blocks, (stream, size, 0), key=lambda item: item[0])
        if at == len(blocks) or blocks[at][1].segment.stream != stream:
            return None
        block = blocks[at][1]
        if self.settings.expandable_segments and block.segment.page:
            # what can still be mapped behind a block counts for the fit (`get_free_block`)
            for _, other in blocks[at + 1 :]:
                if not block.segment.page or other.segment.stream != stream or _room(other) >= _room(block):
                    break
                block = other
        limit = self.settings.max_split_size
        if limit is not None:
            if size < limit <= block.size:
                return None  # an oversized block is not cut for a small request
            if size >= limit and block.size >= size + self.settings.large_segment_size:
                return None  # nor taken for one that is much smaller
        return block

    def _new_segment(self, size: int, stream: int, small: bool) -> Block:
        wanted = self.settings.segment_size(size)
        self._collect_garbage(wanted)
        if not self._fits(wanted):
            self.retries += 1
            self.empty_cache()
            if not self._fits(wanted):
                self._give_up(wanted)
        segment = self._add_segment(self._place(wanted), wanted, stream, small)
        block = self._append(None, Block(segment.address, wanted, segment))
        self._remember(block)
        return block

    def _give_up(self, wanted: int) -> None:
        self.ooms += 1
        free = (self.capacity or 0) - self.counters.current.get("reserved_bytes", 0)
        raise OutOfMemory(
            f"CUDA out of memory. Tried to allocate {format_bytes(wanted)}, {format_bytes(free)} of"
            f" {format_bytes(self.capacity or 0)} are free, {format_bytes(self.allocated)} allocated"
        )

    # -- expandable segments (`try_allocate_expandable_block`, `map_block`, `unmap_block`) ----------------------------

    def _expanded(self, size: int, stream: int, small: bool) -> Block:
        """A free block for a request, with memory mapped at the end of an expandable segment."""
        block = self._with_addresses(size, stream, small)
        if not block.mapped:
            block = self._map(block, min(block.size, size))
        while block.size < size:
            behind = block.after
            assert behind is not None
            block = self._map(behind, min(size - block.size, behind.size))
        return block

    def _with_addresses(self, size: int, stream: int, small: bool) -> Block:
        """Where there are addresses for so much: a part without memory, or the free block before it."""
        for unmapped in sorted(self._unmapped, key=lambda block: block.address):
            segment = unmapped.segment
            if segment.stream != stream or segment.small != small:
                continue
            before = unmapped.before
            start = before if before is not None and before.free else unmapped
            room, block = 0, start
            while block is not None and block.free and room < size:
                room, block = room + block.size, block.after  # type: ignore[assignment]
            if room >= size:
                return start
        page = SMALL_BUFFER if small else self.settings.large_segment_size
        limit = self.capacity if self.capacity is not None else 1 << 40
        length = -(-(limit + limit // 8) // page) * page  # 1.125 of the card, in the constructor of ExpandableSegment
        segment = Segment(self._place(length), length, stream, small, self._clock, page)
        self._segments[segment.address] = segment
        block = self._append(None, Block(segment.address, length, segment, mapped=False))
        self._unmapped.append(block)
        return block

    def _map(self, block: Block, size: int) -> Block:
        """Put memory behind the start of a part without any; the free block that comes of it."""
        page = block.segment.page
        mapped = min(-(-size // page) * page, block.size)
        if not self._fits(mapped):
            self.retries += 1
            self.empty_cache()
            if not self._fits(mapped):
                self._give_up(mapped)
        self._unmapped.remove(block)
        if mapped < block.size:
            rest = Block(block.address + mapped, block.size - mapped, block.segment, mapped=False)
            rest.before, rest.after = block, block.after
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, mapped
            self._unmapped.append(rest)
        block.mapped = True
        self.counters.add("reserved_bytes", mapped)
        if self.listener is not None:
            self.listener("segment_map", block.address, mapped)
        block = self._joined(block)
        self._remember(block)
        return block

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages of a free block; what sticks out at its ends stays."""
        segment, page = block.segment, block.segment.page
        offset = block.address - segment.address
        start = -(-offset // page) * page
        end = (offset + block.size) // page * page
        if start >= end:
            return
        self._forget(block)
        if start > offset:
            low = Block(block.address, start - offset, segment, before=block.before, after=block)
            if block.before is not None:
                block.before.after = low
            else:
                self._first[segment.address] = low
            block.before = low
            self._remember(low)
        rest = offset + block.size - end
        if rest:
            high = Block(segment.address + end, rest, segment, before=block, after=block.after)
            if block.after is not None:
                block.after.before = high
            block.after = high
            self._remember(high)
        block.address, block.size, block.mapped = segment.address + start, end - start, False
        self.counters.add("reserved_bytes", start - end)
        if self.listener is not None:
            self.listener("segment_unmap", block.address, block.size)
        block = self._joined(block)
        if self._is_whole(block):
            del self._segments[segment.address], self._first[segment.address]
        else:
            self._unmapped.append(block)

    def _joined(self, block: Block) -> Block:
        """A free block with the free neighbours that are as it is, mapped or not."""
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free and neighbour.mapped is block.mapped:
                if neighbour.mapped:
                    self._forget(neighbour)
                else:
                    self._unmapped.remove(neighbour)
                block = self._merged(neighbour, block) if neighbour is block.before else self._merged(block, neighbour)
        return block

    def _collect_garbage(self, wanted: int) -> None:
        """Give back unused segments, the longest unused first, while too much is reserved.

        `garbage_collect_cached_blocks` in torch.
        """
        threshold = self.settings.garbage_collection_threshold
        if not threshold or self.capacity is None:
            return
        limit = int(threshold * self.capacity)
        if self.counters.current.get("reserved_bytes", 0) + wanted <= limit:
            return
        large = [block for _, block in self._free[False] if self._is_whole(block)]
        for block in sorted(large, key=lambda block: block.segment.last_used):
            if self.counters.current.get("reserved_bytes", 0) + wanted <= limit:
                return
            self.release(block.segment.address)

    def _fits(self, wanted: int) -> bool:
        return self.capacity is None or self.counters.current.get("reserved_bytes", 0) + wanted <= self.capacity

    def _take(self, block: Block, size: int, requested: int) -> None:
        self._forget(block)
        rest = block.size - size
        if self._should_split(block.segment.small, size, rest):
            remaining = Block(block.address + size, rest, block.segment, before=block, after=block.after)
            if block.after is not None:
                block.after.before = remaining
            block.after, block.size = remaining, size
            self._remember(remaining)
        block.free, block.requested = False, requested
        block.segment.last_used = self._clock
        self._used[block.address] = block
        self._count(block, 1)

    def _should_split(self, small: bool, size: int, rest: int) -> bool:
        if small or self.settings.expandable_segments:
            return rest >= MIN_BLOCK_SIZE
        limit = self.settings.max_split_size
        return (limit is None or size < limit) and rest > SMALL_SIZE

    # -- bookkeeping ---------------------------------------------------------------------------------------------

    @property
    def allocated(self) -> int:
        """Bytes in blocks that are in use."""
        return self.counters.current.get("allocated_bytes", 0)

    @property
    def reserved(self) -> int:
        """Bytes in segments."""
        return self.counters.current.get("reserved_bytes", 0)

    def _next_place(self, size: int) -> int:
        address, self._next = self._next, self._next + size
        return address

    def _add_segment(self, address: int, size: int, stream: int, small: bool) -> Segment:
        segment = self._segments[address] = Segment(address, size, stream, small, self._clock)
        self.counters.add("reserved_bytes", size)
        self.counters.add("segment", 1)
        return segment

    def _append(self, last: Block | None, block: Block) -> Block:
        block.before = last
        if last is None:
            self._first[block.segment.address] = block
        else:
            last.after = block
        return block

    def _merged(self, low: Block, high: Block) -> Block:
        low.size += high.size
        low.after = high.after
        if high.after is not None:
            high.after.before = low
        low.free, low.requested = True, 0
        return low

    def _is_whole(self, block: Block) -> bool:
        return block.before is None and block.after is None

    def _remember(self, block: Block) -> None:
        bisect.insort(self._free[block.segment.small], (block.key, block), key=lambda item: item[0])

    def _forget(self, block: Block) -> None:
        blocks = self._free[block.segment.small]
        at = bisect.bisect_left(blocks, block.key, key=lambda item: item[0])
        assert blocks[at][1] is block
        del blocks[at]

    def _count(self, block: Block, sign: int) -> None:
        for name in ("allocated_bytes", "active_bytes"):
            self.counters.add(name, sign * block.size)
        self.counters.add("requested_bytes", sign * block.requested)
        self.counters.add("allocation", sign)
