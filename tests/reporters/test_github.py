"""GitHub's workflow commands."""

from __future__ import annotations

from memlint.lint.model import Report
from memlint.reporters import render
from tests.reporters.samples import REPORT, VIEW


def test_github() -> None:
    assert render("github", REPORT, VIEW).splitlines() == [
        "::error file=nowhere,title=memlint cannot check this file (unreadable)::no such file or folder",
        "::error file=broken.py,line=7,title=memlint cannot check this file (syntax)::invalid%0Asyntax",
        "::error file=src/ein ß.py,line=3,endLine=3,col=10,endColumn=30,title=ML101 accumulated-graph::"
        "100 %25 of `losses[0](x)`,%0Aevery time.%0Amain.py:3:5: made, here",
        "::warning file=n.ipynb,line=1,title=ML101 accumulated-graph::cell 3, line 2: In a cell.%0A"
        "n.ipynb:cell 1:1:1: made here",
        "::warning file=src/ein ß.py,line=4,endLine=5,title=ML401 evaluation::Look <here> & \x1b.",
        "::notice file=z.py,line=1,endLine=1,col=1,endColumn=7,title=ML203 zeroing::Hm.",
    ]
    assert render("github", Report(), VIEW) == ""


def test_properties_escape_what_separates_them() -> None:
    from dataclasses import replace

    from memlint.lint.model import FileResult
    from tests.reporters.samples import NOTE

    odd = replace(NOTE, path="a,b:c%.py\r", message="x: y, z\r\n::error::no")
    (line,) = render("github", Report((FileResult(odd.path, (odd,)),)), VIEW).splitlines()
    assert line.startswith("::notice file=a%2Cb%3Ac%25.py%0D,line=1,")
    assert line.endswith("::x: y, z%0D%0A::error::no")
