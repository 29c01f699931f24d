"""The settings of a run: `[tool.memlint]` of pyproject.toml, or memlint.toml, as one frozen `Config`.

The file's keys are the command line's words. What the command line says wins. A key that does not exist, or a value of
the wrong type, is an error, and all errors of a file are listed together: nobody likes to be corrected one at a time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from memlint import toml
from memlint.errors import ConfigError
from memlint.lint.model import Severity

#: what discovery skips unless `exclude` says otherwise: the folders of ruff 0.17, and the place of our own cache
DEFAULT_EXCLUDE = (
    ".bzr",
    ".direnv",
    ".eggs",
    ".git",
    ".git-rewrite",
    ".hg",
    ".ipynb_checkpoints",
    ".memlint_cache",
    ".mypy_cache",
    ".nox",
    ".pants.d",
    ".pyenv",
    ".pytest_cache",
    ".pytype",
    ".ruff_cache",
    ".svn",
    ".tox",
    ".venv",
    ".vscode",
    "__pypackages__",
    "_build",
    "buck-out",
    "dist",
    "node_modules",
    "site-packages",
    "venv",
)

_VERSION = re.compile(r"\d+(\.\d+)*")


@dataclass(frozen=True, slots=True)
class Config:
    """All that a run is told. Patterns are gitignore patterns, relative to `root`."""

    root: Path
    select: tuple[str, ...] = ("ALL",)
    ignore: tuple[str, ...] = ()
    extend_select: tuple[str, ...] = ()
    exclude: tuple[str, ...] = DEFAULT_EXCLUDE
    extend_exclude: tuple[str, ...] = ()
    per_file_ignores: tuple[tuple[str, tuple[str, ...]], ...] = ()
    target_torch: str | None = None
    fail_on: Severity = Severity.WARNING
    show_notes: bool = False
    #: how many processes; None takes one a CPU
    jobs: int | None = None
    output_format: str = "text"
    #: the file with the findings to leave out; empty or None for none
    baseline: str | None = None
    # from here on: what only the command line can say
    force_exclude: bool = False
    fix: bool = False
    unsafe_fixes: bool = False
    diff: bool = False
    cache: bool = True
    #: where to write what is found, in place of reading a baseline
    write_baseline: str | None = None

    @property
    def anchor(self) -> str:
        """The folder that fingerprints name files from: a baseline's own, so that it holds wherever memlint runs."""
        file = self.write_baseline or self.baseline
        return os.path.dirname(os.path.abspath(file)) if file else str(self.root)

    @property
    def excludes(self) -> tuple[str, ...]:
        """All patterns of files that discovery leaves out."""
        return self.exclude + self.extend_exclude


def load(paths: Iterable[str], codes: Sequence[str], formats: Sequence[str], file: str | None = None) -> Config:
    """The configuration that holds for `paths`: `file` if given, else the nearest one upward from their common folder.

    `codes` and `formats` are what selectors and output-format may name. Raises ConfigError.
    """
    start = common_folder(paths)
    found = Path(file) if file is not None else nearest(start)
    if found is None:
        return Config(root=project_root(start))
    return parse(found, codes, formats)


def isolated(paths: Iterable[str]) -> Config:
    """The defaults, whatever files there are."""
    return Config(root=project_root(common_folder(paths)))


def overridden(config: Config, options: Mapping[str, Any]) -> Config:
    """`config` with what the command line says; None means that it says nothing."""
    said: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    said.update({name: tuple(value) for name, value in said.items() if isinstance(value, list)})
    return replace(config, **said)


def common_folder(paths: Iterable[str]) -> Path:
    """The deepest folder that holds all of `paths`."""
    folders = []
    for path in paths:
        full = os.path.abspath(path)
        folders.append(full if os.path.isdir(full) else os.path.dirname(full))
    if not folders:
        return Path.cwd()
    try:
        return Path(os.path.commonpath(folders))
    except ValueError:  # paths on several drives
        return Path.cwd()


def project_root(start: Path) -> Path:
    """The nearest folder upward that looks like the top of a project, else the current folder."""
    for folder in (start, *start.parents):
        if (folder / "pyproject.toml").is_file() or (folder / ".git").exists():
            return folder
    return Path.cwd()


def nearest(start: Path) -> Path | None:
    """The nearest file upward from `start` that configures memlint."""
    for folder in (start, *start.parents):
        own = folder / "memlint.toml"
        if own.is_file():
            return own
        pyproject = folder / "pyproject.toml"
        if pyproject.is_file() and _mentions_memlint(pyproject):
            return pyproject
    return None


