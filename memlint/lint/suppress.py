"""Directives in comments, and the findings that they silence.

    # memlint: ignore[ML101, ML102] why        these codes, in the statement that the comment ends
    # memlint: ignore why                      all codes
    # memlint: ignore-file[ML101] why          these codes, in the whole file
    # memlint: ignore-cell[ML101] why          these codes, in the cell of a notebook that the comment is in
    # noqa: E501, ML101                        as other linters do; a bare `# noqa` silences all

Only COMMENT tokens count, never text in strings. Directives that silence nothing become findings of ML001.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from memlint.lint.model import Edit, Finding, Fix, Severity, Span
from memlint.lint.source import Comment, SourceFile

UNUSED = "ML001"
_NAME = "unused-suppression"
#: bytes without which no directive of our own can be in a file; a bare noqa matters only where there are findings
_OWN = re.compile(rb"#\s*memlint\s*:|#\s*noqa\s*:[^\n]*\bML\d", re.IGNORECASE)
#: a directive reaches to the next comment sign that starts another tool's (or our own) directive
_NEXT = r"(?=\s*\#\s*(?:noqa|memlint|type|mypy|pyright|pylint|pragma|fmt|isort|ruff|flake8|nosec|codespell)\b|\s*$)"
_MEMLINT = re.compile(rf"#\s*memlint\s*:\s*(?P<word>[\w-]*)\s*(?:\[(?P<codes>[^\]]*)\])?.*?{_NEXT}", re.IGNORECASE)
_NOQA = re.compile(r"#\s*noqa\b(?:(?P<colon>\s*:\s*)(?P<codes>[A-Z]+[0-9]+(?:[,\s]+[A-Z]+[0-9]+)*))?", re.IGNORECASE)
_CODE = re.compile(r"[^\s,]+")


@dataclass(slots=True)
class Directive:
    """One directive, and what it has silenced so far."""

    comment: Comment
    #: the part of the comment that is this directive
    start: int
    end: int
    #: codes with their place in the comment; None silences all
    codes: tuple[tuple[str, int, int], ...] | None
    whole_file: bool = False
    #: the lines of the cell that it speaks of
    cell: range | None = None
    noqa: bool = False
    #: what is wrong with it, where it is no directive at all
    broken: str = ""
    used: set[str] = field(default_factory=set)

    def silences(self, finding: Finding) -> bool:
        """Whether it speaks of this finding. That it is unused itself, it must allow by name."""
        if self.broken:
            return False
        if self.codes is None:
            named = finding.code != UNUSED
        else:
            named = any(code == finding.code for code, _, _ in self.codes)
        if not named:
            return False
        if self.whole_file:
            return True
        if self.cell is not None:
            return finding.span.line in self.cell
        first, last = self.comment.covers
        return first <= finding.span.line <= last or self.comment.span.line == finding.span.end_line


def may_report(data: bytes) -> bool:
    """Whether a file holds a directive that could be unused."""
    return _OWN.search(data) is not None


def suppress(
    source: SourceFile, findings: Sequence[Finding], *, active: Collection[str], known: Collection[str]
) -> tuple[list[Finding], int]:
    """The findings that no directive silences, with those of ML001, and how many were silenced.

    `active` are the codes that could have been found in this file: only of these can a directive be called unused.
    `known` are all codes that exist. Everything is in the coordinates of the parsed text.
    """
    if not findings and not (UNUSED in active and may_report(source.data)):
        return list(findings), 0
    directives = [d for comment in source.comments() for d in parse(comment, source)]
    kept = [finding for finding in findings if not _silenced(finding, directives)]
    silenced = len(findings) - len(kept)
    if UNUSED in active:
        unused = list(_unused(source, directives, active, known))
        spoken = [finding for finding in unused if not _silenced(finding, directives)]
        silenced += len(unused) - len(spoken)
        kept = sorted([*kept, *spoken], key=lambda finding: (finding.span, finding.code))
    return kept, silenced


def parse(comment: Comment, source: SourceFile) -> Iterator[Directive]:
    """The directives in one comment."""
    notebook = source.notebook
    for match in _MEMLINT.finditer(comment.text):
        word = match["word"].lower()
        broken = ""
        if word == "ignore-cell" and notebook is None:
            broken = "`memlint: ignore-cell` is for notebooks: write `ignore[CODE]` or `ignore-file[CODE]`"
        elif word not in ("ignore", "ignore-file", "ignore-cell"):
            broken = f"`memlint: {match['word']}` is no directive: write `ignore[CODE]` or `ignore-file[CODE]`"
        codes = _codes(match) if match["codes"] is not None else None
        cell = notebook.lines_of_cell(comment.span.line) if notebook is not None and word == "ignore-cell" else None
        yield Directive(comment, match.start(), match.end(), codes, word == "ignore-file", cell, broken=broken)
    for match in _NOQA.finditer(comment.text):
        codes = _codes(match) if match["codes"] is not None else None
        yield Directive(comment, match.start(), match.end(), codes, noqa=True)


def _codes(match: re.Match[str]) -> tuple[tuple[str, int, int], ...]:
    start = match.start("codes")
    return tuple((m.group().upper(), start + m.start(), start + m.end()) for m in _CODE.finditer(match["codes"]))


def _silenced(finding: Finding, directives: Iterable[Directive]) -> bool:
    """Whether a directive silences the finding; all that do are marked as used."""
    hit = False
    for directive in directives:
        if directive.silences(finding):
            directive.used.add(finding.code)
            hit = True
    return hit


def _unused(
    source: SourceFile, directives: Iterable[Directive], active: Collection[str], known: Collection[str]
) -> Iterator[Finding]:
    for directive in directives:
        if directive.broken:
            yield _finding(source, directive, directive.broken, fix=False)
        elif directive.codes is None:
            # one that silences all is unused only if everything was looked for
            if not directive.noqa and not directive.used and set(active) >= set(known):
                yield _finding(source, directive, "this directive suppresses nothing")
        else:
            yield from _unused_codes(source, directive, directive.codes, active, known)


def _unused_codes(
    source: SourceFile,
    directive: Directive,
    codes: tuple[tuple[str, int, int], ...],
    active: Collection[str],
    known: Collection[str],
) -> Iterator[Finding]:
    unknown, idle = [], []
    for code, _, _ in codes:
        if code not in known:
            # another tool's code in a noqa is none of our business
            if not directive.noqa or code.startswith("ML"):
                unknown.append(code)
        elif code in active and code not in directive.used and code != UNUSED:
            idle.append(code)
    said = []
    if unknown:
        said.append(f"memlint has no rule {' or '.join(unknown)}")
    if idle:
        said.append(f"{' and '.join(idle)} {'is' if len(idle) == 1 else 'are'} not found here: nothing to suppress")
    if not codes:
        said.append("this directive names no code")
    if said:
        yield _finding(source, directive, "; ".join(said), gone={*unknown, *idle})


def _finding(
    source: SourceFile, directive: Directive, message: str, *, gone: Collection[str] = (), fix: bool = True
) -> Finding:
    span = _span(directive.comment, directive.start, directive.end)
    edit = _removal(source, directive, gone)
    return Finding(
        UNUSED,
        _NAME,
        Severity.WARNING,
        f"{message[0].upper()}{message[1:]}." if not message.startswith(("ML", "`", "memlint")) else f"{message}.",
        source.path,
        span,
        fix=Fix("delete the directive" if not edit.text else "delete what is unused", (edit,), True) if fix else None,
    )


def _span(comment: Comment, start: int, end: int) -> Span:
    line, column = comment.span.line, comment.span.column
    return Span(line, column + start, line, column + end)


def _removal(source: SourceFile, directive: Directive, gone: Collection[str]) -> Edit:
    """The edit that deletes the unused codes, or the whole directive where none stays."""
    text = directive.comment.text
    stay = [text[start:end] for code, start, end in directive.codes or () if code not in gone]
    if directive.codes and stay:
        first, last = directive.codes[0][1], directive.codes[-1][2]
        return Edit(_span(directive.comment, first, last), ", ".join(stay))
    start, end = directive.start, directive.end
    line, column = directive.comment.span.line, directive.comment.span.column
    if (start, end) != (0, len(text)):
        # the neighbour before it keeps its end, the one behind it takes its place
        if start == 0:
            end += len(text[end:]) - len(text[end:].lstrip())
        else:
            start = len(text[:start].rstrip())
        return Edit(_span(directive.comment, start, end), "")
    before = source.text.split("\n")[line - 1][: column - 1]
    if before.strip() or source.text.count("\n") < line:
        return Edit(Span(line, len(before.rstrip()) + 1, line, column + end), "")
    return Edit(Span(line, 1, line + 1, 1), "")
