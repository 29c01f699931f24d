"""ML105: retain_graph=True that nobody needs."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow import knowledge as know
from memlint.lint.flow.facts import Backward, BackwardKind, CallEvent, FunctionFlow
from memlint.lint.flow.frameworks import runs_each_batch
from memlint.lint.flow.values import EMPTY, Origin, Source
from memlint.lint.model import Severity
from memlint.rules import edits
from memlint.rules.base import Draft, Rule

_GRAPHS = (Source.CALL, Source.MODEL_CALL, Source.LOSS_CALL, Source.ITEM)


#: what functions are called that do all that is done with the losses that they are given
_STEPS = re.compile(r"(?:^|_)step|backward", re.I)
#: callees that are handed a loss to report it
_READERS = re.compile(
    r"log|print|write|add|append|extend|update|record|report|save|track|plot|put|push|reduce|gather|mean|average|item"
    r"|float|number|format|str|isnan|finite|detach|^step$|^register",
    re.I,
)


class RetainGraph(Rule):
    """`backward(retain_graph=True)` where nothing backwards the graph again.

    Retaining keeps all saved activations after the backward, until the loss is bound to something else: the next
    forward pass is then computed while the last one is still in memory, which about doubles the peak. It does not
    grow from step to step by itself.

    It is right where another backward or `autograd.grad` runs through (part of) the same graph: two losses of one
    forward pass, a graph made outside the loop. memlint is silent there. The last of several backwards over one graph
    does not need it.
    """

    code, name, severity = "ML105", "retain-graph", Severity.WARNING
    triggers = ("retain_graph",)
    bad = """
def train(model, loader, criterion, optimizer):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward(retain_graph=True)
        optimizer.step()
"""
    good = bad.replace("retain_graph=True", "")

    def check(self, flow: Flow) -> Iterator[Draft]:
        for event in flow.backwards():
            if event.retain is None or event.retains is not True or event.create is not None:
                continue
            if event.kind in (BackwardKind.GRAD, BackwardKind.HELPER, BackwardKind.FRAMEWORK):
                continue
            made, open_ends = graph_of(flow, event)
            if self.one_of_many(event):
                yield self.draft(flow, event, every=True)
            elif not open_ends and made and not self.needed(event.function, event, made):
                if self.handed_on(flow, event):
                    continue
                yield self.draft(flow, event, every=False, outlives=self.outlives(event, made))

    def draft(self, flow: Flow, event: Backward, *, every: bool, outlives: bool = True) -> Draft:
        """The finding."""
        assert event.retain is not None
        if every:
            message = (
                "every loss of the loop retains the graph, the last one too: its activations stay until the loss is "
                "bound anew, so the next forward pass runs beside them (peak). Retain for all but the last: "
                "retain_graph=i < len(losses) - 1."
            )
            return self.finding(event.retain, message)
        assert isinstance(event.node, cst.Call)
        fix = edits.remove_argument(event.node, event.retain, "drop retain_graph", safe=self.sure(flow, event))
        if not outlives:
            message = (
                "nothing backwards this graph again: retain_graph=True keeps its activations until the loss and all "
                "that it was made of are dropped, and what runs till then runs beside them. Drop it."
            )
            return self.finding(event.retain, message, severity=Severity.NOTE, fix=fix)
        message = (
            "nothing backwards this graph again: retain_graph=True keeps all its activations until the loss is bound "
            "anew, so the next forward pass runs beside them (about twice the peak). Drop it. If dropping it raises "
            '"backward through the graph a second time", state is carried between iterations: detach that.'
        )
        return self.finding(event.retain, message, fix=fix)

    @staticmethod
    def sure(flow: Flow, event: Backward) -> bool:
        """Whether no module on the way can carry state: all of them are torch's own, which keep none."""
        made, _ = graph_of(flow, event)
        calls = {o.site if o.base is None else o.base.site for o in made}
        return all("known module" in o.calls or o.label.startswith("torch.") for o in calls)

    @staticmethod
    def outlives(event: Backward, made: frozenset[Origin]) -> bool:
        """Whether the next forward pass may run beside the graph: in a loop, or where part of it is handed out."""
        function = event.function
        if event.loops:
            return True
        sites = {origin.site for origin in made}
        if any({o.site for o in value.graph} & sites for _, value, _ in function.returns.values()):
            return True
        return any({leaf.origin.site for leaf in store.leaves} & sites for store in function.stores)

    @staticmethod
    def one_of_many(event: Backward) -> bool:
        """`for loss in losses: loss.backward(retain_graph=True)`: the losses may share one graph.

        Losses that the function is given may be backwarded once more by its caller, unless it takes a whole step.
        """
        if not event.loops or event.function.backwards != [event]:
            return False
        loop, function = event.loops[-1], event.function
        params = set(function.info.params.values()) if function.info is not None else set()
        given = loop.over is not None and {origin.whole.site for origin in loop.over.graph} <= params
        steps = _STEPS.search(function.name) or any(each.what.value == "step" for each in function.optimizer)
        if given and not steps:
            return False
        origins = event.value.graph
        return (
            bool(origins)
            and loop.over is not None
            and all(o.source is Source.ITER and loop in o.loops for o in origins)
            and "loss" in loop.over_text.lower()
        )

    @staticmethod
    def handed_on(flow: Flow, event: Backward) -> bool:
        """Whether the loss is given whole to code that is not known, which may differentiate it once more."""
        function = event.function
        handed = {o.site for o in event.value.graph}
        after = [call for call in function.calls.values() if call.order > event.order]
        if any(handed & {o.site for o in value.graph} for _, value, _ in function.returns.values()):
            results = list(flow.callers.get(id(function.node), {}).values())
            handed |= {o.site for call in results for o in call.result.graph}
            after += flow.calls()
        return any(
            (call.target is not None or any(o.node is call.node for o in call.result.graph))
            and may_differentiate(call)
            and any(handed & {o.site for o in value.graph} for value in call.args)
            for call in after
        )

    @staticmethod
    def needed(function: FunctionFlow, event: Backward, made: frozenset[Origin]) -> bool:
        """Whether part of the graph is used by another backward, or may be."""
        sites = {origin.site for origin in made}
        loop = event.loops[-1] if event.loops else None
        if loop is not None and any(loop not in o.loops for o in sites if o.source is not Source.ITEM):
            return True  # made outside the loop: the next iteration runs through it again
        for other in function.backwards:
            if other is not event and {o.site for o in other.reach} & sites:
                if other.order > event.order or any(o.old for o in other.reach if o.site in sites):
                    return True
        if any(o.old for o in event.reach if o.site in sites):
            return True  # it runs through an earlier iteration
        roots = {o.site for o in event.value.graph}
        inner = sites - roots
        for call in function.calls.values():
            opaque = any(o.source is Source.CALL and o.node is call.node for o in call.result.graph)
            if call.order > event.order and (opaque or (call.target is not None and may_differentiate(call))):
                given = {o.site for value in call.args for o in value.graph}
                if given & inner or (given & roots and call.target is not None and call.target.summary is None):
                    return True
        for store in function.stores:
            if store.life.name in ("SELF", "OUTER", "PARAM") or store.passed or store.returned:
                if {leaf.origin.site for leaf in store.leaves} & inner:
                    return True
        return any({o.site for o in value.graph} & inner for _, value, _ in function.returns.values())


