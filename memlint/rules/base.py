"""What a rule is, and the drafts that it yields before positions are known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import libcst as cst

from memlint.lint.model import Severity

if TYPE_CHECKING:
    from memlint.lint.flow import Flow


@dataclass(frozen=True, slots=True)
class NodeEdit:
    """An edit at a node, before its place in the file is known.

    `before` and `after` are inserted around the node's text; `replace` (if not None) takes its place.
    """

    node: cst.CSTNode
    before: str = ""
    after: str = ""
    replace: str | None = None
    #: also delete from the end of this node (an argument's predecessor, say) up to `node`
    since: cst.CSTNode | None = None
    #: also delete from `node` up to the start of this node (an argument's successor)
    until: cst.CSTNode | None = None


@dataclass(frozen=True, slots=True)
class DraftFix:
    """A fix in terms of nodes."""

    label: str
    edits: tuple[NodeEdit, ...]
    safe: bool


@dataclass(frozen=True, slots=True)
class Draft:
    """A finding in terms of nodes; the engine turns it into a `Finding`."""

    code: str
    name: str
    severity: Severity
    message: str
    node: cst.CSTNode
    fix: DraftFix | None = None
    related: tuple[tuple[cst.CSTNode, str], ...] = ()


class Rule:
    """Base of all rules. A subclass is one file, found by name, listed nowhere.

    The class docstring is the rule's only documentation: its first line is the summary (README, SARIF), the rest
    the explanation. `bad` and `good` are examples that the tests run: the rule must find `bad` and be silent on
    `good`.
    """

    code: ClassVar[str]
    name: ClassVar[str]
    #: the severity that the rule usually gives; single findings may be milder or graver
    severity: ClassVar[Severity]
    #: words of which a file must hold at least one to hold a hit; where an entry is itself a tuple, all of its words
    triggers: ClassVar[tuple[str | tuple[str, ...], ...]]
    bad: ClassVar[str]
    good: ClassVar[str]

    def check(self, flow: Flow) -> Iterator[Draft]:
        """Yield what is wrong in the file behind `flow`."""
        raise NotImplementedError

    def finding(
        self,
        node: cst.CSTNode,
        message: str,
        *,
        severity: Severity | None = None,
        fix: DraftFix | None = None,
        related: Iterable[tuple[cst.CSTNode | None, str]] = (),
    ) -> Draft:
        """A draft of this rule at `node`."""
        places = tuple((place, text) for place, text in related if place is not None)
        level = self.severity if severity is None else severity
        return Draft(self.code, self.name, level, message, node, fix, places)

    @classmethod
    def alternatives(cls) -> tuple[frozenset[str], ...]:
        """The triggers as sets of words: a file can hold a hit only if it holds all words of one of them."""
        return tuple(frozenset((entry,) if isinstance(entry, str) else entry) for entry in cls.triggers)

    @classmethod
    def summary(cls) -> str:
        """The first line of the documentation."""
        return (cls.__doc__ or "").strip().splitlines()[0]
