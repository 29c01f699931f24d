"""ML703: the best weights kept by reference."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow import knowledge as know
from memlint.lint.flow.facts import CallEvent, Frame, FunctionFlow, Guard, Loop, Path, inside
from memlint.lint.flow.index import small_statements
from memlint.lint.flow.syntax import holds, place
from memlint.lint.flow.values import Kind, Source
from memlint.lint.imports import dotted
from memlint.lint.model import Severity
from memlint.rules import edits, wording
from memlint.rules.base import Draft, DraftFix, Rule
from memlint.rules.state_dicts import Copied, handed_on, state_of
from memlint.rules.statements import bound_names
from memlint.rules.training import assignments, body_of, suites, trains, trains_in

#: things whose state_dict holds numbers: taking it copies them (torch 2.13: optim/lr_scheduler.py, amp/grad_scaler.py)
_NO_TENSORS = re.compile(r"sched|scaler|sampler|loader|dataset|generator", re.IGNORECASE)


class Alias(NamedTuple):
    """`target = model.state_dict()`: the place that keeps the weights, and the call."""

    target: str
    value: cst.BaseExpression
    event: CallEvent
    statement: cst.BaseSmallStatement


class StateDictAlias(Rule):
    """`best = model.state_dict()` is kept while training goes on, and loaded again later.

    `state_dict()` returns the parameters themselves, not copies: every optimizer step changes what was kept, and the
    "best" weights are those of the last step. `.copy()`, `dict(...)` and `copy.copy(...)` copy only the dict around the
    same tensors (measured on torch 2.13). Nothing fails; the wrong weights are restored.

    It is right to save a state_dict to disk at once, or to load it into another model at once: both copy. So is one
    that is taken when training is over.

    Keep copies: `{k: v.detach().cpu().clone() for k, v in model.state_dict().items()}`, or
    `copy.deepcopy(model.state_dict())`, which costs as much GPU memory as the model.
    """

    code, name, severity = "ML703", "state-dict-alias", Severity.WARNING
    triggers = (
        ("state_dict()", "best"),
        ("state_dict()", ".backward("),
        ("state_dict()", "step("),
        ("accelerator.get_state_dict(", "best"),
        ("accelerator.get_state_dict(", ".backward("),
    )
    bad = """
def fit(model, epochs, train_epoch, validate):
    lowest, best = float("inf"), None
    for _ in range(epochs):
        train_epoch(model)
        loss = validate(model)
        if loss < lowest:
            lowest, best = loss, model.state_dict()
    model.load_state_dict(best)
