"""One file through the flow model and the rules."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow.syntax import nodes
from memlint.lint.imports import bindings
from memlint.lint.locate import spans
from memlint.lint.model import Edit, Failure, FailureKind, Finding, Fix, Related, Span
from memlint.lint.textedit import split_lines
from memlint.rules.base import Draft, DraftFix, Rule

if TYPE_CHECKING:
    from packaging.version import Version

    from memlint.lint.project import Project
    from memlint.lint.source import SourceFile


#: what libraries with an autograd of their own are called, or what they call what it works on
_TENSORS = re.compile(
    r"paddle|jittor|mindspore|megengine|tensorflow|mxnet|chainer|cupy|\w+grad|(?!func|py)\w+torch|Tensor|Variable|Parameter"
)


@dataclass(frozen=True, slots=True)
class AnalysisSettings:
    """What the rules are told beside the file.

    oldest_torch: the oldest torch version that the project supports; None where nothing tells.
    capped_torch: the version that the project has to stay below; None where nothing tells.
    project: the files around the one that is judged; None where it stands alone.
    """

    oldest_torch: Version | None = None
    capped_torch: Version | None = None
    project: Project | None = None


def analyse(
    source: SourceFile, rules: Sequence[Rule], settings: AnalysisSettings
) -> tuple[list[Finding], list[Failure]]:
    """Run `rules` on a parsed file.

    Findings are in the coordinates of the joined Python source, ordered by place and code. A rule that raises becomes
    a failure; the others go on.
    """
    if of_another_library(source):
        return [], []
    flow = Flow(source.module, source.path, settings, source.text)
    drafts: list[Draft] = []
    failures: list[Failure] = []
    for rule in rules:
        try:
            drafts += rule.check(flow)
        except RecursionError:
            raise
        except Exception as error:
            failures.append(
                Failure(source.path, FailureKind.RULE_CRASH, f"{rule.code}: {type(error).__name__}: {error}")
            )
    return located(source, flow, drafts), failures


def of_another_library(source: SourceFile) -> bool:
    """Whether a file speaks of the tensors of another library (or its own), and nowhere of torch."""
    if not _TENSORS.search(source.text) or re.search(r"\btorch\b", source.text):
        return False
    found = [
        full
        for node in nodes(source.module)
        if isinstance(node, (cst.Import, cst.ImportFrom))
        for _, full in bindings(node)
    ]
    parts = {part for full in found for part in (full.split(".")[0], full.rsplit(".", 1)[-1])}
    others = [part for part in parts if _TENSORS.fullmatch(part)]
    rest = re.sub("|".join(map(re.escape, others)), "", source.text, flags=re.I) if others else source.text
    return bool(others) and "torch" not in rest


def located(source: SourceFile, flow: Flow, drafts: Sequence[Draft]) -> list[Finding]:
    """Drafts as findings with positions. What is related may stand in other files that the flow model read."""
    wanted: list[cst.CSTNode] = []
    for draft in drafts:
        wanted.append(draft.node)
        wanted += [node for node, _ in draft.related]
        if draft.fix is not None:
            for edit in draft.fix.edits:
                wanted += [node for node in (edit.node, edit.since, edit.until) if node is not None]
    places = spans(source.module, wanted)
    others: dict[int, tuple[str, Span]] = {}
    missing = [node for draft in drafts for node, _ in draft.related if id(node) not in places]
    for index in flow.linked.values() if missing else ():
        shown = shown_path(index.path, source.path)
        others |= {key: (shown, span) for key, span in spans(index.module, missing).items()}
    found: dict[tuple[Span, str, str], Finding] = {}
    for draft in drafts:
        span = places[id(draft.node)]
        finding = Finding(
            draft.code,
            draft.name,
            draft.severity,
            draft.message,
            source.path,
            span,
            fix=placed_fix(draft.fix, places, source) if draft.fix is not None else None,
            related=tuple(
                Related(text, *(others[id(node)] if id(node) in others else (source.path, places[id(node)])))
                for node, text in draft.related
                if id(node) in places or id(node) in others
            ),
        )
        found.setdefault((span, draft.code, draft.message), finding)
    return sorted(found.values(), key=lambda finding: (finding.span, finding.code))


def shown_path(path: str, beside: str) -> str:
    """How another file is shown where `beside` is how the one that is judged is."""
    if os.path.isabs(beside):
        return path
    try:
        return os.path.relpath(path)
    except ValueError:  # another drive
        return path


def placed_fix(fix: DraftFix, places: dict[int, Span], source: SourceFile) -> Fix:
    """A fix with its edits placed in the file."""
    lines = split_lines(source.text) if any("\0" in edit.before for edit in fix.edits) else []
    newline = source.module.default_newline

    def indentation(span: Span) -> str:
        return lines[span.line - 1][: span.column - 1]

    edits: list[Edit] = []
    for edit in fix.edits:
        span = places[id(edit.node)]
        if edit.since is not None:
            before = places[id(edit.since)]
            span = Span(before.end_line, before.end_column, span.end_line, span.end_column)
        if edit.until is not None:
            after = places[id(edit.until)]
            span = Span(span.line, span.column, after.line, after.column)
        if edit.replace is not None:
            edits.append(Edit(span, edit.replace))
        if edit.before:
            # "\0" stands for a new line with the indentation of the node
            text = edit.before
            if "\0" in text:
                text = text.replace("\0", newline + indentation(span))
            edits.append(Edit(Span(span.line, span.column, span.line, span.column), text))
        if edit.after:
            edits.append(Edit(Span(span.end_line, span.end_column, span.end_line, span.end_column), edit.after))
    return Fix(fix.label, tuple(edits), fix.safe)
