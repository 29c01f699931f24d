"""ML108: an output of an autograd.Function kept on its context."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow import knowledge as know
from memlint.lint.flow.index import ClassInfo, FunctionInfo
from memlint.lint.flow.syntax import holds, nodes
from memlint.lint.flow.values import Kind
from memlint.lint.imports import dotted
from memlint.lint.model import Severity
from memlint.rules.base import Draft, Rule
from memlint.rules.statements import assignments, body_of, bound_names, parts

#: methods and functions whose result is no floating point tensor, so that autograd gives it no grad_fn
_INTEGERS = frozenset("argmax argmin argsort long int bool byte short char nonzero size numel item tolist".split())
_NOT_TENSORS = {Kind.NUMBER, Kind.NONE, Kind.FUNCTION, Kind.CLASS, Kind.MODULE, Kind.METHOD, Kind.REFERENCE}


class CtxTensor(Rule):
    """An autograd.Function keeps a tensor that it returns on ctx, not with save_for_backward.

    The output's `grad_fn` is the context, so the context then holds the output and the output the context. Measured
    on torch 2.13: neither is freed when the last user lets go, only when Python's garbage collector runs, and that
    does not know how much GPU memory hangs on the cycle; up to torch 1.x it was never freed at all. `backward`
    clearing the attribute breaks the cycle only where a backward runs, and breaks `retain_graph=True`.

    It is right for inputs, intermediates, shapes and plain objects, for a detached copy (`y.detach()`), for outputs
    without a gradient (`mark_non_differentiable`, integer tensors), and where a view or copy of the kept tensor is
    returned; memlint is silent there.

    Write `ctx.save_for_backward(y)` in `forward` and `y, = ctx.saved_tensors` in `backward`: autograd then stores the
    output without the reference back, and checks that nothing changed it in place. Keep what is no tensor on ctx.
    """

    code, name, severity = "ML108", "ctx-tensor", Severity.WARNING
    triggers = ("autograd.Function", "(Function", "function.Function")
    bad = """
import torch

