"""Applies fixes: again and again until nothing changes, and all of a file or nothing.

Fixes whose edits would touch each other wait for the next round, where the rules see what the first has made of the
code. A result that does not parse is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memlint.lint.model import Edit, Failure, FailureKind, Finding
from memlint.lint.source import SourceError, SourceFile
from memlint.lint.textedit import split_lines

#: rounds after which fixes that still change the file are taken for going in circles, as in ruff
MAX_ROUNDS = 100


@dataclass(frozen=True, slots=True)
class Checked:
    """One look at a source: findings and failures in the coordinates of the parsed text."""

    findings: tuple[Finding, ...]
    failures: tuple[Failure, ...]
    suppressed: int = 0


@dataclass(frozen=True, slots=True)
class Fixed:
    """The source after fixing (the same object where nothing was fixed), the last look at it, and how many are gone."""

    source: SourceFile
    checked: Checked
    count: int


def applicable(finding: Finding, unsafe: bool) -> bool:
    """Whether a run may apply the finding's fix."""
    return finding.fix is not None and (finding.fix.safe or unsafe)


def fix(source: SourceFile, check: Callable[[SourceFile], Checked], *, unsafe: bool) -> Fixed:
    """Fix `source` as far as it goes. `check` is asked anew after each round."""
    first = checked = check(source)
    current, count = source, 0
    for _ in range(MAX_ROUNDS):
        wanted = [finding for finding in checked.findings if applicable(finding, unsafe)]
        edits, taken = choose(wanted)
        if not edits:
            return Fixed(current, checked, count)
        if len(wanted) > len(first.findings):
            break  # fixes that make more of what they fix
        if not current.is_faithful:
            return _refused(source, first, "the places of the fixes are not certain in this file; it is left as it is")
        try:
            data = current.edited(edits)
            if data == current.data:
                return Fixed(current, checked, count)
            following = SourceFile(source.path, data)
            following_checked = check(following)
        except (SourceError, ValueError) as error:
            codes = ", ".join(sorted({finding.code for finding in wanted}))
            return _refused(source, first, f"the fixes for {codes} would break the file ({error}); it is left as it is")
        current, checked, count = following, following_checked, count + taken
    codes = ", ".join(sorted({finding.code for finding in checked.findings if applicable(finding, unsafe)}))
    return _refused(source, first, f"the fixes for {codes} go in circles; the file is left as it is")


def _refused(source: SourceFile, checked: Checked, detail: str) -> Fixed:
    failure = Failure(source.path, FailureKind.BAD_FIX, detail)
    return Fixed(source, Checked(checked.findings, (*checked.failures, failure), checked.suppressed), 0)


def choose(findings: Sequence[Finding]) -> tuple[list[Edit], int]:
    """The edits of as many fixes as go together, and how many findings they fix.

    A fix is taken whole or not at all. An edit that an earlier fix makes already (the same import, say) is not made
    twice, but only where once is enough: two fixes that each open a bracket at one place need two.
    """
    chosen: list[Edit] = []
    fixes: set[tuple[Edit, ...]] = set()
    taken = 0
    for finding in findings:
        if finding.fix is None:
            continue
        edits = finding.fix.edits
        if edits in fixes:
            taken += 1
            continue
        new = [edit for edit in edits if not (edit in chosen and _once_is_enough(edit))]
        if not any(_touch(edit, other) for edit in new for other in chosen):
            chosen += new
            fixes.add(edits)
            taken += 1
    return chosen, taken


def _once_is_enough(edit: Edit) -> bool:
    start, end = _ends(edit)
    return start != end or edit.text.endswith("\n")


def _touch(one: Edit, other: Edit) -> bool:
    """Whether two edits overlap, or insert at the same place."""
    (a, b), (c, d) = _ends(one), _ends(other)
    if a == b and c == d:
        return a == c
    return a < d and c < b if a != b and c != d else c <= a <= d if a == b else a <= c <= b


def _ends(edit: Edit) -> tuple[tuple[int, int], tuple[int, int]]:
    span = edit.span
    return (span.line, span.column), (span.end_line, span.end_column)


def diff(path: str, before: SourceFile, after: SourceFile) -> str:
    """What has changed, as a unified diff with the file's own newlines; of a notebook one a cell."""
    import difflib

    lines = [
        line
        for label, old, new in _parts(path, before, after)
        for line in difflib.unified_diff(split_lines(old), split_lines(new), label, label)
    ]
    return "".join(line if line.endswith(("\n", "\r")) else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _parts(path: str, before: SourceFile, after: SourceFile) -> list[tuple[str, str, str]]:
    if before.notebook is None or after.notebook is None:
        return [(path, before.raw, after.raw)]
    pairs = zip(before.notebook.cells, after.notebook.cells, strict=True)
    return [(f"{path}:cell {n}", old.source, new.source) for n, (old, new) in enumerate(pairs, 1)]
