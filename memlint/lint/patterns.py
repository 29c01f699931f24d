"""gitignore patterns, as ignore files, --exclude and per-file-ignores use them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from memlint.errors import ConfigError

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

_SPECIAL = frozenset("*?[]!/\\# ")


class Patterns:
    """Patterns relative to a folder. Plain names, which the default excludes are, need no pattern library."""

    def __init__(self, patterns: Iterable[str], root: str) -> None:
        """Raises ConfigError for a pattern that means nothing."""
        self.root = root
        listed = tuple(patterns)
        self._names = frozenset(pattern for pattern in listed if pattern and not _SPECIAL & set(pattern))
        rest = [pattern for pattern in listed if pattern not in self._names]
        self._spec = _compiled(rest) if rest else None

    def match(self, path: str, is_folder: bool = False) -> bool:
        """Whether a pattern means the absolute `path` itself (not: a folder above it)."""
        if os.path.basename(path) in self._names:
            return True
        if self._spec is None:
            return False
        relative = below(path, self.root)
        return relative is not None and self._spec.match_file(relative + "/" if is_folder else relative)

    def match_with_parents(self, path: str) -> bool:
        """Whether a pattern means the file at `path` or a folder above it, up to the root."""
        if self.match(path):
            return True
        folder = os.path.dirname(path)
        while below(folder, self.root):
            if self.match(folder, is_folder=True):
                return True
            folder = os.path.dirname(folder)
        return False


def below(path: str, root: str) -> str | None:
    """`path` relative to `root` with slashes; None where it is not below it."""
    prefix = root if root.endswith(os.sep) else root + os.sep
    return path[len(prefix) :].replace(os.sep, "/") if path.startswith(prefix) else None


def read_ignore_file(path: str) -> GitIgnoreSpec | None:
    """The patterns of a .gitignore; None where there are none. Lines that mean nothing are passed over, as git does."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = [line.rstrip("\n") for line in file]
    except OSError:
        return None
    from pathspec import GitIgnoreSpec

    kept = []
    for line in lines:
        if line.strip() and not line.startswith("#"):
            try:
                GitIgnoreSpec.from_lines([line])
            except ValueError:
                continue
            kept.append(line)
    return GitIgnoreSpec.from_lines(kept) if kept else None


def _compiled(patterns: list[str]) -> GitIgnoreSpec:
    from pathspec import GitIgnoreSpec

    wrong = []
    for pattern in patterns:
        try:
            GitIgnoreSpec.from_lines([pattern])
        except ValueError as error:
            wrong.append(f"bad pattern {pattern!r}: {error}")
    if wrong:
        raise ConfigError("\n".join(wrong))
    return GitIgnoreSpec.from_lines(patterns)
