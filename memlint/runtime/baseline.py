"""Peaks saved in a file that goes with the code, one set a device and torch version, to be compared with later runs.

The file is JSON, sorted and indented, so that a review shows what changed:

    {"version": 1,
     "peaks": {"cpu, torch 2.13": {"tests/test_train.py::test_step": {"peak": 240387072, "reserved": null}}}}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memlint import files
from memlint.errors import BudgetError
from memlint.runtime.verdict import Verdict
from memlint.units import format_bytes

TOLERANCE = 0.05
_VERSION = 1
_WORDS = ("peak", "reserved")


@dataclass(slots=True)
class Baseline:
    """The saved peaks: by device, then by test, in bytes."""

    path: Path
    peaks: dict[str, dict[str, dict[str, int | None]]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Baseline:
        """The file's content; empty where there is no file yet. Raises BudgetError where it is not one of ours."""
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return cls(path)
        except (OSError, UnicodeDecodeError) as error:
            raise BudgetError(f"{path}: the memory baseline cannot be read: {error}") from None
        try:
            loaded = json.loads(text)
            if loaded["version"] != _VERSION:
                raise BudgetError(
                    f"{path}: a memory baseline of version {loaded['version']}; this memlint reads {_VERSION}"
                )
            peaks = {
                str(device): {
                    str(test): {word: _whole(entry[word]) for word in _WORDS} for test, entry in tests.items()
                }
                for device, tests in loaded["peaks"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BudgetError(
                f"{path}: no memory baseline of memlint; write one with --memory-update-baseline"
            ) from None
        return cls(path, peaks)

    def write(self) -> None:
        """Replace the file, whole or not at all. Raises BudgetError."""
        text = json.dumps({"version": _VERSION, "peaks": self.peaks}, indent=2, sort_keys=True)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            files.write(self.path, f"{text}\n".encode())
        except OSError as error:
            raise BudgetError(f"{self.path}: the memory baseline cannot be written: {error}") from None

    def entry(self, device: str, test: str) -> Mapping[str, int | None] | None:
        """What was saved for a test on a device."""
        return self.peaks.get(device, {}).get(test)

    def update(self, records: Iterable[Mapping[str, Any]]) -> int:
        """Take over the peaks of records; how many changed."""
        changed = 0
        for record in records:
            entries = self.peaks.setdefault(device_key(record), {})
            new = {"peak": record["peak"], "reserved": record["reserved"]}
            changed += entries.get(record["test"]) != new
            entries[record["test"]] = new
        return changed

    def drop(self, device: str, tests: Iterable[str]) -> None:
        """Forget tests that are gone."""
        for test in tests:
            self.peaks.get(device, {}).pop(test, None)

    def stale(self, device: str, collected: Iterable[str]) -> list[str]:
        """Saved tests whose file was collected and that were not in it any more."""
        there = set(collected)
        files = {test.partition("::")[0] for test in there}
        return sorted(t for t in self.peaks.get(device, {}) if t.partition("::")[0] in files and t not in there)


def device_key(record: Mapping[str, Any]) -> str:
    """The set that a record belongs to: sizes depend on the card and the torch version, on the CPU only on torch."""
    version = ".".join(str(record["torch"]).split("+")[0].split(".")[:2])
    name = record["device"] if str(record["device"]).startswith("cpu") else record["card"] or record["device"]
    return f"{name}, torch {version}"


def compare(entry: Mapping[str, int | None], peak: int | None, reserved: int | None, tolerance: float) -> Verdict:
    """Whether the peaks are at most `tolerance` above the saved ones."""
    for word, now, saved in (("allocated", peak, entry["peak"]), ("reserved", reserved, entry["reserved"])):
        if now is None or saved is None or now <= saved * (1 + tolerance):
            continue
        more = f"{now / saved - 1:.1%}" if saved else format_bytes(now)
        message = (
            f"the {word} peak is {format_bytes(now)}, {more} above the baseline of {format_bytes(saved)}"
            f" ({100 * tolerance:.3g}% is allowed)"
        )
        return Verdict("baseline", False, now, saved * (1 + tolerance), message)
    saved, now = entry["peak"], peak
    message = "within the baseline"
    if saved and now is not None:
        message = f"the allocated peak is {format_bytes(now)}, the baseline {format_bytes(saved)}"
        if now < saved * (1 - tolerance):
            message += ": --memory-update-baseline would hold it there"
    return Verdict("baseline", True, peak, None if saved is None else saved * (1 + tolerance), message)


def _whole(value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ValueError(value)
