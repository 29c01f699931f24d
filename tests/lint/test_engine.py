"""The engine: bad input of all kinds, many processes, and what is never parsed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from memlint.lint import engine, pool
from memlint.lint.discovery import Candidate
from memlint.lint.engine import check, check_text, with_large_stack
from memlint.lint.model import FailureKind, Report
from memlint.lint.source import SourceFile
from tests.fakes import RULES, config, notebook, places, where


def run(*paths: str, **settings: object) -> Report:
    return check(paths or (".",), config(Path.cwd(), **settings), rules=RULES)


def failures(report: Report) -> list[tuple[str, FailureKind, int | None]]:
    return [(f.path, f.kind, f.line) for f in report.all_failures]


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "kind", "line"),
    [
        (b"bad = '\xff'\n", FailureKind.UNREADABLE, 1),
        (b"# coding: what\nbad\n", FailureKind.UNREADABLE, None),
        (b"x = 1\nbad bad\n", FailureKind.SYNTAX, 2),
        (b"bad\n\0", FailureKind.SYNTAX, 1),
        (b"bad = " + b"(" * 10_000, FailureKind.TOO_DEEP, None),
        (b"bad = " + b"-" * 10_000 + b"1", FailureKind.TOO_DEEP, None),
        (b"boom\n", FailureKind.RULE_CRASH, None),
    ],
)
def test_a_bad_file_is_one_failure_and_the_others_go_on(
    project: Path, data: bytes, kind: FailureKind, line: int | None
) -> None:
    (project / "a.py").write_bytes(b"bad\n")
    (project / "b.py").write_bytes(data)
    (project / "c.py").write_bytes(b"bad\n")
    report = run()
    assert [path for path, _, _ in places(report) if path != "b.py"] == ["a.py", "c.py"]
    ((path, found, at),) = failures(report)
    assert (path, found) == ("b.py", kind)
    assert at == line or data.endswith(b"\0")
    assert "\n" not in report.all_failures[0].detail


def test_a_crash_keeps_what_the_other_rules_say(project: Path) -> None:
    (project / "a.py").write_text("bad = boom\n", encoding="utf-8")
    report = run()
    assert places(report) == [("a.py", 1, "ML901"), ("a.py", 1, "ML904")]
    assert report.all_failures[0].detail == "ML904: ValueError: boom, it said"


def test_a_defect_of_the_engine_is_a_failure_too(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(engine, "analyse", broken)
    (project / "a.py").write_text("bad\n", encoding="utf-8")
    (failure,) = run().all_failures
    assert failure.kind is FailureKind.RULE_CRASH
    assert failure.detail == "ZeroDivisionError: oh (a defect of memlint, please report it)"


def test_a_file_that_is_gone_or_locked_is_unreadable(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "gone.py").symlink_to("nowhere")
    (project / "loop.py").symlink_to("loop.py")
    (project / "ok.py").write_text("bad\n", encoding="utf-8")
    report = run()
    assert places(report) == [("ok.py", 1, "ML901")]
    assert [(f.path, f.kind, f.detail) for f in report.all_failures] == [
        ("gone.py", FailureKind.UNREADABLE, "No such file or directory"),
        ("loop.py", FailureKind.UNREADABLE, "Too many levels of symbolic links"),
    ]


@pytest.mark.parametrize(
    "data", [b"", b"\n", b"\xef\xbb\xbf", b"\x0c", b"   ", b"# bad", b"# bad\n#", b"'bad'", b"\xef\xbb\xbf# bad"]
)
def test_empty_files(project: Path, data: bytes) -> None:
    (project / "a.py").write_bytes(data)
    report = run()
    assert (places(report), failures(report), len(report.results)) == ([], [], 1)


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (b"bad\n", (None, 1, 1)),
        (b"\xef\xbb\xbfbad\n", (None, 1, 1)),
        ("# coding: latin-1\n'é', bad\n".encode("latin-1"), (None, 2, 6)),
        ("'☃', bad\n".encode(), (None, 1, 6)),
        (b"x\r\n\r\n  \r\nbad\r\n", (None, 4, 1)),
        (b"x\r\rbad\r", (None, 3, 1)),
        (b"x\n\x0cbad\n", (None, 2, 2)),
        (b"x\n\x0c\nbad\n", (None, 3, 1)),
        (b"if x:\n\tbad\n", (None, 2, 2)),
        (b"x = '''\r\n'''; bad", (None, 2, 6)),
    ],
)
def test_encodings_newlines_and_form_feeds(project: Path, data: bytes, place: tuple[int | None, int, int]) -> None:
    (project / "a.py").write_bytes(data)
    (finding,) = run().findings
    assert where(finding) == place


def test_notebooks(project: Path) -> None:
    (project / "n.ipynb").write_text(notebook("x = 1\n%magic", "!bad\n  \nbad", "for bad in x: hmm"), encoding="utf-8")
    (project / "r.ipynb").write_text(notebook("bad <- 1", language="R"), encoding="utf-8")
    (project / "broken.ipynb").write_text('{"bad"', encoding="utf-8")
    report = run()
    assert [(f.path, f.code, *where(f)) for f in report.findings] == [
        ("n.ipynb", "ML901", 2, 3, 1),
        ("n.ipynb", "ML901", 3, 1, 5),
        ("n.ipynb", "ML903", 3, 1, 15),
    ]
    assert failures(report) == [("broken.ipynb", FailureKind.UNREADABLE, None)]


def test_no_files(project: Path) -> None:
    assert run() == Report()


# -- what is looked at -------------------------------------------------------------------------------------------------


def test_a_file_without_a_trigger_is_never_parsed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    make = SourceFile.__init__

    def count(self: SourceFile, path: str, data: bytes) -> None:
        parsed.append(path)
        make(self, path, data)

    monkeypatch.setattr(SourceFile, "__init__", count)
    for name, text in {
        "a.py": "x = (\n",  # not even Python
        "b.py": "bad\n",
        "c.py": "x = 1  # memlint: ignore\n",
        "d.py": "x = 1  # noqa\n",
        "e.py": "x = 1  # noqa: ML901\n",
        "f.py": "memlint = noqa = 1\n",
    }.items():
        (project / name).write_text(text, encoding="utf-8")
    assert not run().all_failures
    assert parsed == ["b.py", "c.py", "e.py"]


def test_select_ignore_and_per_file_ignores(project: Path) -> None:
    (project / "tests").mkdir()
    for name in ("a.py", "tests/b.py"):
        (project / name).write_text("bad, grave, hmm\n", encoding="utf-8")
    everything = [(path, 1, code) for path in ("a.py", "tests/b.py") for code in ("ML901", "ML902", "ML903")]
    assert places(run()) == everything
    assert places(run(select=("ML901",))) == [everything[0], everything[3]]
    assert places(run(ignore=("ML9",))) == []
    kept = places(run(per_file_ignores=(("tests/*", ("ML902", "ML903")), ("tests/", ("ML901",)))))
    assert kept == everything[:3]


def test_text_from_elsewhere(project: Path) -> None:
    report, after = check_text(b"bad\r\n", "<stdin>", config(project, fix=True), rules=RULES)
    assert (places(report), after) == ([], b"good\r\n")
    report, after = check_text(b"bad(", "<stdin>", config(project, fix=True), rules=RULES)
    assert (failures(report), after) == ([("<stdin>", FailureKind.SYNTAX, 1)], b"bad(")


# -- many processes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use processes for the smallest run."""
    monkeypatch.setattr(pool, "_WORTH_A_PROCESS", 1)
    monkeypatch.setattr(pool, "_CHUNK_BYTES", 30)


