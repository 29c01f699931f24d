"""ML109: functools caches that keep modules and tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow import knowledge as know
from memlint.lint.flow.index import ClassInfo, FunctionInfo
from memlint.lint.flow.syntax import walk
from memlint.lint.flow.values import Instance, Kind
from memlint.lint.imports import dotted
from memlint.lint.model import Severity
from memlint.rules.base import Draft, Rule

_CACHES = ("functools.lru_cache", "functools.cache")
_HELD = re.compile(r"(?:^|_)(?:agent|trainer|learner|optimizer)$")
_TENSORS = frozenset(
    "Tensor FloatTensor LongTensor BoolTensor IntTensor HalfTensor DoubleTensor BFloat16Tensor".split()
)
_MODULES = frozenset("Module PreTrainedModel LightningModule ModuleList Sequential".split())
#: classes of which there is one instance for good
_PERMANENT = re.compile(r"Enum$|Flag$|Singleton")


class CachedTensor(Rule):
    """`functools.lru_cache` or `cache` holds a module or tensor for the rest of the program.

    The cache hangs on the function, so it lives as long as the program. On a method, `self` is part of the key: the
    instance, and every model, tensor and optimizer that it holds, stays alive after the last user let go, even with
    `maxsize=1` and however small the cached value is (measured: alive after `del` and `gc.collect()`). A tensor
    argument is a key by identity: the cache never hits for an equal one and keeps each that it was given, with its
    graph.

    It is right on static methods and module functions of plain arguments, also where they return a small tensor for
    a few keys (a mask a device), where the file calls `cache_clear()`, and for `functools.cached_property`, which
    keeps its value on the instance. Where nothing says that the class holds memory or comes and goes, memlint only
    notes it.

    Cache on the instance (`functools.cached_property`, a dict made in `__init__`), or move the method's work to a
    module function of plain arguments.
    """

    code, name, severity = "ML109", "cached-tensor", Severity.WARNING
    triggers = (
        "  @lru_cache",
        "  @functools.lru_cache",
        "  @functools.cache",
        "  @cache",
        "\t@lru_cache",
        "\t@functools.",
        "\t@cache",
        ("\n@lru_cache", "torch."),
        ("\n@functools.lru_cache", "torch."),
        ("\n@functools.cache", "torch."),
        ("\n@cache", "torch."),
        ("lru_cache", "= torch."),
    )
    bad = """
import functools
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4096, 4096)

    @functools.lru_cache(maxsize=1)
    def size(self):
        return sum(p.numel() for p in self.parameters())
