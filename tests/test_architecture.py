"""The layers hold, and the base install is light."""

from __future__ import annotations

import ast
import importlib.metadata
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import memlint

PACKAGE = Path(memlint.__file__).parent
#: what the parts of the package must not import, directly or through others
FORBIDDEN = {
    "lint": ("torch", "numpy", "pytest", "memlint.runtime", "memlint.virtual", "memlint.cli"),
    "rules": ("torch", "numpy", "pytest", "memlint.runtime", "memlint.virtual", "memlint.cli", "memlint.reporters"),
    "runtime": ("memlint.lint", "memlint.rules", "memlint.reporters", "memlint.cli"),
    "virtual": ("memlint.lint", "memlint.rules", "memlint.reporters", "memlint.cli", "memlint.runtime"),
    "reporters": ("torch", "numpy", "pytest", "memlint.runtime", "memlint.virtual", "memlint.cli", "memlint.rules"),
}

BLOCKED = """
import importlib, sys
forbidden = {forbidden!r}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if any(name == bad or name.startswith(bad + ".") for bad in forbidden):
            raise ImportError(f"{{name}} must not be imported here")
sys.meta_path.insert(0, Blocker())
for name in {modules!r}:
    importlib.import_module(name)
"""


def modules(part: str) -> list[str]:
    found = pkgutil.walk_packages([str(PACKAGE / part)], f"memlint.{part}.")
    return [f"memlint.{part}", *(info.name for info in found)]


@pytest.mark.parametrize("part", FORBIDDEN)
def test_a_layer_does_without_what_it_must_not_import(part: str) -> None:
    program = BLOCKED.format(forbidden=FORBIDDEN[part], modules=modules(part))
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("part", FORBIDDEN)
def test_nothing_forbidden_is_imported_late_either(part: str) -> None:
    """An import inside a function escapes the blocker."""
    for path in (PACKAGE / part).rglob("*.py"):
        if part == "lint" and path.name == "docs.py":
            continue  # renders with the reporters, which no other part of the linter knows
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [node.module]
            for name in names:
                forbidden = (*FORBIDDEN[part], "memlint.reporters") if part == "lint" else FORBIDDEN[part]
                assert not any(name == bad or name.startswith(f"{bad}.") for bad in forbidden), f"{path}: {name}"


def test_the_whole_command_runs_without_torch_and_pytest(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import torch\nloss.backward(retain_graph=True)\n", encoding="utf-8")
    program = BLOCKED.format(forbidden=("torch", "numpy", "pytest", "hypothesis"), modules=["memlint.cli"])
    program += f"from memlint.cli import main; sys.exit(main(['check', '--isolated', '--no-cache', {str(tmp_path)!r}]))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) in ((0, ""), (1, ""))


def test_the_base_install_is_light() -> None:
    requirements = [Requirement(text) for text in importlib.metadata.requires("torch-memlint") or ()]
    base = {r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})}
    assert base <= {"libcst", "packaging", "pathspec", "rich", "tomli"}
    runtime = {r.name for r in requirements if r.marker is not None and r.marker.evaluate({"extra": "runtime"})} - base
    assert {"torch", "pytest"} <= runtime


def test_the_distribution_has_its_own_name_and_the_command_ours() -> None:
    scripts = importlib.metadata.distribution("torch-memlint").entry_points
    assert [(s.name, s.value) for s in scripts if s.group == "console_scripts"] == [("memlint", "memlint.cli:main")]


def test_nothing_tells_people_to_install_the_other_memlint() -> None:
    root = PACKAGE.parent
    texts = [root / "README.md", root / "CHANGELOG.md", *(root / "docs").rglob("*.md"), *PACKAGE.rglob("*.py")]
    for path in texts:
        assert "pip install memlint" not in path.read_text(encoding="utf-8"), path


def test_exit_codes_are_known_to_the_command_line_only() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.name not in ("cli.py", "__main__.py"):
            text = path.read_text(encoding="utf-8")
            assert "sys.exit" not in text, path
            assert "SystemExit" not in text, path
