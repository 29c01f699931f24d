"""What an expression holds, given the state before it: everything but calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import libcst as cst

from memlint.lint.flow import knowledge as know
from memlint.lint.flow.facts import Division, Frame, FunctionFlow, Loop, Path, Store, loops_of
from memlint.lint.flow.index import ClassInfo, FunctionInfo
from memlint.lint.flow.state import State
from memlint.lint.flow.syntax import literal, place
from memlint.lint.flow.values import (
    CALLS,
    EMPTY,
    NONE,
    NUMBER,
    UNKNOWN,
    Grad,
    Instance,
    Kind,
    Method,
    Origin,
    Source,
    Value,
    combine,
    constant,
    join,
    known_constant,
    of,
)
from memlint.lint.imports import CONVENTIONS, canonical, dotted

if TYPE_CHECKING:
    from memlint.lint.flow import Flow

ANY = "[*]"
#: more origins than this in one value say no more than "some graph"
MOST = 64
#: entries of one display that are told apart
MOST_PLACES = 40


class Expressions:
    """Evaluates expressions of one function. `state` is None where the code cannot be reached."""

    def __init__(self, flow: Flow, function: FunctionFlow) -> None:
        self.flow = flow
        self.function = function
        self.state: State = State()
        self.path: Path = ()
        self.dispatch: dict[type, Callable[[Any], Value]] = {
            cst.Name: self.name,
            cst.Attribute: self.attribute,
            cst.Call: self.call,
            cst.Subscript: self.subscript,
            cst.BinaryOperation: self.binary,
            cst.UnaryOperation: self.unary,
            cst.BooleanOperation: lambda node: join(self.ev(node.left), self.ev(node.right)),
            cst.Comparison: self.comparison,
            cst.IfExp: self.conditional,
            cst.Tuple: self.display,
            cst.List: self.display,
            cst.Set: self.display,
            cst.Dict: self.dict_display,
            cst.ListComp: self.comprehension,
            cst.SetComp: self.comprehension,
            cst.GeneratorExp: self.comprehension,
            cst.DictComp: self.comprehension,
            cst.NamedExpr: self.named,
            cst.Await: lambda node: self.ev(node.expression),
            cst.Yield: self.yielded,
            cst.FormattedString: self.formatted,
            cst.ConcatenatedString: self.formatted,
            cst.SimpleString: lambda node: constant(literal(node.value)),
            cst.Integer: lambda node: constant(literal(node.value)),
            cst.Float: lambda node: constant(literal(node.value)),
            cst.Imaginary: lambda _: NUMBER,
            cst.Ellipsis: lambda _: NUMBER,
            cst.Lambda: self.lambda_,
        }

    # implemented by the classes built on this one
    def call(self, node: cst.Call) -> Value:
        raise NotImplementedError

    def assign(self, target: cst.BaseExpression, value: Value, node: cst.BaseExpression | None) -> None:
        raise NotImplementedError

    def ev(self, node: cst.BaseExpression) -> Value:
        """What `node` holds here."""
        handler = self.dispatch.get(type(node))
        if handler is None:
            return UNKNOWN
        value = handler(node)
        if isinstance(node, (cst.Name, cst.Attribute)):
            self.function.seen[id(node)] = value
        if self.state.grad is Grad.OFF and value.graph and not value.direct and value.kind is not Kind.CONTAINER:
            # what is computed here is not recorded
            value = value._replace(kind=Kind.TENSOR, graph=EMPTY, terms=EMPTY, info=None)
        if len(value.graph) > MOST:
            value = value._replace(graph=frozenset(list(value.graph)[:MOST]), terms=EMPTY)
        if len(value.via) > MOST:
            for store in value.via:
                store.needed = True  # from here on it is not known what becomes of them
            value = value._replace(via=EMPTY)
        return value

    # -- origins ---------------------------------------------------------------------------------------------------

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The loops around the place that is being evaluated."""
        return loops_of(self.path)

    @contextmanager
    def within(self, frame: Frame) -> Iterator[None]:
        """Evaluate inside a loop, a branch or a block."""
        self.path = (*self.path, frame)
        yield
        self.path = self.path[:-1]

    def origin(self, node: cst.CSTNode, source: Source, label: str = "", key: str = "") -> Origin:
        """The origin at `node`, brought into being here and now (so nothing is known of it yet)."""
        origin = self.flow.origin_at(node, source, label, key, self.loops, self.state.grad)
        if origin in self.state.maybe_consumed or origin in self.state.consumed:
            self.state.consumed -= {origin}
            self.state.maybe_consumed -= {origin}
        if origin in self.state.fields:
            self.state.clear(origin)
        for child in origin.children.values():
            if child in self.state.maybe_consumed or child in self.state.consumed:
                self.state.consumed -= {child}
                self.state.maybe_consumed -= {child}
        self.flow.owner.setdefault(origin, self.function)
        return origin

    def container(self, node: cst.CSTNode, info: Any = None) -> tuple[Origin, Value]:
        """A new container made at `node`."""
        origin = self.origin(node, Source.ALLOC, "", "alloc")
        return origin, of(origin, Kind.CONTAINER, info)._replace(terms=EMPTY)

    def expand(self, value: Value, depth: int = 0) -> frozenset[Origin]:
        """The origins in a value, containers opened."""
        if not any(origin.source is Source.ALLOC for origin in value.graph):
            return value.graph
        found: set[Origin] = set()
        for origin in value.graph:
            if origin.source is Source.ALLOC:
                if depth < 4:
                    for content in self.state.fields.get(origin, {}).values():
                        found |= self.expand(content, depth + 1)
            else:
                found.add(origin)
        return frozenset(found)

    def vias(self, value: Value, depth: int = 0) -> frozenset[Store]:
        """The stores that a value, or what is in it, was read back from."""
        via = value.via
        if depth < 4:
            for origin in value.objects:
                if origin.source in (Source.ALLOC, Source.NAME, Source.PARAM, Source.ITEM):
                    for content in self.state.fields.get(origin, {}).values():
                        via |= self.vias(content, depth + 1)
        return via

    # -- names and places ------------------------------------------------------------------------------------------

    def name(self, node: cst.Name) -> Value:
        """A name: the local binding first, then the module's, then imports, then what people mean by it."""
        name = node.value
        value = self.state.names.get(name)
        if value is not None:
            return value
        if name in ("True", "False"):
            return constant(name == "True")
        if name == "None":
            return NONE
        closure = self.function.info.closure if self.function.info is not None else None
        if closure is not None and name in closure:
            return closure[name]
        return self.global_name(name, node)

    def global_name(self, name: str, node: cst.CSTNode) -> Value:
        """A name that the function does not bind."""
        index = self.function.index
        value = index.names.get(name)
        if value is not None:
            return value
        if name in index.functions:
            return Value(Kind.FUNCTION, info=index.functions[name])
        if name in index.classes:
            return Value(Kind.CLASS, info=index.classes[name])
        if name in index.imports:
            return Value(Kind.REFERENCE, info=canonical(index.imports[name]))
        if name not in index.globals and name in CONVENTIONS:
            return Value(Kind.REFERENCE, info=CONVENTIONS[name])
        if index.stars and name not in index.globals and (found := index.from_a_star(name)) is not None:
            return Value(Kind.CLASS if isinstance(found, ClassInfo) else Kind.FUNCTION, info=found)
        return of(self.flow.free(index, name, node))

    def attribute(self, node: cst.Attribute) -> Value:
        """`base.attr` as a value (method calls are seen by `call` before they come here)."""
        base = self.ev(node.value)
        return self.attribute_of(base, node.attr.value, node)

    def attribute_of(self, base: Value, attr: str, node: cst.CSTNode) -> Value:
        """Attribute `attr` of `base`."""
        if base.kind is Kind.REFERENCE:
            return Value(Kind.REFERENCE, info=canonical(f"{base.info}.{attr}"))
        if base.kind in (Kind.NUMBER, Kind.NONE):
            return NUMBER
        cls = base.info.cls if isinstance(base.info, Instance) else None
        if cls is None:
            if attr in know.DETACHED_ATTRIBUTES:
                return Value(Kind.TENSOR) if attr == "data" else NUMBER
            if attr == "grad":
                return Value(Kind.TENSOR)
            if attr in ("T", "mT", "H", "real", "imag") and base.kind is Kind.TENSOR:
                return base._replace(direct=False)
            if attr == "values" and base.kind is Kind.TENSOR:
                return base._replace(direct=False)
        elif (method := cls.method(attr)) is not None:
            if method.property:
                return self.flow.property_value(method, base)
            return Value(Kind.METHOD, base.graph, base.direct, info=Method(base, attr, method))
        elif attr == "training":
            return NUMBER
        return self.field(base, f".{attr}", node, cls)

    def field(self, base: Value, key: str, node: cst.CSTNode, cls: ClassInfo | None = None) -> Value:
        """What field `key` of the objects in `base` holds."""
        result: Value | None = None
        for origin in base.objects:
            content = self.state.get(origin, key)
            if content is None and origin.source is Source.ALLOC:
                content = self.state.get(origin, ANY)
                if content is None:
                    if (self.state.fields.get(origin) and key.startswith("[") and key == ANY) or key == "[?]":
                        content = self.elements(origin)
                    else:
                        content = UNKNOWN
            elif content is None:
                content = self.flow.class_attribute(cls, key[1:]) if cls is not None and key[0] == "." else None
                if content is None:
                    rest = self.state.get(origin, ANY) if key[0] == "[" else None
                    content = of(origin.child(key, node))
                    if rest is not None:
                        content = join(content, rest)
            if base.via:
                content = content._replace(via=content.via | base.via)
            result = content if result is None else join(result, content)
        if result is not None:
            return result
        return base.derived(Kind.UNKNOWN)

    def elements(self, origin: Origin) -> Value:
        """What any element of a container may hold."""
        result: Value | None = None
        for key, content in self.state.fields.get(origin, {}).items():
            if key.startswith("["):
                result = content if result is None else join(result, content)
        return UNKNOWN if result is None else result

    def subscript(self, node: cst.Subscript) -> Value:
        """`base[index]`: an item of a container, a view of a tensor."""
        base = self.ev(node.value)
        keys = []
        sliced = False
        for element in node.slice:
            if isinstance(element.slice, cst.Index):
                keys.append(self.ev(element.slice.value))
            else:
                sliced = True
        if base.kind in (Kind.NUMBER, Kind.NONE):
            return NUMBER
        if base.kind is Kind.REFERENCE:
            return UNKNOWN
        if base.kind is Kind.TENSOR:
            return base.derived()
        if sliced or len(keys) != 1:
            return base.derived() if base.kind is not Kind.CONTAINER else base
        return self.item(base, self.key_of(node, keys[0]), node)

    def key_of(self, node: cst.Subscript, key: Value) -> str:
        """The key of a field: `["loss"]`, `[0]`, or `[?]` where it is not a constant."""
        value = known_constant(key)
        if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool) and value >= -1):
            return f"[{value!r}]"
        return "[?]"

    def item(self, base: Value, key: str, node: cst.CSTNode) -> Value:
        """Item `key` of `base`."""
        if key in ("[?]", "[-1]"):
            result: Value | None = None
            for origin in base.objects:
                if origin.source is Source.ALLOC:
                    content = self.elements(origin)
                else:
                    content = self.state.get(origin, ANY) or of(origin.child("[?]", node))
                content = content._replace(via=content.via | base.via, direct=content.direct and key == "[-1]")
                result = content if result is None else join(result, content)
            return result if result is not None else base.derived()
        return self.field(base, key, node)

    # -- operators -------------------------------------------------------------------------------------------------

    def binary(self, node: cst.BinaryOperation) -> Value:
        """Arithmetic keeps the graphs of both sides; `%` on text formats them."""
        left, right = self.ev(node.left), self.ev(node.right)
        operator = node.operator
        if isinstance(operator, cst.Modulo) and isinstance(known_constant(left), str):
            self.observed(right)
            return NUMBER
        if not left.graph and not right.graph:
            divided = left.divided or right.divided or isinstance(operator, cst.Divide)
            kind = Kind.NUMBER
            if Kind.UNKNOWN in (left.kind, right.kind):
                kind = Kind.UNKNOWN
            elif Kind.TENSOR in (left.kind, right.kind):
                kind = Kind.TENSOR
            return Value(kind, divided=divided)
        if Kind.CONTAINER in (left.kind, right.kind) and isinstance(operator, cst.Add):
            return self.concatenated(node, left, right)
        value = combine([left, right], Kind.TENSOR if Kind.TENSOR in (left.kind, right.kind) else Kind.UNKNOWN)
        if isinstance(operator, cst.Divide):
            if left.graph:
                self.function.divisions[id(node)] = Division(node, node.right, left, self.path)
            return value._replace(divided=True, terms=left.terms)
        if isinstance(operator, cst.Multiply):
            return self.product(node, left, right, value)
        if isinstance(operator, (cst.Add, cst.Subtract)):
            # a sum is divided when each of its tensors is
            parts = [side for side in (left, right) if side.graph]
            return value._replace(divided=all(part.divided for part in parts))
        return value

    def unary(self, node: cst.UnaryOperation) -> Value:
        """`-x` keeps the graph, `not x` does not."""
        value = self.ev(node.expression)
        known = known_constant(value)
        if isinstance(node.operator, cst.Not):
            return NUMBER if known is ... else constant(not known)
        if isinstance(node.operator, cst.Minus) and isinstance(known, (int, float)):
            return constant(-known)
        return value.derived()

    def product(self, node: cst.BinaryOperation, left: Value, right: Value, value: Value) -> Value:
        """A product: a factor that is no tensor scales, and may be one over the number of micro-steps."""
        divided = left.divided or right.divided
        for factor, other, side in ((left, right, node.left), (right, left, node.right)):
            if not other.graph:
                continue
            if factor.graph and not isinstance(side, (cst.Name, cst.Attribute, cst.Subscript)):
                continue
            if known_constant(factor) is ... and not is_tensor_like(factor):
                divided = True
        terms = value.terms
        if left.graph and right.graph:
            calls = frozenset(o for o in terms if made_by_call(o))
            terms = calls | frozenset(o for o in terms if not know.scales(o.label.rsplit(".", 1)[-1])) or terms
            named = frozenset(
                o for o in terms if know.LOSS_NAME.match(tail := o.label.rsplit(".", 1)[-1]) and not know.scales(tail)
            )
            terms = calls | named or terms
        return value._replace(divided=divided, terms=terms)

    def concatenated(self, node: cst.CSTNode, left: Value, right: Value) -> Value:
        """`list + list`: a new container with the contents of both."""
        origin, value = self.container(node)
        for side in (left, right):
            content = self.iterate(side, node)
            if content.graph or content.kind is not Kind.UNKNOWN:
                self.state.put(origin, ANY, content, weak=True)
        return value

    def comparison(self, node: cst.Comparison) -> Value:
        """A comparison cuts the graph."""
        self.ev(node.left)
        for target in node.comparisons:
            self.ev(target.comparator)
        return NUMBER

    def conditional(self, node: cst.IfExp) -> Value:
        """`a if test else b` may be either."""
        decided = known_constant(self.ev(node.test))
        if decided is not ...:
            return self.ev(node.body if decided else node.orelse)
        return join(self.ev(node.body), self.ev(node.orelse))

    def named(self, node: cst.NamedExpr) -> Value:
        """`name := value`."""
        value = self.ev(node.value)
        self.assign(node.target, value, node.value)
        return value

    def yielded(self, node: cst.Yield) -> Value:
        """What is yielded is in the hands of the caller."""
        self.function.yields[id(node)] = self.state.grad
        inner = node.value.item if isinstance(node.value, cst.From) else node.value
        if inner is not None:
            for store in self.vias(self.ev(inner)):
                store.yielded = True
        return UNKNOWN

    def formatted(self, node: cst.FormattedString | cst.ConcatenatedString) -> Value:
        """Text: the tensors in it are only looked at."""
        if isinstance(node, cst.ConcatenatedString):
            self.ev(node.left)
            self.ev(node.right)
            return constant("")
        for part in node.parts:
            if isinstance(part, cst.FormattedStringExpression):
                self.observed(self.ev(part.expression))
        return NUMBER

    def observed(self, value: Value) -> None:
        """Only the number of `value` is looked at."""
        for store in self.vias(value):
            store.as_number = True

    def lambda_(self, node: cst.Lambda) -> Value:
        """A lambda is a function of this file; it sees what the names hold now."""
        info = self.flow.function_at(node, "<lambda>", self.function.index)
        info.closure = self.visible()
        return Value(Kind.FUNCTION, info=info)

    def visible(self) -> dict[str, Value]:
        """All that a nested function can see of the names here."""
        outer = self.function.info.closure if self.function.info is not None else None
        return {**outer, **self.state.names} if outer else dict(self.state.names)

    # -- containers ------------------------------------------------------------------------------------------------

    def display(self, node: cst.Tuple | cst.List | cst.Set) -> Value:
        """A tuple, list or set display: elements by their place."""
        origin, value = self.container(node, "tuple" if isinstance(node, cst.Tuple) else None)
        fields: dict[str, Value] = {}
        starred = False
        for place_, element in enumerate(node.elements):
            content = self.ev(element.value)
            if isinstance(element, cst.StarredElement):
                add_any(fields, self.iterate(content, element))
                starred = True
            elif starred or isinstance(node, cst.Set) or place_ > MOST_PLACES:
                add_any(fields, content)
            else:
                fields[f"[{place_}]"] = content
        self.state.fields[origin] = fields
        return value

    def dict_display(self, node: cst.Dict) -> Value:
        """A dict display: values by constant keys."""
        origin, value = self.container(node, "dict")
        fields: dict[str, Value] = {}
        for element in node.elements:
            content = self.ev(element.value)
            if isinstance(element, cst.StarredDictElement):
                self.state.fields[origin] = fields
                self.spread(origin, content, element)
                fields = dict(self.state.fields.get(origin, {}))
                continue
            key = known_constant(self.ev(element.key)) if isinstance(element, cst.DictElement) else ...
            if isinstance(key, (str, int)) and not isinstance(key, bool) and len(fields) < MOST_PLACES:
                fields[f"[{key!r}]"] = content
            else:
                add_any(fields, content)
        self.state.fields[origin] = fields
        return value

    def spread(self, origin: Origin, other: Value, node: cst.CSTNode) -> None:
        """Put all items of `other` into the container `origin`."""
        for source in other.objects:
            if source.source is Source.ALLOC:
                for key, content in self.state.fields.get(source, {}).items():
                    self.state.put(origin, key, content, weak=True)
                return
        self.state.put(origin, ANY, self.iterate(other, node), weak=True)

    def comprehension(self, node: cst.ListComp | cst.SetComp | cst.GeneratorExp | cst.DictComp) -> Value:
        """A comprehension: a loop that fills a new container."""
        names = dict(self.state.names)
        clause: cst.CompFor | None = node.for_in
        depth = 0
        while clause is not None:
            loop = self.flow.loop_at(clause)
            self.bind_iteration(clause.target, clause.iter, loop)
            self.path = (*self.path, loop)
            depth += 1
            for condition in clause.ifs:
                self.ev(condition.test)
            clause = clause.inner_for_in
        if isinstance(node, cst.DictComp):
            self.ev(node.key)
            content = self.ev(node.value)
        else:
            content = self.ev(node.elt)
        self.path = self.path[:-depth]
        self.state.names = names
        origin, value = self.container(node)
        self.state.put(origin, ANY, content)
        return value

    def iterate(self, value: Value, node: cst.CSTNode) -> Value:
        """What one element of `value` holds."""
        if value.kind in (Kind.NUMBER, Kind.NONE):
            return NUMBER
        result: Value | None = None
        opaque = False
        for origin in value.objects:
            if origin.source is Source.ALLOC:
                content = self.elements(origin)
                result = content if result is None else join(result, content)
            else:
                opaque = True
                origin.site.opened = True
        if opaque or result is None:
            if value.kind is Kind.TENSOR or not value.direct:
                fresh = value.derived()
                if not value.graph:
                    # whatever comes out of something that is not known
                    source = Source.ITER
                    fresh = of(self.origin(node, source, "element", "iter"))
                    if value.kind is Kind.TENSOR:
                        fresh = Value(Kind.TENSOR)
            else:
                origin = self.origin(node, Source.ITER, "element", "iter")
                origin.parents |= value.graph
                stored = [s for o in value.objects if (s := self.state.get(o, ANY)) is not None]
                fresh = of(origin)
                for content in stored:
                    fresh = join(fresh, content)
            result = fresh if result is None else join(result, fresh)
        return result._replace(via=result.via | value.via)

    def bind_iteration(self, target: cst.BaseExpression, over: cst.BaseExpression, loop: Loop) -> None:
        """Bind the target of a loop to an element of `over`."""
        value, pieces = self.iteration(over)
        loop.over = value
        outer, self.path = self.path, (*self.path, loop)
        if pieces is not None and isinstance(target, (cst.Tuple, cst.List)) and len(target.elements) == len(pieces):
            for element, piece in zip(target.elements, pieces, strict=True):
                self.assign(element.value, self.element(piece, element.value), None)
        elif pieces is not None:
            origin, whole = self.container(target)
            for place_, piece in enumerate(pieces):
                self.state.put(origin, f"[{place_}]", self.element(piece, target))
            self.assign(target, whole, None)
        else:
            self.assign(target, self.element(value, target), None)
        self.path = outer

    def element(self, value: Value, node: cst.CSTNode) -> Value:
        """An element of `value`; numbers stay what they are (the count of `enumerate`)."""
        return NUMBER if value.kind is Kind.NUMBER else self.iterate(value, node)

    def iteration(self, over: cst.BaseExpression) -> tuple[Value, list[Value] | None]:
        """What a loop runs over; for `enumerate`, `zip` and `.items()` the parts of its target as well."""
        if isinstance(over, cst.Call):
            callee = over.func
            name = dotted(callee)
            args = [arg.value for arg in over.args if arg.keyword is None and not arg.star]
            tail = name.rsplit(".", 1)[-1]
            if name == "enumerate" and args:
                return NUMBER, [NUMBER, self.whole(args[0])]
            if name in ("zip", "itertools.zip_longest") and args and len(args) == len(over.args):
                return UNKNOWN, [self.whole(arg) for arg in args]
            if tail in ("tqdm", "trange", "track", "progress", "ProgressBar", "progress_bar", "prange", "log_every"):
                if tail in ("trange", "prange"):
                    self.ev(over)
                    return NUMBER, None
                if args:
                    for extra in args[1:]:
                        self.ev(extra)
                    return self.iteration(args[0])
            if isinstance(callee, cst.Attribute) and not over.args and callee.attr.value == "items":
                return UNKNOWN, [NUMBER, self.ev(callee.value)]
        return self.ev(over), None

    def whole(self, over: cst.BaseExpression) -> Value:
        """The value of one argument of `enumerate` or `zip`; a nested `enumerate` or `zip` is a container of tuples."""
        value, pieces = self.iteration(over)
        if pieces is None:
            return value
        inner, row = self.container(over)
        for place_, piece in enumerate(pieces):
            self.state.put(inner, f"[{place_}]", self.element(piece, over))
        outer = self.origin(over, Source.ALLOC, "", "rows")
        self.state.put(outer, ANY, row)
        return of(outer, Kind.CONTAINER)

    def function_value(self, info: FunctionInfo) -> Value:
        """A function defined here."""
        return Value(Kind.FUNCTION, info=info)


def made_by_call(origin: Origin) -> bool:
    """Whether something is what a call gave, or a part of that."""
    return origin.whole.source in CALLS


def is_tensor_like(value: Value) -> bool:
    """Whether a factor is surely a tensor of the model, not a scale."""
    return value.kind is Kind.TENSOR or any(
        origin.source in (Source.MODEL_CALL, Source.LOSS_CALL, Source.CALL, Source.LEAF) for origin in value.graph
    )


def add_any(fields: dict[str, Value], content: Value) -> None:
    """Add to what any element of a container may hold."""
    fields[ANY] = join(fields[ANY], content) if ANY in fields else content


def parents_of(values: Iterable[frozenset[Origin]]) -> frozenset[Origin]:
    """All origins in several graphs."""
    return frozenset().union(*values)


def held_path(node: cst.BaseExpression) -> str:
    """How messages name a holder."""
    return place(node) or dotted(node)


__all__ = ["ANY", "Expressions", "Grad", "held_path", "is_tensor_like", "parents_of"]
