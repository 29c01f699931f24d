"""The largest batch that fits a card, and what would help: measured on the virtual device."""

# ruff: noqa: PT018  # what belongs together is asked in one line
from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from memlint.cli import main  # noqa: E402
from memlint.errors import ConfigError, UsageError  # noqa: E402
from memlint.runtime.fit import Fit, fit, json_of, largest, parse_vary, text_of  # noqa: E402
from memlint.virtual.device import active  # noqa: E402


def make_step(batch_size: int, width: int = 256) -> object:
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(6)]).cuda()
    optimizer = torch.optim.AdamW(blocks.parameters())
    x = torch.randn(batch_size * 65_536, width, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        out = x
        for block in blocks:
            out = block(out)
        out.square().mean().backward()
        optimizer.step()

    return step


@pytest.fixture(scope="module")
def found() -> Fit:
    return fit(make_step, range(1, 65), gpu="t4")


@pytest.mark.parametrize("limit", [0, 1, 2, 7, 8, 63, 64, 99, 100, 500])
def test_bisection_finds_the_largest_with_few_questions(limit: int) -> None:
    asked: list[int] = []

    def fits(value: int) -> bool:
        asked.append(value)
        return value <= limit

    assert largest(range(1, 101), fits) == (min(limit, 100) or None)
    assert len(asked) <= 15
    assert len(set(asked)) == len(asked)


def test_the_answer_fits_and_the_next_does_not(found: Fit) -> None:
    assert found.best is not None
    by_value = {run.value: run for run in found.runs}
    assert found.fits(by_value[found.best])
    above = min(value for value in by_value if value > found.best)
    assert not found.fits(by_value[above])
    assert above == found.best + 1
    assert found.monotone
    assert by_value[found.best].process <= 0.95 * 15_095 * 2**20
    assert active() is None and not torch.cuda.is_available()


def test_what_fills_it_and_what_helps(found: Fit) -> None:
    assert found.categories[0][0] == "activation"
    assert any("test_fit.py" in line for line, _ in found.lines)
    helps = {each.name: each for each in found.helps}
    assert helps["autocast"].saves > 0
    assert helps["checkpointed blocks"].saves > 0
    assert any("accumulated over 2" in name for name in helps)
    assert [each.saves for each in found.helps] == sorted((each.saves for each in found.helps), reverse=True)
    text = text_of(found)
    assert "virtual Tesla T4" in text and f"batch_size={found.best}" in text
    assert json.loads(json_of(found))["best"] == found.best


def test_a_margin_leaves_room() -> None:
    narrow = fit(make_step, range(1, 65), gpu="t4", margin=0.5, advise=False)
    wide = fit(make_step, range(1, 65), gpu="t4", margin=0.0, advise=False)
    assert narrow.best is not None and wide.best is not None
    assert narrow.best < 0.6 * wide.best


def test_nothing_fits() -> None:
    answer = fit(make_step, [1000, 2000], gpu="t4", advise=False)
    assert answer.best is None
    assert "no batch_size that was tried fits" in text_of(answer)


def test_what_make_step_raises_passes_through() -> None:
    def broken(batch_size: int) -> object:
        raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        fit(broken, [1, 2])
    with pytest.raises(UsageError, match="has to return a function"):
        fit(lambda batch_size: 3, [1])
    with pytest.raises(ConfigError, match="no card"):
        fit(make_step, [1], gpu="riva-tnt")
    assert active() is None


@pytest.mark.parametrize(("text", "values"), [("a=1..3", [1, 2, 3]), ("argv:--batch=8,2,8", [2, 8])])
def test_what_is_varied(text: str, values: list[int]) -> None:
    assert list(parse_vary(text)[1]) == values


@pytest.mark.parametrize("text", ["a", "a=", "a=3..1", "a=x..y", "=1..2", "a=0..3"])
def test_what_cannot_be_varied(text: str) -> None:
    with pytest.raises(UsageError, match="it wants NAME=LOW"):
        parse_vary(text)


SCRIPT = """
import argparse, torch
WIDTH = 64
options = argparse.ArgumentParser()
options.add_argument("--batch-size", type=int, default=2)
batch = options.parse_args().batch_size
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Linear(WIDTH, WIDTH).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(50):
    loss = model(torch.randn(batch, WIDTH, device=device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_functions_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\ndef make_step(n):\n    x = torch.zeros(n, 2**20, device='cuda')\n    return lambda: x * 2\n"
    )
    report = tmp_path / "fit.json"
    arguments = [
        "fit",
        "--vary",
        "n=1..4000",
        "--no-advice",
        "--report",
        str(report),
        f"{tmp_path / 'mine.py'}:make_step",
    ]
    assert main(arguments) == 0
    assert "is the largest that fits" in capsys.readouterr().out
    assert 1500 < json.loads(report.read_text())["best"] < 2000  # two of n * 4 MiB in 14 GiB
    assert main([*arguments[:-1], f"{tmp_path / 'mine.py'}:nothing"]) == 2
    assert "there is no function 'nothing'" in capsys.readouterr().err
    assert main([*arguments[:-1], f"{tmp_path / 'yours.py'}:make_step"]) == 2


@pytest.mark.parametrize("vary", ["argv:--batch-size=1000,2000000,100000000", "WIDTH=64,512,100000"])
def test_unmodified_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str], vary: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert main(["fit", "--vary", vary, str(script), "--batch-size", "4"]) == 0
    out = capsys.readouterr().out
    assert ("batch-size=2000000" if "argv" in vary else "WIDTH=512") in out
    assert script.read_text() == SCRIPT


def test_a_script_that_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('no data')\n")
    assert main(["fit", "--vary", "argv:--n=1..4", str(script)]) == 2
    assert "does not run with --n=1: ValueError: no data" in capsys.readouterr().err
    script.write_text(SCRIPT)
    assert main(["fit", "--vary", "DEPTH=1..4", str(script)]) == 2
    assert "DEPTH is not assigned at its top level" in capsys.readouterr().err
    assert sys.modules["__main__"] is not None