class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.y = y
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.y
"""
    good = bad.replace("ctx.y = y", "ctx.save_for_backward(y)").replace("* ctx.y", "* ctx.saved_tensors[0]")

    def check(self, flow: Flow) -> Iterator[Draft]:
        for cls in flow.index.classes.values():
            if not cls.is_autograd_function:
                continue
            forward, setup = cls.methods.get("forward"), cls.methods.get("setup_context")
            if setup is not None and len(setup.parameters) >= 3:
                returned = {setup.parameters[2].name.value}
                yield from self.kept(cls, setup, _Forward(setup, given=returned))
            elif forward is not None and forward.parameters:
                yield from self.kept(cls, forward, _Forward(forward))

    def kept(self, cls: ClassInfo, info: FunctionInfo, forward: _Forward) -> Iterator[Draft]:
        """Stores on ctx of something that is returned."""
        for where, node in forward.outputs():
            if self.no_tensor(info, node) or saved_otherwise(info, node):
                continue
            backward = cls.methods.get("backward")
            cleared = backward is not None and clears(backward, where)
            what = f"`{node.value}` is returned, and `{where}` keeps it: output and context hold each other"
            if cleared:
                cost = (
                    ". The backward clears it, but where none runs only the garbage collector frees it, and a second "
                    "backward finds nothing"
                )
            else:
                cost = ", so only Python's garbage collector frees them, which does not see GPU memory"
            yield self.finding(node, f"{what}{cost}. Use ctx.save_for_backward({node.value}).")

    @staticmethod
    def no_tensor(info: FunctionInfo, node: cst.Name) -> bool:
        """Whether the flow model knows that the kept thing is no tensor."""
        value = info.flow.seen.get(id(node)) if info.flow is not None else None
        return value is not None and value.kind in _NOT_TENSORS


def saved_otherwise(info: FunctionInfo, node: cst.Name) -> bool:
    """Whether the other branch of an `if` around a store saves the same name for backward: its author knows."""
    for each in body_of(info):
        if not isinstance(each, cst.If) or each.orelse is None:
            continue
        inside = [holds(part, node) for part in (each.body, each.orelse)]
        if inside[0] is inside[1]:
            continue
        for call in nodes(each.orelse if inside[0] else each.body):
            if isinstance(call, cst.Call) and dotted(call.func).endswith(".save_for_backward"):
                if any(dotted(arg.value) == node.value for arg in call.args):
                    return True
    return False


class _Forward:
    """What one `forward` binds, keeps and returns, in the order of its text.

    Every binding makes a new thing, except that `a = b` gives a thing another name.
    """

    def __init__(self, info: FunctionInfo, given: set[str] | None = None) -> None:
        self.ctx = info.parameters[0].name.value
        self.things: dict[str, object] = {}
        #: things that are outputs without a gradient, and inputs as they came
        self.without_gradient: set[object] = set()
        self.inputs: set[object] = set()
        self.dirty: set[object] = set()
        #: place on ctx, the name that is kept, the thing it is
        self.stores: list[tuple[str, cst.Name, object]] = []
        #: the things that are returned, with the number of stores before
        self.returned: list[tuple[int, object]] = []
        given = given or set()
        stars = [s for s in (info.node.params.star_arg, info.node.params.star_kwarg) if isinstance(s, cst.Param)]
        for param in [*info.parameters[1:], *stars]:
            thing = self.things[param.name.value] = object()
            if param.name.value not in given:
                self.inputs.add(thing)
        for statement in body_of(info):
            self.statement(statement)
        self.returned += [(len(self.stores), self.things[name]) for name in given]

    def outputs(self) -> Iterator[tuple[str, cst.Name]]:
        """The stores on ctx of something that is returned after."""
        for number, (where, node, thing) in enumerate(self.stores):
            if thing in self.without_gradient or (thing in self.inputs and thing not in self.dirty):
                continue  # an input that is returned as it came is handed out as another tensor (measured)
            if any(thing is other and number < count for count, other in self.returned):
                yield where, node

    def thing(self, name: str) -> object:
        """What a name stands for now."""
        return self.things.setdefault(name, object())

    def statement(self, node: cst.CSTNode) -> None:
        """Note what one statement does."""
        if isinstance(node, cst.Assign) and len(node.targets) > 1:
            self.chained(node)
        else:
            for target, value in assignments(node):
                self.assigned(target, value)
        if isinstance(node, cst.For):
            for name in bound_names(node.target):
                self.things[name] = object()
        elif isinstance(node, cst.Return) and node.value is not None:
            for part in parts(node.value):
                if name := same(part):
                    self.returned.append((len(self.stores), self.thing(name)))
        elif isinstance(node, cst.Expr) and isinstance(node.value, cst.Call):
            self.called(node.value)

    def chained(self, node: cst.Assign) -> None:
        """`ctx.y = y = value`: all targets are one thing."""
        names = [target.target for target in node.targets if isinstance(target.target, cst.Name)]
        for target, value in assignments(node):
            if isinstance(target, cst.Name):
                self.assigned(target, names[0] if target is not names[0] else value)
        for target, value in assignments(node):
            if not isinstance(target, cst.Name):
                self.assigned(target, names[0] if names else value)

    def assigned(self, target: cst.BaseExpression, value: cst.BaseExpression) -> None:
        """`target = value`."""
        where = dotted(target.value if isinstance(target, cst.Subscript) else target)
        if where.startswith(f"{self.ctx}."):
            self.kept(where, value)
            return
        names = list(bound_names(target))
        for place, name in enumerate(names):
            if isinstance(value, cst.Name) and len(names) == 1:
                self.things[name] = self.thing(value.value)
                continue
            thing = self.things[name] = object()
            if integers(value, place, len(names)) or (place and isinstance(value, cst.Call)):
                self.without_gradient.add(thing)  # the others of several results are often indices or handles

    def kept(self, where: str, value: cst.BaseExpression) -> None:
        """`ctx.where` keeps what is in `value`."""
        for part in parts(value):
            if isinstance(part, cst.Name):
                self.stores.append((where, part, self.thing(part.value)))

    def called(self, call: cst.Call) -> None:
        """`ctx.mark_dirty(x)`, `ctx.cache.append(y)`."""
        func = call.func
        if not isinstance(func, cst.Attribute) or not call.args:
            return
        base, method = dotted(func.value), func.attr.value
        given = {self.thing(p.value) for arg in call.args for p in parts(arg.value) if isinstance(p, cst.Name)}
        if base == self.ctx and method == "mark_dirty":
            self.dirty |= given
        elif base == self.ctx and method == "mark_non_differentiable":
            self.without_gradient |= given
        elif base.startswith(f"{self.ctx}.") and method in ("append", "add", "extend"):
            self.kept(base, call.args[0].value)


def same(node: cst.BaseExpression) -> str:
    """The name of which an expression is the very object: `y`, `y.mul_(2)`."""
    while (
        isinstance(node, cst.Call)
        and isinstance(node.func, cst.Attribute)
        and node.func.attr.value.endswith("_")
        and not node.func.attr.value.endswith("__")
    ):
        node = node.func.value
    return node.value if isinstance(node, cst.Name) else ""


def integers(value: cst.BaseExpression, place: int, several: int) -> bool:
    """Whether a value has no gradient by its type."""
    if isinstance(value, cst.Comparison):
        return True
    if not isinstance(value, cst.Call):
        return False
    tail = value.func.attr.value if isinstance(value.func, cst.Attribute) else dotted(value.func)
    if tail in know.VALUES_AND_INDICES:
        return several > 1 and place == 1
    return tail in _INTEGERS


def clears(backward: FunctionInfo, where: str) -> bool:
    """Whether a backward deletes the attribute `where` of its context, or sets it to None."""
    attribute = where.split(".", 1)[1]
    for statement in body_of(backward):
        if isinstance(statement, cst.Del):
            for part in parts(statement.target):
                if dotted(part).partition(".")[2] == attribute:
                    return True
        for target, value in assignments(statement):
            if dotted(target).partition(".")[2] == attribute and dotted(value) == "None":
                return True
    return False
