"""ML705: torch.compile, or hooks, made again in a loop."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow.facts import CallEvent, FunctionFlow, Loop
from memlint.lint.flow.syntax import nodes, place
from memlint.lint.imports import dotted
from memlint.lint.model import Severity
from memlint.rules import wording
from memlint.rules.base import Draft, Rule
from memlint.rules.ml501_empty_cache_in_loop import rare
from memlint.rules.training import assignments, body_of, bound_in, in_tests, mentions, steps_in

#: hooks of modules; a hook on a tensor goes with its tensor
_HOOKS = frozenset(
    """
    register_forward_hook register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook
    register_backward_hook register_state_dict_pre_hook register_load_state_dict_post_hook
    """.split()
)


class CompileInLoop(Rule):
    """`torch.compile` is called, or module hooks are registered, in every turn of a loop.

    A hook that is registered again in every training step stays: after n steps each forward pass runs it n times
    (measured: 10 calls in 4 steps), and whatever the hooks hold stays with them.

    `torch.compile` in a loop over configurations compiles each of them, and what is compiled hangs on the code of
    `forward`, with CUDA graph pools under `mode="reduce-overhead"`; `del` does not free it. From the ninth variant of
    the same `forward` on, torch runs it uncompiled (torch 2.13, `torch._dynamo.config.recompile_limit` is 8). Compiling
    the same module again in every step reuses the compiled code, but looks it up again each time.

    It is right to compile or hook once before the loop, to hook each layer in a loop over layers, and to remove the
    handle in the same turn; memlint is silent there. Between configurations, call `torch._dynamo.reset()`.
    """

    code, name, severity = "ML705", "compile-in-loop", Severity.WARNING
    triggers = ("= torch.compile(", ("import torch as ", "compile("), "_hook(")
    bad = """
def train(model, loader, criterion, optimizer, record):
    for inputs, targets in loader:
        model.encoder.register_forward_hook(record)
        optimizer.zero_grad(set_to_none=True)
        criterion(model(inputs), targets).backward()
        optimizer.step()
"""
    good = """
def train(model, loader, criterion, optimizer, record):
    handle = model.encoder.register_forward_hook(record)
    for inputs, targets in loader:
        optimizer.zero_grad(set_to_none=True)
        criterion(model(inputs), targets).backward()
        optimizer.step()
    handle.remove()
"""

    def check(self, flow: Flow) -> Iterator[Draft]:
        resets = any(call.text.endswith(("_dynamo.reset", "compiler.reset")) for call in flow.calls())
        for function in list(flow.functions):
            for call in function.calls.values():
                loops = [loop for loop in call.loops if isinstance(loop.node, (cst.For, cst.While))]
                if not loops:
                    continue
                if call.qualified == "torch.compile" and not resets and not in_tests(flow.path):
                    yield from self.compiled(flow, function, call, loops[-1])
                elif call.text.rsplit(".", 1)[-1] in _HOOKS:
                    yield from self.hooked(flow, function, call, loops[-1])

    def compiled(self, flow: Flow, function: FunctionFlow, call: CallEvent, loop: Loop) -> Iterator[Draft]:
        """`torch.compile` in a loop."""
        if not call.node.args or rare(flow, call.path[call.path.index(loop) + 1 :]) or keeps(function, call, loop):
            return
        if steps_in(function, loop):
            message = (
                f"torch.compile runs in every step of {wording.loop_name(loop)}: compiled code is looked up again each "
                "time, and made again where the function is new. Compile once before the loop."
            )
        elif any(loop in origin.loops for origin in call.args[0].graph) or mentions(call.node, bound_in(loop.node)):
            if is_part(loop, call):
                return
            message = (
                f"torch.compile runs for each turn of {wording.loop_name(loop)}: `del` does not free what is compiled, "
                "and the ninth variant of one forward runs uncompiled. Call torch._dynamo.reset() between the turns."
            )
        else:
            message = (
                f"torch.compile of the same thing runs in every turn of {wording.loop_name(loop)}. Compile once before "
                "the loop."
            )
        yield self.finding(call.node, message, severity=Severity.NOTE)

    def hooked(self, flow: Flow, function: FunctionFlow, call: CallEvent, loop: Loop) -> Iterator[Draft]:
        """A module hook registered in a loop over training steps."""
        func = call.node.func
        if not isinstance(func, cst.Attribute) or not steps_in(function, loop):
            return
        if rare(flow, call.path[call.path.index(loop) + 1 :]):
            return
        if any(loop in origin.loops for origin in call.callee.graph) or mentions(func.value, bound_in(loop.node)):
            return  # a module that is made, or chosen, in this turn
        if removes(loop.node):
            return
        what = wording.short(dotted(func) or func.attr.value)
        message = (
            f"`{what}` runs in every step of {wording.loop_name(loop)} and the hooks stay: after n steps each pass "
            "runs the hook n times. Register it once before the loop, or remove the handle in the same step."
        )
        yield self.finding(call.node, message)


def removes(loop: cst.CSTNode) -> bool:
    """Whether something in the loop calls `remove()`: the handles go in the same turn."""
    return any(name.endswith((".remove", "remove_hooks", "clear_hooks")) for name in called(loop))


def called(node: cst.CSTNode) -> Iterator[str]:
    """The names of all calls in a node."""
    for call in nodes(node):
        if isinstance(call, cst.Call):
            yield dotted(call.func)


def is_part(loop: Loop, call: CallEvent) -> bool:
    """Whether the loop compiles the parts of one model: `for block in model.blocks: block.compile()`."""
    if not isinstance(loop.node, cst.For):
        return True
    target = place(loop.node.target)
    given = call.node.args[0].value
    return bool(target) and place(given) == target


def kept_parts(loop: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """What the loop puts into places other than names: `self.mods[name] = module`, `setattr(self, name, module)`."""
    for assigned in assignments(body_of(loop)):
        if not isinstance(assigned.target, cst.Name):
            yield assigned.value
    for node in nodes(loop):
        if isinstance(node, cst.Call) and dotted(node.func).rsplit(".", 1)[-1] in ("setattr", "append"):
            yield node


def keeps(function: FunctionFlow, call: CallEvent, loop: Loop) -> bool:
    """Whether what is compiled is put into a container or a part of something: each turn compiles another part."""
    for assigned in assignments(body_of(loop.node)):
        if assigned.value is call.node:
            if not isinstance(assigned.target, cst.Name):
                return True
            name = {assigned.target.value}
            if any(mentions(n, name) for n in kept_parts(loop.node)):
                return True
    return any(
        id(arg.value) == id(call.node)
        for other in function.calls.values()
        for arg in other.node.args
        if other is not call
    )
