"""Which files a run checks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from memlint.config import DEFAULT_EXCLUDE
from memlint.errors import ConfigError
from memlint.lint.discovery import discover
from memlint.lint.model import FailureKind


def make(root: Path, *files: str) -> None:
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n", encoding="utf-8")


def found(
    paths: Sequence[str] = (".",), exclude: Sequence[str] = DEFAULT_EXCLUDE, *, force_exclude: bool = False
) -> list[str]:
    result = discover(paths, root=Path.cwd(), exclude=exclude, force_exclude=force_exclude)
    assert not result.failures
    return [file.display for file in result.files]


def test_python_files_and_notebooks_only(project: Path) -> None:
    make(project, "a.py", "b.pyi", "c.ipynb", "d.txt", "e/f.py", "g.pyw", "h.PY")
    assert found() == ["a.py", "c.ipynb", "e/f.py"]


def test_order_is_by_path_and_not_by_the_file_system(project: Path) -> None:
    make(project, "b/z.py", "b.py", "a/b/c.py", "a/b.py", "ab.py")
    assert found() == ["a/b/c.py", "a/b.py", "ab.py", "b/z.py", "b.py"]


@pytest.mark.parametrize("folder", [".venv", "venv", ".git", "node_modules", "site-packages", "deep/dist", "_build"])
def test_ruffs_default_folders_are_skipped(project: Path, folder: str) -> None:
    make(project, f"{folder}/a.py", "kept.py")
    assert found() == ["kept.py"]


def test_the_defaults_are_those_of_ruff(project: Path) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--show-settings", __file__]
    ruff = subprocess.run(command, capture_output=True, text=True, check=True)
    block = ruff.stdout.split("file_resolver.exclude = [")[1].split("]")[0]
    assert {line.strip(' \t",') for line in block.splitlines()} - {""} == set(DEFAULT_EXCLUDE) - {".memlint_cache"}


def test_a_named_file_is_checked_whatever_excludes_it(project: Path) -> None:
    make(project, "venv/a.py", "script")
    assert found(["venv/a.py", "script"]) == ["script", "venv/a.py"]
    assert found(["venv/a.py", "script"], force_exclude=True) == ["script"]


def test_a_named_folder_is_searched_even_if_an_ignore_file_lists_it(project: Path) -> None:
    make(project, "build/a.py", "b.py")
    (project / ".gitignore").write_text("build/\n", encoding="utf-8")
    assert found() == ["b.py"]
    assert found(["build"]) == ["build/a.py"]


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        ("b", ["a/c.py", "a.py"]),
        ("b/", ["a/c.py", "a.py"]),
        ("/b", ["a/b/d.py", "a/c.py", "a.py"]),
        ("*.py", []),
        ("a/*.py", ["a/b/d.py", "a.py", "b/e.py"]),
        ("**/c.py", ["a/b/d.py", "a.py", "b/e.py"]),
        ("nothing", ["a/b/d.py", "a/c.py", "a.py", "b/e.py"]),
    ],
)
def test_exclude_takes_gitignore_patterns(project: Path, pattern: str, kept: list[str]) -> None:
    make(project, "a.py", "a/b/d.py", "a/c.py", "b/e.py")
    assert found(exclude=[pattern]) == kept


def test_force_exclude_looks_at_the_folders_above(project: Path) -> None:
    make(project, "gen/deep/a.py", "b.py")
    assert found(["gen/deep/a.py", "b.py"], ["gen/"], force_exclude=True) == ["b.py"]
    assert found(["gen"], ["gen"], force_exclude=True) == []


def test_a_pattern_that_means_nothing_is_an_error(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"bad pattern '!'"):
        discover(["."], root=project, exclude=["!"])


def test_gitignore_files_nest_and_the_inner_one_wins(project: Path) -> None:
    (project / ".git").mkdir()
    make(project, "a.py", "gen_a.py", "sub/gen_b.py", "sub/deep/gen_c.py", "sub/deep/d.py", "old/e.py")
    (project / ".gitignore").write_text("# generated\ngen_*.py\nold/\n\n", encoding="utf-8")
    (project / "sub/.gitignore").write_text("!gen_b.py\n/deep/d.py\n", encoding="utf-8")
    assert found() == ["a.py", "sub/gen_b.py"]


def test_git_agrees_about_what_is_ignored(project: Path) -> None:
    subprocess.run(["git", "init", "-q", "."], check=True)
    make(project, "a.py", "b/a.py", "b/c/a.py", "b/c/keep.py", "logs/x.py", "logs/y/z.py", "t mp/q.py", "#h.py", "é.py")
    (project / ".gitignore").write_text(
        "/a.py\nb/**/a.py\nlogs/*\n!logs/y\nt\\ mp/\n\\#h.py\né.py\n!!\n", encoding="utf-8"
    )
    (project / ".git/info/exclude").write_text("keep.py\n", encoding="utf-8")
    listed = subprocess.run(
        ["git", "-c", "core.quotePath=off", "ls-files", "-o", "--exclude-standard", "*.py"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(found()) == sorted(listed.stdout.splitlines())


def test_ignore_files_above_count_up_to_the_top_of_the_repository(project: Path) -> None:
    make(project, "repo/sub/a.py", "repo/sub/skip.py", "repo/sub/b.py")
    (project / ".gitignore").write_text("b.py\n", encoding="utf-8")
    (project / "repo/.git").mkdir()
    (project / "repo/.gitignore").write_text("skip.py\n", encoding="utf-8")
    assert found(["repo/sub"]) == ["repo/sub/a.py", "repo/sub/b.py"]


def test_a_linked_worktree_uses_the_main_repositorys_exclude_file(project: Path) -> None:
    git = ["git", "-C", "main", "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run(["git", "init", "-q", "main"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "m"], check=True)
    subprocess.run([*git, "worktree", "add", "-q", "../tree"], check=True, capture_output=True)
    make(project, "tree/a.py", "tree/b.py")
    (project / "main/.git/info").mkdir(exist_ok=True)
    (project / "main/.git/info/exclude").write_text("b.py\n", encoding="utf-8")
    assert found(["tree"]) == ["tree/a.py"]


def test_a_file_that_is_named_several_ways_is_checked_once(project: Path) -> None:
    make(project, "a.py", "sub/b.py")
    assert found(["a.py", "./a.py", str(project / "a.py"), ".", "sub", "sub/../a.py"]) == ["a.py", "sub/b.py"]


def test_a_link_and_its_target_are_one_file_under_the_targets_name(project: Path) -> None:
    make(project, "z/real.py")
    (project / "a_link.py").symlink_to("z/real.py")
    assert found() == ["z/real.py"]
    assert found(["a_link.py"]) == ["a_link.py"]
    assert found(["a_link.py", "z"]) == ["z/real.py"]


def test_loops_of_links_end(project: Path) -> None:
    make(project, "a/b.py")
    (project / "a/loop").symlink_to("..")
    (project / "a/self").symlink_to("self")
    (project / "other").symlink_to("a")
    assert found() == ["a/b.py"]
    assert found(["other"]) == ["other/b.py"]


def test_links_that_lead_nowhere_are_kept_for_reading_to_complain(project: Path) -> None:
    (project / "gone.py").symlink_to("nowhere.py")
    (project / "self.py").symlink_to("self.py")
    (project / ".#lock.py").symlink_to("someone@host.1234")
    assert found() == ["gone.py", "self.py"]


def test_folders_and_pipes_with_a_files_name_are_no_files(project: Path) -> None:
    make(project, "folder.py/a.py")
    os.mkfifo(project / "pipe.py")
    assert found() == ["folder.py/a.py"]


def test_a_path_that_does_not_exist_is_a_failure_and_the_others_go_on(project: Path) -> None:
    make(project, "a.py")
    result = discover(["a.py", "nowhere"], root=project)
    assert [file.display for file in result.files] == ["a.py"]
    (failure,) = result.failures
    assert (failure.path, failure.kind) == ("nowhere", FailureKind.UNREADABLE)
    assert "no such file" in failure.detail


def test_a_folder_that_cannot_be_listed_is_a_failure(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(project, "a.py", "locked/b.py")
    scandir = os.scandir

    def refuse(path: str) -> os.PathLike[str]:
        if path.endswith("locked"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)  # type: ignore[return-value]

    monkeypatch.setattr(os, "scandir", refuse)
    result = discover(["."], root=project)
    assert [file.display for file in result.files] == ["a.py"]
    assert [(f.path, f.detail) for f in result.failures] == [("locked", "Permission denied")]


def test_files_outside_the_current_folder_keep_their_whole_path(project: Path, tmp_path: Path) -> None:
    make(tmp_path, "elsewhere/a.py")
    assert found([str(tmp_path / "elsewhere")]) == [(tmp_path / "elsewhere/a.py").as_posix()]


def test_a_thousand_nested_folders(project: Path) -> None:
    for _ in range(1000):
        os.mkdir("d")
        os.chdir("d")
    Path("a.py").write_text("", encoding="utf-8")
    os.chdir(project)
    try:
        assert len(found()) == 1
    finally:
        # pytest's own cleaning recurses
        subprocess.run([shutil.which("rm") or "rm", "-rf", "d"], check=True)
