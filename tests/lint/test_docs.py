"""The documentation that is made from the rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from memlint.lint import docs
from memlint.lint.catalog import all_rules
from tests.fakes import RULES

ROOT = Path(__file__).parents[2]
REMAKE = "run `python -m memlint.lint.docs`"


def test_the_page_of_rules_is_up_to_date() -> None:
    assert (ROOT / "docs/rules.md").read_text(encoding="utf-8") == docs.page(all_rules()), REMAKE


def test_the_readme_is_up_to_date() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert docs.readme(text, all_rules()) == text, REMAKE


def test_a_readme_without_markers_is_an_error() -> None:
    with pytest.raises(ValueError, match="lacks the markers"):
        docs.readme("# memlint\n", RULES)


def test_every_rule_is_on_the_page() -> None:
    page = docs.page(all_rules())
    for rule in all_rules():
        assert f'<a id="{rule.code.lower()}"></a>' in page
        assert f"](#{rule.code.lower()})" in page
        assert rule.summary() in page


def test_lists_and_code_in_an_explanation_keep_their_lines() -> None:
    class Listed(type(RULES[1])):  # type: ignore[misc]
        """Summary.

        Some text that is
        one paragraph.

        - first
        - second
        """

        bad = good = "x = 1\n"

    assert "Some text that is one paragraph.\n\n- first\n- second\n\nFound:" in docs.explained(Listed(), 80, False)
