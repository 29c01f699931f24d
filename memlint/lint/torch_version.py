"""The oldest torch that a project supports, from its own metadata.

Sources are asked in the order of how much they say about what is supported rather than about what happens to be
installed: the package's declared dependencies, requirement files, conda environments, lock files. The first kind that
names a lower bound (or a pin) answers, with the lowest that it names. `torch` without a bound says nothing.
"""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from memlint import toml

#: files that mark the top of a project
_MARKERS = ("pyproject.toml", "setup.py", "setup.cfg", ".git")
_LOWER = frozenset({">=", ">", "==", "===", "~="})
#: poetry's own operators: `^2.0`, `~2.0`, and a bare `2.0`, which means exactly that
_POETRY = re.compile(r"(?:\^|~(?!=))?\s*(\d[\w.]*)")
_CONDA = re.compile(
    r"""^\s*-\s*["']?(?:[\w-]+::)?(?:pytorch(?:-cpu|-gpu)?|torch)(?![\w-])\s*([^"'#\n]*)""", re.MULTILINE
)
_COMMENT = re.compile(r"(^|\s)#.*$")


def oldest_torch(path: str) -> Version | None:
    """The oldest torch that the project around the file `path` supports; None where nothing tells."""
    return _of_folder(os.path.dirname(os.path.abspath(path)), _lower, min)


def capped_torch(path: str) -> Version | None:
    """The version that the project around `path` has to stay below; None where nothing tells."""
    return _of_folder(os.path.dirname(os.path.abspath(path)), _upper, max)


@functools.cache
def _of_folder(
    folder: str, bound: Callable[[str], Iterator[Version]], pick: Callable[[list[Version]], Version]
) -> Version | None:
    """The answer for the nearest folder upward that names a bound, up to the top of the project."""
    found = _of_project(Path(folder), bound, pick)
    if found is not None or os.path.exists(os.path.join(folder, ".git")):
        return found
    parent = os.path.dirname(folder)
    top = any(os.path.exists(os.path.join(folder, marker)) for marker in _MARKERS)
    return None if top or parent == folder else _of_folder(parent, bound, pick)


def _of_project(
    folder: Path, bound: Callable[[str], Iterator[Version]], pick: Callable[[list[Version]], Version]
) -> Version | None:
    kinds: tuple[Callable[[Path], Iterable[str]], ...] = (_declared, _requirements, _conda, _locked)
    for kind in kinds:
        if bounds := [version for text in kind(folder) for version in bound(text)]:
            return pick(bounds)
    return None


# The specifiers of torch that a folder's files name, such as ">=2.1,<3".


def _declared(folder: Path) -> Iterator[str]:
    """Those in pyproject.toml, setup.cfg and setup.py."""
    table = _toml(folder / "pyproject.toml")
    project = _table(table, "project")
    groups = [project.get("dependencies"), *_table(project, "optional-dependencies").values()]
    groups += _table(table, "dependency-groups").values()
    for group in groups:
        if isinstance(group, list):
            yield from _of_requirements(item for item in group if isinstance(item, str))
    yield from _poetry(_table(table, "tool", "poetry"))
    yield from _of_requirements(_setup_cfg(folder / "setup.cfg"))
    yield from _of_requirements(_setup_py(folder / "setup.py"))


def _poetry(poetry: dict[str, Any]) -> Iterator[str]:
    tables = [_table(poetry, "dependencies")]
    tables += [_table(group, "dependencies") for group in _table(poetry, "group").values() if isinstance(group, dict)]
    for table in tables:
        given = table.get("torch")
        for entry in given if isinstance(given, list) else [given]:
            text = entry.get("version") if isinstance(entry, dict) else entry
            if isinstance(text, str):
                exact = _POETRY.fullmatch(text.split(",")[0].strip())
                yield f">={exact.group(1)}" if exact else text


def _setup_cfg(path: Path) -> Iterator[str]:
    text = _read(path)
    if not text:
        return
    import configparser

    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(text)
    except configparser.Error:
        return
    options = [("options", "install_requires")]
    if parser.has_section("options.extras_require"):
        options += [("options.extras_require", key) for key in parser["options.extras_require"]]
    for section, option in options:
        yield from parser.get(section, option, fallback="").splitlines()


