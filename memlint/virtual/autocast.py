"""Autocast as CUDA does it, for tensors that have no autocast key of their own.

The lists are those of aten/src/ATen/autocast_mode.h in torch 2.13 (AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32,
AT_FORALL_FP32_SET_OPT_DTYPE, AT_FORALL_PROMOTE), by the names under which Python calls them; docs/source/amp.rst names
the same. Casts of parameters are kept until the outermost autocast ends, as `cached_cast` keeps them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

LOWER = frozenset(
    """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc convolution prelu addmm addmv addr
    matmul __matmul__ __rmatmul__ einsum mm mv linear addbmm baddbmm bmm chain_matmul multi_dot gru_cell lstm_cell
    rnn_tanh_cell rnn_relu_cell _thnn_fused_lstm_cell _thnn_fused_gru_cell scaled_dot_product_attention
    """.split()
)
FP32 = frozenset(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__ softplus
    layer_norm group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss
    nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist
    pdist cdist renorm logsumexp norm
    """.split()
)
#: these take a dtype: they compute in float32 unless it is given
FP32_BY_DTYPE = frozenset("prod softmax log_softmax cumprod cumsum linalg_vector_norm linalg_matrix_norm sum".split())
PROMOTE = frozenset(
    """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sample index_put tensordot scatter_add cat stack
    """.split()
)
#: composite operators, which code in C++ may also call: they are caught below Python
COMPOSITE_LOWER = ("linear", "conv1d", "conv2d.default", "conv3d", "matmul")
COMPOSITE_FP32 = ("layer_norm", "group_norm", "nll_loss_nd", "nll_loss", "nll_loss2d")
COMPOSITE_BY_DTYPE = ("softmax.int", "log_softmax.int")


CAST = LOWER | FP32 | FP32_BY_DTYPE | PROMOTE


class Autocast:
    """Casts the arguments of operators while `torch.autocast("cuda")` is on.

    is_here: whether a tensor is on the device.
    """

    def __init__(self, is_here: Callable[[torch.Tensor], bool]) -> None:
        self._is_here = is_here
        self._cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._paused = 0
        self._seen = False

    def look(self) -> None:
        """Note whether autocast is on. Within dispatch torch says no, and in inference mode casts are made there."""
        self._seen = torch.is_autocast_enabled("cuda")

    @property
    def on(self) -> bool:
        """Whether autocast is on for CUDA in this thread."""
        if self._paused:
            return False
        return torch.is_autocast_enabled("cuda") or (self._seen and torch.is_inference_mode_enabled())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within an operator that was cast no other is: the autocast key is excluded then."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def forget(self) -> None:
        """The outermost autocast ended."""
        self._cache.clear()

    def arguments(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of the operator `name` as autocast hands them on."""
        if name in LOWER:
            dtype = torch.get_autocast_dtype("cuda")
        elif name in FP32 or (name in FP32_BY_DTYPE and kwargs.get("dtype") is None):
            dtype = torch.float32
        elif name in PROMOTE:
            dtypes = {t.dtype for t in _tensors((args, tuple(kwargs.values()))) if self._eligible(t)}
            if len(dtypes) < 2:
                return args, kwargs
            dtype = torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("cuda")
        else:
            return args, kwargs
        # C++ evaluates the arguments of the call from the last to the first
        new_kwargs = {key: self.cast(value, dtype) for key, value in reversed(list(kwargs.items()))}
        new_args = [self.cast(value, dtype) for value in reversed(args)]
        return tuple(reversed(new_args)), new_kwargs

    def _eligible(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype.is_floating_point and tensor.dtype is not torch.float64 and self._is_here(tensor)

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """A tensor, or those of a list, as `cached_cast` makes it; all else as it is."""
        if isinstance(value, torch.Tensor):
            if not self._eligible(value) or value.dtype is dtype:
                return value
            cached = value.is_leaf and value.requires_grad and value.dtype is torch.float32 and dtype is not value.dtype
            if not cached or dtype is torch.float32 or not torch.is_autocast_cache_enabled():
                return value.to(dtype)
            known = self._cache.get(id(value))
            if known is not None and known[0] is value and known[1].dtype is dtype:
                return known[1]
            made = value.to(dtype)
            self._cache[id(value)] = (value, made)
            return made
        if isinstance(value, (list, tuple)):
            made_list = [self.cast(item, dtype) for item in value]
            return type(value)(made_list) if type(value) in (list, tuple) else value
        return value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
