"""run.py itself, with a made corpus and a made memlint: no network, no real package."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("run.py")
LOOP = "for batch in loader:\n    total += loss\n    total += loss\n    tidy()\n"
NOTEBOOK = json.dumps(
    {
        "cells": [
            {"cell_type": "markdown", "source": ["text"]},
            {"cell_type": "code", "source": ["%magic\n", "total += loss\n", "files = !ls"]},
        ]
    }
)
# Says "total += loss" is wrong wherever it stands, that tidy() is worth a note, and fails on files with "fail" in them.
TOOL = """
import json, pathlib, sys
root, found, failed = pathlib.Path(sys.argv[-1]), [], []
assert "--isolated" in sys.argv and "ALL" in sys.argv
def say(path, text, cell):
    for number, line in enumerate(text.split("\\n"), 1):
        for word, code, severity in (("total +=", "ML101", "error"), ("tidy", "ML501", "note")):
            if word in line:
                found.append({"code": code, "name": "a-name", "severity": severity, "message": "kept", "cell": cell,
                              "path": str(path), "line": number, "column": 1})
for path in sorted(root.rglob("*")):
    if path.suffix == ".py":
        say(path, path.read_text(), None)
    elif path.suffix == ".ipynb":
        code = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        for number, cell in enumerate(code, 1):
            say(path, "".join(cell["source"]), number)
    if path.is_file() and "fail" in path.read_text():
        failed.append({"path": str(path), "kind": "syntax", "detail": "no", "line": 1})
