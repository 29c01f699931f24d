"""Whether a file nests so deep that parsing it would kill the process, from its bytes.

libcst's native parser overflows the C stack on deep nesting, which ends the process rather than raising. Measured with
libcst 1.9 and a stack of 8 MiB: it dies between 600 and 800 nested `[(`, between 1,000 and 1,500 nested brackets of one
kind, and between 3,000 and 6,000 terms of a chain such as `a.b.c` or `1 + 1 + 1`; adjacent strings it refuses at 3,000.
CPython takes no more than 200 nested brackets and, up to 3.12, 2,900 terms of a chain (5,900 of most kinds in 3.13), so
what is refused here next to nothing runs.
"""

from __future__ import annotations

import re

#: nested brackets; CPython's tokenizer stops at 200 (MAXLEVEL in Parser/tokenizer.h)
MAX_BRACKETS = 200
#: terms of one expression, with those of the expressions around it; branches of one `if`
MAX_TERMS = 3000

_NOT_BRACKETS = bytes(set(range(256)) - set(b"()[]{}"))
_BRACKET_PAIRS = (b"()", b"[]", b"{}")
#: where an expression surely ends, in code or (harmlessly) in a string
_ENDS = re.compile(rb"[,;]|\n(?=[ \t]*(?:def|class|return|if|for|while|with|import|from|[\w.]+ *=[^=]))")
_TOKEN = re.compile(
    rb"""
    (?P<skip>\#[^\n]*|\\\r?\n|[ \t\f]+)
    |(?P<string>(?i:[rbuft]{0,2})(?:\"{3}(?:[^\\]|\\.)*?\"{3}|'{3}(?:[^\\]|\\.)*?'{3}
        |\"(?:[^\\\n\"]|\\.)*\"|'(?:[^\\\n']|\\.)*'))
    |(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<newline>[\r\n]+)|(?P<end>[,;])
    |(?P<nothing>[:=]|[\d][\w.]*)|(?P<word>[\w.\x80-\xff]+)
    |(?P<operator>\*\*|//|[!<>]=|<<|>>|->|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_OPERATOR_WORDS = frozenset((b"and", b"await", b"if", b"in", b"is", b"lambda", b"not", b"or"))


def complaint(data: bytes) -> str | None:
    """Why `data` must not be parsed; None where nothing speaks against it."""
    if data.count(b"elif") > MAX_TERMS:
        return f"more than {MAX_TERMS} branches"
    if _surely_flat(data):
        return None
    return _counted(data)


def _surely_flat(data: bytes) -> bool:
    """Two cheap passes that prove most files flat: the counting of tokens takes a Python-level loop."""
    left = data.translate(None, _NOT_BRACKETS)
    # Each round takes up to three levels of innermost pairs away, one of each kind; what brackets in strings and
    # comments leave is counted as open.
    rounds = 0
    while rounds < MAX_BRACKETS:
        rounds += 1
        before = len(left)
        for pair in _BRACKET_PAIRS:
            left = left.replace(pair, b"")
        if len(left) == before:
            break
    # a term takes at least a byte
    levels = len(_BRACKET_PAIRS) * rounds
    return levels + len(left) < MAX_BRACKETS and max(map(len, _ENDS.split(data))) < MAX_TERMS


def _counted(data: bytes) -> str | None:
    """Count open brackets, and what nests without any, along the expressions that hold each other."""
    terms = 0
    outer: list[int] = []
    previous = None
    for token in _TOKEN.finditer(data):
        kind = token.lastgroup
        if kind == "skip":
            continue
        if kind == "open":
            outer.append(terms)
            if len(outer) > MAX_BRACKETS:
                return f"more than {MAX_BRACKETS} nested brackets"
        elif kind == "close":
            terms = (outer.pop() if outer else 0) + 1
        elif kind == "end":
            terms = outer[-1] if outer else 0
        elif kind == "newline":
            # between brackets a new line is nothing: strings before and behind it are adjacent
            if outer:
                continue
            terms = 0
        elif kind == "string":
            terms += previous == "string"
        elif kind == "operator":
            terms += 1
        elif kind == "word":
            terms += 1 if token.group() in _OPERATOR_WORDS else token.group().count(b".")
        if terms > MAX_TERMS:
            return f"more than {MAX_TERMS} terms in one expression"
        previous = kind
    return None
