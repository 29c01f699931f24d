"""Rules that find words, so that what surrounds the rules can be tested without them, and makers of input."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import libcst as cst
from libcst import matchers as m

from memlint.config import Config
from memlint.lint.flow import Flow
from memlint.lint.model import Finding, Report, Severity
from memlint.rules.base import Draft, DraftFix, NodeEdit, Rule
from memlint.rules.ml001_unused_suppression import UnusedSuppression


class WordRule(Rule):
    """Finds a word."""

    word: ClassVar[str]
    better: ClassVar[str | None] = None
    safe: ClassVar[bool] = True
    bad = good = ""

    def check(self, flow: Flow) -> Iterator[Draft]:
        for node in m.findall(flow.module, m.Name(self.word)):
            assert isinstance(node, cst.Name)
            fix = None
            if self.better is not None:
                fix = DraftFix(f"write {self.better}", (NodeEdit(node, replace=self.better),), self.safe)
            yield self.finding(node, f"`{self.word}` is here.", fix=fix)


class Bad(WordRule):
    """`bad`, which a safe fix makes `good`."""

    code, name, severity, triggers = "ML901", "bad-word", Severity.WARNING, ("bad",)
    word, better = "bad", "good"


class Grave(WordRule):
    """`grave`, which only an unsafe fix mends."""

    code, name, severity, triggers = "ML902", "grave-word", Severity.ERROR, ("grave",)
    word, better, safe = "grave", "light", False


class Remark(WordRule):
    """`hmm`, which is only a note."""

    code, name, severity, triggers = "ML903", "remark", Severity.NOTE, ("hmm",)
    word = "hmm"


class Crash(WordRule):
    """Raises on `boom`."""

    code, name, severity, triggers = "ML904", "crash", Severity.ERROR, ("boom",)
    word = "boom"

    def check(self, flow: Flow) -> Iterator[Draft]:
        yield from super().check(flow)
        raise ValueError("boom,\nit said")


class Breaks(WordRule):
    """Its fix is no Python."""

    code, name, severity, triggers = "ML905", "breaks", Severity.WARNING, ("fragile",)
    word, better = "fragile", "("


class Circles(WordRule):
    """Its fix makes what it finds."""

    code, name, severity, triggers = "ML906", "circles", Severity.WARNING, ("round",)
    word = "round"

    def check(self, flow: Flow) -> Iterator[Draft]:
        for draft in super().check(flow):
            fix = DraftFix("once more", (NodeEdit(draft.node, before="round("), NodeEdit(draft.node, after=")")), True)
            yield self.finding(draft.node, draft.message, fix=fix)


class Dies(WordRule):
    """Ends the process that meets `kill`."""

    code, name, severity, triggers = "ML907", "dies", Severity.WARNING, ("kill",)
    word = "kill"

    def check(self, flow: Flow) -> Iterator[Draft]:
        os._exit(9)


RULES: tuple[Rule, ...] = (UnusedSuppression(), Bad(), Grave(), Remark(), Crash(), Breaks(), Circles(), Dies())


def config(root: Path, **settings: Any) -> Config:
    """A configuration without a cache."""
    return Config(**{"root": root, "cache": False, **settings})


def places(report: Report) -> list[tuple[str, int, str]]:
    """(path, line, code) of all findings."""
    return [(f.path, f.span.line, f.code) for f in report.findings]


def where(finding: Finding) -> tuple[int | None, int, int]:
    """(cell, line, column) of a finding."""
    return finding.cell, finding.span.line, finding.span.column


def notebook(*cells: str | list[str], language: str = "python", **dump: Any) -> str:
    """A notebook as Jupyter writes it, with a Markdown cell in front."""
    made: list[dict[str, Any]] = [{"cell_type": "markdown", "metadata": {}, "source": ["# bad\n", 'a "title"']}]
    for cell in cells:
        source = cell.splitlines(keepends=True) if isinstance(cell, str) else cell
        made.append({"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": source})
    content = {
        "cells": made,
        "metadata": {"language_info": {"name": language}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, **{"indent": 1, "ensure_ascii": False, **dump}) + "\n"
