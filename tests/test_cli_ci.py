"""The command line in CI: a report in a file beside the text, and baselines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from memlint import cli
from memlint.config import load
from memlint.errors import ConfigError
from memlint.lint import catalog, engine
from memlint.reporters import ALL_FORMATS, CI_FORMATS
from tests.fakes import RULES

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("--fix", ...)` is `memlint check --fix ...` with the fake rules: (exit code, stdout, stderr)."""
    monkeypatch.setattr(catalog, "all_rules", lambda: RULES)
    monkeypatch.setattr(engine, "all_rules", lambda: RULES)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["check", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def write(name: str, text: str) -> None:
    Path(name).write_text(text, encoding="utf-8")


# -- formats -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CI_FORMATS)
def test_a_ci_format_in_a_file_leaves_the_terminal_to_the_text(run: Run, name: str) -> None:
    write("a.py", "bad, hmm\n")
    code, alone, err = run("--output-format", name)
    assert (code, err) == (1, "")
    assert "Found 1 warning" not in alone
    code, out, err = run("--output-format", name, "--output-file", "report")
    assert (code, out, err) == (1, run()[1], "")
    assert Path("report").read_text(encoding="utf-8") == alone
    code, out, err = run("--output-format", name, "-o", "no/such/report")
    assert (code, out, err) == (2, run()[1], "error: --output-file no/such/report: No such file or directory\n")


def test_colours_stay_out_of_the_file(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    write("a.py", "bad\n")
    out = run("--output-format", "junit", "-o", "report")[1]
    assert "\x1b[" in out
    assert "\x1b" not in Path("report").read_text(encoding="utf-8")


def test_sarif_carries_the_rules_and_the_exit_code(run: Run) -> None:
    write("a.py", "bad\n")
    (content,) = json.loads(run("--output-format", "sarif")[1])["runs"]
    (rule,) = content["tool"]["driver"]["rules"]
    assert rule["help"]["text"].startswith("ML901 bad-word (warning)\n\n`bad`, which a safe fix makes `good`.")
    assert rule["help"]["markdown"].startswith("`bad`, which a safe fix makes `good`.\n\nFound:\n\n```python\n")
    assert rule["shortDescription"] == {"text": "`bad`, which a safe fix makes `good`."}
    assert content["invocations"][0]["exitCode"] == 1
    (content,) = json.loads(run("--output-format", "sarif", "--exit-zero")[1])["runs"]
    assert content["invocations"][0]["exitCode"] == 0


def test_junit_fails_what_fails_the_run(run: Run) -> None:
    write("a.py", "bad\n")
    assert 'failures="1"' in run("--output-format", "junit")[1]
    assert 'failures="0"' in run("--output-format", "junit", "--fail-on", "error")[1]


def test_a_format_can_be_configured(project: Path) -> None:
    for name in CI_FORMATS:
        write("memlint.toml", f'output-format = "{name}"\n')
        assert load(["."], (), ALL_FORMATS).output_format == name


def test_text_needs_no_ci_format_and_no_hash_of_theirs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CI_FORMATS:
        monkeypatch.delitem(sys.modules, f"memlint.reporters.{name}", raising=False)
    write("a.py", "bad\n")
    run()
    assert not any(f"memlint.reporters.{name}" in sys.modules for name in CI_FORMATS)


# -- baselines ---------------------------------------------------------------------------------------------------------


def test_the_life_of_a_baseline(run: Run) -> None:
    write("a.py", "bad\nhmm\ngrave\n")
    assert run("--write-baseline", "known.json") == (
        0,
        "All checks passed (1 file checked, 3 in the baseline).\n",
        "wrote 3 findings in 1 file to known.json\n",
    )
    assert run()[0] == 1
    assert run("--baseline", "known.json")[:2] == (0, "All checks passed (1 file checked, 3 in the baseline).\n")
    write("a.py", "\nx = bad\nbad\nhmm\n")
    code, out, err = run("--baseline", "known.json")
    assert code == 1
    assert "--> a.py:2:5" in out
    assert "Found 1 warning (1 file checked, 2 in the baseline)." in out
    assert err == "note: baseline known.json: 1 finding no longer there (--write-baseline writes it anew)\n"
    code, out, _ = run("--baseline", "known.json", "--fix")
    assert (code, Path("a.py").read_text(encoding="utf-8")) == (0, "\nx = good\nbad\nhmm\n")
    assert out == "Fixed 1 finding.\nAll checks passed (1 file checked, 2 in the baseline).\n"


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_known_findings_are_in_no_format(run: Run, name: str) -> None:
    write("a.py", "bad\n")
    run("--write-baseline", "known.json")
    write("a.py", "bad\nx = grave\n")
    out = run("--baseline", "known.json", "--output-format", name)[1]
    assert "ML902" in out
    assert "ML901" not in out
    if name == "json":
        assert {key: json.loads(out)["summary"][key] for key in ("baselined", "stale")} == {"baselined": 1, "stale": 0}


def test_a_configured_baseline(run: Run, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("memlint.toml", 'baseline = "ci/known.json"\n')
    Path("ci").mkdir()
    Path("src").mkdir()
    write("src/a.py", "bad\n")
    code, _, err = run()
    assert (code, err) == (2, f"error: baseline {project / 'ci/known.json'}: No such file or directory\n")
    assert run("--write-baseline", "ci/known.json")[0] == 0
    assert run()[0] == 0
    assert run("--no-baseline")[0] == 1
    assert run("--isolated")[0] == 1
    monkeypatch.chdir("src")
    assert run()[0] == 0
    write("../memlint.toml", "baseline = 3\n")
    with pytest.raises(ConfigError, match="baseline: must be the path of a file"):
        load(["."], (), ALL_FORMATS)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--baseline", "gone.json"], "error: baseline gone.json: No such file or directory\n"),
        (["--baseline", "a.py"], "error: baseline a.py: not JSON: "),
        (["--write-baseline", "no/such.json"], "error: --write-baseline no/such.json: No such file or directory\n"),
        (["--write-baseline", "k.json", "--diff"], "error: --write-baseline does not go with --diff"),
        (["--write-baseline", "k.json", "-"], "error: --write-baseline does not go with standard input"),
        (["--write-baseline", "k.json", "--baseline", "k.json"], "error: --write-baseline writes all that is found"),
    ],
)
def test_bad_usage_is_one_clear_line_and_exit_2(run: Run, arguments: list[str], complaint: str) -> None:
    write("a.py", "bad\n")
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(complaint)
    assert err.count("\n") == 1


def test_a_baseline_of_files_that_cannot_be_checked_is_no_success(run: Run) -> None:
    write("a.py", "bad\n")
    write("b.py", "bad(\n")
    code, out, err = run("--write-baseline", "known.json")
    assert code == 2
    assert "cannot check b.py" in out
    assert err == "wrote 1 finding in 1 file to known.json (files that could not be checked are missing)\n"
