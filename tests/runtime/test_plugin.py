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


def outcomes(junit: ElementTree.Element) -> dict[str, str]:
    """What became of each test: "passed", "failure", "error" or "skipped"."""
    found = {}
    for case in junit.iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        found[str(case.get("name"))] = kinds[0] if kinds else "passed"
    return found


def said_of(junit: ElementTree.Element, name: str) -> str:
    """The text of what went wrong with a test."""
    for kind in ("failure", "error", "skipped"):
        found = junit.find(f".//testcase[@name='{name}']/{kind}")
        if found is not None:
            return f"{found.get('message')}\n{found.text}"
    return ""


def peaks_of(path: Path) -> dict[str, dict[str, int | None]]:
    """The entries of a baseline with one device."""
    (entries,) = json.loads(path.read_text(encoding="utf-8"))["peaks"].values()
    return dict(entries)


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


ODD = """
import gc, unittest
import pytest, torch
from hypothesis import given, settings, strategies as st
from memlint import memory_budget

counts = {}
kept = []

def count(name):
    counts[name] = counts.get(name, 0) + 1
    return counts[name]

@pytest.fixture(scope="session", autouse=True)
def tell():
    yield
    print("\\nCOUNTS", counts)

@pytest.fixture(scope="session")
def of_session(): return [torch.zeros(1000)]
@pytest.fixture(scope="package")
def of_package(): return [torch.zeros(1000)]
@pytest.fixture(scope="module")
def of_module(): return [torch.zeros(1000)]
@pytest.fixture(scope="class")
def of_class(): return [torch.zeros(1000)]
@pytest.fixture
def of_function(): return [torch.zeros(1000)]

@pytest.mark.memory_budget(growth=0, steps=3, warmup=0)
class TestScopes:
    def test_first(self, of_session, of_package, of_module, of_class, of_function): torch.zeros(10)
    def test_second(self, of_session, of_package, of_module, of_class, of_function): torch.zeros(10)
    @pytest.mark.parametrize("scope", ["session", "package", "module", "class", "function"])
    def test_leak_in(self, scope, request, of_session, of_package, of_module, of_class, of_function):
        request.getfixturevalue(f"of_{scope}").append(torch.zeros(100))

@pytest.fixture
def torn():
    yield count("setup")
    count("teardown")

@pytest.mark.memory_budget(steps=3, warmup=1)
def test_fixtures_are_set_up_once(torn):
    assert torn == 1

@pytest.mark.memory_budget
def test_bare(): count("bare")

@pytest.mark.memory_budget(growth=0)
def test_own_error_at_once():
    count("once")
    raise KeyError("first")

@pytest.mark.memory_budget(peak=1)
def test_own_error_and_over_peak():
    torch.zeros(100)
    assert count("over") < 5, "mine"

@pytest.mark.memory_budget(growth=0)
def test_own_skip():
    if count("skip") == 3: pytest.skip("enough")

@pytest.fixture
def fails(): raise KeyError("fixture")
@pytest.mark.memory_budget(growth=0)
def test_fixture_fails(fails): pass

@pytest.fixture
def fails_later():
    yield
    raise KeyError("teardown")
@pytest.mark.memory_budget(growth=0, steps=3, warmup=0)
def test_teardown_fails(fails_later): pass

@pytest.mark.skip(reason="not today")
@pytest.mark.memory_budget(growth=0)
def test_skipped(): count("skipped")

@pytest.mark.xfail(strict=True)
@pytest.mark.memory_budget(peak=1)
def test_xfail(): torch.zeros(10)

@pytest.mark.memory_budget(growth=0, steps=3, warmup=0)
def test_runs_out_in_extra_steps():
    number = count("extra")
    if number == 3: kept.append(torch.zeros(1000))
    if number > 4: raise StopIteration

@pytest.mark.memory_budget(growth=0, steps=3, warmup=0)
def test_own_error_in_extra_steps():
    number = count("late")
    if number == 3: kept.append(torch.zeros(1000))
    assert number < 5, "wrong result"

class Node: pass
def cycle():
    node = Node()
    node.me, node.data = node, torch.zeros(1000)
@pytest.mark.memory_budget(growth=0, steps=3)
def test_cycle_warns(): cycle()
@pytest.mark.memory_budget(growth=0, steps=3, cycles="fail")
def test_cycle_fails(): cycle()
@pytest.mark.memory_budget(growth=0, steps=3, cycles="ignore")
def test_cycle_is_ignored(): cycle()

@pytest.mark.memory_budget(growth=0, steps=3, warmup=0)
@settings(max_examples=5, deadline=None)
@given(st.integers(1, 5))
def test_hypothesis(n): torch.zeros(n)

class TestUnit(unittest.TestCase):
    @memory_budget(peak=1, steps=3)
    def test_unit_over_peak(self): torch.zeros(10)
    @memory_budget(peak=1, steps=3)
    def test_unit_skips(self): self.skipTest("why")
    @memory_budget(growth=0, steps=3)
    def test_unit_own_error(self): self.assertEqual(1, 2)

@pytest.mark.memory_budget(growth=0)
def test_seven_leaks(): exec("\\n".join(f"kept.append(torch.zeros({i}, 2, 3))" for i in range(1, 200)))

def test_end():
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    import threading
    assert not _get_current_dispatch_mode_stack()
    assert gc.isenabled() and gc.get_freeze_count() == 0 and not gc.garbage
    assert threading.Thread._bootstrap_inner.__module__ == "threading"
"""

