"""Findings that a project has decided to live with: written to a file once, and left out of the reports from then on.

The file is JSON with an entry a line, sorted, so that a review sees what comes and what goes. An entry stands for all
findings of one code in one file whose lines read the same, and says how many there may be: one more of them is new.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memlint.errors import ConfigError
from memlint.lint import fingerprint
from memlint.lint.model import Finding, Report

VERSION = 1


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """`count` findings of `code` in the file `path` (relative to the baseline's folder), on lines that read `line`.

    `key` is what their fingerprints have in common; `path`, `code` and `line` are there for people.
    """

    path: str
    code: str
    line: str
    key: str
    count: int


@dataclass(frozen=True, slots=True)
class Baseline:
    """The entries of a file."""

    entries: tuple[Entry, ...]
    allowed: dict[str, int]

    def split(self, findings: Iterable[Finding]) -> tuple[list[Finding], list[Finding]]:
        """(new, known) findings of one file."""
        new: list[Finding] = []
        known: list[Finding] = []
        for finding in findings:
            key, number = fingerprint.split(finding.fingerprint)
            (known if number <= self.allowed.get(key, 0) else new).append(finding)
        return new, known

    def stale(self, known: Iterable[Finding], judged: Callable[[Entry], bool]) -> int:
        """How many findings the baseline allows that are not there any more.

        `known` are those that are; `judged` tells whether this run would have found an entry's.
        """
        there = Counter(fingerprint.split(finding.fingerprint)[0] for finding in known)
        return sum(max(e.count - there[e.key], 0) for e in self.entries if judged(e))


class Rounds:
    """Tells new findings from known ones in a file that is fixed round by round.

    A fix may rewrite a line that holds a known finding, too, which then looks like a new one. It stays known: a finding
    that was not there at first, on a line that was not there either, takes the place of one of its code that is gone.
    """

    def __init__(self, baseline: Baseline) -> None:
        self._baseline = baseline
        self._first: list[Finding] | None = None
        self._keys: frozenset[str] = frozenset()

    def split(self, findings: Sequence[Finding]) -> tuple[list[Finding], list[Finding]]:
        """(new, known) findings of one look at the file."""
        new, known = self._baseline.split(findings)
        if self._first is None:
            self._first = known
            self._keys = frozenset(fingerprint.split(finding.fingerprint)[0] for finding in findings)
            return new, known
        there = {finding.fingerprint for finding in known}
        gone = [finding for finding in self._first if finding.fingerprint not in there]
        really_new = []
        for finding in new:
            changed = fingerprint.split(finding.fingerprint)[0] not in self._keys
            was = next((other for other in gone if other.code == finding.code), None) if changed else None
            if was is None:
                really_new.append(finding)
            else:
                gone.remove(was)
                known.append(replace(finding, fingerprint=was.fingerprint))
        return really_new, known


def read(path: str) -> Baseline:
    """The baseline in the file at `path`. Raises ConfigError (one line) where it is none."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise ConfigError(f"baseline {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # no JSON, or no UTF-8
        raise ConfigError(f"baseline {path}: not JSON: {error}") from error
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION or not isinstance(content.get("findings"), list):
        if isinstance(version, int) and version > VERSION:
            raise ConfigError(f"baseline {path}: version {version} is of a later memlint")
        raise ConfigError(f"baseline {path}: not written by `memlint check --write-baseline`")
    entries = tuple(_entry(item, f"baseline {path}: entry {n}") for n, item in enumerate(content["findings"], 1))
    allowed: Counter[str] = Counter()
    for entry in entries:
        allowed[entry.key] += entry.count
    return Baseline(entries, dict(allowed))


def _entry(item: Any, where: str) -> Entry:
    if not isinstance(item, dict):
        raise ConfigError(f"{where}: not an object")
    for name, kind in (("path", str), ("code", str), ("line", str), ("fingerprint", str), ("count", int)):
        if not isinstance(item.get(name), kind) or isinstance(item[name], bool):
            raise ConfigError(f"{where}: {name!r} is missing or of the wrong type")
    return Entry(item["path"], item["code"], item["line"], item["fingerprint"], item["count"])


def text(findings: Iterable[Finding], lines: Callable[[str, int | None], Sequence[str]], anchor: str) -> str:
    """The file that holds `findings`. `lines` gives the lines of a file or a cell, `anchor` is the file's folder."""
    counts: Counter[tuple[str, str, str, str]] = Counter()
    for finding in findings:
        code = lines(finding.path, finding.cell)
        line = code[finding.span.line - 1] if 1 <= finding.span.line <= len(code) else ""
        place = fingerprint.place(finding.path, finding.path, anchor)
        # of lines that differ in whitespace only one stands for all
        counts[place, finding.code, " ".join(line.split()), fingerprint.split(finding.fingerprint)[0]] += 1
    rows = [
        json.dumps({"path": path, "code": code, "line": line, "fingerprint": key, "count": count}, ensure_ascii=False)
        for (path, code, line, key), count in sorted(counts.items())
    ]
    body = ",\n".join(f"    {row}" for row in rows)
    return f'{{\n  "version": {VERSION},\n  "findings": [' + (f"\n{body}\n  " if rows else "") + "]\n}\n"


def absorbed(report: Report) -> Report:
    """`report` after a baseline of all its findings."""
    results = (
        replace(r, findings=(), baselined=tuple(sorted((*r.findings, *r.baselined), key=order))) for r in report.results
    )
    return replace(report, results=tuple(results))


def order(finding: Finding) -> tuple[Any, ...]:
    """By which the findings of a file are sorted."""
    return finding.cell or 0, finding.span, finding.code


def still_there(entry: Entry, anchor: str) -> bool:
    """Whether the file of an entry exists."""
    return os.path.exists(os.path.join(anchor, entry.path))


def judged_by(
    anchor: str, codes: Callable[[str], Collection[str]], judged: Collection[str], failed: Collection[str]
) -> Callable[[Entry], bool]:
    """Whether a run would have found what an entry allows: its file was judged or is gone, its code was looked for.

    `judged` and `failed` are files as fingerprints name them; `codes` gives the codes that are on in a file.
    """

    def would_find(entry: Entry) -> bool:
        if entry.path in judged:
            return entry.path not in failed and entry.code in codes(os.path.join(anchor, entry.path))
        return not still_there(entry, anchor)

    return would_find
