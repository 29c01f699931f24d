"""What the flow model tells the rules: loops, stores, backwards, optimizer calls, in the order of the code."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import libcst as cst

if TYPE_CHECKING:
    from memlint.lint.flow.index import ClassInfo, FunctionInfo, ModuleIndex
    from memlint.lint.flow.values import Grad, Origin, Value


class Loop:
    """A loop, or the body of a comprehension."""

    __slots__ = ("count", "module", "node", "over")

    def __init__(self, node: cst.CSTNode, module: cst.Module) -> None:
        self.node = node
        self.module = module
        #: what is iterated over (for loops only)
        self.over: Value | None = None
        #: whether the loop counts (`range(...)`, `while`)
        self.count = False

    @property
    def written_down(self) -> bool:
        """Whether it runs over the elements of a display: a few things that are told one by one, no data."""
        return isinstance(self.node, cst.For) and isinstance(self.node.iter, (cst.List, cst.Tuple, cst.Set, cst.Dict))

    @property
    def over_text(self) -> str:
        """The source of what is iterated over, or of the condition."""
        node = self.node.test if isinstance(self.node, cst.While) else getattr(self.node, "iter", self.node)
        return " ".join(self.module.code_for_node(node).split())

    def __repr__(self) -> str:
        return f"<Loop {self.over_text}>"


@dataclass(frozen=True, slots=True, eq=False)
class Guard:
    """A branch of an `if`: what stands in it runs only where `test` is true (or false)."""

    node: cst.If | cst.IfExp
    test: cst.BaseExpression
    taken: bool
    #: the guard decides on a remainder (`step % n == 0`) or on the end of a window (`sync_gradients`)
    periodic: bool


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A `with` block or a part of a `try` statement."""

    node: cst.CSTNode
    #: "with", "try", "handler", "else", "finally"
    part: str
    #: for `with`: the text of the context managers' callees
    managers: tuple[str, ...] = ()
    values: tuple[Value, ...] = ()


Frame = Loop | Guard | Region
Path = tuple[Frame, ...]


def loops_of(path: Path) -> tuple[Loop, ...]:
    """The loops around a place, outermost first."""
    return tuple(frame for frame in path if isinstance(frame, Loop))


def inside(path: Path, loop: Loop | None) -> Path:
    """The part of a path within `loop` (the whole path for None)."""
    return path if loop is None else path[path.index(loop) + 1 :]


def runs_in(path: Path, loop: Loop | None) -> bool:
    """Whether a place is within `loop`; None stands for the loop of whoever calls the function."""
    return loop is None or loop in path


class StoreKind(enum.Enum):
    """How a value is kept."""

    ACCUMULATE = "added to a running value"
    COLLECT = "put into a container"
    CONCATENATE = "concatenated to what is already there"
    UPDATE = "written in place into a tensor that stays"
    ASSIGN = "bound to a place"


class Life(enum.Enum):
    """Where the holder of a stored value lives."""

    ITERATION = "made anew in the iteration of the store"
    LOOP = "made outside the loop"
    SELF = "an attribute of self"
    OUTER = "a global, or something that the file does not bind"
    PARAM = "handed in by the caller"
    CALL = "a local of a call that does not loop here"


@dataclass(slots=True, eq=False)
class Leaf:
    """One thing that a stored value keeps: an origin, and the keys of it that were replaced by something harmless."""

    origin: Origin
    replaced: frozenset[str]


@dataclass(slots=True, eq=False)
class Store:
    """A value put where it outlives the expression.

    One object a place in the code, updated while the loops around it are run to their fixpoint.
    """

    kind: StoreKind
    node: cst.CSTNode
    #: the expression of what is kept (where a `.detach()` would go)
    expression: cst.BaseExpression
    holder_text: str
    function: FunctionFlow
    path: Path = ()
    value: Value = None  # type: ignore[assignment]
    leaves: tuple[Leaf, ...] = ()
    life: Life = Life.CALL
    #: the outermost loop whose iterations the holder outlives, where there is one
    across: Loop | None = None
    #: where the holder was made
    holder_node: cst.CSTNode | None = None
    holders: frozenset[Origin] = frozenset()
    #: graphs that a backward had freed when the store ran
    consumed: frozenset[Origin] = frozenset()
    #: graphs that a backward may have freed: on some path
    maybe_consumed: frozenset[Origin] = frozenset()
    grad: Grad = None  # type: ignore[assignment]
    bounded: bool = False
    #: put under a key that each iteration of the innermost loop chooses
    keyed: bool = False
    order: int = 0
    #: the elements of the expression are put in, not the thing itself (`extend`, `+=`)
    spread: bool = False
    #: the callee that keeps the value, where a helper or a meter does
    helper: str = ""
    # what becomes of it
    needed: bool = False
    returned: bool = False
    yielded: bool = False
    passed: bool = False
    as_number: bool = False
    #: numpy takes it, so it cannot require grad
    plain: bool = False
    flows_to: set[Store] = field(default_factory=set)

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The loops around the store."""
        return loops_of(self.path)

    @property
    def tensor(self) -> bool:
        """Whether the expression may be one tensor: not what holds tensors, or is opened for its elements."""
        held = self.value
        return (
            not self.spread
            and held.kind.value != "container"
            and all(o.source.value != "container" for o in held.graph)
        )


class BackwardKind(enum.Enum):
    """Who runs the backward pass."""

    TENSOR = "Tensor.backward"
    AUTOGRAD = "torch.autograd.backward"
    GRAD = "torch.autograd.grad"
    ACCELERATOR = "Accelerator.backward"
    FABRIC = "Fabric.backward"
    ENGINE = "engine.backward"
    MANUAL = "manual_backward"
    FRAMEWORK = "the framework, on the value returned"
    HELPER = "a function that is called"


@dataclass(slots=True, eq=False)
class Backward:
    """A backward pass."""

    kind: BackwardKind
    node: cst.Call | cst.Return
    root: cst.BaseExpression | None
    function: FunctionFlow
    path: Path = ()
    value: Value = None  # type: ignore[assignment]
    retain: cst.Arg | None = None
    create: cst.Arg | None = None
    retains: bool | None = False
    creates: bool | None = False
    #: all origins in the graph below the root
    reach: frozenset[Origin] = frozenset()
    receiver_text: str = ""
    order: int = 0

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The loops around the call."""
        return loops_of(self.path)