MEMORY = """
import pytest, torch
counts, kept = {}, []

def count(name):
    counts[name] = counts.get(name, 0) + 1
    return counts[name]

@pytest.fixture(scope="session", autouse=True)
def tell():
    yield
    print("\\nCOUNTS", counts)

def test_run_takes_steps(memory):
    memory.run(lambda: count("run"), steps=5, warmup=1)
def test_run_takes_limits(memory):
    memory.run(lambda: torch.zeros(1000), peak=100)
def test_run_twice(memory):
    memory.run(lambda: torch.zeros(10000), peak=100)
    memory.run(lambda: torch.zeros(10), peak=100)
def test_run_twice_limits(memory):
    memory.run(lambda: torch.zeros(10000), peak=100)
    memory.run(lambda: torch.zeros(10000), peak="1 GiB")
def test_bad_limit(memory):
    memory.run(lambda: None, peek=1)

@pytest.mark.memory_budget(growth=0, peak="1 MiB", warmup=1)
def test_mark_gives_the_limits(memory):
    for _ in range(8):
        with memory.step():
            kept.append(torch.zeros(1000))
def test_error_in_a_step(memory):
    for i in range(8):
        with memory.step():
            if i == 5: raise KeyError("sixth")
def test_oom_in_a_step(memory):
    for i in range(8):
        with memory.step():
            torch.zeros(10)
            if i == 5: raise torch.OutOfMemoryError("CUDA out of memory. Tried to")
def test_allocated(memory):
    before = memory.allocated
    x = torch.zeros(1000)
    assert memory.allocated == before + 4000
@pytest.mark.memory_budget(growth=0)
def test_leak_outside_of_steps(memory):
    for _ in range(8):
        kept.append(torch.zeros(1000))
        with memory.step():
            torch.zeros(10)

@pytest.fixture
def trainer(memory): return memory
def test_through_a_fixture(trainer):
    trainer.run(lambda: kept.append(torch.zeros(10)), growth=0, steps=4)
@pytest.fixture
def early(memory):
    with memory.step(): pass
def test_in_a_fixture(early): pass
@pytest.fixture
def early_run(memory):
    memory.run(lambda: None)
def test_run_in_a_fixture(early_run): pass
@pytest.fixture
def asked(request): return request.getfixturevalue("memory")
def test_asked_for_by_name(asked): pass
@pytest.mark.memory_budget(peak=1)
def test_no_step(memory): torch.zeros(1000)

class TestOverridden:
    @pytest.fixture
    def memory(self): return "mine"
    def test_own(self, memory): assert memory == "mine"

def test_end():
    import gc
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    assert not _get_current_dispatch_mode_stack()
    assert gc.isenabled() and gc.get_freeze_count() == 0
"""


class Run:
    """One run of a project of one file, with its JUnit file and report."""

    def __init__(self, folder: Path, text: str, *arguments: str, ini: str = "") -> None:
        project(folder, text, ini)
        self.ran = run_pytest(folder, "-s", "--memory-report=report.json", "--junitxml=j.xml", *arguments)
        self.junit = ElementTree.parse(folder / "j.xml").getroot()
        self.outcomes = outcomes(self.junit)
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        jsonschema.validate(report, schema())
        self.tests: dict[str, dict[str, Any]] = {test["test"].rpartition("::")[2]: test for test in report["tests"]}
        told = self.ran.stdout.partition("COUNTS {")[2].partition("}")[0]
        self.counts = {name.strip("'"): int(number) for name, number in (p.split(": ") for p in told.split(", ") if p)}

    def said(self, name: str) -> str:
        """The text of what went wrong with a test."""
        return said_of(self.junit, name)

    def failed_limits(self, name: str) -> list[str]:
        """The limits that did not hold."""
        return [verdict["limit"] for verdict in self.tests[name]["verdicts"] if not verdict["passed"]]


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("odd"), ODD)


