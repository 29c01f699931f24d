"""ML104: recurrent state that carries its graph from one iteration into the next."""

from __future__ import annotations

from collections.abc import Iterator

from memlint.lint.flow import Flow
from memlint.lint.flow import knowledge as know
from memlint.lint.flow.calls import reach
from memlint.lint.flow.facts import CallEvent, FunctionFlow, Loop, StoreKind
from memlint.lint.flow.values import Grad, Origin, Source
from memlint.lint.imports import dotted
from memlint.lint.model import Severity
from memlint.rules import wording
from memlint.rules.base import Draft, Rule


class CarriedState(Rule):
    """Recurrent state goes into the next iteration with the graph of all iterations before.

    `out, state = lstm(chunk, state)` in a loop over chunks links every chunk to the first. When each chunk has its
    own backward, PyTorch raises "Trying to backward through the graph a second time" at the second chunk;
    `retain_graph=True` silences that, and each step then runs through (and keeps) everything so far. When nothing is
    backwarded in the loop, the graph simply grows.

    It is right where one backward after the loop runs through all time steps (backpropagation through time), inside
    a recurrent cell, and under `torch.no_grad()`. memlint is silent there.

    Cut the state where a chunk begins: `state = state.detach()`, for an LSTM
    `state = tuple(s.detach() for s in state)`.
    """

    code, name, severity = "ML104", "carried-state", Severity.WARNING
    triggers = ("retain_graph", "criterion", ".backward(", "manual_backward(")
    bad = """
def train(lstm, head, criterion, optimizer, stream):
    state = None
    for chunk, target in stream:
        out, state = lstm(chunk, state)
        loss = criterion(head(out), target)
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
"""
    good = bad.replace(
        "        out, state = lstm",
        "        state = tuple(s.detach() for s in state) if state is not None else None\n        out, state = lstm",
    ).replace("retain_graph=True", "")

    def check(self, flow: Flow) -> Iterator[Draft]:
        for function in flow.functions:
            for event in function.calls.values():
                loop = self.carries(event)
                if (
                    loop is None
                    or not runs_network(event)
                    or event.grad is not Grad.ON
                    or flow.grad_of(function) is not Grad.ON
                ):
                    continue
                if any(dotted(arg.value) in flow.index.detached for arg in event.node.args):
                    continue  # `hidden[0].detach_()`: cut in place, entry by entry
                if function.cls is not None and function.cls.is_module and function.name == "forward":
                    continue
                yield from self.judge(flow, function, event, loop)

            yield from self.overwritten(flow, function)

    def overwritten(self, flow: Flow, function: FunctionFlow) -> Iterator[Draft]:
        """`h[t] = f(h[t - 1])`: the write changes a tensor that the graph of the step before has saved."""
        for store in function.stores:
            if store.kind is StoreKind.UPDATE and store.needed and store in store.value.via and store.loops:
                yield self.finding(
                    store.node,
                    f"`{wording.short(flow.text(store.expression))}` reads `{store.holder_text}`, which this line then "
                    f"writes in place: backward raises if the step saved what it read. Collect the steps in a list "
                    f"and torch.stack them.",
                    severity=Severity.NOTE,
                )

    @staticmethod
    def carries(event: CallEvent) -> Loop | None:
        """The loop in whose next iteration the call is given its own result."""
        if not event.loops or not event.result.graph:
            return None
        for value in event.args:
            for origin in value.graph:
                site = origin.site
                made = site.base if site.base is not None else site
                if origin.old and made.node is event.node and made.loops[: len(event.loops)] == event.loops:
                    return event.loops[-1]
        return None

    def judge(self, flow: Flow, function: FunctionFlow, event: CallEvent, loop: Loop) -> Iterator[Draft]:
        """Whether the state should have been cut."""
        made = {origin.site for origin in event.result.graph}
        made |= {child for origin in list(made) for child in origin.children.values()}
        here = [b for b in function.backwards if made & {origin.site for origin in b.reach}]
        if any(loop not in b.loops for b in here):
            return  # one backward through all iterations
        retained = [b for b in here if b.retain is not None and b.retains is True]
        text = wording.short(flow.text(event.node))
        where = wording.loop_name(loop)
        if retained:
            first = retained[0]
            yield self.finding(
                event.node,
                f"`{text}` is given its own state from the iteration before with the whole graph, and "
                f"retain_graph=True makes each backward in {where} run through all iterations so far: memory and time "
                f"grow with every one. Detach the state at the start of the iteration and drop retain_graph.",
                severity=Severity.ERROR,
                related=[(first.node, "this backward keeps the graph of all iterations")],
            )
        elif not here and self.waits_in_vain(flow, function, made, loop):
            yield self.finding(
                event.node,
                f"`{text}` is given its own state from the iteration before with the whole graph, and nothing in this "
                f"function backwards it: the graph grows with every iteration of {where}. Detach the state where the "
                f"iteration begins, or run the loop under torch.no_grad().",
            )

    def waits_in_vain(self, flow: Flow, function: FunctionFlow, made: set[Origin], loop: Loop) -> bool:
        """Whether a loss is computed in the loop that no backward will ever run on."""
        if not self.trains_in_loop(function, made, loop) or self.leaves(function, made):
            return False
        return not flow.may_run_without_grad(function)

    @staticmethod
    def trains_in_loop(function: FunctionFlow, made: set[Origin], loop: Loop) -> bool:
        """Whether the loop computes a loss from what the call returns."""
        for event in function.calls.values():
            if loop not in event.loops:
                continue
            if any(origin.source is Source.LOSS_CALL for origin in event.result.graph):
                if {o.site for o in reach(event.result.graph)} & made:
                    return True
        return False

    @staticmethod
    def leaves(function: FunctionFlow, made: set[Origin]) -> bool:
        """Whether something computed from the call leaves the function, where a backward may wait for it."""
        for _, value, _ in function.returns.values():
            if {o.site for o in reach(value.graph)} & made:
                return True
            if any({o.site for o in reach(s.value.graph)} & made for s in value.via):
                return True
        return any(
            (store.passed or store.yielded or store.life.name in ("SELF", "PARAM"))
            and {o.site for o in reach(store.value.graph)} & made
            for store in function.stores
        )


def runs_network(event: CallEvent) -> bool:
    """Whether the callee is a module, by its binding or by its name."""
    if any(origin.source is Source.MODEL_CALL for origin in event.result.graph):
        return True
    return bool(know.RECURRENT_NAME.search(dotted(event.node.func).rsplit(".", 1)[-1]))
