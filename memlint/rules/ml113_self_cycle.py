"""ML113: objects that hold themselves."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow.facts import CallEvent, FunctionFlow
from memlint.lint.flow.index import ClassInfo, FunctionInfo, statements
from memlint.lint.flow.syntax import walk
from memlint.lint.flow.values import Instance, Kind
from memlint.lint.imports import dotted
from memlint.lint.model import Severity
from memlint.rules import wording
from memlint.rules.base import Draft, Rule
from memlint.rules.statements import assignments, body_of, flat, parts

_HEAVY = frozenset("model net network module optimizer policy agent actor critic encoder decoder".split())


class SelfCycle(Rule):
    """A module or trainer keeps a bound method or lambda of itself on an attribute.

    The method holds `self`, and `self` holds the method: such an object is not freed when its last user lets go, but
    when Python's garbage collector runs, which counts objects and does not see GPU memory (measured: a module with
    `self.route = self.fast`, a lambda that uses self, a partial or a dict of them is alive after `del`, and gone
    after `gc.collect()`). Where models are made one after another, as in a search over settings, two of them have to
    fit.

    For a model that is made once it costs nothing, so memlint only notes it, and warns where the file itself makes
    such models in a loop. Static methods, submodules and functions of the module make no cycle.

    Keep the choice (`self.kind = kind`) and dispatch on it when called, or hold the method through
    `weakref.WeakMethod`. Between peers, let one side be a `weakref.ref`.
    """

    code, name, severity = "ML113", "self-cycle", Severity.NOTE
    # a bound method has no word of its own: files that make or move models, without those that only define layers
    triggers = (
        ("= lambda", "(nn.Module)"),
        ("partial(self.", "(nn.Module)"),
        (".cuda()", "(nn.Module)"),
        ("cuda", ".peer"),
        ("self.", ".backward(", "= self."),
    )
    bad = """
from torch import nn

class Net(nn.Module):
    def __init__(self, fast):
        super().__init__()
        self.layer = nn.Linear(4096, 4096)
        self.route = self.once if fast else self.twice

    def once(self, x):
        return self.layer(x)

    def twice(self, x):
        return self.layer(self.layer(x))

for fast in (True, False):
    evaluate(Net(fast).cuda())
"""
    good = """
from torch import nn

class Net(nn.Module):
    def __init__(self, fast):
        super().__init__()
        self.layer = nn.Linear(4096, 4096)
        self.fast = fast

    def forward(self, x):
        return self.layer(x) if self.fast else self.layer(self.layer(x))

for fast in (True, False):
    evaluate(Net(fast).cuda())
