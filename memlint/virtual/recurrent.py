"""LSTM, GRU and RNN as CUDA runs them: by cuDNN, with all weights in one block and one block of what backward needs.

What is allocated, and in which order, is that of `_cudnn_rnn` and `_cudnn_rnn_backward` (ATen/native/cudnn/RNN.cpp)
and, in autocast, of `_cudnn_rnn_cast_reflatten` (ATen/cudnn/AutocastRNN.cpp). How large cuDNN's reserve and workspace
are is a model: `reserve_bytes` says from what. Bfloat16 without autocast, and cuDNN switched off, are composed of other
operators (`cudnn_is_acceptable`, ATen/native/TensorProperties.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memlint.virtual import device as virtual
from memlint.virtual import kernels
from memlint.virtual.device import Device

aten = torch.ops.aten

#: cudnnRNNMode_t, and the gates of each
MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
GATES = {0: 1, 1: 1, 2: 4, 3: 3}
#: elements of the reserve for each step, sample, and hidden unit of a layer and direction
_RESERVED = {0: 1, 1: 1, 2: 5, 3: 6}
#: the state of the generator of dropout: "slightly over 2MB" (`get_dropout_state`), kept by torch for each card
DROPOUT_STATE = 2**21
_TYPES = (torch.float16, torch.float32, torch.float64)


def acceptable(tensor: torch.Tensor, here: bool | None = None) -> bool:
    """Whether cuDNN takes a tensor: `cudnn_is_acceptable`. here: whether it is on the card, if that is known."""
    on_card = tensor.is_cuda if here is None else here
    return bool(torch._C._get_cudnn_enabled()) and tensor.dtype in _TYPES and on_card


def reserve_bytes(mode: int, steps: int, hidden: int, layers: int, directions: int, itemsize: int) -> int:
    """The reserve that a pass forward in training keeps for the pass back, in bytes. steps: time steps of all samples.

    A model: for each layer what its cells need (LSTM 5, GRU 6 numbers a unit), and the results of all layers but the
    last. It gives the two sizes that are public to the byte: 736,000,000 bytes for an LSTM and 864,000,000 for a GRU,
    with 4 layers of 320 units over 25,000 steps (pytorch issue 2895; cuDNN 7 on a P100). That a plain RNN keeps one
    number a unit is an assumption, and so is that dropout between the layers, later versions of cuDNN, and its kernels
    for few units need no more.
    """
    return steps * hidden * directions * (layers * _RESERVED[mode] + layers - 1) * itemsize


def workspace_bytes(weights: int) -> int:
    """The workspace of a pass, in bytes. weights: bytes of all weights.

    A model: 1.45 times the weights, as both of the public sizes have it (1.460 LSTM, 1.447 GRU; as `reserve_bytes`).
    """
    return int(1.45 * weights)


def weight_count(mode: int, inputs: int, hidden: int, projected: int, layers: int, directions: int) -> int:
    """Elements of cuDNN's block of weights; two biases a gate are in it for modules without any, too."""
    gates, out = GATES[mode], projected or hidden
    count = 0
    for layer in range(layers):
        columns = inputs if layer == 0 else out * directions
        count += directions * (gates * hidden * (columns + out + 2) + projected * hidden)
    return count


def flattened(
    weights: Sequence[torch.Tensor],
    weight_stride0: int,
    input_size: int,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    bidirectional: bool,
) -> torch.Tensor:
    """Move weights into one block and make them views of it, as `_cudnn_rnn_flatten_weight`; the block."""
    count = weight_count(mode, input_size, hidden_size, proj_size, num_layers, 2 if bidirectional else 1)
    block = torch.zeros(count, dtype=weights[0].dtype, device=weights[0].device)
    for weight, place in zip(weights, _places(block, weights), strict=True):
        weight.set_(place)  # type: ignore[call-overload]
    return block