def may_differentiate(call: CallEvent) -> bool:
    """Whether a call is one of code that differentiates, or of code that is not known and may do more than read."""
    if call.target is not None:
        return call.target.flow is not None and bool(call.target.flow.backwards)
    if call.qualified.startswith("torch."):
        return False
    path = call.text.split(".")
    return not (_READERS.search(path[-1]) or (len(path) > 1 and know.METER_NAME.search(path[-2])))


def graph_of(flow: Flow, event: Backward) -> tuple[frozenset[Origin], bool]:
    """The graph below a backward as far as this function made it; and whether it reaches something from elsewhere.

    Elements of what a loop runs over are data: the walk stops there.
    """
    seen: set[Origin] = set()
    made: set[Origin] = set()
    elsewhere = False
    stack = list(event.value.graph)
    while stack:
        origin = stack.pop()
        if origin in seen:
            continue
        seen.add(origin)
        if origin.source is Source.PARAM and flow.owner.get(origin, event.function) is event.function:
            elsewhere = elsewhere or not is_batch(event.function, origin)
        if origin.source not in _GRAPHS or origin.whole.source is Source.ITER:
            continue
        made.add(origin)
        stack += origin.parents
        base = origin.base
        while base is not None:
            if base.source is Source.PARAM and not is_batch(event.function, base):
                elsewhere = True
            stack += base.parents
            base = base.base
    return frozenset(made) or EMPTY, elsewhere


def is_batch(function: FunctionFlow, origin: Origin) -> bool:
    """Whether a parameter is what a framework takes from a loader: it has no graph."""
    info = function.info
    if info is None or not runs_each_batch(function):
        return False
    return origin.site in (info.params.get(param.name.value) for param in info.parameters)
