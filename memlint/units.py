"""Sizes in bytes: read as people write them, printed as people read them.

A prefix with an `i` counts in 1,024s, one without in 1,000s (IEC 80000-13), as in torch's own out-of-memory messages
("Tried to allocate 2.00 GiB") and on the labels of cards.
"""

from __future__ import annotations

import re

from memlint.errors import MemlintError

_PREFIXES = "KMGT"
_LONGEST = 40
_SIZE = re.compile(r"(\d+(?:_\d+)*(?:\.\d+)?|\.\d+)\s*(?:([kKmMgGtT])(i?))?(?:[bB](?:ytes?)?)?")


class SizeError(MemlintError):
    """A text that is no size."""


def parse_bytes(value: int | str) -> int:
    """The number of bytes that `value` says: a whole number, or text such as "1.5 GiB", "512MB", "64k" or "0".

    Raises SizeError for anything else: negative numbers, fractions of a byte, booleans, unknown units.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise SizeError(f"{value!r} is no size: write a number of bytes, or text such as '1.5 GiB'")
    if isinstance(value, int):
        if value < 0:
            raise SizeError(f"{value} is no size: it is negative")
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise SizeError(f"{value!r} is no size: write a number of bytes, or text such as '1.5 GiB' or '512MB'")
    number, prefix, binary = match.groups()
    factor = 1 if prefix is None else (1024 if binary else 1000) ** (_PREFIXES.index(prefix.upper()) + 1)
    if len(number) > _LONGEST:
        raise SizeError(f"{value[:_LONGEST]!r}... is no size: it has too many digits")
    size = float(number) * factor if "." in number else int(number) * factor
    if size != int(size) and prefix is None:
        raise SizeError(f"{value!r} is no size: there is no part of a byte")
    return round(size)


def format_bytes(size: float, signed: bool = False) -> str:
    """`size` bytes with three significant digits and a binary unit: "0 B", "1.50 KiB", "12.3 MiB"; "+" if `signed`."""
    sign = "-" if size < 0 else "+" if signed else ""
    size = abs(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1023.5:
            return f"{sign}{_three_digits(size, unit)} {unit}"
        size /= 1024
    return f"{sign}{_three_digits(size, 'TiB')} TiB"


def _three_digits(size: float, unit: str) -> str:
    if unit == "B" and size == int(size):
        return str(int(size))
    if size < 9.995:
        return f"{size:.2f}"
    if size < 99.95:
        return f"{size:.1f}"
    return f"{size:.0f}"
