"""The oldest torch that a project supports."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

from memlint.lint.analysis import AnalysisSettings, analyse
from memlint.lint.catalog import all_rules
from memlint.lint.source import SourceFile
from memlint.lint.torch_version import capped_torch, oldest_torch


def oldest(project: Path, files: dict[str, str], path: str = "a.py") -> str | None:
    for name, text in files.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text, encoding="utf-8")
    found = oldest_torch(path)
    return None if found is None else str(found)


@pytest.mark.parametrize(
    ("requirement", "version"),
    [
        ("torch>=1.13", "1.13"),
        ("torch >= 1.13, < 3", "1.13"),
        ("torch>1.9", "1.9"),
        ("torch==2.1.*", "2.1"),
        ("torch==2.1.0+cu118", "2.1.0"),
        ("torch~=2.0", "2.0"),
        ("torch[opt]>=2.2 ; python_version > '3.8'", "2.2"),
        ("torch>=1.8,>=2.0", "2.0"),
        ("Torch>=2.3", "2.3"),
        ("torch", None),
        ("torch<2", None),
        ("torch!=2.0", None),
        ("torchvision>=0.15", None),
        ("torch-geometric>=2.0", None),
        ("torch @ https://example.org/torch.whl", None),
        ("torch>=", None),
    ],
)
def test_requirements(project: Path, requirement: str, version: str | None) -> None:
    assert oldest(project, {"requirements.txt": f"numpy\n-r other.txt\n{requirement}  # why\n"}) == version


@pytest.mark.parametrize(
    ("name", "text", "version"),
    [
        ("pyproject.toml", '[project]\ndependencies = ["numpy", "torch>=1.10"]\n', "1.10"),
        ("pyproject.toml", '[project.optional-dependencies]\nall = ["torch>=2.0"]\nold = ["torch>=1.8"]\n', "1.8"),
        ("pyproject.toml", '[dependency-groups]\ndev = [{include-group = "x"}, "torch>=2.4"]\n', "2.4"),
        ("pyproject.toml", '[tool.poetry.dependencies]\ntorch = "^2.1"\n', "2.1"),
        ("pyproject.toml", '[tool.poetry.dependencies]\ntorch = {version = ">=1.12,<3", optional = true}\n', "1.12"),
        ("pyproject.toml", '[tool.poetry.dependencies]\ntorch = [{version = "2.0.1"}, {version = "~2.2"}]\n', "2.0.1"),
        ("pyproject.toml", '[tool.poetry.group.gpu.dependencies]\ntorch = "*"\n', None),
        ("pyproject.toml", "[project]\ndependencies = 3\n[tool]\npoetry = 4\n", None),
        ("pyproject.toml", "[project", None),
        ("setup.cfg", "[options]\ninstall_requires =\n    numpy\n    torch>=1.7\n", "1.7"),
        ("setup.cfg", "[options.extras_require]\ngpu = torch>=1.6\n", "1.6"),
        ("setup.cfg", "nonsense", None),
        ("setup.py", "from setuptools import setup\nsetup(install_requires=['torch>=1.5', 'torchvision>=9'])\n", "1.5"),
        ("setup.py", "import sys; sys.exit('never run')\nREQUIRED = ['torch>=1.4']\n", "1.4"),
        ("setup.py", "print 'python 2'", None),
        ("requirements-dev.txt", "torch>=1.3\n", "1.3"),
        ("requirements/base.txt", "torch==1.2.0 --hash=sha256:00\n", "1.2.0"),
        ("environment.yml", "dependencies:\n  - pytorch=2.1\n  - pytorch-cuda=12.1\n", "2.1"),
        ("environment.yml", "dependencies:\n  - conda-forge::pytorch>=1.11,<2\n", "1.11"),
        ("environment.yaml", "dependencies:\n  - pip:\n    - torch==2.0.1\n", "2.0.1"),
        ("environment.yml", "dependencies:\n  - 'pytorch==2.2.*'\n", "2.2"),
        ("environment.yml", "dependencies:\n  - pytorch\n  - pytorch-lightning=2.0\n", None),
        ("uv.lock", '[[package]]\nname = "torch"\nversion = "2.5.1"\n', "2.5.1"),
        ("poetry.lock", '[[package]]\nname = "torch"\nversion = "2.3.0+cpu"\n', "2.3.0"),
        ("pdm.lock", '[[package]]\nname = "torchvision"\nversion = "0.1"\n', None),
    ],
)
def test_sources(project: Path, name: str, text: str, version: str | None) -> None:
    assert oldest(project, {name: text}) == version


def test_what_is_declared_counts_before_what_is_pinned(project: Path) -> None:
    lock = '[[package]]\nname = "torch"\nversion = "2.5.1"\n'
    declared = '[project]\ndependencies = ["torch>=1.13"]\n'
    assert oldest(project, {"uv.lock": lock, "pyproject.toml": declared, "requirements.txt": "torch==2.4"}) == "1.13"


def test_what_is_pinned_counts_where_nothing_is_declared(project: Path) -> None:
    lock = '[[package]]\nname = "torch"\nversion = "2.5.1"\n'
    assert oldest(project, {"uv.lock": lock, "pyproject.toml": '[project]\ndependencies = ["torch"]\n'}) == "2.5.1"


def test_the_nearest_project_upward_answers(project: Path) -> None:
    files = {
        "requirements.txt": "torch>=1.9\n",
        "one/pyproject.toml": '[project]\ndependencies = ["torch>=2.0"]\n',
        "two/pyproject.toml": "[project]\n",
        "three/deep/requirements.txt": "torch>=2.2\n",
    }
    assert oldest(project, files, "one/src/a.py") == "2.0"
    assert oldest(project, {}, "two/src/a.py") is None
    assert oldest(project, {}, "three/deep/er/a.py") == "2.2"
    assert oldest(project, {}, "three/a.py") == "1.9"


def test_nothing_is_looked_for_above_a_repository(project: Path) -> None:
    (project / "repo/.git").mkdir(parents=True)
    assert oldest(project, {"requirements.txt": "torch>=1.9\n"}, "repo/src/a.py") is None


def test_a_file_that_cannot_be_read_tells_nothing(project: Path) -> None:
    (project / "requirements.txt").mkdir()
    (project / "pyproject.toml").write_bytes(b"\xff\xfe")
    assert oldest_torch("a.py") is None


def test_versions_compare(project: Path) -> None:
    found = oldest(project, {"requirements.txt": "torch>=1.10\n", "requirements-old.txt": "torch>=1.9\n"})
    assert found is not None
    assert Version(found) < Version("1.10")


@pytest.mark.parametrize(
    ("requirement", "version"),
    [
        ("torch<0.4", "0.4"),
        ("torch>=0.2,<0.4", "0.4"),
        ("torch==0.3.1", "0.3.1.1"),
        ("torch==0.4.0", "0.4.0.1"),
        ("torch<=1.5", "1.5.1"),
        ("torch~=0.3.0", "0.4"),
        ("torch>=1.13,<3", "3"),
        ("torch>=0.2", None),
        ("torch", None),
    ],
)
def test_the_version_to_stay_below(project: Path, requirement: str, version: str | None) -> None:
    (project / "requirements.txt").write_text(f"{requirement}\n", encoding="utf-8")
    found = capped_torch("a.py")
    assert (None if found is None else str(found)) == version


def test_code_for_torch_before_no_grad_is_left_alone(project: Path) -> None:
    """`Variable(volatile=True)` switched autograd off until 0.4; torch.no_grad came then."""
    text = """
from torch.autograd import Variable

def test(net, loader):
    net.eval()
    for inputs, targets in loader:
        outputs = net(Variable(inputs, volatile=True))
"""
    source = SourceFile("a.py", text.encode())
    rules = list(all_rules())
    found = {f.code for f in analyse(source, rules, AnalysisSettings())[0]}
    assert {"ML401", "ML403"} <= found
    old = AnalysisSettings(capped_torch=Version("0.4"))
    assert not {"ML401", "ML403"} & {f.code for f in analyse(source, rules, old)[0]}