@pytest.fixture(scope="module")
def memory_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("memory"), MEMORY)


@pytest.mark.xdist_group("plugin")
class TestOddOnes:
    def test_what_becomes_of_each(self, odd: Run) -> None:
        bad = {name: kind for name, kind in odd.outcomes.items() if kind != "passed"}
        leaks = {f"test_leak_in[{s}]": "failure" for s in ("session", "package", "module", "class", "function")}
        assert bad == {
            **leaks, "test_own_error_at_once": "failure", "test_own_error_and_over_peak": "failure",
            "test_own_skip": "skipped", "test_fixture_fails": "error", "test_teardown_fails": "error",
            "test_skipped": "skipped", "test_xfail": "skipped", "test_cycle_fails": "failure",
            "test_unit_over_peak": "failure", "test_unit_skips": "skipped", "test_unit_own_error": "failure",
            "test_seven_leaks": "failure",
            "test_own_error_in_extra_steps": "failure",
        }  # fmt: skip

    def test_tests_that_follow_find_torch_and_the_collector_as_before(self, odd: Run) -> None:
        assert odd.outcomes["test_end"] == "passed"

    @pytest.mark.parametrize("scope", ["session", "package", "module", "class", "function"])
    def test_a_leak_into_a_fixture_of_any_scope_names_the_fixture(self, odd: Run, scope: str) -> None:
        assert f"held by `of_{scope}[*]` (a fixture, list, " in odd.said(f"test_leak_in[{scope}]")

    def test_peaks_do_not_depend_on_which_test_sets_a_shared_fixture_up(self, odd: Run) -> None:
        assert odd.tests["test_first"]["peak"] == odd.tests["test_second"]["peak"]

    def test_how_often_things_ran(self, odd: Run) -> None:
        assert (odd.counts["setup"], odd.counts["teardown"], odd.counts["bare"]) == (1, 1, 13)
        assert (odd.counts["once"], odd.counts["over"], odd.counts["skip"]) == (1, 5, 3)
        assert "skipped" not in odd.counts

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("test_own_error_at_once", "KeyError: 'first'"),
            ("test_own_error_and_over_peak", "AssertionError: mine"),
            ("test_unit_own_error", "AssertionError: 1 != 2"),
        ],
    )
    def test_the_own_error_is_shown_without_frames_of_memlint(self, odd: Run, name: str, said: str) -> None:
        assert said in odd.said(name)
        assert "memory budget" not in odd.said(name)
        assert "memlint" not in odd.said(name)
        assert name not in odd.tests

    def test_no_more_batches_in_extra_steps_is_no_failure(self, odd: Run) -> None:
        assert odd.tests["test_runs_out_in_extra_steps"]["growth"]["trend"] == "unsettled"
        assert len(odd.tests["test_runs_out_in_extra_steps"]["steps"]) == 4

    def test_cycles_warn_fail_or_are_ignored(self, odd: Run) -> None:
        assert "MemoryCycleWarning: 3.91 KiB a step are freed by a garbage collection only" in odd.ran.stdout
        assert odd.ran.stdout.count("MemoryCycleWarning") == 1
        assert odd.failed_limits("test_cycle_fails") == ["cycles"]
        assert "cycle: 3.91 KiB a step in Node.me > Node" in odd.said("test_cycle_fails")
        assert not odd.tests["test_cycle_is_ignored"]["verdicts"][1:]

    def test_the_peak_is_broken_down_where_nothing_is_left_at_the_end_of_a_step(self, odd: Run) -> None:
        assert odd.tests["test_cycle_fails"]["peak_breakdown"]["bytes"] == 4000

    def test_a_failure_has_fewer_than_forty_lines(self, odd: Run) -> None:
        for name, kind in odd.outcomes.items():
            if kind == "failure" and name in odd.tests:
                text = odd.junit.find(f".//testcase[@name='{name}']/failure")
                assert text is not None
                assert len((text.text or "").splitlines()) < 40, name


