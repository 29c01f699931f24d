"""Programs see a CUDA device within the virtual one, and torch as it was after it."""

# ruff: noqa: PT018  # what belongs together is asked in one line
from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from memlint.errors import ConfigError  # noqa: E402
from memlint.virtual.device import VirtualCuda, active  # noqa: E402

MIB = 2**20


@pytest.fixture
def virtual() -> Iterator[VirtualCuda]:
    with VirtualCuda("t4") as device:
        yield device


def mlp(width: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def train(model: nn.Module, optimizer: Any, x: Any, steps: int = 2) -> Any:
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    return loss


def test_the_card_is_seen(virtual: VirtualCuda) -> None:
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    assert torch.cuda.get_device_name() == "Tesla T4"
    properties = torch.cuda.get_device_properties(0)
    assert (properties.major, properties.minor) == torch.cuda.get_device_capability() == (7, 5)
    assert properties.total_memory == virtual.card.total_bytes
    free, total = torch.cuda.mem_get_info()
    assert 0 < free < total == virtual.card.total_bytes
    assert not torch.cuda.is_bf16_supported(including_emulation=False)
    torch.cuda.synchronize()
    assert active() is virtual


@pytest.mark.skipif(not hasattr(torch, "accelerator"), reason="since torch 2.6")
def test_the_card_is_the_accelerator(virtual: VirtualCuda) -> None:
    assert torch.accelerator.is_available() and torch.accelerator.device_count() == 1
    device = torch.accelerator.current_accelerator()
    assert device is not None and device.type == "cuda"
    assert torch.accelerator.current_device_index() == 0
    assert not torch.accelerator.current_stream().is_capturing()
    x = torch.zeros(1000, device=device.type)
    assert x.is_cuda
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        if hasattr(torch.accelerator, name):  # since torch 2.9
            assert getattr(torch.accelerator, name)() == getattr(torch.cuda, name)() > 0
    torch.accelerator.synchronize()


def test_tensors_are_on_the_device(virtual: VirtualCuda) -> None:
    x = torch.zeros(3, 4, device="cuda")
    assert (x.device, x.is_cuda, x.is_cpu, x.is_meta, x.get_device()) == (torch.device("cuda:0"), True, False, False, 0)
    y = torch.ones(4, 5)
    assert y.device.type == "cpu" and not y.is_cuda
    assert (x @ y.to("cuda:0")).device == x.device
    assert x.cpu().device.type == "cpu" and x.to("cpu").shape == (3, 4)
    assert torch.zeros_like(x).is_cuda and x.new_zeros(2).is_cuda
    assert torch.arange(3, device=x.device).is_cuda and torch.tensor([1, 2], device="cuda").is_cuda
    assert y.cuda(non_blocking=True).is_cuda and y.to(x).is_cuda and y.to(torch.device("cuda")).is_cuda
    assert "cuda:0" in repr(x)
    assert x.view(-1)[2:].is_cuda and x.T.is_cuda
    with pytest.raises(TypeError, match="can't convert cuda"):
        x.numpy()
    assert y.numpy().sum() == 20  # data of the CPU stays


def test_memory_is_counted_and_freed(virtual: VirtualCuda) -> None:
    x = torch.zeros(MIB, device="cuda")
    assert torch.cuda.memory_allocated() == 4 * MIB
    assert torch.cuda.memory_reserved() == 20 * MIB
    view = x[: MIB // 2]
    del x
    assert torch.cuda.memory_allocated() == 4 * MIB
    del view
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.max_memory_allocated() == 4 * MIB
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.empty_cache()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_reserved() == 0
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == 0


def test_an_address_of_the_host_that_is_used_again_is_another_storage(virtual: VirtualCuda) -> None:
    scores = torch.randn(12, 40, device="cuda")
    allocated = torch.cuda.memory_allocated()
    for _ in range(30):
        best = scores.topk(5).indices
        found = torch.tensor([1] * 12, device="cuda")
        assert not (best == found[:, None]).any(-1).float().mean().item() > 1
        del best, found
    assert torch.cuda.memory_allocated() == allocated


def test_a_training_step_with_an_optimizer_made_before_or_after(virtual: VirtualCuda) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    before = list(model.parameters())
    model.to("cuda")
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    loss = train(model, optimizer, torch.randn(8, 64, device="cuda"))
    assert loss.is_cuda and all(p.grad is not None and p.grad.is_cuda for p in model.parameters())
    assert len(optimizer.state) == 4
    assert float(loss.detach()) == loss.item() == 1.0
    assert f"{loss.item():.1f}" == "1.0"


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "NAdam", "RAdam", "Adamax"])
@pytest.mark.parametrize("settings", [{}, {"foreach": False}])
def test_optimizers(virtual: VirtualCuda, name: str, settings: dict[str, Any]) -> None:
    model = mlp().cuda()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **settings)
    train(model, optimizer, torch.randn(8, 64, device="cuda"))
    allocated = torch.cuda.memory_allocated()
    train(model, optimizer, torch.randn(8, 64, device="cuda"))
    assert torch.cuda.memory_allocated() == allocated


