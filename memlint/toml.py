"""TOML, from the standard library where it has a parser."""

from __future__ import annotations

import sys
from typing import Any


def parse(text: str) -> dict[str, Any]:
    """The table that `text` describes. Raises ValueError."""
    # imported late: most runs on single files read no TOML
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]
    table: dict[str, Any] = tomllib.loads(text)
    return table
