"""Run memlint on the real-code corpus and compare what it says with what was read by hand.

    python tests/wild/run.py                     # every package of corpus.toml
    python tests/wild/run.py --only timm --show  # one package, with the code around what is new
    python tests/wild/run.py --write-template    # add what is new to labels.json, to be read (verdict null)
    python tests/wild/run.py --write-docs        # docs/precision.md, from the labels
    python tests/wild/run.py --fixes             # also fix a copy of each package, and look at what changed

Warnings and errors are compared, notes are only counted. A label is found again by package, path, code and the text of
its line, so that neither a new version of a package nor a few lines above it lose the reading; of equal lines the
nearest one is taken.

Exit 0: everything found is labelled, nothing true has vanished. Exit 1: a finding without a verdict, a failure on a
file that this Python can parse, or a labelled true finding that is no longer reported. Exit 2: the corpus could not be
fetched, or memlint gave no report.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

HERE = Path(__file__).resolve().parent

REPOSITORY = HERE.parents[1]
if str(REPOSITORY) not in sys.path:  # wherever the script is started from
    sys.path.insert(0, str(REPOSITORY))
from tests.wild import fixes  # noqa: E402

BUILD_CONSTRAINT = "setuptools<80"  # later ones dropped pkg_resources, which old setup.py files import
MAX_MEMBER_BYTES = 64 * 2**20
SHELL_VALUE = re.compile(r"[\w., ]+ = *[!%]")  # `files = !ls`
COMPARED = frozenset({"warning", "error"})


class TroubleError(Exception):
    """The run cannot go on; prints as one line, exit 2."""


@dataclass(frozen=True)
class Package:
    """One pinned sdist."""

    name: str
    version: str
    kind: str
    sha256: str | None = None

    @property
    def label(self) -> str:
        """The name of its folder under src/."""
        return f"{self.name}-{self.version}"


@dataclass(frozen=True)
class Label:
    """What a person said about one finding. `verdict` is None until somebody has read it."""

    package: str
    version: str
    path: str
    line: int
    code: str
    text: str
    verdict: bool | None = None
    why: str = ""
    cell: int | None = None

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What must agree for a finding to be this one."""
        return (self.package, self.path, self.code, self.text)

    @property
    def order(self) -> tuple[str, str, int, int, str]:
        """The order in labels.json."""
        return (self.package, self.path, self.cell or 0, self.line, self.code)

    @property
    def place(self) -> str:
        """path:line, or path:cell N:line in a notebook."""
        cell = "" if self.cell is None else f"cell {self.cell}:"
        return f"{self.path}:{cell}{self.line}"

    def as_json(self) -> dict[str, object]:
        """The entry in labels.json."""
        entry: dict[str, object] = {
            "package": self.package,
            "version": self.version,
            "path": self.path,
            "line": self.line,
            "code": self.code,
            "text": self.text,
            "verdict": self.verdict,
            "why": self.why,
        }
        if self.cell is not None:
            entry["cell"] = self.cell
        return entry


@dataclass(frozen=True)
class Found:
    """One warning or error that memlint gave, as the label it would need, and the label that it has."""

    label: Label
    severity: str
    name: str
    message: str
    known: Label | None = None

    @property
    def verdict(self) -> bool | None:
        """True, False, or None where nobody has read it."""
        return None if self.known is None else self.known.verdict


@dataclass(frozen=True)
class Outcome:
    """All that one package gave."""

    package: Package
    found: tuple[Found, ...] = ()
    vanished: tuple[Label, ...] = ()
    bad_failures: tuple[str, ...] = ()
    fair_failures: tuple[str, ...] = ()
    notes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def count(self, verdict: bool | None) -> int:
        """How many findings carry this verdict."""
        return sum(f.verdict is verdict for f in self.found)

    @property
    def failed(self) -> bool:
        """Whether this package makes the run exit 1."""
        return bool(self.count(None) or self.bad_failures or any(label.verdict is True for label in self.vanished))


# -- the corpus ---------------------------------------------------------------------------------------------------


