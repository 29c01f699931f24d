"""A report that holds one of everything, for the formats that CI systems read."""

from __future__ import annotations

from memlint.lint.model import Edit, Failure, FailureKind, FileResult, Finding, Fix, Related, Report, Severity, Span
from memlint.reporters import RuleText, View

CODE = "import torch\n\nß = '表'; total += losses[0](x)\nf(a,\n  b)\n"
FIX = Fix("add .detach()", (Edit(Span(3, 30, 3, 30), ".detach()"),), safe=True)
ERROR = Finding(
    "ML101",
    "accumulated-graph",
    Severity.ERROR,
    "100 % of `losses[0](x)`,\nevery time.",
    "src/ein ß.py",
    Span(3, 10, 3, 30),
    fix=FIX,
    related=(Related("made, here", "main.py", Span(3, 5, 3, 9)),),
    fingerprint="0123456789abcdef:1",
)
LONG = Finding("ML401", "evaluation", Severity.WARNING, "Look <here> & \x1b.", "src/ein ß.py", Span(4, 1, 5, 5))
NOTE = Finding("ML203", "zeroing", Severity.NOTE, "Hm.", "z.py", Span(1, 1, 1, 7), fingerprint="aaaa:2")
CELL = Finding(
    "ML101",
    "accumulated-graph",
    Severity.WARNING,
    "In a cell.",
    "n.ipynb",
    Span(2, 1, 2, 4),
    cell=3,
    fix=FIX,
    related=(Related("made here", "n.ipynb", Span(1, 1, 1, 2), 1),),
    fingerprint="bbbb:1",
)
SYNTAX = Failure("broken.py", FailureKind.SYNTAX, "invalid\nsyntax", 7)
NOWHERE = Failure("nowhere", FailureKind.UNREADABLE, "no such file or folder")
REPORT = Report(
    (
        FileResult("broken.py", failures=(SYNTAX,)),
        FileResult("clean.py", suppressed=2, fixed=1, baselined=(NOTE,)),
        FileResult("n.ipynb", (CELL,)),
        FileResult("src/ein ß.py", (ERROR, LONG)),
        FileResult("z.py", (NOTE,)),
    ),
    (NOWHERE,),
    stale=4,
)
RULE = RuleText("ML101", "accumulated-graph", Severity.ERROR, "Adds.", "Adds. More.", "Plain help", "*Help*")


def lines(path: str, cell: int | None) -> list[str]:
    return CODE.split("\n") if path == "src/ein ß.py" else []


VIEW = View(lines=lines, rules=(RULE,), exit_code=2)
