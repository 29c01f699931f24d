"""What the tests share. That this file exists also makes `tests` importable."""

from __future__ import annotations

from pathlib import Path

import pytest

from memlint.lint import torch_version


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, as the current one, in which no colour and no width comes from outside."""
    torch_version._of_folder.cache_clear()
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder
