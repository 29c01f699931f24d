"""ML110: out-of-memory handlers that hold the memory that they want back."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow import knowledge as know
from memlint.lint.flow.facts import CallEvent, FunctionFlow, Guard, Life, Loop, Region, Store, StoreKind
from memlint.lint.flow.index import statements
from memlint.lint.flow.syntax import holds, names_in, nodes, walk
from memlint.lint.flow.values import Kind, Source
from memlint.lint.imports import dotted
from memlint.lint.model import Severity
from memlint.rules.base import Draft, Rule
from memlint.rules.statements import assignments, body_of, flat

_OOM = re.compile(r"out[ _]?of[ _]?memory|(?<![a-z])ooms?(?![a-z])|reduce_batch_size", re.I)
#: exception types that an out-of-memory error is caught by
_CATCHES = re.compile(r"(?:^|\.)(?:Exception|BaseException|RuntimeError|OutOfMemoryError|AcceleratorError)$")
#: what a handler does to clean up, or what tells somebody, is no work that is tried again
_CLEANUP = re.compile(
    r"""empty_cache|cache|collect|clear|clean|free|reset|release|close|delete|remove|log|warn|print|info|debug|report
    |zero_grad|^to$|^cpu$|^cuda$|append|update|state_dict|barrier|format|join|save|load|^eval$|^train$|len|shape|size
    |sync|set_|memory|device|seed|time|elapsed|clock|alloc|error|oom|raise|exit|stop|^get_|^is_|^has_|rank|world""",
    re.I | re.X,
)
#: what lets go of the frames while the handler still runs (measured on Python 3.11)
_LETS_GO = re.compile(r"with_traceback\(None\)|clear_frames\(|__traceback__ = None")


class OomRetryInExcept(Rule):
    """Work is tried again inside the handler of its out-of-memory error, or the exception is kept.

    While an `except` block runs, the exception is alive, and with it the traceback, the frames of the failed call and
    every tensor in them: the retry has to fit beside the failed attempt, and often fails too, however small the batch
    is by then. `empty_cache()`, `gc.collect()` and `del err` inside the handler do not help (measured: a local of the
    failing frame is alive in the handler and gone right after it). A retry by recursion stacks attempt upon attempt.
    An exception that is put into a list, or bound to a name that outlives the handler, holds its frames for as long.

    It is right to keep `str(err)`, `repr(err)` or `traceback.format_exc()`, to set a flag and try again after the
    handler, to raise, and to let go of the frames first (`err.with_traceback(None)`,
    `traceback.clear_frames(err.__traceback__)`). Going on with the CPU inside the handler needs no GPU memory; memlint
    is silent there too.

    Set a flag in the handler and retry below it.
    """

    code, name, severity = "ML110", "oom-retry-in-except", Severity.WARNING
    triggers = tuple(
        (word, "except")
        for word in (
            *(
                "out of memory",
                "OutOfMemory",
                "out_of_memory",
                "_oom",
                "oom_",
                "OOM",
                "reduce_batch_size",
                "exc_info()",
            ),
            *("append(e)", "append(ex)", "append(err)", "append(exc)", "append(error)", "append(exception)"),
            *(", e))", ", ex))", ", err))", ", exc))", ", error))", ", exception))"),
        )
    )
    bad = """
import torch

def run(model, inputs):
    try:
        return model(inputs)
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        torch.cuda.empty_cache()
        first, second = inputs.chunk(2)
        return torch.cat([run(model, first), run(model, second)])
"""
    good = """
import torch

def run(model, inputs):
    try:
        return model(inputs)
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
    torch.cuda.empty_cache()
    first, second = inputs.chunk(2)
    return torch.cat([run(model, first), run(model, second)])
