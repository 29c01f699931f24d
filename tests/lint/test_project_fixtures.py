"""Whole projects: what other files do decides about a finding. The fixtures say what is expected, line by line."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from memlint.config import Config
from memlint.lint import engine
from memlint.lint.model import Report, Severity

PROJECTS = sorted((Path(__file__).parents[2] / "fixtures" / "projects").iterdir())
EXPECTED = re.compile(r"# expect (ML\d+ (?:warning|error)|failure)")


def expected(folder: Path) -> Counter[tuple[str, int, str]]:
    return Counter(
        (path.relative_to(folder).as_posix(), number, found.group(1))
        for path in folder.rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (found := EXPECTED.search(line))
    )


def said(report: Report, folder: Path) -> Counter[tuple[str, int, str]]:
    def name(path: str) -> str:
        return Path(path).resolve().relative_to(folder.resolve()).as_posix()

    findings = [finding for finding in report.findings if finding.severity > Severity.NOTE]
    return Counter(
        [(name(f.path), f.span.line, f"{f.code} {f.severity.name.lower()}") for f in findings]
        + [(name(f.path), f.line or 0, "failure") for f in report.all_failures]
    )


def check(folder: Path, *paths: Path, **settings: object) -> Report:
    config = replace(Config(root=folder), cache=False, **settings)  # type: ignore[arg-type]
    return engine.check([str(path) for path in paths or (folder,)], config)


@pytest.mark.parametrize("folder", PROJECTS, ids=lambda folder: folder.name)
def test_project(folder: Path) -> None:
    assert said(check(folder), folder) == expected(folder)


@pytest.mark.parametrize("folder", PROJECTS, ids=lambda folder: folder.name)
def test_a_file_alone_is_judged_as_in_the_whole(folder: Path) -> None:
    """As pre-commit does: single files, the rest of the project around them."""
    one_by_one: Counter[tuple[str, int, str]] = Counter()
    for path in folder.rglob("*.py"):
        one_by_one += said(check(folder, path), folder)
    assert one_by_one == expected(folder)


@pytest.mark.parametrize("folder", PROJECTS, ids=lambda folder: folder.name)
def test_two_processes_say_the_same(folder: Path) -> None:
    assert check(folder, jobs=2) == check(folder, jobs=1)


def test_what_is_elsewhere_is_shown_there(tmp_path: Path) -> None:
    folder = tmp_path / "src_layout"
    shutil.copytree(next(path for path in PROJECTS if path.name == "src_layout"), folder)
    report = check(folder)
    found = next(f for f in report.findings if f.path.endswith("train.py") and f.span.line == 10)
    places = {(Path(other.path).name, other.span.line) for other in found.related}
    source = (folder / "src/kit/engine.py").read_text().splitlines()
    made = next(n for n, line in enumerate(source, 1) if "F.cross_entropy(" in line)
    assert ("engine.py", made) in places


def test_fixed_projects_are_clean(tmp_path: Path) -> None:
    for project in PROJECTS:
        folder = tmp_path / project.name
        shutil.copytree(project, folder)
        check(folder, fix=True, unsafe_fixes=True)
        left = check(folder)
        assert not [f for f in left.findings if f.severity > Severity.NOTE and f.fix is not None]
        again = {path: path.read_bytes() for path in folder.rglob("*.py")}
        check(folder, fix=True, unsafe_fixes=True)
        assert again == {path: path.read_bytes() for path in folder.rglob("*.py")}