print(json.dumps({"version": 1, "findings": found, "failures": failed, "summary": {}}))
sys.exit(2 if failed else 0)
"""


class Wild:
    """A corpus of one package in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.labels = folder / "labels.json"
        self.tool = folder / "tool.py"
        self.tool.write_text(TOOL, encoding="utf-8")
        self.version = 0

    def publish(self, files: dict[str, str]) -> None:
        """Make the package's next version the pinned one."""
        self.version += 1
        entry = f'[[package]]\nname = "some-pkg"\nversion = "{self.version}"\nkind = "test"\n'
        (self.folder / "corpus.toml").write_text(entry, encoding="utf-8")
        with tarfile.open(self.folder / f"some_pkg-{self.version}.tar.gz", "w:gz") as tar:
            for name, text in files.items():
                member = tarfile.TarInfo(name if name.startswith(("/", "..")) else f"some_pkg-{self.version}/{name}")
                data = text.encode()
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
            link = tarfile.TarInfo(f"some_pkg-{self.version}/link.py")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
            tar.addfile(link)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """run.py on this corpus."""
        command = [sys.executable, str(SCRIPT), "--cache", str(self.folder), "--labels", str(self.labels)]
        command += ["--corpus", str(self.folder / "corpus.toml")]
        command += ["--tool", shlex.join([sys.executable, str(self.tool)]), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def read(self, **verdicts: bool) -> None:
        """Give every label in labels.json the verdict of its rule."""
        entries = json.loads(self.labels.read_text(encoding="utf-8"))
        for entry in entries:
            entry.update(verdict=verdicts[entry["code"]], why="read")
        self.labels.write_text(json.dumps(entries), encoding="utf-8")


@pytest.fixture
def wild(tmp_path: Path) -> Wild:
    return Wild(tmp_path)


def test_a_new_finding_is_shown_then_read_then_quiet(wild: Wild) -> None:
    wild.publish({"train.py": LOOP})
    first = wild.run("--show", "--context", "1")
    assert first.returncode == 1
    assert "2 found: 0 true, 0 false, 2 to read; 1 notes" in first.stdout
    assert "train.py:2 ML101 error: kept" in first.stdout
    assert ">    2 |     total += loss" in first.stdout

    assert wild.run("--write-template").returncode == 1
    entries = json.loads(wild.labels.read_text(encoding="utf-8"))
    assert [(e["line"], e["verdict"]) for e in entries] == [(2, None), (3, None)]
    assert {e["text"] for e in entries} == {"total += loss"}

    assert wild.run().returncode == 1, "a verdict of null is no reading"

    wild.read(ML101=True)
    last = wild.run()
    assert last.returncode == 0
    assert "100.0 %" in last.stdout


def test_a_label_survives_moved_lines_and_versions(wild: Wild) -> None:
    wild.publish({"train.py": LOOP})
    wild.run("--write-template")
    wild.read(ML101=True)
    wild.publish({"train.py": "# a line more\n" * 5 + LOOP})
    assert wild.run().returncode == 0
    assert wild.run("--write-template").returncode == 0
    entries = json.loads(wild.labels.read_text(encoding="utf-8"))
    assert [(e["version"], e["line"], e["verdict"], e["why"]) for e in entries] == [
        ("2", n, True, "read") for n in (7, 8)
    ]


@pytest.mark.parametrize(("verdict", "code", "word"), [(True, 1, "VANISHED"), (False, 0, "gone")])
def test_a_vanished_true_is_a_regression(wild: Wild, verdict: bool, code: int, word: str) -> None:
    wild.publish({"train.py": LOOP})
    wild.run("--write-template")
    wild.read(ML101=verdict)
    wild.publish({"train.py": LOOP.replace("    total += loss\n", "", 1)})
    run = wild.run()
    assert run.returncode == code
    assert f"{word:9} train.py:3 ML101" in run.stdout
    wild.run("--write-template", "--prune")
    assert wild.run().returncode == 0


def test_only_failures_on_files_that_parse_count(wild: Wild) -> None:
    wild.publish({"old.py": "fail(async=True)\n"})
    run = wild.run()
    assert (run.returncode, "files no Python here parses" in run.stdout) == (0, True)
    wild.publish({"fine.py": "fail()\n", "cells.ipynb": NOTEBOOK.replace("total += loss", "fail()")})
    run = wild.run()
    assert run.returncode == 1
    assert "FAILURE   fine.py:1: syntax: no" in run.stdout
    assert "FAILURE   cells.ipynb:1: syntax: no" in run.stdout


def test_notebook_cells_have_a_text(wild: Wild) -> None:
    wild.publish({"cells.ipynb": NOTEBOOK})
    wild.run("--write-template")
    (entry,) = json.loads(wild.labels.read_text(encoding="utf-8"))
    assert (entry["cell"], entry["line"], entry["text"]) == (1, 2, "total += loss")


def test_the_page_of_precision(wild: Wild, tmp_path: Path) -> None:
    page = tmp_path / "precision.md"
    wild.publish({"train.py": LOOP})
    assert wild.run("--write-docs", str(page)).returncode == 2
    assert not page.exists()
    wild.run("--write-template")
    wild.read(ML101=False)
    assert wild.run("--write-docs", str(page)).returncode == 0
    text = page.read_text(encoding="utf-8")
    assert "| ML101 | a-name | 0 | 2 | 0.0 % |" in text
    assert "| some-pkg 1 | test | 0 | 2 | 1 |" in text


def test_an_archive_cannot_leave_its_folder(wild: Wild) -> None:
    wild.publish(
        {"a.py": "ok()\n", "../out.py": "no()\n", "/tmp/memlint_wild_out.py": "no()\n", "b/../../x.py": "no()\n"}
    )
    assert wild.run("--download-only").returncode == 0
    root = wild.folder / "src" / "some-pkg-1"
    assert [path.name for path in root.rglob("*")] == ["a.py"]
    assert not (wild.folder / "out.py").exists()


def test_trouble_is_one_line(wild: Wild) -> None:
    wild.publish({"a.py": "ok()\n"})
    wild.tool.write_text("import sys; sys.exit('no such option')", encoding="utf-8")
    run = wild.run()
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert "no such option" in run.stderr
    entry = 'sha256 = "00"\n'
    wild.publish({"a.py": "ok()\n"})
    with (wild.folder / "corpus.toml").open("a", encoding="utf-8") as file:
        file.write(entry)
    assert "sha256" in wild.run().stderr
