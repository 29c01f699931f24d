"""Which file an imported name comes from, and the part of that file that says what it does.

Names are resolved as Python would: relative imports from the package, absolute ones from the folder of a script, the
folder above the outermost package, the project's top and its `src`. Re-exports are followed, `from x import *` too.
Of the file that is found only the definition that was asked for, and the definitions that it uses, are parsed with
libcst; Python's own parser, which is some thirty times faster, tells which these are.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memlint.lint.source import SourceError, SourceFile
from memlint.lint.textedit import split_lines

if TYPE_CHECKING:
    import libcst as cst

#: what marks the top of a project
MARKS = ("pyproject.toml", "setup.py", "setup.cfg", ".git", "requirements.txt")
#: folders of a project whose content is imported as if it stood at the top
_SOURCES = ("", "src", "lib", "python")
#: re-exports are followed this far
_MOST_HOPS = 8
#: a definition and what it uses are left alone when they are longer than this, in bytes
_MOST_BYTES = 80_000
#: outlines and parsed parts that are kept
_KEPT_OUTLINES = 300
#: a file that imports all names of more modules than this is a shelf, and its names are left alone
MOST_STARS = 8
_KEPT_PARTS = 200
#: what a definition must speak of for its body to matter to a caller: graphs that are made or freed
_MATTERS = re.compile(r"backward|loss|criterion|objective")
#: beside that, a class (no module: layers are many) that sums or collects
_KEEPS = re.compile(r"\+=|\.append\(|\.extend\(|\.update\(|zero_grad|\.clear\(|= \[\]")
#: modules that are never the project's own
_FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "numpy"}


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a file that one definition needs. Lines are those of the file; all others are empty."""

    path: str
    names: frozenset[str]
    module: cst.Module


@dataclass(slots=True)
class _Unit:
    """A statement at the top of a file."""

    node: ast.stmt
    first: int
    last: int
    defines: frozenset[str]
    is_import: bool

    def uses(self) -> set[str]:
        """The names that it reads."""
        return {node.id for node in ast.walk(self.node) if isinstance(node, ast.Name)}


@dataclass(slots=True)
class _Outline:
    """What a file defines and imports at its top."""

    lines: list[str]
    units: list[_Unit] = field(default_factory=list)
    defines: dict[str, _Unit] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)

    def text(self, unit: _Unit) -> str:
        """The source of a statement."""
        return "".join(self.lines[unit.first - 1 : unit.last])

    def matters(self, name: str) -> bool:
        """Whether what a definition does could matter to those who use it, by its words."""
        unit = self.defines.get(name)
        if unit is None:
            return False
        text = self.text(unit)
        if _MATTERS.search(text):
            return True
        node = unit.node
        if not isinstance(node, ast.ClassDef):
            return False
        # a class that only renames its base matters as its base does
        return not _is_layer(node) and (len(node.body) < 4 or _KEEPS.search(text) is not None)


