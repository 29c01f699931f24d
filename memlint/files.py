"""Files that are replaced at once, so that nothing is half written."""

from __future__ import annotations

import os
import tempfile


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace the file at `path`, or make it: a reader, or a Ctrl-C, meets the old bytes or the new ones.

    A symbolic link stays one, and a file keeps its mode. Raises OSError.
    """
    target = os.path.realpath(path)
    handle, temporary = tempfile.mkstemp(prefix=".memlint-", dir=os.path.dirname(target))
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, _mode_of(target))
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def _mode_of(path: str) -> int:
    """The mode of the file, or what a new one would get."""
    try:
        return os.stat(path).st_mode & 0o7777
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask
