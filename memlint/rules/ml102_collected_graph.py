"""ML102: tensors collected with their graphs."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow import knowledge as know
from memlint.lint.flow.facts import CallEvent, Life, Store, StoreKind
from memlint.lint.flow.judge import Kept, judge
from memlint.lint.flow.values import Grad, Grade, Source
from memlint.lint.imports import dotted
from memlint.lint.model import Severity
from memlint.rules import edits, wording
from memlint.rules.base import Draft, Rule
from memlint.rules.ml101_accumulated_graph import severity_of

BUFFER_NAME = re.compile(r"replay|buffer|memory|rollout|storage|trajectory", re.I)
BUFFER_METHODS = frozenset("store push add append insert put remember".split())
RECURRENT = re.compile(r"state|hidden|^h_?\w?$|^c_?\w?$|mem", re.I)


class CollectedGraph(Rule):
    """A container that outlives the iteration collects tensors that still carry their autograd graphs.

    A list, dict or deque that is filled in a loop, or a tensor that grows by `torch.cat`, keeps the graph of
    everything put into it. `.cpu()`, `.to()`, `.clone()` and arithmetic do not cut the graph: results moved to the
    CPU still hold their activations on the GPU. After `backward()` only graph nodes stay, tens of KiB an iteration;
    without it, everything.

    It is right where one later backward needs what was collected (log-probabilities of an episode, losses of
    micro-batches, outputs that `forward` returns), and where the container is emptied every iteration. memlint is
    silent there.

    Write `losses.append(loss.detach())`, or `.item()` where a Python number is wanted at once.
    """

    code, name, severity = "ML102", "collected-graph", Severity.ERROR
    triggers = (
        ".backward(",
        "manual_backward(",
        ".eval()",
        "train(False)",
        "training_step",
        "compute_loss",
        "get_loss",
        ("autograd.grad", "loss"),
        ".cpu()",
        ".store(",
        *know.HELPED_TRAINING,
    )
    bad = """
def train(model, loader, criterion, optimizer):
    history = []
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        history.append(loss)
    return history
"""
    good = bad.replace("append(loss)", "append(loss.detach())")

    def check(self, flow: Flow) -> Iterator[Draft]:
        for store in flow.stores():
            if store.kind in (StoreKind.COLLECT, StoreKind.CONCATENATE):
                kept = judge(flow, store)
                if kept is not None:
                    yield self.draft(flow, kept)

        for store in flow.stores():
            if store.kind is StoreKind.COLLECT and store.life is Life.SELF:
                yield from self.buffer(flow, store)
        for call in flow.calls():
            yield from self.into_a_buffer(flow, call)

    def buffer(self, flow: Flow, store: Store) -> Iterator[Draft]:
        """A replay buffer that keeps what it is given as it is."""
        cls = store.function.cls
        if cls is None or not BUFFER_NAME.search(cls.name) or store.function.name == "__init__":
            return
        if store.grad is not Grad.ON or flow.grad_of(store.function) is not Grad.ON:
            return
        if all(leaf.origin.source is Source.PARAM for leaf in store.leaves):
            yield self.finding(
                store.node,
                f"`{store.holder_text}` keeps what `{store.function.name}` is given as it is: given tensors on the "
                f"GPU, or with a graph, each slot pins them. Store `.detach().cpu()` where tensors may come.",
                severity=Severity.NOTE,
            )

    def into_a_buffer(self, flow: Flow, call: CallEvent) -> Iterator[Draft]:
        """The output of a network handed to a rollout or replay buffer of another file."""
        func = call.node.func
        if not isinstance(func, cst.Attribute) or func.attr.value not in BUFFER_METHODS or not call.loops:
            return
        if not BUFFER_NAME.search(dotted(func.value).rsplit(".", 1)[-1]) or call.target is not None:
            return
        if call.grad is not Grad.ON or flow.grad_of(call.function) is not Grad.ON or call.function.backwards:
            return
        for arg, value in zip(call.node.args, call.args, strict=False):
            made = [o for o in value.objects if o.site.base is not None and o.site.base.source is Source.MODEL_CALL]
            if made and RECURRENT.search(made[0].site.node.value if isinstance(made[0].site.node, cst.Name) else ""):
                text = wording.short(flow.text(arg.value))
                yield self.finding(
                    arg.value,
                    f"`{dotted(func.value)}` is given `{text}` with its autograd graph: if it keeps it as it is, the "
                    f"graphs of all steps stay. Run the rollout under torch.no_grad(), or give it a detached state.",
                    severity=Severity.NOTE,
                )

    def draft(self, flow: Flow, kept: Kept) -> Draft:
        """The finding for one collection."""
        store = kept.store
        what = wording.short(flow.text(store.expression))
        holder = store.helper or store.holder_text
        part = kept.origin.site.key.lstrip(".")
        inner = "" if kept.whole or not store.tensor or part in ("", "[?]") else f" (its `{part}`)"
        ends = self.ends(flow, holder)
        if kept.whole:
            advice = f"Keep `{edits.detached(store.expression, what)}` instead."
        elif inner:
            advice = "Detach that entry before it is kept."
        else:
            advice = "Detach the tensors in it before they are kept."
        message = (
            f"`{wording.short(holder)}` collects `{what}`{inner} with its autograd graph {wording.until(store)}{ends}: "
            f"{wording.cost(kept)}. {advice}"
        )
        severity = severity_of(kept)
        if store.bounded:
            severity = Severity.NOTE if kept.freed_by is not None else Severity.WARNING
        return self.finding(
            store.node,
            message,
            severity=severity,
            fix=edits.detach(store.expression, safe=kept.grade is Grade.CERTAIN) if kept.whole else None,
            related=wording.related(flow, kept),
        )

    @staticmethod
    def ends(flow: Flow, holder: str) -> str:
        """Where the container is emptied, if the file says so."""
        return ", until it is emptied" if holder in flow.index.emptied else ""