"""

    def check(self, flow: Flow) -> Iterator[Draft]:
        for cls in flow.index.classes.values():
            if cls.is_module or holds_models(cls):
                yield from self.own(flow, cls)
        for function in flow.functions:
            yield from self.peers(flow, function)

    def own(self, flow: Flow, cls: ClassInfo) -> Iterator[Draft]:
        """Bound methods and lambdas on attributes of self."""
        for method in cls.methods.values():
            if method.static or not method.parameters:
                continue
            me = method.parameters[0].name.value
            for statement in body_of(method):
                for target, value in assignments(statement):
                    if not isinstance(target, cst.Attribute) or dotted(target.value) != me:
                        continue
                    held = next((how for part in parts(value) if (how := holds_self(cls, me, part))), "")
                    if held:
                        yield self.draft(flow, cls, statement, dotted(target), held)
                        break

    def draft(self, flow: Flow, cls: ClassInfo, node: cst.CSTNode, place: str, held: str) -> Draft:
        """The finding: graver where the file makes one instance after another."""
        made = next((call for call in flow.calls() if makes(call, cls) and call.loops and not is_kept(call)), None)
        message = f"`{place}` keeps {held}: the object holds itself, and only the garbage collector frees it"
        if made is not None and cls.is_module:
            return self.finding(
                node,
                f"{message}, so the models that {wording.loop_name(made.loops[-1])} makes pile up until it runs. Keep "
                f"the choice and dispatch on it.",
                severity=Severity.WARNING,
                related=[(made.node, "made here, once an iteration")],
            )
        return self.finding(node, f"{message}. Where such objects are made again and again, dispatch when called.")

    def peers(self, flow: Flow, function: FunctionFlow) -> Iterator[Draft]:
        """`a.peer, b.peer = b, a` of things that are made in the same loop."""
        for loop in function.loops:
            if not isinstance(loop.node, (cst.For, cst.While)):
                continue
            links: dict[tuple[str, str], cst.CSTNode] = {}
            made: set[str] = set()
            for statement in flat(statements(loop.node.body)):
                for target, value in assignments(statement):
                    if isinstance(target, cst.Name) and isinstance(value, cst.Call):
                        event = function.calls.get(id(value))
                        if event is not None and event.callee.kind is Kind.CLASS:
                            made.add(target.value)
                    elif isinstance(target, cst.Attribute) and isinstance(value, cst.Name):
                        links[dotted(target.value), value.value] = statement
            for (holder, held), statement in links.items():
                if holder != held and (held, holder) in links and {holder, held} <= made:
                    yield self.finding(
                        statement,
                        f"`{holder}` and `{held}` hold each other: when the next iteration replaces them, only the "
                        f"garbage collector frees them and their tensors. Let one side be a weakref.ref.",
                    )
                    break


def holds_models(cls: ClassInfo) -> bool:
    """Whether a class keeps what it calls a model or an optimizer."""
    return any(not _HEAVY.isdisjoint(name.split("_")) for name in cls.assigned)


def holds_self(cls: ClassInfo, me: str, node: cst.BaseExpression) -> str:
    """What in an expression holds `self`: `the bound method ...`, `a lambda ...`; empty for anything else."""
    if isinstance(node, cst.Lambda):
        params = {param.name.value for param in (*node.params.params, *node.params.kwonly_params)}
        uses = any(isinstance(item, cst.Name) and item.value == me for item in walk(node.body))
        return f"a lambda that uses `{me}`" if uses and me not in params else ""
    if isinstance(node, cst.Call) and dotted(node.func).rsplit(".", 1)[-1] == "partial" and node.args:
        inner = holds_self(cls, me, node.args[0].value)
        return f"a partial of {inner}" if inner else ""
    text = dotted(node)
    if text.startswith(f"{me}.") and text.count(".") == 1:
        method = cls.method(text.removeprefix(f"{me}."))
        if method is not None and is_bound(method) and text.removeprefix(f"{me}.") not in cls.assigned:
            return f"its own bound method `{text}`"
    return ""


def is_bound(method: FunctionInfo) -> bool:
    """Whether reading a method from an instance gives something that holds the instance."""
    names = {dotted(d.func if isinstance(d, cst.Call) else d).rsplit(".", 1)[-1] for d in method.decorators}
    return (
        not method.static
        and not method.property
        and not names & {"classmethod", "staticmethod"}
        and not any("property" in name for name in names)
    )


def is_kept(call: CallEvent) -> bool:
    """Whether what a call makes is put into a container at once: `layers.append(Block(...))`."""
    if not isinstance(call.loops[-1].node, (cst.For, cst.While)):
        return True  # an element of a comprehension
    return any(
        other.text.rsplit(".", 1)[-1] in ("append", "insert", "extend", "add_module", "register_module")
        and any(arg.value is call.node for arg in other.node.args)
        for other in call.function.calls.values()
    )


def makes(call: CallEvent, cls: ClassInfo) -> bool:
    """Whether a call makes an instance of a class, or of a class below it."""
    if call.callee.kind is not Kind.CLASS or not isinstance(call.result.info, Instance):
        return False
    return cls in call.result.info.cls.ancestry()