def test_a_large_model_takes_no_memory_of_the_host(virtual: VirtualCuda) -> None:
    layer = nn.Linear(70_000, 70_000, bias=False)  # 19.6 GB
    assert layer.weight.device.type == "cpu"
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        layer.cuda()
    del layer
    gc.collect()
    mlp().cuda()(torch.randn(2, 64, device="cuda"))  # and it goes on


def test_default_device_and_contexts(virtual: VirtualCuda) -> None:
    torch.set_default_device("cuda")
    try:
        assert nn.Linear(4, 4).weight.is_cuda and torch.randn(3).is_cuda and torch.tensor(3.0).is_cuda
    finally:
        torch.set_default_device(None)
    with torch.device("cuda"):
        assert torch.empty(3).is_cuda
    with torch.cuda.device(0):
        assert torch.cuda.current_device() == 0
    assert torch.empty(3).device.type == "cpu"


def test_values_are_stand_ins_and_constants_themselves(virtual: VirtualCuda) -> None:
    x = torch.randn(3, device="cuda")
    assert not torch.isnan(x).any()
    assert not bool(x.sum() > 5)
    assert torch.tensor(7.5, device="cuda").item() == 7.5
    assert torch.zeros((), device="cuda").item() == 0 and torch.full((), 3, device="cuda").clone().item() == 3
    assert x.tolist() == [1.0, 1.0, 1.0]
    assert x.nonzero().shape == (3, 1) and x[x > 0].shape == (3,)
    assert torch.equal(x, x)
    x[x > 0] = 1.0
    assert int(torch.ones(3, dtype=torch.long, device="cuda").max()) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_and_scaler(virtual: VirtualCuda, dtype: Any) -> None:
    model = mlp().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(2):
        with torch.autocast("cuda", dtype=dtype):
            out = model(torch.randn(8, 64, device="cuda"))
            loss = F.cross_entropy(out, torch.randint(0, 10, (8,), device="cuda"))
            with torch.autocast("cuda", enabled=False):
                assert (out.float() @ torch.randn(10, 3, device="cuda")).dtype is torch.float32
        assert out.dtype is dtype and loss.dtype is torch.float32
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert len(optimizer.state) == 4  # no step was skipped
    assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_saves_memory(virtual: VirtualCuda, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    blocks = nn.ModuleList([nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.1)) for _ in range(6)]).cuda()

    def peak(run: Callable[..., Any]) -> int:
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        x = torch.randn(4096, 256, device="cuda", requires_grad=True)
        for block in blocks:
            x = run(block, x)
        x.sum().backward()
        return int(torch.cuda.max_memory_allocated())

    plain = peak(lambda block, x: block(x))
    assert peak(lambda block, x: checkpoint(block, x, use_reentrant=reentrant)) < 0.85 * plain


def test_models_are_copied_saved_and_loaded(virtual: VirtualCuda, tmp_path: Path) -> None:
    model = mlp().cuda()
    allocated = torch.cuda.memory_allocated()
    twin = copy.deepcopy(model)
    assert torch.cuda.memory_allocated() == 2 * allocated
    assert all(p.is_cuda for p in twin.parameters())
    model.load_state_dict(twin.state_dict())
    model.load_state_dict({name: torch.zeros(value.shape) for name, value in twin.state_dict().items()})
    assert all(p.is_cuda for p in model.parameters())
    torch.save({"w": torch.ones(3)}, tmp_path / "w.pt")
    assert torch.load(tmp_path / "w.pt", map_location="cuda")["w"].is_cuda
    assert torch.load(tmp_path / "w.pt")["w"].sum() == 3
    assert model.cpu()[0].weight.device.type == "cpu"


