"""What CUDA's kernels allocate beside their results, and which of several kernels torch takes.

Two tables. `RULES`: by operator, below autograd, what is allocated before the results, or after them and given back at
the end of the kernel. `overridden`: operators for which CUDA goes another way than other devices do already above
autograd (dropout with a saved mask, scaled dot product attention, autocast), put in their place while a device is on.

Sources are named beside each rule: files of torch 2.13, and "traced" for what the host code of the published CUDA build
of 2.13 asks of the allocator. What libraries do inside (cuDNN's workspaces) no source tells: such rules say "model".
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memlint.virtual.device import Device

aten = torch.ops.aten


class Plan:
    """What one call of a kernel takes beside its results."""

    def __init__(
        self,
        device: Device,
        index: int,
        before: list[int] | None = None,
        after: Callable[[Any], list[int]] | None = None,
    ) -> None:
        self.device, self.index = device, index
        self._before, self._after = before or [], after
        self._taken: list[int] = []

    def begin(self) -> None:
        """Take what is taken before the results."""
        self._taken = [self.device.malloc(size, self.index) for size in self._before if size]

    def end(self, out: Any) -> None:
        """Take what is taken after the results, and give all of it back."""
        if self._after is not None:
            self._taken += [self.device.malloc(size, self.index) for size in self._after(out) if size]
        for address in reversed(self._taken):
            self.device.free(address, self.index)


Rule = Callable[[Device, int, Any, Any, Any], "Plan | None"]
RULES: dict[Any, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def take(function: Rule) -> Rule:
        for name in names:
            packet = getattr(aten, name, None)
            if packet is not None:
                RULES[packet] = function
        return function

    return take


def nbytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's elements."""
    return tensor.numel() * tensor.dtype.itemsize


# -- matrix products -----------------------------------------------------------------------------------------------


def cublas_workspace(capability: tuple[int, int], torch_version: str) -> int:
    """The workspace that torch gives cuBLAS for each thread and stream, in bytes.

    `parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp: 32 MiB on 9.0 (from 2.12 on also on other
    9.x, 10.x and 12.x), ":4096:2:16:8" elsewhere.
    """
    major, minor = (int(part) for part in torch_version.split(".")[:2])
    large = capability[0] in (9, 10, 12) if (major, minor) >= (2, 12) else capability == (9, 0)
    return 32 * 2**20 if large else 4096 * 1024 * 2 + 16 * 1024 * 8


class _Product(Plan):
    def end(self, out: Any) -> None:
        size = cublas_workspace(self.device.card.capability, torch.__version__)
        self.device.workspace("cublas", size, self.index)
        super().end(out)


def _dense(matrix: torch.Tensor) -> bool:
    """Whether cuBLAS takes a matrix as it is: one stride is 1 and the other spans it."""
    if matrix.dim() < 2:
        return True
    rows, columns = matrix.stride(-2), matrix.stride(-1)
    height, width = matrix.shape[-2], matrix.shape[-1]
    return (columns == 1 and rows >= max(1, width)) or (rows == 1 and columns >= max(1, height))


