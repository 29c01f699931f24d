"""The table over all budget tests: for the terminal, and as Markdown for a step summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memlint.runtime.report.text import kept_of, sparkline
from memlint.units import format_bytes

_COLUMNS = ("test", "device", "peak", "budget", "headroom", "growth/step", "verdict", "steps")


def rows(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row of texts for each record, in the order of the columns."""
    return [_row(record) for record in records]


def table(records: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """The table as lines of at most `width` characters; the names of tests give way first."""
    cells = [_COLUMNS, *rows(records)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_COLUMNS))]
    room = width - sum(widths[1:]) - 2 * (len(_COLUMNS) - 1)
    widths[0] = max(min(widths[0], room), 16)
    lines = []
    for row in cells:
        first = row[0] if len(row[0]) <= widths[0] else f"...{row[0][len(row[0]) - widths[0] + 3 :]}"
        middle = [cell.rjust(size) for cell, size in zip(row[2:6], widths[2:6], strict=True)]
        rest = [row[1].ljust(widths[1]), *middle, row[6].ljust(widths[6]), row[7]]
        lines.append("  ".join([first.ljust(widths[0]), *rest]).rstrip())
    return lines


def markdown(records: Sequence[Mapping[str, Any]]) -> str:
    """The table for `GITHUB_STEP_SUMMARY`, with the leaks below."""
    failed = sum(not record["passed"] for record in records)
    lines = [
        f"### memlint: memory budgets, {len(records) - failed} of {len(records)} kept",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        f"|{'|'.join([' --- ', ' --- ', *[' ---: '] * 4, ' --- ', ' --- '])}|",
    ]
    lines.extend(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows(records))
    for record in records:
        for verdict in record["verdicts"]:
            if not verdict["passed"]:
                lines += ["", f"**{record['test']}**: {verdict['message']}"]
        for leak in record["leaks"]:
            if leak["bytes_per_step"] > 0 and not record["passed"]:
                holder = leak["holder"]["path"] if leak["holder"] is not None else "an unknown holder"
                site = leak["site"]
                where = "" if site is None else f", made at `{site['path']}:{site['line']}`"
                lines += ["", f"- {format_bytes(leak['bytes_per_step'])} a step held by {holder}{where}"]
    return "\n".join([*lines, ""])


def verdict_of(record: Mapping[str, Any]) -> str:
    """The verdict in a word or two."""
    failed = [verdict["limit"] for verdict in record["verdicts"] if not verdict["passed"]]
    if failed:
        said = {"growth": "LEAK", "peak": "OVER PEAK", "reserved": "OVER RESERVED", "cycles": "CYCLES",
                "baseline": "OVER BASELINE", "oom": "OUT OF MEMORY"}  # fmt: skip
        return ", ".join(said.get(limit, limit.upper()) for limit in failed)
    if any(verdict["limit"] == "cycles" for verdict in record["verdicts"]):
        return "ok, cycles"
    trend = record["growth"]["trend"]
    return "ok" if trend in ("flat", "leak", "too few steps") else f"ok, {trend}"


def _row(record: Mapping[str, Any]) -> tuple[str, ...]:
    peak, budget, kind = record["peak"], record["budget"]["peak"], ""
    if budget is None and record["budget"]["reserved"] is not None:
        peak, budget, kind = record["reserved"], record["budget"]["reserved"], " reserved"
    headroom = "-"
    if budget is not None and peak is not None:
        headroom = f"{(budget - peak) / budget:.0%}" if budget else format_bytes(budget - peak)
    growth = record["growth"]
    return (
        record["test"],
        record["device"],
        "unknown" if peak is None else format_bytes(peak) + kind,
        "-" if budget is None else format_bytes(budget),
        headroom,
        format_bytes(growth["rate"], signed=True) if growth["trend"] == "leak" else "0 B",
        verdict_of(record),
        sparkline(kept_of(record)),
    )