class OptimizerCall(enum.Enum):
    """What is done to an optimizer."""

    STEP = "step"
    ZERO_GRAD = "zero_grad"


@dataclass(slots=True, eq=False)
class OptimizerEvent:
    """`optimizer.step()`, `scaler.step(optimizer)`, `optimizer.zero_grad()`, `model.zero_grad()`."""

    what: OptimizerCall
    node: cst.Call
    receiver_text: str
    receiver: Value
    function: FunctionFlow
    path: Path = ()
    order: int = 0

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The loops around the call."""
        return loops_of(self.path)


@dataclass(slots=True, eq=False)
class CallEvent:
    """Any call."""

    node: cst.Call
    #: qualified name where an import or a class of the file tells, otherwise empty
    qualified: str
    #: dotted text as written, otherwise empty
    text: str
    callee: Value
    result: Value
    args: tuple[Value, ...]
    function: FunctionFlow
    path: Path
    grad: Grad
    #: mode of the module that is called (`eval`, `train`, or empty)
    mode: str = ""
    #: the function that runs, where its code is known
    target: FunctionInfo | None = None
    order: int = 0
    #: the call is a statement of its own: nothing takes its result
    discarded: bool = False

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The loops around the call."""
        return loops_of(self.path)


@dataclass(slots=True, eq=False)
class Division:
    """A tensor divided by something."""

    node: cst.CSTNode
    divisor: cst.BaseExpression
    divided: Value
    path: Path


@dataclass(slots=True, eq=False)
class FunctionFlow:
    """All that happens in one function (or at the top of the module)."""

    info: FunctionInfo | None
    node: cst.CSTNode
    name: str
    cls: ClassInfo | None
    #: grad mode at entry, from decorators
    grad: Grad
    #: the module that it stands in
    index: ModuleIndex
    stores: list[Store] = field(default_factory=list)
    backwards: list[Backward] = field(default_factory=list)
    optimizer: list[OptimizerEvent] = field(default_factory=list)
    calls: dict[int, CallEvent] = field(default_factory=dict)
    returns: dict[int, tuple[cst.Return, Value, Path]] = field(default_factory=dict)
    #: dotted paths on which `.eval()` / `.train()` is called
    evals: dict[str, cst.Call] = field(default_factory=dict)
    trains: set[str] = field(default_factory=set)
    #: what names and attributes held where they stand: by place
    seen: dict[int, Value] = field(default_factory=dict)
    #: divisions of values that may carry a graph, by place
    divisions: dict[int, Division] = field(default_factory=dict)
    #: autograd at each `yield`, by place
    yields: dict[int, Grad] = field(default_factory=dict)
    #: plain assignments to names: by name, then by place
    bindings: dict[str, dict[int, tuple[cst.BaseExpression, Path, Value]]] = field(default_factory=dict)
    #: it asks for gradients itself: autograd.grad, requires_grad_()
    asks_grad: bool = False
    #: it divides or scales `.grad` by hand
    scales_grad: bool = False
    #: it sets `.grad` to None
    clears_grad: bool = False
    #: modules whose parameters it switches off
    frozen: set[str] = field(default_factory=set)
    loops: list[Loop] = field(default_factory=list)
    #: the loops that each loop is nested in
    parents: dict[Loop, Loop | None] = field(default_factory=dict)
    children: list[FunctionFlow] = field(default_factory=list)

    @property
    def is_module(self) -> bool:
        """Whether this is the top of the module."""
        return self.info is None

    @property
    def is_forward(self) -> bool:
        """Whether it is the forward pass of a class: part of a model, which others train."""
        return self.name == "forward" and self.cls is not None

    @property
    def foreign(self) -> bool:
        """Whether it stands in another file than the one that is judged."""
        return self.index.hops > 0
