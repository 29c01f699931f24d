"""The command line, from arguments to exit codes."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import memlint
from memlint import cli, progress
from memlint.lint import catalog
from tests.fakes import RULES, notebook

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("check", ...)` gives (exit code, stdout, stderr), with the fake rules."""
    from memlint.lint import engine

    monkeypatch.setattr(catalog, "all_rules", lambda: RULES)
    monkeypatch.setattr(engine, "all_rules", lambda: RULES)

    def call(*arguments: str, stdin: bytes | None = None) -> tuple[int, str, str]:
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        try:
            code = cli.main([*arguments])
        except SystemExit as error:
            code = int(error.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


def write(**files: str) -> None:
    for name, text in files.items():
        Path(f"{name}.py").write_text(text, encoding="utf-8")


# -- exit codes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "arguments", "status"),
    [
        ("x = 1\n", [], 0),
        ("bad\n", [], 1),
        ("bad\n", ["--exit-zero"], 0),
        ("bad\n", ["--fail-on", "error"], 0),
        ("grave\n", ["--fail-on", "error"], 1),
        ("hmm\n", [], 0),
        ("hmm\n", ["--fail-on", "note"], 1),
        ("bad(\n", [], 2),
        ("bad(\n", ["--exit-zero"], 2),
        ("bad, boom\n", [], 2),
        ("bad\n", ["--fix"], 0),
        ("bad\n", ["--diff"], 1),
        ("grave\n", ["--diff"], 0),
        ("grave\n", ["--diff", "--unsafe-fixes"], 1),
        ("fragile\n", ["--diff"], 2),
        ("grave\n", ["--fix"], 1),
        ("grave\n", ["--fix", "--unsafe-fixes"], 0),
        ("bad\n", ["--ignore", "ML901"], 0),
        ("bad\n", ["--ignore", "ML9", "--extend-select", "ML901"], 1),
        ("bad\n", ["--select", "ML902,ML903"], 0),
        ("bad\n", ["--select", "ML902", "--select", "ML901"], 1),
        ("bad\n", ["--select", "ml901"], 1),
    ],
)
def test_exit_codes(run: Run, code: str, arguments: list[str], status: int) -> None:
    write(a=code)
    assert run("check", *arguments)[0] == status


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["check", "--select", "ML999"], "error: --select: unknown rule 'ML999'; did you mean ML90"),
        (["check", "--ignore", "zzz"], "error: --ignore: unknown rule 'zzz'; `memlint rules` lists the codes"),
        (["check", "--extend-select", ","], ""),
        (["check", "--target-torch", "two"], "argument --target-torch: must be a version"),
        (["check", "--fail-on", "never"], "argument --fail-on: must be one of note, warning, error"),
        (["check", "--jobs", "0"], "argument -j/--jobs: must be a whole number, 1 or more"),
        (["check", "--jobs", "x"], "argument -j/--jobs: must be a whole number, 1 or more"),
        (["check", "--output-format", "xml"], "invalid choice: 'xml'"),
        (["check", "--config", "nowhere.toml"], "error: nowhere.toml: No such file or directory"),
        (["check", "--isolated", "--config", "x.toml"], "error: --isolated and --config contradict each other"),
        (["check", "--statistics", "--output-format", "json"], "error: --statistics goes with text and concise"),
        (["check", "--stdin-filename", "a.py"], "error: --stdin-filename goes with the path `-`"),
        (["check", "-", "a.py"], "error: `-` (standard input) goes alone"),
        (["check", "--exclude", "!"], "error: bad pattern '!'"),
        (["check", "--output-file", "no/such/folder"], "error: --output-file no/such/folder: No such file"),
        (["check", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["explain", "ML9O1"], "error: unknown rule 'ML9O1'; did you mean ML901?"),
        (["explain", "grave-wort"], "did you mean grave-word?"),
        (["explain", "???"], "`memlint rules` lists them"),
        ([], "the following arguments are required: COMMAND"),
        (["cheque"], "invalid choice"),
    ],
)
def test_bad_usage_is_one_clear_line_and_exit_2(run: Run, arguments: list[str], complaint: str) -> None:
    write(a="x = 1\n")
    code, _, err = run(*arguments)
    if complaint:
        assert code == 2
        assert complaint in err
        assert "Traceback" not in err
    else:
        assert code == 0


def test_several_mistakes_are_told_together(run: Run) -> None:
    code, _, err = run("check", "--select", "ML901,nope,nada")
    assert code == 2
    assert [line.split(";")[0] for line in err.splitlines()] == [
        "error: --select: unknown rule 'nope'",
        "error: --select: unknown rule 'nada'",
    ]
    Path("memlint.toml").write_text("jobs = 0\nsurprise = 1\n", encoding="utf-8")
    code, _, err = run("check")
    assert code == 2
    assert len(err.splitlines()) == 2


# -- paths -------------------------------------------------------------------------------------------------------------


def test_no_files_is_a_warning(run: Run) -> None:
    assert run("check") == (0, "", "warning: no Python files or notebooks found under the given paths\n")


