"""From what survived to what a person can act on: leaks with their line, their size a step and their holder."""

from __future__ import annotations

import gc
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from memlint.runtime.graphs import Graphs, Saved
from memlint.runtime.heap import Chain, Holder, Search, holder_of, shape_of, where_they_part
from memlint.runtime.sites import Site
from memlint.runtime.trace import LEFTOVER, Block, TracingTracker
from memlint.runtime.tracker import live_tensors, storages

#: tensors whose holder is looked up, the ones with most bytes first
_MOST_TARGETS = 60
#: ends of graphs of which it is asked who holds them
_MOST_ENDS = 200
_FEWEST_SIZES = 4

#: a block, the chain to what holds it, the node that saved it if a graph does, and the tensor at the chain's end
_Member: TypeAlias = "tuple[Block, Chain | None, Saved | None, torch.Tensor | None]"


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks that were made at one line and are of one category. Sizes in bytes."""

    site: Site | None
    caller: Site | None
    category: str
    nbytes: int
    count: int
    shapes: tuple[tuple[str, tuple[int, ...], int], ...]  # dtype, shape, how many


@dataclass(frozen=True, slots=True)
class Leak:
    """What stays alive of each step, by who holds it.

    site: the line that made what is held; caller: the line of user code that led there. bytes_per_step and
    tensors_per_step: what a step leaves behind; nbytes: all of it. groups: what is kept alive, by the line that made
    it. through: the autograd node behind which most of it is kept, None if the holder holds the tensors themselves.
    rule: the lint rule that explains the kind.
    """

    site: Site | None
    caller: Site | None
    holder: Holder | None
    bytes_per_step: float
    tensors_per_step: float
    nbytes: int
    groups: tuple[Group, ...]
    through: str | None = None
    pinned_by_view: bool = False
    rule: str | None = None

    @property
    def bounded(self) -> bool:
        """Whether the holder stops growing by itself."""
        return self.holder is not None and self.holder.bound is not None


@dataclass(frozen=True, slots=True)
class Cycle:
    """Objects that hold each other, so that only a collection frees the tensors with them. Sizes in bytes."""

    path: str
    bytes_per_step: float
    site: Site | None


@dataclass(frozen=True, slots=True)
class PeakBreakdown:
    """What was alive when most was. Sizes in bytes."""

    nbytes: int
    phase: str
    categories: tuple[tuple[str, int], ...]
    groups: tuple[Group, ...]


def group(blocks: Iterable[Block]) -> list[Group]:
    """The blocks by line and category, the largest group first."""
    by_line: dict[tuple[Site | None, str], list[Block]] = defaultdict(list)
    for block in blocks:
        by_line[block.site, block.category].append(block)
    groups = []
    for (site, category), members in by_line.items():
        kinds = Counter((block.dtype, block.shape) for block in members)
        shapes = tuple((dtype, shape, count) for (dtype, shape), count in kinds.most_common())
        groups.append(
            Group(site, members[0].caller, category, sum(block.nbytes for block in members), len(members), shapes)
        )
    return sorted(groups, key=lambda item: -item.nbytes)


def peak_breakdown(tracker: TracingTracker, most: int = 5) -> PeakBreakdown:
    """What was alive at the peak since the trace began or the peak was forgotten."""
    tracker.categorise()
    blocks = [block for block in tracker.live_at_peak() if block.category != LEFTOVER]
    categories: Counter[str] = Counter()
    for block in blocks:
        categories[block.category] += block.nbytes
    return PeakBreakdown(
        sum(block.nbytes for block in blocks),
        tracker.phase_at_peak,
        tuple((name, nbytes) for name, nbytes in categories.most_common() if nbytes),
        tuple(group(blocks)[:most]),
    )


def leaks(
    tracker: TracingTracker,
    steps: int,
    labels: Mapping[int, str],
    history: Sequence[Mapping[Site | None, int]] = (),
) -> list[Leak]:
    """What the traced steps 0 to `steps` - 1 left behind, the largest first. To be called after a collection.

    Blocks of the last step may be there for good reasons (a state that the next step replaces), so they only count if
    the steps before left the same, or if what they replace grows: `history` has the bytes alive by line after a step.
    """
    survivors = tracker.survivors()
    replaced = _replaced_lines(survivors, steps, history)
    survivors = _of_several_steps(survivors, steps, replaced)
    if not survivors:
        return []
    wanted = {block.key: block for block in survivors}
    tensors = live_tensors()
    held: dict[int, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        for _, storage in storages(tensor):
            if storage._cdata in wanted:
                held[storage._cdata].append(tensor)

    def are_held(ends: list[torch.Tensor]) -> set[int]:
        recent = [tensor for tensor in ends if _is_recent(tensor, tracker)][-_MOST_ENDS:]
        chains = Search(labels, {}, [tensors, ends, recent, *held.values()]).chains(recent)
        return {id(tensor) for tensor, chain in zip(recent, chains, strict=True) if chain is not None}

    graphs = Graphs(tensors, are_held)
    assigned = _by_holder(wanted, held, graphs, labels, tensors)
    found = [_leak(members, steps, tracker, replaced) for members in assigned]
    return sorted(found, key=lambda leak: -leak.bytes_per_step)


def alive_by_line(tracker: TracingTracker) -> dict[Site | None, int]:
    """Bytes alive of what traced steps made, by the line that made it."""
    alive: Counter[Site | None] = Counter()
    for block in tracker.survivors():
        alive[block.site] += block.nbytes
    return alive


def _is_recent(tensor: torch.Tensor, tracker: TracingTracker) -> bool:
    return any((block := tracker.block_of(s)) is not None and block.step >= 0 for _, s in storages(tensor))


def _replaced_lines(
    blocks: Sequence[Block], steps: int, history: Sequence[Mapping[Site | None, int]]
) -> dict[Site | None, float]:
    """The lines that make a buffer which a larger one replaces with every step, and by how many bytes it grows."""
    lasting = {block.site for block in blocks if block.step < steps - 1}
    growing = {}
    for line in set(history[-1]) - lasting if len(history) >= _FEWEST_SIZES else ():
        sizes = [alive.get(line, 0) for alive in history[1:]]
        rises = [after - before for before, after in itertools.pairwise(sizes)]
        if min(rises) > 0:
            growing[line] = sum(rises) / len(rises)
    return growing


def _of_several_steps(blocks: Sequence[Block], steps: int, replaced: Mapping[Site | None, float]) -> list[Block]:
    """Without the lines that left something in one step only, or in the last only, if that does not grow."""
    by_site: dict[Any, set[int]] = defaultdict(set)
    for block in blocks:
        by_site[block.site].add(block.step)
    return [block for block in blocks if len(by_site[block.site] - {steps - 1}) >= 2 or block.site in replaced]


def _by_holder(
    wanted: Mapping[int, Block],
    held: Mapping[int, Sequence[torch.Tensor]],
    graphs: Graphs,
    labels: Mapping[int, str],
    tensors: Sequence[torch.Tensor],
) -> list[list[_Member]]:
    """The blocks, put together by who holds them and by which way."""
    targets = _targets(wanted, held, graphs.saved)
    gradients = {id(t.grad): t for t in tensors if t.is_leaf and t.requires_grad and t.grad is not None}
    owners: dict[int, Any] = dict(graphs.roots)
    for tensor in targets:
        if id(tensor) in gradients:
            owners.setdefault(id(tensor), gradients[id(tensor)])
    hidden = [tensors, targets, gradients, owners, *held.values(), *graphs.own_objects()]
    chains = {id(t): chain for t, chain in zip(targets, Search(labels, owners, hidden).chains(targets), strict=True)}
    assigned: dict[Any, list[_Member]] = defaultdict(list)
    for key, block in wanted.items():
        chain, saved, end = _how_held(key, held, graphs.saved, chains)
        assigned[shape_of(chain) if chain is not None else block.site].append((block, chain, saved, end))
    return [part for members in assigned.values() for part in _by_container(members)]


def _by_container(members: list[_Member]) -> list[list[_Member]]:
    """Apart where the chains part into containers that last over steps: each of two meters in a dict is a holder.

    A dict of results that is made anew each step has tensors of one step only, and stays in its list's group.
    """
    chains = [chain for _, chain, *_ in members if chain is not None]
    if len(chains) < len(members) or len({id(chain.objects[-1]) for chain in chains}) < 2:
        return [members]
    at = where_they_part(chains) + 1
    parts: dict[int, list[_Member]] = defaultdict(list)
    for member, chain in zip(members, chains, strict=True):
        parts[id(chain.objects[at])].append(member)
    lasting = all(len({block.step for block, *_ in part}) > 1 for part in parts.values())
    ends = any(len(chain.objects) == at + 1 for chain in chains)
    if len(parts) < 2 or not lasting or ends:
        return [members]
    return [smaller for part in parts.values() for smaller in _by_container(part)]


def _targets(
    wanted: Mapping[int, Block], direct: Mapping[int, Sequence[torch.Tensor]], roots: Mapping[int, Saved]
) -> list[torch.Tensor]:
    """The tensors to look for holders of: those at the end of graphs, by what they keep, and those held themselves."""
    weight: Counter[int] = Counter()
    tensors: dict[int, torch.Tensor] = {}
    for key, block in wanted.items():
        for tensor in (*direct.get(key, ()), *((roots[key].root,) if key in roots else ())):
            tensors[id(tensor)] = tensor
            weight[id(tensor)] += block.nbytes
    return [tensors[key] for key, _ in weight.most_common(_MOST_TARGETS)]


def _how_held(
    key: int,
    direct: Mapping[int, Sequence[torch.Tensor]],
    roots: Mapping[int, Saved],
    chains: Mapping[int, Chain | None],
) -> tuple[Chain | None, Saved | None, torch.Tensor | None]:
    """How a storage is held: by a tensor that somebody holds, else through a graph that somebody holds."""
    for tensor in direct.get(key, ()):
        chain = chains.get(id(tensor))
        if chain is not None:
            return chain, None, tensor
    saved = roots.get(key)
    if saved is not None:
        return chains.get(id(saved.root)), saved, saved.root
    return None, None, next(iter(direct.get(key, ())), None)


def _leak(
    members: Sequence[_Member], steps: int, tracker: TracingTracker, replaced: Mapping[Site | None, float]
) -> Leak:
    members = sorted(members, key=lambda member: -member[0].nbytes)
    blocks = [block for block, *_ in members]
    distinct = list({id(chain.objects[-1]): chain for _, chain, *_ in members if chain is not None}.values())
    holder = holder_of(distinct) if distinct else _holder_in_torch(members)
    settled = [block for block in blocks if block.step < steps - 1]
    span = max(steps - 1, 1)
    # of a buffer that a larger one replaces only the last is alive
    grown = sum(replaced.get(line, 0.0) for line in {block.site for block in blocks})
    site, caller = _line(members, tracker)
    through = None
    saved = [(block, item) for block, _, item, _ in members if item is not None]
    if sum(block.nbytes for block, _ in saved) * 2 > sum(block.nbytes for block in blocks):
        names = Counter(type(item.root.grad_fn).__name__ for _, item in saved if item.root.grad_fn is not None)
        through = names.most_common(1)[0][0] if names else None
    view = any(
        tensor is not None and saved_by is None and tensor.numel() * tensor.element_size() * 2 <= block.nbytes
        for block, _, saved_by, tensor in members
    )
    attached = any(tensor is not None and tensor.grad_fn is not None for *_, tensor in members)
    return Leak(
        site=site,
        caller=caller,
        holder=holder,
        bytes_per_step=sum(block.nbytes for block in settled) / span + grown,
        tensors_per_step=len(settled) / span,
        nbytes=sum(block.nbytes for block in blocks),
        groups=tuple(group(blocks)),
        through=through,
        pinned_by_view=view,
        rule=_rule(holder, attached, view),
    )


def _holder_in_torch(members: Sequence[_Member]) -> Holder | None:
    """The holder of what holds itself by a way through C++ that the collector does not see."""
    for _, _, saved, tensor in members:
        if saved is not None and saved.gradient_of is not None:
            path = (
                "the `.grad` of a tensor whose graph holds the tensor (backward with create_graph=True):"
                " not even a collection frees them"
            )
            return Holder(path, frozenset({"gradient"}))
        hooks = getattr(tensor, "_backward_hooks", None)
        for hook in (hooks or {}).values():
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            path = f"a hook on the tensor itself, `{name}`, that holds the tensor: not even a collection frees it"
            return Holder(path, frozenset({"hook"}))
    return None


def _line(members: Sequence[_Member], tracker: TracingTracker) -> tuple[Site | None, Site | None]:
    """The line that made what is held directly: the tensor at the end of the graph where a graph keeps the bytes."""
    lines: Counter[tuple[Site | None, Site | None]] = Counter()
    for block, _, saved, tensor in members:
        source = block
        if saved is not None and tensor is not None:
            for _, storage in storages(tensor):
                source = tracker.block_of(storage) or block
        lines[source.changed_at or (source.site, source.caller)] += block.nbytes
    return lines.most_common(1)[0][0]


_RULES = {
    "traceback": "ML110",
    "exception": "ML110",
    "lru_cache": "ML109",
    "hook": "ML107",
    "ctx": "ML108",
    "gradient": "ML106",
}


def _rule(holder: Holder | None, attached: bool, view: bool) -> str | None:
    """The lint rule that explains this kind of leak; `attached` says whether what is held carries a graph."""
    kinds = holder.kinds if holder is not None else frozenset()
    for kind, rule in _RULES.items():
        if kind in kinds:
            return rule
    if attached:
        if holder is not None and holder.container is not None:
            return "ML102"
        return "ML103" if "attribute" in kinds else "ML101"
    return "ML114" if view else None


# -- cycles -----------------------------------------------------------------------------------------------------------


def cycles(tracker: TracingTracker) -> list[Cycle]:
    """Collect, and name the cycle that held tensors made in the last traced step; empty where none did."""
    before = gc.get_debug()
    kept = list(gc.garbage)
    gc.garbage.clear()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
    finally:
        gc.set_debug(before)
    garbage = list(gc.garbage)
    gc.garbage.clear()
    gc.garbage.extend(kept)
    found = _named_cycle(garbage, tracker)
    garbage.clear()
    gc.collect()
    return [] if found is None else [found]


def _named_cycle(garbage: Sequence[Any], tracker: TracingTracker) -> Cycle | None:
    tensors = [item for item in garbage if isinstance(item, torch.Tensor)]
    held = {block.key: block for t in tensors for _, s in storages(t) if (block := tracker.block_of(s)) is not None}
    for key in Graphs(tensors).saved:
        if (block := tracker.block_at(key)) is not None:
            held[key] = block
    blocks = [block for block in held.values() if block.step >= 0]
    if not blocks:
        return None
    lines: Counter[Site | None] = Counter()
    for block in blocks:
        lines[block.site] += block.nbytes
    path = _a_cycle({id(item): item for item in garbage})
    return Cycle(path, sum(block.nbytes for block in blocks), lines.most_common(1)[0][0])


def _a_cycle(members: Mapping[int, Any]) -> str:
    """The shortest cycle among the garbage that has an object of user code in it, as text."""
    best: list[Any] = []
    candidates = [item for item in members.values() if _is_telling(item)] or list(members.values())
    for start in candidates[:20]:
        found = _way_back(start, members)
        if found and (not best or len(found) < len(best)):
            best = found
    return _cycle_text(best) if best else "a reference cycle"


def _is_telling(item: Any) -> bool:
    kind = type(item)
    return kind.__module__ not in ("builtins", "torch", "torch.storage", "collections") and not isinstance(item, type)


def _way_back(start: Any, members: Mapping[int, Any]) -> list[Any]:
    previous: dict[int, int] = {}
    waiting = [id(start)]
    for key in waiting:
        for child in gc.get_referents(members[key]):
            if id(child) == id(start):
                path = [start]
                while key != id(start):
                    path.append(members[key])
                    key = previous[key]
                return [path[0], *reversed(path[1:])]
            if id(child) in members and id(child) not in previous:
                previous[id(child)] = key
                waiting.append(id(child))
    return []


def _cycle_text(objects: Sequence[Any]) -> str:
    """The cycle as types and the attributes between them: "Trainer.callback > Callback.trainer > Trainer"."""
    from memlint.runtime.heap import _attributes, _called, _own_dict

    parts: list[str] = []
    around = [*objects, objects[0]]
    position = 0
    while position < len(around) - 1:
        item, child = around[position], around[position + 1]
        name = type(item).__name__
        if callable(item) and hasattr(item, "__qualname__"):
            name = f"{name} {_called(item)}"
        if child is _own_dict(item) and position + 2 < len(around):
            held, position = around[position + 2], position + 2
            attributes: Iterable[tuple[Any, Any]] = list(child.items())
        else:
            held, position = child, position + 1
            attributes = _attributes(item)
        parts.append(name + next((f".{key}" for key, value in attributes if value is held), ""))
    return " > ".join([*parts, type(objects[0]).__name__])