def tree(root: Path, special: dict[str, str] | None = None) -> None:
    for number in range(30):
        (root / f"m{number:02}.py").write_text("bad\n" * (number * 7 % 5 + 1) + "hmm  # noqa\n", encoding="utf-8")
    for name, text in (special or {}).items():
        (root / name).write_text(text, encoding="utf-8")


@pytest.mark.usefixtures("eager")
def test_the_report_does_not_tell_how_many_processes_there_were(project: Path) -> None:
    tree(project, {"broken.py": "bad(\n", "crash.py": "boom\n", "n.ipynb": notebook("bad")})
    seen: list[tuple[int, int]] = []
    reports = []
    for jobs in (1, 2, 3, 50):
        seen.clear()
        settings = config(project, jobs=jobs)
        reports.append(check(["."], settings, rules=RULES, progress=lambda *done: seen.append(done)))
        assert seen[-1] == (33, 33)
        assert seen == sorted(seen)
    assert all(report == reports[0] for report in reports)
    assert len(reports[0].findings) > 60
    assert reports[0].results[0].path == "broken.py"


@pytest.mark.usefixtures("eager")
def test_fixing_in_several_processes(project: Path) -> None:
    tree(project)
    report = run(jobs=3, fix=True)
    assert {code for _, _, code in places(report)} == set()
    assert sum(result.fixed for result in report.results) == sum(n * 7 % 5 + 1 for n in range(30))
    assert not any("bad" in path.read_text(encoding="utf-8") for path in project.glob("*.py"))