class Modules:
    """Resolves names across the files of a project.

    `reads` collects the paths whose content (or absence) decided about the answers since it was last emptied.
    """

    def __init__(self) -> None:
        self.reads: set[str] = set()
        self._outlines: OrderedDict[str, _Outline | None] = OrderedDict()
        self._parts: OrderedDict[tuple[str, str], Part | None] = OrderedDict()
        self._found: dict[tuple[str, str], tuple[str, tuple[str, ...]] | None] = {}
        self._read_for: dict[tuple[str, str], frozenset[str]] = {}
        self._roots: dict[str, tuple[str, ...]] = {}
        self._kinds: dict[str, int] = {}
        self._digests: dict[str, str] = {}

    def digest(self, path: str) -> str:
        """What identifies the content of a file as it was first read; empty where there is none."""
        if path not in self._digests:
            self._data(path)
        return self._digests[path]

    def find(self, path: str, name: str) -> tuple[str, tuple[str, ...]] | None:
        """The file that defines `name`, as it is written in the file at `path`, and the rest of the dotted name there.

        `("…/engine.py", ("Trainer", "step"))` for `.engine.Trainer.step`. None for what the project does not define.
        """
        key = (path if name.startswith(".") else os.path.dirname(path), name)
        if key not in self._found:
            before, self.reads = self.reads, set()
            self._found[key] = None
            self._found[key] = self._find(path, name, _MOST_HOPS)
            self._read_for[key] = frozenset(self.reads)
            self.reads |= before
        else:
            self.reads |= self._read_for.get(key, frozenset())
        return self._found[key]

    def part(self, path: str, name: str) -> Part | None:
        """The definition of `name` in the file at `path` and what it uses.

        None where it is too long or unreadable, or does nothing that could matter.
        """
        key = (path, name)
        self.reads.add(path)
        if key in self._parts:
            self._parts.move_to_end(key)
            return self._parts[key]
        outline = self._outline(path)
        made = _part(path, name, outline) if outline is not None and outline.matters(name) else None
        self._parts[key] = made
        if len(self._parts) > _KEPT_PARTS:
            self._parts.popitem(last=False)
        return made

    # -- resolution ------------------------------------------------------------------------------------------------

    def _find(self, path: str, name: str, hops: int) -> tuple[str, tuple[str, ...]] | None:
        dots = len(name) - len(name.lstrip("."))
        parts = tuple(name[dots:].split("."))
        if not parts[0] or hops == 0:
            return None
        if dots:
            base = os.path.dirname(path)
            for _ in range(dots - 1):
                base = os.path.dirname(base)
            return self._walk(base, parts, hops, top=False)
        if parts[0] in _FOREIGN:
            return None
        for root in self._roots_of(os.path.dirname(path)):
            if self._kind(os.path.join(root, parts[0])) or self._kind(os.path.join(root, parts[0]) + ".py"):
                found = self._walk(root, parts, hops, top=True)
                if found is not None:
                    return found
        return None

    def _walk(self, folder: str, parts: tuple[str, ...], hops: int, *, top: bool) -> tuple[str, tuple[str, ...]] | None:
        """Follow a dotted name through folders to a module, and through that module's names."""
        current = folder
        for place, part in enumerate(parts):
            below = os.path.join(current, part)
            package = os.path.join(current, "__init__.py")
            if (place or not top) and self._kind(package) == 1:
                # a name of the package comes before a submodule, as it does after the package's own imports
                outline = self._outline(package)
                if outline is not None and part in outline.defines:
                    return self._within(package, parts[place:], hops)
            if self._kind(below) == 2:
                current = below
            elif self._kind(below + ".py") == 1:
                return self._within(below + ".py", parts[place + 1 :], hops)
            elif (place or not top) and self._kind(package) == 1:
                return self._within(package, parts[place:], hops)
            else:
                return None
        return None

    def _within(self, path: str, parts: tuple[str, ...], hops: int) -> tuple[str, tuple[str, ...]] | None:
        """A name of a module: defined there, or imported from elsewhere."""
        self.reads.add(path)
        outline = self._outline(path) if parts else None
        if outline is None:
            return None
        if parts[0] in outline.imports:
            return self._find(path, ".".join((outline.imports[parts[0]], *parts[1:])), hops - 1)
        if parts[0] in outline.defines:
            return path, parts
        for star in outline.stars if len(outline.stars) <= MOST_STARS else ():
            joint = "." if star.strip(".") else ""
            found = self._find(path, star + joint + ".".join(parts), hops - 1)
            if found is not None:
                return found
        return None

    def _roots_of(self, folder: str) -> tuple[str, ...]:
        """Where absolute imports of a file in `folder` may start, the likeliest first."""
        roots = self._roots.get(folder)
        if roots is None:
            package = folder
            while self._kind(os.path.join(package, "__init__.py")) == 1 and os.path.dirname(package) != package:
                package = os.path.dirname(package)
            top = project_top(folder)
            found = [package, folder]
            above = package
            while above.startswith(top) and os.path.dirname(above) != above:
                found.append(above)
                above = os.path.dirname(above)
            found += [os.path.join(top, source) if source else top for source in _SOURCES]
            roots = self._roots[folder] = tuple(dict.fromkeys(root for root in found if self._kind(root) == 2))
        return roots

    def _kind(self, path: str) -> int:
        """0 for nothing, 1 for a file, 2 for a folder."""
        if path.endswith(".py"):
            self.reads.add(path)
        kind = self._kinds.get(path)
        if kind is None:
            kind = self._kinds[path] = 2 if os.path.isdir(path) else 1 if os.path.isfile(path) else 0
        return kind

    def _data(self, path: str) -> bytes | None:
        try:
            with open(path, "rb") as file:
                data = file.read()
        except OSError:
            self._digests.setdefault(path, "")
            return None
        self._digests.setdefault(path, hashlib.blake2b(data, digest_size=16).hexdigest())
        return data

    def _outline(self, path: str) -> _Outline | None:
        if path in self._outlines:
            self._outlines.move_to_end(path)
            return self._outlines[path]
        data = self._data(path)
        made = None if data is None else _outlined(path, data)
        self._outlines[path] = made
        if len(self._outlines) > _KEPT_OUTLINES:
            self._outlines.popitem(last=False)
        return made


