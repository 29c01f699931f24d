"""An outcome as plain data: what travels from a worker to the controller, and what the JSON report holds.

schema.json beside this file documents it. All sizes in bytes, growth and cycles in bytes a step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import memlint
from memlint.runtime.sites import Site, shown_path
from memlint.runtime.verdict import Outcome

SCHEMA_VERSION = 1


def schema() -> dict[str, Any]:
    """The JSON schema of a report."""
    loaded: dict[str, Any] = json.loads((Path(__file__).parent / "schema.json").read_text(encoding="utf-8"))
    return loaded


def report_of(tests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The whole report over the records of tests."""
    return {
        "version": SCHEMA_VERSION,
        "tool": {"name": "memlint", "version": memlint.__version__},
        "tests": list(tests),
    }


def json_of(tests: Sequence[Mapping[str, Any]]) -> str:
    """The text of a report file."""
    return json.dumps(report_of(tests), indent=2) + "\n"


def record_of(name: str, outcome: Outcome) -> dict[str, Any]:
    """One outcome as data that JSON can carry."""
    series = outcome.series
    return {
        "test": name,
        "passed": outcome.passed,
        "device": outcome.device,
        "card": outcome.card,
        "torch": outcome.torch,
        "budget": {
            "peak": outcome.budget.peak,
            "reserved": outcome.budget.reserved,
            "growth": outcome.budget.growth,
            "cycles": outcome.budget.cycles,
        },
        "peak": series.peak,
        "reserved": series.reserved_peak,
        "growth": {
            "trend": outcome.growth.trend.value,
            "rate": outcome.growth.rate,
            "total": outcome.growth.total,
            "period": outcome.growth.period,
        },
        "verdicts": [
            {
                "limit": verdict.limit,
                "passed": verdict.passed,
                "observed": verdict.observed,
                "allowed": verdict.allowed,
                "message": verdict.message,
            }
            for verdict in outcome.verdicts
        ],
        "steps": [
            {
                "index": step.index,
                "measured": step.index >= series.warmup,
                "seconds": step.seconds,
                "allocated_before": step.allocated_before,
                "allocated_after": step.allocated_after,
                "collected": step.collected,
                "peak": step.peak,
                "reserved_peak": step.reserved_peak,
            }
            for step in series.records
        ],
        "traced_steps": outcome.traced.steps,
        "leaks": [_leak(leak) for leak in outcome.traced.leaks],
        "cycles": [
            {"path": cycle.path, "bytes_per_step": cycle.bytes_per_step, "site": site_of(cycle.site)}
            for cycle in outcome.traced.cycles
        ],
        "peak_breakdown": None if outcome.traced.peak is None else _breakdown(outcome.traced.peak),
        "leftover": outcome.leftover,
        "details": outcome.details,
        "notes": list(outcome.notes),
    }


def site_of(site: Site | None) -> dict[str, Any] | None:
    """A line of source as data; the path as a person would write it."""
    if site is None:
        return None
    return {"path": shown_path(site.path), "line": site.line, "function": site.function, "source": site.source}


def _leak(leak: Any) -> dict[str, Any]:
    holder = leak.holder
    return {
        "site": site_of(leak.site),
        "caller": site_of(leak.caller),
        "holder": None
        if holder is None
        else {
            "path": holder.path,
            "kinds": sorted(holder.kinds),
            "container": holder.container,
            "length": holder.length,
            "bound": holder.bound,
        },
        "bytes_per_step": leak.bytes_per_step,
        "tensors_per_step": leak.tensors_per_step,
        "bytes": leak.nbytes,
        "through": leak.through,
        "pinned_by_view": leak.pinned_by_view,
        "rule": leak.rule,
        "groups": [_group(group) for group in leak.groups],
    }


def _breakdown(peak: Any) -> dict[str, Any]:
    return {
        "bytes": peak.nbytes,
        "phase": peak.phase,
        "categories": dict(peak.categories),
        "groups": [_group(group) for group in peak.groups],
    }


def _group(group: Any) -> dict[str, Any]:
    return {
        "site": site_of(group.site),
        "caller": site_of(group.caller),
        "category": group.category,
        "bytes": group.nbytes,
        "tensors": group.count,
        "shapes": [{"dtype": dtype, "shape": list(shape), "count": count} for dtype, shape, count in group.shapes],
    }
