"""ML107: hooks that keep activations, and hooks that pile up."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow.facts import CallEvent, FunctionFlow, Life, Loop
from memlint.lint.flow.index import FunctionInfo
from memlint.lint.flow.syntax import names_in
from memlint.lint.flow.values import Grad, Kind, Method, Origin, Source, Value
from memlint.lint.imports import dotted
from memlint.lint.model import Severity
from memlint.rules import wording
from memlint.rules.base import Draft, Rule
from memlint.rules.statements import assignments, body_of, bound_names

_MODULE_HOOKS = frozenset(
    """
    register_forward_hook register_forward_pre_hook register_backward_hook register_full_backward_hook
    register_full_backward_pre_hook register_module_forward_hook register_module_forward_pre_hook
    """.split()
)
_FORWARD_HOOKS = frozenset(
    """
    register_forward_hook register_forward_pre_hook register_module_forward_hook register_module_forward_pre_hook
    """.split()
)
#: hooks of every module of the process: they run whatever the file that registers them calls
_OF_ALL_MODULES = frozenset(("register_module_forward_hook", "register_module_forward_pre_hook"))
_STATISTICS = frozenset("sum mean std var norm max min item size dim numel".split())
#: methods that run once a step or call
_PER_CALL = frozenset("forward __call__ training_step train_step validation_step test_step".split())


class HookRetains(Rule):
    """A hook keeps activations, or hooks are registered again and again.

    A forward hook sees every call of its module. One that appends the output to a list keeps the output of every
    call, and unless it is detached the graph of every call, with all activations behind it (measured: each entry still
    has its `grad_fn` after backward). A tensor hook that closes over its own tensor is never freed at all: the tensor
    holds the hook and the hook the tensor, where the garbage collector does not look (measured on torch 2.13: alive
    after backward, `del` and `gc.collect()`). Hooks whose handles are dropped stay for as long as the module: in
    `forward`, each call adds one more (ML705 finds those in training loops).

    It is right where the list is emptied for each pass, where a dict keeps one output a layer, and for permanent hooks
    that are registered once, whose handles nobody needs.

    Detach what is only looked at, empty the list before each pass, and keep the handles of hooks that are not meant
    to stay (`handle.remove()`, or `with module.register_forward_hook(hook):`).
    """

    code, name, severity = "ML107", "hook-retains", Severity.WARNING
    triggers = (*sorted(_MODULE_HOOKS), ".register_hook(")
    bad = """
import torch
from torch import nn

