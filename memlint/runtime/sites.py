"""Lines of source: where a tensor was made, told by the frames that were running."""

from __future__ import annotations

import linecache
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

_MEMLINT = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@dataclass(frozen=True, slots=True)
class Site:
    """A line of source. `path` is absolute, or such as "<stdin>"."""

    path: str
    line: int
    function: str

    @property
    def source(self) -> str:
        """The text of the line, stripped; empty where it cannot be read."""
        return linecache.getline(self.path, self.line).strip()

    def __str__(self) -> str:
        return f"{shown_path(self.path)}:{self.line}"


def shown_path(path: str) -> str:
    """`path` from the working directory where it lies below it, from site-packages where it lies there."""
    for root in (os.getcwd(), *_library_roots()):
        if path.startswith(root.rstrip(os.sep) + os.sep):
            return path[len(root.rstrip(os.sep)) + 1 :]
    return path


def made_at(frame: FrameType | None) -> tuple[Site | None, Site | None]:
    """The innermost line outside torch and memlint of the frames from `frame` up, and the innermost of user code.

    The two differ where a library made the tensor for the user. Both are None if no such line is running.
    """
    if frame is not None and _only_ours(frame):
        frame = _of_the_main_thread()  # a thread of autograd: whoever called backward() waits in the main thread
    outer: Site | None = None
    while frame is not None:
        kind = _kind(frame.f_code.co_filename)
        if kind != _TORCH:
            here = Site(frame.f_code.co_filename, frame.f_lineno, function_name(frame.f_code))
            if outer is None:
                outer = here
            if kind == _USER:
                return outer, here
        frame = frame.f_back
    return outer, outer


def function_name(code: CodeType) -> str:
    """What a function is called, with its class from Python 3.11 on."""
    name: str = getattr(code, "co_qualname", code.co_name)
    return name


def is_ours(filename: str) -> bool:
    """Whether a file belongs to memlint."""
    return filename.startswith(_MEMLINT)


_TORCH, _LIBRARY, _USER = range(3)
_kinds: dict[str, int] = {}


def _kind(filename: str) -> int:
    kind = _kinds.get(filename)
    if kind is None:
        kind = _kinds[filename] = _find_kind(filename)
    return kind


def _find_kind(filename: str) -> int:
    if is_ours(filename) or filename.startswith(_torch_root()):
        return _TORCH
    if filename.startswith("<frozen") or filename in ("<string>", "<eval_with_key>"):
        return _TORCH
    standard = sysconfig.get_paths()["stdlib"] + os.sep
    libraries = tuple(root.rstrip(os.sep) + os.sep for root in _library_roots())
    if filename.startswith(libraries):
        return _LIBRARY
    # the standard library runs callbacks (contextlib, functools, threading): never the line that a person looks for
    return _TORCH if filename.startswith(standard) else _USER


def _torch_root() -> str:
    import torch

    return os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def _library_roots() -> Iterator[str]:
    paths = sysconfig.get_paths()
    yield paths["purelib"]
    if paths["platlib"] != paths["purelib"]:
        yield paths["platlib"]
    yield from getattr(site, "getsitepackages", list)()
    user = getattr(site, "getusersitepackages", lambda: None)()
    if user:
        yield user


def _only_ours(frame: FrameType) -> bool:
    walked: FrameType | None = frame
    while walked is not None:
        if _kind(walked.f_code.co_filename) != _TORCH:
            return False
        walked = walked.f_back
    return True


def _of_the_main_thread() -> FrameType | None:
    frames: dict[int, Any] = sys._current_frames()
    return frames.get(threading.main_thread().ident or 0)