@pytest.mark.xdist_group("plugin")
class TestMemoryFixture:
    def test_run_takes_steps_and_warm_up(self, memory_run: Run) -> None:
        assert memory_run.counts["run"] == 6

    def test_run_takes_limits(self, memory_run: Run) -> None:
        assert memory_run.failed_limits("test_run_takes_limits") == ["peak"]
        assert memory_run.failed_limits("test_run_twice") == ["peak"]

    def test_each_run_is_held_to_its_own_limits(self, memory_run: Run) -> None:
        assert memory_run.outcomes["test_run_twice_limits"] == "failure"

    def test_a_bad_limit_is_the_tests_own_error(self, memory_run: Run) -> None:
        assert "BudgetError: peek=1: there is no such argument; did you mean 'peak'?" in memory_run.said(
            "test_bad_limit"
        )

    def test_the_mark_gives_the_limits(self, memory_run: Run) -> None:
        test = memory_run.tests["test_mark_gives_the_limits"]
        assert memory_run.failed_limits("test_mark_gives_the_limits") == ["growth"]
        assert [step["measured"] for step in test["steps"]] == [False] + [True] * 7
        assert test["growth"]["rate"] == 4000
        assert "held by `kept[*]` (a global of test_it, list" in memory_run.said("test_mark_gives_the_limits")

    def test_errors_in_steps(self, memory_run: Run) -> None:
        assert "KeyError: 'sixth'" in memory_run.said("test_error_in_a_step")
        assert "FAIL oom: step 6 ran out of memory: CUDA out of memory" in memory_run.said("test_oom_in_a_step")

    def test_what_leaks_between_steps_is_seen(self, memory_run: Run) -> None:
        assert memory_run.failed_limits("test_leak_outside_of_steps") == ["growth"]

    def test_it_works_through_a_fixture(self, memory_run: Run) -> None:
        assert memory_run.failed_limits("test_through_a_fixture") == ["growth"]

    def test_a_step_in_a_fixture_is_refused_with_a_word(self, memory_run: Run) -> None:
        assert "BudgetError: memory.step() belongs into the test" in memory_run.said("test_in_a_fixture")
        assert "BudgetError: memory.run() belongs into the test" in memory_run.said("test_run_in_a_fixture")

    def test_asking_for_it_by_name_is_refused_with_a_word(self, memory_run: Run) -> None:
        assert "BudgetError" in memory_run.said("test_asked_for_by_name")

    def test_a_budget_without_a_step_is_a_mistake(self, memory_run: Run) -> None:
        assert memory_run.outcomes["test_no_step"] != "passed"

    def test_the_rest(self, memory_run: Run) -> None:
        assert memory_run.outcomes["test_allocated"] == "passed"
        assert memory_run.outcomes["test_own"] == "passed"
        assert "test_own" not in memory_run.tests
        assert memory_run.outcomes["test_end"] == "passed"


def test_an_outcome_of_pytest_in_a_traced_step_leaves_nothing_behind(tmp_path: Path) -> None:
    """pytest.fail() and pytest.skip() raise no Exception; a timeout of pytest-timeout is such a failure too."""
    text = """
import gc, pytest, torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
kept = []
@pytest.mark.memory_budget(growth=0, steps=4, warmup=0)
@pytest.mark.parametrize("end", [pytest.fail, pytest.skip], ids=["fail", "skip"])
def test_ends(end):
    kept.append(torch.zeros(10))
    if len(kept) % 6 == 0: end("no more")
def test_modes(): assert not _get_current_dispatch_mode_stack()
def test_collector(): assert gc.get_freeze_count() == 0 and gc.isenabled()
"""
    found = Run(tmp_path, text)
    assert found.outcomes["test_modes"] == "passed"
    assert found.outcomes["test_collector"] == "passed"
    assert "FAIL growth" in found.said("test_ends[fail]")
    assert "FAIL growth" in found.said("test_ends[skip]")


def test_setup_only_leaves_nothing_behind(tmp_path: Path) -> None:
    text = "import pytest, torch\n@pytest.mark.memory_budget()\ndef test_a(): pass\n"
    text += "@pytest.fixture(scope='session', autouse=True)\ndef tell():\n    yield\n"
    text += "    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack\n"
    text += "    print('STACK', _get_current_dispatch_mode_stack())\n"
    ran = run_pytest(project(tmp_path, text), "-s", "--setup-only")
    assert "STACK []" in ran.stdout


