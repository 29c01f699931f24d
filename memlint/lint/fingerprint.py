"""What tells one finding from another across runs, so that dashboards and baselines know it again.

Line numbers move with every edit above them and messages change with the linter, so neither takes part. A fingerprint
is made of the code, the file, the text of the line (whitespace counts for nothing) and a number that tells those apart
which agree in all of these: `9f86d081884c7d65:1`. The part before the colon is the *key* that such duplicates share.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from memlint.lint.model import Finding


def identified(findings: Iterable[Finding], text: str, place: str) -> list[Finding]:
    """All findings of one file, with their fingerprints. Spans are those of `text`; `place` names the file."""
    findings = list(findings)
    lines = text.split("\n") if findings else []
    seen: Counter[str] = Counter()
    made: dict[int, Finding] = {}
    # in the order of their places, whatever the order in which the rules found them
    for index, finding in sorted(enumerate(findings), key=lambda item: (item[1].span, item[0])):
        line = finding.span.line
        made_key = _key(finding.code, place, lines[line - 1] if 1 <= line <= len(lines) else "")
        seen[made_key] += 1
        made[index] = replace(finding, fingerprint=f"{made_key}:{seen[made_key]}")
    return [made[index] for index in range(len(findings))]


def _key(code: str, place: str, line: str) -> str:
    state = hashlib.blake2b(digest_size=8)
    for part in (code, place, " ".join(line.split())):
        # a path may be no UTF-8, and a notebook's source may hold half a surrogate pair
        state.update(part.encode("utf-8", "backslashreplace") + b"\0")
    return state.hexdigest()


def split(fingerprint: str) -> tuple[str, int]:
    """(key, number) of a fingerprint; duplicates are numbered from 1."""
    key, _, number = fingerprint.partition(":")
    return key, int(number)


def place(path: str, display: str, anchor: str) -> str:
    """How fingerprints name a file: relative to the folder `anchor`, so that they do not depend on where memlint runs.

    Only a file on another drive is named as it is shown.
    """
    try:
        return os.path.relpath(path, anchor).replace(os.sep, "/")
    except ValueError:
        return display
