"""LSTM, GRU and RNN as cuDNN runs them; inference mode, where operators arrive whole."""

# ruff: noqa: PT018  # what belongs together is asked in one line
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from memlint.virtual import recurrent  # noqa: E402
from memlint.virtual.device import VirtualCuda  # noqa: E402


@pytest.fixture
def virtual() -> Iterator[VirtualCuda]:
    with VirtualCuda("t4") as device:
        yield device


class Requests:
    """What the allocator is asked for, from the moment this is made."""

    def __init__(self, virtual: VirtualCuda) -> None:
        self.sizes: list[int] = []
        virtual.device.listener = self._note

    def _note(self, action: str, index: int, address: int, nbytes: int, operator: str) -> None:
        if action == "alloc":
            self.sizes.append(nbytes)


@pytest.mark.parametrize(("mode", "nbytes"), [("lstm", 736_000_000), ("gru", 864_000_000)])
def test_reserves_are_those_on_record(mode: str, nbytes: int) -> None:
    """pytorch issue 2895: 4 layers of 320 units, 25,000 steps, as the counts of parameters there say."""
    assert recurrent.reserve_bytes(recurrent.MODES[mode], 25_000, 320, 4, 1, 4) == nbytes


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize(
    ("make", "more"),
    [
        (nn.LSTM, {}),
        (nn.GRU, {"bidirectional": True}),
        (nn.RNN, {"num_layers": 3}),
        (nn.LSTM, {"proj_size": 8, "num_layers": 2, "bidirectional": True}),
    ],
)
def test_weights_are_in_one_block(virtual: VirtualCuda, make: Any, more: dict[str, Any], *, biases: bool) -> None:
    layer = make(24, 16, bias=biases, **more).cuda()
    block = layer.weight_ih_l0.untyped_storage()
    assert {p.untyped_storage()._cdata for p in layer.parameters()} == {block._cdata}
    assert all(p.is_leaf and p.requires_grad and p.is_cuda for p in layer.parameters())
    own = sum(p.numel() for p in layer.parameters())
    without = 0 if biases else sum(p.shape[0] * 2 for name, p in layer.named_parameters() if "hh" in name)
    assert block.nbytes() == 4 * (own + without)
    assert -(-block.nbytes() // 512) * 512 == torch.cuda.memory_allocated()
    out, _ = layer(torch.randn(5, 3, 24, device="cuda"))
    out.sum().backward()
    gradients = {p.grad.untyped_storage()._cdata for p in layer.parameters()}
    assert len(gradients) == (1 if biases else len(list(layer.parameters())))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer.step()
    assert layer.weight_ih_l0.untyped_storage() is not None and torch.cuda.memory_allocated() < 8 * block.nbytes()


def test_what_a_pass_asks_for(virtual: VirtualCuda) -> None:
    layer = nn.LSTM(32, 64, batch_first=True).cuda()
    x = torch.randn(4, 10, 32, device="cuda", requires_grad=True)
    virtual.settle()
    asked = Requests(virtual)
    out, (state, cell) = layer(x)
    weights, rows, states = 4 * (4 * 64 * (32 + 64 + 2)), 4 * 10 * 64 * 4, 4 * 64 * 4
    copy, workspace = 4 * 10 * 32 * 4, recurrent.workspace_bytes(weights)
    # zeros for the state and the cell; the input with time first, output, state, cell, workspace, reserve
    assert asked.sizes == [states, states, copy, rows, states, states, workspace, 5 * rows]
    assert (
        out.shape == (4, 10, 64) and out.stride() == (64, 256, 1) and type(out.grad_fn).__name__ == "CudnnRnnBackward0"
    )
    asked.sizes.clear()
    out.backward(torch.ones_like(out))
    # the gradient; zeros for state and cell; the input again; those of input, state, cell; twice the workspace; at
    # last the gradient of the input in the layout of the input, which autograd makes
    expected = [rows, states, states, copy, copy, states, states, workspace, copy, weights, workspace, copy]
    assert asked.sizes == expected
    assert x.grad is not None and x.grad.shape == x.shape
    assert state.shape == cell.shape == (1, 4, 64)


def test_weights_apart_are_gathered_at_every_call(virtual: VirtualCuda) -> None:
    layer = nn.GRU(16, 16).cuda()
    x = torch.randn(6, 2, 16, device="cuda")
    virtual.settle()
    asked = Requests(virtual)
    layer(x)
    together = list(asked.sizes)
    with torch.no_grad():
        layer.weight_hh_l0 = nn.Parameter(torch.zeros_like(layer.weight_hh_l0))
    virtual.settle()
    asked.sizes.clear()
    layer(x)
    apart = [size for size in asked.sizes if size not in together]
    assert apart == [4 * recurrent.weight_count(3, 16, 16, 0, 1, 1)]


def test_backward_needs_training_mode(virtual: VirtualCuda) -> None:
    layer = nn.LSTM(16, 16).cuda().eval()
    out, _ = layer(torch.randn(7, 3, 16, device="cuda"))
    with pytest.raises(RuntimeError, match="cudnn RNN backward can only be called in training mode"):
        out.sum().backward()


def test_packed_sequences(virtual: VirtualCuda) -> None:
    layer = nn.LSTM(16, 8).cuda()
    x = torch.randn(7, 3, 16, device="cuda", requires_grad=True)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([7, 5, 2]))
    assert packed.batch_sizes.tolist() == [3, 3, 2, 2, 2, 1, 1] and packed.data.shape == (14, 16)
    out, (state, _) = layer(packed)
    padded, lengths = nn.utils.rnn.pad_packed_sequence(out)
    assert padded.shape == (7, 3, 8) and padded.is_cuda and lengths.tolist() == [7, 5, 2]
    (padded.sum() + state.sum()).backward()
    assert x.grad is not None and x.grad.shape == x.shape
    with pytest.raises(RuntimeError, match="1D CPU int64 tensor, but got 1D cuda:0 tensor"):
        nn.utils.rnn.pack_padded_sequence(x, torch.tensor([7, 5, 2], device="cuda"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_takes_half_precision(virtual: VirtualCuda, dtype: Any) -> None:
    """Always float16 (`_cudnn_rnn_cast_reflatten`), with the weights cast into one block at every call."""
    layer = nn.LSTM(16, 16, 2).cuda()
    with torch.autocast("cuda", dtype=dtype):
        out, (state, _) = layer(torch.randn(7, 3, 16, device="cuda"))
    assert out.dtype is state.dtype is torch.float16
    out.float().sum().backward()
    assert {p.grad.dtype for p in layer.parameters() if p.grad is not None} == {torch.float32}


@pytest.mark.parametrize("how", ["off", "bfloat16"])
def test_what_cudnn_does_not_take_is_composed(virtual: VirtualCuda, how: str) -> None:
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    layer = nn.GRU(16, 16).cuda().to(dtype)
    with torch.backends.cudnn.flags(enabled=how != "off"):
        out, _ = layer(torch.randn(7, 3, 16, device="cuda", dtype=dtype))
    assert "Cudnn" not in type(out.grad_fn).__name__
    out.sum().backward()
    assert layer.weight_ih_l0.grad is not None


def test_dropout_has_a_state_on_each_card(virtual: VirtualCuda) -> None:
    layer = nn.LSTM(16, 16, 2, dropout=0.5).cuda()
    x = torch.randn(7, 3, 16, device="cuda")
    layer.eval()(x)
    before = torch.cuda.memory_allocated()
    layer.train()(x)
    layer(x)
    assert torch.cuda.memory_allocated() - before == recurrent.DROPOUT_STATE


def test_a_module_with_gradients_can_go_to_the_cpu(virtual: VirtualCuda) -> None:
    for module in (nn.LSTM(16, 16), nn.Linear(16, 16)):
        out = module.cuda()(torch.randn(2, 3, 16, device="cuda"))
        (out[0] if isinstance(out, tuple) else out).sum().backward()
        module.cpu()
        assert all(not p.is_cuda and p.grad is not None and not p.grad.is_cuda for p in module.parameters())
        module.cuda()
        assert all(p.is_cuda and p.grad is not None and p.grad.is_cuda for p in module.parameters())


def test_pointers_tell_tensors_apart(virtual: VirtualCuda) -> None:
    x, y = torch.zeros(10, device="cuda"), torch.zeros(10, device="cuda")
    assert x.data_ptr() not in (0, y.data_ptr())
    assert x.view(5, 2).data_ptr() == x.data_ptr() and x[3:].data_ptr() == x.data_ptr() + 12


class Attend(nn.Module):
    def forward(self, x: Any) -> Any:
        return F.scaled_dot_product_attention(x, x, x)


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)), (64, 32, 512)),
    "recurrent": (lambda: nn.LSTM(64, 64, 2), (500, 8, 64)),
    "attention": (Attend, (4, 8, 512, 64)),
    "encoder": (lambda: nn.TransformerEncoderLayer(512, 8, batch_first=True), (4, 128, 512)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU()), (8, 3, 64, 64)),
    "norm": (lambda: nn.Sequential(nn.LayerNorm(512), nn.GELU(), nn.Dropout(0.1), nn.Softmax(-1)), (64, 32, 512)),
}


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_inference_mode_takes_what_no_grad_takes(name: str, *, amp: bool) -> None:
    make, shape = PROGRAMS[name]
    peaks = []
    modes: tuple[Any, ...] = (torch.no_grad, torch.inference_mode)
    for mode in modes:
        with VirtualCuda("t4") as virtual:
            model = make().cuda().eval()
            x = torch.randn(*shape, device="cuda")
            virtual.settle()
            asked = Requests(virtual)
            with mode(), torch.autocast("cuda", enabled=amp):
                model(x)
            peaks.append((torch.cuda.max_memory_allocated(), asked.sizes))
    assert peaks[0] == peaks[1]