@_rule("mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "addbmm", "_addmm_activation", "dot")
def _product(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Plan:
    """Operands that are no dense matrix are copied first (`prepare_matrix_for_cublas`, ATen/native/cuda/Blas.cpp)."""
    operands = [arg for arg in args[-2:] if isinstance(arg, torch.Tensor)]
    copies = [nbytes(operand) for operand in operands if operand.dim() >= 2 and not _dense(operand)]
    return _Product(device, index, after=lambda out: copies)


# -- reductions ----------------------------------------------------------------------------------------------------


def reduction(
    out_elements: int, reduced: int, *, itemsize: int, contiguous: bool, multiprocessors: int, threads: int
) -> list[int]:
    """What a reduction over `reduced` elements to each of `out_elements` results takes: staging and semaphores.

    A port of `setReduceConfig` (ATen/native/cuda/Reduce.cuh), for one reduced run of elements that is either innermost
    (`contiguous`) or outermost. itemsize: bytes of what is accumulated.
    """
    if out_elements == 0 or reduced == 0:
        return []
    most_threads = 512
    output_vector = 1
    if contiguous:
        dim0, dim1 = reduced, out_elements
    else:
        dim0, dim1 = out_elements, reduced
        if dim0 >= 128 and dim0 % 4 == 0:
            output_vector = 4
            dim0 //= 4
    width_limit = most_threads // output_vector

    def power(number: int) -> int:
        return 1 << (max(1, number).bit_length() - 1)

    block_x = min(power(dim0), 32)
    block_y = min(power(dim1), width_limit // block_x)
    block_x = min(power(dim0), width_limit // block_y)
    threads_in_block = block_x * block_y
    step_input = block_x if contiguous else 1
    step_output = output_vector if contiguous else block_x * output_vector
    block_reduces_y = False
    per_thread = -(-reduced // step_input)
    if per_thread >= block_y * 16 or per_thread >= 256:
        block_reduces_y = True
        step_input *= block_y
    else:
        step_output *= block_y
    per_thread = -(-reduced // step_input)
    grid = -(-out_elements // step_output)
    if not block_reduces_y or per_thread < 256:
        return []
    blocks_per_sm = max(1, threads // threads_in_block)
    target = multiprocessors * blocks_per_sm
    if grid > target:
        return []
    ctas1 = -(-target // grid)
    ctas2 = -(-per_thread // 16)
    ctas3 = -(-per_thread // 256)
    ctas = max(min(ctas1, ctas2), ctas3)
    if ctas <= 1:
        return []
    return [itemsize * out_elements * ctas, 4 * grid]


def _sum_like(device: Device, func: Any, args: Any, kwargs: Any) -> list[int]:
    source = args[0]
    dims = args[1] if len(args) > 1 and not isinstance(args[1], (float, torch.dtype)) else kwargs.get("dim")
    if isinstance(dims, int):
        dims = [dims]
    every = list(range(source.dim()))
    reduced = sorted({d % max(1, source.dim()) for d in dims}) if dims else every
    kept = [d for d in every if d not in reduced]
    count = math.prod(source.shape[d] for d in reduced)
    outputs = math.prod(source.shape[d] for d in kept)
    strides = [source.stride(d) for d in reduced if source.shape[d] > 1]
    contiguous = not strides or min(strides) == 1
    return reduction(
        outputs,
        count,
        itemsize=max(4, source.dtype.itemsize),
        contiguous=contiguous,
        multiprocessors=device.card.multiprocessors,
        threads=device.card.threads_per_multiprocessor,
    )


@_rule("sum", "mean", "amax", "amin", "max", "min", "prod", "norm", "linalg_vector_norm", "any", "all", "var", "std")
def _reduction(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Plan | None:
    if not isinstance(args[0], torch.Tensor) or (len(args) > 1 and isinstance(args[1], torch.Tensor)):
        return None
    sizes = _sum_like(device, func, args, kwargs)
    return Plan(device, index, after=lambda out: sizes) if sizes else None


# -- convolutions --------------------------------------------------------------------------------------------------


@_rule("convolution", "cudnn_convolution", "convolution_backward")
def _convolution(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Plan | None:
    """A model of cuDNN's workspace, which nothing documents: room to transpose what goes in and what comes out.

    Its kernels for tensor cores take channels last. Of three models that were tried (nothing, the input, both) this one
    is nearest to the rows of benchmarks/virtual_accuracy.py. Grouped convolutions have kernels of torch's own.
    """
    backward = "backward" in func._schema.name
    source = args[1] if backward else args[0]
    groups = args[9] if backward else args[8]
    if groups != 1 or source.is_contiguous(memory_format=torch.channels_last):
        return None
    if backward:
        return Plan(device, index, after=lambda out: [nbytes(source) + nbytes(args[0])])
    return Plan(device, index, after=lambda out: [nbytes(source) + nbytes(out)])


# -- normalisation, embeddings, losses -----------------------------------------------------------------------------


@_rule("_softmax_backward_data")
def _softmax_backward(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Plan:
    """The product of gradient and output (traced)."""
    return Plan(device, index, after=lambda out: [nbytes(args[0])])


@_rule("native_layer_norm_backward")
def _layer_norm_backward(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Plan | None:
    """Partial sums for weight and bias of tall inputs (`LaunchGammaBetaBackwardCUDAKernel`, layer_norm_kernel.cu)."""
    columns = math.prod(args[2])
    rows = args[0].numel() // max(1, columns)
    if rows <= 65536 or columns / 32 >= device.card.multiprocessors / 2:
        return None
    partial = math.ceil(rows / 32) * columns * args[0].dtype.itemsize
    return Plan(device, index, after=lambda out: [partial, partial])


@_rule("native_group_norm")
def _group_norm(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Plan:
    """Two scale and shift tensors of one element a sample and channel (traced)."""
    size = args[3] * args[4] * args[0].dtype.itemsize
    return Plan(device, index, after=lambda out: [size, size])


@_rule("native_group_norm_backward")
def _group_norm_backward(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Plan:
    size = args[5] * args[6] * 4
    return Plan(device, index, after=lambda out: [size, size])


@_rule("embedding_dense_backward")
def _embedding_backward(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Plan | None:
    """Above 3072 indices they are sorted, and partial sums kept a segment (ATen/native/cuda/Embedding.cu; traced)."""
    gradient, indices, weights = args[0], args[1], args[2]
    count = indices.numel()
    if count <= 3072:
        return None
    keys = count * indices.dtype.itemsize
    sort = int(16.3 * count) if count > 8192 else int(17.4 * count)
    segments = -(-count // 10) + min(count, int(weights))
    partial = segments * gradient.shape[-1] * 4
    return Plan(device, index, before=[keys, keys, sort], after=lambda out: [partial])


# -- attention -----------------------------------------------------------------------------------------------------


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@_rule("_scaled_dot_product_flash_attention_backward")
def _flash_backward(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Plan:
    """Copies to [b, s, h, d], softmax_d, dq_accum: `mha_bwd` (transformers/cuda/flash_attn/flash_api.cpp; traced)."""
    gradient, query = args[0], args[1]
    batch, heads, length, width = query.shape
    rows = batch * heads * _up(length, 128)
    copies = 0 if query.transpose(1, 2).is_contiguous() else nbytes(gradient)
    return Plan(device, index, before=[copies, copies], after=lambda out: [rows * 4, rows * _up(width, 32) * 4])


@_rule("_scaled_dot_product_efficient_attention_backward")
def _efficient_backward(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Plan:
    """delta, and accumulators for dq (`AttentionBackwardKernel::Params::workspace_size`, mem_eff_attention; traced)."""
    gradient, query = args[0], args[1]
    batch, heads, length, width = query.shape
    full = query.dtype is torch.float32
    product = [gradient.numel() * 4] if full else []
    delta = [batch * heads * length * 4] * (2 if full else 1)
    padded = _up(length, 64 if width <= 64 else 128)
    work = 0 if width > 128 and not full else batch * heads * (padded * _up(width, 32) * 4 + 128 * max(1, width // 64))
    return Plan(device, index, after=lambda out: [*product, *delta, work])


@_rule("_scaled_dot_product_efficient_attention")
def _efficient(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Plan | None:
    """Wide heads in half precision are accumulated in float32 (traced)."""
    query, value = args[0], args[2]
    if value.shape[-1] <= 128 or query.dtype is torch.float32:
        return None
    return Plan(device, index, after=lambda out: [query.numel() // query.shape[-1] * value.shape[-1] * 4])


def attention_backend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    causal: bool,
    grouped: bool,
    capability: tuple[int, int],
) -> str:
    """The kernel that torch takes: "flash", "efficient", "cudnn" or "math".

    `select_sdp_backend` and the checks of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp in torch 2.13; the table
    was traced for capabilities 7.0 to 12.0.
    """
    half = query.dtype in (torch.float16, torch.bfloat16)
    width = query.shape[-1]
    if query.dim() != 4 or query.dtype is torch.float64 or 0 in query.shape or 0 in key.shape:
        return "math"
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    mask_grad = mask is not None and mask.requires_grad
    if half and capability in ((9, 0), (10, 0)) and dropout == 0 and not mask_grad and width % 8 == 0:
        if torch.backends.cuda.cudnn_sdp_enabled() and (width <= 128 or (capability == (9, 0) and width <= 256)):  # type: ignore[no-untyped-call]
            return "cudnn"
    flash = half and capability >= (8, 0) and mask is None and width <= 256 and value.shape[-1] == width
    if flash and causal and query.shape[-2] != key.shape[-2]:
        flash = False
    if flash and needs_grad and capability in ((8, 6), (8, 9), (12, 0)):
        flash = not (192 < width <= 224 or (width > 224 and dropout > 0))
    if flash and torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
        return "flash"
    aligned = width % (8 if query.dtype is not torch.float32 and capability >= (8, 0) else 4) == 0
    if query.dtype is torch.float32 and capability < (8, 0):
        aligned = True
    efficient = not grouped and aligned and not (query.dtype is torch.bfloat16 and capability < (8, 0))
    if query.dtype is torch.float16 and capability < (8, 0) and width % 8:
        efficient = False
    if efficient and torch.backends.cuda.mem_efficient_sdp_enabled():  # type: ignore[no-untyped-call]
        return "efficient"
    return "math"


def _attention(device: Device) -> Callable[..., Any]:
    def attend(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: Any = None,
        enable_gqa: bool = False,
    ) -> Any:
        if device.autocast.on:
            given = (query, key, value, attn_mask)
            (query, key, value, attn_mask), _ = device.autocast.arguments("scaled_dot_product_attention", given, {})
            with device.autocast.paused():
                return attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        grouped = enable_gqa and query.shape[-3] != key.shape[-3]
        kind = (
            attention_backend(query, key, value, attn_mask, dropout_p, is_causal, grouped, device.card.capability)
            if device.is_here(query)
            else "math"
        )
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        if kind == "flash":
            width = query.shape[-1]
            if width % 8:
                pad = 8 - width % 8
                query, key, value = (torch.nn.functional.pad(t, (0, pad)) for t in (query, key, value))
                scale = scale if scale is not None else 1 / math.sqrt(width)
            out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[
                0
            ]
            return out[..., :width] if width % 8 else out
        if attn_mask is not None and attn_mask.dtype is torch.bool and kind in ("efficient", "cudnn"):
            zero = torch.zeros((), dtype=query.dtype, device=attn_mask.device)
            low = torch.full((), -math.inf, dtype=query.dtype, device=attn_mask.device)
            attn_mask = torch.where(attn_mask, zero, low)
        if attn_mask is not None and kind in ("efficient", "cudnn"):
            unit = 8 if query.dtype is not torch.float32 else 4
            length = attn_mask.shape[-1]
            if kind == "efficient" and length % unit:
                attn_mask = torch.nn.functional.pad(attn_mask, (0, unit - length % unit))[..., :length]
            attn_mask = attn_mask.expand(*query.shape[:-1], length)
        if kind == "efficient":
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, attn_mask, grad, dropout_p, is_causal, scale=scale
            )[0]
        if kind == "cudnn":
            if grouped:
                repeats = query.shape[-3] // key.shape[-3]
                key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
            return aten._scaled_dot_product_cudnn_attention(
                query, key, value, attn_mask, grad, dropout_p, is_causal, False, scale=scale
            )[0]
        # half precision is computed in float32 there (ATen/native/transformers/attention.cpp)
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]

    return attend


# -- above autograd ------------------------------------------------------------------------------------------------


def _dropout(device: Device) -> Callable[..., Any]:
    op = aten.dropout.default

    def dropout(input: Any, p: float, train: bool) -> Any:
        """Fused, with a bool mask saved (`is_fused_kernel_acceptable`, ATen/native/Dropout.cpp)."""
        if train and 0 < p < 1 and input.numel() and device.is_here(input):
            return torch.native_dropout(input, p, train)[0]
        return op.decompose(input, p, train)

    return dropout


@contextlib.contextmanager
def overridden(device: Device) -> Iterator[None]:
    """CUDA's way of the operators that other devices compose differently, until the end of the block."""
    from memlint.virtual import autocast as lists

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]

    def put(name: str, function: Callable[..., Any]) -> None:
        library.impl(name, function, "AutogradMeta")  # type: ignore[no-untyped-call]

    def cast(name: str, *, lower: bool, place: int | None = None) -> None:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(aten, packet), overload or "default")

        def run(*args: Any, **kwargs: Any) -> Any:
            if device.autocast.on:
                given = place is not None and ((len(args) > place and args[place] is not None) or kwargs.get("dtype"))
                if not given:
                    as_ = packet if lower else _FP32_AS.get(packet, packet)
                    args, kwargs = device.autocast.arguments(as_, args, kwargs)
                with device.autocast.paused():
                    return op.decompose(*args, **kwargs)
            return op.decompose(*args, **kwargs)

        put(name, run)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        put("dropout", _dropout(device))
        put("scaled_dot_product_attention", _attention(device))
        for name in lists.COMPOSITE_LOWER:
            cast(name.removesuffix(".default"), lower=True)
        for name in lists.COMPOSITE_FP32:
            cast(name, lower=False)
        for name in lists.COMPOSITE_BY_DTYPE:
            cast(name, lower=False, place=2)
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


_FP32_AS = {"nll_loss_nd": "nll_loss"}
