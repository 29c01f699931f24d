"""The other files of a project, read only where a verdict depends on them.

What an imported function or class does is read in the file that defines it (see `modules`). A function that evaluates
without `no_grad` is right if every caller gives it. The callers may be in other files; they are looked for by name, in
the bytes first, and only files that call such a name are parsed.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import OrderedDict
from typing import TYPE_CHECKING

from memlint.lint.flow.values import Grad
from memlint.lint.modules import Modules, Part, project_top

if TYPE_CHECKING:
    from memlint.lint.flow import Flow
    from memlint.lint.flow.facts import FunctionFlow

#: folders that hold no code of the project
_SKIPPED = frozenset(
    ".git .hg .svn .tox .nox .venv venv node_modules build dist __pycache__ .eggs site-packages .mypy_cache".split()
)
#: more files than this that call a name: it says nothing about the function that is meant
_MOST_CALLERS = 25
_MOST_FILES = 6000
_MOST_BYTES = 96 * 1024 * 1024
_KEPT_FLOWS = 64
#: how many callers of callers are followed
_DEPTH = 2


#: what an answer rests on: paths with the digest of their content (empty where there is no such file), and trees
Dependencies = dict[str, dict[str, str]]


class Project:
    """The files around those that are checked.

    `begin` forgets what the answers for the file before rested on; `dependencies` tells what those since rest on.
    """

    def __init__(self) -> None:
        self._modules = Modules()
        self._asked: set[str] = set()
        self._trees: dict[str, _Tree] = {}
        self._stamps: dict[str, str] = {}
        #: what was asked before; None also while an answer is being found
        self._known: dict[tuple[str, str, str], frozenset[Grad] | None] = {}

    def begin(self) -> None:
        """Another file is judged from here on."""
        self._modules.reads.clear()
        self._asked.clear()

    def dependencies(self) -> Dependencies:
        """What the answers since `begin` rest on."""
        return {
            "files": {path: self._modules.digest(path) for path in sorted(self._modules.reads)},
            "trees": {root: self._stamp(root) for root in sorted(self._asked)},
        }

    def hold(self, known: Dependencies) -> bool:
        """Whether what earlier answers rested on is still the same."""
        return all(self._modules.digest(path) == digest for path, digest in known["files"].items()) and all(
            self._stamp(root) == stamp for root, stamp in known["trees"].items()
        )

    def definition(self, path: str, name: str) -> tuple[Part, tuple[str, ...]] | None:
        """Where the project defines `name`, as the file at `path` calls it, and the dotted rest of it there.

        None where the project does not define it, or it cannot be read.
        """
        found = self._modules.find(os.path.abspath(path), name)
        if found is None or found[0] == os.path.abspath(path):
            return None
        part = self._modules.part(found[0], found[1][0])
        return None if part is None else (part, found[1])

    def modes(self, path: str, name: str, owner: str = "", depth: int = _DEPTH) -> frozenset[Grad] | None:
        """The grad modes in which other files call a function `name` of the file at `path`.

        `owner` is its class, for a method. Files that mention the class (or the module, for a function) are asked;
        where none does, all that call the name. Empty where nobody does, None where too many do. Tests do not count:
        what they call, they call without a GPU.
        """
        full = os.path.abspath(path)
        self._tree(full)
        key = (full, name, owner)
        if key not in self._known:
            self._known[key] = None
            self._known[key] = self._modes(full, name, owner, depth)
        return self._known[key]

    def _modes(self, full: str, name: str, owner: str, depth: int) -> frozenset[Grad] | None:
        tree = self._tree(full)
        callers = tree.callers(full, name)
        mention = owner or os.path.splitext(os.path.basename(full))[0]
        callers = [other for other in callers if tree.mentions(other, mention)] or callers
        if len(callers) > _MOST_CALLERS:
            return None
        modes: set[Grad] = set()
        for caller in callers:
            flow = tree.flow(caller)
            if flow is None:
                continue
            for event in list(flow.calls()):
                if event.text.rsplit(".", 1)[-1] != name:
                    continue
                mode = event.grad if event.grad is not Grad.ON else self._mode_of(flow, event.function, caller, depth)
                modes.add(mode)
        return frozenset(modes)

    def _mode_of(self, flow: Flow, function: FunctionFlow, path: str, depth: int) -> Grad:
        """The grad mode of a calling function, by its own callers."""
        mode = flow.grad_of(function)
        if mode is not Grad.ON or function.info is None or depth == 0:
            return mode
        owner = function.cls.name if function.cls is not None else ""
        outer = self.modes(path, function.name, owner, depth - 1)
        if outer is None:
            return Grad.MAYBE
        return Grad.ON if not outer or Grad.ON in outer else Grad.OFF

    def _stamp(self, root: str) -> str:
        """What identifies the Python files of a tree: their paths, sizes and times."""
        if root not in self._stamps:
            state = hashlib.blake2b(digest_size=16)
            for path in _python_files(root):
                try:
                    about = os.stat(path)
                except OSError:
                    continue
                state.update(f"{path}\0{about.st_size}\0{about.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
            self._stamps[root] = state.hexdigest()
        return self._stamps[root]

    def _tree(self, path: str) -> _Tree:
        root = project_top(os.path.dirname(path))
        tree = self._trees.get(root)
        if tree is None:
            tree = self._trees[root] = _Tree(root)
        self._asked.add(root)
        return tree


class _Tree:
    """All Python files below a folder."""

    def __init__(self, root: str) -> None:
        self._contents: dict[str, bytes] = {}
        self._flows: OrderedDict[str, Flow | None] = OrderedDict()
        total = 0
        for path in _python_files(root):
            try:
                with open(path, "rb") as file:
                    data = file.read()
            except OSError:
                continue
            total += len(data)
            if total > _MOST_BYTES:
                break
            self._contents[path] = data

    def callers(self, path: str, name: str) -> list[str]:
        """The files other than `path` (and other than tests) that call something of this name."""
        needle = name.encode()
        called = re.compile(rb"(?<!def )(?<![\w])" + re.escape(needle) + rb"\s*\(")
        return [
            other
            for other, data in self._contents.items()
            if needle in data and other != path and not _is_test(other) and called.search(data)
        ]

    def mentions(self, path: str, word: str) -> bool:
        """Whether a word stands in a file."""
        return re.search(rb"\b" + re.escape(word.encode()) + rb"\b", self._contents[path]) is not None

    def flow(self, path: str) -> Flow | None:
        """The flow model of a file; None where it cannot be made."""
        if path in self._flows:
            self._flows.move_to_end(path)
            return self._flows[path]
        made = _flow(path, self._contents[path])
        self._flows[path] = made
        if len(self._flows) > _KEPT_FLOWS:
            self._flows.popitem(last=False)
        return made


def _flow(path: str, data: bytes) -> Flow | None:
    from memlint.lint import depth
    from memlint.lint.flow import Flow
    from memlint.lint.source import SourceError, SourceFile

    try:
        source = SourceFile(path, data)
        if depth.complaint(source.text.encode("utf-8", "replace")) is not None:
            return None
        return Flow(source.module, path, None, source.text)
    except (SourceError, RecursionError):
        return None  # a file of its own run says what is wrong with it


def _python_files(root: str) -> list[str]:
    found: list[str] = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.startswith("."))
        found += [os.path.join(folder, name) for name in sorted(files) if name.endswith(".py")]
        if len(found) > _MOST_FILES:
            break
    return found[:_MOST_FILES]


def _is_test(path: str) -> bool:
    parts = path.replace("\\", "/").split("/")
    return parts[-1].startswith("test_") or "tests" in parts[:-1]
