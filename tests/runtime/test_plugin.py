"""The plugin from outside: pytest run on small projects, and what it prints, writes and returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema  # type: ignore[import-untyped]
import pytest

pytest.importorskip("torch")

from memlint.runtime.report.record import schema

STEPS = """
import unittest
import pytest, torch
from torch import nn
from memlint import memory_budget

counts = {}

def count(name):
    counts[name] = counts.get(name, 0) + 1

class Trainer:
    def __init__(self):
        self.net = nn.Linear(64, 64)
        self.optimizer = torch.optim.Adam(self.net.parameters())
        self.losses = []

    def step(self, x):
        loss = self.net(x).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

@pytest.fixture
def trainer():
    return Trainer()

@pytest.fixture(scope="module")
def batch():
    return torch.randn(32, 64)

@pytest.fixture(scope="session", autouse=True)
def tell():
    yield
    print("\\nCOUNTS", counts)

@pytest.mark.memory_budget(peak="1 MiB", growth=0, warmup=2, steps=5)
def test_sound(trainer, batch):
    count("sound")
    trainer.step(batch)

@pytest.mark.memory_budget(growth=0, warmup=2, steps=5)
def test_leak(trainer, batch):
    trainer.losses.append(trainer.step(batch))

@memory_budget(peak="10 KiB")
def test_over_peak(trainer, batch):
    trainer.step(batch)

@pytest.mark.memory_budget(growth=0)
@pytest.mark.parametrize("size", [8, 16])
def test_sizes(trainer, size):
    trainer.step(torch.randn(size, 64))

@pytest.mark.memory_budget(growth=0, warmup=0, steps=4)
class TestClass:
    def setup_method(self):
        count("setup_method")
        self.trainer = Trainer()

    def test_method(self, batch):
        count("method")
        self.trainer.step(batch)

    @pytest.mark.memory_budget(steps=6)
    def test_nearer_mark(self, batch):
        count("nearer")

class TestUnit(unittest.TestCase):
    def setUp(self):
        count("setUp")
        self.trainer = Trainer()

    @pytest.mark.memory_budget(growth=0, warmup=1, steps=3)
    def test_unit(self):
        count("unit")
        self.trainer.step(torch.randn(4, 64))

@pytest.mark.memory_budget(growth=0)
def test_own_error(trainer):
    count("error")
    if counts["error"] == 5:
        raise KeyError("own")

@pytest.fixture
def batches():
    return iter([torch.randn(4, 64) for _ in range(8)])

@pytest.mark.memory_budget(growth=0, warmup=3, steps=5)
def test_runs_out(trainer, batches):
    trainer.losses.append(trainer.step(next(batches)))

@pytest.mark.memory_budget(growth=0)
def test_out_of_memory(trainer, batch):
    trainer.step(batch)
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

def test_memory_run(memory):
    kept = []
    memory.run(lambda: kept.append(torch.zeros(256)), steps=4, growth=0)

def test_memory_steps(memory, trainer, batch):
    for _ in range(6):
        with memory.step():
            trainer.step(batch)
    assert memory.allocated > 0

@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.memory_budget(device="cuda")
def test_no_card():
    raise AssertionError

def test_afterwards():
    import gc
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    assert not _get_current_dispatch_mode_stack()
    assert gc.isenabled() and gc.get_freeze_count() == 0
