"""The frozen types that the linter's parts hand to each other."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Severity(enum.IntEnum):
    """How bad a finding is.

    error: memory grows by activations every iteration, or the training is silently wrong.
    warning: a real defect whose cost is bounded (graph nodes only, a doubled peak).
    note: advice; the code is right.
    """

    NOTE = 0
    WARNING = 1
    ERROR = 2

    @property
    def label(self) -> str:
        """The word that reports print."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A range of source text. Lines and columns count from 1; the end column is exclusive.

    Columns count characters (code points), not bytes.
    """

    line: int
    column: int
    end_line: int
    end_column: int


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace the text in `span` by `text`; an empty span inserts."""

    span: Span
    text: str


@dataclass(frozen=True, slots=True)
class Fix:
    """Edits to one file that go together. A safe fix never changes what the program computes."""

    label: str
    edits: tuple[Edit, ...]
    safe: bool


@dataclass(frozen=True, slots=True)
class Related:
    """Another place that makes the case: where the graph was made, where the holder lives."""

    message: str
    path: str
    span: Span
    cell: int | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a rule says about one place.

    `span` is relative to the file, or to the notebook cell where `cell` (counted from 1) is given;
    a fix's edits always use the same coordinates as `span`. `fingerprint` stays the same when lines move (see
    fingerprint.py); it is empty where the engine has not seen the finding.
    """

    code: str
    name: str
    severity: Severity
    message: str
    path: str
    span: Span
    cell: int | None = None
    fix: Fix | None = None
    related: tuple[Related, ...] = ()
    fingerprint: str = ""


class FailureKind(enum.Enum):
    """Why a file, or a part of it, was not judged."""

    UNREADABLE = "unreadable"
    SYNTAX = "syntax"
    TOO_DEEP = "too-deep"
    RULE_CRASH = "rule-crash"
    BAD_FIX = "bad-fix"
    WORKER_DIED = "worker-died"


@dataclass(frozen=True, slots=True)
class Failure:
    """A file that could not be judged, or a rule that could not judge it."""

    path: str
    kind: FailureKind
    detail: str
    line: int | None = None


@dataclass(frozen=True, slots=True)
class FileResult:
    """All that one file gave.

    `suppressed` counts findings that a directive silenced, `fixed` those that a fix removed; `baselined` are findings
    that the baseline holds, which are no part of `findings`; `diff` is what the fixes would change, as a unified diff,
    where the run was asked for one.
    """

    path: str
    findings: tuple[Finding, ...] = ()
    failures: tuple[Failure, ...] = ()
    suppressed: int = 0
    fixed: int = 0
    diff: str = ""
    baselined: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """All that one run gave, in a stable order.

    `stale` counts findings that the baseline allows and that are not there any more; None without a baseline.
    """

    results: tuple[FileResult, ...] = ()
    failures: tuple[Failure, ...] = field(default=())
    stale: int | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Every finding, ordered by path, then place, then code."""
        return tuple(f for result in self.results for f in result.findings)

    @property
    def baselined(self) -> int:
        """How many findings the baseline left out."""
        return sum(len(result.baselined) for result in self.results)

    @property
    def all_failures(self) -> tuple[Failure, ...]:
        """Failures of single files and of the run itself."""
        return self.failures + tuple(f for result in self.results for f in result.failures)
