"""Results of files that have not changed since they were last checked.

An entry stands for a path under a configuration, so the cache grows with the project and not with its history. It is
used only if its key agrees (the file's bytes, the settings, the versions of memlint and Python, the source of the
linter itself), and if the other files that were asked are still the same. What cannot be read is as good as absent;
what cannot be written is not written.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import memlint
from memlint.lint.model import Edit, FileResult, Finding, Fix, Related, Severity, Span

if TYPE_CHECKING:
    from memlint.lint.project import Dependencies

FOLDER = ".memlint_cache"
_CACHEDIR_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# This folder is memlint's cache and can be deleted.\n"


class Cache:
    """A folder of entries. `settings` is all beside the file that decides about its result."""

    def __init__(self, root: Path, settings: str) -> None:
        self.folder = root / FOLDER
        self._settings = settings

    def key(self, data: bytes, torch: str, place: str = "") -> str:
        """What must agree for an entry to hold.

        `torch` says which versions the file's project supports, `place` how fingerprints name the file.
        """
        return _digest(data, torch.encode(), os.fsencode(place), self._settings.encode(), _own_source())

    def get(self, path: str, key: str, holds: Callable[[Dependencies], bool]) -> FileResult | None:
        """The result of the file shown as `path`, if the entry has this key and what it rests on `holds`."""
        try:
            entry = json.loads(self._entry(path).read_bytes())
            if entry["key"] != key or not holds(entry["rests on"]):
                return None
            return _decode(path, entry["result"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None

    def put(self, result: FileResult, key: str, dependencies: Dependencies) -> None:
        """Keep a result that has no failures, and what it rests on beside the file itself."""
        entry = self._entry(result.path)
        try:
            if not entry.parent.is_dir():
                self._make(entry.parent)
            handle, temporary = tempfile.mkstemp(dir=entry.parent)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump({"key": key, "rests on": dependencies, "result": _encode(result)}, file)
                os.replace(temporary, entry)
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError:
            pass  # a cache that cannot be written only costs time

    def _entry(self, path: str) -> Path:
        name = _digest(os.fsencode(path), self._settings.encode())
        return self.folder / memlint.__version__ / name[:2] / f"{name[2:]}.json"

    def _make(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in ((".gitignore", "*\n"), ("CACHEDIR.TAG", _CACHEDIR_TAG)):
            if not (self.folder / name).exists():
                (self.folder / name).write_text(text, encoding="utf-8")


def _digest(*parts: bytes) -> str:
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(len(part).to_bytes(8, "big"))
        state.update(part)
    return state.hexdigest()


@functools.cache
def _own_source() -> bytes:
    """What identifies the linter that runs: a changed rule makes old results worthless even within a version."""
    state = hashlib.blake2b(f"{memlint.__version__} {platform.python_version()}".encode(), digest_size=16)
    package = Path(memlint.__file__).parent
    for folder in ("lint", "rules"):
        for path in sorted((package / folder).rglob("*.py")):
            state.update(path.relative_to(package).as_posix().encode())
            state.update(path.read_bytes())
    return state.digest()


def _encode(result: FileResult) -> dict[str, Any]:
    return {"findings": [_encode_finding(f) for f in result.findings], "suppressed": result.suppressed}


def _encode_finding(finding: Finding) -> dict[str, Any]:
    fix = finding.fix
    return {
        "code": finding.code,
        "name": finding.name,
        "severity": finding.severity.value,
        "message": finding.message,
        "span": _encode_span(finding.span),
        "cell": finding.cell,
        "fix": fix and [fix.label, fix.safe, [[_encode_span(e.span), e.text] for e in fix.edits]],
        "related": [[r.message, r.path, _encode_span(r.span), r.cell] for r in finding.related],
        "fingerprint": finding.fingerprint,
    }


def _encode_span(span: Span) -> list[int]:
    return [span.line, span.column, span.end_line, span.end_column]


def _decode(path: str, entry: dict[str, Any]) -> FileResult:
    findings = tuple(_decode_finding(path, item) for item in entry["findings"])
    return FileResult(path, findings, suppressed=entry["suppressed"])


def _decode_finding(path: str, item: dict[str, Any]) -> Finding:
    fix = None
    if item["fix"] is not None:
        label, safe, edits = item["fix"]
        fix = Fix(label, tuple(Edit(Span(*span), text) for span, text in edits), safe)
    related = tuple(Related(message, other, Span(*span), cell) for message, other, span, cell in item["related"])
    return Finding(
        item["code"],
        item["name"],
        Severity(item["severity"]),
        item["message"],
        path,
        Span(*item["span"]),
        item["cell"],
        fix,
        related,
        item["fingerprint"],
    )