"""
FAILING = {"test_leak", "test_over_peak", "test_own_error", "test_runs_out", "test_out_of_memory", "test_memory_run"}


def run_pytest(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "GITHUB_"))}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "pytest.ini", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env={**clean, **env}, stdin=subprocess.DEVNULL
    )


def project(folder: Path, text: str, ini: str = "") -> Path:
    (folder / "pytest.ini").write_text(f"[pytest]\naddopts = --strict-markers\n{ini}", encoding="utf-8")
    (folder / "test_it.py").write_text(text, encoding="utf-8")
    return folder


class Big:
    """One run of the large project, with all that it wrote."""

    def __init__(self, folder: Path) -> None:
        project(folder, STEPS)
        self.summary = folder / "summary.md"
        self.ran = run_pytest(
            folder, "-s", "--memory-report=out/report.json", "--junitxml=j.xml", GITHUB_STEP_SUMMARY=str(self.summary)
        )
        self.report: dict[str, Any] = json.loads((folder / "out" / "report.json").read_text(encoding="utf-8"))
        self.tests = {test["test"].split("::", 1)[1]: test for test in self.report["tests"]}
        self.junit = ElementTree.parse(folder / "j.xml").getroot()


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Big:
    return Big(tmp_path_factory.mktemp("big"))


def text_of_failure(big: Big, name: str) -> str:
    found = big.junit.find(f".//testcase[@name='{name}']/failure")
    assert found is not None
    return found.text or ""


@pytest.mark.xdist_group("plugin")
class TestOneRun:
    def test_what_fails_and_what_passes(self, big: Big) -> None:
        failed = {case.get("name") for case in big.junit.iter("testcase") if case.find("failure") is not None}
        assert failed == FAILING, big.ran.stdout
        assert big.ran.returncode == 1

    def test_steps_are_run_as_often_as_asked_for(self, big: Big) -> None:
        counts = {
            name.strip("'"): int(number)
            for name, number in (
                pair.split(": ") for pair in big.ran.stdout.split("COUNTS {")[1].split("}")[0].split(", ")
            )
        }
        assert counts == {"sound": 7, "setup_method": 2, "method": 4, "nearer": 6, "setUp": 1, "unit": 4, "error": 5}

    def test_the_report_is_valid(self, big: Big) -> None:
        jsonschema.validate(big.report, schema())
        assert big.tests["test_sound"]["verdicts"][0]["passed"]
        assert [step["measured"] for step in big.tests["test_sound"]["steps"]] == [False] * 2 + [True] * 5

    def test_a_leak_names_line_and_fixture(self, big: Big) -> None:
        text = text_of_failure(big, "test_leak")
        assert "held by `trainer.losses[*]` (a fixture, list, " in text
        assert "in Trainer.step: loss = self.net(x).pow(2).mean()" in text
        assert "see: memlint explain ML102" in text
        assert len(text.splitlines()) < 40

    def test_a_peak_is_broken_down(self, big: Big) -> None:
        text = text_of_failure(big, "test_over_peak")
        assert "FAIL peak: the allocated peak is" in text
        assert "optimizer state" in text
        assert len(text.splitlines()) < 40
        breakdown = big.tests["test_over_peak"]["peak_breakdown"]
        assert sum(breakdown["categories"].values()) == breakdown["bytes"]

    def test_the_own_error_wins(self, big: Big) -> None:
        assert "KeyError: 'own'" in text_of_failure(big, "test_own_error")
        assert "test_own_error" not in big.tests

    def test_running_out_of_batches_is_no_error(self, big: Big) -> None:
        text = text_of_failure(big, "test_runs_out")
        assert "FAIL growth" in text
        assert "note: tracing stopped in its step 1: StopIteration" in text

    def test_out_of_memory_is_a_failed_budget(self, big: Big) -> None:
        text = text_of_failure(big, "test_out_of_memory")
        assert "FAIL oom: step 1 ran out of memory: CUDA out of memory" in text
        assert "at the peak of the traced steps" in text

    def test_a_missing_device_is_a_skip_with_the_reason(self, big: Big) -> None:
        skipped = big.junit.find(".//testcase[@name='test_no_card']/skipped")
        assert skipped is not None
        assert "CUDA" in (skipped.get("message") or "")

    def test_junit_has_the_figures(self, big: Big) -> None:
        case = big.junit.find(".//testcase[@name='test_sound']")
        assert case is not None
        properties = {item.get("name"): item.get("value") for item in case.iter("property")}
        assert properties["memory_peak"] == str(big.tests["test_sound"]["peak"])
        assert properties["memory_budget"] == "1048576"
        assert properties["memory_verdict"] == "ok"

    def test_the_terminal_has_the_table_and_the_step_summary_too(self, big: Big) -> None:
        section = big.ran.stdout.split(" memory budgets ")[1]
        assert "headroom" in section
        assert "LEAK" in section
        assert "OVER PEAK" in section
        markdown = big.summary.read_text(encoding="utf-8")
        assert "| test_it.py::test_sound | cpu |" in markdown
        assert "held by `trainer.losses[*]`" in markdown


SMALL = """
import pytest, torch
kept = []
@pytest.mark.memory_budget(peak="1 MiB")
def test_leak():
    kept.append(torch.zeros(1000))
@pytest.mark.memory_budget(steps=4, growth="8 KiB")
def test_second():
    kept.append(torch.zeros(1000))
