"""What rules ask about data: is this a loader, who works for it, is this a Dataset, which device is meant."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow.facts import CallEvent, FunctionFlow
from memlint.lint.flow.index import ClassInfo, FunctionInfo
from memlint.lint.flow.values import Instance, Kind, Origin, Source, Value, known_constant
from memlint.lint.imports import dotted
from memlint.rules.training import assignments, body_of, event_of, keyword, starred

LOADER = "torch.utils.data.DataLoader"
#: `_loader`, `train_dataloader`, `dl`: one loader, not a list of them, and not the code that loads a module
_NAMED = re.compile(
    r"(?:^|_)(?:data_?loader|dl)$|(?:^|_)(?:train|val|valid|test|data|batch|source|target|real)_loader$|^loader$", re.I
)
#: methods that hand a loader on: accelerate's `prepare` and `prepare_data_loader`, Fabric's `setup_dataloaders`
_PREPARES = frozenset("prepare prepare_data_loader setup_dataloaders".split())
_TORCH_BASES = frozenset(("torch.utils.data.Dataset", "torch.utils.data.IterableDataset", "Dataset", "IterableDataset"))
_TORCH_DATA = ("torch.utils.data.", "torchvision.datasets.")


def made_by(flow: Flow, origin: Origin, depth: int = 0) -> CallEvent | None:
    """The `DataLoader(...)` call that a loader comes from, through `prepare` and attributes of self."""
    if depth > 4:
        return None
    site = origin.site
    if site.label == LOADER and isinstance(site.node, cst.Call):
        owner = flow.owner.get(site)
        return owner.calls.get(id(site.node)) if owner is not None else None
    if len(site.returned) == 1:  # a function of this file returns it
        return made_by(flow, next(iter(site.returned)), depth + 1)
    base, key = (site, "") if site.base is None else (site.base.site, site.key)
    if isinstance(base.node, cst.Call) and base.source is Source.CALL:
        owner = flow.owner.get(base)
        event = owner.calls.get(id(base.node)) if owner is not None else None
        if event is not None and event.text.rsplit(".", 1)[-1] in _PREPARES:
            chosen = event.args
            if key.startswith("[") and key[1:-1].isdigit() and int(key[1:-1]) < len(chosen):
                chosen = (chosen[int(key[1:-1])],)
            elif len(chosen) != 1:
                return None
            return loader_of(flow, chosen[0], depth + 1)
    if isinstance(base.node, cst.ClassDef) and key.startswith("."):
        for function in flow.functions:
            cls = function.cls
            if cls is not None and cls.node is base.node:
                for value in (node for each in cls.ancestry() for node in each.assigned.get(key[1:], [])):
                    made = event_of(flow, value, function)
                    if made is not None and (found := loader_of(flow, made.result, depth + 1)) is not None:
                        return found
                return None
    return None


def loader_of(flow: Flow, value: Value, depth: int = 0) -> CallEvent | None:
    """The `DataLoader(...)` call that a value comes from, where that is known of all it may be."""
    found: CallEvent | None = None
    for origin in value.objects:
        found = made_by(flow, origin, depth)
        if found is None:
            return None
    return found


def named_loader(flow: Flow, node: cst.BaseExpression, value: Value) -> bool:
    """Whether something that the file does not bind is called a loader, in a file that uses torch."""
    tail = dotted(node).rsplit(".", 1)[-1]
    if not tail or not _NAMED.search(tail) or value.kind is not Kind.UNKNOWN or not value.objects:
        return False
    if not all(unbound(flow, origin) for origin in value.objects):
        return False
    return "torch" in flow.code


def unbound(flow: Flow, origin: Origin) -> bool:
    """Whether the file does not say what a thing is: a parameter, a free name, an element, an outside attribute."""
    site = origin.site
    if site.source in (Source.PARAM, Source.NAME, Source.ITER):
        return True
    if site.source is not Source.ITEM or site.base is None or not site.key.startswith("."):
        return False
    base = site.base.site
    if isinstance(base.node, cst.ClassDef):
        for function in flow.functions:
            if function.cls is not None and function.cls.node is base.node:
                values = [v for each in function.cls.ancestry() for v in each.assigned.get(site.key[1:], [])]
                return all(isinstance(v, cst.Name) for v in values)  # `self.loader = loader`
        return True
    return unbound(flow, base)


def loaders(flow: Flow) -> Iterator[CallEvent]:
    """All `DataLoader(...)` calls of the file."""
    for call in flow.calls():
        if call.qualified == LOADER or (call.target is None and call.text.rsplit(".", 1)[-1] == "DataLoader"):
            yield call  # projects import it in ways of their own


def argument(call: CallEvent, name: str, position: int | None = None) -> tuple[cst.Arg, Value] | None:
    """An argument of a call, with what it holds."""
    arg = keyword(call.node, name, position)
    if arg is None:
        return None
    where = next(i for i, other in enumerate(call.node.args) if other is arg)
    return arg, call.args[where]


def workers(call: CallEvent) -> int | None:
    """The number of worker processes of a `DataLoader(...)` call: 0 where it is not given, None where not known."""
    given = argument(call, "num_workers", 5)
    if given is None:
        return None if starred(call.node) else 0
    number = known_constant(given[1])
    if isinstance(number, int):
        return number
    return 0 if option_default(call.function, given[0].value) == "0" else None


def option_default(function: FunctionFlow, node: cst.BaseExpression) -> str:
    """What `args.num_workers` is by default, where the module declares the option `--num-workers`; else empty."""
    if not isinstance(node, cst.Attribute) or function.index is None:
        return ""
    declared = re.search(
        rf"""add_argument\([^)]*?["']--?{node.attr.value.replace("_", "[_-]")}["'][^)]*?\bdefault=(\w+)""",
        function.index.code,
    )
    return declared[1] if declared is not None else ""


