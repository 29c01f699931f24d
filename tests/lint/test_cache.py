"""Results that are remembered, and when they are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import memlint
from memlint.lint import cache as caching
from memlint.lint.engine import Checker, check
from memlint.lint.model import Report
from tests.fakes import RULES, config, places


def run(*paths: str, **settings: object) -> Report:
    return check(paths or (".",), config(Path.cwd(), cache=True, **settings), rules=RULES)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were really looked at."""
    seen: list[str] = []
    judged = Checker._judged

    def count(self: Checker, display: str, data: bytes, look: object) -> object:
        seen.append(display)
        return judged(self, display, data, look)  # type: ignore[arg-type]

    monkeypatch.setattr(Checker, "_judged", count)
    return seen


def entries(project: Path) -> list[Path]:
    return sorted((project / caching.FOLDER).rglob("*.json"))


def test_the_second_run_looks_at_nothing_and_says_the_same(project: Path, looks: list[str]) -> None:
    (project / "a.py").write_text("bad, grave, hmm  # noqa: ML903\n", encoding="utf-8")
    (project / "b.py").write_text("bad_ = bad\n", encoding="utf-8")
    first = run()
    assert looks == ["a.py", "b.py"]
    assert first.results[0].suppressed == 1
    assert run() == first
    assert looks == ["a.py", "b.py"]


@pytest.mark.parametrize(
    "settings", [{"ignore": ("ML903",)}, {"target_torch": "1.13"}, {"per_file_ignores": (("x.py", ("ML901",)),)}]
)
def test_other_settings_are_another_result(project: Path, looks: list[str], settings: dict[str, object]) -> None:
    (project / "a.py").write_text("bad\n", encoding="utf-8")
    for _ in range(2):
        run()
        run(**settings)
    assert looks == ["a.py", "a.py"]


def test_a_changed_file_is_looked_at_again(project: Path, looks: list[str]) -> None:
    path = project / "a.py"
    path.write_text("bad\n", encoding="utf-8")
    run()
    path.write_text("x = bad\n", encoding="utf-8")
    assert places(run()) == [("a.py", 1, "ML901")]
    assert looks == ["a.py", "a.py"]
    assert len(entries(project)) == 1


def test_another_project_torch_is_another_result(project: Path, looks: list[str]) -> None:
    from memlint.lint import torch_version

    (project / "a.py").write_text("bad\n", encoding="utf-8")
    run()
    (project / "requirements.txt").write_text("torch>=1.9\n", encoding="utf-8")
    torch_version._of_folder.cache_clear()
    run()
    assert looks == ["a.py", "a.py"]


def test_another_linter_is_another_result(project: Path, looks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "a.py").write_text("bad\n", encoding="utf-8")
    run()
    monkeypatch.setattr(caching, "_own_source", lambda: b"changed")
    run()
    monkeypatch.setattr(memlint, "__version__", "99")
    run()
    assert looks == ["a.py"] * 3


@pytest.mark.parametrize(
    "garbage", [b"", b"\xff", b"{}", b"[]", b"null", b'{"key": "KEY"}', b'{"key": "KEY", "result": {"findings": [1]}}']
)
def test_broken_entries_are_ignored_and_mended(project: Path, looks: list[str], garbage: bytes) -> None:
    (project / "a.py").write_text("bad\n", encoding="utf-8")
    first = run()
    (entry,) = entries(project)
    key = json.loads(entry.read_bytes())["key"]
    entry.write_bytes(garbage.replace(b"KEY", key.encode()))
    assert run() == first
    assert run() == first
    assert looks == ["a.py", "a.py"]


def test_failures_are_not_remembered(project: Path) -> None:
    (project / "a.py").write_text("bad(\n", encoding="utf-8")
    (project / "b.py").write_text("boom\n", encoding="utf-8")
    assert len(run().all_failures) == len(run().all_failures) == 2
    assert entries(project) == []


def test_a_remembered_finding_is_fixed_all_the_same(project: Path) -> None:
    path = project / "a.py"
    path.write_text("bad, grave\n", encoding="utf-8")
    run()
    assert run(fix=True).results[0].fixed == 1
    assert path.read_text(encoding="utf-8") == "good, grave\n"
    assert places(run(fix=True)) == places(run()) == [("a.py", 1, "ML902")]


def test_no_cache_means_none(project: Path, looks: list[str]) -> None:
    (project / "a.py").write_text("bad\n", encoding="utf-8")
    for _ in range(2):
        check(["."], config(project), rules=RULES)
    assert looks == ["a.py", "a.py"]
    assert not (project / caching.FOLDER).exists()


def test_the_folder_keeps_itself_out_of_git_and_of_backups(project: Path) -> None:
    (project / "a.py").write_text("bad\n", encoding="utf-8")
    run()
    folder = project / caching.FOLDER
    assert (folder / ".gitignore").read_text(encoding="utf-8") == "*\n"
    assert (
        (folder / "CACHEDIR.TAG").read_text(encoding="utf-8").startswith("Signature: 8a477f597d28d172789f06886806bc55")
    )


def test_a_cache_that_cannot_be_written_is_no_trouble(project: Path) -> None:
    (project / "a.py").write_text("bad\n", encoding="utf-8")
    (project / caching.FOLDER).write_text("in the way", encoding="utf-8")
    report = run()
    assert (places(report), report.all_failures) == ([("a.py", 1, "ML901")], ())
