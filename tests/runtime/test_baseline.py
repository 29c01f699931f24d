"""Peaks saved in a file and compared with later ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlint.errors import BudgetError
from memlint.runtime.baseline import Baseline, compare, device_key

CPU = "cpu, torch 2.13"


def record(test: str, peak: int | None, reserved: int | None = None, **more: Any) -> dict[str, Any]:
    return {"test": test, "device": "cpu", "card": "x86_64", "torch": "2.13.0+cpu", "peak": peak, "reserved": reserved,
            **more}  # fmt: skip


# -- the file ----------------------------------------------------------------------------------------------------------


def test_a_file_that_is_not_there_yet_is_empty_and_is_written_with_its_folders(tmp_path: Path) -> None:
    path = tmp_path / "ci" / "memory" / "peaks.json"
    saved = Baseline.read(path)
    assert saved.peaks == {}
    assert saved.update([record("a.py::test_x", 1024, 2048)]) == 1
    saved.write()
    assert Baseline.read(path) == saved
    assert [file.name for file in path.parent.iterdir()] == ["peaks.json"]


def test_the_file_is_sorted_and_ends_in_a_line_so_that_a_review_shows_what_changed(tmp_path: Path) -> None:
    path = tmp_path / "peaks.json"
    saved = Baseline(path)
    saved.update([record("b.py::test_y", 2), record("a.py::test_x", 1)])
    saved.write()
    text = path.read_text(encoding="utf-8")
    assert text.endswith("}\n")
    assert text.index("a.py::test_x") < text.index("b.py::test_y")
    other = Baseline(path)
    other.update([record("a.py::test_x", 1), record("b.py::test_y", 2)])
    other.write()
    assert path.read_text(encoding="utf-8") == text
    assert json.loads(text) == {
        "version": 1,
        "peaks": {CPU: {
            "a.py::test_x": {"peak": 1, "reserved": None}, "b.py::test_y": {"peak": 2, "reserved": None},
        }},
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "3", '{"peaks": {}}', '{"version": 1}', '{"version": 1, "peaks": []}',
        '{"version": 1, "peaks": {"cpu": []}}', '{"version": 1, "peaks": {"cpu": {"t": 5}}}',
        '{"version": 1, "peaks": {"cpu": {"t": {"peak": 1}}}}',
        '{"version": 1, "peaks": {"cpu": {"t": {"peak": "1", "reserved": null}}}}',
        '{"version": 1, "peaks": {"cpu": {"t": {"peak": true, "reserved": null}}}}',
        '{"version": 1, "peaks": {"cpu": {"t": {"peak": 1.5, "reserved": null}}}}',
    ],
)  # fmt: skip
def test_a_file_of_another_kind_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "peaks.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BudgetError) as caught:
        Baseline.read(path)
    assert str(caught.value) == f"{path}: no memory baseline of memlint; write one with --memory-update-baseline"


def test_a_file_of_a_later_version_says_so(tmp_path: Path) -> None:
    path = tmp_path / "peaks.json"
    path.write_text('{"version": 2, "peaks": {}}', encoding="utf-8")
    with pytest.raises(BudgetError, match="of version 2; this memlint reads 1"):
        Baseline.read(path)


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="cannot be read"):
        Baseline.read(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BudgetError, match="cannot be read"):
        Baseline.read(tmp_path / "binary")
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(BudgetError, match="cannot be written"):
        Baseline(folder).write()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["binary", "folder"]


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(BudgetError, match="cannot be written"):
        Baseline(tmp_path / "file" / "peaks.json").write()


# -- entries -----------------------------------------------------------------------------------------------------------


def test_updating_counts_what_changed_and_leaves_the_rest(tmp_path: Path) -> None:
    saved = Baseline(tmp_path / "p.json", {CPU: {"a.py::t": {"peak": 5, "reserved": None}}, "H100, torch 2.13": {}})
    changed = saved.update([record("a.py::t", 5), record("a.py::u", 6)])
    assert changed == 1
    assert saved.entry(CPU, "a.py::t") == {"peak": 5, "reserved": None}
    assert saved.entry(CPU, "a.py::u") == {"peak": 6, "reserved": None}
    assert "H100, torch 2.13" in saved.peaks
    assert saved.entry("H100, torch 2.13", "a.py::t") is None
    assert saved.entry("another", "a.py::t") is None
    assert saved.update([record("a.py::t", 7), record("a.py::u", 6, 9)]) == 2


def test_an_entry_is_stale_when_its_file_was_collected_without_it(tmp_path: Path) -> None:
    entries: dict[str, dict[str, int | None]] = {
        name: {"peak": 1, "reserved": None} for name in ("a.py::gone", "a.py::there", "b.py::other")
    }
    saved = Baseline(tmp_path / "p.json", {CPU: entries})
    assert saved.stale(CPU, ["a.py::there", "a.py::new"]) == ["a.py::gone"]
    assert saved.stale(CPU, []) == []
    assert saved.stale("another", ["a.py::there"]) == []
    saved.drop(CPU, ["a.py::gone", "never.py::there"])
    saved.drop("another", ["a.py::gone"])
    assert sorted(saved.peaks[CPU]) == ["a.py::there", "b.py::other"]


@pytest.mark.parametrize(
    ("device", "card", "torch", "key"),
    [
        ("cpu", "x86_64", "2.13.0+cpu", "cpu, torch 2.13"),
        ("cpu", "arm64", "2.13.1", "cpu, torch 2.13"),
        ("cpu", "x86_64", "2.14.0a0+gitabc", "cpu, torch 2.14"),
        ("cuda", "NVIDIA H100", "2.13.0+cu130", "NVIDIA H100, torch 2.13"),
        ("cuda:1", "NVIDIA H100", "2.13.0", "NVIDIA H100, torch 2.13"),
        ("xpu", "", "2.13.0", "xpu, torch 2.13"),
    ],
)
def test_sizes_belong_to_a_card_and_a_version_of_torch(device: str, card: str, torch: str, key: str) -> None:
    assert device_key({"device": device, "card": card, "torch": torch}) == key


# -- comparing ---------------------------------------------------------------------------------------------------------


def entry(peak: int | None, reserved: int | None = None) -> dict[str, int | None]:
    return {"peak": peak, "reserved": reserved}


@pytest.mark.parametrize(
    ("saved", "peak", "reserved", "tolerance", "passed"),
    [
        (entry(1000), 1000, None, 0.05, True),
        (entry(1000), 1050, None, 0.05, True),
        (entry(1000), 1051, None, 0.05, False),
        (entry(1000), 1000, None, 0.0, True),
        (entry(1000), 1001, None, 0.0, False),
        (entry(1000), 1, None, 0.05, True),
        (entry(1000, 2000), 1000, 2101, 0.05, False),
        (entry(1000, 2000), 1000, 2100, 0.05, True),
        (entry(1000), 1000, 10**9, 0.05, True),
        (entry(1000), None, None, 0.05, True),
        (entry(None), 1000, None, 0.05, True),
        (entry(0), 0, None, 0.05, True),
        (entry(0), 1, None, 0.05, False),
    ],
)
def test_a_peak_may_be_above_the_saved_one_by_the_tolerance(
    saved: dict[str, int | None], peak: int | None, reserved: int | None, tolerance: float, passed: bool
) -> None:
    verdict = compare(saved, peak, reserved, tolerance)
    assert verdict.passed is passed
    assert verdict.limit == "baseline"


def test_what_is_said_has_both_figures_and_the_tolerance() -> None:
    verdict = compare(entry(2**20), 2 * 2**20, None, 0.05)
    assert verdict.message == ("the allocated peak is 2.00 MiB, 100.0% above the baseline of 1.00 MiB (5% is allowed)")
    assert (verdict.observed, verdict.allowed) == (2 * 2**20, 2**20 * 1.05)
    reserved = compare(entry(1024, 2**20), 1024, 2 * 2**20, 0.1)
    assert reserved.message.startswith("the reserved peak is 2.00 MiB, 100.0% above the baseline of 1.00 MiB (10% is")
    from_nothing = compare(entry(0), 1024, None, 0.05)
    assert "1.00 KiB above the baseline of 0 B" in from_nothing.message


def test_a_peak_far_below_asks_for_an_update() -> None:
    assert "--memory-update-baseline would hold it there" in compare(entry(1000), 500, None, 0.05).message
    assert "--memory-update-baseline" not in compare(entry(1000), 990, None, 0.05).message


def test_a_tolerance_of_less_than_a_percent_is_shown_as_it_is() -> None:
    assert "(0.5% is allowed)" in compare(entry(1000), 2000, None, 0.005).message


@given(st.integers(1, 10**12), st.floats(0, 5), st.integers(0, 10**13))
def test_more_memory_never_passes_where_less_fails(saved: int, tolerance: float, peak: int) -> None:
    if compare(entry(saved), peak, None, tolerance).passed:
        assert compare(entry(saved), max(peak - 1, 0), None, tolerance).passed
    else:
        assert not compare(entry(saved), peak + 1, None, tolerance).passed