def test_marks_that_a_conftest_adds_count(tmp_path: Path) -> None:
    project(tmp_path, "import torch\ndef test_a(): torch.zeros(1000)\n")
    (tmp_path / "conftest.py").write_text(
        "import pytest\ndef pytest_collection_modifyitems(items):\n"
        "    for item in items: item.add_marker(pytest.mark.memory_budget(peak=1))\n",
        encoding="utf-8",
    )
    ran = run_pytest(tmp_path)
    assert ran.returncode == 1
    assert "FAIL peak" in ran.stdout


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


def test_devices_of_mark_command_line_and_ini(tmp_path: Path) -> None:
    text = "import pytest\n@pytest.mark.memory_budget()\ndef test_auto(): pass\n"
    text += "@pytest.mark.memory_budget(device='cpu')\ndef test_cpu(): pass\n"
    text += "@pytest.mark.memory_budget(device='cdua')\ndef test_typo(): pass\n"
    project(tmp_path, text, "memory_device = hpu\nmemory_fallback_device = mtia\n")
    by_ini = run_pytest(tmp_path, "-rs", "-k", "not typo")
    assert "1 passed, 1 skipped, 1 deselected" in by_ini.stdout
    assert "memory budget: no hpu device is available" in by_ini.stdout
    assert "2 passed" in run_pytest(tmp_path, "--memory-device=cpu", "-k", "not typo").stdout
    if "cuda" not in by_ini.stdout:
        fallen = run_pytest(tmp_path, "--memory-device=auto", "-rs", "-k", "not typo")
        assert "memory budget: no mtia device is available" in fallen.stdout
    # a slip of the pen must not skip the test in silence
    typo = run_pytest(tmp_path)
    assert typo.returncode == 4
    assert "test_it.py::test_typo: memory_budget: device='cdua'" in typo.stdout + typo.stderr


def test_a_mark_may_take_growth_back_that_is_the_default(tmp_path: Path) -> None:
    text = "import pytest, torch\nkept = []\n@pytest.mark.memory_budget(growth=None)\n"
    text += "def test_a(): kept.append(torch.zeros(10))\n"
    ran = run_pytest(project(tmp_path, text, "memory_default_growth = 0\n"))
    assert ran.returncode == 0


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


def test_a_baseline_is_held_with_the_nearest_tolerance(tmp_path: Path) -> None:
    text = "import os, pytest, torch\nsize = int(os.environ.get('SIZE', 1000))\n"
    for name, mark in (
        ("default", ""),
        ("wide", "baseline='50%'"),
        ("exact", "baseline=0"),
        ("none", "baseline=False"),
    ):
        text += f"@pytest.mark.memory_budget({mark})\ndef test_{name}(): torch.zeros(size)\n"
    text += "def test_run(memory): memory.run(lambda: torch.zeros(size), baseline=False)\n"
    project(tmp_path, text, "memory_baseline = peaks.json\nmemory_baseline_tolerance = 20%\n")
    run_pytest(tmp_path, "--memory-update-baseline")
    assert set(peaks_of(tmp_path / "peaks.json")) == {
        f"test_it.py::test_{name}" for name in ("default", "wide", "exact", "none", "run")
    }
    found = run_pytest(tmp_path, "-rA", SIZE="1150")
    for name, word in (("default", "PASSED"), ("wide", "PASSED"), ("exact", "FAILED"), ("none", "PASSED")):
        assert f"{word} test_it.py::test_{name}" in found.stdout
    worse = run_pytest(tmp_path, "-rA", SIZE="1300")
    for name, word in (("default", "FAILED"), ("wide", "PASSED"), ("exact", "FAILED"), ("none", "PASSED")):
        assert f"{word} test_it.py::test_{name}" in worse.stdout
    assert "PASSED test_it.py::test_run" in worse.stdout


def test_a_baseline_keeps_what_a_run_of_some_tests_did_not_collect(tmp_path: Path) -> None:
    text = "import os, pytest, torch\n@pytest.mark.memory_budget()\ndef test_a(): torch.zeros(1000)\n"
    text += "@pytest.mark.memory_budget(growth=0)\ndef test_b(): assert not os.environ.get('FAIL')\n"
    project(tmp_path, text, "memory_baseline = peaks.json\n")
    run_pytest(tmp_path, "--memory-update-baseline")
    both = {"test_it.py::test_a", "test_it.py::test_b"}
    run_pytest(tmp_path, "--memory-update-baseline", "-k", "test_a")
    assert set(peaks_of(tmp_path / "peaks.json")) == both
    run_pytest(tmp_path, "--memory-update-baseline", FAIL="1")
    assert set(peaks_of(tmp_path / "peaks.json")) == both
    ran = run_pytest(tmp_path, "test_it.py::test_a")
    assert "is gone" not in ran.stdout
    run_pytest(tmp_path, "--memory-update-baseline", "test_it.py::test_a")
    assert set(peaks_of(tmp_path / "peaks.json")) == both