def test_a_path_that_does_not_exist_is_one_line_and_the_others_go_on(run: Run) -> None:
    write(a="bad\n")
    code, out, err = run("check", "nowhere", "a.py", "--output-format", "concise")
    assert (code, err) == (2, "")
    assert out.splitlines()[:2] == [
        "a.py:1:1: warning[ML901] [*] `bad` is here.",
        "cannot check nowhere: unreadable: no such file or folder",
    ]


def test_exclude_and_its_kin(run: Run) -> None:
    write(a="bad\n", b="bad\n")
    Path("venv").mkdir()
    Path("venv/c.py").write_text("bad\n", encoding="utf-8")

    def checked(*arguments: str) -> set[str]:
        out = run("check", "--output-format", "json", *arguments)[1]
        return {finding["path"] for finding in json.loads(out)["findings"]}

    assert checked() == {"a.py", "b.py"}
    assert checked("--exclude", "a.py") == {"b.py", "venv/c.py"}
    assert checked("--extend-exclude", "a.py,x") == {"b.py"}
    assert checked("--extend-exclude", "a.py", "a.py") == {"a.py"}
    assert checked("--extend-exclude", "a.py", "--force-exclude", "a.py", "b.py") == {"b.py"}


def test_configuration_and_isolated(run: Run) -> None:
    write(a="bad, hmm\n")
    Path("pyproject.toml").write_text(
        '[tool.memlint]\nignore = ["ML901"]\noutput-format = "concise"\nshow-notes = true\n', encoding="utf-8"
    )
    assert run("check")[:2][0] == 0
    assert run("check")[1].startswith("a.py:1:6: note[ML903]")
    assert run("check", "--isolated")[0] == 1
    Path("other.toml").write_text('ignore = ["ML903"]\n', encoding="utf-8")
    assert run("check", "--config", "other.toml")[0] == 1
    assert run("check", "--ignore", "ML903")[0] == 1


def test_the_cache_and_no_cache(run: Run) -> None:
    write(a="bad\n")
    assert run("check", "--no-cache")[0] == 1
    assert not Path(".memlint_cache").exists()
    assert run("check")[1] == run("check")[1]
    assert Path(".memlint_cache").is_dir()


# -- output ------------------------------------------------------------------------------------------------------------


def test_text(run: Run) -> None:
    write(a="x = bad\n")
    assert run("check")[1] == (
        "warning[ML901] bad-word: `bad` is here.\n  --> a.py:1:5\n  |\n1 | x = bad\n  |     ^^^\n2 |\n  |\n"
        "  = fix: write good (--fix)\n\nFound 1 warning (1 file checked).\nFixable: 1 with --fix.\n"
    )


def test_output_file(run: Run) -> None:
    write(a="bad\n")
    code, out, err = run("check", "--output-format", "json", "-o", "report.json")
    assert (code, err) == (1, "")
    assert "warning[ML901]" in out  # the text, for the people who read the log
    assert json.loads(Path("report.json").read_text(encoding="utf-8"))["summary"]["warnings"] == 1


def test_statistics(run: Run) -> None:
    write(a="bad\nbad\nhmm\n")
    assert run("check", "--statistics")[1].splitlines()[:2] == [
        "2  ML901  warning bad-word",
        "1  ML903  note    remark",
    ]


def test_fail_on_note_shows_the_notes(run: Run) -> None:
    write(a="hmm\n")
    assert "--> " not in run("check")[1]
    assert "--> a.py:1:1" in run("check", "--fail-on", "note")[1]


def test_fix_and_diff(run: Run) -> None:
    write(a="bad, grave\n")
    code, out, _ = run("check", "--diff")
    assert (code, out) == (1, "--- a.py\n+++ a.py\n@@ -1 +1 @@\n-bad, grave\n+good, grave\n")
    assert Path("a.py").read_text(encoding="utf-8") == "bad, grave\n"
    code, out, _ = run("check", "--fix")
    assert code == 1
    assert "Fixed 1 finding.\nFound 1 error (1 file checked).\nFixable: 1 with --fix --unsafe-fixes.\n" in out
    assert Path("a.py").read_text(encoding="utf-8") == "good, grave\n"


@pytest.mark.parametrize(
    ("environment", "coloured"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        ({"NO_COLOR": ""}, False),
    ],
)
def test_colours(run: Run, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], coloured: bool) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    write(a="bad\n")
    assert ("\x1b[" in run("check")[1]) == coloured


