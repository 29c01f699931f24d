"""Loops that memlint does not run itself: the monitor's, and a script's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import memlint  # noqa: E402
from memlint.errors import BudgetError  # noqa: E402
from memlint.runtime.monitor import MemoryMonitor  # noqa: E402

SCRIPT = """
import sys, torch
def main():
    net = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    kept = []
    for step in range(int(sys.argv[1])):
        loss = net(torch.randn(32, 64)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if "leak" in sys.argv:
            kept.append(net(torch.randn(32, 64)))
    print("argv", sys.argv[1:], __name__, __file__)
    if "raise" in sys.argv:
        raise KeyError("mine")
    sys.exit(int(sys.argv[2]))
if __name__ == "__main__":
    main()
"""

GAN = """
import torch
a, b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
first, second = torch.optim.SGD(a.parameters(), lr=0.1), torch.optim.SGD(b.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
for step in range(20):
    for net, optimizer in ((a, first), (b, second)):
        loss = net(torch.randn(4, 8)).sum()
        if step == 7:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memlint", "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "gan.py").write_text(GAN, encoding="utf-8")
    return tmp_path


def test_a_sound_script_keeps_its_exit_code_and_its_world(folder: Path) -> None:
    ran = run(folder, "train.py", "20", "7", "--option")
    assert (ran.returncode, ran.stdout) == (7, "argv ['20', '7', '--option'] __main__ train.py\n")
    assert "ok   growth: memory does not grow" in ran.stderr


def test_a_leak_is_named_and_is_exit_one(folder: Path) -> None:
    ran = run(folder, "--report", "out.json", "train.py", "60", "0", "leak")
    assert ran.returncode == 1
    (test,) = json.loads((folder / "out.json").read_text(encoding="utf-8"))["tests"]
    (leak, *_) = test["leaks"]
    assert leak["holder"]["path"].startswith("`kept[*]` (a local of main (train.py:")
    assert (leak["site"]["path"], leak["site"]["line"]) == ("train.py", 13)
    assert leak["bytes_per_step"] == pytest.approx(test["growth"]["rate"]) == 16384
    assert "explain ML102" in ran.stderr


def test_steps_and_a_budget_end_the_run(folder: Path) -> None:
    ran = run(folder, "--steps", "5", "--budget", "10KiB", "-m", "train", "100000", "0")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "FAIL peak" in ran.stderr


def test_an_error_of_the_script_is_shown_as_its_own(folder: Path) -> None:
    ran = run(folder, "train.py", "5", "0", "raise")
    assert ran.returncode == 1
    assert "KeyError: 'mine'" in ran.stderr
    assert "memlint/runtime" not in ran.stderr


def test_two_optimizers_and_a_skipped_step_are_one_step_each(folder: Path) -> None:
    ran = run(folder, "--report", "out.json", "gan.py")
    assert ran.returncode == 0, ran.stderr
    (test,) = json.loads((folder / "out.json").read_text(encoding="utf-8"))["tests"]
    assert len(test["steps"]) == 20


def test_ctrl_c_ends_the_script_and_keeps_what_was_measured(folder: Path) -> None:
    text = SCRIPT.replace("optimizer.step()", "optimizer.step(); end(step)")
    end = "def end(step):\n    if step == 20: raise KeyboardInterrupt\n"
    (folder / "train.py").write_text(end + text, encoding="utf-8")
    ran = run(folder, "--report", "out.json", "train.py", "100", "0")
    assert ran.returncode == 130
    assert "note: interrupted in step 22" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert len(json.loads((folder / "out.json").read_text(encoding="utf-8"))["tests"][0]["steps"]) == 21


def test_a_line_tells_how_far_it_is(folder: Path) -> None:
    program = "import io, sys\nfrom memlint.runtime.script import Plan, run\n"
    program += "from memlint.runtime.budget import Budget\n"
    program += "live = io.StringIO(); run(Plan('gan.py', [], False, Budget(growth=0), 3, None, 'never'), live)\n"
    program += "sys.stdout.write(live.getvalue())"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=folder)
    assert "step 1  allocated " in ran.stdout
    assert "peak" in ran.stdout


def test_what_cannot_be_run_is_one_line(folder: Path) -> None:
    (folder / "broken.py").write_text("def (", encoding="utf-8")
    for name in ("none.py", "broken.py"):
        ran = run(folder, name)
        assert ran.returncode == 2
        assert len(ran.stderr.splitlines()) == 1
    for arguments, word in (
        (["--budget", "lots", "gan.py"], "--budget lots: 'lots' is no size"),
        (["-m", "no_such_module"], "-m no_such_module: there is no such module"),
        (["--report", "no/such.json", "gan.py"], "--report no/such.json: there is no such folder"),
    ):
        ran = run(folder, *arguments)
        assert (ran.returncode, ran.stdout) == (2, "")
        assert word in ran.stderr
    (folder / "plain.py").write_text("print(1)", encoding="utf-8")
    ran = run(folder, "plain.py")
    assert (ran.returncode, ran.stdout) == (0, "1\n")
    assert "no optimizer step was seen" in ran.stderr


# -- monitor ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [False, True])
def test_a_monitor_tells_once_of_a_leak(exact: bool) -> None:
    net = torch.nn.Linear(64, 64)
    kept: list[Any] = []
    told: list[MemoryMonitor] = []
    monitor = memlint.MemoryMonitor(device="cpu", exact=exact, on_growth=told.append)
    for batch in monitor.steps([torch.randn(256, 64) for _ in range(60)]):
        net(batch).sum().backward()
        kept.append(net(batch))
    assert told == [monitor]
    assert not monitor.passed
    assert "held by `kept[*]` (a local of test_a_monitor_tells_once_of_a_leak" in monitor.report()
    assert monitor.record()["growth"]["rate"] == pytest.approx(65536, rel=0.1)


def test_a_sound_loop_passes_and_no_batch_is_kept() -> None:
    import weakref

    monitor = MemoryMonitor(device="cpu", exact=True)
    seen: list[weakref.ref[Any]] = []
    for batch in monitor.steps(torch.randn(256, 64) for _ in range(20)):
        assert all(reference() is None for reference in seen[:-1])
        seen.append(weakref.ref(batch))
    assert monitor.passed
    assert monitor.outcome.growth.rate == 0


def test_a_long_loop_is_thinned() -> None:
    monitor = MemoryMonitor(device="cpu")
    kept: list[Any] = []
    for step in monitor.steps(range(2000)):
        kept.extend(torch.zeros(250_000) for _ in range(step % 100 == 0))
    record = monitor.record()
    assert len(record["steps"]) <= 140
    assert monitor._loop.steps == 2000


def test_wrong_use_says_so() -> None:
    monitor = MemoryMonitor(device="cpu")
    with pytest.raises(BudgetError, match="before start"):
        monitor.step()
    with monitor.watch():
        monitor.step()
    with pytest.raises(BudgetError, match="one loop"):
        monitor.start()
    with pytest.raises(BudgetError, match="peak"):
        MemoryMonitor(peak="lots")