def _is_layer(node: ast.ClassDef) -> bool:
    """Whether a class says of itself that it is an nn.Module."""
    return any("Module" in ast.unparse(base) for base in node.bases)


def project_top(folder: str) -> str:
    """The nearest folder upward that marks a project; otherwise the one above the outermost package."""
    current = folder
    while True:
        if any(os.path.exists(os.path.join(current, mark)) for mark in MARKS):
            return current
        above = os.path.dirname(current)
        if above == current:
            break
        current = above
    while os.path.exists(os.path.join(folder, "__init__.py")):
        folder = os.path.dirname(folder)
    return folder


def _outlined(path: str, data: bytes) -> _Outline | None:
    """The outline of a file; None where it cannot be parsed (a run over the file itself says so)."""
    try:
        source = SourceFile(path, data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source.text)
    except (SourceError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    outline = _Outline(split_lines(source.text))
    for node in tree.body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        small = list(_statements(node))
        defines = frozenset(name for each in small for name in _defined(each))
        imports = [each for each in small if isinstance(each, (ast.Import, ast.ImportFrom))]
        unit = _Unit(node, first, node.end_lineno or node.lineno, defines, bool(imports))
        outline.units.append(unit)
        for name in defines:
            outline.defines.setdefault(name, unit)
        for each in imports:
            for local, full in _imported(each):
                if local == "*":
                    outline.stars.append(full)
                else:
                    outline.imports.setdefault(local, full)
    return outline


def _statements(node: ast.stmt) -> Iterator[ast.stmt]:
    """The statement itself, or those in the branches of an `if` or `try` at the top."""
    if isinstance(node, (ast.If, ast.Try, ast.With)):
        for name in ("body", "orelse", "finalbody"):
            for inner in getattr(node, name, ()):
                yield from _statements(inner)
        for handler in getattr(node, "handlers", ()):
            for inner in handler.body:
                yield from _statements(inner)
    else:
        yield node


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """The (local name, full name) pairs of an import; `*` stands for all names of a module."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.split(".")[0]
            yield (alias.asname, alias.name) if alias.asname else (top, top)
        return
    module = "." * node.level + (node.module or "")
    for alias in node.names:
        joint = "" if module.endswith(".") else "."
        yield ("*", module) if alias.name == "*" else (alias.asname or alias.name, f"{module}{joint}{alias.name}")


def _part(path: str, name: str, outline: _Outline) -> Part | None:
    """Cut out the definition of `name`, the definitions it uses, and the imports."""
    from memlint.lint import depth
    from memlint.lint.parsing import parse

    wanted: dict[int, _Unit] = {}
    size = 0
    waiting = [name]
    seen = {name}
    while waiting:
        unit = outline.defines.get(waiting.pop(0))
        if unit is None or id(unit) in wanted:
            continue
        length = len(outline.text(unit))
        if size + length > _MOST_BYTES:
            if not wanted:
                return None
            continue
        size += length
        wanted[id(unit)] = unit
        used = sorted(unit.uses() - seen)
        seen.update(used)
        waiting += used
    kept: set[int] = set()
    for unit in outline.units:
        if id(unit) in wanted or (unit.is_import and unit.last - unit.first < 60):
            kept.update(range(unit.first, unit.last + 1))
    text = "".join(line if number in kept else "\n" for number, line in enumerate(outline.lines, 1))
    import libcst as cst

    try:
        if depth.complaint(text.encode("utf-8", "replace")) is not None:
            return None
        names = frozenset[str]().union(*(unit.defines for unit in wanted.values()))
        return Part(path, names, parse(text))
    except (cst.ParserSyntaxError, RecursionError):
        return None