def _setup_py(path: Path) -> Iterator[str]:
    """Strings that read like requirements on torch, wherever they stand: setup.py files build their lists freely."""
    try:
        tree = ast.parse(_read(path))
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.lstrip().startswith("torch"):
            yield node.value


def _requirements(folder: Path) -> Iterator[str]:
    """Those in requirements*.txt, and in requirements/*.txt."""
    for pattern in ("requirements*.txt", "requirements/*.txt"):
        for path in sorted(folder.glob(pattern)):
            yield from _of_requirements(_read(path).splitlines())


def _conda(folder: Path) -> Iterator[str]:
    """Those in environment.yml: conda's `pytorch=2.1`, or pip's under it. No YAML parser is needed for lines."""
    for name in ("environment.yml", "environment.yaml"):
        for match in _CONDA.finditer(_read(folder / name)):
            spec = match.group(1).strip()
            pinned = re.match(r"=?\s*(\d[\w.]*)", spec)
            if pinned:
                yield f"=={pinned.group(1).rstrip('.')}"
            else:
                yield spec


def _locked(folder: Path) -> Iterator[str]:
    """Pins in the lock files of uv, poetry and pdm, which all list [[package]] with name and version."""
    for name in ("uv.lock", "poetry.lock", "pdm.lock"):
        path = folder / name
        # lock files are long; the TOML parser is slow
        if 'name = "torch"' not in _read(path):
            continue
        packages = _toml(path).get("package")
        for package in packages if isinstance(packages, list) else []:
            if isinstance(package, dict) and package.get("name") == "torch" and isinstance(package.get("version"), str):
                yield f"=={package['version']}"


def _of_requirements(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        text = _COMMENT.sub("", line).strip()
        if not text.lower().startswith("torch"):
            continue
        try:
            requirement = Requirement(text.split(" --")[0])
        except InvalidRequirement:
            continue
        if canonicalize_name(requirement.name) == "torch":
            yield str(requirement.specifier)


def _lower(text: str) -> Iterator[Version]:
    """The lower bound of a specifier: of several the highest holds."""
    try:
        specifiers = SpecifierSet(text)
    except InvalidSpecifier:
        return
    bounds = [v for s in specifiers if s.operator in _LOWER for v in _version(s.version.removesuffix(".*"))]
    if bounds:
        yield max(bounds)


def _upper(text: str) -> Iterator[Version]:
    """What a specifier stays below: of several bounds the lowest holds. `==0.4.0` stays below 0.4.0.1."""
    try:
        specifiers = SpecifierSet(text)
    except InvalidSpecifier:
        return
    bounds: list[Version] = []
    for s in specifiers:
        version = s.version.removesuffix(".*")
        if s.operator == "<":
            bounds += _version(version)
        elif s.operator in ("<=", "=="):
            bounds += [Version(f"{found}.1") for found in _version(version)]
        elif s.operator == "~=":
            bounds += _compatible(version)
    if bounds:
        yield min(bounds)


def _compatible(text: str) -> Iterator[Version]:
    """What `~=` of a version stays below: 0.4 for 0.3.1."""
    for version in _version(text):
        *kept, last, _ = (*version.release, 0) if len(version.release) == 1 else version.release
        yield Version(".".join(map(str, (*kept, last + 1))))


def _version(text: str) -> Iterator[Version]:
    """A version without its local part, so that 2.0+cu118 is 2.0."""
    try:
        yield Version(Version(text).public)
    except InvalidVersion:
        return


def _table(table: Any, *keys: str) -> dict[str, Any]:
    """A table inside a table; empty where there is none."""
    for key in keys:
        table = table.get(key) if isinstance(table, dict) else None
    return table if isinstance(table, dict) else {}


def _read(path: Path) -> str:
    """The file's text; empty where it cannot be read, since metadata is only a hint."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _toml(path: Path) -> dict[str, Any]:
    try:
        return toml.parse(_read(path))
    except ValueError:
        return {}
