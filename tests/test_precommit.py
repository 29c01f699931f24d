"""The hooks, run by the real pre-commit from a repository made of this checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BAD = """\
import torch


def train(model, loader, criterion, optimizer):
    total = 0.0
    for inputs, targets in loader:
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss
    return total
"""
CONFIG = """\
repos:
  - repo: {hooks}
    rev: {rev}
    hooks:
      - id: {hook}
"""


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=n", "-c", "user.email=e", "-c", "protocol.file.allow=always", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="module")
def hooks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This checkout as it is now, committed to a repository of its own."""
    folder = tmp_path_factory.mktemp("hooks")
    for name in ("memlint", "pyproject.toml", "README.md", "LICENSE", ".pre-commit-hooks.yaml"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "hooks")
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pre-commit keeps the environment that it makes for the hooks: once for all tests here."""
    return tmp_path_factory.mktemp("pre-commit")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A user's repository."""
    git(tmp_path, "init", "-q")
    return tmp_path


def pre_commit(repository: Path, hooks: Path, home: Path, hook: str) -> subprocess.CompletedProcess[str]:
    rev = git(hooks, "rev-parse", "HEAD")
    config = CONFIG.format(hooks=hooks, rev=rev, hook=hook)
    (repository / ".pre-commit-config.yaml").write_text(config, encoding="utf-8")
    git(repository, "add", ".")
    environment = {**os.environ, "PRE_COMMIT_HOME": str(home), "PRE_COMMIT_COLOR": "never"}
    # git sets these for hooks; pre-commit must not take the outer repository for its own
    for name in [name for name in environment if name.startswith("GIT_")]:
        del environment[name]
    command = [sys.executable, "-m", "pre_commit", "run", "--all-files"]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False, env=environment)


def test_the_hook_fails_on_a_bad_file_and_passes_on_a_good_one(repository: Path, hooks: Path, home: Path) -> None:
    (repository / "train.py").write_text(BAD, encoding="utf-8")
    (repository / "notes.txt").write_text("total += loss\n", encoding="utf-8")
    run = pre_commit(repository, hooks, home, "memlint")
    assert run.returncode == 1, run.stdout + run.stderr
    assert "[ML101]" in run.stdout
    assert "train.py:11" in run.stdout
    (repository / "train.py").write_text(BAD.replace("+= loss", "+= loss.detach()"), encoding="utf-8")
    run = pre_commit(repository, hooks, home, "memlint")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Passed" in run.stdout


def test_the_fixing_hook_fixes(repository: Path, hooks: Path, home: Path) -> None:
    (repository / "train.py").write_text(BAD, encoding="utf-8")
    run = pre_commit(repository, hooks, home, "memlint-fix")
    # pre-commit fails a hook that has changed a file
    assert run.returncode == 1, run.stdout + run.stderr
    assert "files were modified by this hook" in run.stdout
    assert (repository / "train.py").read_text(encoding="utf-8") == BAD.replace("+= loss", "+= loss.detach()")
    assert pre_commit(repository, hooks, home, "memlint-fix").returncode == 0


def test_excluded_files_stay_excluded_though_pre_commit_names_them(repository: Path, hooks: Path, home: Path) -> None:
    (repository / "train.py").write_text(BAD, encoding="utf-8")
    (repository / "memlint.toml").write_text('extend-exclude = ["train.py"]\n', encoding="utf-8")
    assert pre_commit(repository, hooks, home, "memlint").returncode == 0
