"""The flow model of a file: what its expressions hold, what outlives what, which graph a backward frees.

`Flow(module)` runs every function of the file abstractly, once; rules ask it questions. The parts:

values       what an expression can hold: values and the origins of autograd graphs
state        what holds at one point: names, fields, freed graphs, grad mode
index        functions, classes, imports: a look over the statements
expressions, calls, interp
             the abstract interpreter, in this order: expressions, calls, statements
summary      what a function does, as its callers see it
facts        what the rules get: stores, backwards, optimizer calls, loops
knowledge    facts about torch and its neighbours, in tables
frameworks   who calls a method, with what, and what becomes of its result
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import libcst as cst

from memlint.lint.flow import frameworks
from memlint.lint.flow import knowledge as know
from memlint.lint.flow.calls import reach
from memlint.lint.flow.facts import (
    Backward,
    BackwardKind,
    CallEvent,
    FunctionFlow,
    Leaf,
    Loop,
    Store,
    StoreKind,
)
from memlint.lint.flow.index import ClassInfo, FunctionInfo, ModuleIndex
from memlint.lint.flow.interp import Interpreter
from memlint.lint.flow.state import State
from memlint.lint.flow.summary import Summary
from memlint.lint.flow.values import (
    CALLS,
    NONE,
    NUMBER,
    UNKNOWN,
    Grad,
    Grade,
    Instance,
    Kind,
    Origin,
    Source,
    Value,
    known_constant,
    of,
)
from memlint.lint.imports import CONVENTIONS, canonical, dotted

if TYPE_CHECKING:
    from memlint.lint.analysis import AnalysisSettings
    from memlint.lint.project import Project


#: calls of functions of the file are followed this far down at once; what lies deeper is unknown to its callers
DEEPEST = 20
#: without one of these (or what `HELPED_TRAINING` asks for), what other files do cannot matter
_TRAINS = ((".backward(",), ("training_step",), ("def compute_loss",))
#: imports from file to file that are followed
MOST_HOPS = 3


class Flow:
    """The flow model of one file."""

    def __init__(
        self, module: cst.Module, path: str = "", settings: AnalysisSettings | None = None, code: str | None = None
    ) -> None:
        self.module = module
        self.path = path
        self.code = module.code if code is None else code
        self.settings = settings
        self.project = settings.project if settings is not None else None
        links = self.project is not None and _trains(self.code)
        self.index = ModuleIndex(module, path, 0, self._link if links else None)
        #: the parts of other files that this one uses, by file and the name that was asked for
        self.linked: dict[tuple[str, str], ModuleIndex] = {}
        self._links: dict[tuple[str, str], FunctionInfo | ClassInfo | None] = {}
        self.owner: dict[Origin, FunctionFlow] = {}
        self.callers: dict[int, dict[int, CallEvent]] = {}
        self._origins: dict[tuple[int, str], Origin] = {}
        self._free: dict[tuple[int, str], Origin] = {}
        self._loops: dict[int, Loop] = {}
        self._stores: dict[tuple[int, int, StoreKind], Store] = {}
        self._backwards: dict[tuple[int, str], Backward] = {}
        self._selves: dict[int, Origin] = {}
        self._attributes: dict[tuple[int, str], Value | None] = {}
        #: callees (as written) and parts of their results that backward is called on somewhere
        self._backwarded: set[tuple[str, str]] = set()
        #: grad modes by function, found once; None while one is being found
        self._modes: dict[int, Grad | None] = {}
        #: what engines of Ignite run, by where they are built, and by the handlers that are added to them
        self.processes: dict[Origin, frameworks.Process] = {}
        self.handlers: dict[int, frameworks.Process] = {}
        self._ticks = 0
        self._depth = 0
        self.functions: list[FunctionFlow] = []
        #: functions of other files that were looked into
        self.foreign: list[FunctionFlow] = []
        self.module_grad = Grad.ON
        #: some function of the file switches autograd off for the whole process
        self.switches_grad = False
        self._run()

    # -- building --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self.top = FunctionFlow(None, self.module, "<module>", None, Grad.ON, self.index)
        self.functions.append(self.top)
        self.module_grad = self._run_top(self.top).grad
        for info in frameworks.registrars(self):
            self.summary(info)
        # nested functions are found while their outer ones run
        done = 0
        while done < len(self.index.all_functions):
            self.summary(self.index.all_functions[done])
            done += 1
        self._spread_evidence()
        self._spread_needs()
        # what another file calls the same need not be the same
        own = [
            origin
            for origin in self._origins.values()
            if "." in origin.label and (origin not in self.owner or not self.owner[origin].foreign)
        ]
        self._backwarded = {
            (origin.label, child.key) for origin in own for child in origin.children.values() if child.root
        } | {(origin.label, "") for origin in own if origin.root and origin.source is not Source.ALLOC}

    def _run_top(self, top: FunctionFlow) -> State:
        """Run the statements at the top of a module."""
        interpreter = Interpreter(self, top)
        # functions called at the top level see the names bound so far: the dict is shared, not copied
        top.index.names = interpreter.state.names
        interpreter.block(top.index.module.body)
        top.index.names = dict(interpreter.state.names)
        return interpreter.state

    def _link(self, index: ModuleIndex, name: str) -> FunctionInfo | ClassInfo | None:
        """The function or class of another file of the project that `name` stands for in the module of `index`."""
        if self.project is None or index.hops >= MOST_HOPS:
            return None
        key = (index.path, name)
        if key not in self._links:
            self._links[key] = None  # while it is found out: an import cycle ends here
            self._links[key] = self._linked(self.project, index, name)
        return self._links[key]

    def _linked(self, project: Project, index: ModuleIndex, name: str) -> FunctionInfo | ClassInfo | None:
        found = project.definition(index.path, name)
        if found is None:
            return None
        part, names = found
        if part.path == os.path.abspath(self.path):
            return self.index.definition(names)
        where = (part.path, names[0])
        other = next((each for (path, _), each in self.linked.items() if path == part.path and names[0] in each), None)
        if other is None:
            other = self.linked[where] = ModuleIndex(part.module, part.path, index.hops + 1, self._link)
            self._run_top(FunctionFlow(None, part.module, "<module>", None, Grad.ON, other))
        return other.definition(names)

    def summary(self, info: FunctionInfo) -> Summary | None:
        """What `info` does; None while it is being found out (recursion), or far down a chain of calls."""
        if info.summary is None and not info.running and self._depth < DEEPEST:
            info.running = True
            self._depth += 1
            try:
                info.summary = self._summarise(info)
            finally:
                info.running = False
                self._depth -= 1
        return info.summary

    def _summarise(self, info: FunctionInfo) -> Summary:
        function = FunctionFlow(info, info.node, info.name, info.cls, Grad.ON, info.index)
        info.flow = function
        (self.foreign if function.foreign else self.functions).append(function)
        interpreter = Interpreter(self, function)
        state = interpreter.state
        for place, param in enumerate(info.parameters):
            name = param.name.value
            if info.bound and place == 0 and info.cls is not None:
                if info.of_class:
                    state.names[name] = Value(Kind.CLASS, info=info.cls)
                    continue
                kind = Kind.MODULE if info.cls.is_module else Kind.INSTANCE
                state.names[name] = of(self.self_origin(info.cls), kind, Instance(info.cls))
                continue
            origin = self.origin_at(param, Source.PARAM, name, "", (), Grad.ON)
            self.owner[origin] = function
            info.params[name] = origin
            state.names[name] = self._annotated(origin, param, info.index)
            state.bound[name] = frozenset(((),))
        for star in (info.node.params.star_arg, info.node.params.star_kwarg):
            if isinstance(star, cst.Param):
                state.names[star.name.value] = of(self.origin_at(star, Source.PARAM, star.name.value, "", (), Grad.ON))
        function.grad = state.grad = self._entry_grad(info, interpreter)
        frameworks.hand_over(self, info, interpreter)
        if isinstance(info.node, cst.Lambda):
            interpreter.returned = interpreter.ev(info.node.body)
            interpreter.return_state = interpreter.state
            returns = interpreter.returned
        else:
            interpreter.resume(interpreter.suite(info.node.body, state))
            interpreter.returned = interpreter.returned or interpreter.given_up
            returns = interpreter.returned if interpreter.returned is not None else NONE
        end = interpreter.return_state or interpreter.state
        summary = Summary(returns, end.fields, end.consumed)
        summary.returns_nothing = interpreter.returned is None
        for event in function.backwards:
            summary.runs_backward = True
            if event.kind is not BackwardKind.GRAD:
                given = (self._given(origin, info) for origin in event.value.graph)
                summary.backwards |= {name for name in given if name is not None and not know.scales(name)}
        for store in function.stores:
            if store.kind is StoreKind.ASSIGN or store.helper:
                continue
            for leaf in store.leaves:
                for name, origin in info.params.items():
                    if leaf.origin.site is origin and self.outlives_call(store):
                        summary.keeps[name] = store
        for event_ in function.optimizer:
            if event_.what.value == "step":
                summary.steps = True
            else:
                summary.zeroes = True
        return summary

    def _annotated(self, origin: Origin, param: cst.Param, index: ModuleIndex) -> Value:
        """What a parameter is, by its annotation: an optimizer, a scaler, an Accelerator, or something not known."""
        text = dotted(param.annotation.annotation) if param.annotation is not None else ""
        qualified = self.qualify(text, index) if text else ""
        if qualified.endswith((".Accelerator", ".Fabric")):
            name, divides = know.accelerator(qualified, ())
            return of(origin, Kind.ACCELERATOR, (name, divides))
        if know.OPTIMIZER_CLASS.match(qualified):
            return of(origin, Kind.OPTIMIZER, qualified)
        return of(origin, Kind.SCALER, qualified) if qualified == "torch.amp.GradScaler" else of(origin)

    def _entry_grad(self, info: FunctionInfo, interpreter: Interpreter) -> Grad:
        grad = Grad.ON if info.index.hops else self.module_grad
        grad = frameworks.entry_grad(info, grad)
        if grad is Grad.OFF:
            return grad
        if info.cls is not None and info.name in ("forward", "backward") and info.cls.is_autograd_function:
            return Grad.OFF  # torch/autograd/function.py: "autograd is disabled" in both unless create_graph is given
        for decorator in info.decorators:
            value = interpreter.ev(decorator)
            maker = interpreter.ev(decorator.func) if isinstance(decorator, cst.Call) else value
            if value.kind is Kind.GRAD_MODE and isinstance(value.info, Grad):
                grad = value.info
            elif value.kind is Kind.REFERENCE and value.info in know.GRAD_OFF:
                grad = Grad.OFF
            elif know.MAYBE_OFF.search(dotted(decorator.func if isinstance(decorator, cst.Call) else decorator)):
                grad = Grad.MAYBE
            elif isinstance(maker.info, FunctionInfo) and maker.info.speaks_of_modes:
                grad = Grad.MAYBE  # a decorator of the project's own
        return grad

    @staticmethod
    def outlives_call(store: Store) -> bool:
        """Whether a store puts its value where it outlives the call of the function it is in."""
        return store.life.name in ("SELF", "OUTER", "PARAM")

    def tick(self) -> int:
        """A number that grows along the order of evaluation."""
        self._ticks += 1
        return self._ticks

    # -- things made once a place ----------------------------------------------------------------------------------

    def origin_at(
        self, node: cst.CSTNode, source: Source, label: str, key: str, loops: tuple[Loop, ...], grad: Grad
    ) -> Origin:
        """The origin at `node`; one a place and key."""
        where = (id(node), f"{source.name}{key}")
        origin = self._origins.get(where)
        if origin is None:
            origin = Origin(node, source, label, loops, grad)
            self._origins[where] = origin
        elif grad is not origin.grad:
            origin.grad = grad
        return origin

    def free(self, index: ModuleIndex, name: str, node: cst.CSTNode) -> Origin:
        """The origin of a name that the module never binds."""
        where = (id(index), name)
        origin = self._free.get(where)
        if origin is None:
            origin = self._free[where] = Origin(node, Source.NAME, name)
        return origin

    def self_origin(self, cls: ClassInfo) -> Origin:
        """The origin that stands for `self` in all methods of a class."""
        origin = self._selves.get(id(cls))
        if origin is None:
            origin = Origin(cls.node, Source.PARAM, "self")
            self._selves[id(cls)] = origin
        return origin

    def loop_at(self, node: cst.CSTNode) -> Loop:
        """The loop at `node`."""
        loop = self._loops.get(id(node))
        if loop is None:
            loop = self._loops[id(node)] = Loop(node, self.module)
        return loop

    def enter_loop(self, function: FunctionFlow, loop: Loop, around: tuple[Loop, ...]) -> None:
        """Remember a loop and what it is nested in."""
        if loop not in function.parents:
            function.loops.append(loop)
            function.parents[loop] = around[-1] if around else None

    @staticmethod
    def function_at(node: cst.FunctionDef | cst.Lambda, name: str, index: ModuleIndex) -> FunctionInfo:
        """The function defined at `node` of the module of `index`."""
        info = index.by_node.get(id(node))
        if info is None:
            info = FunctionInfo(node, name, None, index)
            index.by_node[id(node)] = info
            index.all_functions.append(info)
        return info

    def store_at(
        self,
        function: FunctionFlow,
        kind: StoreKind,
        node: cst.CSTNode,
        expression: cst.BaseExpression,
        holder: str,
    ) -> Store:
        """The store at `node`; one a place and kept expression."""
        where = (id(node), id(expression), kind)
        store = self._stores.get(where)
        if store is None:
            store = Store(kind, node, expression, holder, function)
            self._stores[where] = store
            function.stores.append(store)
        return store

    def is_engine_backward(self, node: cst.Call) -> bool:
        """Whether the backward at `node` is that of an engine."""
        event = self._backwards.get((id(node), ""))
        return event is not None and event.kind is BackwardKind.ENGINE

    def backward_at(
        self, function: FunctionFlow, kind: BackwardKind, node: cst.CSTNode, root: cst.BaseExpression | None
    ) -> Backward:
        """The backward at `node`; one a place."""
        where = (id(node), f"{id(root)}" if kind is BackwardKind.HELPER else "")
        event = self._backwards.get(where)
        if event is None:
            event = Backward(kind, node, root, function)  # type: ignore[arg-type]
            self._backwards[where] = event
            function.backwards.append(event)
        return event

    # -- classes ---------------------------------------------------------------------------------------------------

    def class_attribute(self, cls: ClassInfo, name: str) -> Value | None:
        """What attribute `name` of instances of `cls` is, from all assignments in its methods; None if not known."""
        where = (id(cls), name)
        if where not in self._attributes:
            self._attributes[where] = None  # while it is found out
            self._attributes[where] = self._class_attribute(cls, name)
        return self._attributes[where]

    def _class_attribute(self, cls: ClassInfo, name: str) -> Value | None:
        expressions: list[tuple[cst.BaseExpression, ModuleIndex]] = []
        for each in cls.ancestry():
            if name in each.buffers:
                return of(self.origin_at(each.node, Source.BUFFER, f"self.{name}", name, (), Grad.ON), Kind.TENSOR)
            expressions += [(node, each.index) for node in each.assigned.get(name, [])]
        values = [value for node, index in expressions if (value := self._static(node, index, cls, name)) is not None]
        solid = [value for value in values if value.kind is not Kind.NONE]
        if not solid or len(values) != len(expressions):
            return None
        first = solid[0]
        if all(value.kind is first.kind for value in solid):
            return first
        return None

    def _static(self, node: cst.BaseExpression, index: ModuleIndex, cls: ClassInfo, name: str) -> Value | None:
        """What an expression assigned to an attribute is, without a state."""
        if isinstance(node, (cst.List, cst.Dict, cst.Set, cst.ListComp, cst.DictComp)):
            origin = self.origin_at(cls.node, Source.ALLOC, "self", name, (), Grad.ON)
            return of(origin, Kind.CONTAINER)
        if isinstance(node, (cst.Integer, cst.Float, cst.SimpleString, cst.FormattedString, cst.Comparison)):
            return NUMBER
        if isinstance(node, cst.Name) and node.value in ("None", "True", "False"):
            return NONE if node.value == "None" else NUMBER
        if not isinstance(node, cst.Call):
            return None
        if isinstance(node.func, cst.Attribute) and node.func.attr.value in ("to", "cuda", "eval", "train", "half"):
            return self._static(node.func.value, index, cls, name)
        text = dotted(node.func)
        if not text:
            return None
        qualified = self.qualify(text, index)
        found = index.classes.get(text)
        if found is None and not qualified.startswith("torch."):
            found = index.linked_class(qualified)
        if found is not None:
            kind = Kind.MODULE if found.is_module else Kind.INSTANCE
            return of(self.origin_at(node, Source.CALL, text, "static", (), Grad.ON), kind, Instance(found))
        if text in ("list", "dict", "set") or qualified in know.CONTAINER_TYPES:
            origin = self.origin_at(cls.node, Source.ALLOC, "self", name, (), Grad.ON)
            bounded = qualified.endswith("deque") and len(node.args) > 0
            return of(origin, Kind.CONTAINER, "bounded" if bounded else None)
        if qualified.endswith((".Accelerator", ".Fabric")):
            given = tuple((arg.keyword.value if arg.keyword else "", arg.value) for arg in node.args)
            origin = self.origin_at(node, Source.CALL, text, "static", (), Grad.ON)
            return of(origin, Kind.ACCELERATOR, know.accelerator(qualified, given))
        kind_ = None
        if know.LOSS_CLASS.match(qualified):
            kind_ = Kind.CRITERION
        elif know.OPTIMIZER_CLASS.match(qualified):
            kind_ = Kind.OPTIMIZER
        elif qualified == "torch.amp.GradScaler":
            kind_ = Kind.SCALER
        elif qualified == "torch.nn.Parameter":
            return of(self.origin_at(node, Source.LEAF, f"self.{name}", "static", (), Grad.ON), Kind.TENSOR)
        elif qualified.startswith("torch.nn.") and qualified.rsplit(".", 1)[-1][0].isupper():
            kind_ = Kind.MODULE
        elif qualified in know.DETACHING_FUNCTIONS:
            return Value(Kind.TENSOR)
        if kind_ is None:
            return None
        summed = kind_ is Kind.CRITERION and any(
            arg.keyword is not None and arg.keyword.value == "reduction" and known_sum(arg.value) for arg in node.args
        )
        label = qualified + ("(sum)" if summed else "")
        return of(self.origin_at(node, Source.CALL, text, "static", (), Grad.ON), kind_, label)

    def property_value(self, method: FunctionInfo, base: Value) -> Value:
        """What reading a property gives."""
        summary = self.summary(method)
        if summary is None or summary.returns.graph:
            return UNKNOWN
        return summary.returns._replace(via=frozenset())

    def qualify(self, text: str, index: ModuleIndex | None = None) -> str:
        """The qualified name of a dotted text at the top of a module (that of the file), or the text itself."""
        index = index or self.index
        head, _, rest = text.partition(".")
        found = index.imports.get(head)
        if found is None and head not in index.globals and head not in index.functions:
            found = CONVENTIONS.get(head)
        if found is None:
            return text
        return canonical(f"{found}.{rest}" if rest else found)

    def parameter_of(self, origin: Origin, info: FunctionInfo) -> str | None:
        """The parameter of `info` that an origin is, or is part of."""
        base: Origin | None = origin.site
        while base is not None:
            for name, param in info.params.items():
                if param is base:
                    return name
            base = base.base
        return None

    def parameters_behind(self, own: frozenset[Origin], info: FunctionInfo) -> frozenset[str]:
        """The parameters of `info` whose graphs run into what it returns."""
        if info.summary is None or not own:
            return frozenset()
        found = info.summary.behind.get(own)
        if found is None:
            names = (self.parameter_of(origin, info) for origin in reach(own))
            found = info.summary.behind[own] = frozenset(name for name in names if name is not None)
        return found

    def _given(self, origin: Origin, info: FunctionInfo) -> str | None:
        """The parameter of `info` that an origin is, is part of, or is an element of."""
        site = origin.site
        if site.source is Source.ITER:
            return next((name for o in site.parents if (name := self.parameter_of(o, info)) is not None), None)
        return self.parameter_of(site, info) if site.base is None or site.key.startswith("[") else None

    # -- questions -------------------------------------------------------------------------------------------------

    def library_of(self, call: CallEvent) -> str:
        """The library whose class the receiver of a method call was built from, where that is in sight."""
        for origin in call.callee.objects:
            made = origin.site.base or origin.site
            owner = self.owner.get(made)
            event = owner.calls.get(id(made.node)) if owner is not None else None
            if event is not None and event.qualified:
                return event.qualified.split(".")[0]
        receiver = call.text.rpartition(".")[0]
        if receiver.startswith("self.") and call.function.cls is not None:
            for cls in call.function.cls.ancestry():
                for node in cls.assigned.get(receiver[5:].split(".")[0], []):
                    if isinstance(node, cst.Call) and (text := dotted(node.func)):
                        return self.qualify(text, cls.index).split(".")[0]
        return ""

    def text(self, node: cst.CSTNode) -> str:
        """The source of a node, on one line."""
        return " ".join(self.module.code_for_node(node).split())

    def _spread_evidence(self) -> None:
        """What is backwarded at a call of a function of this file was attached inside that function."""
        for _ in range(3):
            for origin in list(self._origins.values()):
                if origin.root and len(origin.returned) == 1:
                    for inner in origin.returned:
                        inner.site.root = True

    def _spread_needs(self) -> None:
        """A store is needed when what it flows into is."""
        changed = True
        while changed:
            changed = False
            for store in self._stores.values():
                for later in store.flows_to:
                    for flag in ("needed", "returned", "passed", "yielded", "as_number", "plain"):
                        if getattr(later, flag) and not getattr(store, flag):
                            setattr(store, flag, True)
                            changed = True

    def first_terms(self, store: Store) -> Iterator[cst.BaseExpression]:
        """What a running value is started from inside the loop that it outlives: `smooth = loss` in another branch."""
        for value_node, path, value in store.function.bindings.get(store.holder_text, {}).values():
            if store.across is None or store.across not in path or value_node is store.node:
                continue
            if any(self.grade(origin) >= Grade.LIKELY for origin in value.graph) and store.kind is StoreKind.ACCUMULATE:
                if value.graph & {leaf.origin for leaf in store.leaves}:
                    yield value_node

    def elements_of(self, given: set[Origin]) -> Iterator[Origin]:
        """The elements that loops and comprehensions take from any of `given`."""
        for origin in self._origins.values():
            if origin.source is Source.ITER and not given.isdisjoint(parent.site for parent in origin.parents):
                yield origin

    def stores(self) -> Iterator[Store]:
        """All stores of the file."""
        for function in self.functions:
            yield from function.stores

    def backwards(self) -> Iterator[Backward]:
        """All backward passes of the file."""
        for function in self.functions:
            yield from function.backwards

    def calls(self) -> Iterator[CallEvent]:
        """All calls of the file."""
        for function in self.functions:
            yield from function.calls.values()

    def grad_of(self, function: FunctionFlow) -> Grad:
        """The grad mode in which a function runs: its decorators, or all of its callers in this file."""
        if function.grad is not Grad.ON or function.info is None:
            return function.grad
        if self.switches_grad:
            return Grad.MAYBE
        key = id(function.node)
        if key not in self._modes:
            self._modes[key] = None  # while it is found out: a call from itself says nothing
            modes: set[Grad] = set()
            for event in self.callers.get(key, {}).values():
                if event.grad is not Grad.ON:
                    modes.add(event.grad)
                elif self._modes.get(id(event.function.node), Grad.ON) is not None:
                    modes.add(self.grad_of(event.function))
            if modes == {Grad.OFF}:
                self._modes[key] = Grad.OFF
            else:
                self._modes[key] = Grad.ON if modes <= {Grad.ON} else Grad.MAYBE
        return self._modes[key] or Grad.ON

    def may_run_without_grad(self, function: FunctionFlow) -> bool:
        """Whether a function runs (or may run) with autograd off in all of its uses, callers in other files included.

        Asks the project, which costs the parse of the callers' files: ask last.
        """
        if self.grad_of(function) is not Grad.ON:
            return True
        project = self.project
        if project is None or function.info is None or not isinstance(function.node, cst.FunctionDef):
            return False
        outside = project.modes(self.path, function.name, function.cls.name if function.cls is not None else "")
        if outside is None:
            return True
        inside = {self.grad_of(event.function) for event in self.callers.get(id(function.node), {}).values()}
        modes = outside | inside
        return bool(modes) and Grad.ON not in modes

    def grade(self, origin: Origin, seen: frozenset[Origin] = frozenset()) -> Grade:
        """How sure it is that `origin` carries a graph."""
        site = origin.site
        if site in seen:
            return Grade.UNKNOWN
        if site.root:
            return Grade.CERTAIN
        if site.source in (Source.BUFFER, Source.ALLOC):
            return Grade.NO
        if site.source is Source.LEAF:
            return Grade.CERTAIN
        if site.grad is Grad.OFF and site.source not in (Source.PARAM, Source.NAME, Source.ITER):
            return Grade.NO
        if site.term:
            return Grade.LIKELY
        if site.grad is Grad.MAYBE:
            return Grade.UNKNOWN
        seen = seen | {site}
        if site.returned:
            return max(self.grade(inner, seen) for inner in site.returned)
        if site.source in CALLS and (site.label, "") in self._backwarded:
            return Grade.LIKELY  # what the same callee returns is backwarded elsewhere in the file
        if site.source is Source.MODEL_CALL:
            return Grade.LIKELY if "known module" in site.calls else Grade.WEAK
        if site.source is Source.LOSS_CALL:
            best = max((self.grade(parent, seen) for parent in site.parents), default=Grade.UNKNOWN)
            return max(best, Grade.UNKNOWN) if best is not Grade.NO else Grade.UNKNOWN
        if site.source is Source.ITEM and site.base is not None:
            return self._grade_item(site, seen)
        return Grade.UNKNOWN

    def _grade_item(self, site: Origin, seen: frozenset[Origin]) -> Grade:
        base = site.base
        assert base is not None
        if base.source in CALLS and (base.label, site.key) in self._backwarded:
            return Grade.LIKELY
        siblings = [child for child in base.children.values() if child is not site]
        made = base.source in CALLS
        if made and any(child.root or child.term for child in siblings):
            # one entry of a result is backwarded: another that is called a loss is one
            called = site.node.value if isinstance(site.node, cst.Name) else ""
            plural = "losses" in base.label.rsplit(".", 1)[-1].lower()
            if "loss" in site.key.lower() or "loss" in called.lower() or (plural and not called):
                return Grade.LIKELY
        if base.source in (Source.MODEL_CALL, Source.LOSS_CALL) or base.returned:
            # a model may also return counts and masks
            name = site.node.value if isinstance(site.node, cst.Name) else site.key
            likely = base.returned or know.OUTPUT_NAME.search(name)
            return min(self.grade(base, seen), Grade.LIKELY if likely else Grade.WEAK)
        return Grade.UNKNOWN

    def attached_part(self, leaf: Leaf) -> tuple[Grade, Origin]:
        """How sure it is that a stored thing, or an entry of it, carries a graph; and which of them does."""
        best, which = self.grade(leaf.origin), leaf.origin
        for key, child in leaf.origin.site.children.items():
            if key in leaf.replaced or not (child.root or child.term):
                continue
            grade = self.grade(child)
            if grade > best:
                best, which = grade, child.twin if leaf.origin.old else child
        return best, which

    def constant(self, node: cst.BaseExpression) -> object:
        """A literal's value, or Ellipsis."""
        return known_constant(Interpreter(self, self.top).ev(node))


def _trains(code: str) -> bool:
    """Whether a file trains or evaluates, by its words."""
    return any(all(word in code for word in words) for words in (*_TRAINS, *know.HELPED_TRAINING))


def known_sum(node: cst.BaseExpression) -> bool:
    """Whether an argument is the text "sum"."""
    return isinstance(node, cst.SimpleString) and node.evaluated_value == "sum"


__all__ = ["UNKNOWN", "Flow"]
