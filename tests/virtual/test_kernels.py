"""What programs take on the virtual device, against what the published CUDA build of torch 2.13 asks of its allocator.

The numbers were traced on that build: for small programs each request of the second run in order
(fixtures/kernels/requests.json), for two models the peaks of allocated and reserved bytes over two steps. What only a
real cuDNN tells (the workspaces of convolutions, attention by cuDNN) is left out.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from memlint.virtual import kernels  # noqa: E402
from memlint.virtual.device import VirtualCuda  # noqa: E402
from memlint.virtual.kernels import attention_backend, cublas_workspace, reduction  # noqa: E402

MIB = 2**20
ROOT = Path(__file__).parents[2]


def test_a_step_recorded_on_a_card_is_predicted_allocation_by_allocation() -> None:
    """Forward, backward and optimizer: 6,770 allocations, by size and line, and 5,894 frees between them."""
    command = [sys.executable, str(ROOT / "benchmarks" / "trace_step.py"), "--least", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = ran.stdout.splitlines()
    assert said[1] == "allocations by size and line, in order: 6770 of 6770 predicted (100.00%), 0 extra"
    assert said[2] == "allocations and frees by size, in order: 12664 of 12664 predicted (100.00%), 0 extra"


@pytest.mark.parametrize(
    ("capability", "version", "nbytes"),
    [
        ((7, 5), "2.13.0", 8_519_680),
        ((8, 0), "2.13.0+cu130", 8_519_680),
        ((9, 0), "2.6.0", 32 * MIB),
        ((10, 0), "2.11.0", 8_519_680),
        ((10, 0), "2.12.0", 32 * MIB),
        ((12, 0), "2.13.0", 32 * MIB),
        ((11, 0), "2.13.0", 8_519_680),
    ],
)
def test_workspaces_of_cublas(capability: tuple[int, int], version: str, nbytes: int) -> None:
    assert cublas_workspace(capability, version) == nbytes


def test_each_thread_has_a_workspace() -> None:
    with VirtualCuda("h100") as virtual:
        layer = nn.Linear(64, 64).cuda()
        before = virtual.allocator.allocated
        out = layer(torch.randn(4, 64, device="cuda"))
        assert virtual.allocator.allocated - before >= 32 * MIB
        out.sum().backward()
        assert virtual.allocator.allocated - before >= 64 * MIB
        steady = virtual.allocator.allocated
        layer(torch.randn(4, 64, device="cuda")).sum().backward()
        virtual.settle()
        assert virtual.allocator.allocated <= steady


@pytest.mark.parametrize(
    ("shape", "dims", "card", "sizes"),
    [
        ((1_966_080,), [0], (48, 1536), [576, 4]),  # the recorded run in fixtures/traces
        ((1000,), [0], (40, 1024), []),
        ((64, 100_000), [1], (132, 2048), []),
        ((8192, 1024), [0], (40, 1024), [20_971_520, 32]),  # from here on as traced
        ((8192, 1024), [0], (108, 2048), [67_108_864, 32]),
        ((8192, 1024), [0], (82, 1536), [64_487_424, 32]),
        ((100_000, 7), [0], (40, 1024), [4480, 8]),
        ((16, 1024, 768), [0, 1], (40, 1024), [21_233_664, 24]),
    ],
)
def test_staging_of_reductions(
    shape: tuple[int, ...], dims: list[int], card: tuple[int, int], sizes: list[int]
) -> None:
    strides = torch.empty(shape, device="meta").stride()
    assert reduction(shape, strides, dims, itemsize=4, multiprocessors=card[0], threads=card[1]) == sizes


HALF, FULL = torch.float16, torch.float32


@pytest.mark.parametrize(
    ("capability", "dtype", "given", "kernel"),
    [
        ((7, 5), HALF, {}, "efficient"),
        ((7, 5), torch.bfloat16, {}, "math"),
        ((7, 5), FULL, {}, "efficient"),
        ((8, 0), HALF, {}, "flash"),
        ((8, 0), torch.bfloat16, {"dropout": 0.1}, "flash"),
        ((8, 0), HALF, {"mask": True}, "efficient"),
        ((8, 6), FULL, {}, "efficient"),
        ((9, 0), HALF, {}, "cudnn"),
        ((9, 0), HALF, {"mask": True}, "cudnn"),
        ((9, 0), HALF, {"dropout": 0.1}, "flash"),
        ((9, 0), FULL, {}, "efficient"),
        ((9, 0), torch.float64, {}, "math"),
        ((7, 5), HALF, {"width": 70}, "math"),
        ((8, 0), HALF, {"width": 70}, "flash"),
        ((8, 0), FULL, {"width": 70}, "math"),
        ((7, 5), FULL, {"width": 70}, "efficient"),
        ((8, 0), HALF, {"width": 512}, "efficient"),
        ((8, 0), HALF, {"grouped": True}, "flash"),
        ((8, 0), FULL, {"grouped": True}, "math"),
    ],
)
def test_attention_kernels(capability: tuple[int, int], dtype: Any, given: dict[str, Any], kernel: str) -> None:
    q = torch.empty(2, 4, 16, given.get("width", 64), dtype=dtype, device="meta", requires_grad=True)
    mask = torch.empty(2, 4, 16, 16, dtype=dtype, device="meta") if given.get("mask") else None
    grouped = bool(given.get("grouped"))
    assert attention_backend(q, q, q, mask, given.get("dropout", 0.0), False, grouped, capability) == kernel


def test_dropout_saves_a_mask_of_one_byte() -> None:
    with VirtualCuda("t4") as virtual:
        x = torch.randn(MIB, device="cuda", requires_grad=True)
        before = virtual.allocator.allocated
        out = F.dropout(x, 0.1)
        assert virtual.allocator.allocated - before == 4 * MIB + MIB
        del out
        virtual.settle()
        assert virtual.allocator.allocated == before
        F.dropout(x, 0.1, training=False)


def peaks(model: nn.Module, x: Any, optimizer: Any) -> tuple[int, int]:
    for _ in range(2):
        optimizer.zero_grad()
        model(x()).square().mean().backward()
        optimizer.step()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(256, 768), nn.Linear(256, 256), nn.LayerNorm(256)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, 64).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        return x + F.dropout(self.out(mixed), 0.1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {"mlp": (mlp, (256, 512)), "attention": (Attention, (8, 256, 256))}
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "adam-foreach-false": lambda p: torch.optim.Adam(p, foreach=False),
}
#: by card, model and optimizer: allocated and reserved at most
TRACED: dict[tuple[str, str, str], tuple[int, int]] = {
    ("t4", "mlp", "adamw"): (59033600, 88080384),
    ("t4", "mlp", "sgd"): (36975616, 67108864),
    ("t4", "mlp", "adagrad"): (59033600, 67108864),
    ("t4", "mlp", "adam-foreach-false"): (59031552, 88080384),
    ("t4", "attention", "adamw"): (46439936, 69206016),
    ("t4", "attention", "sgd"): (44330496, 67108864),
    ("t4", "attention", "adagrad"): (45385216, 69206016),
    ("t4", "attention", "adam-foreach-false"): (46439936, 71303168),
    ("a100-40gb", "mlp", "adamw"): (59033600, 88080384),
    ("a100-40gb", "mlp", "sgd"): (36975616, 67108864),
    ("a100-40gb", "mlp", "adagrad"): (59033600, 67108864),
    ("a100-40gb", "mlp", "adam-foreach-false"): (59031552, 88080384),
    ("a100-40gb", "attention", "adamw"): (46439936, 69206016),
    ("a100-40gb", "attention", "sgd"): (44330496, 67108864),
    ("a100-40gb", "attention", "adagrad"): (45385216, 69206016),
    ("a100-40gb", "attention", "adam-foreach-false"): (46439936, 71303168),
    ("rtx-3060", "mlp", "adamw"): (59033600, 88080384),
    ("rtx-3060", "mlp", "sgd"): (36975616, 67108864),
    ("rtx-3060", "mlp", "adagrad"): (59033600, 67108864),
    ("rtx-3060", "mlp", "adam-foreach-false"): (59031552, 88080384),
    ("rtx-3060", "attention", "adamw"): (46439936, 69206016),
    ("rtx-3060", "attention", "sgd"): (44330496, 67108864),
    ("rtx-3060", "attention", "adagrad"): (45385216, 69206016),
    ("rtx-3060", "attention", "adam-foreach-false"): (46439936, 71303168),
}


@pytest.mark.parametrize("case", sorted(TRACED), ids="-".join)
def test_peaks_as_traced(case: tuple[str, str, str]) -> None:
    card, name, optimizer = case
    with VirtualCuda(card):
        make, shape = MODELS[name]
        model = make().cuda()
        chosen = OPTIMIZERS[optimizer](model.parameters())
        allocated, reserved = peaks(model, lambda: torch.randn(*shape, device="cuda"), chosen)
    assert reserved == TRACED[case][1]
    # in the backward of attention two temporaries come in another order
    assert allocated == pytest.approx(TRACED[case][0], rel=0.02 if name == "attention" else 0)


# -- programs, and what they were traced to ask for ----------------------------------------------------------------

Program = Callable[[], Callable[[], Any]]


def ones(*shape: int, dtype: Any = torch.float32, grad: bool = True) -> Any:
    return torch.zeros(*shape, device="cuda", dtype=dtype).requires_grad_(grad)


def whole_numbers(*shape: int) -> Any:
    return torch.zeros(*shape, device="cuda", dtype=torch.long)


def operator(
    function: Callable[..., Any],
    *shapes: tuple[int, ...],
    dtype: Any = torch.float32,
    last: bool = False,
    auto: bool = False,
) -> Program:
    """Forward and backward of a function."""

    def make() -> Callable[[], Any]:
        inputs = [ones(*shape, dtype=dtype, grad=False) for shape in shapes]
        if last:
            inputs = [x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs]
        inputs = [x.requires_grad_() for x in inputs]

        def run() -> Any:
            with torch.autocast("cuda", torch.bfloat16, enabled=auto):
                out = function(*inputs)
            torch.autograd.grad(out, inputs, torch.empty_like(out))

        return run

    return make


def forward(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any = torch.float32) -> Program:
    def make() -> Callable[[], Any]:
        inputs = [ones(*shape, dtype=dtype, grad=False) for shape in shapes]

        def run() -> Any:
            function(*inputs)

        return run

    return make


def layer(
    module: Callable[[], nn.Module],
    *shape: int,
    dtype: Any = torch.float32,
    last: bool = False,
    auto: bool = False,
    indices: bool = False,
) -> Program:
    """Forward and backward of a module, with fresh gradients."""

    def make() -> Callable[[], Any]:
        made = module().to("cuda", dtype)
        x = whole_numbers(*shape) if indices else ones(*shape, dtype=dtype, grad=False)
        if last:
            x = x.contiguous(memory_format=torch.channels_last)
        if not indices:
            x.requires_grad_()

        def run() -> Any:
            for each in (*made.parameters(), x):
                each.grad = None
            with torch.autocast("cuda", torch.bfloat16, enabled=auto):
                out = made(x)
            out.backward(torch.empty_like(out))

        return run

    return make


def attention(
    dtype: Any = torch.float32,
    *,
    length: int = 500,
    keys: int = 0,
    width: int = 64,
    heads: int = 4,
    groups: int = 0,
    mask: Any = None,
    **more: Any,
) -> Program:
    def make() -> Callable[[], Any]:
        q = ones(2, heads, length, width, dtype=dtype)
        k, v = (ones(2, groups or heads, keys or length, width, dtype=dtype) for _ in range(2))
        m = None if mask is None else torch.zeros(2, 1, length, keys or length, device="cuda", dtype=mask)

        def run() -> Any:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=m, enable_gqa=groups > 0, **more)
            torch.autograd.grad(out, (q, k, v), torch.empty_like(out))

        return run

    return make


def optimizer(make_one: Callable[[Any], Any], *, clip: bool = False, scaler: bool = False) -> Program:
    def make() -> Callable[[], Any]:
        parameters = [nn.Parameter(ones(*shape, grad=False)) for shape in ((1000, 1000), (1000,), (50, 30, 3, 3), (7,))]
        made, scale = make_one(parameters), torch.amp.GradScaler("cuda") if scaler else None

        def run() -> Any:
            for each in parameters:
                each.grad = torch.zeros_like(each)
            if clip:
                nn.utils.clip_grad_norm_(parameters, 1.0)
            if scale is not None:
                scale.scale(torch.zeros(1, device="cuda", requires_grad=True).sum())
                scale.step(made)
                scale.update()
            else:
                made.step()
            made.zero_grad()

        return run

    return make


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

PROGRAMS: dict[str, Program] = {
    "linear": layer(lambda: nn.Linear(256, 512), 8, 128, 256),
    "linear bf16": layer(lambda: nn.Linear(1024, 1024), 8192, 1024, dtype=BF16),
    "linear autocast": layer(lambda: nn.Linear(256, 512), 8, 128, 256, auto=True),
    "linear odd": layer(lambda: nn.Linear(250, 511), 130, 250),
    "matmul folded": operator(lambda a, b: a @ b, (8, 128, 64), (64, 96)),
    "matmul transposed": operator(lambda a, b: a.transpose(0, 1) @ b, (8, 128, 64), (64, 96)),
    "matmul of heads": operator(
        lambda q, k: q.view(2, 50, 4, 64).transpose(1, 2) @ k.view(2, 50, 4, 64).permute(0, 2, 3, 1),
        (2, 50, 256),
        (2, 50, 256),
    ),
    "bmm expanded": operator(lambda a, b: a @ b.expand(8, 64, 96), (8, 128, 64), (1, 64, 96)),
    "strided product": operator(lambda a, b: a[:, ::2] @ b, (128, 128), (64, 96)),
    "baddbmm": operator(torch.baddbmm, (8, 128, 96), (8, 128, 64), (8, 64, 96)),
    "depthwise": layer(lambda: nn.Conv2d(32, 32, 3, padding=1, groups=32), 4, 32, 28, 28),
    "bf16 conv": layer(lambda: nn.Conv2d(16, 32, 3, padding=1), 4, 16, 28, 28, dtype=BF16),
    "batch norm bf16": layer(lambda: nn.BatchNorm2d(64), 16, 64, 56, 56, dtype=BF16),
    "batch norm bf16 channels last": layer(lambda: nn.BatchNorm2d(64), 16, 64, 56, 56, dtype=BF16, last=True),
    "batch norm few channels": layer(lambda: nn.BatchNorm2d(3), 32, 3, 32, 32, dtype=BF16, last=True),
    "batch norm 1d": layer(lambda: nn.BatchNorm1d(128), 64, 128),
    "layer norm": layer(lambda: nn.LayerNorm(768), 8, 128, 768, dtype=BF16),
    "layer norm tall": layer(lambda: nn.LayerNorm(64), 70000, 64),
    "group norm": layer(lambda: nn.GroupNorm(8, 64), 4, 64, 28, 28),
    "group norm bf16": layer(lambda: nn.GroupNorm(8, 64), 4, 64, 28, 28, dtype=BF16),
    "group norm without weights": layer(lambda: nn.GroupNorm(8, 64, affine=False), 4, 64, 28, 28),
    "rms norm": layer(lambda: nn.RMSNorm(768), 8, 128, 768),
    "rms norm autocast": layer(lambda: nn.RMSNorm(768), 8, 128, 768, auto=True),
    "dropout": operator(lambda x: F.dropout(x, 0.1), (1000, 1000)),
    "dropout of all": operator(lambda x: F.dropout(x, 1.0), (1000, 1000)),
    "softmax": operator(lambda x: F.softmax(x, -1), (400, 1000), dtype=BF16),
    "cross entropy": operator(lambda x: F.cross_entropy(x, whole_numbers(4096)), (4096, 1000)),
    "cross entropy autocast": operator(
        lambda x: F.cross_entropy(x, whole_numbers(4096)), (4096, 1000), dtype=BF16, auto=True
    ),
    "label smoothing": operator(lambda x: F.cross_entropy(x, whole_numbers(4096), label_smoothing=0.1), (4096, 1000)),
    "mse": operator(F.mse_loss, (4096, 1000), (4096, 1000)),
    "smooth l1": operator(F.smooth_l1_loss, (4096, 1000), (4096, 1000)),
    "l1": operator(F.l1_loss, (4096, 1000), (4096, 1000)),
    "embedding few": layer(lambda: nn.Embedding(5000, 64), 3072, indices=True),
    "embedding many": layer(lambda: nn.Embedding(10000, 128), 4000, indices=True),
    "attention": attention(),
    "attention fp16": attention(F16),
    "attention bf16": attention(BF16),
    "attention causal": attention(BF16, is_causal=True),
    "attention dropout": attention(F16, dropout_p=0.1),
    "attention wide": attention(F32, width=128),
    "attention fp16 wide": attention(F16, width=256),
    "attention fp16 512": attention(F16, width=512),
    "attention bool mask": attention(BF16, mask=torch.bool),
    "attention grouped": attention(BF16, heads=8, groups=2),
    "attention of others": attention(F32, length=100, keys=700),
    "sum of rows": forward(lambda x: x.sum(0), (8192, 1024)),
    "sum of rows bf16": forward(lambda x: x.sum(0), (8192, 4096), dtype=BF16),
    "sum of images": forward(lambda x: x.sum((0, 2, 3)), (16, 64, 56, 56)),
    "sum of seven": forward(lambda x: x.sum(0), (100000, 7)),
    "sum of tokens": forward(lambda x: x.sum((0, 1)), (16, 1024, 768)),
    "sum of all": forward(lambda x: x.sum(), (1966080,)),
    "mean": operator(lambda x: x.mean(0), (20000, 100)),
    "variance": operator(lambda x: x.var(), (2000, 1000)),
    "largest of bf16": forward(lambda x: x.amax(), (2000, 1000), dtype=BF16),
    "argmax": forward(lambda x: x.argmax(0), (20000, 100)),
    "norm of rows": operator(lambda x: x.norm(dim=1), (2000, 1000)),
    "gelu": operator(F.gelu, (500, 1000)),
    "log sigmoid": operator(F.logsigmoid, (500, 1000)),
    "mish": operator(F.mish, (500, 1000)),
    "gather": operator(lambda x: x.gather(1, whole_numbers(1000, 64)), (1000, 64)),
    "rows by number": operator(lambda x: x[whole_numbers(5000)], (1000, 64)),
    "rows by few numbers": operator(lambda x: x[whole_numbers(500)], (1000, 64)),
    "rows by numbers of the CPU": operator(lambda x: x[torch.zeros(500, dtype=torch.long)], (1000, 64)),
    "rows by short numbers": operator(lambda x: x[whole_numbers(5000).int()], (1000, 64)),
    "rows of many": operator(lambda x: x[whole_numbers(5000)], (70000, 8)),
    "entries": operator(lambda x: x[torch.zeros(500, dtype=torch.long), whole_numbers(500)], (1000, 64)),
    "grid of entries": operator(lambda x: x[whole_numbers(50, 1), whole_numbers(20)], (1000, 64)),
    "grid by the CPU": operator(lambda x: x[torch.zeros(50, 1, dtype=torch.long), whole_numbers(20)], (1000, 64)),
    "entries apart": operator(lambda x: x[whole_numbers(500), :, whole_numbers(500)], (300, 40, 8)),
    "columns by number": operator(lambda x: x[:, :, whole_numbers(500)], (300, 40, 8)),
    "put": forward(lambda x, y: x.index_put_((whole_numbers(500),), y), (1000, 64), (500, 64)),
    "put and add": forward(lambda x, y: x.index_put_((whole_numbers(500),), y, accumulate=True), (1000, 64), (500, 64)),
    "put and add many": forward(
        lambda x, y: x.index_put_((whole_numbers(300_000),), y, accumulate=True), (1000, 64), (1, 64)
    ),
    "sort": operator(lambda x: x.sort()[0], (64, 1000)),
    "top": operator(lambda x: x.topk(5)[0], (64, 1000)),
    "two uses": operator(lambda x: x.sin() + x.exp() + x.cos(), (500, 1000)),
    "residual": layer(
        lambda: nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True, norm_first=True), 2, 200, 256
    ),
    "SGD with momentum": optimizer(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1)),
    "SGD fused": optimizer(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True)),
    "AdamW": optimizer(torch.optim.AdamW),
    "AdamW fused": optimizer(lambda p: torch.optim.AdamW(p, fused=True)),
    "Adam one by one": optimizer(lambda p: torch.optim.Adam(p, foreach=False)),
    "Adafactor": optimizer(torch.optim.Adafactor),
    "clipped": optimizer(lambda p: torch.optim.SGD(p, lr=0.1), clip=True),
}

RECORDED: dict[str, dict[str, list[int]]] = json.loads(
    (Path(__file__).parents[2] / "fixtures" / "kernels" / "requests.json").read_text(encoding="utf-8")
)


def requests(program: Program, virtual: VirtualCuda) -> list[int]:
    """What the second run asks for, with both workspaces of cuBLAS there already."""
    warm = ones(64, 64)
    (warm @ warm).sum().backward()
    run = program()
    run()
    virtual.settle()
    asked: list[int] = []
    virtual.device.listener = lambda action, index, address, nbytes, name: asked.append(nbytes) if nbytes else None
    run()
    return asked


@pytest.mark.parametrize(("name", "card"), [(name, card) for name in RECORDED for card in RECORDED[name]])
def test_requests_as_traced(name: str, card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "convolution_workspace", lambda *given: 0)
    with VirtualCuda(card) as virtual:
        assert requests(PROGRAMS[name], virtual) == RECORDED[name][card]


def test_what_a_hook_keeps_is_not_added_into() -> None:
    with VirtualCuda("t4") as virtual:
        x = ones(1000, 1000)
        h = x * 2
        kept: list[Any] = []
        first, second = h.sin(), h.exp()
        h.register_hook(kept.append)
        (first + second).backward(torch.empty_like(first))
        assert kept
        before = virtual.allocator.allocated
        kept.clear()
        del h, first, second
        virtual.settle()
        assert virtual.allocator.allocated < before


@pytest.mark.parametrize(
    ("kernel", "source", "weight", "out", "stride", "recorded"),
    [
        ("FORWARD", (64, 22), (64, 64, 3), (64, 22), 1, 37_318_672),
        ("FORWARD", (128, 22), (128, 128, 3), (128, 11), 2, 74_932_240),
        ("FORWARD", (256, 22), (512, 256, 1), (512, 11), 2, 149_209_104),
        ("FORWARD", (256, 6), (256, 256, 3), (256, 6), 1, 13_418_512),
        ("FORWARD", (128, 11), (512, 128, 1), (512, 11), 1, 4_194_304),
        ("INPUT", (512, 6), (512, 512, 3), (512, 3), 2, 37_085_200),
        ("INPUT", (128, 22), (128, 128, 3), (128, 11), 2, 93_517_840),
        ("INPUT", (128, 11), (512, 128, 1), (512, 11), 1, 4_194_304),
        ("INPUT", (512, 11), (1024, 512, 1), (1024, 6), 2, 120_677_008),
        ("WEIGHT", (256, 11), (256, 256, 3), (256, 6), 2, 50_589_784),
        ("WEIGHT", (64, 22), (64, 64, 3), (64, 22), 1, 75_522_512),
    ],
)
def test_workspaces_of_convolutions(
    kernel: str, source: tuple[int, int], weight: tuple[int, int, int], out: tuple[int, int], stride: int, recorded: int
) -> None:
    """As recorded on a card in a step of ResNet-101 with batch 300 (see `convolution_workspace`)."""
    made = [torch.empty(300, channels, size, size, device="meta") for channels, size in (source, out)]
    window = torch.empty(*weight, weight[2], device="meta")
    said = kernels.convolution_workspace(kernels.Pass[kernel], made[0], window, made[1], stride > 1)
    assert said == pytest.approx(recorded, rel=0.02)


def test_a_workspace_that_does_not_fit_is_done_without() -> None:
    with VirtualCuda("t4", capacity=40 * 2**20) as virtual:
        layer = nn.Conv2d(64, 64, 3, padding=1, device="cuda")
        x = torch.zeros(4, 64, 128, 128, device="cuda")  # 16 MiB, and the output
        layer(x)
        assert virtual.allocator.reserved <= 40 * 2**20
        assert torch.cuda.max_memory_allocated() < 40 * 2**20