class Watched(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.seen = []
        self.layer.register_forward_hook(self.watch)

    def watch(self, module, args, output):
        self.seen.append(output)

    def forward(self, x):
        return self.layer(x)
"""
    good = bad.replace(
        "return self.layer(x)",
        """self.seen.clear()
        return self.layer(x)""",
    )

    def check(self, flow: Flow) -> Iterator[Draft]:
        done: set[int] = set()
        for function in flow.functions:
            for event in list(function.calls.values()):
                method = (event.qualified or event.text).rsplit(".", 1)[-1]
                if isinstance(event.node.func, cst.Attribute):
                    method = event.node.func.attr.value
                if method in _FORWARD_HOOKS and event.node.args:
                    hook = hook_of(flow, event)
                    if hook is not None and id(hook) not in done:
                        done.add(id(hook))
                        if not made_for_the_call(function, hook, event):
                            yield from self.keeps(flow, function, hook, of_all=method in _OF_ALL_MODULES)
                elif method == "register_hook" and event.node.args and isinstance(event.node.func, cst.Attribute):
                    yield from self.of_itself(flow, function, event)
            yield from self.dropped(flow, function)

    # -- what a hook keeps -----------------------------------------------------------------------------------------

    def keeps(self, flow: Flow, function: FunctionFlow, hook: FunctionInfo, *, of_all: bool) -> Iterator[Draft]:
        """Activations that a forward hook stores."""
        params = [param.name.value for param in hook.parameters][1 if hook.bound else 0 :]
        if len(params) < 2 or hook.flow is None:
            return
        module, seen = params[0], set(params[1:])
        text = flow.text(hook.node)
        for statement in body_of(hook):
            if isinstance(statement, cst.Expr) and isinstance(statement.value, cst.Call):
                call = statement.value
                if isinstance(call.func, cst.Attribute) and call.func.attr.value in ("append", "appendleft"):
                    if call.args and seen & set(names_in(call.args[0].value)):
                        yield from self.appended(flow, function, hook, module, call, text, of_all=of_all)
            for target, value in assignments(statement):
                if isinstance(target, cst.Attribute) and dotted(target.value) == module:
                    if seen & set(names_in(value)) and not reduced(value) and left_behind(flow, target.attr.value):
                        yield self.finding(
                            target,
                            f"the hook leaves an activation on the module (`{dotted(target)}`), and removing the hook "
                            f"does not remove it: it stays for as long as the module. Delete it too, or keep it in a "
                            f"dict of your own.",
                            severity=Severity.NOTE,
                        )

    def appended(
        self,
        flow: Flow,
        function: FunctionFlow,
        hook: FunctionInfo,
        module: str,
        call: cst.Call,
        text: str,
        *,
        of_all: bool,
    ) -> Iterator[Draft]:
        """`kept.append(output)`."""
        assert isinstance(call.func, cst.Attribute)
        holder = dotted(call.func.value)
        head, _, rest = holder.partition(".")
        store = next((s for s in hook.flow.stores if s.node is call), None) if hook.flow is not None else None
        if not holder or "is_grad_enabled" in text or (store is not None and store.bounded):
            return
        if handed_in(flow, hook, holder):
            return
        kept = wording.short(flow.text(call.args[0].value))
        if store is None:
            if head == module and rest and re.search(r"\.(?:detach\(|data\b)", flow.text(call.args[0].value)):
                yield self.finding(
                    call,
                    f"`{holder}` takes in `{kept}` at every call: where no backward follows to use it up, as under "
                    f"torch.no_grad(), it grows. Ask torch.is_grad_enabled() too.",
                    severity=Severity.NOTE,
                )
            return
        if emptied(flow, holder):
            return
        if of_all and function.is_module and store.life is Life.OUTER:
            where = "from every call of any module"
        elif not rest and store.holder_node is not None and store.holder_node is not flow.module:
            growing = self.called_in_loop(function)
            if growing is None or made_in(hook, holder, growing.loops[-1]):
                return
            if any(growing.loops[-1] in path for _, path, _ in function.bindings.get(holder, {}).values()):
                return  # bound anew in each turn, and the hook sees the new one
            where = f"from every call in {wording.loop_name(growing.loops[-1])}"
        else:
            where = "from every call"
        silent = "no_grad" in flow.code or "inference_mode" in flow.code
        yield self.finding(
            call,
            f"the hook keeps `{kept}` in `{holder}` {where}, with the autograd graph behind it, and nothing in the "
            f"file empties the list. Detach it, or empty the list for each pass.",
            severity=Severity.NOTE if silent else self.severity,
        )

    @staticmethod
    def called_in_loop(function: FunctionFlow) -> CallEvent | None:
        """A call of a model in a loop of a function, with autograd on."""
        for event in function.calls.values():
            if event.loops and event.grad is Grad.ON:
                if any(origin.site.source is Source.MODEL_CALL for origin in event.result.objects):
                    return event
        return None

    # -- hooks that hold their own tensor --------------------------------------------------------------------------

    def of_itself(self, flow: Flow, function: FunctionFlow, event: CallEvent) -> Iterator[Draft]:
        """`h.register_hook(lambda grad: grad * h)`."""
        assert isinstance(event.node.func, cst.Attribute)
        receiver = event.node.func.value
        if not isinstance(receiver, cst.Name) or function.info is None or event.loops:
            return  # a global is no closure, and a loop rebinds the variable that the closure reads
        given = event.node.args[0].value
        hook = hook_of(flow, event)
        if hook is None or not closes_over(flow, hook, receiver.value):
            return
        value = function.seen.get(id(receiver))
        if value is None or not computed(value):
            return  # perhaps a leaf, whose cycle the garbage collector finds
        statements = body_of(function.info)
        kept = next(
            (s for s in statements if isinstance(s, (cst.Assign, cst.AnnAssign)) and s.value is event.node), None
        )
        if kept is not None:
            return  # the handle may be used to remove it
        place = next((i for i, s in enumerate(statements) if isinstance(s, cst.Expr) and s.value is event.node), None)
        if place is None:
            return
        for later in statements[place + 1 :]:
            if any(receiver.value in bound_names(target) for target, _ in assignments(later)):
                return
            if isinstance(later, cst.Del) and receiver.value in bound_names(later.target):
                return
        yield self.finding(
            given,
            f"this hook closes over `{receiver.value}`, the tensor that it hangs on: they hold each other where the "
            f"garbage collector does not look, and are never freed. Close over `{receiver.value}.detach()`.",
        )

    # -- hooks that pile up ----------------------------------------------------------------------------------------

    def dropped(self, flow: Flow, function: FunctionFlow) -> Iterator[Draft]:
        """Module hooks registered in every call, with their handles dropped."""
        if function.info is None or function.cls is None or function.name not in _PER_CALL:
            return  # in loops, ML705 finds them
        dropped = {id(s.value) for s in body_of(function.info) if isinstance(s, cst.Expr)}
        events = [event for event in function.calls.values() if id(event.node) in dropped]
        for event in events:
            func = event.node.func
            if isinstance(func, cst.Attribute) and func.attr.value in _MODULE_HOOKS:
                if not any(origin.loops for origin in self.root(function, func.value)):
                    yield self.finding(
                        event.node,
                        f"a hook is registered in every call of `{function.name}` and its handle dropped: they pile up "
                        f"on the module. Register it once, or keep the handle and remove it.",
                        severity=Severity.NOTE,
                    )

    @staticmethod
    def root(function: FunctionFlow, node: cst.BaseExpression) -> frozenset[Origin]:
        """What the name is that an expression starts with."""
        while isinstance(node, (cst.Attribute, cst.Subscript, cst.Call)):
            node = node.func if isinstance(node, cst.Call) else node.value
        value = function.seen.get(id(node))
        return value.objects if value is not None else frozenset()


def hook_of(flow: Flow, event: CallEvent) -> FunctionInfo | None:
    """The function of this file that a call registers as a hook."""
    node, value = event.node.args[0].value, event.args[0]
    if isinstance(node, cst.Lambda):
        return flow.index.by_node.get(id(node))
    if value.kind is Kind.FUNCTION and isinstance(value.info, FunctionInfo):
        return value.info
    if isinstance(value.info, Method):
        return value.info.function
    text = dotted(node)
    cls = event.function.cls
    if text.startswith("self.") and text.count(".") == 1 and cls is not None:
        return cls.method(text[5:])
    return flow.index.functions.get(text)


def made_for_the_call(function: FunctionFlow, hook: FunctionInfo, event: CallEvent) -> bool:
    """Whether the hook is a method of an object that the registering function makes: what it keeps dies with that."""
    value = event.args[0]
    if hook.cls is None or function.is_module or not isinstance(value.info, Method) or event.loops:
        return False
    made = value.info.receiver.objects
    return bool(made) and all(o.site.source is Source.CALL and id(o.site.node) in function.calls for o in made)


def made_in(hook: FunctionInfo, name: str, loop: Loop) -> bool:
    """Whether each iteration of a loop makes what `name` stands for in a nested function anew."""
    value = (hook.closure or {}).get(name)
    return value is not None and bool(value.objects) and all(loop in origin.loops for origin in value.objects)


def handed_in(flow: Flow, hook: FunctionInfo, name: str) -> bool:
    """Whether what makes the hook is given the list, and all who call it make one for that call."""
    value = (hook.closure or {}).get(name)
    if value is None or not value.objects or any(o.site.source is not Source.PARAM for o in value.objects):
        return False
    maker = flow.owner.get(next(iter(value.objects)).site)
    calls = list(flow.callers.get(id(maker.node), {}).values()) if maker is not None else []
    given = [value for call in calls for value in call.args if value.kind is Kind.CONTAINER]
    return len(given) == len(calls) > 0 and all(
        (owner := flow.owner.get(o.site)) is not None and not owner.is_module and not o.site.loops
        for value in given
        for o in value.objects
    )


def closes_over(flow: Flow, hook: FunctionInfo, name: str) -> bool:
    """Whether a nested function reads `name` of the function around it."""
    params = [param.name.value for param in hook.parameters]
    if hook.cls is not None or name in params or flow.index.functions.get(hook.name) is hook:
        return False
    if hook.flow is None:
        return False
    for statement in body_of(hook):
        if any(name in bound_names(target) for target, _ in assignments(statement)):
            return False
    body = flow.text(hook.node.body)
    return (
        re.search(rf"(?<![\w.]){re.escape(name)}\b(?!\s*=[^=])(?!\.(?:shape|dtype|device|detach\())", body) is not None
    )


def computed(value: Value) -> bool:
    """Whether a thing is surely the result of an operation on tensors: no leaf, no parameter."""
    if not value.direct:
        return bool(value.graph)
    return any(origin.site.source in (Source.MODEL_CALL, Source.LOSS_CALL) for origin in value.graph)


def reduced(node: cst.BaseExpression) -> bool:
    """Whether a value is a statistic of an activation, not the activation."""
    return isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value in _STATISTICS


def uncommented(flow: Flow) -> str:
    """The file without its comments."""
    return re.sub(r"#[^\n]*", "", flow.code)


def emptied(flow: Flow, holder: str) -> bool:
    """Whether the file empties a list anywhere, or makes it anew outside of constructors."""
    name = re.escape(holder.rsplit(".", 1)[-1])
    if re.search(rf"\b{name}\b(?:\[[^\]]*\])?\.(?:clear|pop|popleft)\(|\bdel\b[^\n]*\b{name}\b", uncommented(flow)):
        return True
    return any(path.rsplit(".", 1)[-1] == holder.rsplit(".", 1)[-1] for path in flow.index.emptied)


def left_behind(flow: Flow, name: str) -> bool:
    """Whether the file removes hooks, but not the attribute that they set."""
    text, name = uncommented(flow), re.escape(name)
    if ".remove()" not in text:
        return False
    return not re.search(rf"\bdel\b[^\n]*\.{name}\b|\.{name}\s*=\s*None\b|delattr\([^\n]*{name}", text)
