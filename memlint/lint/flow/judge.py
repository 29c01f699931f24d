"""The verdict on a store: does it keep a graph that nobody needs, and what does that cost?"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import libcst as cst

from memlint.lint.flow.facts import Backward, CallEvent, FunctionFlow, Guard, Life, Loop, Store, StoreKind
from memlint.lint.flow.index import blocks
from memlint.lint.flow.syntax import holds, nodes, place, runs_in_eval_mode, walk
from memlint.lint.flow.values import Grad, Grade, Origin, Source
from memlint.lint.imports import dotted

if TYPE_CHECKING:
    from memlint.lint.flow import Flow


#: What functions are called that evaluate. A name alone is no evidence: what they sum must be backwarded elsewhere.
EVALUATION_NAME = re.compile(r"^_?(?:evaluate|evaluation|validate|validation|eval|valid)(?:_\w+)?$", re.I)


class Cost(enum.Enum):
    """What stays in memory for each thing kept."""

    NODES = "graph nodes"  # backward has freed the saved tensors
    REST = "what backward did not reach"  # a sibling of the loss: its own saved tensors stay
    ACTIVATIONS = "activations"  # nothing freed them


@dataclass(frozen=True, slots=True)
class Kept:
    """A store that keeps a graph for nothing."""

    store: Store
    origin: Origin
    grade: Grade
    cost: Cost
    #: the backward that freed the saved tensors, where there is one
    freed_by: Backward | None
    #: the kept expression is the tensor itself, not something that holds it (where it could be detached)
    whole: bool


def judge(flow: Flow, store: Store) -> Kept | None:
    """Whether `store` keeps a graph for nothing; None where it is right, bounded to one value, or not known."""
    if store.needed or store.yielded or store.plain or not outlives_iteration(store):
        return None
    if is_queue(store) or entries_detached(store):
        return None
    if any(isinstance(frame, Guard) and runs_in_eval_mode(frame.test, frame.taken) for frame in store.path):
        return None  # whether a graph is there is up to whoever evaluates
    best: Kept | None = None
    for leaf in store.leaves:
        grade, origin = flow.attached_part(leaf)
        if grade < Grade.WEAK or origin.site.source is Source.LEAF:
            continue
        if store.keyed and not made_in(leaf.origin, store.loops[-1]):
            continue  # the same keys again in the next turn of the outer loop: nothing grows
        kept = _cost(flow, store, leaf.origin, origin, grade)
        if kept is not None and (best is None or (kept.grade, kept.cost.name) > (best.grade, best.cost.name)):
            best = kept
    return best


def is_queue(store: Store) -> bool:
    """Whether the loop that fills a list takes from it, too: `waiting.append(x)`, `x = waiting.pop(0)`."""
    takes = (f"{store.holder_text}.pop", f"{store.holder_text}.popleft", f"{store.holder_text}.get")
    return store.kind is StoreKind.COLLECT and any(
        call.text in takes and store.across is not None and store.across in call.loops
        for call in store.function.calls.values()
    )


def entries_detached(store: Store) -> bool:
    """`for k, v in out.items(): out[k] = v.detach()`, and then `outputs.append(out)`."""
    kept = place(store.expression)
    if not kept or not store.loops:
        return False
    for each in nodes(store.loops[-1].node):
        if isinstance(each, cst.For) and any(place(node) == kept for node in walk(each.iter)):
            for inner in nodes(each.body):
                if isinstance(inner, cst.Assign) and any(
                    isinstance(target.target, cst.Subscript) and place(target.target.value) == kept
                    for target in inner.targets
                ):
                    calls = [node for node in walk(inner.value) if isinstance(node, cst.Call)]
                    if any(dotted(call.func).rsplit(".", 1)[-1] in ("detach", "item", "float") for call in calls):
                        return True
    return False


def outlives_iteration(store: Store) -> bool:
    """Whether what is stored is still there when the code comes by again."""
    if store.kind is StoreKind.ASSIGN:
        return False
    if store.life is Life.LOOP:
        if store.across is None:
            return True
        return not store.across.written_down and not leaves_behind(store.across.node, store.node)
    if store.life in (Life.SELF, Life.OUTER, Life.PARAM):
        return store.across is not None or not store.function.is_module
    return False


def leaves_behind(loop: cst.CSTNode, node: cst.CSTNode) -> bool:
    """Whether a loop ends in the iteration that comes to `node`: a break, return or raise follows on every way."""

    def leaves(body: Sequence[cst.CSTNode], innermost: bool) -> bool:
        place = next((i for i, each in enumerate(body) if holds(each, node)), None)
        if place is None:
            return False
        inner = innermost and not isinstance(body[place], (cst.For, cst.While))
        if not isinstance(body[place], cst.SimpleStatementLine):
            if any(leaves(block, inner) for block in blocks(body[place])):
                return True
        ends = (cst.Break, cst.Return, cst.Raise) if innermost else (cst.Return, cst.Raise)
        return any(
            isinstance(small, ends)
            for each in body[place:]
            if isinstance(each, cst.SimpleStatementLine)
            for small in each.body
        )

    return isinstance(loop, (cst.For, cst.While)) and leaves(next(iter(blocks(loop))), True)


def _cost(flow: Flow, store: Store, held: Origin, origin: Origin, grade: Grade) -> Kept | None:
    whole = held is origin and store.tensor and not is_opened(origin)
    freed_by = freeing_backward(store, origin) or freed_by_callers(flow, store, origin)
    if freed_by is not None or origin in store.consumed:
        return Kept(store, origin, grade, Cost.NODES, freed_by, whole)
    if origin.site.root and not _backwarded_here(store.function, origin):
        return None  # backwarded elsewhere: somebody needs it
    if grade >= Grade.LIKELY and _sibling_consumed(store, origin):
        return Kept(store, origin, grade, Cost.REST, None, whole)
    if store.returned or store.passed:
        return None if not _evaluates(flow, store) else Kept(store, origin, grade, Cost.ACTIVATIONS, None, whole)
    if _evaluates(flow, store) or (store.as_number and grade >= Grade.LIKELY and not store.function.backwards):
        return Kept(store, origin, grade, Cost.ACTIVATIONS, None, whole)
    return None


def is_opened(origin: Origin) -> bool:
    """Whether something is used as a container: its elements are taken, by turn or by key."""
    site = origin.site
    return site.opened or any(key.startswith(("['", '["')) for key in site.children)


def freeing_backward(store: Store, origin: Origin) -> Backward | None:
    """The backward that frees the saved tensors of `origin` in the iteration of the store, before or after it."""
    for event in store.function.backwards:
        if event.retains is not False or origin not in event.reach:
            continue
        if event.loops[: len(store.loops)] != store.loops or store in event.value.via:
            continue  # not in the same iteration, or it needs what is stored
        if event.order > store.order or (origin in store.maybe_consumed and not store.value.spared):
            return event
    return None


def freed_by_callers(flow: Flow, store: Store, origin: Origin) -> Backward | None:
    """The backward that frees what a method hands back and also keeps: whoever calls it with autograd on runs one."""
    if store.life is not Life.SELF or not origin.site.root:
        return None
    return _freed_after(flow, store, origin.site, store.function, frozenset())


def _freed_after(
    flow: Flow, store: Store, origin: Origin, function: FunctionFlow, seen: frozenset[int]
) -> Backward | None:
    key = id(function.node)
    if key in seen or function.info is None:
        return None
    freed_by: Backward | None = None
    for call in flow.callers.get(key, {}).values():
        if call.grad is Grad.OFF or flow.grad_of(call.function) is Grad.OFF:
            continue
        if _reads(call.function, store.holder_text):
            return None  # what is kept may be part of what is backwarded
        event = next((e for e in call.function.backwards if _frees(e, call, origin)), None)
        event = event or _freed_after(flow, store, origin, call.function, seen | {key})
        if event is None:
            return None
        freed_by = freed_by or event
    return freed_by


def _frees(event: Backward, call: CallEvent, origin: Origin) -> bool:
    if event.retains is not False or event.order < call.order or event.loops[: len(call.loops)] != call.loops:
        return False
    return origin in {o.site for o in event.reach}


def _reads(function: FunctionFlow, holder: str) -> bool:
    """Whether a function, or one that it calls, speaks of a place (the one that keeps something aside)."""
    called = [call.target.node for call in function.calls.values() if call.target is not None]
    return any(
        place(node) == holder
        for body in (function.node, *called)
        for node in nodes(body)
        if isinstance(node, cst.Attribute)
    )


def _backwarded_here(function: FunctionFlow, origin: Origin) -> bool:
    return any(origin.site in {o.site for o in event.reach} for event in function.backwards)


def _sibling_consumed(store: Store, origin: Origin) -> bool:
    base = origin.site.base
    if base is None:
        return False
    return any(
        freeing_backward(store, child) is not None or child in store.consumed
        for child in base.children.values()
        if child is not origin.site
    )


def _evaluates(flow: Flow, store: Store) -> bool:
    """Whether the store collects results of an evaluation that runs with autograd on."""
    function = store.function
    if (
        function.is_forward
        or function.backwards
        or function.asks_grad
        or store.grad is not Grad.ON
        or flow.grad_of(function) is not Grad.ON
    ):
        return False
    if any(event.what.value == "step" for event in function.optimizer):
        return False
    if function.is_module and any(True for _ in flow.backwards()) and not function.evals:
        return False
    handed_on = store.returned or store.passed
    named = EVALUATION_NAME.match(function.name) and not function.is_module and _sure(flow, store)
    if named and handed_on and store.kind is not StoreKind.ACCUMULATE:
        named = False  # `evaluate` of an actor and critic hands back what its caller backwards
    if handed_on and over_models(store.across, function):
        return False  # an ensemble: who gets what its members say may differentiate that by the input
    if function.evals or named:
        return not flow.may_run_without_grad(function)
    moved = any(call in leaf.origin.site.calls for leaf in store.leaves for call in ("cpu",))
    kept_here = moved and not handed_on and loop_over_data(store.across)
    return kept_here and not flow.may_run_without_grad(function)


def over_models(loop: Loop | None, function: FunctionFlow) -> bool:
    """Whether a loop runs over models that are put in eval mode: `for net in nets: net.eval()`."""
    if loop is None or not isinstance(loop.node, cst.For):
        return False
    return any(place(node) in function.evals for node in walk(loop.node.target))


def loop_over_data(loop: Loop | None) -> bool:
    """Whether a loop runs over something (not a count of layers, not the children of a module)."""
    return loop is not None and isinstance(loop.node, cst.For) and not loop.count


def _sure(flow: Flow, store: Store) -> bool:
    return any(flow.attached_part(leaf)[0] >= Grade.LIKELY for leaf in store.leaves)


def made_in(origin: Origin, loop: Loop) -> bool:
    """Whether each iteration of `loop` makes the thing anew (rather than takes an element of something older)."""
    site = origin.site
    if site.source is Source.ITER:
        return any(made_in(parent, loop) for parent in site.parents)
    return loop in site.loops


def model_source(origin: Origin) -> bool:
    """Whether an origin is the output of a model or a loss."""
    return origin.site.source in (Source.MODEL_CALL, Source.LOSS_CALL)
