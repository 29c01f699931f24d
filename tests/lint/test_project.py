"""A verdict that rests on other files: who calls the function, and under which grad mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from memlint.lint.analysis import AnalysisSettings, analyse
from memlint.lint.catalog import all_rules
from memlint.lint.model import Finding, Severity
from memlint.lint.project import Project
from memlint.lint.source import SourceFile

EVALUATION = """
def validate(model, loader):
    model.eval()
    for x in loader:
        print(model(x))
"""


def findings(tmp_path: Path, files: dict[str, str], name: str) -> list[Finding]:
    (tmp_path / "pyproject.toml").write_text("")
    for path, text in files.items():
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    judged = tmp_path / name
    source = SourceFile(str(judged), judged.read_bytes())
    found, failures = analyse(source, list(all_rules()), AnalysisSettings(project=Project()))
    assert not failures
    return [finding for finding in found if finding.severity > Severity.NOTE]


@pytest.mark.parametrize(
    ("caller", "silent"),
    [
        ("import torch\ndef main(m, l):\n    with torch.no_grad():\n        validate(m, l)\n", True),
        ("import torch\n@torch.inference_mode()\ndef main(m, l):\n    engine.validate(m, l)\n", True),
        ("import torch\ntorch.set_grad_enabled(False)\nvalidate(m, l)\n", True),
        ("from mine import no_grad\ndef main(m, l):\n    with no_grad():\n        validate(m, l)\n", True),
        ("def main(m, l):\n    validate(m, l)\n", False),
        ("import torch\ndef main(m, l):\n    with torch.no_grad():\n        pass\n    validate(m, l)\n", False),
        ("# validate(m, l) is called elsewhere\ndef validate_all():\n    pass\n", False),
        ("def validate(model, loader):\n    pass\n", False),
        (
            "import torch\ndef a(m):\n    with torch.no_grad():\n        validate(m)\ndef b(m):\n    validate(m)\n",
            False,
        ),
    ],
)
def test_callers_in_another_file(tmp_path: Path, caller: str, silent: bool) -> None:
    found = findings(tmp_path, {"pkg/evaluation.py": EVALUATION, "main.py": caller}, "pkg/evaluation.py")
    assert [f.code for f in found] == ([] if silent else ["ML401"])


def test_callers_of_callers(tmp_path: Path) -> None:
    files = {
        "pkg/evaluation.py": EVALUATION,
        "pkg/engine.py": "def run(m, l):\n    validate(m, l)\n",
        "train.py": "import torch\ndef main(m, l):\n    with torch.no_grad():\n        run(m, l)\n",
    }
    assert not findings(tmp_path, files, "pkg/evaluation.py")
    files["train.py"] = "def main(m, l):\n    run(m, l)\n"
    assert findings(tmp_path, files, "pkg/evaluation.py")


def test_tests_are_no_callers(tmp_path: Path) -> None:
    files = {
        "pkg/evaluation.py": EVALUATION,
        "main.py": "import torch\ndef main(m, l):\n    with torch.no_grad():\n        validate(m, l)\n",
        "tests/test_evaluation.py": "def test():\n    validate(m, l)\n",
    }
    assert not findings(tmp_path, files, "pkg/evaluation.py")


def test_a_name_that_everybody_calls_says_nothing(tmp_path: Path) -> None:
    files = {f"pkg/m{i}.py": "def f(m, l):\n    validate(m, l)\n" for i in range(30)}
    assert not findings(tmp_path, {"pkg/evaluation.py": EVALUATION, **files}, "pkg/evaluation.py")


def test_callers_that_cannot_be_parsed_do_not_count(tmp_path: Path) -> None:
    files = {"pkg/evaluation.py": EVALUATION, "main.py": "def main(:\n    validate(m, l)\n"}
    assert [f.code for f in findings(tmp_path, files, "pkg/evaluation.py")] == ["ML401"]


def test_cycles_end(tmp_path: Path) -> None:
    files = {"a.py": EVALUATION + "\ndef run():\n    go()\n", "b.py": "def go():\n    run()\n    validate(m, l)\n"}
    assert findings(tmp_path, files, "a.py")


def test_projects_are_told_apart(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "setup.py").write_text("")
    (other / "main.py").write_text("import torch\nwith torch.no_grad():\n    validate(m, l)\n")
    inner = tmp_path / "inner"
    inner.mkdir()
    assert findings(inner, {"evaluation.py": EVALUATION}, "evaluation.py")
