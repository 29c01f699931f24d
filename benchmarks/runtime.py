"""What measuring costs: ratios to the same steps unmeasured, in one run.

    python benchmarks/runtime.py            # on an accelerator if there is one, else on the CPU
    python benchmarks/runtime.py --device cpu

A transformer of 6 layers, width 512, batch 8 x 128, Adam. `tracking` is what a budget costs a step, `tracing` what the
steps cost that say who holds what, `monitor` what MemoryMonitor adds to a step of 10 ms.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import torch
from torch import nn

from memlint.runtime.backends import find
from memlint.runtime.budget import Budget
from memlint.runtime.monitor import MemoryMonitor
from memlint.runtime.session import Session, Tracing

LAYERS, WIDTH, HEADS, BATCH, LENGTH, VOCABULARY = 6, 512, 8, 8, 128, 1000


def transformer_step(device: torch.device) -> Callable[[], None]:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True)
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False),
        nn.Linear(WIDTH, VOCABULARY),
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=device)

    def step() -> None:
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if device.type != "cpu":
            torch.cuda.synchronize(device)

    return step


def seconds(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


@contextmanager
def tracked(device: str) -> Iterator[Callable[[Callable[[], None]], float]]:
    session = Session(find(device), Budget(), trace="never")
    session.start()

    def run(step: Callable[[], None]) -> float:
        began = time.perf_counter()
        with session.step():
            step()
        return time.perf_counter() - began

    try:
        yield run
    finally:
        session.stop()


@contextmanager
def traced(device: str) -> Iterator[Callable[[Callable[[], None]], float]]:
    tracing = Tracing(device, steps=10**6)
    tracing.start()

    def run(step: Callable[[], None]) -> float:
        began = time.perf_counter()
        with tracing.step():
            step()
        return time.perf_counter() - began

    try:
        yield run
    finally:
        tracing.finish()


def monitor_cost(device: str) -> float:
    """Seconds a step that MemoryMonitor adds: its own calls, timed over many steps of an empty loop."""
    monitor = MemoryMonitor(device, trace=False)
    steps = 5000
    with monitor.watch():
        began = time.perf_counter()
        for _ in range(steps):
            monitor.step()
        return (time.perf_counter() - began) / steps


IN_PYTEST = """
import sys
import pytest, torch
sys.path.insert(0, {here!r})
from runtime import transformer_step

@pytest.fixture(scope="module")
def step():
    made = transformer_step(torch.device({device!r}))
    for _ in range(3):
        made()
    return made

@pytest.mark.memory_budget(growth=0, warmup=1, steps=9)
def test_ours(step):
    step()

@pytest.mark.torch_memory_leak(iterations=9)
def test_theirs(step):
    step()
"""


def in_pytest(folder: Path, device: torch.device) -> tuple[float, float]:
    """Seconds a step of the same test under memlint and under pytest-torch, ten steps each."""
    text = IN_PYTEST.format(here=str(Path(__file__).parent), device=str(device))
    (folder / "test_it.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--junitxml=out.xml", "--rootdir=."]
    ran = subprocess.run([*command, "-o", "junit_duration_report=call"], cwd=folder, capture_output=True, text=True)
    if ran.returncode != 0:
        raise SystemExit(ran.stdout + ran.stderr)
    cases = ElementTree.parse(folder / "out.xml").iter("testcase")
    times = {case.get("name"): float(case.get("time", "0")) for case in cases}
    return times["test_ours"] / 10, times["test_theirs"] / 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    device = torch.device(options.device)
    step = transformer_step(device)
    for _ in range(3):
        step()
    plain, tracking, tracing = [], [], []
    for _ in range(options.rounds):  # interleaved, so that a busy moment hits all alike
        plain.append(seconds(step))
        with tracked(device.type) as run:
            run(step)
            tracking.append(run(step))
        with traced(device.type) as run:
            run(step)
            tracing.append(run(step))
    base = statistics.median(plain)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{card}, torch {torch.__version__}, {torch.get_num_threads()} threads, {options.rounds} rounds, medians")
    print(f"plain step      {base * 1e3:8.1f} ms")
    print(f"tracking        {statistics.median(tracking) / base:8.2f} times (with the collection after the step)")
    print(f"tracing         {statistics.median(tracing) / base:8.2f} times (with the collection after the step)")
    cost = monitor_cost(device.type)
    print(f"monitor         {cost * 1e6:8.1f} microseconds a step, {cost / 0.01:.3%} of a step of 10 ms")
    if importlib.util.find_spec("pytest_torch") is None:
        print("pytest-torch    not installed, not measured")
        return
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = in_pytest(Path(folder), device)
    print(f"in pytest       {ours / base:8.2f} times a plain step, each step of a memory_budget test")
    print(f"pytest-torch    {theirs / base:8.2f} times a plain step, each run of a torch_memory_leak test")


if __name__ == "__main__":
    main()
