"""Configuration files, and what wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from memlint import config as configuration
from memlint.config import DEFAULT_EXCLUDE, Config
from memlint.errors import ConfigError
from memlint.lint.model import Severity
from memlint.lint.selection import choose

CODES = ("ML001", "ML101", "ML102", "ML201")
FORMATS = ("text", "json")


def load(*paths: str, file: str | None = None) -> Config:
    return configuration.load(paths or (".",), CODES, FORMATS, file)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_every_key_is_read(project: Path) -> None:
    write(
        project / "pyproject.toml",
        """
        [tool.memlint]
        select = ["ML1", "ML201"]
        ignore = ["ML102"]
        extend-select = ["ML001"]
        exclude = ["gen"]
        extend-exclude = ["old/*.py"]
        target-torch = "1.13"
        fail-on = "error"
        show-notes = true
        jobs = 3
        output-format = "json"
        [tool.memlint.per-file-ignores]
        "tests/*" = ["ML101", "ML2"]
        """,
    )
    assert load() == Config(
        root=project,
        select=("ML1", "ML201"),
        ignore=("ML102",),
        extend_select=("ML001",),
        exclude=("gen",),
        extend_exclude=("old/*.py",),
        per_file_ignores=(("tests/*", ("ML101", "ML2")),),
        target_torch="1.13",
        fail_on=Severity.ERROR,
        show_notes=True,
        jobs=3,
        output_format="json",
    )


def test_nothing_configured(project: Path) -> None:
    write(project / "pyproject.toml", "[project]\nname = 'memlint-user'\n")
    config = load()
    assert config == Config(root=project)
    assert config.excludes == DEFAULT_EXCLUDE


def test_the_nearest_file_upward_that_speaks_of_memlint_holds(project: Path) -> None:
    write(project / "pyproject.toml", "[tool.memlint]\njobs = 1\n")
    write(project / "inner/pyproject.toml", "[tool.other]\nmemlint = 1\n")
    write(project / "inner/deep/memlint.toml", "jobs = 2\n")
    write(project / "inner/deep/pyproject.toml", "[tool.memlint]\njobs = 3\n")
    write(project / "inner/a.py", "")
    assert (load("inner/a.py").jobs, load("inner/a.py").root) == (1, project)
    assert (load("inner/deep").jobs, load("inner/deep").root) == (2, project / "inner/deep")
    assert load("inner/deep", "inner/a.py").jobs == 1


def test_a_file_can_be_named(project: Path) -> None:
    write(project / "pyproject.toml", "[tool.memlint]\njobs = 1\n")
    write(project / "ci/strict.toml", "jobs = 4\n")
    write(project / "ci/pyproject.toml", "[tool.memlint]\njobs = 5\n")
    assert load(file="ci/strict.toml").jobs == 4
    assert load(file="ci/pyproject.toml").jobs == 5
    with pytest.raises(ConfigError, match=r"nowhere.toml: No such file"):
        load(file="nowhere.toml")


def test_all_errors_of_a_file_are_listed_together(project: Path) -> None:
    write(
        project / "memlint.toml",
        """
        slect = ["ML101"]
        ignore = ["ML999", "ML10l"]
        exclude = "gen"
        target-torch = 2.0
        fail-on = "warn"
        show-notes = 1
        jobs = 0
        output-format = "xml"
        zzz = 1
        per-file-ignores = { "a.py" = ["nope"], "b.py" = "ML101" }
        """,
    )
    with pytest.raises(ConfigError) as error:
        load()
    lines = str(error.value).splitlines()
    assert all("memlint.toml" in line for line in lines)
    said = [line.split(": ", 1)[1] for line in lines]
    assert said == [
        "unknown key 'slect'; did you mean 'select'?",
        "ignore: unknown rule 'ML999'; `memlint rules` lists the codes",
        "ignore: unknown rule 'ML10l'; did you mean ML102?",
        "exclude: must be a list of strings",
        'target-torch: must be a version such as "2.0", not 2.0',
        "fail-on: must be one of note, warning, error",
        "show-notes: must be true or false",
        "jobs: must be a whole number, 1 or more",
        "output-format: must be one of text, json",
        "unknown key 'zzz'",
        "per-file-ignores: a.py: unknown rule 'nope'; `memlint rules` lists the codes",
        "per-file-ignores: b.py: must be a list of strings",
    ]


@pytest.mark.parametrize("text", ["select = [", "[tool]\nmemlint = 3\n", "\xff"])
def test_broken_files_are_one_line(project: Path, text: str) -> None:
    path = project / "pyproject.toml"
    path.write_bytes(b"# memlint\n" + text.encode("latin-1"))
    with pytest.raises(ConfigError) as error:
        load()
    assert str(error.value).startswith(f"{path}")
    assert "\n" not in str(error.value)


def test_the_command_line_wins(project: Path) -> None:
    write(project / "memlint.toml", "jobs = 2\nshow-notes = true\n")
    config = configuration.overridden(load(), {"jobs": 5, "show_notes": None, "select": ["ML1"]})
    assert (config.jobs, config.show_notes, config.select) == (5, True, ("ML1",))


def test_isolated_ignores_files(project: Path) -> None:
    write(project / "memlint.toml", "jobs = 2\n")
    assert configuration.isolated(["."]).jobs is None


def test_the_fingerprint_tells_what_decides_from_what_shows(project: Path) -> None:
    base = Config(root=project)
    same = Config(root=project, jobs=3, output_format="json", show_notes=True, fix=True, extend_exclude=("x",))
    assert configuration.fingerprint(base) == configuration.fingerprint(same)
    for change in ({"ignore": ("ML1",)}, {"target_torch": "2.0"}, {"per_file_ignores": (("a", ("ML1",)),)}):
        assert configuration.fingerprint(base) != configuration.fingerprint(configuration.overridden(base, change))


@pytest.mark.parametrize(
    ("select", "ignore", "extend", "chosen"),
    [
        (["ALL"], [], [], CODES),
        (["ML1"], [], [], ("ML101", "ML102")),
        (["ml101"], [], [], ("ML101",)),
        (["ALL"], ["ML1"], [], ("ML001", "ML201")),
        (["ALL"], ["ML1"], ["ML101"], ("ML001", "ML101", "ML201")),
        (["ML101"], ["ALL"], [], ("ML101",)),
        (["ML101"], ["ML101"], [], ()),
        ([], [], ["ML2"], ("ML201",)),
    ],
)
def test_the_more_specific_selector_wins(
    select: list[str], ignore: list[str], extend: list[str], chosen: tuple[str, ...]
) -> None:
    assert choose(select, ignore, extend, CODES) == frozenset(chosen)