@pytest.mark.usefixtures("eager")
def test_a_process_that_dies_costs_its_file_only(project: Path) -> None:
    tree(project)
    expected = places(run(jobs=1))
    tree(project, {"m10_kill.py": "kill\n", "m20_kill.py": "kill\n"})
    report = run(jobs=2)
    assert failures(report) == [(name, FailureKind.WORKER_DIED, None) for name in ("m10_kill.py", "m20_kill.py")]
    assert places(report) == expected
    assert [result.path for result in report.results] == sorted(path.name for path in project.glob("*.py"))


def test_small_runs_stay_in_one_process(project: Path) -> None:
    tree(project)
    before = set(sys.modules)
    code = (
        "import sys; from memlint.lint.engine import check; from tests.fakes import *\n"
        "check(['.'], config(Path.cwd()), rules=RULES)\n"
        "print([m for m in ('multiprocessing', 'concurrent.futures', 'rich', 'asyncio') if m in sys.modules])"
    )
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.stdout.strip() == "[]"
    assert before


@pytest.mark.parametrize(
    ("sizes", "wanted", "jobs"),
    [
        ([], None, 1),
        ([10**9], 8, 1),
        ([10, 10], 8, 1),
        ([10**6] * 3, 8, 3),
        ([10**6] * 30, 8, 8),
        ([10**6] * 30, 1, 1),
        ([200_000] * 6, 8, 4),
    ],
)
def test_no_more_processes_than_the_work_is_worth(sizes: list[int], wanted: int | None, jobs: int) -> None:
    files = [Candidate(str(n), str(n), size) for n, size in enumerate(sizes)]
    assert pool.useful_jobs(files, wanted) == jobs


SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests with it ignored
from pathlib import Path
from memlint.lint import pool
from memlint.lint.engine import check
from memlint import cli
from tests import fakes

class Slow(fakes.Bad):
    def check(self, flow):
        Path(flow.path + ".started").touch()
        time.sleep(0.5)
        yield from super().check(flow)

pool._WORTH_A_PROCESS = pool._CHUNK_BYTES = 1
rules = (Slow(),)
def run(options):
    check(["."], fakes.config(Path.cwd(), fix=True, jobs=JOBS), rules=rules)
    return 0
cli.run_check = run
sys.exit(cli.main(["check"]))
"""


@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_ends_cleanly(project: Path, jobs: int) -> None:
    for number in range(40):
        (project / f"m{number:02}.py").write_text("bad\n", encoding="utf-8")
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW.replace("JOBS", str(jobs))],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    eventually(lambda: any(project.glob("*.started")))
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr.strip()) == (130, "interrupted")
    assert {file.read_text(encoding="utf-8") for file in project.glob("*.py")} <= {"bad\n", "good\n"}
    assert len(list(project.glob("*.started"))) < 20
    assert not list(project.glob(".memlint-*"))


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# -- deep recursion ----------------------------------------------------------------------------------------------------


def test_a_large_stack_holds_deep_recursion() -> None:
    def depth(n: int) -> int:
        return n and 1 + depth(n - 1)

    limit = sys.getrecursionlimit()
    assert with_large_stack(lambda: depth(20_000)) == 20_000
    assert sys.getrecursionlimit() == limit


def test_errors_come_through_a_large_stack() -> None:
    def fail() -> None:
        raise ValueError("no")

    def endless() -> None:
        endless()

    with pytest.raises(ValueError, match="no"):
        with_large_stack(fail)
    with pytest.raises(RecursionError):
        with_large_stack(endless)


def test_endless_recursion_in_a_rule_is_too_deep(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*arguments: object) -> None:
        endless(*arguments)

    monkeypatch.setattr(engine, "analyse", endless)
    (project / "a.py").write_text("bad\n", encoding="utf-8")
    assert failures(run()) == [("a.py", FailureKind.TOO_DEEP, None)]