def test_loaders_generators_streams(virtual: VirtualCuda) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.arange(8))
    for x, y in torch.utils.data.DataLoader(data, batch_size=4, shuffle=True):
        assert x.to("cuda", non_blocking=True).is_cuda and y.cuda().is_cuda
    torch.manual_seed(0)
    generator = torch.Generator(device="cuda").manual_seed(1)
    assert torch.randn(3, device="cuda", generator=generator).is_cuda
    assert generator.device.type == "cuda"
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.zeros(4, device="cuda")
        assert torch.cuda.current_stream() is stream
    torch.cuda.current_stream().wait_stream(stream)
    x.record_stream(torch.cuda.current_stream())
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    end.record()
    assert start.elapsed_time(end) == 0


def test_devices_are_not_mixed() -> None:
    with VirtualCuda("t4", devices=2) as virtual:
        x, y = torch.zeros(3, device="cuda:0"), torch.zeros(3, device="cuda:1")
        assert y.device.index == 1
        assert [a.allocated for a in virtual.device.allocators] == [512, 512]
        for other in (y, torch.ones(3)):
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                x + other
        assert (x + torch.tensor(2.0)).is_cuda
        assert x[torch.tensor([0, 2])].is_cuda
        assert y.to("cuda:0").device.index == 0
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.zeros(1, device="cuda:2")


def test_modules(virtual: VirtualCuda) -> None:
    x = torch.randn(2, 3, 32, 32, device="cuda")
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)).cuda()
    F.interpolate(net(x), scale_factor=2).mean().backward()  # type: ignore[no-untyped-call]
    seq = torch.randn(5, 2, 16, device="cuda")
    for recurrent in (nn.LSTM(16, 8, 2), nn.GRU(16, 8, batch_first=True)):
        recurrent.cuda()(seq)[0].sum().backward()
    nn.TransformerEncoderLayer(16, 4, batch_first=True).cuda()(seq).sum().backward()
    table = nn.Embedding(50, 16).cuda()
    table(torch.randint(0, 50, (4, 7), device="cuda")).sum().backward()
    assert table.weight.grad is not None and table.weight.grad.is_cuda
    torch.topk(seq, 2)
    seq.sort(-1)
    torch.einsum("sbd,sbe->bde", seq, seq)
    seq.masked_fill(seq > 0, 0.0)
    torch.cat([seq, seq]).chunk(2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_functions_run_eagerly(virtual: VirtualCuda) -> None:
    model = torch.compile(mlp().cuda())
    with torch.compiler.set_stance("force_eager"):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 64, device="cuda"))


def snapshot() -> dict[str, Any]:
    names = [name for name in dir(torch.cuda) if not name.startswith("__")]
    state = {f"cuda.{name}": getattr(torch.cuda, name) for name in names}
    if hasattr(torch, "accelerator"):
        for name in dir(torch.accelerator):
            if not name.startswith("__"):
                state[f"accelerator.{name}"] = getattr(torch.accelerator, name)
    for name in ("load", "Generator", "clear_autocast_cache", "_has_compatible_shallow_copy_type"):
        state[name] = getattr(torch, name)
    state["functions"] = torch.overrides._get_current_function_mode_stack()
    state["operators"] = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return state


def test_nothing_is_left_behind() -> None:
    before = snapshot()
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError), VirtualCuda("a100-40gb"):
            torch.zeros(2**40, device="cuda")
    after = snapshot()
    assert before.keys() == after.keys()
    changed = [name for name in before if before[name] is not after[name] and before[name] != after[name]]
    assert not changed
    assert active() is None
    assert not torch.cuda.is_available()
    out = F.dropout(torch.ones(8, requires_grad=True), 0.5)
    assert "NativeDropout" not in type(out.grad_fn).__name__
    layer = nn.Linear(3, 3, device="meta")
    assert layer(torch.empty(2, 3, device="meta")).is_meta


def test_one_at_a_time_and_known_cards_only(virtual: VirtualCuda) -> None:
    with pytest.raises(RuntimeError, match="already active"), VirtualCuda("t4"):
        pass
    assert torch.zeros(1, device="cuda").is_cuda
    with pytest.raises(ConfigError, match="no card 'nonsense'"):
        VirtualCuda("nonsense")


def test_pickled_state_of_the_device_loads_as_stand_ins(virtual: VirtualCuda) -> None:
    buffer = io.BytesIO()
    torch.save({name: value.cpu() for name, value in mlp().cuda().state_dict().items()}, buffer)
    buffer.seek(0)
    assert all(value.device.type == "cpu" for value in torch.load(buffer).values())
