"""ML102: tensors collected with their graphs."""

from __future__ import annotations

from collections.abc import Iterator

from memlint.lint.flow import Flow
from memlint.lint.flow.facts import StoreKind
from memlint.lint.flow.judge import Kept, judge
from memlint.lint.flow.values import Grade
from memlint.lint.model import Severity
from memlint.rules import edits, wording
from memlint.rules.base import Draft, Rule
from memlint.rules.ml101_accumulated_graph import detached, severity_of


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
    triggers = (".backward(", "manual_backward(", ".eval()", "train(False)", "training_step", "compute_loss", ".cpu()")
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

    def draft(self, flow: Flow, kept: Kept) -> Draft:
        """The finding for one collection."""
        store = kept.store
        what = wording.short(flow.text(store.expression))
        holder = store.helper or store.holder_text
        inner = "" if kept.whole else f" (its `{kept.origin.site.key.lstrip('.')}`)"
        ends = self.ends(flow, holder)
        advice = f"Keep `{detached(what)}` instead." if kept.whole else "Detach that entry before it is kept."
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
