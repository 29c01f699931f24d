"""What nests too deep to be parsed safely, told from bytes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from memlint.lint.depth import MAX_BRACKETS, MAX_TERMS, complaint
from memlint.lint.engine import check_text
from memlint.lint.model import FailureKind
from tests.fakes import RULES, config

#: code that nests `n` deep
SHAPES: dict[str, Callable[[int], str]] = {
    "parentheses": lambda n: "(" * n + "bad" + ")" * n,
    "lists": lambda n: "[" * n + "bad" + "]" * n,
    "tuples in lists": lambda n: "[(1," * (n // 2) + "bad" + ")]" * (n // 2),
    "calls": lambda n: "f(" * n + "bad" + ")" * n,
    "unclosed": lambda n: "bad, " + "(" * n,
    "in lines": lambda n: "f(\n" * n + "bad" + "\n)" * n,
}
CHAINS: dict[str, Callable[[int], str]] = {
    "attributes": lambda n: "bad" + ".b" * n,
    "calls": lambda n: "bad" + "()" * n,
    "sum": lambda n: "bad + " * n + "1",
    "minus": lambda n: "-" * n + "bad",
    "not": lambda n: "not " * n + "bad",
    "lambda": lambda n: "lambda: " * n + "bad",
    "ternary": lambda n: "bad if a else " * n + "1",
    "strings": lambda n: "bad," + '"a" ' * n,
    "strings in lines": lambda n: "(bad," + '"a"\n' * n + ")",
    "power": lambda n: "bad**" * n + "1",
    "continued": lambda n: "bad + \\\n" * n + "1",
    "branches": lambda n: "if bad:\n    1\n" + "elif 2:\n    1\n" * n,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_brackets(shape: str) -> None:
    make = SHAPES[shape]
    assert complaint(make(MAX_BRACKETS - 4).encode()) is None
    assert complaint(make(MAX_BRACKETS + 2).encode()) == f"more than {MAX_BRACKETS} nested brackets"
    assert complaint(make(100_000).encode()) is not None


@pytest.mark.parametrize("shape", CHAINS)
def test_chains(shape: str) -> None:
    make = CHAINS[shape]
    assert complaint(make(MAX_TERMS - 4).encode()) is None
    assert str(MAX_TERMS) in str(complaint(make(MAX_TERMS + 2).encode()))


@pytest.mark.parametrize(
    "code",
    [
        "x = [" + "-1, " * 50_000 + "]",
        "x = {" + "'a': (1, [2, 3]),\n" * 20_000 + "}",
        "x = 1\n" * 50_000,
        "x = '" + "(" * 5000 + "'",
        '"""' + "( a.b.c - " * 5000 + '"""',
        "# " + "((((" * 500 + "\nx = 1\n",
        "x = 'it''s (' \n" * 3000,
        "def f():\n    return a.b.c + d.e.f\n" * 3000,
        "f(a)(b)\n" * 3000,
        "x = 1;" * 5000,
        "x = r'\\'\n" * 5000 + "y = '('" * 3,
    ],
)
def test_long_is_not_deep(code: str) -> None:
    assert complaint(code.encode()) is None


@pytest.mark.parametrize("make", [*SHAPES.values(), *CHAINS.values()], ids=[*SHAPES, *CHAINS])
def test_what_is_let_through_is_judged_and_the_process_lives(make: Callable[[int], str]) -> None:
    """At the very limits, in a process of its own: a stack overflow must not take pytest with it."""
    limit = MAX_BRACKETS - 4 if make in SHAPES.values() else 1000
    program = (
        "import sys; from pathlib import Path; from memlint.lint.engine import check_text; from tests.fakes import *\n"
        "report, _ = check_text(sys.stdin.buffer.read(), 'a.py', config(Path.cwd()), rules=RULES)\n"
        "print([f.code for f in report.findings][:1], [f.kind.value for f in report.all_failures])"
    )
    code = make(limit) + "\n"
    run = subprocess.run([sys.executable, "-c", program], input=code, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ("[] ['syntax']" if make is SHAPES["unclosed"] else "['ML901'] []")


@pytest.mark.parametrize("make", [*SHAPES.values(), *CHAINS.values()], ids=[*SHAPES, *CHAINS])
def test_what_is_not_let_through_is_a_failure(make: Callable[[int], str], tmp_path: Path) -> None:
    code = f"bad\n{make(20_000)}\n".encode()
    report, _ = check_text(code, "a.py", config(tmp_path), rules=RULES)
    (failure,) = report.all_failures
    assert failure.kind is FailureKind.TOO_DEEP


def test_indentation_is_limited_by_the_parser() -> None:
    deep = "".join(" " * level + "if bad:\n" for level in range(99)) + " " * 99 + "bad\n"
    too_deep = "".join(" " * level + "if bad:\n" for level in range(5000)) + " " * 5000 + "bad\n"
    assert not check_text(deep.encode(), "a.py", config(Path.cwd()), rules=RULES)[0].all_failures
    (failure,) = check_text(too_deep.encode(), "a.py", config(Path.cwd()), rules=RULES)[0].all_failures
    assert failure.kind is FailureKind.SYNTAX