def test_narrow_terminals(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    write(a="x = " + "a + " * 40 + "bad\n")
    out = run("check")[1]
    assert max(map(len, out.splitlines())) <= 42


def test_paths_that_no_terminal_can_show(run: Run) -> None:
    name = os.fsdecode(b"\xff.py")
    Path(name).write_text("bad\n", encoding="utf-8")
    code, out, _ = run("check", "--output-format", "concise")
    assert code == 1
    assert out.startswith("\\udcff.py:1:1")
    assert json.loads(run("check", "--output-format", "json")[1])["findings"][0]["path"] == name


# -- stdin -------------------------------------------------------------------------------------------------------------


def test_stdin(run: Run) -> None:
    code, out, err = run("check", "-", "--output-format", "concise", stdin=b"x = bad\n")
    assert (code, err) == (1, "")
    assert out.startswith("<stdin>:1:5: warning[ML901]")
    out = run("check", "-", "--stdin-filename", "sub/../b.py", stdin=b"x = bad\n")[1]
    assert "--> b.py:1:5\n" in out
    assert "1 | x = bad\n" in out


def test_fix_on_stdin_prints_the_source(project: Path) -> None:
    code = (
        "import sys; from memlint import cli; from memlint.lint import catalog, engine; from tests.fakes import RULES\n"
        "catalog.all_rules = engine.all_rules = lambda: RULES\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )

    def fed(data: bytes, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-c", code, "check", "-", *arguments]
        root = str(Path(__file__).parents[1])
        return subprocess.run(
            command, input=data, capture_output=True, check=False, env={**os.environ, "PYTHONPATH": root}
        )

    done = fed(b"\xef\xbb\xbfbad, grave\r\n", "--fix")
    assert (done.returncode, done.stdout) == (1, b"\xef\xbb\xbfgood, grave\r\n")
    assert b"Fixed 1 finding." in done.stderr
    done = fed(b"bad\n", "--fix")
    assert (done.returncode, done.stdout) == (0, b"good\n")
    done = fed(b"bad(\n", "--fix")
    assert (done.returncode, done.stdout) == (2, b"bad(\n")
    done = fed(b"bad\n", "--diff")
    assert (done.returncode, done.stdout) == (1, b"--- <stdin>\n+++ <stdin>\n@@ -1 +1 @@\n-bad\n+good\n")
    done = fed(notebook("x = bad").encode(), "--fix", "--stdin-filename", "n.ipynb")
    assert done.stdout == notebook("x = good").encode()


def test_excluded_stdin_passes_through(run: Run) -> None:
    arguments = ("check", "-", "--stdin-filename", "gen/a.py", "--extend-exclude", "gen")
    assert run(*arguments, stdin=b"bad\n")[0] == 1
    assert run(*arguments, "--force-exclude", stdin=b"bad\n")[0] == 0


# -- the terminal ------------------------------------------------------------------------------------------------------


def memlint_command(*arguments: str, **options: object) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "TERM": "xterm", "COLUMNS": "80"}
    command = [sys.executable, "-m", "memlint", *arguments]
    return subprocess.Popen(command, env=environment, **options)  # type: ignore[call-overload, no-any-return]


def test_a_reader_that_goes_away_is_no_trouble(project: Path) -> None:
    write(**{f"m{n}": "def f(:\n  backward\n# noqa: ML101\n" for n in range(300)})
    process = memlint_command("check", "--no-cache", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() in (0, 2)


def test_colours_on_a_terminal(project: Path) -> None:
    write(a="x = 1  # memlint: ignore[ML101]\n")
    main, other = pty.openpty()
    process = memlint_command("check", "--no-cache", stdout=other, stderr=other)
    os.close(other)
    said = b""
    try:
        while chunk := os.read(main, 1000):
            said += chunk
    except OSError:
        pass  # the terminal's other end is closed
    os.close(main)
    assert process.wait() == 1
    assert b"\x1b[1;33mwarning[ML001]" in said


def test_the_progress_bar_waits_and_then_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress.Bar(visible=True) as bar:
        bar(1, 10)
        assert bar._bar is None
        monkeypatch.setattr(progress, "_PATIENCE", 0)
        bar(2, 10)
        assert bar._bar is not None
        assert bar._bar.tasks[0].completed == 2
    with progress.Bar(visible=False) as bar:
        bar(5, 10)
        assert bar._bar is None


def test_ctrl_c(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from memlint.lint import engine

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "check", interrupt)
    assert run("check") == (130, "", "interrupted\n")


# -- the other commands ------------------------------------------------------------------------------------------------


def test_version(run: Run) -> None:
    assert run("--version")[:2] == (0, f"memlint {memlint.__version__}\n")


def test_explain(run: Run) -> None:
    code, out, _ = run("explain", "ml001")
    assert code == 0
    assert out.startswith("ML001 unused-suppression (warning)\n\nA directive that suppresses nothing.\n\n")
    assert "\nNot found:\n    def average(values):\n" in out
    assert max(map(len, out.splitlines())) <= 100
    assert run("explain", "unused-suppression")[1] == out


def test_rules(run: Run) -> None:
    code, out, _ = run("rules")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if line.startswith("ML")] == [rule.code for rule in RULES]
    assert "ML901  bad-word" in out


def test_start_up_is_light(project: Path) -> None:
    """A run on one small file must not load what it does not need: start-up is most of its time."""
    write(a="import torch\nloss.backward()\n")
    heavy = (
        *("libcst.matchers", "rich", "concurrent.futures", "multiprocessing", "asyncio"),
        *("pathspec", "difflib", "configparser", "torch"),
    )
    code = (
        "import sys; from memlint.cli import main; main(['check', '--no-cache', 'a.py'])\n"
        f"print(*[name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": root}
    )
    assert done.stderr.strip() == ""
