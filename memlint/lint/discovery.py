"""From the paths on the command line to the files to check.

As in ruff, a file that is named is checked whatever the patterns say (unless --force-exclude), and a folder that is
named is searched even if an ignore file lists it. Symbolic links to folders are not followed, so a loop of them cannot
trap the search; a file that several names lead to is checked once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from memlint.lint.model import Failure, FailureKind
from memlint.lint.patterns import Patterns, below, read_ignore_file

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

SUFFIXES = (".py", ".ipynb")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A file to check: how it is shown, how it is opened, how big it is (bytes)."""

    display: str
    path: str
    size: int


@dataclass(frozen=True, slots=True)
class Discovered:
    """The files to check, in the order of their display paths, and what could not be searched."""

    files: tuple[Candidate, ...]
    failures: tuple[Failure, ...]


def discover(
    paths: Sequence[str], *, root: Path, exclude: Sequence[str] = (), force_exclude: bool = False
) -> Discovered:
    """The Python files and notebooks that `paths` mean. `exclude` holds gitignore patterns relative to `root`."""
    search = _Search(Patterns(exclude, str(root)), force_exclude)
    for path in paths:
        search.add(path)
    files = sorted(search.files.values(), key=lambda file: file.display.split("/"))
    return Discovered(tuple(files), tuple(search.failures))


def is_excluded(path: str, root: Path, exclude: Sequence[str]) -> bool:
    """Whether the patterns mean `path` or a folder above it."""
    return Patterns(exclude, str(root)).match_with_parents(os.path.abspath(path))


def display_path(path: str) -> str:
    """`path` with slashes, relative to the current folder where it lies below it."""
    here, full = os.getcwd(), os.path.abspath(path)
    if full == here:
        return "."
    relative = below(full, here)
    return full.replace(os.sep, "/") if relative is None else relative


class _IgnoreFiles:
    """The .gitignore files from the top of the repository down to a folder, and .git/info/exclude."""

    def __init__(self, layers: tuple[tuple[str, GitIgnoreSpec], ...] = ()) -> None:
        #: (folder, patterns), outermost first
        self.layers = layers

    @classmethod
    def above(cls, folder: str) -> _IgnoreFiles:
        """What holds for `folder` itself, from the repository that it lies in."""
        top = _repository(folder)
        if top is None:
            return cls()
        chain = []
        current = folder
        while current != top:
            current = os.path.dirname(current)
            chain.append(current)
        exclude = _info_exclude(top)
        ignores = cls(((top, exclude),)) if exclude is not None else cls()
        for parent in reversed(chain):
            ignores = ignores.within(parent)
        return ignores

    def within(self, folder: str) -> _IgnoreFiles:
        """These, and the .gitignore of `folder`."""
        spec = read_ignore_file(os.path.join(folder, ".gitignore"))
        return self if spec is None else _IgnoreFiles((*self.layers, (folder, spec)))

    def match(self, path: str, is_folder: bool) -> bool:
        for folder, spec in reversed(self.layers):
            relative = path[len(folder.rstrip(os.sep)) + 1 :].replace(os.sep, "/")
            verdict = spec.check_file(relative + "/" if is_folder else relative).include
            if verdict is not None:
                return verdict
        return False


class _Search:
    """Collects files; one a real path."""

    def __init__(self, patterns: Patterns, force_exclude: bool) -> None:
        self.patterns = patterns
        self.force_exclude = force_exclude
        self.files: dict[str, Candidate] = {}
        self.failures: list[Failure] = []
        self.links: set[str] = set()

    def add(self, path: str) -> None:
        full = os.path.abspath(path)
        if self.force_exclude and self.patterns.match_with_parents(full):
            return
        if os.path.isdir(full):
            self.walk(full)
        elif os.path.lexists(full):
            self.keep(full, os.path.realpath(full), os.path.islink(full))
        else:
            self.fail(full, "no such file or folder")

    def walk(self, top: str) -> None:
        pending = [(top, os.path.realpath(top), _IgnoreFiles.above(top))]
        while pending:
            folder, real, ignores = pending.pop()
            try:
                with os.scandir(folder) as entries:
                    listed = sorted(entries, key=lambda entry: entry.name)
            except OSError as error:
                self.fail(folder, error.strerror or str(error))
                continue
            ignores = ignores.within(folder)
            for entry in listed:
                below = os.path.join(real, entry.name)
                if self.enter(entry, ignores):
                    pending.append((entry.path, below, ignores))
                elif self.wanted(entry, ignores):
                    link = entry.is_symlink()
                    self.keep(entry.path, os.path.realpath(below) if link else below, link)

    def enter(self, entry: os.DirEntry[str], ignores: _IgnoreFiles) -> bool:
        """Whether to search this folder."""
        return entry.is_dir(follow_symlinks=False) and not self.left_out(entry, True, ignores)

    def wanted(self, entry: os.DirEntry[str], ignores: _IgnoreFiles) -> bool:
        """Whether this is a file to check: no folder, no pipe, no lock of an editor (a dangling `.#train.py`)."""
        if not entry.name.endswith(SUFFIXES) or entry.name.startswith(".#"):
            return False
        try:
            regular = entry.is_file() or (entry.is_symlink() and not entry.is_dir())
        except OSError:
            regular = True  # a link that leads nowhere: reading it will say so
        return regular and not self.left_out(entry, False, ignores)

    def left_out(self, entry: os.DirEntry[str], is_folder: bool, ignores: _IgnoreFiles) -> bool:
        return self.patterns.match(entry.path, is_folder) or ignores.match(entry.path, is_folder)

    def keep(self, path: str, real: str, link: bool) -> None:
        known = self.files.get(real)
        if known is not None and (link or real not in self.links):
            return
        if link:
            self.links.add(real)
        else:
            self.links.discard(real)
        try:
            size = os.stat(path).st_size
        except OSError:
            size = 0  # reading it will say what is wrong
        self.files[real] = Candidate(display_path(path), path, size)

    def fail(self, path: str, detail: str) -> None:
        self.failures.append(Failure(display_path(path), FailureKind.UNREADABLE, detail))


def _repository(folder: str) -> str | None:
    """The top of the repository that `folder` lies in."""
    for parent in (Path(folder), *Path(folder).parents):
        if (parent / ".git").exists():
            return str(parent)
    return None


def _info_exclude(top: str) -> GitIgnoreSpec | None:
    """The repository's private exclude file; in a linked worktree it lies in the main one's folder."""
    git = Path(top, ".git")
    if git.is_file():
        try:
            git = Path(top, git.read_text(encoding="utf-8").removeprefix("gitdir:").strip())
            common = git / "commondir"
            if common.is_file():
                git = git / common.read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return None
    return read_ignore_file(str(git / "info" / "exclude"))
