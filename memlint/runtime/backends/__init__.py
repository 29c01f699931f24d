"""What a device says about its memory. `find(name)` is the way in."""

from __future__ import annotations

from memlint.errors import BackendUnavailable
from memlint.runtime.backends.base import Backend


def find(device: str, fallback: str = "cpu", light: bool = False) -> Backend:
    """The backend for `device`; "auto" takes an accelerator if there is one and `fallback` if not.

    A `light` one costs next to nothing a step: it waits for no kernels, and on the CPU reads what malloc has given out.

    "virtual:t4" is a card that is not there (memlint.virtual).

    Raises BackendUnavailable, with the reason, where torch is missing or the device is not there.
    """
    try:
        import torch
    except ImportError:
        raise BackendUnavailable("torch is not installed") from None
    if device == "auto":
        device = _accelerator(torch) or fallback
    kind, _, index = device.partition(":")
    if kind == "cpu" or device == "auto":
        from memlint.runtime.backends.cpu import CpuBackend, HeapBackend

        return HeapBackend() if light else CpuBackend()
    if kind == "virtual":
        from memlint.runtime.backends.virtual import DEFAULT_CARD, VirtualBackend

        return VirtualBackend(index or DEFAULT_CARD)
    from memlint.runtime.backends import cuda

    devices = [int(index)] if index.isdigit() else None
    backend = cuda.CountersBackend(kind, cuda.statistics_of(kind), devices, waits=not light)
    reason = backend.unavailable()
    if reason is not None:
        raise BackendUnavailable(reason)
    return backend


def virtual_card(device: str, fallback: str) -> str | None:
    """The card that `find` would put up for these; None where it would take something else, or torch is missing."""
    try:
        import torch
    except ImportError:
        return None
    from memlint.runtime.backends.virtual import DEFAULT_CARD

    if device == "auto":
        device = _accelerator(torch) or fallback
    kind, _, card = device.partition(":")
    return (card or DEFAULT_CARD) if kind == "virtual" else None


def _accelerator(torch: object) -> str | None:
    cuda_is_there: bool = torch.cuda.is_available()  # type: ignore[attr-defined]
    if cuda_is_there:
        return "cuda"
    accelerator = getattr(torch, "accelerator", None)  # torch 2.6 and later
    if accelerator is None or not accelerator.is_available():
        return None
    from memlint.runtime.backends import cuda

    kind = str(accelerator.current_accelerator().type)
    return kind if cuda.statistics_of(kind).unavailable() is None else None
