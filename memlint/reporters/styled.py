"""Styled text. Plain output is plain string work; only colours need rich, whose import takes a moment."""

from __future__ import annotations

import io
from collections.abc import Iterable

from memlint.lint.model import Severity

#: pieces of text with rich's style names
Line = list[tuple[str, str]]

STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.NOTE: "bold cyan"}


def emit(lines: Iterable[Line], colour: bool) -> str:
    """The lines as text, each with a newline."""
    if not colour:
        return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines)
    from rich.console import Console
    from rich.text import Text

    out = io.StringIO()
    console = Console(
        file=out, force_terminal=True, color_system="standard", legacy_windows=False, highlight=False, no_color=False
    )
    for line in lines:
        console.print(Text.assemble(*line), soft_wrap=True)
    return out.getvalue()


def wrap(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """`text` in lines of at most `width` columns; words that are longer stay whole, for they are code or paths."""
    import textwrap

    return textwrap.wrap(
        text,
        max(width, 20),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]
