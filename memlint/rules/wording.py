"""How messages name loops, holders and costs: one wording for all rules."""

from __future__ import annotations

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow.facts import Life, Loop, Store
from memlint.lint.flow.judge import Cost, Kept
from memlint.lint.flow.values import Origin

_LONGEST = 60


def short(text: str) -> str:
    """A text for a message, cut where it is long."""
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def loop_name(loop: Loop | None) -> str:
    """`the loop over loader`."""
    if loop is None:
        return "the calls"
    if isinstance(loop.node, cst.While):
        return f"the loop `while {short(loop.over_text)}`"
    return f"the loop over `{short(loop.over_text)}`"


def turn(loop: Loop | None) -> str:
    """`iteration of the loop over loader`; None: the function is called once a batch by a framework."""
    return "call" if loop is None else f"iteration of {loop_name(loop)}"


def until(store: Store) -> str:
    """How long a store keeps what it is given."""
    if store.across is not None:
        return f"from every iteration of {loop_name(store.across)}"
    if store.life is Life.SELF:
        return "from every call, for as long as `self` lives"
    if store.life is Life.PARAM:
        return "from every call, for as long as the caller keeps it"
    return "from every call, for as long as the program runs"


def cost(kept: Kept) -> str:
    """What is kept, in the words of the severity."""
    if kept.cost is Cost.NODES:
        return (
            "backward() frees its activations, but its graph nodes stay (and any activation that this backward "
            "does not reach)"
        )
    if kept.cost is Cost.REST:
        return "backward() runs on another part of the same result, so the activations that only this part needs stay"
    return "nothing frees its activations: memory grows by a whole forward pass each time"


def _makers(origin: Origin) -> list[Origin]:
    """Where a graph that a call returns was made: through the calls of functions whose code is known."""
    seen: set[Origin] = set()
    waiting = [origin.site]
    while waiting:
        for inner in waiting.pop().returned:
            if inner.site not in seen:
                seen.add(inner.site)
                waiting.append(inner.site)
    return sorted((o for o in seen if not o.returned), key=lambda o: o.label)


def related(flow: Flow, kept: Kept) -> list[tuple[cst.CSTNode | None, str]]:
    """Where the graph was made, and where the holder lives."""
    places: list[tuple[cst.CSTNode | None, str]] = []
    origin = kept.origin.site
    made = origin.base if origin.base is not None else origin
    if isinstance(made.node, cst.Call):
        places.append((made.node, "the graph is made here" if not made.returned else "the graph is returned here"))
    places += [(inner.node, "and made here") for inner in _makers(made) if isinstance(inner.node, cst.Call)]
    if kept.freed_by is not None and isinstance(kept.freed_by.node, cst.Call):
        places.append((kept.freed_by.node, "backward runs here"))
    if kept.store.holder_node is not None and kept.store.holder_node is not flow.module:
        if isinstance(kept.store.holder_node, cst.BaseExpression):
            places.append((kept.store.holder_node, f"`{short(kept.store.holder_text)}` is made here"))
    return places