"""

    def check(self, flow: Flow) -> Iterator[Draft]:
        for function in flow.functions:
            for attempt in attempts(function):
                yield from self.retried(flow, function, attempt)
                yield from self.rebound(flow, function, attempt)
            for store in function.stores:
                yield from self.kept(flow, store)
            yield from self.tracebacks(flow, function)

    # -- work that is tried again ----------------------------------------------------------------------------------

    def retried(self, flow: Flow, function: FunctionFlow, attempt: _Attempt) -> Iterator[Draft]:
        """The first call of a handler that does the work again."""
        text = flow.text(attempt.handler)
        if not _OOM.search(text) or _LETS_GO.search(text) or re.search(r"\bcpu\b", text):
            return
        tried = {event.text for event in attempt.body if event.text}
        told = [node for node in nodes(attempt.handler) if isinstance(node, (cst.Raise, cst.FormattedString))]
        for event in sorted(attempt.handled, key=lambda event: event.order):
            if any(holds(node, event.node) for node in told):
                continue  # it makes a text, or another exception
            if not self.for_memory(flow, function, attempt.handler, event):
                continue
            again = function.info is not None and event.target is function.info
            if function.info is not None and event.target is None and function.cls is None:
                again = event.text == function.name  # a nested function that calls itself
            if again or (event.text in tried and self.is_work(event)):
                yield self.finding(
                    event.node,
                    f"`{event.text}` is tried again while the except block holds the failed attempt: exception, "
                    f"traceback, frames and their tensors stay until the block ends"
                    f"{', and each level of the recursion adds its own' if again else ''}. Set a flag here and retry "
                    f"after the block.",
                    related=[(attempt.handler.type, "this exception holds the failed attempt")],
                )
                return

    @staticmethod
    def for_memory(flow: Flow, function: FunctionFlow, handler: cst.ExceptHandler, event: CallEvent) -> bool:
        """Whether a call in a handler is reached when memory ran out, not where the error is another."""
        name = handler.name.name.value if handler.name is not None and isinstance(handler.name.name, cst.Name) else ""
        if not name:
            return True
        guards = [frame for frame in event.path if isinstance(frame, Guard)]
        for guard in guards:
            asked = says_oom(flow, guard.test, name)
            if asked is not None and guard.taken is not asked:
                return False
        for statement in statements(handler.body):
            # `if "out of memory" in str(err): raise` leaves the other errors for what follows
            if not isinstance(statement, cst.If) or statement.orelse is not None:
                continue
            if says_oom(flow, statement.test, name) is not True or not leaves(statement.body):
                continue
            asked_at = [call.order for n in walk(statement.test) if (call := function.calls.get(id(n))) is not None]
            if asked_at and max(asked_at) < event.order and all(guard.node is not statement for guard in guards):
                return False
        return True

    @staticmethod
    def is_work(event: CallEvent) -> bool:
        """Whether a call runs Python code whose frames can hold tensors, rather than cleaning up or reporting."""
        if event.callee.kind in (Kind.CLASS, Kind.NUMBER, Kind.CONTAINER):
            return False
        top = event.qualified.split(".", 1)[0]
        if top == "torch" or top in know.PLAIN_MODULES:
            return False  # C code leaves no frames behind
        tail = event.text.rsplit(".", 1)[-1]
        if tail in know.OBSERVERS or tail in know.PLAIN_BUILTINS or tail in know.CONTAINER_BUILTINS:
            return False
        if tail in know.PASSING_BUILTINS or tail in know.TRANSPARENT_METHODS or tail in know.DETACHING_METHODS:
            return False
        return not _CLEANUP.search(tail)

    # -- exceptions that are kept ----------------------------------------------------------------------------------

    def rebound(self, flow: Flow, function: FunctionFlow, attempt: _Attempt) -> Iterator[Draft]:
        """`failure = err` in a memory handler: the name outlives the block, and the frames with it."""
        handler = attempt.handler
        name = handler.name.name if handler.name is not None else None
        text = flow.text(handler)
        if not isinstance(name, cst.Name) or not _OOM.search(text) or _LETS_GO.search(text):
            return
        if not attempt.loops:
            return  # it is gone, or raised, when the function returns
        for statement in flat(statements(handler.body)):
            for target, value in assignments(statement):
                place = dotted(target)
                if dotted(value) == name.value and place and not lets_go(function, place):
                    yield self.finding(
                        statement,
                        f"`{place}` keeps the exception after the block, and with it the frames of the failed attempt "
                        f"and their tensors. Keep `str({name.value})`, or drop it before the next attempt.",
                    )

    def kept(self, flow: Flow, store: Store) -> Iterator[Draft]:
        """`errors.append(err)`."""
        if store.kind is not StoreKind.COLLECT or store.helper or store.bounded:
            return
        handler = next((h for leaf in store.leaves if (h := handler_of(leaf.origin)) is not None), None)
        if handler is None or not general(handler) or _LETS_GO.search(flow.text(handler)):
            return
        if store.life is Life.ITERATION or (store.across is None and store.life not in (Life.SELF, Life.OUTER)):
            return
        attempt = next((a for a in attempts(store.function) if a.handler is handler), None)
        if attempt is None or not trains(store.function, attempt):
            return
        name = handler.name.name if handler.name is not None else None
        if isinstance(name, cst.Name):
            yield self.finding(
                store.node,
                f"`{store.holder_text}` keeps the exception: its traceback holds the frames of the failed call and "
                f"every tensor in them. Keep `repr({name.value})` or `traceback.format_exc()`.",
            )

    def tracebacks(self, flow: Flow, function: FunctionFlow) -> Iterator[Draft]:
        """`errors.append(sys.exc_info())`."""
        for event in function.calls.values():
            if event.text.rsplit(".", 1)[-1] not in ("append", "appendleft", "add") or not event.node.args:
                continue
            given = event.node.args[0].value
            if isinstance(given, cst.Call) and flow.qualify(dotted(given.func)) == "sys.exc_info" and event.loops:
                attempt = next((a for a in attempts(function) if event in a.handled), None)
                if attempt is not None and general(attempt.handler) and trains(function, attempt):
                    yield self.finding(
                        event.node,
                        "`sys.exc_info()` holds the traceback, and with it the frames of the failed call and every "
                        "tensor in them. Keep `traceback.format_exc()`.",
                    )


def says_oom(flow: Flow, test: cst.BaseExpression, name: str) -> bool | None:
    """Whether a test on the exception `name` is true for out-of-memory errors; None where it asks something else."""
    text = flow.text(test)
    if not _OOM.search(text) or not re.search(rf"\b{name}\b", text):
        return None
    return not re.search(r"\bnot\b", text)


def leaves(body: cst.BaseSuite) -> bool:
    """Whether a block ends by leaving it for good."""
    last = list(flat(statements(body)))[-1:]
    return bool(last) and isinstance(last[0], (cst.Raise, cst.Return, cst.Continue, cst.Break))


class _Attempt:
    """A `try` body and one of its handlers, with the calls in each."""

    def __init__(self, handler: cst.ExceptHandler) -> None:
        self.handler = handler
        self.body: list[CallEvent] = []
        self.handled: list[CallEvent] = []
        self.loops: tuple[Loop, ...] = ()


def attempts(function: FunctionFlow) -> list[_Attempt]:
    """The tries of a function that may catch an out-of-memory error."""
    found: dict[int, _Attempt] = {}
    bodies: dict[int, list[CallEvent]] = {}
    tries: dict[int, cst.Try | cst.TryStar] = {}
    for event in function.calls.values():
        loops: list[Loop] = []
        for frame in event.path:
            if isinstance(frame, Loop):
                loops.append(frame)
            elif isinstance(frame, Region) and frame.part == "try" and isinstance(frame.node, (cst.Try, cst.TryStar)):
                tries[id(frame.node)] = frame.node
                bodies.setdefault(id(frame.node), []).append(event)
                for handler in frame.node.handlers:
                    if isinstance(handler, cst.ExceptHandler) and general(handler):
                        found.setdefault(id(handler), _Attempt(handler)).loops = tuple(loops)
    for event in function.calls.values():
        for frame in event.path:
            if isinstance(frame, Region) and frame.part == "handler" and id(frame.node) in found:
                found[id(frame.node)].handled.append(event)
    for key, node in tries.items():
        for handler in node.handlers:
            if id(handler) in found:
                found[id(handler)].body = bodies[key]
    return list(found.values())


def general(handler: cst.ExceptHandler) -> bool:
    """Whether a handler catches out-of-memory errors."""
    if handler.type is None:
        return True
    return any(_CATCHES.search(dotted(item)) for item in walk(handler.type) if dotted(item))


def handler_of(origin: object) -> cst.ExceptHandler | None:
    """The handler that an exception, or its traceback, was caught by."""
    site = getattr(origin, "site", None)
    if site is None:
        return None
    if site.base is not None and site.key == ".__traceback__":
        site = site.base.site
    return site.node if isinstance(site.node, cst.ExceptHandler) else None


def lets_go(function: FunctionFlow, place: str) -> bool:
    """Whether a function sets a place to None, or deletes it, somewhere after a handler."""
    if function.info is None:
        return False
    body = body_of(function.info)
    for statement in body:
        if isinstance(statement, cst.Del) and place in [dotted(item) for item in walk(statement.target)]:
            return True
    cleared = [
        number
        for number, statement in enumerate(body)
        for target, value in assignments(statement)
        if dotted(target) == place and dotted(value) == "None"
    ]
    bound = [
        number
        for number, statement in enumerate(body)
        for target, value in assignments(statement)
        if dotted(target) == place and dotted(value) != "None"
    ]
    return bool(cleared) and max(cleared) > min(bound)


def trains(function: FunctionFlow, attempt: _Attempt) -> bool:
    """Whether the work that failed runs a model."""
    for event in attempt.body:
        if any(origin.site.source in (Source.MODEL_CALL, Source.LOSS_CALL) for origin in event.result.objects):
            return True
        if event.callee.kind is Kind.MODULE or event.text.endswith(".backward"):
            return True
        inner = event.target.flow if event.target is not None else None
        if inner is not None and inner.backwards:
            return True
    over = [loop for loop in attempt.loops if loop.over is not None]
    for loop in over:
        named = isinstance(loop.node, cst.For) and any(know.LOADER_NAME.search(n) for n in names_in(loop.node.iter))
        if (loop.over is not None and loop.over.kind is Kind.LOADER) or named:
            return bool(function.optimizer or function.backwards)
    return False