def read_corpus(path: Path) -> list[Package]:
    """The packages that corpus.toml lists. Raises TroubleError where it cannot be read."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        return [
            Package(str(p["name"]), str(p["version"]), str(p["kind"]), p.get("sha256"))
            for p in table.get("package", [])
        ]
    except (OSError, tomllib.TOMLDecodeError, KeyError) as error:
        raise TroubleError(f"{path}: {error!r}") from error


def normalised(name: str) -> str:
    """A project name as archives may spell it, reduced to one spelling."""
    return name.lower().replace("_", "-").replace(".", "-")


def find_archive(folder: Path, package: Package) -> Path | None:
    """The archive of `package` in `folder`, however its file spells the name."""
    wanted = normalised(package.label)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        for suffix in (".tar.gz", ".tgz", ".tar.bz2", ".zip"):
            if path.name.endswith(suffix) and normalised(path.name[: -len(suffix)]) == wanted:
                return path
    return None


def download(package: Package, cache: Path) -> Path:
    """The archive of `package` in `cache`, fetched by pip where it is not there yet."""
    archive = find_archive(cache, package)
    if archive is None:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".download-") as folder:
            constraint = Path(folder, "constraint.txt")
            constraint.write_text(BUILD_CONSTRAINT + "\n", encoding="utf-8")
            # the first name is for pip before 25.3, the second for later ones; each leaves the other alone
            environment = {**os.environ, "PIP_CONSTRAINT": str(constraint), "PIP_BUILD_CONSTRAINT": str(constraint)}
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
            command += [
                "--no-deps",
                "--no-binary",
                package.name,
                "--dest",
                folder,
                f"{package.name}=={package.version}",
            ]
            run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            fetched = find_archive(Path(folder), package)
            if run.returncode or fetched is None:
                said = (run.stderr.strip() or run.stdout.strip() or "no sdist came").splitlines()[-1]
                raise TroubleError(f"{package.name}=={package.version} could not be downloaded: {said}")
            archive = cache / fetched.name
            os.replace(fetched, archive)
    if package.sha256 is not None:
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        if digest != package.sha256:
            raise TroubleError(f"{archive}: sha256 is {digest}, corpus.toml says {package.sha256}")
    return archive


def members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Every regular file of an archive: its name and its bytes. Links and devices are left out."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as packed:
            for entry in packed.infolist():
                is_link = (entry.external_attr >> 16) & 0o170000 == 0o120000
                if not entry.is_dir() and not is_link and entry.file_size <= MAX_MEMBER_BYTES:
                    yield entry.filename, packed.read(entry)
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.isreg() and member.size <= MAX_MEMBER_BYTES else None
            if stream is not None:
                yield member.name, stream.read()


def extract(archive: Path, target: Path) -> None:
    """Unpack `archive` to `target`, without the archive's own top folder; all of it or nothing.

    Only plain files below the top folder are written: no links, no absolute names, no way out by `..`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=".extract-"))
    try:
        for name, data in members(archive):
            parts = [part for part in PurePosixPath(name).parts if part != "."]
            if name.startswith("/") or ".." in parts or "\\" in name or ":" in name.split("/")[0] or len(parts) < 2:
                continue
            path = folder.joinpath(*parts[1:])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        folder.chmod(0o755)
        os.replace(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def source(package: Package, cache: Path) -> Path:
    """The folder with the extracted sources of `package`."""
    target = cache / "src" / package.label
    if not target.is_dir():
        try:
            extract(download(package, cache), target)
        except (OSError, tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
            raise TroubleError(f"{package.label} could not be extracted: {error}") from error
    return target


# -- memlint ------------------------------------------------------------------------------------------------------


def default_tool() -> list[str]:
    """The `memlint` of this Python, else the one on PATH."""
    beside = Path(sys.executable).parent / "memlint"
    command = str(beside) if beside.exists() else shutil.which("memlint")
    if command is None:
        raise TroubleError("there is no `memlint` command: install the project, or name one with --tool")
    return [command]


def check(tool: Sequence[str], roots: Sequence[Path], jobs: int | None, more: Sequence[str] = ()) -> dict[str, Any]:
    """memlint's JSON report on files and folders, with `more` options. Raises TroubleError where it gives none."""
    command = [*tool, "check", "--isolated", "--no-cache", "--select", "ALL", "--output-format", "json", "--exit-zero"]
    command += [*more] if jobs is None else [*more, "--jobs", str(jobs)]
    try:
        run = subprocess.run(
            [*command, *map(str, roots)], capture_output=True, text=True, encoding="utf-8", check=False
        )
    except OSError as error:
        raise TroubleError(f"{shlex.join(tool)}: {error}") from error
    try:
        report = json.loads(run.stdout)
        if not isinstance(report, dict) or report.get("version") != 1:
            raise ValueError("the report is not version 1")
        missing = {"findings", "failures"} - report.keys()
        if missing:
            raise ValueError(f"the report has no {', '.join(sorted(missing))}")
    except ValueError as error:
        said = (run.stderr.strip() or run.stdout.strip() or "nothing").splitlines()[-1]
        raise TroubleError(f"memlint gave no report on {roots[0]} (exit {run.returncode}, {error}): {said}") from error
    return report


class Sources:
    """The lines of the files of one extracted package, read once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lines: dict[tuple[str, int | None], list[str]] = {}

    def relative(self, path: str) -> str:
        """`path` as memlint printed it, as a path inside the sdist."""
        full = Path(path) if Path(path).is_absolute() else Path.cwd() / path
        try:
            return full.resolve().relative_to(self.root.resolve()).as_posix()
        except ValueError:
            return PurePosixPath(path).as_posix()

    def lines(self, path: str, cell: int | None) -> list[str]:
        """The lines of a file, or of one cell of a notebook (counted from 1, over the code cells)."""
        key = (path, cell)
        if key not in self._lines:
            try:
                # Python's and memlint's idea of a line, which is not str.splitlines': form feeds end none
                text = (self.root / path).read_text(encoding="utf-8", errors="replace")
                if cell is not None:
                    code = [each for each in json.loads(text)["cells"] if each["cell_type"] == "code"]
                    text = cell_source(code[cell - 1])
            except (OSError, ValueError, LookupError, TypeError):
                text = ""
            self._lines[key] = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        return self._lines[key]

    def text(self, path: str, cell: int | None, line: int) -> str:
        """One line, stripped; empty where there is none."""
        lines = self.lines(path, cell)
        return lines[line - 1].strip() if 1 <= line <= len(lines) else ""


def cell_source(cell: dict[str, Any]) -> str:
    """The source of a notebook cell, which may be text or a list of lines."""
    text = cell["source"]
    return text if isinstance(text, str) else "".join(text)


def notebook_code(data: bytes) -> str:
    """The code of a notebook as one module: lines for the shell and magics become `pass`."""
    lines: list[str] = []
    for cell in json.loads(data)["cells"]:
        code = cell_source(cell)
        if cell["cell_type"] != "code" or code.lstrip().startswith("%%"):
            continue
        for line in code.split("\n"):
            bare = line.lstrip()
            magic = bare.startswith(("%", "!", "?")) or bare.rstrip().endswith("?") or SHELL_VALUE.match(bare)
            lines.append(line[: len(line) - len(bare)] + "pass" if magic else line)
    return "\n".join(lines)


def parses(path: Path) -> bool:
    """Whether the running Python can parse the file, or the notebook's cells as one module."""
    try:
        data = path.read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(notebook_code(data) if path.suffix == ".ipynb" else data)
    except (SyntaxError, ValueError, LookupError, TypeError, RecursionError, MemoryError, OSError):
        return False
    return True


# -- comparing ----------------------------------------------------------------------------------------------------


def read_labels(path: Path) -> list[Label]:
    """The labels of labels.json; none where there is no such file. Raises TroubleError for a broken one."""
    if not path.exists():
        return []
    try:
        labels = [Label(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise TroubleError(f"{path}: {error}") from error
    for label in labels:
        if label.verdict is not None and not label.why:
            raise TroubleError(f"{path}: {label.package} {label.place} {label.code} has a verdict, but no `why`")
    return labels


def write_labels(path: Path, labels: Iterable[Label]) -> None:
    """Write labels.json whole, in its order."""
    entries = [label.as_json() for label in sorted(labels, key=lambda label: label.order)]
    new = path.with_suffix(".new")
    new.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(new, path)


def match(found: Sequence[Found], labels: Sequence[Label]) -> tuple[tuple[Found, ...], tuple[Label, ...]]:
    """Give each finding the label that fits, each label to one finding; also the labels that are left over.

    Labels fit by package, path, code and line text; among several equal lines the nearest pair goes first.
    """
    waiting: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for number, label in enumerate(labels):
        waiting[label.key].append(number)
    pairs = sorted(
        (abs(labels[number].line - one.label.line), labels[number].cell != one.label.cell, index, number)
        for index, one in enumerate(found)
        for number in waiting.get(one.label.key, ())
    )
    known: dict[int, int] = {}
    taken: set[int] = set()
    for _, _, index, number in pairs:
        if index not in known and number not in taken:
            known[index] = number
            taken.add(number)
    matched = tuple(replace(one, known=labels[known[i]]) if i in known else one for i, one in enumerate(found))
    return matched, tuple(label for number, label in enumerate(labels) if number not in taken)


def judge(package: Package, root: Path, report: dict[str, Any], labels: Sequence[Label], seconds: float) -> Outcome:
    """Compare one report with the labels of its package."""
    sources = Sources(root)
    found: list[Found] = []
    notes: Counter[str] = Counter()
    for finding in report["findings"]:
        code, severity = str(finding["code"]), str(finding["severity"])
        if severity not in COMPARED:
            notes[code] += 1
            continue
        path, line, cell = sources.relative(finding["path"]), int(finding["line"]), finding.get("cell")
        text = sources.text(path, cell, line)
        label = Label(package.name, package.version, path, line, code, text, cell=cell)
        found.append(Found(label, severity, str(finding["name"]), str(finding["message"])))
    matched, vanished = match(found, [label for label in labels if label.package == package.name])
    bad: list[str] = []
    fair: list[str] = []
    for failure in report["failures"]:
        path = sources.relative(str(failure["path"]))
        where = f"{path}:{failure['line']}" if failure.get("line") else path
        said = f"{where}: {failure['kind']}: {failure['detail']}"
        (bad if failure["kind"] == "rule-crash" or parses(root / path) else fair).append(said)
    return Outcome(package, matched, vanished, tuple(bad), tuple(fair), notes, seconds)


# -- saying it ----------------------------------------------------------------------------------------------------


def frame(lines: Sequence[str], line: int, around: int) -> Iterator[str]:
    """The lines around `line`, numbered, with that one marked."""
    for number in range(max(1, line - around), min(len(lines), line + around) + 1):
        yield f"    {'>' if number == line else ' '}{number:5} | {lines[number - 1]}"


def describe(outcome: Outcome) -> str:
    """The one line about a package."""
    vanished = Counter(label.verdict for label in outcome.vanished)
    parts = [
        f"{len(outcome.found):4} found: {outcome.count(True)} true, {outcome.count(False)} false,"
        f" {outcome.count(None)} to read",
        f"{outcome.notes.total()} notes",
    ]
    parts += [f"{len(outcome.bad_failures)} FAILURES"] if outcome.bad_failures else []
    parts += [f"{len(outcome.fair_failures)} files no Python here parses"] if outcome.fair_failures else []
    parts += [f"{vanished[True]} true VANISHED"] if vanished[True] else []
    parts += [f"{vanished[False]} false gone"] if vanished[False] else []
    return f"{outcome.package.label:36} {'; '.join(parts)} ({outcome.seconds:.1f} s)"


def details(outcome: Outcome, root: Path, show: bool, around: int) -> Iterator[str]:
    """What is new, what vanished and what failed in a package, a line each, with code where asked for."""
    sources = Sources(root)
    for one in outcome.found:
        if one.verdict is None:
            yield f"  to read   {one.label.place} {one.label.code} {one.severity}: {one.message}"
            if show:
                yield from frame(sources.lines(one.label.path, one.label.cell), one.label.line, around)
    for label in outcome.vanished:
        word = {True: "VANISHED", False: "gone", None: "gone unread"}[label.verdict]
        why = f" ({label.verdict}: {label.why})" if label.verdict is not None else ""
        yield f"  {word:9} {label.place} {label.code} {label.text}{why}"
    for failure in outcome.bad_failures:
        yield f"  FAILURE   {failure}"


@dataclass(frozen=True)
class Precision:
    """What was read of one rule, or of all."""

    code: str
    name: str
    true: int
    false: int
    unread: int

    @property
    def percent(self) -> str:
        """How many of those read are true, in words."""
        read = self.true + self.false
        return f"{100 * self.true / read:.1f} %" if read else "-"


def precision(outcomes: Sequence[Outcome]) -> list[Precision]:
    """Precision of every rule that found something, then of all together."""
    counts: dict[str, Counter[bool | None]] = defaultdict(Counter)
    names: dict[str, str] = {}
    for outcome in outcomes:
        for one in outcome.found:
            counts[one.label.code][one.verdict] += 1
            names[one.label.code] = one.name
    rows = [Precision(code, names[code], n[True], n[False], n[None]) for code, n in sorted(counts.items())]
    everything = [sum(n[verdict] for n in counts.values()) for verdict in (True, False, None)]
    return [*rows, Precision("all", "", *everything)]


def table(rows: Sequence[Precision]) -> Iterator[str]:
    """The precision table for the terminal."""
    yield f"{'rule':<8}{'':<30}{'true':>6}{'false':>7}{'unread':>8}{'precision':>11}"
    for row in rows:
        yield f"{row.code:<8}{row.name:<30}{row.true:>6}{row.false:>7}{row.unread:>8}{row.percent:>11}"


#: what the linter of the day said on packages that nobody had looked at: packages, findings, true ones; findings and
#: true ones without ML203 (bare or late `zero_grad`). Those of the first four lots were named by hand, those of the
#: others drawn at random. Of each lot the kinds of false alarms were then fixed, so these figures are history: they
#: cannot be measured again.
UNSEEN = (
    (48, 48, 34, 19, 19),
    (73, 36, 32, 20, 16),
    (155, 191, 159, 106, 79),
    (259, 130, 105, 74, 49),
    (215, 54, 44, 30, 25),
    (498, 144, 127, 105, 89),
    (323, 132, 99, 97, 64),
)
#: findings and true ones by rule, in the lots that were drawn at random (the last three)
UNSEEN_RULES = {
    "ML101": (20, 17),
    "ML102": (28, 11),
    "ML105": (5, 3),
    "ML106": (2, 0),
    "ML107": (6, 4),
    "ML108": (2, 2),
    "ML109": (14, 14),
    "ML110": (10, 4),
    "ML111": (1, 1),
    "ML113": (6, 0),
    "ML201": (5, 5),
    "ML202": (2, 1),
    "ML203": (98, 92),
    "ML303": (6, 5),
    "ML304": (2, 2),
    "ML401": (64, 63),
    "ML501": (18, 13),
    "ML602": (4, 1),
    "ML603": (2, 2),
    "ML703": (35, 30),
}


def unseen() -> Iterator[str]:
    """The part of docs/precision.md about code that the linter was not fitted to."""
    packages, found, true = (sum(lot[column] for lot in UNSEEN) for column in (0, 1, 2))
    yield from (
        "## On code that nobody had looked at",
        "",
        "The tables above are what is left after the false alarms in these packages were fixed, kind by kind, so they",
        "say little about your code. So packages that nobody had looked at were checked and read, lot by lot, with",
        "memlint as it was that day. Those of lots 1 to 4 are known names; those of later lots were drawn at random",
        "from all of PyPI that sounds of deep learning, and kept if one of their files trains or evaluates a model.",
        "Each kind of false alarm was fixed afterwards and became a fixture.",
        "",
        "| lot | packages | warnings and errors | true | | without ML203 | true | |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    )
    for number, (of, every, right, rest, right_rest) in enumerate(UNSEEN, 1):
        yield (
            f"| {number} | {of} | {every} | {right} | {100 * right / every:.0f} % | {rest} | {right_rest} | "
            f"{100 * right_rest / rest:.0f} % |"
        )
    yield from (
        "",
        f"Together {true} of {found} are true ({100 * true / found:.0f} %), one finding in {packages / found:.1f}",
        "packages. What is false comes in kinds, several findings of a package at a time. The last three lots by rule,",
        "as they were found, before the kinds were fixed:",
        "",
        "| rule | warnings and errors | true |",
        "| --- | ---: | ---: |",
    )
    for code, (every, right) in UNSEEN_RULES.items():
        yield f"| {code} | {every} | {right} |"


def docs(outcomes: Sequence[Outcome]) -> str:
    """docs/precision.md."""
    rows = precision(outcomes)
    lines = [
        "# Precision on real code",
        "",
        f"Every warning and error that `memlint check --select ALL` gives on {len(outcomes)} packages from PyPI,"
        " read by hand.",
        "Notes are advice and are not counted. The verdicts, each with its reason, are in `tests/wild/labels.json`;",
        "this page is written from them by `python tests/wild/run.py --write-docs`.",
        "",
        "| rule | name | true | false | precision |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    lines += [f"| {row.code} | {row.name} | {row.true} | {row.false} | {row.percent} |" for row in rows]
    lines += ["", "| package | kind | true | false | notes |", "| --- | --- | ---: | ---: | ---: |"]
    lines += [
        f"| {o.package.name} {o.package.version} | {o.package.kind} | {o.count(True)} | {o.count(False)}"
        f" | {o.notes.total()} |"
        for o in outcomes
    ]
    return "\n".join([*lines, "", *unseen()]) + "\n"


def template(labels: Sequence[Label], outcomes: Sequence[Outcome], prune: bool) -> list[Label]:
    """The labels with all that is new added unread and with the places of what has moved; pruned of what vanished."""
    kept: list[Label] = []
    judged = {outcome.package.name for outcome in outcomes}
    for outcome in outcomes:
        for one in outcome.found:
            known = one.known or one.label
            kept.append(replace(one.label, verdict=known.verdict, why=known.why))
        kept += [] if prune else outcome.vanished
    return kept + [label for label in labels if label.package not in judged]


# -- the command --------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description="Run memlint on the pinned real-code corpus and compare with the labels."
    )
    made.add_argument("--only", nargs="+", metavar="NAME", default=[], help="check only these packages")
    made.add_argument("--cache", type=Path, default=HERE / "downloads", help="folder of archives and sources")
    made.add_argument("--corpus", type=Path, default=HERE / "corpus.toml", help="the list of packages")
    made.add_argument("--labels", type=Path, default=HERE / "labels.json", help="the list of what was read")
    made.add_argument("--tool", help="the command to run instead of this environment's memlint")
    made.add_argument("--jobs", type=int, help="how many processes memlint uses")
    made.add_argument("--show", action="store_true", help="show the code around findings that nobody has read")
    made.add_argument("--context", type=int, default=6, metavar="N", help="lines of code on each side (6)")
    made.add_argument("--fixes", action="store_true", help="also fix a copy of each package, and look at what changed")
    made.add_argument("--download-only", action="store_true", help="fetch and extract, check nothing")
    made.add_argument("--write-template", action="store_true", help="add what is new to the labels, with verdict null")
    made.add_argument("--prune", action="store_true", help="with --write-template: drop the labels that vanished")
    made.add_argument(
        "--write-docs",
        type=Path,
        nargs="?",
        const=REPOSITORY / "docs" / "precision.md",
        metavar="FILE",
        help="write the precision page (docs/precision.md)",
    )
    return made


def run(options: argparse.Namespace) -> int:
    """Do what the command line asks; the exit code."""
    packages = read_corpus(options.corpus)
    unknown = set(options.only) - {package.name for package in packages}
    if unknown:
        raise TroubleError(f"not in {options.corpus.name}: {', '.join(sorted(unknown))}")
    packages = [package for package in packages if not options.only or package.name in options.only]
    if options.prune and not options.write_template:
        raise TroubleError("--prune goes with --write-template")
    if options.write_docs and options.only:
        raise TroubleError("--write-docs needs the whole corpus, not --only")
    labels = read_labels(options.labels)
    tool = [] if options.download_only else shlex.split(options.tool) if options.tool else default_tool()

    outcomes: list[Outcome] = []
    bad_fixes = 0
    for package in packages:
        root = source(package, options.cache)
        if options.download_only:
            print(package.label, flush=True)
            continue
        start = time.perf_counter()
        report = check(tool, [root], options.jobs)
        outcome = judge(package, root, report, labels, time.perf_counter() - start)
        outcomes.append(outcome)
        print(describe(outcome), flush=True)
        for line in details(outcome, root, options.show, options.context):
            print(line, flush=True)
        if options.fixes:
            said = list(fixes.problems(root, report, functools.partial(_checked, tool, options.jobs)))
            bad_fixes += len(said)
            for line in said:
                print(f"  BAD FIX   {line}", flush=True)
    if options.download_only:
        return 0

    print("", *table(precision(outcomes)), sep="\n")
    if options.write_template:
        write_labels(options.labels, template(labels, outcomes, options.prune))
        print(f"\nwrote {options.labels}")
    if options.write_docs:
        unread = sum(outcome.count(None) for outcome in outcomes)
        if unread:
            raise TroubleError(f"{options.write_docs} is not written: {unread} findings have not been read")
        options.write_docs.write_text(docs(outcomes), encoding="utf-8")
        print(f"\nwrote {options.write_docs}")
    if options.fixes:
        print(f"\nfixes: {bad_fixes} problems in {len(outcomes)} packages")
    return 1 if bad_fixes or any(outcome.failed for outcome in outcomes) else 0


def _checked(tool: Sequence[str], jobs: int | None, roots: list[Path], more: list[str]) -> dict[str, Any]:
    return check(tool, roots, jobs, more)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run with `arguments` (the process's own where None); the exit code."""
    try:
        return run(parser().parse_args(arguments))
    except TroubleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
