"""memlint finds the code that makes PyTorch training run out of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memlint.runtime.budget import Budget as Budget
    from memlint.runtime.budget import memory_budget as memory_budget
    from memlint.runtime.monitor import MemoryMonitor as MemoryMonitor

__version__ = "0.1.0"

_RUNTIME = {
    "Budget": "memlint.runtime.budget",
    "MemoryMonitor": "memlint.runtime.monitor",
    "memory_budget": "memlint.runtime.budget",
}


def __getattr__(name: str) -> object:
    """The runtime half is loaded when it is asked for: the linter does without it, and without torch."""
    if name not in _RUNTIME:
        raise AttributeError(f"module 'memlint' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_RUNTIME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_RUNTIME])
