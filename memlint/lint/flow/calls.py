"""What calls do: to graphs, to containers, to optimizers, and what they return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import libcst as cst

from memlint.lint.flow import frameworks
from memlint.lint.flow import knowledge as know
from memlint.lint.flow.expressions import ANY, Expressions, held_path, made_by_call
from memlint.lint.flow.facts import (
    Backward,
    BackwardKind,
    CallEvent,
    Leaf,
    Life,
    OptimizerCall,
    OptimizerEvent,
    Store,
    StoreKind,
)
from memlint.lint.flow.index import ClassInfo, FunctionInfo
from memlint.lint.flow.values import (
    EMPTY,
    NONE,
    NUMBER,
    PLAIN,
    UNKNOWN,
    Grad,
    Instance,
    Kind,
    Method,
    Origin,
    Source,
    Value,
    combine,
    known_constant,
    of,
)
from memlint.lint.imports import dotted


class Argument(NamedTuple):
    """An argument of a call, evaluated."""

    arg: cst.Arg
    value: Value

    @property
    def keyword(self) -> str:
        """The keyword, or empty for a positional argument."""
        return self.arg.keyword.value if self.arg.keyword is not None else ""


Arguments = Sequence[Argument]

#: Methods that keep a value what it is, attributes and all.
_SAME = frozenset(
    """
    to cuda cpu float double half bfloat16 contiguous clone requires_grad_ xpu npu type
    """.split()
)
#: In-place methods that put their arguments' graph into the receiver.
_IN_PLACE = frozenset(
    """
    add_ sub_ mul_ div_ copy_ lerp_ addcmul_ addcdiv_ index_add_ index_copy_ scatter_ scatter_add_
    masked_scatter_ index_put_ addmm_ addmv_ addr_ baddbmm_ addbmm_
    """.split()
)
_BUILTINS = know.PASSING_BUILTINS | know.PLAIN_BUILTINS | know.CONTAINER_BUILTINS
_ENGINE_WORDS = ("engine", "model", "strategy", "booster", "optimizer", "optim", "plugin", "trainer", "scaler")


class Calls(Expressions):
    """Evaluates calls and records what they do."""

    def call(self, node: cst.Call) -> Value:
        """A call: its effects on the state, and what it returns."""
        func = node.func
        if isinstance(func, cst.Attribute):
            base = self.ev(func.value)
            if base.kind is Kind.REFERENCE:
                callee = self.attribute_of(base, func.attr.value, func)
                args = self.arguments(node)
                return self.reference_call(callee, node, args)
            args = self.arguments(node)
            return self.method(node, func, base, args)
        callee = self.ev(func)
        args = self.arguments(node)
        if isinstance(func, cst.Name) and func.value in _BUILTINS and self.is_free(callee):
            result = self.builtin(func.value, node, args)
            self.record(node, callee, result, args)
            return result
        return self.call_value(callee, node, args)

    def arguments(self, node: cst.Call) -> list[Argument]:
        """All arguments, evaluated in order."""
        return [Argument(arg, self.ev(arg.value)) for arg in node.args]

    @staticmethod
    def is_free(value: Value) -> bool:
        """Whether a value is a name that the file never binds."""
        return any(origin.source is Source.NAME for origin in value.objects)

    def record(
        self, node: cst.Call, callee: Value, result: Value, args: Arguments, target: FunctionInfo | None = None
    ) -> CallEvent:
        """Remember the call for the rules."""
        text = dotted(node.func)
        mode = ""
        if text:
            mode = self.state.modes.get(text) or self.state.modes.get(text.rsplit(".", 1)[0], "")
        event = CallEvent(
            node,
            callee.info if callee.kind is Kind.REFERENCE else "",
            text,
            callee,
            result,
            tuple(arg.value for arg in args),
            self.function,
            self.path,
            self.state.grad,
            mode,
            target,
            self.flow.tick(),
        )
        self.function.calls[id(node)] = event
        if target is not None:
            self.flow.callers.setdefault(id(target.node), {})[id(node)] = event
        return event

    def call_value(self, callee: Value, node: cst.Call, args: Arguments) -> Value:
        """Call whatever `callee` is."""
        if callee.kind is Kind.REFERENCE:
            return self.reference_call(callee, node, args)
        if callee.kind is Kind.FUNCTION:
            return self.apply(callee.info, UNKNOWN, node, args, callee)
        if callee.kind is Kind.METHOD and isinstance(callee.info, Method) and callee.info.function is not None:
            return self.apply(callee.info.function, callee.info.receiver, node, args, callee)
        if callee.kind is Kind.CLASS:
            result = self.instance_of(callee.info, node, args)
        elif isinstance(callee.info, Instance) and callee.kind is Kind.INSTANCE:
            method = callee.info.cls.method("__call__")
            if method is not None:
                return self.apply(method, callee, node, args, callee)
            result = self.opaque(node, args, callee, Source.CALL)
        elif callee.kind is Kind.MODULE and args and know.PLAIN_MODULE.match(callee.qualified):
            result = combine(self.opened([arg.value for arg in args]), Kind.TENSOR)
        else:
            result = self.opaque(node, args, callee, self.source_of(callee, node))
        self.record(node, callee, result, args)
        return result

    def instance_of(self, cls: ClassInfo, node: cst.Call, args: Arguments) -> Value:
        """A new instance of a class whose code is known."""
        kind = Kind.MODULE if cls.is_module else Kind.INSTANCE
        self.escape(args)
        return of(self.origin(node, Source.CALL, dotted(node.func)), kind, Instance(cls))

    def source_of(self, callee: Value, node: cst.Call) -> Source:
        """Whether a call is one of a model, of a criterion, or of something else."""
        if callee.kind is Kind.MODULE:
            untrained = isinstance(callee.info, Instance) and callee.info.cls.has_no_parameters
            return Source.CALL if untrained else Source.MODEL_CALL
        if callee.kind is Kind.CRITERION:
            return Source.LOSS_CALL
        if callee.kind not in (Kind.UNKNOWN, Kind.TENSOR):
            return Source.CALL
        text = dotted(node.func)
        tail = text.rsplit(".", 1)[-1]
        if text == "self":
            return Source.MODEL_CALL if self.function.cls is not None and self.function.cls.is_module else Source.CALL
        if tail == "module":
            return Source.MODEL_CALL
        if know.LOSS_NAME.match(tail):
            return Source.LOSS_CALL
        if know.MODEL_NAME.match(tail):
            return Source.MODEL_CALL
        return Source.CALL

    def opaque(self, node: cst.Call, args: Arguments, callee: Value, source: Source, extra: Value = UNKNOWN) -> Value:
        """A call of something whose body is not known: its result may carry the graphs of all it is given."""
        label = dotted(node.func) or label_of(node.func)
        origin = self.origin(node, source, label)
        values = [arg.value for arg in args] + [extra]
        via = frozenset().union(*(self.vias(value) for value in values))
        for value in values:
            origin.parents |= self.expand(value)
        if source is Source.MODEL_CALL and callee.kind is Kind.MODULE:
            origin.calls.add("known module")
        if source is Source.LOSS_CALL and sums(callee, args):
            origin.calls.add("sum")
        tail = label.rsplit(".", 1)[-1]
        observed = tail in know.OBSERVERS
        for store in via:
            if observed:
                store.as_number = True
            elif source is Source.CALL:
                store.passed = True
        result = of(origin, via=via)
        if source is Source.CALL and any(word in tail.lower() for word in ("scale", "divide", "normaliz", "average")):
            result = result._replace(divided=True)
        return result

    def escape(self, args: Arguments) -> None:
        """The arguments are in the hands of code that is not known."""
        for arg in args:
            for store in self.vias(arg.value):
                store.passed = True

    def proved_plain(self, value: Value) -> None:
        """numpy refuses a tensor that requires grad: what was stored on the way to here had no graph."""
        for store in self.vias(value):
            store.plain = True

    # -- builtins --------------------------------------------------------------------------------------------------

    def builtin(self, name: str, node: cst.Call, args: Arguments) -> Value:
        """A call of one of Python's builtins."""
        if name in know.PLAIN_BUILTINS:
            for arg in args:
                self.observed(arg.value)
                if name in ("float", "int"):
                    self.evidence(arg.value, "float")
            return NUMBER
        if name in know.CONTAINER_BUILTINS:
            origin, value = self.container(node, name)
            for arg in args:
                if arg.keyword:
                    self.state.put(origin, f"[{arg.keyword!r}]", arg.value)
                elif arg.arg.star == "" and name == "dict":
                    self.spread(origin, arg.value, node)
                else:
                    self.state.put(origin, ANY, self.iterate(arg.value, node), weak=True)
            return value
        values = [arg.value for arg in args]
        if name in ("sum", "max", "min") and len(values) >= 1:
            if name == "sum" or len(values) == 1:
                return self.iterate(values[0], node)._replace(direct=False)
            return combine(values)
        if name in ("next", "iter") and values:
            if name == "iter":
                return values[0]
            return self.iterate(values[0], node)
        if values and not any(value.graph for value in values):
            return NUMBER
        return combine(values) if values else UNKNOWN

    # -- things that are imported ----------------------------------------------------------------------------------

    def reference_call(self, callee: Value, node: cst.Call, args: Arguments) -> Value:
        """A call of something imported: what is known of it by name, otherwise what its code says."""
        result = self.reference(callee.info, node, args)
        if result is None:
            found = self.function.index.functions.get(callee.info) or self.function.index.linked(callee.info)
            if isinstance(found, FunctionInfo):
                return self.apply(found, UNKNOWN, node, args, callee)
            if found is not None:
                result = self.instance_of(found, node, args)
            else:
                tail = callee.info.rsplit(".", 1)[-1]
                named = know.LOSS_NAME.match(tail) and not tail[0].isupper()
                result = self.opaque(node, args, callee, Source.LOSS_CALL if named else Source.CALL)
        self.record(node, callee, result, args)
        return result

    def reference(self, name: str, node: cst.Call, args: Arguments) -> Value | None:
        """A call of something imported, by its qualified name; None where the name says nothing."""
        top = name.split(".", 1)[0]
        if top == "torch":
            return self.torch_call(name, node, args)
        if top in know.PLAIN_MODULES:
            for arg in args:
                self.observed(arg.value)
                if top == "numpy":
                    self.proved_plain(arg.value)
            return NUMBER
        if name in know.CONTAINER_TYPES:
            bounded = name.endswith("deque") and any(
                arg.keyword == "maxlen" or place_ == 1 for place_, arg in enumerate(args)
            )
            _, value = self.container(node, "bounded" if bounded else None)
            return value
        if name.endswith((".Accelerator", ".Fabric")):
            about = know.accelerator(name, [(arg.keyword, arg.arg.value) for arg in args])
            return of(self.origin(node, Source.CALL, name), Kind.ACCELERATOR, about)
        if name == "deepspeed.initialize":  # deepspeed 0.19.8, __init__.py: engine, optimizer, loader, scheduler
            origin, value = self.container(node, "tuple")
            engine = of(self.origin(node, Source.CALL, name, "engine"), Kind.MODULE, "deepspeed.DeepSpeedEngine")
            optimizer = of(self.origin(node, Source.CALL, name, "optimizer"), Kind.OPTIMIZER, name)
            for place_, part in enumerate((engine, optimizer, UNKNOWN, UNKNOWN)):
                self.state.put(origin, f"[{place_}]", part)
            return value
        if top == "ignite":
            return frameworks.build_engine(self.flow, self, name, node, [arg.value for arg in args])
        if top == "torchmetrics" and name.endswith(".CatMetric"):
            return of(self.origin(node, Source.CALL, name), info=name)
        if know.OPTIMIZER_CLASS.match(name):
            return of(self.origin(node, Source.CALL, name), Kind.OPTIMIZER, name)
        if name.startswith("copy.") and args:
            return args[0].value
        if name.startswith("tqdm") and args:
            return args[0].value
        if name.endswith(".partial"):
            return UNKNOWN
        tail = name.rsplit(".", 1)[-1]
        if scales_loss(tail, args):
            return args[0].value
        if know.MAYBE_OFF.search(tail) and not tail[0].isupper():
            return Value(Kind.GRAD_MODE, info=Grad.MAYBE)
        return None

    def torch_call(self, name: str, node: cst.Call, args: Arguments) -> Value:
        """A call into torch."""
        if name in know.GRAD_OFF:
            return Value(Kind.GRAD_MODE, info=self.switched(args, Grad.OFF, inverted=True))
        if name in know.GRAD_ON:
            return Value(Kind.GRAD_MODE, info=Grad.ON)
        if name == "torch.set_grad_enabled":
            return Value(Kind.GRAD_MODE, info=self.switched(args, Grad.MAYBE, inverted=False), graph=EMPTY)
        if name == "torch.autograd.backward":
            self.backward(BackwardKind.AUTOGRAD, node, args[0] if args else None, args, "")
            return NONE
        if name == "torch.distributed.autograd.backward" and len(args) > 1:
            self.backward(BackwardKind.AUTOGRAD, node, args[1], args, "")
            return NONE
        if name == "torch.autograd.grad":
            return self.autograd_grad(node, args)
        values = [arg.value for arg in args]
        if name in know.CONCATENATIONS and values:
            for origin in values[0].objects:
                origin.site.opened = True
        if name.startswith("torch.nn."):
            return self.torch_nn_call(name, node, args, values)
        if know.OPTIMIZER_CLASS.match(name):
            return of(self.origin(node, Source.CALL, name), Kind.OPTIMIZER, name)
        if name == "torch.amp.GradScaler":
            return of(self.origin(node, Source.CALL, name), Kind.SCALER, name)
        if name.startswith("torch.utils.data."):
            return of(self.origin(node, Source.CALL, name), Kind.LOADER, name)
        if name == "torch.autograd.Variable":
            # a Variable made of a tensor that has a graph starts without one (measured on torch 2.13)
            return Value(Kind.TENSOR)
        if name.startswith("torch.utils.checkpoint.checkpoint"):
            return self.opaque(node, args, UNKNOWN, Source.CALL)
        if name.startswith("torch.distributed.pipelining.") and name.rsplit(".", 1)[-1] in know.PIPELINE_SCHEDULES:
            return of(self.origin(node, Source.CALL, name))
        if name.startswith(("torch.cuda.", "torch.distributed.", "torch.backends.", "torch.random.", "torch.xpu.")):
            for value in values:
                self.observed(value)
            return NUMBER
        if name in ("torch.compile", "torch.jit.script", "torch.jit.trace") and values:
            return values[0]
        if name.count(".") > 1 and not name.startswith(("torch.linalg.", "torch.special.", "torch.fft.")):
            return self.opaque(node, args, UNKNOWN, Source.CALL)
        if name in know.CONVERTING_FUNCTIONS and args and args[0].value.kind in (Kind.CONTAINER, Kind.NUMBER):
            return Value(Kind.TENSOR)
        if any(arg.keyword == "requires_grad" and known_constant(arg.value) is True for arg in args):
            self.function.asks_grad = True
            return of(self.origin(node, Source.LEAF, name), Kind.TENSOR)
        if name in know.DETACHING_FUNCTIONS:
            return Value(Kind.TENSOR)
        return self.torch_result(name.rsplit(".", 1)[-1], node, args, self.opened(values), several=len(args) > 1)

    @staticmethod
    def switched(args: Arguments, otherwise: Grad, *, inverted: bool) -> Grad:
        """The grad mode that `set_grad_enabled(flag)` or `inference_mode(flag)` gives."""
        if not args:
            return Grad.OFF if inverted else otherwise
        flag = known_constant(args[0].value)
        if flag is ...:
            return Grad.MAYBE
        return Grad.OFF if bool(flag) is inverted else Grad.ON

    def opened(self, values: Sequence[Value]) -> list[Value]:
        """Values with containers replaced by what is in them."""
        return [
            self.iterate(value, self.function.node)._replace(via=self.vias(value))
            if value.kind is Kind.CONTAINER
            else value
            for value in values
        ]

    def torch_result(
        self, method: str, node: cst.Call, args: Arguments, values: list[Value], *, several: bool
    ) -> Value:
        """The result of a torch function or tensor method: the graphs of all it is given; indices carry none."""
        result = combine(values, Kind.TENSOR)
        if method in ("div", "true_divide", "divide"):
            result = result._replace(divided=True)
        if method in ("mul", "multiply") and len(values) > 1 and known_constant(values[-1]) is ...:
            result = result._replace(divided=True)
        if method in know.VALUES_AND_INDICES and several:
            origin, value = self.container(node, "tuple")
            self.state.put(origin, "[0]", result)
            self.state.put(origin, "[1]", Value(Kind.TENSOR))
            self.state.put(origin, ".values", result)
            self.state.put(origin, ".indices", Value(Kind.TENSOR))
            return value
        if not result.graph and any(value.kind is Kind.UNKNOWN for value in values):
            return Value(Kind.TENSOR, divided=result.divided, via=result.via)
        return result

    def torch_nn_call(self, name: str, node: cst.Call, args: Arguments, values: list[Value]) -> Value:
        """Something of torch.nn: a loss, a function, a module that is built, a parameter."""
        if know.LOSS_FUNCTION.match(name):
            result = self.opaque(node, args, UNKNOWN, Source.LOSS_CALL)
            return result._replace(kind=Kind.TENSOR)
        if name.startswith("torch.nn.functional."):
            tail = name.rsplit(".", 1)[-1]
            if tail == "one_hot":
                return Value(Kind.TENSOR)
            return combine(self.opened(values), Kind.TENSOR)
        if name.startswith("torch.nn.utils."):
            if "clip_grad" in name:
                return NUMBER
            return combine(values)
        tail = name.rsplit(".", 1)[-1]
        if tail == "Parameter":
            return of(self.origin(node, Source.LEAF, name), Kind.TENSOR)
        if know.LOSS_CLASS.match(name):
            summed = any(arg.keyword == "reduction" and known_constant(arg.value) == "sum" for arg in args)
            return of(self.origin(node, Source.CALL, name), Kind.CRITERION, name + ("(sum)" if summed else ""))
        if tail[0].isupper():
            return of(self.origin(node, Source.CALL, name), Kind.MODULE, name)
        return UNKNOWN

    # -- backward --------------------------------------------------------------------------------------------------

    def backward(
        self,
        kind: BackwardKind,
        node: cst.Call | cst.Return,
        root: Argument | Value | None,
        args: Arguments,
        receiver_text: str,
        root_node: cst.BaseExpression | None = None,
    ) -> Backward:
        """A backward pass from `root`: its graph is gone afterwards unless it is retained."""
        value = root.value if isinstance(root, Argument) else (root or UNKNOWN)
        expression = root.arg.value if isinstance(root, Argument) else root_node
        event = self.flow.backward_at(self.function, kind, node, expression)
        event.path, event.value, event.order = self.path, value, self.flow.tick()
        event.receiver_text = receiver_text
        for arg in args:
            if arg.keyword == "retain_graph":
                event.retain, event.retains = arg.arg, _flag(arg.value)
            elif arg.keyword == "create_graph":
                event.create, event.creates = arg.arg, _flag(arg.value)
        if event.retain is None and event.creates is not False:
            event.retains = event.creates
        self.mark_backwarded(value)
        event.reach = reach(self.expand(value))
        if event.retains is False:
            self.state.consumed |= event.reach
            self.state.maybe_consumed |= event.reach
        return event

    def mark_backwarded(self, value: Value) -> None:
        """Backward is called on `value`: it is a tensor with a graph, and what was stored on the way is needed."""
        roots = {origin.site for origin in self.expand(value)}
        terms = {origin.site for origin in value.terms if origin.source is not Source.ALLOC} or roots
        terms = {origin for origin in terms if not is_factor(origin)}
        for origin in terms:
            if len(terms) == 1:
                origin.root = True
            else:
                origin.term = True
        for store in self.vias(value):
            store.needed = True

    def autograd_grad(self, node: cst.Call, args: Arguments) -> Value:
        """`torch.autograd.grad`: gradients, with a graph of their own only under create_graph."""
        positional = [arg for arg in args if not arg.keyword]
        outputs = next((arg for arg in args if arg.keyword == "outputs"), positional[0] if positional else None)
        event = self.backward(BackwardKind.GRAD, node, outputs, args, "torch.autograd")
        self.function.asks_grad = True
        if event.creates is False:
            return Value(Kind.TENSOR)
        origin = self.origin(node, Source.CALL, "torch.autograd.grad")
        if outputs is not None:
            origin.parents |= self.expand(outputs.value)
        return of(origin)

    def try_backward(self, node: cst.Call, func: cst.Attribute, base: Value, args: Arguments) -> bool:
        """Recognise the ways to write a backward pass."""
        method = func.attr.value
        text = dotted(func.value)
        if method == "manual_backward" and args:
            self.backward(BackwardKind.MANUAL, node, args[0], args, text)
            return True
        if method != "backward":
            return False
        tail = text.rsplit(".", 1)[-1].lower()
        first = args[0] if args and not args[0].keyword else None
        if first is not None and (base.kind is Kind.ACCELERATOR or know.ACCELERATOR_NAME.match(tail)):
            fabric = base.info[0] == "fabric" if base.kind is Kind.ACCELERATOR else know.FABRIC_NAME.match(tail)
            self.backward(BackwardKind.FABRIC if fabric else BackwardKind.ACCELERATOR, node, first, args, text)
        elif isinstance(base.info, Instance) and (own := base.info.cls.method("backward")) is not None:
            self.apply(own, base, node, args, base)
        elif first is not None and (
            base.kind not in (Kind.UNKNOWN, Kind.TENSOR)
            or any(word in tail for word in _ENGINE_WORDS)
            or tail == "self"
        ):
            self.backward(BackwardKind.ENGINE, node, first, args, text)
        else:
            self.evidence(base, "backward")
            self.backward(BackwardKind.TENSOR, node, base, args, text, func.value)
        return True

    def evidence(self, value: Value, method: str) -> None:
        """Remember that `method` was called on a value."""
        for origin in value.objects:
            origin.site.calls.add(method)
        if method in ("item", "detach") and len(value.graph) == 1:
            for origin in value.graph:
                origin.site.detached = True

    # -- methods ---------------------------------------------------------------------------------------------------

    def method(self, node: cst.Call, func: cst.Attribute, base: Value, args: Arguments) -> Value:
        """A method call on something that is not a module of code."""
        name = func.attr.value
        if self.try_backward(node, func, base, args):
            # an engine of DeepSpeed hands the loss back (0.19.8, runtime/engine.py, `DeepSpeedEngine.backward`)
            engine = name == "backward" and len(args) > 0 and self.flow.is_engine_backward(node)
            returned = args[0].value if engine else NONE
            self.record(node, base, returned, args)
            return returned
        cls = base.info.cls if isinstance(base.info, Instance) else None
        if cls is not None and (own := cls.method(name)) is not None:
            return self.apply(own, base, node, args, Value(Kind.METHOD, info=Method(base, name, own)))
        result = self.known_method(node, func, base, name, args)
        if result is not None:
            self.record(node, base, result, args)
            return result
        self.framework_method(node, func, base, name, args)
        if name in ("forward", "__call__"):
            return self.call_value(base, node, args)
        # `self.model(x)`: an attribute that is called
        if name in ("values", "items", "keys", "get", "pop", "append", "extend", "_asdict"):
            for origin in base.objects:
                origin.site.opened = True
        callee = self.attribute_of(base, name, func)
        if callee.kind in (Kind.MODULE, Kind.CRITERION, Kind.FUNCTION, Kind.METHOD, Kind.CLASS, Kind.INSTANCE):
            return self.call_value(callee, node, args)
        source = self.source_of(callee, node)
        if know.MAYBE_OFF.search(name):
            result = Value(Kind.GRAD_MODE, info=Grad.MAYBE)
        else:
            extra = base if base.kind is not Kind.MODULE and source is Source.CALL else UNKNOWN
            result = self.opaque(node, args, callee, source, extra)
        if callee.kind is Kind.NUMBER:
            result = NUMBER
        self.record(node, callee, result, args)
        return result

    def framework_method(self, node: cst.Call, func: cst.Attribute, base: Value, name: str, args: Arguments) -> None:
        """What methods of frameworks do to what they are given."""
        if name == "add_event_handler":
            frameworks.add_handler(self.flow, node, base, [arg.value for arg in args])
        elif name == "update" and args and base.qualified.endswith(".CatMetric"):
            # torchmetrics 1.9.0, aggregation.py, `CatMetric.update`: the list of the state takes the tensor itself
            self.store(StoreKind.COLLECT, node, args[0].arg.value, func.value, base, args[0].value)
        elif name == "step" and any(o.label.rsplit(".", 1)[-1] in know.PIPELINE_SCHEDULES for o in base.objects):
            for arg in args:
                if arg.keyword == "losses" and arg.value.kind is Kind.CONTAINER:
                    self.pipeline_losses(node, arg.value)

    def pipeline_losses(self, node: cst.Call, losses: Value) -> None:
        """A pipeline's step empties `losses` and fills it with those of its micro-batches, which it has backwarded."""
        origin = self.origin(node, Source.LOSS_CALL, "losses")
        origin.root = True
        self.state.consumed |= {origin}
        self.state.maybe_consumed |= {origin}
        for holder in losses.objects:
            self.state.clear(holder)
            self.state.put(holder, ANY, of(origin))

    def known_method(
        self, node: cst.Call, func: cst.Attribute, base: Value, name: str, args: Arguments
    ) -> Value | None:
        """Methods that mean the same on whatever they are called; None for others."""
        if base.kind is Kind.CONTAINER or name in ("append", "appendleft", "extend", "extendleft", "insert"):
            result = self.container_method(node, func, base, name, args)
            if result is not None:
                return result
        if base.kind is Kind.NUMBER:
            for arg in args:
                self.observed(arg.value)
            return NUMBER
        result = self.training_method(node, func, base, name, args)
        if result is not None:
            return result
        if base.kind in (Kind.OPTIMIZER, Kind.SCALER, Kind.LOADER, Kind.ACCELERATOR, Kind.CONTAINER):
            return None
        return self.tensor_method(node, func, base, name, args)

    def tensor_method(
        self, node: cst.Call, func: cst.Attribute, base: Value, name: str, args: Arguments
    ) -> Value | None:
        """Methods of tensors."""
        if name in know.DETACHING_METHODS:
            self.evidence(base, name)
            if name in ("item", "tolist", "numpy"):
                self.observed(base)
            if name == "numpy":
                self.proved_plain(base)
            return NUMBER if name in know.NUMBER_METHODS else Value(Kind.TENSOR)
        if name == "detach_":
            self.evidence(base, "detach")
            self.assign_back(func.value, Value(Kind.TENSOR))
            return Value(Kind.TENSOR)
        if name == "requires_grad_":
            flag = known_constant(args[0].value) if args else True
            if flag is False:
                self.freeze(base, dotted(func.value))
            elif base.kind is not Kind.MODULE:
                self.function.asks_grad = True
                if base.kind is Kind.TENSOR and not base.graph:
                    base = of(self.origin(node, Source.LEAF, dotted(func.value)), Kind.TENSOR)
                    self.assign_back(func.value, base)
            return base
        if name in _SAME:
            if name == "cpu":
                self.evidence(base, name)
            return base
        if name.endswith("_") and not name.endswith("__"):
            if name in ("div_", "mul_") and dotted(func.value).endswith((".grad", ".grad.data")):
                self.function.scales_grad = True
            elif name in _IN_PLACE and args:
                self.in_place(node, func, base, args)
            return base
        if name in know.TRANSPARENT_METHODS and base.kind in (Kind.TENSOR, Kind.UNKNOWN):
            values = [base, *self.opened([arg.value for arg in args])]
            several = bool(args) and not args[0].value.graph
            return self.torch_result(name, node, args, values, several=several)
        return None

    def freeze(self, value: Value, text: str) -> None:
        """The parameters of a module are switched off: of `text`, or of the module that a parameter is taken from."""
        self.function.frozen.add(text)
        for origin in value.graph:
            for each in (origin, *origin.parents):
                if each.source is Source.LEAF:
                    self.function.frozen.add(each.label.removesuffix(".parameters()"))

    def training_method(
        self, node: cst.Call, func: cst.Attribute, base: Value, name: str, args: Arguments
    ) -> Value | None:
        """Methods of modules, optimizers and scalers."""
        text = dotted(func.value)
        tail = text.rsplit(".", 1)[-1]
        if name in ("eval", "train") and len(args) <= 1:
            if not text:
                return base if base.kind is Kind.MODULE else None
            flag = known_constant(args[0].value) if args else True
            mode = "eval" if name == "eval" or flag is False else "train" if flag is True else "maybe"
            self.state.modes[text] = mode
            if mode == "eval":
                self.function.evals.setdefault(text, node)
            else:
                self.function.trains.add(text)
            return base
        if name == "zero_grad":
            self.optimizer_event(OptimizerCall.ZERO_GRAD, node, text or label_of(func.value), base)
            return NONE
        if name == "step":
            receiver, holder = base, text
            if args and (base.kind is Kind.SCALER or know.SCALER_NAME.search(tail)):
                receiver, holder = args[0].value, dotted(args[0].arg.value)
            if receiver.kind is Kind.OPTIMIZER or know.OPTIMIZER_NAME.search(holder.rsplit(".", 1)[-1].lower()):
                self.optimizer_event(OptimizerCall.STEP, node, holder, receiver)
                return NONE if base.kind is not Kind.UNKNOWN else None
            return None
        if name == "scale" and len(args) == 1 and (base.kind is Kind.SCALER or know.SCALER_NAME.search(tail)):
            return args[0].value
        if base.kind is Kind.UNKNOWN and scales_loss(name, args):  # of apex.amp, wherever it comes from
            return args[0].value
        if name in ("parameters", "named_parameters", "buffers", "named_buffers", "modules", "children"):
            if name == "parameters":
                origin = self.origin(node, Source.LEAF, f"{text}.parameters()")
                return of(origin)
            return UNKNOWN
        if name == "state_dict":
            return Value(Kind.UNKNOWN)
        if name == "enter_context" and args:
            if args[0].value.kind is Kind.GRAD_MODE:
                self.state.grad = args[0].value.info
            return args[0].value
        return None

    def optimizer_event(self, what: OptimizerCall, node: cst.Call, text: str, receiver: Value) -> None:
        """Remember a step or a clearing of gradients."""
        event = OptimizerEvent(what, node, text, receiver, self.function, self.path, self.flow.tick())
        events = self.function.optimizer
        for place_, old in enumerate(events):
            if old.node is node:
                events[place_] = event
                return
        events.append(event)

    def assign_back(self, node: cst.BaseExpression, value: Value) -> None:
        """Rebind a place to what an in-place method made of it."""
        if isinstance(node, (cst.Name, cst.Attribute, cst.Subscript)):
            self.assign(node, value, None)

    # -- containers and in-place updates ---------------------------------------------------------------------------

    def container_method(
        self, node: cst.Call, func: cst.Attribute, base: Value, name: str, args: Arguments
    ) -> Value | None:
        """Methods of lists, dicts, sets, deques."""
        if name in know.COLLECTING_METHODS and args:
            if name in ("append", "appendleft", "extend", "extendleft") and len(args) != 1:
                return None  # no method of a list or deque
            if name == "insert" and len(args) > 1:
                args = args[1:]
            if name == "setdefault":
                if len(args) < 2:
                    return UNKNOWN
                args = args[1:]
            if name == "update" and base.kind is not Kind.CONTAINER:
                return None
            for arg in args:
                content = arg.value
                if name in know.SPREADING_METHODS and not arg.keyword:
                    content = self.iterate(content, arg.arg)._replace(via=self.vias(content))
                spread = name in know.SPREADING_METHODS and not arg.keyword
                kind = StoreKind.COLLECT
                if name == "update" and (arg.keyword or not self.makes_keys(arg.arg.value)):
                    kind = StoreKind.ASSIGN  # the same keys again, as far as can be told
                kept = self.store(kind, node, arg.arg.value, func.value, base, content, spread=spread)
                for holder in base.objects:
                    if name == "update" and not arg.keyword and base.kind is Kind.CONTAINER:
                        self.spread(holder, arg.value, arg.arg)
                    else:
                        self.state.put(holder, ANY, kept, weak=True)
            return base if name == "setdefault" else NONE
        if name == "clear":
            for holder in base.objects:
                self.state.clear(holder)
            return NONE
        if base.kind is not Kind.CONTAINER:
            return None
        if name in ("values", "copy", "items", "keys"):
            return NUMBER if name == "keys" else base
        if name in ("pop", "popleft", "get", "popitem"):
            key = known_constant(args[0].value) if args else ...
            if isinstance(key, str):
                return self.field(base, f"[{key!r}]", node)
            return self.iterate(base, node)
        if name in ("index", "count", "sort", "reverse", "remove", "rotate", "discard"):
            return NUMBER
        return None

    @staticmethod
    def makes_keys(node: cst.BaseExpression) -> bool:
        """Whether a dict is displayed with keys that are computed: another one each time."""
        if isinstance(node, cst.DictComp):
            return not isinstance(node.key, cst.SimpleString)
        return isinstance(node, cst.Dict) and any(
            isinstance(element, cst.DictElement)
            and not isinstance(element.key, (cst.SimpleString, cst.Integer, cst.ConcatenatedString))
            for element in node.elements
        )

    def in_place(self, node: cst.Call, func: cst.Attribute, base: Value, args: Arguments) -> None:
        """`x.add_(y)`: the graph of y becomes part of x."""
        target: cst.BaseExpression = func.value
        while isinstance(target, cst.Call) and isinstance(target.func, cst.Attribute):
            if not target.func.attr.value.endswith("_"):
                return
            target = target.func.value
        if func.attr.value.startswith(("index_", "scatter", "masked_")):
            args = args[-1:]  # the others say where
        added = combine([arg.value for arg in args])
        if not added.graph or self.state.grad is Grad.OFF:
            return
        if isinstance(target, cst.Attribute) and target.attr.value in ("data", "grad"):
            return
        expression = max(args, key=lambda arg: len(arg.value.graph)).arg.value
        kind = StoreKind.ACCUMULATE if isinstance(target, cst.Name) else StoreKind.UPDATE
        kept = self.store(kind, node, expression, target, base, added)
        if isinstance(target, (cst.Name, cst.Attribute)):
            old = base.derived()
            self.assign(target, combine([old, kept], Kind.TENSOR), None)

    def store(
        self,
        kind: StoreKind,
        node: cst.CSTNode,
        expression: cst.BaseExpression,
        holder: cst.BaseExpression,
        held_in: Value,
        content: Value,
        helper: str = "",
        *,
        spread: bool = False,
        rebinds: bool = False,
    ) -> Value:
        """Record that `content` is kept, and return it as it will be read back.

        rebinds: the holder is bound to something new, so that whoever handed in the old one does not see it.
        """
        via = self.vias(content)
        leaves = self.leaves(content)
        if not leaves and not via:
            return content
        event = self.flow.store_at(self.function, kind, node, expression, held_path(holder) or label_of(holder))
        event.path, event.value, event.leaves = self.path, content, leaves
        event.consumed, event.grad, event.order = self.state.consumed, self.state.grad, self.flow.tick()
        event.maybe_consumed = self.state.maybe_consumed
        event.helper, event.spread = helper, spread
        event.holders = held_in.objects
        event.bounded = held_in.info == "bounded"
        self.place_holder(event, holder, held_in)
        if rebinds and event.life is Life.PARAM and isinstance(holder, cst.Name):
            event.life = Life.LOOP if event.across is not None else Life.CALL
        for earlier in via:
            if earlier is not event:
                earlier.flows_to.add(event)
        return content._replace(via=content.via | {event})

    def leaves(self, content: Value) -> tuple[Leaf, ...]:
        """What a stored value keeps, with the entries of it that were replaced by something without a graph."""
        found = []
        for origin in self.expand(content):
            fields = self.state.fields.get(origin, {})
            found.append(Leaf(origin, frozenset(key for key, held in fields.items() if not held.graph)))
        return tuple(found)

    def place_holder(self, event: Store, holder: cst.BaseExpression, held_in: Value) -> None:
        """Decide where the holder of a store lives, and which loop's iterations it outlives."""
        loops = self.loops
        inner = isinstance(holder, cst.Subscript)
        while isinstance(holder, cst.Subscript):  # an entry lives as long as what it is an entry of
            holder = holder.value
            held_in = self.ev(holder)
        allocs = [origin for origin in held_in.objects if origin.source is Source.ALLOC]
        event.across = loops[0] if loops else None
        event.holder_node = None
        root = root_name(holder)
        if allocs and len(allocs) == len(held_in.objects):
            event.holder_node = allocs[0].node
            if all(self.flow.owner.get(origin.site) is self.function for origin in allocs):
                around = min((o.loops[:-1] if o.old else o.loops for o in allocs), key=len)
                outlived = [loop for loop in loops if loop not in around]
                event.across = outlived[0] if outlived else None
                event.life = Life.LOOP if outlived else Life.ITERATION if loops else Life.CALL
                return
            owned = any(origin.label == "self" for origin in allocs)
            event.life = Life.SELF if owned else Life.OUTER
            return
        if isinstance(holder, cst.Name) and root in self.state.bound:
            shortest = min(self.state.bound[root], key=len)
            outlived = [loop for loop in loops if loop not in shortest]
            event.across = outlived[0] if outlived else None
            event.life = Life.LOOP if outlived else Life.ITERATION if loops else Life.CALL
            handed_in = any(origin.source is Source.PARAM for origin in held_in.objects)
            if event.kind is StoreKind.UPDATE and root not in self.params:
                handed_in = False  # a copy, as far as can be told
            if handed_in and (inner or event.kind is not StoreKind.ACCUMULATE):
                event.life = Life.PARAM
            return
        if root in self.params:
            event.life = Life.SELF if self.params[root] else Life.PARAM
        elif root in self.state.names and root not in ("self", "cls"):
            # an attribute or item of a local: as long as the local itself
            places = self.state.bound.get(root, frozenset({()}))
            shortest = min(places, key=len)
            outlived = [loop for loop in loops if loop not in shortest]
            event.across = outlived[0] if outlived else None
            event.life = Life.LOOP if outlived else Life.ITERATION if loops else Life.CALL
        else:
            event.life = Life.OUTER

    @property
    def params(self) -> dict[str, bool]:
        """The function's parameters; True for the receiver."""
        info = self.function.info
        if info is None:
            return {"self": True}
        names = [param.name.value for param in info.parameters]
        found = {name: info.bound and place_ == 0 for place_, name in enumerate(names)}
        if info.cls is None and "self" in found:
            found["self"] = True  # a method shown without its class
        return found

    # -- functions of this file ------------------------------------------------------------------------------------

    def apply(self, info: FunctionInfo, receiver: Value, node: cst.Call, args: Arguments, callee: Value) -> Value:
        """Call a function of this file: its summary tells what happens."""
        summary = self.flow.summary(info)
        if summary is None or info.abstract:
            result = self.opaque(node, args, callee, Source.CALL)
            self.record(node, callee, result, args, info)
            return result
        bound = self.bind(info, receiver, args)
        for name in summary.backwards:
            entry = bound.get(name)
            if entry is not None and entry[1] is not None:
                event = self.backward(BackwardKind.HELPER, node, entry[0], (), "", entry[1])
                event.root = entry[1]
        for name, kept in summary.keeps.items():
            entry = bound.get(name)
            if entry is not None and entry[1] is not None:
                self.store(kept.kind, node, entry[1], node.func, receiver, entry[0], helper=kept.holder_text)
        for name, (value, _) in bound.items():
            if name not in summary.backwards:
                for store in self.vias(value):
                    store.passed = True
        if info.context_manager:
            result = self.entered(info)
        else:
            result = self.translate(summary.returns, info, bound, node, "", 0)
        self.record(node, callee, result, args, info)
        return result

    @staticmethod
    def entered(info: FunctionInfo) -> Value:
        """What `with manager():` does to autograd, where the manager is a generator: its mode at the yields."""
        modes = set(info.flow.yields.values()) if info.flow is not None else set()
        if modes <= {Grad.ON}:
            return UNKNOWN
        return Value(Kind.GRAD_MODE, info=Grad.OFF if modes == {Grad.OFF} else Grad.MAYBE)

    def bind(
        self, info: FunctionInfo, receiver: Value, args: Arguments
    ) -> dict[str, tuple[Value, cst.BaseExpression | None]]:
        """Which parameter gets which argument."""
        names = [param.name.value for param in info.parameters]
        bound: dict[str, tuple[Value, cst.BaseExpression | None]] = {}
        if info.bound and names:
            bound[names[0]] = (receiver, None)
            names = names[1:]
        positional = [arg for arg in args if not arg.keyword and not arg.arg.star]
        for name, arg in zip(names, positional, strict=False):
            bound[name] = (arg.value, arg.arg.value)
        for arg in args:
            if arg.keyword:
                bound[arg.keyword] = (arg.value, arg.arg.value)
        return bound

    def translate(
        self,
        value: Value,
        info: FunctionInfo,
        bound: dict[str, tuple[Value, cst.BaseExpression | None]],
        node: cst.Call,
        key: str,
        depth: int,
    ) -> Value:
        """What a returned value is for the caller."""
        if not value.graph:
            return value._replace(via=EMPTY)
        summary = info.summary
        if value.kind is Kind.CONTAINER and value.direct and depth < 3 and summary is not None:
            allocs = [origin for origin in value.objects if origin.source is Source.ALLOC]
            if len(allocs) == len(value.graph):
                origin = self.origin(node, Source.ALLOC, "", f"returned{key}")
                for alloc in allocs:
                    for name, content in summary.fields.get(alloc, {}).items():
                        inner = self.translate(content, info, bound, node, key + name, depth + 1)
                        self.state.put(origin, name, inner, weak=True)
                return of(origin, Kind.CONTAINER, value.info)._replace(terms=EMPTY)
        own: set[Origin] = set()
        parts: list[Value] = []
        for origin in value.graph:
            param = self.flow.parameter_of(origin, info)
            if param is None:
                own.add(origin)
            elif param in bound:
                given = bound[param][0]
                direct = value.direct and origin.source is Source.PARAM
                parts.append(given if direct else given.derived(Kind.UNKNOWN))
        if not own and len(parts) == 1:
            return parts[0]._replace(divided=parts[0].divided or value.divided)
        origin = self.origin(node, Source.CALL, dotted(node.func) or info.name, f"call{key}")
        origin.returned = frozenset(own)
        origin.twin.returned = origin.returned
        origin.parents |= own
        for part in parts:
            origin.parents |= self.expand(part)
        for name in self.flow.parameters_behind(frozenset(own), info):
            if name in bound:
                origin.parents |= self.expand(bound[name][0])
        if summary is not None and own and own <= summary.consumed:
            self.state.consumed |= {origin}
            self.state.maybe_consumed |= {origin}
        kind = value.kind if value.kind not in PLAIN else Kind.UNKNOWN
        info_ = value.info if isinstance(value.info, Instance) else None
        return of(origin, kind, info_)._replace(divided=value.divided)