def test_a_report_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    ran = run_pytest(project(tmp_path, SMALL), "--memory-report=test_it.py/report.json")
    assert ran.returncode == 3
    assert "error: --memory-report: " in ran.stdout
    assert "Traceback" not in ran.stderr


def test_an_unwritable_step_summary_is_a_note(tmp_path: Path) -> None:
    ran = run_pytest(project(tmp_path, SMALL), GITHUB_STEP_SUMMARY=str(tmp_path / "no" / "summary.md"))
    assert ran.returncode == 0
    assert "note: the step summary could not be written" in ran.stdout


def test_results_travel_from_workers(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    project(tmp_path, SMALL)
    ran = run_pytest(tmp_path, "-n", "2", "--memory-report=r.json", "--memory-default-growth=0")
    assert {test["test"] for test in json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["tests"]} == {
        "test_it.py::test_leak",
        "test_it.py::test_second",
    }
    table = ran.stdout.split(" memory budgets ")[1]
    assert "test_leak" in table
    assert "test_second" in table
    assert "1 failed, 1 passed" in ran.stdout  # 4,000 bytes a step are within the 8 KiB of the second


def test_baselines_are_kept_by_the_controller(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    project(tmp_path, SMALL, "memory_baseline = peaks.json\n")
    ran = run_pytest(tmp_path, "-n", "2", "--memory-update-baseline")
    assert "2 of 2 peaks changed" in ran.stdout
    assert len(peaks_of(tmp_path / "peaks.json")) == 2
    assert "is gone" not in run_pytest(tmp_path, "-n", "2").stdout


def test_bad_marks_are_named_by_workers_too(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    text = "import pytest\n@pytest.mark.memory_budget(peak='x')\ndef test_a(): pass\ndef test_b(): pass\n"
    ran = run_pytest(project(tmp_path, text), "-n", "2")
    assert "test_it.py::test_a: memory_budget: peak='x'" in ran.stdout + ran.stderr
    assert ran.returncode == 4


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
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    once = run_pytest(tmp_path, "-p", "no:memlint")
    assert "2 passed, 2 warnings" in once.stdout
    assert "memory budgets" not in once.stdout


def test_failures_are_run_again_by_rerunfailures(tmp_path: Path) -> None:
    pytest.importorskip("pytest_rerunfailures")
    project(tmp_path, SMALL)
    growth = "--memory-default-growth=0"
    again = run_pytest(tmp_path, growth, "--reruns", "1", "--memory-report=r.json", "-k", "leak")
    assert "1 failed, 1 deselected, 1 rerun" in again.stdout
    (test,) = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["tests"]
    assert len(test["steps"]) == 13
    text = "import pytest, torch\ntries = []\n@pytest.mark.memory_budget(growth=0, steps=3, warmup=0)\n"
    text += "def test_flaky():\n    tries.append(torch.zeros(10) if len(tries) < 8 else None)\n"
    flaky = run_pytest(project(tmp_path, text), "--reruns", "1", "--memory-report=r.json")
    assert "1 passed, 1 rerun" in flaky.stdout
    (test,) = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["tests"]
    assert test["passed"]


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
    assert "memory budgets" not in ran.stdout


def test_without_marks_torch_is_not_imported_and_nothing_is_said(tmp_path: Path) -> None:
    text = "import memlint, sys\ndef test_b():\n    from memlint import Budget\n"
    text += "def test_c(): assert 'torch' not in sys.modules\n"
    report = tmp_path / "r.json"
    ran = run_pytest(project(tmp_path, text), f"--memory-report={report}", GITHUB_STEP_SUMMARY=str(tmp_path / "s.md"))
    assert "2 passed" in ran.stdout
    assert "memory budgets" not in ran.stdout
    assert not (tmp_path / "s.md").exists()
    assert json.loads(report.read_text(encoding="utf-8"))["tests"] == []
