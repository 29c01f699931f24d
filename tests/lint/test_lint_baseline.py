"""Fingerprints that survive, and baselines: what is known, what is new, what is gone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from memlint.errors import ConfigError
from memlint.lint import baseline
from memlint.lint.engine import check, check_text
from memlint.lint.fingerprint import identified, place
from memlint.lint.model import Finding, Report, Severity, Span
from memlint.lint.source import SourceLines
from tests.fakes import RULES, config, notebook, places

FILE = "known.json"


def fingerprints(code: str, path: str = "a.py") -> list[str]:
    report, _ = check_text(code.encode(), path, config(Path.cwd()), rules=RULES)
    return [finding.fingerprint for finding in report.findings]


def keep(*paths: str) -> None:
    """Write a baseline of all that is found now."""
    settings = config(Path.cwd(), write_baseline=FILE)
    report = check(paths or (".",), settings, rules=RULES)
    Path(FILE).write_text(baseline.text(report.findings, SourceLines({}), settings.anchor), encoding="utf-8")


def run(*paths: str, **settings: object) -> Report:
    return check(paths or (".",), config(Path.cwd(), **{"baseline": FILE, **settings}), rules=RULES)


# -- fingerprints ------------------------------------------------------------------------------------------------------


def test_fingerprints_survive_moves_and_formatting(project: Path) -> None:
    (before,) = fingerprints("x = bad\n")
    assert fingerprints("# new\n\nif y:\n    x  =  bad\n") == [before]
    assert fingerprints("x = bad\r\n") == [before]
    assert fingerprints("x = bad + 1\n") != [before]
    assert fingerprints("x = bad\n", "b.py") != [before]
    assert fingerprints("x = grave\n") != [before]


def test_fingerprints_number_what_is_the_same(project: Path) -> None:
    one, two, three = fingerprints("bad\nbad\nx, bad\n")
    assert (one.partition(":")[0], one[-2:], two[-2:]) == (two.partition(":")[0], ":1", ":2")
    assert three.partition(":")[0] != one.partition(":")[0]
    assert len({*fingerprints("bad, bad\n")}) == 2


def test_fingerprints_of_cells_do_not_depend_on_their_numbers(project: Path) -> None:
    assert fingerprints(notebook("y = 1\n", "x = bad"), "n.ipynb") == fingerprints(notebook("x = bad"), "n.ipynb")


def test_fingerprints_name_files_from_the_anchor(project: Path) -> None:
    assert place("src/a.py", "src/a.py", str(project)) == "src/a.py"
    assert place("src/a.py", "src/a.py", str(project / "src")) == "a.py"
    assert place("src/a.py", "src/a.py", str(project / "ci")) == "../src/a.py"


def test_places_out_of_the_text_and_odd_text() -> None:
    finding = Finding("ML1", "n", Severity.NOTE, "m", "a.py", Span(9, 1, 9, 1))
    (made,) = identified([finding], "\ud800\n", "\udcff.py")
    assert made.fingerprint.endswith(":1")
    (made,) = identified([replace(finding, span=Span(1, 1, 1, 2))], "\ud800\n", "\udcff.py")
    assert made.fingerprint.endswith(":1")


def test_the_cache_keeps_files_apart_that_read_the_same(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name in ("one", "two"):
        (project / name).mkdir()
        (project / name / "a.py").write_text("bad\n", encoding="utf-8")
        monkeypatch.chdir(project / name)
        for _ in range(2):
            report = check(["a.py"], config(project, cache=True), rules=RULES)
            found += [finding.fingerprint for finding in report.findings]
    assert found[0] == found[1] != found[2] == found[3]


# -- known and new -----------------------------------------------------------------------------------------------------


def test_only_what_is_new_is_reported(project: Path) -> None:
    (project / "a.py").write_text("x = bad\ny = grave\n", encoding="utf-8")
    keep()
    report = run()
    assert (places(report), report.baselined, report.stale) == ([], 2, 0)
    (project / "a.py").write_text("# moved\n\nx = bad\nz = grave\n", encoding="utf-8")
    report = run()
    assert (places(report), report.baselined, report.stale) == ([("a.py", 4, "ML902")], 1, 1)


def test_duplicates_are_counted(project: Path) -> None:
    (project / "a.py").write_text("bad\nbad\n", encoding="utf-8")
    keep()
    (project / "a.py").write_text("bad\nbad\nbad\n", encoding="utf-8")
    report = run()
    assert (places(report), report.baselined, report.stale) == ([("a.py", 3, "ML901")], 2, 0)
    (project / "a.py").write_text("bad\n", encoding="utf-8")
    report = run()
    assert (places(report), report.baselined, report.stale) == ([], 1, 1)


def test_the_cache_knows_no_baseline(project: Path) -> None:
    (project / "a.py").write_text("bad\n", encoding="utf-8")
    keep()
    assert run(cache=True).baselined == 1
    assert run(cache=True).baselined == 1
    assert places(run(cache=True, baseline=None)) == [("a.py", 1, "ML901")]
    assert places(run(cache=True, baseline=None)) == [("a.py", 1, "ML901")]
    assert run(cache=True, fix=True).baselined == 1


def test_it_holds_from_any_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "src").mkdir()
    (project / "src/a.py").write_text("bad\n", encoding="utf-8")
    keep()
    monkeypatch.chdir(project / "src")
    report = run(baseline="../known.json")
    assert (places(report), report.baselined, report.stale) == ([], 1, 0)


def test_many_processes_know_it_too(project: Path) -> None:
    padding = "# padding\n" * 40_000
    for n in range(4):
        (project / f"m{n}.py").write_text(f"bad\n{padding}", encoding="utf-8")
    keep()
    (project / "m1.py").write_text(f"bad\nx = bad\n{padding}", encoding="utf-8")
    report = run(jobs=2)
    assert (places(report), report.baselined, report.stale) == ([("m1.py", 2, "ML901")], 4, 0)


def test_notebooks(project: Path) -> None:
    (project / "n.ipynb").write_text(notebook("x = bad"), encoding="utf-8")
    keep()
    (project / "n.ipynb").write_text(notebook("z = 1", "y = bad\nx = bad"), encoding="utf-8")
    report = run()
    assert [(f.cell, f.span.line) for f in report.findings] == [(2, 1)]
    assert report.baselined == 1


def test_stdin(project: Path) -> None:
    (project / "a.py").write_text("bad\n", encoding="utf-8")
    keep()
    report, _ = check_text(b"\nbad\nx = bad\n", "a.py", config(project, baseline=FILE), rules=RULES)
    assert (places(report), report.baselined) == ([("a.py", 3, "ML901")], 1)


# -- what is gone ------------------------------------------------------------------------------------------------------


def test_only_what_was_looked_for_can_be_gone(project: Path) -> None:
    for name in ("a", "b", "c"):
        (project / f"{name}.py").write_text("bad\ngrave\n", encoding="utf-8")
    keep()
    for name in ("a", "b"):
        (project / f"{name}.py").write_text("x = 1\n", encoding="utf-8")
    assert run().stale == 4
    assert run("c.py").stale == 0
    assert run("a.py").stale == 2
    assert run("a.py", select=("ML901",)).stale == 1
    assert run("a.py", per_file_ignores=(("a.py", ("ML901",)),)).stale == 1
    (project / "a.py").write_text("x = (\nbad", encoding="utf-8")
    assert run("a.py").stale == 0  # nobody knows
    (project / "b.py").unlink()
    assert run("c.py").stale == 2


# -- fixes -------------------------------------------------------------------------------------------------------------


def test_only_what_is_new_is_fixed(project: Path) -> None:
    (project / "a.py").write_text("bad\nbad\n", encoding="utf-8")
    keep()
    (project / "a.py").write_text("x = bad\nbad\nbad\nbad\n", encoding="utf-8")
    report = run(diff=True)
    assert report.results[0].diff.count("\n+good\n") == 1
    report = run(fix=True)
    assert (project / "a.py").read_text(encoding="utf-8") == "x = good\nbad\nbad\ngood\n"
    assert (places(report), report.baselined, report.stale) == ([], 2, 0)
    assert report.results[0].fixed == 2
    assert run(fix=True).results[0].fixed == 0


def test_a_known_finding_stays_known_when_a_fix_rewrites_its_line(project: Path) -> None:
    (project / "a.py").write_text("grave, bad\n", encoding="utf-8")
    settings = config(project, write_baseline=FILE, select=("ML902",))
    known = check(["a.py"], settings, rules=RULES).findings
    (project / FILE).write_text(baseline.text(known, SourceLines({}), settings.anchor), encoding="utf-8")
    report = run(fix=True, unsafe_fixes=True)
    assert (project / "a.py").read_text(encoding="utf-8") == "grave, good\n"
    assert (places(report), report.baselined, report.stale) == ([], 1, 0)


def test_a_refused_fix_hides_nothing_and_forgets_nothing(project: Path) -> None:
    (project / "a.py").write_text("bad\n", encoding="utf-8")
    keep()
    (project / "a.py").write_text("bad\nfragile\n", encoding="utf-8")
    report = run(fix=True)
    assert (places(report), report.baselined) == ([("a.py", 2, "ML905")], 1)
    assert report.all_failures


# -- the file ----------------------------------------------------------------------------------------------------------


def test_the_file_is_sorted_with_an_entry_a_line(project: Path) -> None:
    (project / "b.py").write_text("x  = bad  # ß\nbad\n\nbad\n", encoding="utf-8")
    (project / "a.py").write_text("grave, bad\n", encoding="utf-8")
    keep()
    text = (project / FILE).read_text(encoding="utf-8")
    entries = json.loads(text)["findings"]
    assert [(e["path"], e["code"], e["line"], e["count"]) for e in entries] == [
        ("a.py", "ML901", "grave, bad", 1),
        ("a.py", "ML902", "grave, bad", 1),
        ("b.py", "ML901", "bad", 2),
        ("b.py", "ML901", "x = bad # ß", 1),
    ]
    assert text.count("\n") == len(entries) + 5
    assert all(":" not in entry["fingerprint"] for entry in entries)
    keep("nowhere")
    assert (project / FILE).read_text(encoding="utf-8") == '{\n  "version": 1,\n  "findings": []\n}\n'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not JSON: "),
        ("\udcff", "not JSON: "),
        ("[" * 100_000, "not JSON: "),
        ("[]", "not written by `memlint check --write-baseline`"),
        ("{}", "not written by"),
        ('{"version": 1}', "not written by"),
        ('{"version": 2, "findings": []}', "version 2 is of a later memlint"),
        ('{"version": 1, "findings": [3]}', "entry 1: not an object"),
        (
            '{"version": 1, "findings": [{"path": "a", "code": "b", "line": "c", "fingerprint": "d", "count": true}]}',
            "entry 1: 'count' is missing or of the wrong type",
        ),
        ('{"version": 1, "findings": [{}]}', "entry 1: 'path' is missing or of the wrong type"),
    ],
)
def test_a_file_that_is_no_baseline_is_one_line(project: Path, text: str, complaint: str) -> None:
    (project / FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as error:
        run()
    assert str(error.value).startswith(f"baseline {FILE}: {complaint}")
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"baseline known\.json: No such file or directory"):
        run()
