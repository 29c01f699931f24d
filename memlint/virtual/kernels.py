"""What CUDA's kernels allocate beside their results, and which of several kernels torch takes.

Three tables. `RULES`: by operator, below autograd, what is allocated before the results, or after them and given back
at the end of the kernel. What `_whole` marks: operators whose results come in another order, or are others, than on
other devices. `overridden`: operators for which CUDA goes another way already above autograd (dropout with a saved
mask, scaled dot product attention, autocast), put in their place while a device is on.

Sources are named beside each rule: files of torch 2.13, and "traced" for what the host code of the published CUDA build
of 2.13 asks of the allocator. What libraries do inside (cuDNN's workspaces) no source tells: such rules say "model".
"""

from __future__ import annotations

import contextlib
import enum
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_map_only

from memlint.virtual import cards
from memlint.virtual import device as virtual
from memlint.virtual.device import CPU, Device, in_backward

aten = torch.ops.aten


#: bytes taken until the kernel ends; or, in a tuple, taken and given back before the next
Sizes = Sequence["int | tuple[int, ...]"]


class Plan:
    """What one call of a kernel takes beside its results."""

    def __init__(
        self,
        device: Device,
        index: int,
        before: Sizes = (),
        after: Callable[[Any], Sizes] | None = None,
    ) -> None:
        self.device, self.index = device, index
        self._before, self._after = before, after
        self._taken: list[int] = []

    def begin(self) -> None:
        """Take what is taken before the results."""
        self._taken = []
        self._take(self._before)

    def end(self, out: Any) -> None:
        """Take what is taken after the results, and give all of it back."""
        if self._after is not None:
            self._take(self._after(out))
        for address in reversed(self._taken):
            self.device.free(address, self.index)

    def _take(self, sizes: Sizes) -> None:
        for size in sizes:
            if isinstance(size, tuple):
                self.device.temporary(list(size), self.index)
            elif size:
                self._taken.append(self.device.malloc(size, self.index))


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


Whole = Callable[[Device, int, Any, Any, Any], Any]


