"""What elementwise operators give on tensors without data, without asking torch's reference implementations.

Those are written in Python and take most of the time of a step. Taken here are only calls whose result is plain:
tensors of one shape, dtype and layout, and numbers beside them. All else goes the long way, errors too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

#: that a call is none of these
NONE = object()

#: operators on floating point whose result is like their first argument, by name
_ALIKE = frozenset(
    f"aten::{name}"
    for name in """
    add sub mul div relu neg sqrt rsqrt exp log tanh sigmoid reciprocal abs square gelu silu hardswish hardsigmoid
    leaky_relu elu hardtanh clamp clamp_min clamp_max pow addcmul addcdiv threshold_backward gelu_backward silu_backward
    tanh_backward sigmoid_backward leaky_relu_backward hardtanh_backward hardswish_backward elu_backward
    """.split()
)
_IN_PLACE = frozenset(
    f"aten::{name}_"
    for name in """
    add sub mul div relu neg sqrt rsqrt exp tanh sigmoid reciprocal abs square silu hardswish hardsigmoid leaky_relu
    elu hardtanh clamp clamp_min clamp_max pow addcmul addcdiv zero fill lerp
    """.split()
)
_EACH = frozenset(
    f"aten::_foreach_{name}"
    for name in "add sub mul div neg sqrt rsqrt exp reciprocal abs pow addcmul addcdiv lerp".split()
)
_EACH_IN_PLACE = frozenset(
    f"aten::_foreach_{name}_"
    for name in "add sub mul div neg sqrt rsqrt exp reciprocal abs pow addcmul addcdiv lerp zero".split()
)


def result(func: Any, args: Any, kwargs: Any) -> Any:
    """What `func` gives, or `NONE` where it has to be asked."""
    name = func._schema.name
    if name in _ALIKE or name in _IN_PLACE:
        first = args[0]
        if name in _IN_PLACE and len(args) == 2 and not kwargs and _counts(first, args[1]):
            return first
        if not _plain(first) or not all(_beside(arg, first) for arg in (*args[1:], *kwargs.values())):
            return NONE
        return first if name in _IN_PLACE else torch.empty_like(first)
    if name in _EACH or name in _EACH_IN_PLACE:
        firsts = args[0]
        if not all(map(_plain, firsts)):
            return NONE
        for given in (*args[1:], *kwargs.values()):
            if isinstance(given, (list, tuple)):
                if len(given) != len(firsts) or not all(map(_beside, given, firsts)):
                    return NONE
            elif not isinstance(given, (int, float)):
                return NONE
        return None if name in _EACH_IN_PLACE else list(_likes(firsts))
    return NONE


def _counts(first: Any, given: Any) -> bool:
    """Whether a whole number is added to a tensor of whole numbers: batches that were seen, steps."""
    if not isinstance(first, torch.Tensor) or not first.is_meta or first.dtype.is_floating_point:
        return False
    if isinstance(given, torch.Tensor):
        return not given.dim() and not given.dtype.is_floating_point and first.dtype is torch.int64
    return isinstance(given, int) and first.dtype is torch.int64


def _likes(tensors: Any) -> Iterator[torch.Tensor]:
    for tensor in tensors:
        yield torch.empty_like(tensor)


def _plain(tensor: Any) -> bool:
    """Whether a result like this tensor is a tensor like it."""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return False
    if not tensor.is_meta or not tensor.dtype.is_floating_point or tensor.layout is not torch.strided:
        return False
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return tensor.is_contiguous() or (last is not None and tensor.is_contiguous(memory_format=last))


def _beside(given: Any, first: torch.Tensor) -> bool:
    """Whether an argument changes nothing about the result: a number, a flag, or a tensor just like the first."""
    if not isinstance(given, torch.Tensor):
        return given is None or isinstance(given, (int, float, str))
    return (
        given.shape == first.shape and given.dtype is first.dtype and given.stride() == first.stride() and given.is_meta
    )
