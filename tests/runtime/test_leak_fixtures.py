"""Small training programs with one planted defect each, and sound ones that look alike: all of them, in one run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

FOLDER = Path(__file__).parents[2] / "fixtures" / "leaks"
PROGRAMS = sorted([*(FOLDER / "leaking").glob("*.py"), *(FOLDER / "sound").glob("*.py")])
WORDS = {"leak": "growth", "peak": "peak"}


@dataclass
class Expected:
    """What a program's comments say."""

    verdict: str = ""
    holders: list[str] = field(default_factory=list)
    site: str = ""


def expected_of(path: Path) -> Expected:
    expected = Expected()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if match := re.fullmatch(r"# (verdict|holder|cycle): (.+)", line):
            if match[1] == "verdict":
                expected.verdict = match[2]
            else:
                expected.holders.append(match[2])
        if line.endswith(("# leaked here", "# peak here")):
            expected.site = f"{path.name}:{number}"
        if match := re.fullmatch(r"\s*# site: support/(.+)", line):
            expected.site = match[1]
    return expected


#: what these do depends on the values that they compute, and the virtual device computes none
BY_VALUE = {"snapshots_in_memory.py"}


@pytest.fixture(scope="session", params=["cpu", "virtual:t4"])
def records(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """One run over all programs on a device; the record of each, by the name of its file."""
    report = tmp_path_factory.mktemp("leaks") / "report.json"
    programs = [path for path in PROGRAMS if request.param == "cpu" or path.name not in BY_VALUE]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(FOLDER), "-c"]
    command += ["/dev/null", "--memory-device", request.param, "--memory-report", str(report), *map(str, programs)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=FOLDER)
    assert report.exists(), ran.stdout + ran.stderr
    tests = json.loads(report.read_text(encoding="utf-8"))["tests"]
    return {Path(test["test"].partition("::")[0]).name: test for test in tests}


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
@pytest.mark.xdist_group("leaks")
def test_a_program_gets_its_verdict(path: Path, records: dict[str, dict[str, Any]]) -> None:
    if path.name in BY_VALUE and path.name not in records:
        pytest.skip("what it does depends on computed values")
    expected, record = expected_of(path), records[path.name]
    failed = [verdict["limit"] for verdict in record["verdicts"] if not verdict["passed"]]
    if expected.verdict == "ok":
        assert record["passed"], record["verdicts"]
        assert not record["cycles"]
        return
    if expected.verdict == "cycles":
        assert failed == (["cycles"] if record["budget"]["cycles"] == "fail" else [])
        found, text = record["cycles"][0]["site"], record["cycles"][0]["path"]
    elif expected.verdict == "peak":
        assert failed == ["peak"]
        found, text = record["peak_breakdown"]["groups"][0]["site"], ""
    else:
        assert failed == ["growth"]
        leak = max(record["leaks"], key=lambda leak: leak["bytes_per_step"])
        assert leak["holder"] is not None, record["leaks"]
        found, text = leak["site"], leak["holder"]["path"] + " " + " ".join(leak["holder"]["kinds"])
        # nothing is counted twice, and nothing is missing
        assert sum(leak["bytes_per_step"] for leak in record["leaks"]) == pytest.approx(
            record["growth"]["rate"], rel=0.35
        )
    for word in expected.holders:
        assert word in text, (text, record["leaks"])
    assert f"{Path(found['path']).name}:{found['line']}" == expected.site, (found, text)


def test_there_are_enough_programs_and_each_says_what_it_expects() -> None:
    expectations = {path: expected_of(path) for path in PROGRAMS}
    assert sum(path.parent.name == "leaking" for path in PROGRAMS) >= 25
    assert sum(path.parent.name == "sound" for path in PROGRAMS) >= 15
    for path, expected in expectations.items():
        if path.parent.name == "sound":
            assert expected.verdict == "ok", path
        else:
            assert expected.verdict in ("leak", "cycles", "peak"), path
            assert expected.site, path
            assert expected.holders or expected.verdict == "peak", path