def data_of(call: CallEvent) -> Value | None:
    """The data set that a `DataLoader(...)` call is given."""
    given = argument(call, "dataset", 0)
    return given[1] if given is not None else None


def is_torch_dataset(cls: ClassInfo) -> bool:
    """Whether a class is a map- or iterable-style Dataset of torch, or of torchvision."""
    return any(name in _TORCH_BASES or name.startswith(_TORCH_DATA) for name in cls.base_names())


def loaded_by(flow: Flow, cls: ClassInfo) -> list[CallEvent]:
    """The `DataLoader(...)` calls of the file that may be given an instance of `cls`."""
    found = []
    for call in loaders(flow):
        data = data_of(call)
        other = data.info.cls if data is not None and isinstance(data.info, Instance) else None
        if other is None or cls in other.ancestry() or other in cls.ancestry():
            found.append(call)
    return found


def surely_loaded_by(flow: Flow, cls: ClassInfo) -> list[CallEvent]:
    """The `DataLoader(...)` calls of the file that are given an instance of `cls`."""
    found = []
    for call in loaders(flow):
        data = data_of(call)
        if data is not None and isinstance(data.info, Instance) and cls in data.info.cls.ancestry():
            found.append(call)
    return found


def device_word(text: str) -> bool:
    """Whether a name speaks of a device."""
    tail = text.rsplit(".", 1)[-1].lower()
    return "device" in tail or tail in ("cuda", "gpu", "gpu_id", "dev")


def accelerator_device(
    flow: Flow, function: FunctionFlow, node: cst.BaseExpression, value: Value, depth: int = 0
) -> bool:
    """Whether an expression means a device that may be an accelerator: "cuda", a variable called device.

    False for the CPU, for the device of another tensor, and for whatever is not known.
    """
    constant = known_constant(value)
    if isinstance(constant, str):
        return constant.split(":")[0] in ("cuda", "xpu", "mps", "hpu", "npu")
    if isinstance(node, cst.FormattedString):
        first = node.parts[0] if node.parts else None
        return isinstance(first, cst.FormattedStringText) and first.value.startswith("cuda")
    if isinstance(node, cst.IfExp):
        return any(accelerator_device(flow, function, n, Value(), depth) for n in (node.body, node.orelse))
    if isinstance(node, cst.SimpleString):
        text = node.evaluated_value
        return isinstance(text, str) and text.split(":")[0] in ("cuda", "xpu", "mps", "hpu", "npu")
    if isinstance(node, cst.Call):
        if flow.qualify(dotted(node.func)) == "torch.device" and node.args:
            return accelerator_device(flow, function, node.args[0].value, Value(), depth)
        return False
    text = dotted(node)
    if not text or depth > 3 or not device_word(text):
        return False
    if "." not in text:
        if value.objects and all(origin.site.source is Source.PARAM for origin in value.objects):
            given = handed_in(flow, function, text)
            if given and depth < 3:
                return any(
                    accelerator_device(flow, scope, each, parameter(scope, each), depth + 1) for scope, each in given
                )
            return not defaults_to_cpu(function.info, text)
        return any_assigned(flow, function, text, depth)
    head, _, rest = text.partition(".")
    if head == "self" and "." not in rest and function.cls is not None:
        assigned = [node for each in function.cls.ancestry() for node in each.assigned.get(rest, [])]
        init = function.cls.method("__init__")
        maker = init.flow if init is not None and init.flow is not None else function
        if not assigned:
            return False
        return any(accelerator_device(flow, maker, each, parameter(maker, each), depth + 1) for each in assigned)
    # the device of another tensor says nothing; that of the options may be anything
    return head in ("args", "cfg", "config", "opt", "opts", "hparams", "params", "options", "settings")


def handed_in(flow: Flow, function: FunctionFlow, name: str) -> list[tuple[FunctionFlow, cst.BaseExpression]]:
    """What the callers of a function give for a parameter, where each of them is in sight and gives something."""
    info = function.info
    names = [param.name.value for param in info.parameters] if info is not None else []
    if info is None or name not in names or info.bound:
        return []
    found = []
    for call in flow.callers.get(id(function.node), {}).values():
        arg = keyword(call.node, name, names.index(name))
        if arg is None:
            return []
        found.append((call.function, arg.value))
    return found


def parameter(function: FunctionFlow, node: cst.BaseExpression) -> Value:
    """The value of a parameter of a function, where the expression is one."""
    if function.info is not None and isinstance(node, cst.Name) and node.value in function.info.params:
        origin = function.info.params[node.value]
        return Value(graph=frozenset((origin,)), direct=True)
    return Value()


def defaults_to_cpu(info: FunctionInfo | None, name: str) -> bool:
    """Whether a parameter is the CPU unless the caller says otherwise."""
    for param in info.parameters if info is not None else ():
        if param.name.value == name and param.default is not None:
            default = param.default
            if isinstance(default, cst.Call) and default.args:
                default = default.args[0].value
            if isinstance(default, cst.Name) and default.value == "None":
                return True
            return isinstance(default, cst.SimpleString) and default.evaluated_value == "cpu"
    return False


def any_assigned(flow: Flow, function: FunctionFlow, name: str, depth: int) -> bool:
    """Whether a local or global name is given an accelerator somewhere; True where the file does not bind it."""
    for scope in (function, flow.top):
        values = [a.value for a in assignments(body_of(scope.node)) if dotted(a.target) == name]
        if values:
            return any(accelerator_device(flow, scope, each, parameter(scope, each), depth + 1) for each in values)
    return name not in flow.index.imports
