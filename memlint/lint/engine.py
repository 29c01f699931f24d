"""Files in, a report out.

Most files of a tree hold no training code, so words are looked for in the bytes first, and only files that hold a word
of an active rule are parsed. Larger runs are spread over processes; the report does not tell how many there were.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from memlint import config as configuration
from memlint import files
from memlint.config import Config
from memlint.lint import baseline, depth, fingerprint, fixer, suppress
from memlint.lint.analysis import AnalysisSettings, analyse
from memlint.lint.cache import Cache
from memlint.lint.catalog import all_rules
from memlint.lint.discovery import Candidate, discover
from memlint.lint.fixer import Checked
from memlint.lint.model import Failure, FailureKind, FileResult, Finding, Report
from memlint.lint.patterns import Patterns
from memlint.lint.project import Project
from memlint.lint.selection import choose
from memlint.lint.source import SourceError, SourceFile
from memlint.rules.base import Rule

if TYPE_CHECKING:
    from packaging.version import Version

T = TypeVar("T")
#: called with the number of files that are done and of all files
Progress = Callable[[int, int], None]

#: for files that nest deeper than Python's default recursion limit: what depth.py lets through fits (measured)
_STACK_BYTES = 512 * 1024 * 1024
_RECURSION_LIMIT = 60_000


def check(
    paths: Sequence[str], config: Config, *, rules: Sequence[Rule] | None = None, progress: Progress | None = None
) -> Report:
    """Check all Python files and notebooks that `paths` mean, and fix or diff them where `config` says so.

    Trouble with single files is part of the report. Raises ConfigError for settings that make no sense, and for a
    baseline that is none.
    """
    # before the work, and before processes start that would stumble over it
    known_findings = baseline.read(config.baseline) if config.baseline else None
    found = discover(paths, root=config.root, exclude=config.excludes, force_exclude=config.force_exclude)
    known = all_rules() if rules is None else tuple(rules)
    from memlint.lint import pool

    jobs = pool.useful_jobs(found.files, config.jobs)
    if jobs > 1:
        results = pool.run(found.files, config, known, jobs, progress)
    else:
        results = []
        checker = Checker(config, known)
        for number, candidate in enumerate(found.files, 1):
            results.append(checker.file(candidate))
            if progress is not None:
                progress(number, len(found.files))
    report = Report(tuple(results), found.failures)
    if known_findings is None:
        return report
    return replace(report, stale=_stale(known_findings, report, config, known))


def _stale(known: baseline.Baseline, report: Report, config: Config, rules: Sequence[Rule]) -> int:
    """How many findings of the baseline this run would have met if they were still there."""
    codes = tuple(rule.code for rule in rules)
    on = choose(config.select, config.ignore, config.extend_select, codes)
    per_file = _PerFile(config, codes)

    def places(results: Iterable[FileResult]) -> frozenset[str]:
        return frozenset(fingerprint.place(result.path, result.path, config.anchor) for result in results)

    failed = places(result for result in report.results if result.failures)
    met = baseline.judged_by(config.anchor, lambda path: on - per_file.ignored(path), places(report.results), failed)
    return known.stale((finding for result in report.results for finding in result.baselined), met)


def check_text(data: bytes, path: str, config: Config, *, rules: Sequence[Rule] | None = None) -> tuple[Report, bytes]:
    """Check source that comes from elsewhere as if it were the file `path`; the report, and the bytes after fixing."""
    checker = Checker(config, all_rules() if rules is None else rules)
    result, fixed = checker.source(path, path, data)
    return Report((result,)), fixed


class Checker:
    """Checks one file after another with the same settings."""

    def __init__(self, config: Config, rules: Sequence[Rule]) -> None:
        self.config = config
        self._codes = tuple(rule.code for rule in rules)
        on = choose(config.select, config.ignore, config.extend_select, self._codes)
        self._rules = [rule for rule in rules if rule.code in on]
        self._triggers = {
            rule.code: tuple(frozenset(word.encode() for word in words) for words in rule.alternatives())
            for rule in self._rules
        }
        self._words = sorted({word for sets in self._triggers.values() for words in sets for word in words})
        self._cache = Cache(config.root, configuration.fingerprint(config)) if config.cache else None
        self._per_file = _PerFile(config, self._codes)
        self._project = Project()
        self._baseline = baseline.read(config.baseline) if config.baseline else None

    def file(self, candidate: Candidate) -> FileResult:
        """Check one file, and write it where it is fixed."""
        try:
            with open(candidate.path, "rb") as file:
                data = file.read()
        except OSError as error:
            return _failed(candidate.display, FailureKind.UNREADABLE, error.strerror or str(error))
        result, fixed = self.source(candidate.display, candidate.path, data)
        if fixed != data and not self.config.diff:
            try:
                files.write(candidate.path, fixed)
            except OSError as error:
                detail = f"the fixed file cannot be written: {error.strerror or error}"
                return _failed(candidate.display, FailureKind.UNREADABLE, detail)
        return result

    def source(self, display: str, path: str, data: bytes) -> tuple[FileResult, bytes]:
        """The result for the bytes of one file, and the bytes after fixing. Nothing is written."""
        ignored = self._per_file.ignored(path)
        on = [rule for rule in self._rules if rule.code not in ignored]
        present = {word for word in self._words if word in data}
        rules = [
            rule
            for rule in on
            if rule.code != suppress.UNUSED and any(words <= present for words in self._triggers[rule.code])
        ]
        codes = frozenset(rule.code for rule in on)
        if not rules and not (suppress.UNUSED in codes and suppress.may_report(data)):
            return FileResult(display), data
        from memlint.lint.torch_version import capped_torch, oldest_torch

        torch = self._target_torch() or oldest_torch(path)
        capped = None if self.config.target_torch is not None else capped_torch(path)
        cache = self._cache
        place = fingerprint.place(path, display, self.config.anchor)
        key = cache.key(data, f"{torch} {capped}", place) if cache is not None else ""
        known = cache.get(display, key, self._project.hold) if cache is not None else None
        if known is not None:
            if self._baseline is not None:
                new, old = self._baseline.split(known.findings)
                known = replace(known, findings=tuple(new), baselined=tuple(old))
            if not (self._fixing and any(map(self._applicable, known.findings))):
                return known, data
        self._project.begin()
        look = _Look(rules, codes, self._codes, AnalysisSettings(torch, capped, self._project), place)
        result, fixed = self._judged(display, data, look)
        if cache is not None and fixed == data and not result.failures:
            # a baseline changes more often than the code
            whole = tuple(sorted((*result.findings, *result.baselined), key=baseline.order))
            cache.put(replace(result, findings=whole, baselined=()), key, self._project.dependencies())
        return result, fixed

    @property
    def _fixing(self) -> bool:
        return self.config.fix or self.config.diff

    def _applicable(self, finding: Finding) -> bool:
        return fixer.applicable(finding, self.config.unsafe_fixes)

    def _target_torch(self) -> Version | None:
        if self.config.target_torch is None:
            return None
        from packaging.version import Version

        return Version(self.config.target_torch)

    def _judged(self, display: str, data: bytes, look: _Look) -> tuple[FileResult, bytes]:
        judge = _NewOnly(look, self._baseline)
        try:
            source = SourceFile(display, data)
            if self._fixing:
                done = fixer.fix(source, judge, unsafe=self.config.unsafe_fixes)
            else:
                done = fixer.Fixed(source, judge(source), 0)
        except SourceError as error:
            return _failed(display, error.kind, error.detail, error.line), data
        except Exception as error:  # a defect of ours must not take the other files' results away
            detail = f"{type(error).__name__}: {error} (a defect of memlint, please report it)"
            return _failed(display, FailureKind.RULE_CRASH, " ".join(detail.split())), data
        changed = done.source is not source
        findings = sorted(map(done.source.placed, done.checked.findings), key=baseline.order)
        known = sorted(map(done.source.placed, judge.known[done.source]), key=baseline.order)
        result = FileResult(
            display,
            tuple(findings),
            done.checked.failures,
            done.checked.suppressed,
            done.count,
            fixer.diff(display, source, done.source) if changed and self.config.diff else "",
            tuple(known),
        )
        return result, done.source.data


class _NewOnly:
    """A look that hides what the baseline holds from those who fix and report."""

    def __init__(self, look: _Look, known: baseline.Baseline | None) -> None:
        self._look = look
        self._rounds = baseline.Rounds(known) if known is not None else None
        #: what was hidden, by the source that was looked at
        self.known: dict[SourceFile, list[Finding]] = {}

    def __call__(self, source: SourceFile) -> Checked:
        checked = self._look(source)
        if self._rounds is None:
            self.known[source] = []
            return checked
        new, self.known[source] = self._rounds.split(checked.findings)
        return replace(checked, findings=tuple(new))


class _Look:
    """One look at a source: parse, rules, suppressions, fingerprints. Raises SourceError.

    `place` is how fingerprints name the file.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        codes: frozenset[str],
        known: Sequence[str],
        settings: AnalysisSettings,
        place: str,
    ) -> None:
        self._rules, self._codes, self._known, self._settings = rules, codes, known, settings
        self._place = place

    def __call__(self, source: SourceFile) -> Checked:
        if why := depth.complaint(source.text.encode("utf-8", "replace")):
            raise SourceError(FailureKind.TOO_DEEP, why)
        try:
            return self._look(source)
        except RecursionError:
            pass  # outside of the handler, which would keep the whole stack alive
        try:
            return with_large_stack(lambda: self._look(source))
        except RecursionError:
            raise SourceError(FailureKind.TOO_DEEP, "the code nests too deep to be analysed") from None

    def _look(self, source: SourceFile) -> Checked:
        findings, failures = analyse(source, self._rules, self._settings)
        # what a crashed rule would have found is not known, so nothing can be called unused
        active = frozenset[str]() if failures else self._codes
        kept, suppressed = suppress.suppress(source, findings, active=active, known=self._known)
        # what a rule raises may have several lines; a failure has one
        lines = tuple(replace(failure, detail=" ".join(failure.detail.split())) for failure in failures)
        return Checked(tuple(fingerprint.identified(kept, source.text, self._place)), lines, suppressed)


