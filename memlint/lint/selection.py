"""Which codes are meant by the codes, prefixes and ALL that people write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

ALL = "ALL"


def unknown(selectors: Iterable[str], codes: Sequence[str]) -> list[str]:
    """One line for each selector that means no code, with the nearest one where there is one."""
    return [_complaint(selector, codes) for selector in selectors if not _expand(selector, codes)]


def choose(
    select: Iterable[str], ignore: Iterable[str], extend_select: Iterable[str], codes: Sequence[str]
) -> frozenset[str]:
    """The codes that are on.

    As in ruff the more specific selector wins, whichever option it stands in: `--select ALL --ignore ML1
    --extend-select ML101` leaves ML101 on. Of equals, ignore wins over select.
    """
    chosen: set[str] = set()
    votes = [(len(_prefix(s)), False, s) for s in (*select, *extend_select)]
    votes += [(len(_prefix(s)), True, s) for s in ignore]
    for _, off, selector in sorted(votes):
        meant = _expand(selector, codes)
        chosen = chosen - meant if off else chosen | meant
    return frozenset(chosen)


def _prefix(selector: str) -> str:
    text = selector.strip().upper()
    return "" if text == ALL else text


def _expand(selector: str, codes: Sequence[str]) -> set[str]:
    if not selector.strip():
        return set()
    prefix = _prefix(selector)
    return {code for code in codes if code.startswith(prefix)}


def _complaint(selector: str, codes: Sequence[str]) -> str:
    import difflib

    near = difflib.get_close_matches(_prefix(selector), [*codes, ALL], n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]}?" if near else "; `memlint rules` lists the codes"
    return f"unknown rule {selector!r}{hint}"
