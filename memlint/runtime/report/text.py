"""The text of one record: what a failed test prints, and what `memlint run` and a monitor say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from memlint.units import format_bytes

_BARS = "▁▂▃▄▅▆▇█"
_LONGEST_LINE = 20
_MOST_LEAKS = 3
_MOST_GROUPS = 3
_MOST_SHAPES = 2
_MOST_NOTES = 4
_WIDE = 110


def text_of(record: Mapping[str, Any]) -> str:
    """All that a person needs to fix what failed, in fewer than 40 lines."""
    return "\n".join(_lines(record))


def headline(record: Mapping[str, Any]) -> str:
    """Where it ran."""
    device = record["device"] if record["card"] in ("", record["device"]) else f"{record['device']} ({record['card']})"
    return f"{record['test']} on {device}, torch {record['torch']}"


def sparkline(values: Sequence[float]) -> str:
    """The values as a line of at most 20 bars; flat where they are all the same."""
    if not values:
        return ""
    if len(values) > _LONGEST_LINE:  # each bar stands for those up to the next
        values = [values[(i + 1) * len(values) // _LONGEST_LINE - 1] for i in range(_LONGEST_LINE)]
    low, high = min(values), max(values)
    if low == high:
        return _BARS[0] * len(values)
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] for value in values)


def kept_of(record: Mapping[str, Any]) -> list[int]:
    """Bytes that stay after each measured step."""
    steps = [step for step in record["steps"] if step["measured"]]
    return [step["allocated_after"] if step["collected"] is None else step["collected"] for step in steps]


def _lines(record: Mapping[str, Any]) -> Iterator[str]:
    yield f"memory budget: {headline(record)}"
    for verdict in record["verdicts"]:
        mark = "ok  " if verdict["passed"] else "FAIL"
        yield f"  {mark} {verdict['limit']}: {verdict['message']}"
    yield f"  {_steps_line(record)}"
    if beside := _beside(record["details"]):
        yield f"  beside it: {beside}"
    leaks = [leak for leak in record["leaks"] if leak["bytes_per_step"] > 0]
    growing = any(v["limit"] == "growth" and not v["passed"] for v in record["verdicts"])
    if leaks:
        for number, leak in enumerate(leaks[:_MOST_LEAKS], 1):
            yield ""
            yield from _leak_lines(number, leak, _MOST_GROUPS if number == 1 else 1)
        if len(leaks) > _MOST_LEAKS:
            rest = leaks[_MOST_LEAKS:]
            size = format_bytes(sum(leak["bytes_per_step"] for leak in rest))
            yield f"  and {len(rest)} more, {size} a step in all: --memory-report writes all of them"
    elif growing and record["traced_steps"]:
        yield ""
        yield f"  tracing {record['traced_steps']} of them again showed no tensor that stays"
    for cycle in record["cycles"]:
        where = "" if cycle["site"] is None else f", made at {_place(cycle['site'])}"
        yield f"  cycle: {format_bytes(cycle['bytes_per_step'])} a step in {cycle['path']}{where}"
    over = any(v["limit"] in ("peak", "reserved", "baseline", "oom") and not v["passed"] for v in record["verdicts"])
    if record["peak_breakdown"] is not None and (over or not growing):
        yield ""
        yield from _peak_lines(record["peak_breakdown"])
    for note in record["notes"][:_MOST_NOTES]:
        yield f"  note: {note}"
    if record["leftover"] and over:
        yield f"  note: {format_bytes(record['leftover'])} were alive on the device before; they are not counted"


def _steps_line(record: Mapping[str, Any]) -> str:
    kept = kept_of(record)
    warmup = sum(not step["measured"] for step in record["steps"])
    if not kept:
        return f"no measured step ({warmup} of warm-up)"
    return f"alive after each of {len(kept)} steps ({warmup} before them): {sparkline(kept)} {format_bytes(kept[-1])}"


def _beside(details: Mapping[str, Any]) -> str:
    """What is shown and never judged."""
    sizes = {
        "workspaces": "cuBLAS workspaces",
        "graph_pools": "pools of CUDA graphs",
        "inactive_split": "inactive splits",
        "context": "CUDA context (estimate)",
        "process": "the process in all (estimate)",
        "peak_resident": "peak resident memory of the process",
    }
    said = [f"{words} {format_bytes(details[name])}" for name, words in sizes.items() if details.get(name)]
    counts = {"ooms": "OOMs", "retries": "retries of allocations"}
    said += [f"{details[name]} {words}" for name, words in counts.items() if details.get(name)]
    return ", ".join(said)


def _leak_lines(number: int, leak: Mapping[str, Any], most: int) -> Iterator[str]:
    tensors = leak["tensors_per_step"]
    yield f"leak {number}: {format_bytes(leak['bytes_per_step'])} and {_number(tensors)} a step"
    if leak["holder"] is not None:
        yield f"  held by {leak['holder']['path']}"
    else:
        yield "  held by something that Python's collector does not show (C++, or a value on an interpreter's stack)"
    if leak["site"] is not None:
        yield f"  made at {_place(leak['site'])}: {_cut(leak['site']['source'], 70)}"
        if leak["caller"] is not None and leak["caller"] != leak["site"]:
            yield f"  called at {_place(leak['caller'])}: {_cut(leak['caller']['source'], 70)}"
    if leak["through"] is not None:
        yield f"  through its graph ({leak['through']}), which keeps for a backward that may never come:"
    elif leak["pinned_by_view"]:
        yield "  a view: it keeps the whole storage that it was cut from alive:"
    elif len(leak["groups"]) > 1:
        yield "  it keeps:"
    if leak["through"] is not None or leak["pinned_by_view"] or len(leak["groups"]) > 1:
        for group in leak["groups"][:most]:
            yield f"    {_group_line(group)}"
        if len(leak["groups"]) > most:
            rest = sum(group["bytes"] for group in leak["groups"][most:])
            yield f"    and {format_bytes(rest)} of {len(leak['groups']) - most} more lines"
    elif leak["groups"]:
        yield f"  {_shapes(leak['groups'][0])}, {leak['groups'][0]['category']}"
    if leak["rule"] is not None:
        yield f"  see: memlint explain {leak['rule']}"


def _peak_lines(peak: Mapping[str, Any]) -> Iterator[str]:
    yield f"at the peak of the traced steps, {format_bytes(peak['bytes'])}, in phase {peak['phase']!r}:"
    total = max(peak["bytes"], 1)
    shares = [f"{name} {format_bytes(size)} ({size / total:.0%})" for name, size in peak["categories"].items()]
    for start in range(0, len(shares), 4):
        yield f"  {', '.join(shares[start : start + 4])}"
    for group in peak["groups"]:
        yield f"    {_group_line(group)}"


def _group_line(group: Mapping[str, Any]) -> str:
    site = group["site"]
    where = "made before the trace" if site is None else f"{site['path']}:{site['line']}: {site['source']}"
    return _cut(f"{format_bytes(group['bytes']):>9}  {group['category']}, {_shapes(group)}, {where}")


def _shapes(group: Mapping[str, Any]) -> str:
    shown = []
    for shape in group["shapes"][:_MOST_SHAPES]:
        times = f"{shape['count']} x " if shape["count"] > 1 else ""
        shown.append(f"{times}{shape['dtype']}{shape['shape']}")
    more = len(group["shapes"]) - _MOST_SHAPES
    return ", ".join(shown) + (f" and {more} more shapes" if more > 0 else "")


def _place(site: Mapping[str, Any]) -> str:
    return f"{site['path']}:{site['line']} in {site['function']}"


def _number(tensors: float) -> str:
    shown = f"{tensors:.0f}" if tensors == int(tensors) else f"{tensors:.1f}"
    return f"{shown} tensor{'' if tensors == 1 else 's'}"


def _cut(text: str, most: int = _WIDE) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