class _PerFile:
    """Codes that the configuration switches off in single files."""

    def __init__(self, config: Config, codes: Sequence[str]) -> None:
        root = str(config.root)
        self._entries = [
            (Patterns([pattern], root), choose(selectors, (), (), codes))
            for pattern, selectors in config.per_file_ignores
        ]

    def ignored(self, path: str) -> frozenset[str]:
        """The codes that are off in the file at `path`."""
        full = os.path.abspath(path)
        return frozenset[str]().union(*(off for patterns, off in self._entries if patterns.match_with_parents(full)))


def with_large_stack(function: Callable[[], T]) -> T:
    """Call `function` with a stack on which deep recursion fits.

    A Ctrl-C waits until the call is over, since a thread cannot be stopped. Raises RecursionError where the system
    gives no such stack, beside what the function raises.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    stack, limit = threading.stack_size(_STACK_BYTES), sys.getrecursionlimit()
    sys.setrecursionlimit(_RECURSION_LIMIT)
    try:
        thread = threading.Thread(target=run, name="memlint-deep")
        try:
            thread.start()
        except RuntimeError as error:  # a limit on memory or threads: then this much depth is too much
            raise RecursionError(str(error)) from error
        interrupted = _joined(thread)
    finally:
        sys.setrecursionlimit(limit)
        threading.stack_size(stack)
    if interrupted:
        raise KeyboardInterrupt
    if errors:
        raise errors[0]
    return results[0]


def _joined(thread: threading.Thread) -> bool:
    """Wait for a thread; whether Ctrl-C was pressed meanwhile."""
    interrupted = False
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt:
            interrupted = True
    return interrupted


def _failed(path: str, kind: FailureKind, detail: str, line: int | None = None) -> FileResult:
    return FileResult(path, failures=(Failure(path, kind, detail, line),))
