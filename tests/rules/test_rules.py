"""One test for all rules: their examples, their fixtures, and the fixtures under changes that must not matter."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import libcst as cst
import pytest
from packaging.version import Version

from memlint.lint.analysis import AnalysisSettings, analyse
from memlint.lint.catalog import all_rules
from memlint.lint.model import Edit, Finding, Severity
from memlint.lint.source import SourceFile
from memlint.lint.textedit import apply
from memlint.rules.base import Rule

FIXTURES = Path(__file__).parents[2] / "fixtures" / "rules"
MARK = re.compile(r"#((?: ?,? ML\d{3}(?: \w+)?)+)$")
WANTED = re.compile(r"(ML\d{3})(?: (\w+))?")
RULES = [rule for rule in all_rules() if rule.code != "ML001"]

#: what must not change a verdict
VARIANTS: dict[str, Callable[[str], str]] = {
    "as it is": lambda text: text,
    "another name for torch": lambda text: re.sub(
        r"\btorch\.(?!utils|nn\b|autograd|optim|distributions)", "t.", text
    ).replace("import torch\n", "import torch as t\n"),
    "in a function": lambda text: "def outer():\n" + textwrap.indent(text, "    "),
    "more comments": lambda text: re.sub(r"^( *)(for |while |with |if )", r"\1# a comment\n\1\2", text, flags=re.M),
    "tabs": lambda text: re.sub(r"^(?:    )+", lambda m: "\t" * (len(m.group()) // 4), text, flags=re.M),
}


def check(text: str, rules: list[Rule] | None = None, data: bytes | None = None) -> list[Finding]:
    source = SourceFile("case.py", text.encode() if data is None else data)
    findings, failures = analyse(source, list(all_rules()) if rules is None else rules, AnalysisSettings())
    assert not failures
    return findings


def expected(text: str) -> dict[int, list[tuple[str, str]]]:
    """The codes (and severities, where said) that the lines of a fixture want."""
    wanted: dict[int, list[tuple[str, str]]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        match = MARK.search(line)
        if match:
            wanted[number] = WANTED.findall(match.group(1))
    return wanted


def compare(text: str, findings: list[Finding]) -> None:
    wanted = expected(text)
    lines = text.splitlines()
    for number, codes in wanted.items():
        here = [f for f in findings if f.span.line == number]
        for code, severity in codes:
            hits = [f for f in here if f.code == code and (not severity or severity == f.severity.label)]
            assert hits, f"line {number} wants {code} {severity}: {lines[number - 1].strip()} {here}"
    for finding in findings:
        if finding.severity > Severity.NOTE:
            allowed = {code for code, _ in wanted.get(finding.span.line, [])}
            assert finding.code in allowed, (
                f"{finding.code} at {lines[finding.span.line - 1].strip()}: {finding.message}"
            )


def files(kind: str) -> list[Path]:
    return [path for path in sorted(FIXTURES.glob(f"*/{kind}*.py")) if "fixed" not in path.name]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_examples(rule: Rule) -> None:
    least = min(rule.severity, Severity.WARNING)
    assert [f for f in check(rule.bad, [rule]) if f.severity >= least], "the bad example must be found"
    assert not [f for f in check(rule.good, [rule]) if f.severity >= least], "the good example must be silent"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_documentation(rule: Rule) -> None:
    assert re.fullmatch(r"ML\d{3}", rule.code)
    assert rule.summary().endswith(".")
    assert len(rule.summary()) <= 100
    assert (rule.__doc__ or "").count("\n\n") >= 2, "say what it costs, when it is right after all, what to write"
    for kind in ("hits", "quiet"):
        assert (FIXTURES / rule.code / f"{kind}.py").exists()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_triggers_occur_in_every_hit(rule: Rule) -> None:
    """A file without any trigger is never parsed, so the code that is found must hold one."""
    text = (FIXTURES / rule.code / "hits.py").read_text()
    for statement in cst.parse_module(text).body:
        code = cst.Module(body=[statement]).code
        if rule.code in code:
            assert any(all(word in text for word in words) for words in rule.alternatives())
    assert any(all(word in rule.bad for word in words) for words in rule.alternatives())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("path", files("hits"), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_hits(path: Path, variant: str) -> None:
    text = VARIANTS[variant](path.read_text())
    assert expected(text)
    compare(text, check(text))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("path", files("quiet"), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_quiet(path: Path, variant: str) -> None:
    text = VARIANTS[variant](path.read_text())
    assert not expected(text)
    compare(text, check(text))


@pytest.mark.parametrize("path", files("hits"), ids=lambda path: f"{path.parent.name}-{path.stem}")
@pytest.mark.parametrize("form", ["crlf", "bom"])
def test_other_bytes(path: Path, form: str) -> None:
    text = path.read_text()
    data = text.replace("\n", "\r\n").encode() if form == "crlf" else b"\xef\xbb\xbf" + text.encode()
    compare(text, check(text, data=data))


def fixed(text: str, *, unsafe: bool) -> str:
    """`text` with all fixes applied, round after round as the engine does."""
    for _ in range(10):
        edits: set[Edit] = set()
        for finding in check(text):
            if finding.fix is not None and (finding.fix.safe or unsafe):
                taken = {(edit.span.line, edit.span.column) for edit in edits}
                if not any((edit.span.line, edit.span.column) in taken for edit in finding.fix.edits):
                    edits |= set(finding.fix.edits)
        if not edits:
            break
        text = apply(text, sorted(edits, key=lambda edit: edit.span), "\n")
    return text


@pytest.mark.parametrize("unsafe", [False, True], ids=["safe", "unsafe"])
@pytest.mark.parametrize("path", files("hits"), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_fixes(path: Path, unsafe: bool) -> None:
    """A fixed file compiles, has nothing left to fix, and fixing it again changes nothing."""
    text = path.read_text()
    after = fixed(text, unsafe=unsafe)
    compile(after, str(path), "exec")
    left = [f for f in check(after) if f.fix is not None and (f.fix.safe or unsafe)]
    assert not left
    assert fixed(after, unsafe=unsafe) == after
    golden = path.with_name(path.stem + ".fixed.py")
    if unsafe:
        assert after == (golden if golden.exists() else path).read_text()


@pytest.mark.parametrize("path", files("hits"), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_messages_name_things(path: Path) -> None:
    for finding in check(path.read_text()):
        assert len(finding.message) < 500
        assert "\n" not in finding.message
        assert finding.message[-1] in ".)?", finding.message


@pytest.mark.parametrize(
    ("oldest", "severity"),
    [(None, Severity.NOTE), ("1.6", Severity.NOTE), ("1.7", Severity.WARNING), ("1.13.1", Severity.WARNING)],
)
def test_bare_zero_grad_depends_on_the_oldest_torch(oldest: str | None, severity: Severity) -> None:
    text = "def f(m, l, opt):\n    for x in l:\n        opt.zero_grad()\n        m(x).backward()\n        opt.step()\n"
    version = Version(oldest) if oldest is not None else None
    findings, _ = analyse(SourceFile("case.py", text.encode()), list(all_rules()), AnalysisSettings(version))
    assert [(f.code, f.severity) for f in findings] == [("ML203", severity)]


def test_bare_zero_grad_is_right_since_torch_2() -> None:
    text = "def f(m, l, opt):\n    for x in l:\n        opt.zero_grad()\n        m(x).backward()\n        opt.step()\n"
    findings, _ = analyse(SourceFile("case.py", text.encode()), list(all_rules()), AnalysisSettings(Version("2.0")))
    assert not findings


@pytest.mark.parametrize(
    "kept",
    [
        'history.append({"loss": loss})',
        "history.append((loss, 1))",
        "result = [loss]; history.append(result)",
        "losses = [loss]; history.extend(losses)",
        "history = history + [loss, loss]",
        "history += [loss, loss]",
        "history.extend(loss for _ in range(2))",
    ],
)
def test_containers_are_not_detached(kept: str) -> None:
    """Only tensors have a `detach`: what holds tensors gets no such fix and no such advice."""
    text = f"""
def train(model, loader, criterion, optimizer):
    history = []
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        {kept}
    return history
"""
    found = [finding for finding in check(text) if finding.code == "ML102"]
    assert found
    for finding in found:
        assert finding.fix is None
        assert ".detach()" not in finding.message
