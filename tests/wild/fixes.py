"""What `memlint check --fix` does to a real package: on a copy, and looked at from all sides."""

from __future__ import annotations

import ast
import difflib
import json
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

#: a report of memlint on files and folders, with further options
Check = Callable[[list[Path], list[str]], Mapping[str, Any]]
#: lines around a finding that a fix of it may touch, beside the finding's own
_AROUND = 3


def problems(root: Path, report: Mapping[str, Any], check: Check) -> Iterator[str]:
    """What is wrong with the fixes in the package at `root`, a line each; nothing where all is well.

    report: memlint's on the package. The files that it calls fixable are fixed in a copy: every changed file still
    compiles, the findings that were fixed are gone and no new ones came, no line changed but those of a fixed finding,
    and a second run changes nothing. Unsafe fixes are tried, too.
    """
    before = by_file(report, root)
    fixable = [path for path, found in sorted(before.items()) if any(finding["fixable"] for finding in found)]
    if not fixable:
        return
    with tempfile.TemporaryDirectory() as folder:
        for name, options in (("--fix", ["--fix"]), ("--unsafe-fixes", ["--fix", "--unsafe-fixes"])):
            copy = Path(folder) / name.strip("-") / root.name
            shutil.copytree(root, copy)
            check([copy / path for path in fixable], options)
            changed = [path for path in fixable if _bytes(copy / path) != _bytes(root / path)]
            others = _others(root, copy, set(fixable))
            yield from (f"{name}: {path} changed and had nothing to fix" for path in others)
            for path in changed:
                yield from (f"{name}: {path}: {what}" for what in _of_file(root / path, copy / path, before[path]))
            if not changed:
                continue
            files = [copy / path for path in changed]
            after = by_file(check(files, options[1:]), copy)
            for path in changed:
                # a report calls a finding fixable if it has any fix; without --unsafe-fixes some stay
                left = [f for f in after.get(path, []) if f["fixable"] and "--unsafe-fixes" in options]
                yield from (f"{name}: {path}:{f['line']}: {f['code']} is still there" for f in left)
                came = Counter(f["code"] for f in after.get(path, [])) - Counter(f["code"] for f in before[path])
                yield from (f"{name}: {path}: {count} new {code}" for code, count in came.items())
            once = {path: _bytes(copy / path) for path in changed}
            check(files, options)
            yield from (f"{name}: {path}: fixed again" for path in changed if _bytes(copy / path) != once[path])


def by_file(report: Mapping[str, Any], root: Path) -> dict[str, list[Mapping[str, Any]]]:
    """The findings of a report by the path inside the package."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for finding in report["findings"]:
        path = Path(finding["path"])
        full = path if path.is_absolute() else Path.cwd() / path
        found.setdefault(full.resolve().relative_to(root.resolve()).as_posix(), []).append(finding)
    return found


def _of_file(old: Path, new: Path, findings: list[Mapping[str, Any]]) -> Iterator[str]:
    if old.suffix == ".ipynb":
        yield from _of_notebook(old, new, findings)
        return
    before, after = _text(old), _text(new)
    if _compiles(before) and not _compiles(after):
        yield "no longer compiles"
    yield from _elsewhere(before, after, [f for f in findings if f["fixable"]])


def _of_notebook(old: Path, new: Path, findings: list[Mapping[str, Any]]) -> Iterator[str]:
    """Only the source of cells with a fixed finding may differ."""
    before, after = json.loads(_text(old)), json.loads(_text(new))
    if len(before["cells"]) != len(after["cells"]):
        yield "has another number of cells"
        return
    code = 0
    for one, other in zip(before["cells"], after["cells"], strict=True):
        code += one["cell_type"] == "code"
        mine = [f for f in findings if f["fixable"] and f["cell"] == code and one["cell_type"] == "code"]
        if one == other:
            continue
        if not mine:
            yield "changed in a cell without a finding"
        elif {key: value for key, value in one.items() if key != "source"} != {
            key: value for key, value in other.items() if key != "source"
        }:
            yield f"changed in more than the source of cell {code}"
        else:
            yield from _elsewhere("".join(one["source"]), "".join(other["source"]), mine)
    before["cells"] = after["cells"] = []
    if before != after:
        yield "changed outside of its cells"


def _elsewhere(before: str, after: str, fixed: list[Mapping[str, Any]]) -> Iterator[str]:
    """Lines that changed and are not those of a fixed finding."""
    allowed: set[int] = set()
    for finding in fixed:
        allowed.update(range(finding["line"] - _AROUND, finding["end_line"] + _AROUND + 1))
    matcher = difflib.SequenceMatcher(None, before.split("\n"), after.split("\n"), autojunk=False)
    lines = after.split("\n")
    for kind, start, end, first, last in matcher.get_opcodes():
        if kind == "insert" and all(line.strip() == "@torch.no_grad()" for line in lines[first:last]):
            continue  # above the function that the finding is in
        if kind != "equal" and not allowed & set(range(start + 1, max(end, start + 1) + 1)):
            yield f"line {start + 1} changed and has no fixed finding"


def _others(root: Path, copy: Path, known: set[str]) -> Iterator[str]:
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.suffix in (".py", ".ipynb") and path.is_file() and name not in known:
            if _bytes(copy / name) != path.read_bytes():
                yield name


def _compiles(text: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(text)
        except (SyntaxError, ValueError):
            return False
    return True


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "replace").replace("\r\n", "\n")


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""