"""


def test_ini_options_and_the_command_line_over_them(tmp_path: Path) -> None:
    ini = (
        "memory_steps = 5\nmemory_warmup = 1\nmemory_default_growth = 0\nmemory_trace = never\nmemory_report = r.json\n"
    )
    ini += "memory_device = cpu\nmemory_fallback_device = cpu\nmemory_baseline_tolerance = 5%\n"
    project(tmp_path, SMALL, ini)
    assert run_pytest(tmp_path).returncode == 1
    first, second = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["tests"]
    assert (len(first["steps"]), first["traced_steps"], first["passed"]) == (6, 0, False)
    assert (len(second["steps"]), second["passed"]) == (5, True)
    options = ["--memory-steps=4", "--memory-warmup=0", "--memory-default-growth=none", "--memory-trace=always"]
    assert run_pytest(tmp_path, *options, "--memory-report=s.json", "--memory-device=cpu").returncode == 0
    first, second = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))["tests"]
    assert (len(first["steps"]), first["traced_steps"], first["passed"]) == (4, 5, True)
    assert first["leaks"][0]["holder"]["path"].startswith("`kept[*]` (a global of test_it, list")


def test_bad_values_are_one_line_each_before_anything_runs(tmp_path: Path) -> None:
    text = "import pytest\n@pytest.mark.memory_budget(peak='12 parsecs', stepz=3)\ndef test_a(): pass\n"
    text += "@pytest.mark.memory_budget('1 GiB')\ndef test_b(): pass\n"
    text += "@pytest.mark.memory_budget(growth=0)\nasync def test_c(): pass\n"
    ran = run_pytest(project(tmp_path, text))
    assert ran.returncode == 4
    said = ran.stdout + ran.stderr
    assert "test_it.py::test_a: memory_budget: peak='12 parsecs'" in said
    assert "test_it.py::test_a: memory_budget: stepz=3: there is no such argument; did you mean 'steps'?" in said
    assert "test_it.py::test_b: memory_budget: '1 GiB': it takes keyword arguments only" in said
    assert "test_it.py::test_c: memory_budget: an async test" in said
    for option, word in (("--memory-steps=two", "whole number"), ("--memory-trace=loud", "on-failure, always, never")):
        ran = run_pytest(tmp_path, option)
        assert ran.returncode == 4
        assert word in ran.stderr
    assert run_pytest(tmp_path, "--memory-update-baseline").returncode == 4


def test_baselines(tmp_path: Path) -> None:
    text = "import os, pytest, torch\nsize = int(os.environ.get('SIZE', 1000))\n"
    text += "@pytest.mark.memory_budget()\ndef test_a(): torch.zeros(size)\n"
    project(tmp_path, text, "memory_baseline = peaks.json\n")
    assert "test_it.py::test_a has no entry" in run_pytest(tmp_path).stdout
    assert "1 of 1 peaks changed" in run_pytest(tmp_path, "--memory-update-baseline").stdout
    saved = json.loads((tmp_path / "peaks.json").read_text(encoding="utf-8"))
    (entries,) = saved["peaks"].values()
    assert entries == {"test_it.py::test_a": {"peak": 4000, "reserved": None}}
    assert run_pytest(tmp_path, SIZE="1040").returncode == 0
    worse = run_pytest(tmp_path, SIZE="1100")
    assert worse.returncode == 1
    assert "10.0% above the baseline of 3.91 KiB (5% is allowed)" in worse.stdout
    (tmp_path / "test_it.py").write_text(text.replace("test_a", "test_b"), encoding="utf-8")
    assert "test_it.py::test_a is gone, but has an entry" in run_pytest(tmp_path).stdout
    assert "1 of tests that are gone dropped" in run_pytest(tmp_path, "--memory-update-baseline").stdout
    (tmp_path / "peaks.json").write_text("{", encoding="utf-8")
    assert run_pytest(tmp_path).returncode == 4


def test_results_travel_from_workers(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    project(tmp_path, SMALL)
    ran = run_pytest(tmp_path, "-n", "2", "--memory-report=r.json", "--memory-default-growth=0")
    assert {test["test"] for test in json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["tests"]} == {
        "test_it.py::test_leak",
        "test_it.py::test_second",
    }
    assert " memory budgets " in ran.stdout


def test_other_plugins_and_modes_of_pytest(tmp_path: Path) -> None:
    project(tmp_path, SMALL)
    growth = "--memory-default-growth=0"
    stopped = run_pytest(tmp_path, growth, "-x")
    assert "1 failed" in stopped.stdout
    assert "test_second" not in stopped.stdout.split(" memory budgets ")[1]
    debugged = run_pytest(tmp_path, growth, "--pdb")
    assert debugged.returncode in (1, 2)
    assert "FAIL growth" in debugged.stdout
    unknown = run_pytest(tmp_path, "-p", "no:memlint")
    assert unknown.returncode == 2
    assert "'memory_budget' not found in `markers`" in unknown.stdout
    pytest.importorskip("pytest_rerunfailures")
    again = run_pytest(tmp_path, growth, "--reruns", "1", "--memory-report=r.json", "-k", "leak")
    assert "1 failed, 1 deselected, 1 rerun" in again.stdout
    assert len(json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["tests"]) == 1


def test_a_project_may_have_a_fixture_called_memory(tmp_path: Path) -> None:
    text = "import pytest\n@pytest.fixture\ndef memory(): return 5\ndef test_a(memory): assert memory == 5\n"
    ran = run_pytest(project(tmp_path, text))
    assert ran.returncode == 0
    assert "memory budgets" not in ran.stdout


def test_without_torch_marked_tests_are_skipped_and_the_rest_runs(tmp_path: Path) -> None:
    text = "import pytest, sys\n@pytest.mark.memory_budget(growth=0)\ndef test_a(): pass\n"
    text += "def test_b(): assert 'torch' not in sys.modules\n"
    project(tmp_path, text)
    (tmp_path / "conftest.py").write_text(
        "import sys\nclass Blocker:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': raise ImportError(name)\nsys.meta_path.insert(0, Blocker())\n",
        encoding="utf-8",
    )
    ran = run_pytest(tmp_path, "-rs")
    assert "1 passed, 1 skipped" in ran.stdout
    assert "memory budget: torch is not installed" in ran.stdout