"""
    good = bad.replace(
        "loss, model.state_dict()", "loss, {k: v.detach().cpu().clone() for k, v in model.state_dict().items()}"
    )

    def check(self, flow: Flow) -> Iterator[Draft]:
        if any(full.split(".")[0] == "higher" for full in flow.index.imports.values()):
            return  # its optimizers make new parameters instead of changing the old ones
        for function in list(flow.functions):
            for alias in aliases(flow, function):
                if replaced_at_once(function, alias):
                    continue
                use = self.later_use(flow, function, alias)
                if use is not None and not copy_that_nobody_trains(flow, function, alias):
                    yield self.draft(flow, alias, use)

    def later_use(self, flow: Flow, function: FunctionFlow, alias: Alias) -> cst.CSTNode | None:
        """Where weights that training has changed meanwhile are used as if they were the old ones."""
        event = alias.event
        loops = [loop for loop in event.loops if isinstance(loop.node, (cst.For, cst.While))]
        loop = next((each for each in reversed(loops) if trains_in(function, each)), None)
        guard = branch(event, loop)
        if loop is not None:
            if guard is None or leaves(guard) or made_in(event, loop):
                return None
            for use, path in uses(function, alias):
                if loop not in path or not any(same(guard, frame) for frame in path):
                    if not bound_anew(function, alias, use):
                        return use
        elif not of_optimizer(event):  # that of an optimizer before its first step is empty
            use_between = self.after_training(function, alias)
            if use_between is not None:
                return use_between
        if alias.target.startswith("self.") and function.cls is not None and not of_optimizer(event):
            return self.from_self(flow, function, alias, guard)
        return None

    @staticmethod
    def after_training(function: FunctionFlow, alias: Alias) -> cst.CSTNode | None:
        """`start = model.state_dict(); train(model); model.load_state_dict(start)`."""
        event = alias.event
        receiver = receiver_of(event)
        ticks = [each.order for each in function.backwards] + [each.order for each in function.optimizer]
        ticks += [call.order for call in function.calls.values() if trains(call)]
        for call in function.calls.values():
            if not call.text.endswith(".load_state_dict") or not call.node.args:
                continue
            if receiver_of(call) == receiver and reads(call.node.args[0].value, alias.target):
                if any(event.order < tick < call.order for tick in ticks) and event.loops == call.loops:
                    return call.node
        return None

    @staticmethod
    def from_self(flow: Flow, function: FunctionFlow, alias: Alias, guard: Guard | None) -> cst.CSTNode | None:
        """`self.best = model.state_dict()` in one call, `load_state_dict(self.best)` in a later one, or outside."""
        tail = alias.target.removeprefix("self")
        for other in flow.functions:
            for call in other.calls.values():
                if not call.text.endswith(".load_state_dict") or not call.node.args:
                    continue
                if other is function and (guard is None or any(same(guard, frame) for frame in call.path)):
                    continue  # in the same breath
                given = call.node.args[0].value
                if other.cls is function.cls and other.cls is not None:
                    known = guard is not None or receiver_of(call) == receiver_of(alias.event)
                    if known and reads(given, alias.target):
                        return call.node
                elif guard is not None and place(given).endswith(tail):  # `model.load_state_dict(stopper.best)`
                    return call.node
        return None

    def draft(self, flow: Flow, alias: Alias, use: cst.CSTNode) -> Draft:
        """The finding."""
        receiver = wording.short(receiver_of(alias.event) or "model")
        gathered = handed_on(alias.event.node) is not None
        unless = " (unless DeepSpeed's stage 3 or FSDP gather them)" if gathered else ""
        message = (
            f"`{wording.short(alias.target)}` keeps the tensors of `{receiver}` themselves, no copies{unless}: every "
            "optimizer step changes them, so what is used later are the last weights, not these. Keep copies: "
            f"{{k: v.detach().cpu().clone() for k, v in {wording.short(flow.text(alias.event.node))}.items()}}."
        )
        return self.finding(
            alias.value, message, fix=self.fix(flow, alias), related=[(use, "the changed weights are used here")]
        )

    @staticmethod
    def fix(flow: Flow, alias: Alias) -> DraftFix | None:
        """A comprehension that copies each tensor; not for optimizers, whose state is nested."""
        if of_optimizer(alias.event) or isinstance(alias.value, cst.DictComp):
            return None
        text = f"{{k: v.detach().cpu().clone() for k, v in {flow.text(alias.event.node)}.items()}}"
        return edits.replace(alias.value, text, "copy each tensor", safe=False)


def aliases(flow: Flow, function: FunctionFlow) -> Iterator[Alias]:
    """The places that a function binds to a state_dict, or to a dict with one in it, without copying."""
    for assigned in assignments(body_of(function.node)):
        target = place(assigned.target)
        if not target:
            continue
        values: list[cst.BaseExpression] = [assigned.value]
        if isinstance(assigned.value, cst.Dict):
            values = [e.value for e in assigned.value.elements if isinstance(e, cst.DictElement)]
        for value in values:
            found = state_of(flow, value)
            if found is None or found[1] is not Copied.NO:
                continue
            event = function.calls.get(id(found[0]))
            if event is not None and not _NO_TENSORS.search(receiver_of(event)):
                yield Alias(target, value, event, assigned.statement)


def replaced_at_once(function: FunctionFlow, alias: Alias) -> bool:
    """`for key in kept: kept[key] = kept[key].cpu()`, right behind it: the entries are others."""
    for suite in suites(body_of(function.node)):
        for statement, after in itertools.pairwise(suite):
            if isinstance(statement, cst.SimpleStatementLine) and alias.statement in statement.body:
                return isinstance(after, cst.For) and any(
                    isinstance(each.target, cst.Subscript) and place(each.target.value) == alias.target
                    for each in assignments(body_of(after))
                )
    return False


def bound_anew(function: FunctionFlow, alias: Alias, use: cst.CSTNode) -> bool:
    """Whether the place that `use` reads was bound to something else on every way to it."""
    body = body_of(function.node)
    order = {id(each): place_ for place_, each in enumerate(small_statements(body))}
    for suite in reversed([suite for suite in suites(body) if any(holds(each, use) for each in suite)]):
        before = suite[: next(place_ for place_, each in enumerate(suite) if holds(each, use))]
        loops = [each for each in suite if isinstance(each, cst.For) and holds(each, use)]
        if any(alias.target in bound_names(each.target) for each in loops):
            return True
        chosen = [each for each in before if isinstance(each, cst.If) and holds(each, alias.statement)]
        if any(binds(each, alias.target) for each in chosen):
            return True  # on either way: what is used is of this very turn
        plain = [each for each in before if isinstance(each, cst.SimpleStatementLine)]
        for each in reversed(list(assignments(plain))):
            if place(each.target) == alias.target:
                return order[id(each.statement)] > order[id(alias.statement)]
    return False


def binds(node: cst.If, target: str) -> bool:
    """Whether every branch of an `if` binds a place."""
    rest = node.orelse
    if rest is None:
        return False
    mine = [each for each in body_of(node) if isinstance(each, cst.SimpleStatementLine)]
    if not any(place(each.target) == target for each in assignments(mine)):
        return False
    if isinstance(rest, cst.If):
        return binds(rest, target)
    others = [each for each in body_of(rest) if isinstance(each, cst.SimpleStatementLine)]
    return any(place(each.target) == target for each in assignments(others))


def receiver_of(call: CallEvent) -> str:
    """The text of what a method is called on, or of the model that an Accelerator takes the weights of."""
    if (model := handed_on(call.node)) is not None:
        return dotted(model)
    return dotted(call.node.func.value) if isinstance(call.node.func, cst.Attribute) else ""


def of_optimizer(call: CallEvent) -> bool:
    """Whether a state_dict is that of an optimizer."""
    tail = receiver_of(call).rsplit(".", 1)[-1]
    return call.callee.kind is Kind.OPTIMIZER or bool(know.OPTIMIZER_NAME.search(tail.lower()))


def copy_that_nobody_trains(flow: Flow, function: FunctionFlow, alias: Alias) -> bool:
    """Whether the model is a deep copy whose parameters are never asked for: no optimizer can hold them."""
    model = receiver_of(alias.event)
    made = [each.value for each in assignments(body_of(function.node)) if place(each.target) == model]
    if model.startswith("self.") and function.cls is not None:
        made = [node for cls in function.cls.ancestry() for node in cls.assigned.get(model[5:], [])]
    if not made or not all(isinstance(node, cst.Call) and dotted(node.func).endswith("deepcopy") for node in made):
        return False
    for call in flow.calls():
        if call.text.startswith(f"{model}.") and "parameters" in call.text:
            return False
        if trains(call) and any(place(arg.value) == model for arg in call.node.args):
            return False
    return True


def same(guard: Guard, frame: Frame) -> bool:
    """Whether a frame is this branch (each pass over a loop makes new ones)."""
    return isinstance(frame, Guard) and frame.node is guard.node and frame.taken is guard.taken


def branch(event: CallEvent, loop: Loop | None) -> Guard | None:
    """The innermost branch around a call, within its loop."""
    frames = inside(event.path, loop) if loop is not None else event.path
    return next((frame for frame in reversed(frames) if isinstance(frame, Guard)), None)


def leaves(guard: Guard) -> bool:
    """Whether the branch leaves the loop or the function: training stops there."""
    if not isinstance(guard.node, cst.If):
        return False
    taken: cst.CSTNode | None = guard.node if guard.taken else guard.node.orelse
    return taken is not None and any(
        isinstance(each, (cst.Break, cst.Return, cst.Raise)) for each in small_statements(body_of(taken))
    )


def made_in(event: CallEvent, loop: Loop) -> bool:
    """Whether each iteration makes the model anew."""
    for origin in event.callee.graph:
        if loop in origin.loops and "unwrap" not in origin.label and origin.source is not Source.ITEM:
            return True
    return False


def reads(node: cst.BaseExpression, target: str) -> bool:
    """Whether an expression is the place, or an entry of it."""
    text = place(node)
    return text == target or text.startswith(f"{target}[")


def uses(function: FunctionFlow, alias: Alias) -> Iterator[tuple[cst.CSTNode, Path]]:
    """Where the function loads, saves or returns what it kept, later than it kept it."""
    for call in function.calls.values():
        if call.order > alias.event.order and call.node.args:
            if call.text.endswith(".load_state_dict") or call.qualified == "torch.save":
                if reads(call.node.args[0].value, alias.target):
                    yield call.node, call.path
    order = {id(each): place_ for place_, each in enumerate(small_statements(body_of(function.node)))}
    for node, _, path in function.returns.values():
        if node.value is not None and order.get(id(node), 0) > order[id(alias.statement)]:
            parts = [node.value]
            if isinstance(node.value, cst.Tuple):
                parts = [element.value for element in node.value.elements]
            if any(reads(part, alias.target) for part in parts):
                yield node, path