def _mentions_memlint(pyproject: Path) -> bool:
    try:
        data = pyproject.read_bytes()
    except OSError as error:
        raise ConfigError(f"{pyproject}: {error.strerror}") from error
    # words before the parse: most runs meet a pyproject.toml that is not for us
    return b"memlint" in data and "memlint" in _toml(pyproject).get("tool", {})


def parse(path: Path, codes: Sequence[str], formats: Sequence[str]) -> Config:
    """The configuration in `path`. Raises ConfigError with all that is wrong with it."""
    table = _toml(path)
    where = ""
    if path.name == "pyproject.toml":
        table = table.get("tool", {}).get("memlint", {})
        where = " [tool.memlint]"
    readers = _readers(codes, formats)
    values: dict[str, Any] = {"root": path.absolute().parent}
    wrong: list[str] = []
    if not isinstance(table, dict):
        raise ConfigError(f"{path}{where}: not a table")
    for key, value in table.items():
        reader = readers.get(key)
        if reader is None:
            wrong.append(_unknown_key(key, readers))
            continue
        try:
            values[key.replace("-", "_")] = reader(value)
        except ConfigError as error:
            wrong += [f"{key}: {line}" for line in str(error).splitlines()]
    if wrong:
        raise ConfigError("\n".join(f"{path}{where}: {line}" for line in wrong))
    if "baseline" in values:
        values["baseline"] = str(values["root"] / values["baseline"])
    return Config(**values)


def _unknown_key(key: str, known: Iterable[str]) -> str:
    import difflib

    near = difflib.get_close_matches(key, known, n=1)
    return f"unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _toml(path: Path) -> dict[str, Any]:
    try:
        return toml.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError
        raise ConfigError(f"{path}: {error}") from error


def _readers(codes: Sequence[str], formats: Sequence[str]) -> dict[str, Callable[[Any], Any]]:
    """How each key's value is checked and converted."""

    def selectors(value: Any) -> tuple[str, ...]:
        return check_selectors(_strings(value), codes)

    def per_file(value: Any) -> tuple[tuple[str, tuple[str, ...]], ...]:
        if not isinstance(value, dict):
            raise ConfigError("must be a table of patterns, each with a list of codes")
        read, wrong = [], []
        for pattern, listed in value.items():
            try:
                read.append((pattern, selectors(listed)))
            except ConfigError as error:
                wrong += [f"{pattern}: {line}" for line in str(error).splitlines()]
        if wrong:
            raise ConfigError("\n".join(wrong))
        return tuple(read)

    def output_format(value: Any) -> str:
        if value not in formats:
            raise ConfigError(f"must be one of {', '.join(formats)}")
        return str(value)

    return {
        "select": selectors,
        "ignore": selectors,
        "extend-select": selectors,
        "exclude": _strings,
        "extend-exclude": _strings,
        "per-file-ignores": per_file,
        "target-torch": check_version,
        "fail-on": check_severity,
        "show-notes": _boolean,
        "jobs": check_jobs,
        "output-format": output_format,
        "baseline": _file,
    }


def _strings(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError("must be a list of strings")
    return tuple(value)


def _file(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError("must be the path of a file")
    return value


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError("must be true or false")
    return value


def check_selectors(selectors: tuple[str, ...], codes: Sequence[str]) -> tuple[str, ...]:
    """`selectors`, if each means a code; one that means none is a ConfigError."""
    from memlint.lint.selection import unknown

    if complaints := unknown(selectors, codes):
        raise ConfigError("\n".join(complaints))
    return selectors


def check_version(value: Any) -> str:
    """A torch version such as "1.13"."""
    if not isinstance(value, str) or not _VERSION.fullmatch(value):
        raise ConfigError(f'must be a version such as "2.0", not {value!r}')
    return value


def check_severity(value: Any) -> Severity:
    """A severity by its label."""
    for severity in Severity:
        if value == severity.label:
            return severity
    raise ConfigError(f"must be one of {', '.join(s.label for s in Severity)}")


def check_jobs(value: Any) -> int:
    """A number of processes."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError("must be a whole number, 1 or more")
    return value


#: fields that decide what is found in a file, as opposed to which files are read and how the result is shown
_DECISIVE = ("select", "ignore", "extend_select", "per_file_ignores", "target_torch")


def fingerprint(config: Config) -> str:
    """What the cache must know of a configuration."""
    return repr([(field.name, getattr(config, field.name)) for field in fields(config) if field.name in _DECISIVE])