def _places(block: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Where each weight lies in the block. cuDNN may have another order; nothing here asks."""
    places = []
    at = 0
    for weight in weights:
        places.append(block[at : at + weight.numel()].view(weight.shape))
        at += weight.numel()
    return places


def _block(weights: Sequence[torch.Tensor], count: int) -> torch.Tensor | None:
    """The block that the weights lie in; None where they are apart (`try_get_weight_buf`)."""
    storages = {weight.untyped_storage()._cdata for weight in weights}
    if len(storages) > 1 or weights[0].untyped_storage().nbytes() < count * weights[0].dtype.itemsize:
        return None
    return weights[0].detach().as_strided((count,), (1,), 0)


def overrides(device: Device) -> dict[str, Callable[..., Any]]:
    """By the name of an operator: what CUDA does for it."""

    def run(
        mode: int,
        source: torch.Tensor,
        sizes: list[int],
        state: torch.Tensor,
        cell: torch.Tensor | None,
        weights: Sequence[torch.Tensor],
        biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[torch.Tensor, ...]:
        hidden, projected = state.shape[2], 0
        if cell is not None and cell.shape[2] != hidden:
            hidden, projected = cell.shape[2], hidden
        count = weight_count(mode, source.shape[-1], hidden, projected, layers, 2 if bidirectional else 1)
        block = _block(weights, count)
        if train and dropout > 0:
            device.workspace(
                "dropout of recurrent layers", DROPOUT_STATE, device.index_of(source) or 0, by_thread=False
            )
        stride = (4 if biases else 2) + bool(projected)
        casts = device.autocast.on
        with device.autocast.paused():
            if casts:
                source, state, cell = (device.autocast.cast(each, torch.float16) for each in (source, state, cell))
                if weights[0].dtype is torch.float32:
                    block = torch.zeros(count, dtype=torch.float16, device=weights[0].device)
                    places = _places(block, weights)
                    # views for cuDNN, but not for autograd: the gradient of each is cast on its own
                    weights = [p.detach().copy_(w) for p, w in zip(places, weights, strict=True)]
            out = aten._cudnn_rnn.default(
                source, weights, stride, block, state, cell, mode, hidden, projected, layers, batch_first, dropout,
                train, bidirectional, sizes, None,
            )  # fmt: skip
        return tuple(out[: 3 if cell is not None else 2])

    def override(name: str, packed: bool) -> Callable[..., Any]:
        op = getattr(getattr(aten, name), "data" if packed else "input")

        def lay(source: Any, *args: Any) -> Any:
            if not acceptable(source, device.is_here(source)) or not source.numel():
                return kernels._composed(op, source, *args)
            sizes = [int(size) for size in args[0].tolist()] if packed else []
            states, weights, biases, layers, dropout, train, bidirectional, *rest = args[1:] if packed else args
            state, cell = states if name == "lstm" else (states, None)
            batch_first = bool(rest and rest[0])
            return run(
                MODES[name], source, sizes, state, cell, weights, biases, layers, dropout, train, bidirectional,
                batch_first,
            )  # fmt: skip

        return lay

    return {f"{name}.{kind}": override(name, kind == "data") for name in MODES for kind in ("input", "data")}


# -- below autograd ------------------------------------------------------------------------------------------------


class _Layer:
    """The arguments that both passes share."""

    def __init__(
        self, source: torch.Tensor, weights: Any, block: Any, state: Any, cell: Any, rest: Sequence[Any]
    ) -> None:
        self.mode, self.hidden, self.projected, self.layers, self.batch_first = rest[:5]
        self.train, self.bidirectional, self.sizes = rest[6:9]
        self.source, self.weights, self.block, self.state, self.cell = source, weights, block, state, cell
        self.directions = 2 if self.bidirectional else 1
        self.count = weight_count(
            self.mode, source.shape[-1], self.hidden, self.projected, self.layers, self.directions
        )

    @property
    def steps(self) -> int:
        return math.prod(self.source.shape[:-1])

    @property
    def workspace(self) -> int:
        return workspace_bytes(self.count * self.source.dtype.itemsize)

    def time_first(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(0, 1) if self.batch_first and not self.sizes else tensor

    def copied(self, tensor: torch.Tensor) -> int:
        """Bytes of the copy that is made where time does not come first in memory."""
        return 0 if self.time_first(tensor).is_contiguous() else kernels.nbytes(tensor)


def _empty(device: Device, index: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(tuple(shape), dtype=dtype, device="meta")
    device.keep(out, index)
    return out


@kernels._whole("_cudnn_rnn")
def _forward(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    source, weights, _, block, state, cell = args[:6]
    layer = _Layer(source, weights, block, state, cell, args[6:15])
    copied = layer.copied(source)
    taken = [device.malloc(copied, index)] if copied else []
    shape = (*layer.time_first(source).shape[:-1], (layer.projected or layer.hidden) * layer.directions)
    out = _empty(device, index, shape, source.dtype)
    last = _empty(device, index, state.shape, state.dtype)
    last_cell = _empty(device, index, (0,) if cell is None else cell.shape, state.dtype)
    if block is None:
        block = _empty(device, index, (layer.count,), source.dtype)
    taken.append(device.malloc(layer.workspace, index))
    size = 0
    if layer.train:
        size = reserve_bytes(
            layer.mode, layer.steps, layer.hidden, layer.layers, layer.directions, source.dtype.itemsize
        )
    reserve = _empty(device, index, (size,), torch.uint8)
    for address in reversed(taken):
        device.free(address, index)
    return layer.time_first(out), last, last_cell, reserve, block


@kernels._whole("_cudnn_rnn_backward")
def _backward(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    source, weights, stride, block, state, cell, out, of_out, of_state, of_cell = args[:10]
    layer = _Layer(source, weights, block, state, cell, args[10:19])
    if of_out is None and of_state is None and of_cell is None:
        return None, None, None, [None] * len(weights)
    if not layer.train:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")
    taken = []
    if of_out is None:
        taken.append(device.malloc(kernels.nbytes(out), index))
    taken += [
        device.malloc(kernels.nbytes(like), index)
        for given, like in ((of_state, state), (of_cell, cell))
        if given is None and like is not None
    ]
    copies = [layer.copied(source), 0 if of_out is None else layer.copied(of_out)]
    held = [device.malloc(size, index) for size in copies if size]
    of_source = _empty(device, index, layer.time_first(source).shape, source.dtype)
    of_first = _empty(device, index, state.shape, state.dtype)
    of_first_cell = None if cell is None else _empty(device, index, cell.shape, cell.dtype)
    device.temporary([layer.workspace], index)
    for address in reversed(held):
        device.free(address, index)
    gradients: list[torch.Tensor | None] = [None] * len(weights)
    if args[21][3]:
        copied = device.malloc(copies[0], index) if copies[0] else 0
        whole = _empty(device, index, (layer.count,), source.dtype)
        device.temporary([layer.workspace], index)
        if copied:
            device.free(copied, index)
        if stride in (4, 5):
            gradients = list(_places(whole, weights))
        else:  # cuDNN's block has biases that the module does not have
            gradients = [_empty(device, index, weight.shape, weight.dtype) for weight in weights]
        del whole
    for address in reversed(taken):
        device.free(address, index)
    return layer.time_first(of_source), of_first, of_first_cell, gradients


@virtual._special(aten._pack_padded_sequence.default)
def _pack(device: Device, index: int, func: Any, args: Any, kwargs: Any) -> Any:
    """How many samples each step has is known on the CPU (ATen/native/PackedSequence.cpp)."""
    source, lengths, batch_first = args
    if lengths.is_meta:
        where = device.shown(lengths)
        raise RuntimeError(
            f"'lengths' argument should be a 1D CPU int64 tensor, but got {lengths.dim()}D {where} tensor"
        )
    _, sizes = func(torch.empty(source.shape[:2]), lengths, batch_first)
    return _empty(device, index, (int(sizes.sum()), *source.shape[2:]), source.dtype), sizes