"""
    good = bad.replace("lru_cache(maxsize=1)", "cached_property")

    def check(self, flow: Flow) -> Iterator[Draft]:
        for info in flow.index.all_functions:
            for decorator in info.decorators:
                called = decorator.func if isinstance(decorator, cst.Call) else decorator
                if flow.qualify(dotted(called)) not in _CACHES or f"{info.name}.cache_clear" in flow.code:
                    continue
                first = info.parameters[0].name.value if info.parameters else ""
                if info.bound and info.cls is not None and (info.of_class or first.strip("_") in ("self", "this")):
                    yield from self.method(flow, info, info.cls, decorator)
                else:
                    yield from self.function(flow, info, decorator)

    def method(self, flow: Flow, info: FunctionInfo, cls: ClassInfo, decorator: cst.BaseExpression) -> Iterator[Draft]:
        """A cache on a method: the instance is kept."""
        if any(dotted(other).endswith("classmethod") for other in info.decorators):
            return  # the class stays anyway
        metaclasses = [dotted(arg.value) for each in cls.ancestry() for arg in each.node.keywords]
        if any(_PERMANENT.search(name) for name in (*cls.base_names(), *metaclasses)):
            return
        why = holds(flow, info, cls)
        kept = (
            f"the cache of `{info.name}` has `self` in its keys, so an instance of `{cls.name}` that calls it stays "
            f"alive until {limit(flow, decorator)}"
        )
        if why:
            yield self.finding(
                decorator, f"{kept}: {why}. Cache on the instance (functools.cached_property, or a dict of its own)."
            )
        else:
            yield self.finding(
                decorator,
                f"{kept}. Cache on the instance where instances come and go, or hold much.",
                severity=Severity.NOTE,
            )

    def function(self, flow: Flow, info: FunctionInfo, decorator: cst.BaseExpression) -> Iterator[Draft]:
        """A cache on a function: arguments and results are kept."""
        for param in info.parameters:
            what = taken(flow, info, param)
            if what:
                yield self.finding(
                    decorator,
                    f"the cache of `{info.name}` keeps `{param.name.value}`, {what}, until {limit(flow, decorator)}"
                    f"{', and never hits for another tensor of the same values' if 'tensor' in what else ''}. "
                    f"Cache by plain data.",
                )
                return
        if unbounded(flow, decorator) and info.parameters and gives_tensor(flow, info):
            yield self.finding(
                decorator,
                f"the cache of `{info.name}` has no bound and keeps a tensor for every set of arguments: fine for a "
                f"few, else give it a maxsize.",
                severity=Severity.NOTE,
            )


def holds(flow: Flow, info: FunctionInfo, cls: ClassInfo) -> str:
    """Why an instance of a class is much to keep; empty where nothing tells."""
    if cls.is_module:
        return "it is a module, with all that it holds"
    for param in info.parameters[1:]:
        if what := annotated(param.annotation):
            return f"so does `{param.name.value}`, {what}"
    for each in cls.ancestry():
        for name, values in each.assigned.items():
            known = flow.class_attribute(cls, name)
            if known is not None and known.kind in (Kind.MODULE, Kind.OPTIMIZER, Kind.TENSOR):
                return f"it holds `self.{name}`"
            named = _HELD.search(name) or know.MODEL_NAME.match(name)
            if named and "_for_" not in name and all(isinstance(value, cst.Name) for value in values):
                return f"it holds `self.{name}`"
    if gives_tensor(flow, info):
        return "so do the tensors that it returned"
    for call in flow.calls():
        if call.loops and call.callee.kind is Kind.CLASS and isinstance(call.result.info, Instance):
            if call.result.info.cls is cls:
                return "they are made in a loop"
    return ""


def annotated(node: cst.Annotation | None) -> str:
    """What an annotation says: `a tensor`, `a module`, or nothing."""
    if node is None:
        return ""
    for item in walk(node.annotation):
        tail = dotted(item).rsplit(".", 1)[-1]
        if isinstance(item, cst.Subscript) and dotted(item.value).rsplit(".", 1)[-1] in ("Callable", "type", "Type"):
            return ""
        if tail in _TENSORS:
            return "a tensor"
        if tail in _MODULES:
            return "a module"
    return ""


def taken(flow: Flow, info: FunctionInfo, param: cst.Param) -> str:
    """`a tensor` or `a module` where a parameter is one: it says so, or all callers of the file give one."""
    said = annotated(param.annotation)
    if said or param.annotation is not None:
        return said
    place = next(i for i, other in enumerate(info.parameters) if other is param)
    kinds = set()
    for event in flow.callers.get(id(info.node), {}).values():
        for number, (arg, value) in enumerate(zip(event.node.args, event.args, strict=False)):
            named = arg.keyword.value if arg.keyword is not None else ""
            if named == param.name.value or (not named and not arg.star and number == place):
                kinds.add(value.kind)
    return {Kind.TENSOR: "a tensor", Kind.MODULE: "a module"}.get(kinds.pop(), "") if len(kinds) == 1 else ""


def gives_tensor(flow: Flow, info: FunctionInfo) -> bool:
    """Whether a function returns a tensor."""
    if isinstance(info.node, cst.FunctionDef) and info.node.returns is not None:
        return annotated(info.node.returns) == "a tensor"
    if info.summary is None or info.summary.returns.kind is not Kind.TENSOR or info.flow is None:
        return False
    # strings and arrays have methods of the same names as tensors
    return any(call.qualified.startswith("torch.") for call in info.flow.calls.values())


def unbounded(flow: Flow, decorator: cst.BaseExpression) -> bool:
    """Whether a cache keeps everything: `cache`, `lru_cache(None)`."""
    if not isinstance(decorator, cst.Call):
        return flow.qualify(dotted(decorator)) == "functools.cache"
    if flow.qualify(dotted(decorator.func)) == "functools.cache":
        return True
    return any(
        dotted(arg.value) == "None" for arg in decorator.args if arg.keyword is None or arg.keyword.value == "maxsize"
    )


def limit(flow: Flow, decorator: cst.BaseExpression) -> str:
    """How long an entry stays."""
    if unbounded(flow, decorator):
        return "the program ends"
    given = None
    if isinstance(decorator, cst.Call):
        given = next((a.value for a in decorator.args if a.keyword is None or a.keyword.value == "maxsize"), None)
    size = flow.text(given) if given is not None else "128"
    return "another call pushes it out" if size == "1" else f"{size} other calls push it out"
