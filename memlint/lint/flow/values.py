"""What an expression can hold, as the flow model sees it.

An `Origin` is a place in the code where something comes into being: a call, a parameter, a container display, a name
that the file never binds. A `Value` is what an expression holds at one point of the program: its kind, and the origins
whose autograd graph it would keep alive. Values are immutable and compare by content, which is what the fixpoint over
a loop needs; origins are mutable, because evidence about them (somebody calls `.backward()` on it) may come later in
the file than their use.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, NamedTuple

import libcst as cst

if TYPE_CHECKING:
    from memlint.lint.flow.facts import Loop, Store
    from memlint.lint.flow.index import ClassInfo, FunctionInfo


class Kind(enum.Enum):
    """What sort of thing a value is, as far as the bindings tell."""

    UNKNOWN = "unknown"
    NUMBER = "number"  # a Python number, string, shape, dtype, numpy array: nothing that can hold a graph
    NONE = "None"
    TENSOR = "tensor"
    CONTAINER = "container"
    MODULE = "module"
    CRITERION = "criterion"
    OPTIMIZER = "optimizer"
    SCALER = "scaler"
    LOADER = "loader"
    ACCELERATOR = "accelerator"
    GRAD_MODE = "grad mode"  # a context manager that switches autograd
    REFERENCE = "reference"  # something imported, known by its qualified name
    FUNCTION = "function"
    CLASS = "class"
    INSTANCE = "instance"
    METHOD = "method"


class Source(enum.Enum):
    """How an origin came into being."""

    CALL = "call"
    MODEL_CALL = "model call"  # the callee is known or named as a module
    LOSS_CALL = "loss call"  # the callee is known or named as a criterion
    NAME = "name"  # a name that the file never binds
    PARAM = "parameter of a function"
    ITEM = "element or attribute of another origin"
    ITER = "loop target"
    ALLOC = "container"
    LEAF = "a module's parameter, or a tensor made with requires_grad=True"
    BUFFER = "a registered buffer"


#: what calls bring into being
CALLS = frozenset((Source.CALL, Source.MODEL_CALL, Source.LOSS_CALL))


class Grad(enum.Enum):
    """Whether autograd records, at a point of the program."""

    ON = "on"
    OFF = "off"
    MAYBE = "maybe"


class Grade(enum.IntEnum):
    """How sure the model is that an origin carries an autograd graph."""

    NO = 0
    UNKNOWN = 1
    WEAK = 2  # names only: `criterion(model(x))` of things that the file does not bind
    LIKELY = 3  # a term of a sum that is backwarded, the output of a module of this file
    CERTAIN = 4  # backward is called on it somewhere


class Origin:
    """A place where something comes into being.

    `loops` are the loops around it, outermost first. For every origin inside a loop there is a `twin`: the same place
    in an *earlier* iteration of that loop; the twin shares all evidence with the `site`.
    """

    __slots__ = (
        "_twin",
        "base",
        "calls",
        "children",
        "detached",
        "grad",
        "key",
        "label",
        "loops",
        "node",
        "opened",
        "parents",
        "returned",
        "root",
        "site",
        "source",
        "term",
    )

    def __init__(
        self,
        node: cst.CSTNode,
        source: Source,
        label: str = "",
        loops: tuple[Loop, ...] = (),
        grad: Grad = Grad.ON,
        base: Origin | None = None,
        key: str = "",
    ) -> None:
        self.node = node
        self.source = source
        self.label = label
        self.loops = loops
        self.grad = grad
        self.base = base
        self.key = key
        self.parents: set[Origin] = set()
        #: for the call of a function of this file: what that function returns, in its own terms
        self.returned: frozenset[Origin] = frozenset()
        self.children: dict[str, Origin] = {}
        self.site: Origin = self
        self._twin: Origin | None = None
        #: backward is called on exactly this (up to operations that keep it one thing, such as a mean)
        self.root = False
        #: it is a term of a sum that backward is called on
        self.term = False
        #: `.detach()` or `.item()` is called on it: it is a tensor
        self.detached = False
        #: its elements are taken somewhere: it may be no tensor but a container of them
        self.opened = False
        #: methods called on it
        self.calls: set[str] = set()

    @property
    def twin(self) -> Origin:
        """The same place in an earlier iteration."""
        if self._twin is None:
            twin = Origin(self.node, self.source, self.label, self.loops, self.grad, self.base, self.key)
            twin.site = self
            twin.parents = self.parents
            twin.returned = self.returned
            twin._twin = twin
            self._twin = twin
        return self._twin

    @property
    def whole(self) -> Origin:
        """What this is an item of, or an item of an item of; itself where it is none."""
        origin = self
        while origin.base is not None:
            origin = origin.base
        return origin

    @property
    def old(self) -> bool:
        """Whether this is the place in an earlier iteration."""
        return self.site is not self

    def child(self, key: str, node: cst.CSTNode) -> Origin:
        """The origin of the element or attribute `key` of this one (`.loss`, `[0]`, `["loss"]`)."""
        if self.old:
            return self.site.child(key, node).twin
        child = self.children.get(key)
        if child is None:
            child = Origin(node, Source.ITEM, self.label + key, self.loops, self.grad, self, key)
            self.children[key] = child
        return child

    def __repr__(self) -> str:
        return f"<{self.source.name} {self.label}{' (earlier)' if self.old else ''}>"


EMPTY: frozenset[Any] = frozenset()


class Value(NamedTuple):
    """What an expression holds at one point of the program.

    graph: the origins whose graph (or, for a container, contents) it keeps.
    direct: it *is* one of these origins, rather than computed from them; attributes and items of it are tracked.
    via: the stores that it was read back from.
    terms: the origins that are summed in it.
    divided: it has been divided, or scaled by something that may be a division.
    info: what is known beside: the qualified name of a reference, the class of an instance, a constant.
    spared: it only has a graph on paths on which no backward ran; on the others it was detached.
    """

    kind: Kind = Kind.UNKNOWN
    graph: frozenset[Origin] = EMPTY
    direct: bool = False
    via: frozenset[Store] = EMPTY
    terms: frozenset[Origin] = EMPTY
    divided: bool = False
    info: Any = None
    spared: bool = False

    @property
    def objects(self) -> frozenset[Origin]:
        """The origins that this value is, where it is one."""
        return self.graph if self.direct else EMPTY

    def derived(self, kind: Kind | None = None) -> Value:
        """A value computed from this one: the same graph, but no longer the thing itself."""
        if kind is None:
            kind = Kind.UNKNOWN if self.kind in _NAMED else self.kind
        return self._replace(kind=kind, direct=False, info=None)

    @property
    def qualified(self) -> str:
        """The qualified name of a reference, or of the class of a known instance; otherwise empty."""
        return self.info if isinstance(self.info, str) and self.kind is not Kind.NUMBER else ""


class Method(NamedTuple):
    """A method bound to a receiver."""

    receiver: Value
    name: str
    function: FunctionInfo | None


class Instance(NamedTuple):
    """The class of an instance of a class of this file."""

    cls: ClassInfo


UNKNOWN = Value()
NUMBER = Value(Kind.NUMBER)
NONE = Value(Kind.NONE)
#: kinds that mean nothing without their info
_NAMED = {Kind.REFERENCE, Kind.FUNCTION, Kind.CLASS, Kind.METHOD}
#: what can hold no graph whatever happens to it
PLAIN = {Kind.NUMBER, Kind.NONE, Kind.GRAD_MODE}


def constant(value: object) -> Value:
    """The value of a literal."""
    return Value(Kind.NUMBER, info=("const", value))


def known_constant(value: Value) -> object:
    """The Python constant that a value is, or Ellipsis where it is none that is known."""
    if value.kind is Kind.NONE:
        return None
    if isinstance(value.info, tuple) and len(value.info) == 2 and value.info[0] == "const":
        return value.info[1]
    return ...


def of(origin: Origin, kind: Kind = Kind.UNKNOWN, info: Any = None, via: frozenset[Store] = EMPTY) -> Value:
    """The value that is exactly `origin`."""
    only = frozenset((origin,))
    return Value(kind, only, True, via, only, False, info)


def join(a: Value, b: Value) -> Value:
    """What holds where two paths meet: everything that may hold on either."""
    if a == b:
        return a
    if Kind.GRAD_MODE in (a.kind, b.kind) and a.kind is not b.kind:
        return Value(Kind.GRAD_MODE, info=Grad.MAYBE)
    # None is what people bind before the first iteration: it says nothing about what comes later
    if a.kind is Kind.NONE or b.kind is Kind.NONE:
        one = b if a.kind is Kind.NONE else a
        return one if one.kind is not Kind.NUMBER else Value(Kind.NUMBER)
    if a.kind is b.kind:
        kind = a.kind
    elif a.kind in PLAIN and not a.graph:
        kind = b.kind if b.kind in (Kind.TENSOR, Kind.CONTAINER) else Kind.UNKNOWN
    elif b.kind in PLAIN and not b.graph:
        kind = a.kind if a.kind in (Kind.TENSOR, Kind.CONTAINER) else Kind.UNKNOWN
    else:
        kind = Kind.UNKNOWN
    info = a.info if a.info == b.info else None
    if info is None and kind in _NAMED:
        kind = Kind.UNKNOWN
    elif info is None and kind is Kind.GRAD_MODE:
        info = Grad.MAYBE
    direct = (a.direct or not a.graph) and (b.direct or not b.graph) and bool(a.graph or b.graph)
    return Value(
        kind,
        a.graph | b.graph,
        direct,
        a.via | b.via,
        a.terms | b.terms,
        a.divided or b.divided,
        info,
    )


def combine(values: list[Value], kind: Kind = Kind.UNKNOWN) -> Value:
    """The value computed from all of `values`: it keeps the graphs of each."""
    graph: frozenset[Origin] = EMPTY
    via: frozenset[Store] = EMPTY
    terms: frozenset[Origin] = EMPTY
    divided = False
    for value in values:
        graph |= value.graph
        via |= value.via
        terms |= value.terms
        divided = divided or value.divided
    return Value(kind, graph, False, via, terms, divided)
