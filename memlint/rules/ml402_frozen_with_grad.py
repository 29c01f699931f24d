"""ML402: outputs computed with a graph where only their values are used."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow.facts import Backward, BackwardKind, CallEvent, FunctionFlow, OptimizerCall
from memlint.lint.flow.values import Grad, Origin, Source
from memlint.lint.model import Severity
from memlint.rules import wording
from memlint.rules.base import Draft, DraftFix, NodeEdit, Rule

_TRAINS = frozenset(
    (
        BackwardKind.TENSOR,
        BackwardKind.ACCELERATOR,
        BackwardKind.FABRIC,
        BackwardKind.MANUAL,
        BackwardKind.ENGINE,
    )
)


class FrozenWithGrad(Rule):
    """A fake, teacher or target output keeps its graph in a step that trains another network.

    In a discriminator step `dis(gen(z))` runs backward through the generator for nothing: its activations are saved
    and its gradients computed, then thrown away. The training is right (if the gradients are cleared), at a price in
    memory and time.

    It is right where the same output is backwarded again for the generator's own loss, where one optimizer steps
    both networks, and under `torch.no_grad()`. memlint is silent there; which optimizer steps which network it can
    only guess from their names, so this is a note.

    Write `dis(fake.detach())`, or make the fake under `torch.no_grad()`.
    """

    code, name, severity = "ML402", "frozen-with-grad", Severity.NOTE
    triggers = (".backward(",)
    bad = """
def train(gen, dis, bce, loader, opt_d, opt_g, noise):
    for real, ones, zeros in loader:
        fake = gen(noise())
        d_loss = bce(dis(real), ones) + bce(dis(fake), zeros)
        opt_d.zero_grad(set_to_none=True)
        d_loss.backward()
        opt_d.step()
        g_loss = bce(dis(gen(noise())), ones)
        opt_g.zero_grad(set_to_none=True)
        g_loss.backward()
        opt_g.step()
"""
    good = bad.replace("bce(dis(fake), zeros)", "bce(dis(fake.detach()), zeros)")

    def check(self, flow: Flow) -> Iterator[Draft]:
        for function in flow.functions:
            steps = [e for e in function.optimizer if e.what is OptimizerCall.STEP]
            if len({e.receiver_text for e in steps}) < 2:
                continue
            for event in function.backwards:
                if event.kind in _TRAINS and event.loops:
                    yield from self.through_another(flow, function, event)

    def through_another(self, flow: Flow, function: FunctionFlow, event: Backward) -> Iterator[Draft]:
        """A backward that runs through one network into another that is not stepped after it."""
        stepped = self.stepped(function, event)
        if stepped is None:
            return
        models = [
            call
            for call in function.calls.values()
            if any(o.source is Source.MODEL_CALL and o.node is call.node for o in call.result.graph)
            and call.grad is Grad.ON
            and call.loops == event.loops
        ]
        elsewhere: set[Origin] = set()
        for other in function.backwards:
            if other is not event:
                elsewhere |= {origin.site for origin in other.reach}
        reached = {origin.site for origin in event.reach}
        for outer in models:
            if outer.result.graph.isdisjoint(event.reach):
                continue
            for inner in models:
                made = {origin.site for origin in inner.result.graph}
                if inner.text == outer.text or not made <= reached or made & elsewhere:
                    continue
                where = self.argument(outer, made)
                if where is None or self.kept(function, made):
                    continue
                if belongs(stepped, outer.text) and not belongs(stepped, inner.text):
                    yield self.draft(flow, inner, outer, where)

    @staticmethod
    def stepped(function: FunctionFlow, event: Backward) -> str | None:
        """The one optimizer that steps between this backward and the next one."""
        later = [other.order for other in function.backwards if other.order > event.order]
        end = min(later, default=None)
        stepped = {
            e.receiver_text
            for e in function.optimizer
            if e.what is OptimizerCall.STEP and e.order > event.order and (end is None or e.order < end)
        }
        return stepped.pop() if len(stepped) == 1 else None

    @staticmethod
    def argument(call: CallEvent, made: set[Origin]) -> cst.BaseExpression | None:
        """The argument that is the other network's output."""
        for arg, value in zip(call.node.args, call.args, strict=False):
            if value.direct and {origin.site for origin in value.graph} == made:
                return arg.value
        return None

    @staticmethod
    def kept(function: FunctionFlow, made: set[Origin]) -> bool:
        """Whether the output leaves the function, for a backward elsewhere."""
        if any({o.site for o in value.graph} & made for _, value, _ in function.returns.values()):
            return True
        return any({leaf.origin.site for leaf in store.leaves} & made for store in function.stores)

    def draft(self, flow: Flow, inner: CallEvent, outer: CallEvent, where: cst.BaseExpression) -> Draft:
        """The finding."""
        text = wording.short(flow.text(where))
        return self.finding(
            where,
            f"`{outer.text}({text})` is backwarded into `{inner.text}` as well, and nothing else uses that graph: if "
            f"this step does not train `{inner.text}`, `{outer.text}({text}.detach())` saves its activations and its "
            f"backward.",
            fix=DraftFix("detach the output", (NodeEdit(where, after=".detach()"),), False)
            if isinstance(where, (cst.Name, cst.Call))
            else None,
            related=[(inner.node, "the output is computed with its graph here")],
        )


def belongs(optimizer: str, network: str) -> bool:
    """Whether an optimizer is named after a network: `opt_d` after `dis`, `optimizer_G` after `netG`."""
    words = [w.lower() for w in re.findall(r"[A-Za-z][a-z]*|[A-Z]+", optimizer.rsplit(".", 1)[-1])]
    named = [w for w in words if not w.startswith(("opt", "adam", "sgd"))]
    tail = network.rsplit(".", 1)[-1]
    parts = [w.lower() for w in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", tail)]
    return any(part.startswith(word) or word.startswith(part) for word in named for part in parts if part != "net")
