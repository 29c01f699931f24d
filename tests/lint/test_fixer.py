"""Fixes: which go together, and that a file is changed as a whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlint.lint import fixer
from memlint.lint.engine import check, check_text
from memlint.lint.fixer import choose
from memlint.lint.model import Edit, FailureKind, Finding, Fix, Severity, Span
from memlint.lint.textedit import apply
from tests.fakes import RULES, config, notebook, places


def fixed(code: str, **settings: object) -> str:
    return check_text(code.encode(), "a.py", config(Path.cwd(), fix=True, **settings), rules=RULES)[1].decode()


def finding(*edits: Edit, safe: bool = True) -> Finding:
    return Finding("ML901", "n", Severity.WARNING, "m", "a.py", Span(1, 1, 1, 1), fix=Fix("f", edits, safe))


def edit(start: int, end: int, text: str) -> Edit:
    return Edit(Span(1, start, 1, end), text)


# -- which edits go together -------------------------------------------------------------------------------------------


def test_equal_fixes_are_made_once() -> None:
    same = edit(1, 3, "x")
    assert choose([finding(same), finding(same)]) == ([same], 2)


def test_a_shared_edit_is_made_once_where_once_is_enough() -> None:
    line, one, other = edit(1, 1, "import torch\n"), edit(3, 4, "a"), edit(5, 6, "b")
    assert choose([finding(line, one), finding(line, other)]) == ([line, one, other], 2)


def test_two_brackets_at_one_place_are_not_one() -> None:
    inner, outer = (edit(1, 1, "("), edit(3, 3, ").a()")), (edit(1, 1, "("), edit(5, 5, ").b()"))
    assert choose([finding(*inner), finding(*outer)]) == (list(inner), 1)


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        (edit(1, 3, "a"), edit(3, 5, "b"), True),
        (edit(1, 3, "a"), edit(2, 5, "b"), False),
        (edit(1, 5, "a"), edit(2, 3, "b"), False),
        (edit(1, 3, "a"), edit(1, 3, "b"), False),
        (edit(2, 2, "a"), edit(2, 2, "b"), False),
        (edit(2, 2, "a"), edit(1, 3, "b"), False),
        (edit(1, 1, "a"), edit(1, 3, "b"), False),
        (edit(3, 3, "a"), edit(1, 3, "b"), False),
        (edit(4, 4, "a"), edit(1, 3, "b"), True),
    ],
)
def test_edits_that_touch_wait_for_the_next_round(one: Edit, other: Edit, together: bool) -> None:
    for first, second in ((one, other), (other, one)):
        edits, count = choose([finding(first), finding(second)])
        assert (edits, count) == (([first, second], 2) if together else ([first], 1))


def test_a_fix_is_taken_whole_or_not_at_all() -> None:
    first, late, blocked = edit(1, 3, "a"), edit(7, 8, "b"), edit(2, 4, "c")
    assert choose([finding(first), finding(late, blocked)]) == ([first], 1)


SPANS = st.tuples(st.integers(1, 9), st.integers(0, 3), st.sampled_from(["", "x", "(", "y\n"]))
EDITS = SPANS.map(lambda t: edit(t[0], min(t[0] + t[1], 10), t[2]))


@given(st.lists(st.lists(EDITS, min_size=1, max_size=3, unique=True), max_size=6))
def test_whatever_is_chosen_can_be_applied(fixes: list[list[Edit]]) -> None:
    sound = []
    for edits in fixes:
        try:
            apply("123456789", edits, "\n")
        except ValueError:
            continue
        if choose([finding(*edits)])[1]:
            sound.append(finding(*edits))
    edits, count = choose(sound)
    assert len(edits) == len(set(edits))
    assert (count > 0) == bool(sound)
    apply("123456789", edits, "\n")


WORDS = st.sampled_from(["bad", "grave", "hmm", "good", "x.bad", "(bad)", "bad.grave", "# bad", "'bad'"])


@given(st.lists(st.lists(WORDS, max_size=3), max_size=5), st.booleans())
def test_a_fixed_file_is_clean_and_fixing_it_again_changes_nothing(lines: list[list[str]], unsafe: bool) -> None:
    code = "".join("; ".join(line) + "\n" for line in lines)
    once = fixed(code, unsafe_fixes=unsafe)
    assert fixed(once, unsafe_fixes=unsafe) == once
    report, _ = check_text(once.encode(), "a.py", config(Path.cwd()), rules=RULES)
    assert not [f for f in report.findings if fixer.applicable(f, unsafe)]
    if "bad" not in code and not (unsafe and "grave" in code):
        assert once == code


# -- files -------------------------------------------------------------------------------------------------------------


def test_safe_fixes_only_unless_asked(project: Path) -> None:
    path = project / "a.py"
    path.write_text("bad = grave\n", encoding="utf-8")
    report = check(["a.py"], config(project, fix=True), rules=RULES)
    assert path.read_text(encoding="utf-8") == "good = grave\n"
    assert places(report) == [("a.py", 1, "ML902")]
    assert report.results[0].fixed == 1
    check(["a.py"], config(project, fix=True, unsafe_fixes=True), rules=RULES)
    assert path.read_text(encoding="utf-8") == "good = light\n"


def test_encoding_bom_newlines_and_mode_stay(project: Path) -> None:
    path = project / "a.py"
    for data in (
        "# coding: latin-1\r\nbad = 'é'\r\n".encode("latin-1"),
        b"\xef\xbb\xbfbad = 1\n",
        b"bad\r",
        b"\x0cbad",
    ):
        path.write_bytes(data)
        path.chmod(0o751)
        check(["a.py"], config(project, fix=True), rules=RULES)
        assert path.read_bytes() == data.replace(b"bad", b"good")
        assert stat.S_IMODE(path.stat().st_mode) == 0o751
        assert os.listdir(project) == ["a.py"]


def test_a_link_stays_a_link(project: Path) -> None:
    (project / "real.py").write_text("bad\n", encoding="utf-8")
    (project / "link.py").symlink_to("real.py")
    check(["link.py"], config(project, fix=True), rules=RULES)
    assert (project / "link.py").is_symlink()
    assert (project / "real.py").read_text(encoding="utf-8") == "good\n"


def test_an_unchanged_file_is_not_written(project: Path) -> None:
    path = project / "a.py"
    path.write_text("grave\n", encoding="utf-8")
    os.utime(path, (1, 1))
    check(["a.py"], config(project, fix=True), rules=RULES)
    assert path.stat().st_mtime == 1


def test_notebooks(project: Path) -> None:
    path = project / "n.ipynb"
    before = notebook("%magic bad\nx = bad", "y = 'é'", "bad\n")
    path.write_text(before, encoding="utf-8")
    report = check(["n.ipynb"], config(project, fix=True), rules=RULES)
    assert places(report) == []
    assert path.read_text(encoding="utf-8") == before.replace("x = bad", "x = good").replace('"bad\\n"', '"good\\n"')


@pytest.mark.parametrize(
    ("code", "reason"), [("x = fragile\n", "would break the file"), ("x = round\n", "go in circles")]
)
def test_a_fix_that_does_harm_leaves_the_file_alone(project: Path, code: str, reason: str) -> None:
    path = project / "a.py"
    path.write_text(f"bad\n{code}", encoding="utf-8")
    report = check(["a.py"], config(project, fix=True), rules=RULES)
    assert path.read_text(encoding="utf-8") == f"bad\n{code}"
    (failure,) = report.all_failures
    assert failure.kind is FailureKind.BAD_FIX
    assert reason in failure.detail
    assert places(report)[0] == ("a.py", 1, "ML901")
    assert report.results[0].fixed == 0


def test_a_file_whose_places_are_uncertain_is_not_fixed(project: Path) -> None:
    """libcst loses the space before the colon, so what follows on that line is not where it says."""
    path = project / "a.py"
    code = "try:\n    x\nexcept OSError : bad\n"
    path.write_text(code, encoding="utf-8")
    (failure,) = check(["a.py"], config(project, fix=True), rules=RULES).all_failures
    assert (failure.kind, path.read_text(encoding="utf-8")) == (FailureKind.BAD_FIX, code)


def test_a_file_that_cannot_be_written_is_a_failure(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "a.py").write_text("bad\n", encoding="utf-8")

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    report = check(["a.py"], config(project, fix=True), rules=RULES)
    (failure,) = report.all_failures
    assert failure.detail == "the fixed file cannot be written: Read-only file system"
    assert os.listdir(project) == ["a.py"]


def test_ctrl_c_while_writing_leaves_the_old_file_and_nothing_else(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = project / "a.py"
    path.write_text("bad\n", encoding="utf-8")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        check(["a.py"], config(project, fix=True), rules=RULES)
    assert path.read_text(encoding="utf-8") == "bad\n"
    assert os.listdir(project) == ["a.py"]


def test_diff_shows_and_writes_nothing(project: Path) -> None:
    path = project / "a.py"
    path.write_bytes(b"x = 1\r\nbad\x0c\r\ny")
    report = check(["a.py"], config(project, diff=True), rules=RULES)
    assert path.read_bytes() == b"x = 1\r\nbad\x0c\r\ny"
    assert report.results[0].diff == (
        "--- a.py\n+++ a.py\n@@ -1,3 +1,3 @@\n x = 1\r\n-bad\x0c\r\n+good\x0c\r\n y\n\\ No newline at end of file\n"
    )


def test_the_diff_of_a_notebook_is_one_a_cell(project: Path) -> None:
    (project / "n.ipynb").write_text(notebook("a", "bad", "bad\n"), encoding="utf-8")
    (result,) = check(["n.ipynb"], config(project, diff=True), rules=RULES).results
    assert [line for line in result.diff.splitlines() if line.startswith("+++")] == [
        "+++ n.ipynb:cell 2",
        "+++ n.ipynb:cell 3",
    ]
