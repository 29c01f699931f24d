"""memlint finds the code that makes PyTorch training run out of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memlint.runtime.budget import Budget as Budget
    from memlint.runtime.budget import memory_budget as memory_budget
    from memlint.runtime.fit import fit as fit
    from memlint.runtime.monitor import MemoryMonitor as MemoryMonitor
    from memlint.virtual.device import VirtualCuda as virtual_cuda  # noqa: F401, N813

__version__ = "0.1.0"

_RUNTIME = {
    "Budget": "memlint.runtime.budget",
    "MemoryMonitor": "memlint.runtime.monitor",
    "fit": "memlint.runtime.fit",
    "memory_budget": "memlint.runtime.budget",
    "virtual_cuda": "memlint.virtual.device:VirtualCuda",
}


def __getattr__(name: str) -> object:
    """The runtime half is loaded when it is asked for: the linter does without it, and without torch."""
    if name not in _RUNTIME:
        raise AttributeError(f"module 'memlint' has no attribute {name!r}")
    import importlib

    module, _, attribute = _RUNTIME[name].partition(":")
    return getattr(importlib.import_module(module), attribute or name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_RUNTIME])
