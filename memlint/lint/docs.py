"""What the rules say about themselves: `memlint explain`, `memlint rules`, docs/rules.md and the README's table.

python -m memlint.lint.docs     write docs/rules.md, and the table between the README's markers
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from memlint.lint.catalog import all_rules
from memlint.rules.base import Rule

_EXAMPLE = re.compile(
    r"(?<=<!-- example:begin -->\n)```python\n(?P<code>.*?)```\n.*?(?=<!-- example:end -->)", re.DOTALL
)
_TABLE = re.compile(r"(?<=<!-- rules:begin -->\n).*?(?=<!-- rules:end -->)", re.DOTALL)
_EXAMPLE_FILE = "train.py"
_EXAMPLE_WIDTH = 96


def table(rules: Sequence[Rule], pages: str) -> str:
    """A Markdown table of the rules; `pages` is the path of rules.md from where the table stands."""
    rows = ["| code | name | severity | what it finds |", "| --- | --- | --- | --- |"]
    for rule in rules:
        link = f"[{rule.code}]({pages}#{rule.code.lower()})"
        rows.append(f"| {link} | {rule.name} | {rule.severity.label} | {rule.summary()} |")
    return "\n".join(rows) + "\n"


def page(rules: Sequence[Rule]) -> str:
    """docs/rules.md."""
    head = (
        "# Rules\n\nWritten from the rules by `python -m memlint.lint.docs`. The severity is the one that a rule "
        "usually gives; a finding may be graver or milder.\n\n"
    )
    return head + table(rules, "") + "".join(_section(rule) for rule in rules)


def _section(rule: Rule) -> str:
    return (
        f'\n<a id="{rule.code.lower()}"></a>\n\n## {rule.code} {rule.name}\n\nSeverity: {rule.severity.label}\n\n'
        f"{markdown(rule)}"
    )


def markdown(rule: Rule) -> str:
    """What a rule is about, with its examples."""
    return (
        f"{documentation(rule)}\n\nFound:\n\n```python\n{rule.bad.strip()}\n```\n\n"
        f"Not found:\n\n```python\n{rule.good.strip()}\n```\n"
    )


def documentation(rule: Rule) -> str:
    """The docstring of the rule, without its indentation."""
    return inspect.cleandoc(type(rule).__doc__ or "")


def readme(text: str, rules: Sequence[Rule]) -> str:
    """The README's text with its table of rules and its example's output written anew.

    Raises ValueError where it lacks the markers.
    """
    for pattern, made in ((_TABLE, lambda _: table(rules, "docs/rules.md")), (_EXAMPLE, _example)):
        text, count = pattern.subn(made, text)
        if count != 1:
            raise ValueError(f"the README lacks the markers of {pattern.pattern}")
    return text


def _example(match: re.Match[str]) -> str:
    """The README's example, and what memlint says of it."""
    from memlint.config import Config
    from memlint.lint.engine import check_text
    from memlint.lint.source import SourceLines
    from memlint.reporters import View, render

    code = match["code"].encode()
    report, _ = check_text(code, _EXAMPLE_FILE, Config(root=Path.cwd(), target_torch="2.0", cache=False))
    said = render("text", report, View(width=_EXAMPLE_WIDTH, lines=SourceLines({_EXAMPLE_FILE: code})))
    return f"```python\n{match['code']}```\n\n```console\n$ memlint check {_EXAMPLE_FILE}\n{said}```\n"


def explained(rule: Rule, width: int, colour: bool) -> str:
    """All about a rule, for the terminal."""
    from memlint.reporters.styled import STYLES, Line, emit, wrap

    lines: list[Line] = [
        [(rule.code, STYLES[rule.severity]), (f" {rule.name}", "bold"), (f" ({rule.severity.label})", "")],
        [],
    ]
    for paragraph in _paragraphs(documentation(rule)):
        listed = [[(line, "")] for line in paragraph] if _is_literal(paragraph) else None
        lines += listed or [[(line, "")] for line in wrap(" ".join(paragraph), width)]
        lines.append([])
    for title, code in (("Found:", rule.bad), ("Not found:", rule.good)):
        lines += [[(title, "bold")], *([(f"    {line}", "")] for line in code.strip().splitlines()), []]
    lines.append([("Silence a single place with ", ""), (f"# memlint: ignore[{rule.code}] why", "bold")])
    return emit(lines, colour)


def listed(rules: Sequence[Rule], width: int, colour: bool) -> str:
    """All rules, for the terminal."""
    from memlint.reporters.styled import STYLES, Line, emit, wrap

    column = max((len(rule.name) for rule in rules), default=0)
    lines: list[Line] = []
    for rule in rules:
        label = f"{rule.code}  {rule.name:<{column}}  {rule.severity.label:<7}  "
        first, *rest = wrap(label + rule.summary(), width, rest=" " * min(len(label), width // 2))
        lines.append([(rule.code, STYLES[rule.severity]), (first.removeprefix(rule.code), "")])
        lines += [[(line, "")] for line in rest]
    return emit(lines, colour)


def _paragraphs(text: str) -> Iterator[list[str]]:
    for paragraph in re.split(r"\n\s*\n", text):
        yield paragraph.splitlines()


def _is_literal(paragraph: Sequence[str]) -> bool:
    """Whether a paragraph's lines must stay as they are: lists and code."""
    return any(line.startswith((" ", "- ", "* ", "    ")) for line in paragraph)


def main(root: Path) -> None:
    """Write what is made from the rules."""
    rules = all_rules()
    (root / "docs").mkdir(exist_ok=True)
    (root / "docs" / "rules.md").write_text(page(rules), encoding="utf-8")
    page_of_project = root / "README.md"
    page_of_project.write_text(readme(page_of_project.read_text(encoding="utf-8"), rules), encoding="utf-8")


if __name__ == "__main__":
    main(Path(__file__).parents[2])