def _plain(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on the device without anything beside its results."""
    out = func(*args, **kwargs)
    tensors: list[torch.Tensor] = []
    virtual._collect(out, tensors)
    for tensor in tensors:
        device.keep(tensor, index)
    return out


def _whole(*names: str) -> Callable[[Whole], Whole]:
    """Put `function` in the place of operators ("packet" or "packet.overload") on the device."""

    def take(function: Whole) -> Whole:
        def run(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
            tensors: list[torch.Tensor] = []
            virtual._collect(args, tensors)
            if index >= 0 and len({device.index_of(tensor) for tensor in tensors if tensor.dim()}) > 1:
                virtual._refuse_mixed(device, tensors)
            if any(not tensor.is_meta for tensor in tensors):
                args, kwargs = tree_map_only(torch.Tensor, virtual._without_data, (args, kwargs))
            del tensors
            return (function if index >= 0 else _plain)(device, index, func, args, kwargs)

        for name in names:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(aten, packet, None), overload or "default", None)
            if op is not None:
                virtual._SPECIAL[op] = run
        return function

    return take


def nbytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's elements."""
    return tensor.numel() * tensor.dtype.itemsize


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _channels_last(tensor: torch.Tensor) -> bool:
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return last is not None and tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous()


def _sort_workspace(count: int, key: int, value: int, bits: int) -> int:
    """Workspace of cub's radix sort of pairs: second buffers, histograms and one look-back state a tile (traced).

    What one block of 256 threads holds is sorted without (`DispatchRadixSort::InvokeSingleTile`), and one byte asked.
    """
    if count <= 256 * max(1, 19 * 4 // max(key, value)):
        return 1
    passes = _ceil(bits, 8)
    buffers = _up(count * key, 256) + _up(count * value, 256) if passes > 1 else 0
    return buffers + passes * 2048 + 512 + 1024 * _ceil(count, 2816) - 1


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


class _Dim:
    """One dimension of a reduction as TensorIterator has it: its size, and the input's and the result's strides."""

    __slots__ = ("inner", "outer", "size")

    def __init__(self, size: int, inner: int, outer: int) -> None:
        self.size, self.inner, self.outer = size, inner, outer


def _iterated(shape: Sequence[int], strides: Sequence[int], reduced: Sequence[int]) -> list[_Dim]:
    """The dimensions of a reduction, fastest first, those that are reduced before the others, joined where they can be.

    `reorder_dimensions` and `coalesce_dimensions` of aten/src/ATen/TensorIterator.cpp; the result is contiguous.
    """
    dims: list[_Dim] = []
    outer = 1
    for dim in reversed(range(len(shape))):
        dims.append(_Dim(shape[dim], strides[dim], 0 if dim in reduced else outer))
        outer *= 1 if dim in reduced else shape[dim]

    def swap(first: _Dim, second: _Dim) -> int:
        if (first.outer == 0) != (second.outer == 0):
            return 1 if second.outer == 0 else -1
        for one, other in ((first.outer, second.outer), (first.inner, second.inner)):
            if one and other:
                if one != other:
                    return -1 if one < other else 1
                if first.size > second.size:
                    return 1
        return 0

    for place in range(1, len(dims)):
        at = place
        for before in reversed(range(place)):
            order = swap(dims[before], dims[at])
            if order > 0:
                dims[before], dims[at] = dims[at], dims[before]
                at = before
            elif order < 0:
                break
    joined: list[_Dim] = []
    for each in dims:
        last = joined[-1] if joined else None
        if last is not None and (
            1 in (last.size, each.size)
            or (last.size * last.inner == each.inner and last.size * last.outer == each.outer)
        ):
            if last.size == 1:
                last.inner, last.outer = each.inner, each.outer
            last.size *= each.size
        else:
            joined.append(each)
    return joined


def reduction(
    shape: Sequence[int],
    strides: Sequence[int],
    reduced: Sequence[int],
    *,
    itemsize: int,
    multiprocessors: int,
    threads: int,
    vector: int = 4,
    most_threads: int = 512,
    offset: int = 0,
) -> list[int]:
    """What a reduction takes where several blocks work on one result: staging and semaphores, in bytes.

    A port of `setReduceConfig` and `global_memory_size` (ATen/native/cuda/Reduce.cuh). itemsize: bytes of what is
    accumulated. vector: how many elements a thread loads at once. offset: where the input starts, in elements.
    """
    if 0 in shape:
        return []
    dims = _iterated(shape, strides, reduced)
    over = sum(1 for dim in dims if dim.outer == 0)
    outputs = math.prod(dim.size for dim in dims if dim.outer)
    inputs = math.prod(dim.size for dim in dims) // outputs
    fastest = not dims or over == len(dims) or (over > 0 and dims[0].inner < dims[over].inner)
    stride = 1 if not dims else dims[0 if fastest else over].inner
    dim0, dim1 = (inputs, outputs) if fastest else (outputs, inputs)
    per_output = 1
    if stride == 1:
        if fastest and dim0 >= 128 and over == 1:
            dim0 //= vector
        elif not fastest:
            per_output = 4
            for number in (offset, dims[over].size, *(dim.inner for at, dim in enumerate(dims) if at != over)):
                while number % per_output:
                    per_output //= 2
            dim0 //= per_output

    def power(number: int) -> int:
        return 1 << (max(1, number).bit_length() - 1)

    limit = most_threads // per_output
    power0, power1 = min(power(dim0), limit), min(power(dim1), limit)
    width = min(power0, 32)
    height = min(power1, limit // width)
    width = min(power0, limit // height)
    step_input, step_output = (width, 1) if fastest else (1, width)
    across_warps = _ceil(inputs, step_input) >= min(height * 16, 256)
    if across_warps:
        step_input *= height
    else:
        step_output *= height
    per_thread = _ceil(inputs, step_input)
    grid = _ceil(outputs // per_output, step_output)
    target = multiprocessors * (threads // (width * height))
    if not across_warps or per_thread < 256 or grid > target:
        return []
    blocks = max(min(_ceil(target, grid), _ceil(per_thread, 16)), _ceil(per_thread, 256))
    if blocks <= 1:
        return []
    staging = itemsize * outputs * blocks
    return [staging if fastest else staging * width * per_output, 4 * grid]


#: by operator: bytes that are accumulated for one result, where that is not the input's or four, and the vector width
_PAIRS = frozenset(("var", "std", "var_mean", "std_mean", "argmax", "argmin"))
_NARROW = frozenset(("amax", "amin", "max", "min"))
_MOMENTS = frozenset(("var", "std", "var_mean", "std_mean"))
_WIDE_LOADS = frozenset(("sum", "mean", "norm", "linalg_vector_norm", "nansum"))


def _staging(device: Device, tensor: torch.Tensor, dims: Any, name: str, dtype: torch.dtype | None = None) -> list[int]:
    """What the reduction `name` of a tensor over `dims` (None or none: all) takes."""
    given = [dims] if isinstance(dims, int) else list(dims or [])
    reduced = sorted({dim % max(1, tensor.dim()) for dim in given}) if given else list(range(tensor.dim()))
    dtype = dtype or tensor.dtype
    itemsize, vector = max(4, dtype.itemsize), 4
    if name in _PAIRS or (name in ("max", "min") and given):
        itemsize = 32 if dtype is torch.float64 and name in _MOMENTS else 16
    elif name in _NARROW:
        itemsize = dtype.itemsize
    elif name in ("any", "all"):
        itemsize = 1
    if name in _MOMENTS:
        vector = 2
    elif name in _WIDE_LOADS and tensor.dtype.itemsize == 2:
        vector = 8
    return reduction(
        tensor.shape,
        tensor.stride(),
        reduced,
        itemsize=itemsize,
        vector=vector,
        most_threads=256 if dtype is torch.complex128 else 512,
        multiprocessors=device.card.multiprocessors,
        threads=device.card.threads_per_multiprocessor,
        offset=int(tensor.storage_offset()),
    )


@_rule(
    *("sum", "nansum", "mean", "amax", "amin", "max", "min", "prod", "norm", "linalg_vector_norm", "any", "all"),
    *("var", "std", "var_mean", "std_mean", "argmax", "argmin"),
)
def _reduction(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Plan | None:
    """Staging between blocks; and what sums of bools and small integers convert first (`make_reduction`)."""
    source = args[0]
    if not isinstance(source, torch.Tensor) or (len(args) > 1 and isinstance(args[1], torch.Tensor)):
        return None
    name = func._schema.name.removeprefix("aten::")
    named = next((at for at, each in enumerate(func._schema.arguments) if each.name == "dim"), None)
    dims = kwargs.get("dim", args[named] if named is not None and named < len(args) else None)
    asked = kwargs.get("dtype")
    if source.numel() == 0:
        return None
    converted: list[int] = []
    dtype = source.dtype
    if name in ("sum", "prod", "nansum") and not dtype.is_floating_point and not dtype.is_complex:
        dtype = asked or torch.int64
    elif asked is not None and not (dtype.itemsize == 2 and asked is torch.float32):
        dtype = asked
    if dtype is not source.dtype:
        converted = [source.numel() * dtype.itemsize]
    sizes = converted + _staging(device, source, dims, name, dtype)
    return Plan(device, index, after=lambda out: sizes) if sizes else None


@_rule("logsumexp")
def _logsumexp(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Plan:
    """The exponentials beside maxima of the result's size (`logsumexp_out_impl`, ATen/native/ReduceOps.cpp; traced)."""

    def after(out: Any) -> Sizes:
        return [nbytes(out), (nbytes(out), out.numel()), nbytes(args[0])]

    return Plan(device, index, after=after)


@_rule("_foreach_norm")
def _norms(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Plan:
    """One float a tensor and chunk of 65,536 elements (`foreach_tensor_norm_cuda`, ForeachReduceOp.cu; traced)."""
    chunks = max((_ceil(tensor.numel(), 65536) for tensor in args[0]), default=0)
    return Plan(device, index, before=[len(args[0]) * chunks * 4])


# -- convolutions --------------------------------------------------------------------------------------------------


class Pass(enum.Enum):
    """The three kernels of a convolution."""

    FORWARD = "forward"
    INPUT = "gradient of the input"
    WEIGHT = "gradient of the weight"


#: inputs or outputs of a convolution that has a kernel of its own, as that of an image's colours
_FIRST_CHANNELS = 4
_SPLIT_K = 4 * 2**20


def convolution_workspace(
    kernel: Pass, source: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, strided: bool
) -> int:
    """A model of the workspace of one kernel of cuDNN, in bytes; nothing documents it.

    Kernels for tensor cores take channels last, so that with other layouts the workspace has room for transposed
    copies: of input and weight in the forward pass, of input, weight and output in both backward kernels. 1x1 windows
    without stride take some MiB to split sums. Nothing is said of grouped convolutions, first layers and channels last.

    The rule was read off a record of one training step of a ResNet-101 (batch 300, 3x86x86, float32 with TF32, cuDNN 8)
    in a notebook of the public repository Stone-ResearchLife/xMem (plot/Figures in Paper.ipynb at 235b5ab): of its 58
    workspaces for larger windows and strides that were read, it gives 51 within 2 %. There 1x1 windows took copies,
    too, for the gradient of the weight. With cuDNN 9 they do not seem to: of seven variants this one was chosen by the
    55 processes measured there with torch 2.6 (docs/virtual.md).
    """
    if _channels_last(source) or int(weight.shape[1]) not in (int(source.shape[1]), int(out.shape[1])):
        return 0
    if min(int(weight.shape[0]), int(weight.shape[1])) <= _FIRST_CHANNELS:
        return 0
    if weight[0, 0].numel() == 1 and not strided:
        return _SPLIT_K
    return nbytes(source) + nbytes(weight) + (0 if kernel is Pass.FORWARD else nbytes(out))


def _native_depthwise(source: torch.Tensor, weight: torch.Tensor, groups: int, transposed: bool) -> bool:
    """Whether torch's own kernels take it (`use_cudnn_depthwise`, aten/src/ATen/native/Convolution.cpp; traced)."""
    if transposed or source.dim() != 4 or groups != source.shape[1] or groups == 1:
        return False
    if _channels_last(source) or _channels_last(weight):
        return False
    return source.dtype is not torch.float16 or weight.shape[-1] not in (1, 3, 5)


def _weight_copy(source: torch.Tensor, weight: torch.Tensor) -> int:
    """cuDNN wants the weight in the memory format of the input, and the other way round."""
    last = torch.channels_last if source.dim() == 4 else torch.channels_last_3d
    return nbytes(weight) if _channels_last(source) and not weight.is_contiguous(memory_format=last) else 0


def _without_cudnn(device: Device, source: torch.Tensor, groups: int, transposed: bool) -> bool:
    """cuDNN convolves in bfloat16 from capability 8.0 on (`ConvParams::use_cudnn`); before, torch unfolds the input."""
    if source.dtype is not torch.bfloat16 or device.card.capability >= (8, 0):
        return False
    return source.dim() == 4 and not transposed and groups != source.shape[1]


def _form(source: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """The memory format that cuDNN works in (`cudnn_conv_suggest_memory_format`)."""
    if _channels_last(source) or _channels_last(weight):
        return torch.channels_last if source.dim() == 4 else torch.channels_last_3d
    return torch.contiguous_format


def _unfolded(device: Device, index: int, args: Any, out: torch.Tensor) -> None:
    """One unfolded image at a time: `slow_conv2d_forward`, ATen/native/cuda/ConvolutionMM2d.cu."""
    source, weight, groups = args[0], args[1], args[8]
    columns = int(weight[0].numel() * math.prod(out.shape[2:])) * out.dtype.itemsize
    if tuple(weight.shape[2:]) == (1, 1) and set(args[3]) == {1} and set(args[4]) == {0}:
        columns = 0
    copies = [device.malloc(nbytes(each), index) for each in (source, weight) if not each.is_contiguous()]
    parts: list[int] = []
    for _ in range(groups if groups > 1 else 0):
        part = device.malloc(nbytes(source) // groups, index)
        parts.append(device.malloc(nbytes(out) // groups, index))
        device.temporary([columns], index)
        device.free(part, index)
    device.keep(out, index)
    for address in parts:
        device.free(address, index)
    if groups == 1:
        device.temporary([columns], index)
    for address in reversed(copies):
        device.free(address, index)


def _unfolded_backward(device: Device, index: int, args: Any, out: Any) -> None:
    """As `_unfolded`; the parts of grouped ones are joined at the end."""
    gradient, source, weight, groups, wanted = args[0], args[1], args[2], args[9], args[10]
    columns = int(weight[0].numel() * math.prod(gradient.shape[2:])) * gradient.dtype.itemsize
    copies = [device.malloc(nbytes(each), index) for each in (source, weight) if not each.is_contiguous()]
    first, *others = [out[place] if wanted[place] else None for place in (0, 2, 1)]
    parts: list[int] = []
    if groups == 1:
        if first is not None:
            device.keep(first, index)
            parts.append(device.malloc(columns, index))
    else:
        for _ in range(groups):
            inputs = [device.malloc(nbytes(each) // groups, index) for each in (source, gradient)]
            parts += [device.malloc(nbytes(first) // groups, index)] if first is not None else []
            unfolded = device.malloc(columns, index)
            parts += [device.malloc(nbytes(each) // groups, index) for each in others if each is not None]
            for address in (unfolded, *reversed(inputs)):
                device.free(address, index)
        if first is not None:
            device.keep(first, index)
        others.reverse()
    for tensor in others:
        if tensor is not None:
            device.keep(tensor, index)
    if first is None and groups == 1:
        parts.append(device.malloc(columns, index))
    for address in (*parts, *reversed(copies)):
        device.free(address, index)


@_whole("convolution")
def _convolution(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    """The result, and then what cuDNN works in."""
    source, weight, groups, transposed = args[0], args[1], args[8], bool(args[6])
    out = func(*args, **kwargs)
    if _without_cudnn(device, source, groups, transposed):
        _unfolded(device, index, args, out)
        return out
    out = out.contiguous(memory_format=_form(source, weight))
    device.keep(out, index)
    if not _native_depthwise(source, weight, groups, transposed):
        strided = max(args[3]) > 1
        device.temporary([_weight_copy(source, weight)], index)
        kernel = Pass.INPUT if transposed else Pass.FORWARD
        device.attempt(convolution_workspace(kernel, source, weight, out, strided), index)
    return out


@_whole("convolution_backward")
def _convolution_backward(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    """Gradients in the order in which they are made, each with its workspace, and the sum for the bias."""
    gradient, source, weight, groups, wanted = args[0], args[1], args[2], args[9], args[10]
    out = func(*args, **kwargs)
    copied = not gradient.is_contiguous(memory_format=_form(source, weight))
    taken = device.malloc(nbytes(gradient), index) if copied else 0
    if _without_cudnn(device, source, groups, bool(args[7])):
        _unfolded_backward(device, index, args, out)
    else:
        transposed = bool(args[7])
        native = _native_depthwise(source, weight, groups, transposed)
        copy = 0 if native else _weight_copy(source, weight)
        strided = max(args[4]) > 1
        for place in (1, 0) if native else (0, 1):
            if wanted[place]:
                device.keep(out[place], index)
                if native:
                    continue
                device.temporary([copy if place == 0 else 0], index)
                if place == 1:
                    size = convolution_workspace(Pass.WEIGHT, source, weight, gradient, strided)
                elif transposed:
                    size = convolution_workspace(Pass.FORWARD, gradient, weight, source, strided)
                else:
                    size = convolution_workspace(Pass.INPUT, source, weight, gradient, strided)
                device.attempt(size, index)
        if wanted[2]:
            device.keep(out[2], index)
            device.temporary(_staging(device, gradient, [0, *range(2, gradient.dim())], "sum"), index)
    if taken:
        device.free(taken, index)
    return out


# -- normalisation, embeddings, losses -----------------------------------------------------------------------------


def _batch_norm_by_cudnn(source: torch.Tensor, weight: torch.Tensor | None, training: bool) -> bool:
    """`_select_batch_norm_backend`, aten/src/ATen/native/Normalization.cpp (traced: never in bfloat16)."""
    if not torch.backends.cudnn.enabled or source.dim() < 3 or weight is None:
        return False
    if source.dtype not in (torch.float32, torch.float16) or weight.dtype is not torch.float32:
        return False
    return int(source.shape[0]) <= (880801 if training else 65535)


def _tall(source: torch.Tensor) -> bool:
    """Whether the kernels for channels that lie next to each other are taken."""
    return _channels_last(source) or (source.dim() == 2 and source.stride(1) == 1)


def _channel_staging(source: torch.Tensor, values: int) -> list[int]:
    """`flexible_launch_configs` and the staging of kernels for channels last (ATen/native/cuda/Normalization.cuh)."""
    channels = int(source.shape[1])
    rows = source.numel() // max(1, channels)

    def power(number: int) -> int:
        return 1 << (max(1, number).bit_length() - 1)

    width = min(power(channels), 32)
    height = min(power(_ceil(rows, 16)), 512 // width)
    if width * height != 512:
        width = min(power(channels), 512 // height)
    blocks = min(_ceil(rows, height * 16), 128)
    if blocks < 8:
        return []
    return [values * channels * blocks * 4, 4 * _ceil(channels, width)]


@_whole("native_batch_norm")
def _batch_norm(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    """What cuDNN takes beside the results is not known, and taken as nothing. In eval() it saves no statistics."""
    source, weight, training = args[0], args[1], args[5]
    out = _normalised(source, args[1:5])
    if out is None:  # an error, or odd
        out = func(*args, **kwargs)
    device.keep(out[0], index)
    if _batch_norm_by_cudnn(source, weight, training):
        if not training:
            return out[0], out[1].new_empty(0), out[2].new_empty(0)
    for tensor in out[1:]:
        device.keep(tensor, index)
    if training and _tall(source) and not _batch_norm_by_cudnn(source, weight, training):
        device.temporary(_channel_staging(source, 4), index)
    return out


def _normalised(source: torch.Tensor, of_channels: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...] | None:
    """The results of batch norm without torch's composition in Python: like the input, and two numbers a channel."""
    if source.dim() < 2 or any(each is not None and each.shape != source.shape[1:2] for each in of_channels):
        return None
    dtype = torch.float32 if source.dtype.itemsize == 2 else source.dtype
    return torch.empty_like(source), *(source.new_empty(source.shape[1], dtype=dtype) for _ in range(2))


@_whole("native_batch_norm_backward")
def _batch_norm_backward(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    """Sums for each channel, and their staging; the gradient of the input comes last where channels do (traced)."""
    source, weight, training, wanted = args[1], args[2], args[7], args[9]
    channels = 4 * int(source.shape[1])
    made = _normalised(source, (weight,))
    if made is None:
        out: Any = func(*args, **kwargs)
    else:
        of_source, of_weight, of_bias = made
        if weight is not None:
            of_weight, of_bias = torch.empty_like(weight), torch.empty_like(weight)
        out = [of_source if wanted[0] else None, of_weight if wanted[1] else None, of_bias if wanted[2] else None]
    cudnn = _batch_norm_by_cudnn(source, weight, training)
    if (cudnn and training) or not _tall(source):
        return _kept(device, index, out)
    addresses = [device.malloc(channels, index) for _ in range(3 if cudnn else 2)]
    for tensor in out[1:]:
        if tensor is not None:
            device.keep(tensor, index)
    device.temporary(_channel_staging(source, 2), index)
    if not training and wanted[0]:
        product = device.malloc(nbytes(source), index)
        for address in addresses:
            device.free(address, index)
        addresses = [product]
    device.keep(out[0], index)
    for address in addresses:
        device.free(address, index)
    return out


def _kept(device: Device, index: int, out: Any) -> Any:
    for tensor in out:
        if tensor is not None:
            device.keep(tensor, index)
    return out


@_whole("native_dropout")
def _native_dropout(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    """The mask comes first (`dropout_cuda`, ATen/native/cuda/Dropout.cu)."""
    out, mask = func(*args, **kwargs)
    device.keep(mask, index)
    device.keep(out, index)
    return out, mask


@_whole("_safe_softmax")
def _safe_softmax(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    """Rows that are masked out are looked for afterwards (ATen/native/transformers/attention.cpp; traced)."""
    out = func(*args, **kwargs)
    device.keep(out, index)
    device.temporary([out.numel(), out.numel() // max(1, out.shape[args[1]]), out.dtype.itemsize], index)
    return out


@_rule("_softmax_backward_data")
def _softmax_backward(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Plan:
    """The product of gradient and output (traced)."""
    return Plan(device, index, after=lambda out: [nbytes(args[0])])


@_rule("native_layer_norm_backward")
def _layer_norm_backward(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Plan | None:
    """Partial sums for weight and bias of tall inputs (`LaunchGammaBetaBackwardCUDAKernel`, layer_norm_kernel.cu)."""
    columns = math.prod(args[2])
    gradient, source = args[0], args[1]
    before = [] if source.is_contiguous() else [nbytes(source)]
    after = [] if gradient.is_contiguous() else [nbytes(gradient)]
    return Plan(device, index, before, lambda out: [*after, *_partial_sums(device, gradient, columns, 2)])


@_rule("native_layer_norm")
def _layer_norm(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Plan | None:
    """The input is made contiguous first (`layer_norm_cuda`)."""
    return None if args[0].is_contiguous() else Plan(device, index, before=[nbytes(args[0])])


def _partial_sums(device: Device, gradient: torch.Tensor, columns: int, results: int) -> list[int | tuple[int, ...]]:
    rows = gradient.numel() // max(1, columns)
    if rows <= 65536 or columns / 32 >= device.card.multiprocessors / 2:
        return []
    partial = torch.empty(_ceil(rows, 32), columns, dtype=gradient.dtype, device="meta")
    summed = (columns * gradient.dtype.itemsize, *_staging(device, partial, 0, "sum"))
    return [*[nbytes(partial)] * results, *[summed] * results]


class _RMSNorm(torch.autograd.Function):
    """The output and one float a row are kept (`_fused_rms_norm_cuda`, ATen/native/cuda/layer_norm_kernel.cu)."""

    @staticmethod
    def forward(ctx: Any, source: Any, shape: Any, weight: Any, device: Device, index: int) -> Any:
        out = torch.empty_like(source, memory_format=torch.contiguous_format)
        rows = source.shape[: source.dim() - len(shape)]
        rstd = source.new_empty((*rows, *(1 for _ in shape)), dtype=torch.float32)
        ctx.save_for_backward(source, weight, rstd)
        ctx.columns, ctx.device, ctx.index = math.prod(shape), device, index
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        source, weight, _ = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        of_source = torch.empty_like(source) if wanted[0] else None
        of_weight = torch.empty_like(weight) if weight is not None and wanted[2] else None
        if of_weight is not None:
            partial = _partial_sums(ctx.device, gradients[0], ctx.columns, 1)
            Plan(ctx.device, ctx.index, after=lambda out: partial).end(None)
        return of_source, None, of_weight, None, None


@_rule("native_group_norm")
def _group_norm(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Plan | None:
    """Scale and shift of each sample and channel; statistics in float32 for half precision (group_norm_kernel.cu)."""
    source, samples, channels, groups = args[0], args[3], args[4], args[6]
    floats = [samples * groups * 4] * 2 if source.dtype.itemsize == 2 else []
    affine = args[1] is not None or args[2] is not None
    scales = [samples * channels * 4] * 2 if args[5] > 1 and affine else []
    return Plan(device, index, after=lambda out: [*floats, *scales])


@_rule("native_group_norm_backward")
def _group_norm_backward(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Plan:
    """Sums of each sample and channel, then factors of each group (`GroupNormBackwardKernelImpl`; traced)."""
    weight, samples, channels, groups = args[4], args[5], args[6], args[8]
    sums, factors = samples * channels * 4, samples * groups * 4
    if args[7] == 1:
        return Plan(device, index, after=lambda out: [sums, sums, factors, factors])
    scaled = [sums] if weight is not None else []
    return Plan(device, index, after=lambda out: [sums, sums, factors, factors, *scaled])


@_rule("embedding")
def _embedding(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Plan | None:
    """Expanded indices are copied."""
    return None if args[1].is_contiguous() else Plan(device, index, before=[nbytes(args[1])])


def _unique_workspace(count: int) -> int:
    return 1023 + 256 * _ceil(count, 5000)


@_rule("embedding_dense_backward")
def _embedding_backward(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Plan | None:
    """Above 3072 indices they are sorted, and partial sums kept a segment (ATen/native/cuda/Embedding.cu; traced)."""
    gradient, indices, rows = args[0], args[1], int(args[2])
    count = indices.numel()
    keys = count * indices.dtype.itemsize
    copies = [nbytes(each) for each in (gradient, indices) if not each.is_contiguous()]
    if count <= 3072:
        return Plan(device, index, before=copies)
    sort = _sort_workspace(count, indices.dtype.itemsize, indices.dtype.itemsize, max(1, rows - 1).bit_length())
    return _SegmentSums(device, index, [*copies, keys, keys, (keys, sort)], gradient, keys, count, rows)


class _SegmentSums(Plan):
    """`embedding_backward_cuda_kernel` (ATen/native/cuda/EmbeddingBackwardKernel.cu)."""

    def __init__(
        self, device: Device, index: int, before: Sizes, gradient: torch.Tensor, keys: int, count: int, rows: int
    ) -> None:
        itemsize = keys // count
        segments = min(count, rows)
        partial = count // 10 + segments
        super().__init__(
            device,
            index,
            before,
            lambda out: [
                keys,
                8,
                (keys, _unique_workspace(count)),
                segments * itemsize,
                segments * itemsize,
                (_unique_workspace(segments),),
                8,
                partial * itemsize,
                partial * gradient.shape[-1] * 4,
            ],
        )


# reductions of losses to one number


def _mean_of(device: Device, index: int, count: int, dtype: torch.dtype, how: int) -> list[int]:
    flat = torch.empty(count, dtype=dtype, device="meta")
    return _staging(device, flat, None, "mean" if how == 1 else "sum")


@_whole("mse_loss", "smooth_l1_loss")
def _elementwise_loss(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    """Not reduced first, in two buffers, one of which stays behind the one number of the result (traced)."""
    out = func(*args, **kwargs)
    how = kwargs.get("reduction", args[2] if len(args) > 2 else 1)
    if how == 0:
        device.keep(out, index)
        return out
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
    full = torch.empty(shape, dtype=out.dtype, device="meta")
    device.keep(full, index)
    device.temporary([nbytes(full), *_mean_of(device, index, full.numel(), full.dtype, how)], index)
    return full.as_strided((), ())


@_rule("huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
def _reduced_loss(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Plan | None:
    """Not reduced first (traced)."""
    name = func._schema.name
    place, buffers = 2 if "huber" in name else 4 if "logits" in name else 3, 2 if "logits" in name else 1
    how = kwargs.get("reduction", args[place] if len(args) > place else 1)
    if how == 0 or args[0].numel() == 0:
        return None
    sizes = _mean_of(device, index, args[0].numel(), args[0].dtype, how)
    return Plan(device, index, before=[nbytes(args[0])] * buffers, after=lambda out: sizes)


@_whole("log_sigmoid_forward")
def _log_sigmoid(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    """The buffer is empty on CUDA."""
    out = torch.empty_like(args[0])
    device.keep(out, index)
    return out, out.new_empty(0)


# -- sorting, indexing ---------------------------------------------------------------------------------------------


@_rule("sort")
def _sort(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Plan | None:
    """Up to 4096 elements in one block, beyond that by cub (ATen/native/cuda/Sort.cpp, Sort.cu; traced)."""
    source = args[0]
    named = next((at for at, each in enumerate(func._schema.arguments) if each.name == "dim"), 1)
    dim = kwargs.get("dim", args[named] if len(args) > named and isinstance(args[named], int) else -1)
    if source.dim() == 0 or source.numel() == 0:
        return None
    length, count = int(source.shape[dim]), source.numel()
    if length <= 4096:
        return Plan(device, index, after=lambda out: [length * 8])
    work = _sort_workspace(count, source.dtype.itemsize, 8, 8 * source.dtype.itemsize)
    if length == count:
        return Plan(device, index, after=lambda out: [count * 8, work])
    return Plan(device, index, after=lambda out: [count * 8, count * 8, (nbytes(source), work)])


@_rule("multinomial")
def _multinomial(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Plan:
    """Random numbers of the size of the probabilities (ATen/native/Distributions.cpp)."""
    return Plan(device, index, after=lambda out: [nbytes(args[0])])


@_rule("randperm")
def _randperm(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Plan:
    """Keys, and indices, sorted (ATen/native/cuda/Randperm.cu; traced)."""
    count = int(args[0])
    if count < 30_000:
        return Plan(device, index, after=lambda out: [8, 8 * count, 4 * count, 4 * count])
    return Plan(device, index, after=lambda out: [8, *[8 * count] * 3, _sort_workspace(count, 8, 8, 64)])


_fresh: list[weakref.ref[Any]] = []


class _Zeros(Plan):
    def end(self, out: Any) -> None:
        _fresh[:] = [weakref.ref(out.untyped_storage())]


@_rule("new_zeros", "zeros", "zeros_like")
def _zeros(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Plan | None:
    return _Zeros(device, index) if in_backward() else None


@_whole(
    "scatter.src", "scatter.value", "scatter_add", "index_add", "index_copy", "masked_scatter", "index_fill.int_Scalar"
)
def _scattered(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    """Formulas of derivatives write into the zeros that they made; for tensors without data they do not."""
    if in_backward() and not torch.is_grad_enabled() and _fresh and _fresh[0]() is args[0].untyped_storage():
        return args[0].detach()
    return _plain(device, index, func, args, kwargs)


def _numbered(device: Device, places: Sequence[Any]) -> list[tuple[torch.Tensor, bool]]:
    """The indices of an operator, each with whether it is on the CPU; masks are the numbers that they stand for."""
    found = []
    for place in places:
        if isinstance(place, torch.Tensor):
            on_cpu = not place.is_meta or device.index_of(place) == CPU
            place = virtual._without_data(place)
            masked = place.dtype in (torch.bool, torch.uint8)
            rows = [torch.empty(place.numel(), dtype=torch.int64, device="meta") for _ in range(place.dim())]
            found += [(row, on_cpu) for row in (rows if masked else [place])]
    return found


def _sought(device: Device, index: int, places: Sequence[Any]) -> list[int]:
    """The numbers that masks on the device stand for (`expandTensors`); addresses."""
    masks = [place for place in places if isinstance(place, torch.Tensor) and device.is_here(place)]
    sizes = [8 * mask.dim() * mask.numel() for mask in masks if mask.dtype in (torch.bool, torch.uint8)]
    return [device.malloc(size, index) for size in sizes if size]


def _brought(device: Device, index: int, places: Sequence[Any]) -> list[int]:
    """What becomes of indices before a kernel takes them; addresses.

    `make_info` (ATen/native/TensorAdvancedIndexing.cpp): those of the CPU are copied, numbers of 32 bits made longer,
    and all copied that are not contiguous where their strides differ; traced.
    """
    taken = _sought(device, index, places)
    given = _numbered(device, places)
    shape = torch.broadcast_shapes(*(tensor.shape for tensor, _ in given))  # type: ignore[no-untyped-call]
    copies = [device.malloc(nbytes(tensor), index) if on_cpu and tensor.numel() else 0 for tensor, on_cpu in given]
    ready = [tensor.expand(shape) for tensor, _ in given]

    def replace(at: int) -> None:
        ready[at] = torch.empty(shape, dtype=torch.int64, device="meta")
        before, copies[at] = copies[at], device.malloc(8 * ready[at].numel(), index) if ready[at].numel() else 0
        if before:
            device.free(before, index)

    for at, tensor in enumerate(ready):
        if tensor.dtype is torch.int32:
            replace(at)
    if len({tensor.stride() for tensor in ready}) > 1:
        for at, tensor in enumerate(ready):
            if not tensor.is_contiguous():
                replace(at)
    return [*taken, *(address for address in copies if address)]


def _indexed(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    taken = _brought(device, index, args[1]) if index >= 0 else []
    out = _index_plain(device, index, func, args, kwargs)
    for address in reversed(taken):
        device.free(address, index)
    return out


def _put_sorted(device: Device, index: int, args: Any, checked: bool) -> None:
    """What is accumulated is sorted by where it goes (`index_put_with_sort_kernel`, ATen/native/cuda/Indexing.cu).

    checked: whether the indices are looked at for their range, as all are but those of derivatives.
    """
    target, places, value = args[0], args[1], args[2]
    given = _numbered(device, places)
    shape = torch.broadcast_shapes(*(tensor.shape for tensor, _ in given))  # type: ignore[no-untyped-call]
    count, keys = math.prod(shape), 8 * math.prod(shape)
    if not given or not count or not target.numel():
        return
    held = _sought(device, index, places)
    held += [device.malloc(8 * t.numel(), index) for t, on_cpu in given if t.dtype is torch.int32 and not on_cpu]
    linear = 0
    for tensor, on_cpu in given:
        tensor = tensor.expand(shape)
        if checked and not on_cpu:
            found = [device.malloc(8, index) for _ in range(2)]
            copied = tensor.contiguous()
            copy = 0 if tensor.is_contiguous() else keys
            device.temporary([copy, *_staging(device, copied, None, "argmax", torch.int64)], index)
            device.temporary([1], index)
            device.temporary([1], index)
            for address in reversed(found):
                device.free(address, index)
        wrapped = 0 if on_cpu else device.malloc(keys, index)
        scaled = device.malloc(keys, index)
        if wrapped:
            device.free(wrapped, index)
        if linear:
            device.free(scaled, index)
        else:
            linear = scaled
    dims: list[int] = []
    at = 0
    for place in places:
        taken_dims = place.dim() if isinstance(place, torch.Tensor) and place.dtype in (torch.bool, torch.uint8) else 1
        dims += range(at, at + taken_dims) if isinstance(place, torch.Tensor) else []
        at += taken_dims
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    others = math.prod(int(target.shape[dim]) for dim in range(target.dim()) if dim not in dims)
    behind = math.prod(target.shape[dims[-1] + 1 :]) if adjacent else others
    if value.numel() < count * others or not value.is_contiguous():
        held.append(device.malloc(count * others * value.dtype.itemsize, index))
    if not adjacent or not target.is_contiguous():
        held.append(device.malloc(nbytes(target), index))
    bits = max(1, (int(target.numel()) - 1) // behind).bit_length()
    device.temporary([keys, keys, keys, _sort_workspace(count, 8, 8, bits)], index)
    for address in (*reversed(held), linear):
        device.free(address, index)


def _index_put(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    """As `_scattered`; and what is done with the indices."""
    target = args[0]
    accumulate = kwargs.get("accumulate", args[3] if len(args) > 3 else False)
    unsafe = in_backward() or kwargs.get("unsafe", args[4] if len(args) > 4 else False)
    own = func is not aten.index_put.default
    if not own and in_backward() and not torch.is_grad_enabled() and _fresh and target.is_meta:
        own = _fresh[0]() is target.untyped_storage()
    out = target.detach() if own and func is aten.index_put.default else None
    if out is None:
        out = _index_plain(device, index, func, args, kwargs)
    if index >= 0:
        masks = [place for place in args[1] if isinstance(place, torch.Tensor)]
        fills = len(masks) == 1 and masks[0].dtype in (torch.bool, torch.uint8) and args[2].numel() == 1
        if accumulate:
            _put_sorted(device, index, args, not unsafe)
        elif not fills:  # `canDispatchToMaskedFill`
            for address in reversed(_brought(device, index, args[1])):
                device.free(address, index)
    return out


_index_plain: Whole = virtual._SPECIAL[aten.index_put.default]
virtual._SPECIAL[aten.index.Tensor] = _indexed
for _op in (aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default):
    virtual._SPECIAL[_op] = _index_put


def _packed(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their part of the storage, each once."""
    size = 1
    for stride, length in sorted(
        (stride, length) for stride, length in zip(tensor.stride(), tensor.shape, strict=True) if length > 1
    ):
        if stride != size:
            return False
        size *= length
    return True


def _references(tensor: torch.Tensor) -> tuple[int, int, int]:
    """References from C++ and from Python to a tensor, and to its storage, as `_accumulate` sees them."""
    of_storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return tensor._use_count(), sys.getrefcount(tensor), of_storage  # type: ignore[attr-defined]


#: what `_references` says of a gradient that only the engine holds; it differs by version of torch and Python
_of_the_engine: list[tuple[int, int, int]] = []


def learn_references(card: cards.Card) -> None:
    """See once how often a gradient is referred to that only the engine holds, by a pass of backward for it."""
    if _of_the_engine:
        return
    with virtual.Operators(Device(card, 1, None, None)), torch.enable_grad(), torch.inference_mode(False):
        h = torch.empty(1, device="meta", requires_grad=True) * 2
        torch.autograd.grad(h.sin() + h.exp(), h)


@_whole("add.Tensor")
def _accumulate(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    """Two gradients of one tensor are added into the first, where nobody else holds it.

    `InputBuffer::accumulate` (torch/csrc/autograd/input_buffer.cpp) does so; for tensors without data it does not.
    """
    if in_backward() and len(args) == 2 and not kwargs and not torch.is_grad_enabled():
        first, second = args
        if (
            isinstance(first, torch.Tensor)
            and isinstance(second, torch.Tensor)
            and first.shape == second.shape
            and first.dtype is second.dtype
        ):
            references = _references(first)
            if not _of_the_engine:
                _of_the_engine.append(references)
            if references == _of_the_engine[0] and _packed(first):
                return first
    return _plain(device, index, func, args, kwargs)


@_whole("_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adagrad_", "_fused_adagrad_.tensor_lr")
def _fused_step(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    """In place, without anything beside."""
    return None


# -- attention -----------------------------------------------------------------------------------------------------


def _flash_splits(batch: int, heads: int, queries: int, keys: int, width: int, multiprocessors: int) -> int:
    """Into how many parts the keys are split: `num_splits_heuristic` (transformers/cuda/flash_attn/flash_api.cpp)."""
    block = 256 if width <= 64 else 128 if width <= 128 else 64
    blocks, work, limit = _ceil(keys, block), batch * heads * _ceil(queries, 64), 2 * multiprocessors
    if work >= 0.8 * limit:
        return 1
    found: list[tuple[int, float]] = []
    for splits in range(1, min(128, limit, blocks) + 1):
        if splits == 1 or _ceil(blocks, splits) != _ceil(blocks, splits - 1):
            waves = work * splits / limit
            found.append((splits, waves / math.ceil(waves)))
    best = max(share for _, share in found)
    return next(splits for splits, share in found if share >= 0.85 * best)


def _rounded_width(width: int) -> int:
    return _up(width, 32) if width <= 192 else 256


@_whole("_scaled_dot_product_flash_attention")
def _flash(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    """Accumulators of split keys, and the seed (`mha_fwd`, transformers/cuda/flash_attn/flash_api.cpp; traced)."""
    query, key = args[0], args[1]
    batch, heads, length, width = query.shape
    dropout = kwargs.get("dropout_p", args[3] if len(args) > 3 else 0.0)
    out = list(func(*args, **kwargs))
    out[1] = torch.empty((batch, heads, length), dtype=torch.float32, device="meta")
    device.keep(out[0], index)
    device.keep(out[1], index)
    taken: list[int] = []
    if not dropout:
        splits = _flash_splits(batch, heads, length, key.shape[2], width, device.card.multiprocessors)
        rows = splits * batch * heads * length * 4
        taken = [device.malloc(size, index) for size in ((rows, rows * _rounded_width(width)) if splits > 1 else ())]
    out[6] = torch.empty(2, dtype=torch.uint64, device="meta")
    out[7] = torch.empty((), dtype=torch.uint64, device="meta")
    device.keep(out[6], index)
    device.keep(out[7], index)
    if isinstance(out[8], torch.Tensor):
        out[8] = torch.empty(0, dtype=query.dtype, device="meta")
    if dropout:
        taken = [device.malloc(16, index)]
    for address in taken:
        device.free(address, index)
    return tuple(out)


@_rule("_scaled_dot_product_flash_attention_backward")
def _flash_backward(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Plan:
    """Copies to [b, s, h, d], softmax_d, dq_accum: `mha_bwd` (transformers/cuda/flash_attn/flash_api.cpp; traced)."""
    gradient, query, key, out = args[0], args[1], args[2], args[4]
    batch, heads, length, width = query.shape
    rows = batch * heads * _up(length, 128)
    copies = [nbytes(each) for each in (gradient, out) if not each.transpose(1, 2).is_contiguous()]
    grouped = [batch * heads * key.shape[2] * width * query.dtype.itemsize] * 2 if key.shape[1] != heads else []
    return Plan(device, index, before=copies, after=lambda out: [rows * 4, rows * _rounded_width(width) * 4, *grouped])


def _efficient_workspace(
    batch: int, heads: int, queries: int, keys: int, width: int, half: bool, capability: tuple[int, int]
) -> int:
    """Accumulators of gradients: `workspace_size` of `AttentionBackwardKernel` (mem_eff_attention/kernel_backward.h).

    Tile sizes are those of the kernels for each capability, found by tracing.
    """
    ampere = capability >= (8, 0)
    if width <= 64 or (not half and not ampere):
        rows, columns = 64, 64
    else:
        rows, columns = 128, (128 if half and ampere and width <= 128 else 64)
    tiles = _ceil(queries, rows) * _ceil(width, columns)
    size = tiles * (rows * columns * 4 + 16)
    if half and width > 128:
        size += 2 * _up(keys, columns) * _up(width, rows) * 4
    return batch * heads * size


@_whole("_scaled_dot_product_efficient_attention_backward")
def _efficient_backward(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    """delta, from a product in float32, and accumulators (`_efficient_attention_backward`, attention_backward.cu)."""
    gradient, query, key = args[0], args[1], args[2]
    batch, heads, length, width = query.shape
    full = query.dtype is torch.float32
    copy = 0 if gradient.transpose(1, 2).is_contiguous() else device.malloc(nbytes(gradient), index)
    out = func(*args, **kwargs)
    _kept(device, index, out)
    delta = batch * heads * length * 4
    if full:
        product = device.malloc(gradient.numel() * 4, index)
        summed = device.malloc(delta, index)
        taken = device.malloc(delta, index) if length > 1 else summed
        if length > 1:
            device.free(summed, index)
        device.free(product, index)
    else:
        taken = device.malloc(delta, index)
    work = _efficient_workspace(batch, heads, length, key.shape[2], width, not full, device.card.capability)
    device.temporary([work], index)
    for address in (taken, copy):
        if address:
            device.free(address, index)
    return out


@_whole("_scaled_dot_product_efficient_attention")
def _efficient(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    """Wide heads in half precision are accumulated in float32; the seed stays on the CPU (traced)."""
    query, value = args[0], args[2]
    out = func(*args, **kwargs)
    device.keep(out[0], index)
    device.keep(out[1], index)
    if value.shape[-1] > 128 and query.dtype is not torch.float32:
        device.temporary([query.numel() // query.shape[-1] * value.shape[-1] * 4], index)
    for seed in out[2:]:
        device.keep(seed, CPU)
    return out


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


def _math_attention(
    query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, scale: Any, grouped: bool
) -> Any:
    """`_scaled_dot_product_attention_math` (transformers/attention.cpp): in float32, the mask added in place."""
    dtype = query.dtype
    taken = (query, key, value)
    if dtype in (torch.float16, torch.bfloat16) and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():  # type: ignore[no-untyped-call]
        taken = (query.float(), key.float(), value.float())
    factor = math.sqrt(scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    scaled = taken[0] * factor
    if causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = _float_mask(mask, scaled.dtype)
    _, keys, values = taken  # all three are held until the end
    if grouped:
        repeats = query.shape[-3] // key.shape[-3]
        keys, values = keys.repeat_interleave(repeats, -3), values.repeat_interleave(repeats, -3)
    keys = (keys * factor).transpose(-2, -1)
    scores = scaled @ keys
    if mask is not None:
        scores = scores.add_(mask)
    shares = aten._safe_softmax(scores, -1)
    del scores
    if dropout > 0:
        shares = torch.dropout(shares, dropout, True)
    returned = shares.to(dtype)
    out = (shares @ values).to(dtype)
    del returned
    return out


def _float_mask(mask: Any, dtype: torch.dtype) -> Any:
    """`convert_boolean_attn_mask`."""
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    low = torch.full((), -math.inf, dtype=dtype, device=mask.device)
    return torch.where(mask, zero, low)


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
        if not device.is_here(query):
            return aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )[0]
        grouped = enable_gqa and query.shape[-3] != key.shape[-3]
        kind = attention_backend(query, key, value, attn_mask, dropout_p, is_causal, grouped, device.card.capability)
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        if kind == "flash":
            width = query.shape[-1]
            if width % 8:
                pad = 8 - width % 8
                query, key, value = (torch.nn.functional.pad(t, (0, pad)) for t in (query, key, value))
                scale = scale if scale is not None else 1 / math.sqrt(width)
            out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)
            return out[0][..., :width] if width % 8 else out[0]
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = _float_mask(attn_mask, query.dtype)
        if attn_mask is not None and kind in ("efficient", "cudnn"):
            length = attn_mask.shape[-1]
            if kind == "efficient" and length % 8:  # `pad_bias`
                attn_mask = torch.nn.functional.pad(attn_mask, (0, 8 - length % 8))[..., :length]
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
        return _math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, grouped)

    return attend


# -- above autograd ------------------------------------------------------------------------------------------------


def _composed(op: Any, *args: Any, **kwargs: Any) -> Any:
    """An operator as it is composed in C++, which CUDA runs; there may be another composition in Python."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _mish_backward(gradient: Any, source: Any) -> Any:
    """One kernel on CUDA."""
    if torch.is_grad_enabled():
        return _composed(aten.mish_backward.default, gradient, source)
    return torch.empty_like(source)


def _dropout(device: Device) -> Callable[..., Any]:
    op = aten.dropout.default

    def dropout(input: Any, p: float, train: bool) -> Any:
        """Fused, with a bool mask saved (`is_fused_kernel_acceptable`, ATen/native/Dropout.cpp)."""
        if train and 0 < p <= 1 and input.numel() and device.is_here(input):
            if p == 1:
                return input * torch.zeros((), dtype=input.dtype, device=input.device)
            return torch.native_dropout(input, p, train)[0]
        return _composed(op, input, p, train)

    return dropout


def _linear(device: Device) -> Callable[..., Any]:
    op = aten.linear.default

    def linear(input: Any, weight: Any, bias: Any = None) -> Any:
        """The bias is added in place where the input is not contiguous (ATen/native/Linear.cpp)."""
        if device.autocast.on:
            (input, weight, bias), _ = device.autocast.arguments("linear", (input, weight, bias), {})
            with device.autocast.paused():
                return linear(input, weight, bias)
        plain = input.dim() == 2 or (input.dim() > 2 and input.is_contiguous())
        if bias is None or plain or not device.is_here(input):
            return _composed(op, input, weight, bias)
        if weight.requires_grad and torch.is_inference_mode_enabled():
            # the view of the weight knows nothing of gradients here, and `should_fold` (LinearAlgebra.cpp) asks it
            rows = input.reshape(-1, input.shape[-1])
            return torch.mm(rows, weight.t()).view(*input.shape[:-1], -1).add_(bias)
        return torch.matmul(input, weight.t()).add_(bias)

    return linear


def _rms(device: Device) -> Callable[..., Any]:
    op = aten.rms_norm.default

    def rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Any:
        """Fused (`rms_norm_symint`, ATen/native/layer_norm.cpp), and in float32 within autocast."""
        if not device.is_here(input):
            return _composed(op, input, normalized_shape, weight, eps)
        if device.autocast.on:
            (input, weight), _ = device.autocast.arguments("layer_norm", (input, weight), {})
        return _RMSNorm.apply(input, normalized_shape, weight, device, device.index_of(input))  # type: ignore[no-untyped-call]

    return rms_norm


@contextlib.contextmanager
def overridden(device: Device) -> Iterator[None]:
    """CUDA's way of the operators that other devices compose differently, until the end of the block."""
    from memlint.virtual import autocast as lists
    from memlint.virtual import recurrent

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]

    def put(name: str, function: Callable[..., Any]) -> None:
        library.impl(name, function, "AutogradMeta")  # type: ignore[no-untyped-call]
        device.overrides[name] = function

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
                    return _composed(op, *args, **kwargs)
            return _composed(op, *args, **kwargs)

        put(name, run)

    supported = _foreach_utils._get_foreach_kernels_supported_devices
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        put("dropout", _dropout(device))
        put("scaled_dot_product_attention", _attention(device))
        put("linear", _linear(device))
        put("mish_backward", _mish_backward)
        for name, override in recurrent.overrides(device).items():
            put(name, override)
        if hasattr(aten, "_fused_rms_norm"):
            put("rms_norm", _rms(device))
        for name in lists.COMPOSITE_LOWER:
            if name != "linear":
                cast(name.removesuffix(".default"), lower=True)
        for name in lists.COMPOSITE_FP32:
            cast(name, lower=False)
        for name in lists.COMPOSITE_BY_DTYPE:
            cast(name, lower=False, place=2)
    _foreach_utils._get_foreach_kernels_supported_devices = lambda: [*supported(), "meta"]
    try:
        yield
    finally:
        _foreach_utils._get_foreach_kernels_supported_devices = supported
        library._destroy()  # type: ignore[no-untyped-call]


_FP32_AS = {"nll_loss_nd": "nll_loss"}