def scales_loss(name: str, args: Arguments) -> bool:
    """Whether a call is `amp.scale_loss(loss, optimizer)` of apex."""
    return name == "scale_loss" and len(args) > 1


def is_factor(origin: Origin) -> bool:
    """Whether something is called like a number that a loss is multiplied with: a count, or a weight no call made."""
    tail = origin.label.rsplit(".", 1)[-1]
    return bool(know.COUNT_NAME.search(tail)) or (not made_by_call(origin) and know.scales(tail))


def sums(callee: Value, args: Arguments) -> bool:
    """Whether a criterion sums over its samples."""
    if isinstance(callee.info, str) and callee.info.endswith("(sum)"):
        return True
    return any(arg.keyword == "reduction" and known_constant(arg.value) == "sum" for arg in args)


def label_of(node: cst.BaseExpression) -> str:
    """A short name for a callee that is no plain path: `layers[...]`, `build(...)`."""
    if isinstance(node, cst.Attribute):
        return f"{label_of(node.value)}.{node.attr.value}"
    if isinstance(node, cst.Call):
        return f"{label_of(node.func)}(...)"
    if isinstance(node, cst.Subscript):
        return f"{label_of(node.value)}[...]"
    return node.value if isinstance(node, cst.Name) else "(...)"


def root_name(node: cst.BaseExpression) -> str:
    """The name that a path starts with: `a` of `a.b["c"].d`; empty where it starts with something else."""
    while isinstance(node, (cst.Attribute, cst.Subscript)):
        node = node.value
    return node.value if isinstance(node, cst.Name) else ""


def _flag(value: Value) -> bool | None:
    constant = known_constant(value)
    return bool(constant) if constant is not ... else None


def reach(graph: frozenset[Origin], limit: int = 2000) -> frozenset[Origin]:
    """All origins that a backward from `graph` runs through."""
    seen: set[Origin] = set()
    stack = list(graph)
    while stack and len(seen) < limit:
        origin = stack.pop()
        if origin in seen:
            continue
        seen.add(origin)
        stack += origin.parents
        if origin.base is not None:  # an item of a result: whatever the call was given
            stack += origin.base.parents
    return frozenset(seen)
