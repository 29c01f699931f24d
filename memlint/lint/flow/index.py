"""A first look over a file: its functions, classes and imports, and the places that it empties.

This walks statements only, never into expressions, so that it costs a small part of the parse.
"""

from __future__ import annotations

import builtins
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import libcst as cst

from memlint.lint.flow import knowledge as know
from memlint.lint.flow.syntax import names_in
from memlint.lint.imports import CONVENTIONS, bindings, canonical, dotted, module_of
from memlint.lint.modules import MOST_STARS

if TYPE_CHECKING:
    from memlint.lint.flow.facts import FunctionFlow
    from memlint.lint.flow.summary import Summary
    from memlint.lint.flow.values import Origin, Value


#: what switches autograd, by name
_MODES = re.compile(r"\b(?:no_grad|inference_mode|set_grad_enabled|_set_grad_enabled)\b")


#: annotations of numbers and strings
_PLAIN_TYPES = frozenset("int float bool str None Optional Union List Tuple Sequence list tuple typing tp".split())
#: what makes numbers, tensors, and modules without parameters
_UNTRAINED = re.compile(
    r"""^(?:int|float|bool|str|list|tuple|len|range|min|max|abs|round)$|^math\.
    |^torch\.(?:tensor|zeros|ones|full|arange|linspace|eye|hann_window|hamming_window|device|Size)$
    |^torchaudio\.transforms\.|^torchvision\.transforms\.
    |^torch\.nn\.\w*Loss$""",
    re.X,
)

_REGISTERS = re.compile(r"register_parameter|register_module|add_module|setattr|__dict__")

#: where bases come from that drive nothing
_PLAIN_BASES = frozenset(("torch", "abc", "typing", "object", "ABC", "Generic", "Protocol", "nn"))


class FunctionInfo:
    """A function of this file, or of another one of the project that this file uses."""

    def __init__(
        self, node: cst.FunctionDef | cst.Lambda, name: str, cls: ClassInfo | None, index: ModuleIndex
    ) -> None:
        self.node = node
        self.name = name
        self.cls = cls
        #: the module that defines it
        self.index = index
        self.flow: FunctionFlow | None = None
        self.summary: Summary | None = None
        self.running = False
        self.params: dict[str, Origin] = {}
        #: what the enclosing function's names hold, for closures
        self.closure: dict[str, Value] | None = None
        self.decorators: tuple[cst.BaseExpression, ...] = (
            tuple(d.decorator for d in node.decorators) if isinstance(node, cst.FunctionDef) else ()
        )
        names = {dotted(d.func if isinstance(d, cst.Call) else d) for d in self.decorators}
        self.static = "staticmethod" in names
        self.of_class = "classmethod" in names or name in ("__new__", "__init_subclass__", "__class_getitem__")
        self.property = bool(names & {"property", "functools.cached_property", "cached_property"})
        self.context_manager = any(name.endswith("contextmanager") for name in names)
        self.generator = False
        #: an engine of Ignite runs it for each batch
        self.process = False

    @property
    def parameters(self) -> list[cst.Param]:
        """All parameters in order, without `*args` and `**kwargs`."""
        params = self.node.params
        return [*params.posonly_params, *params.params, *params.kwonly_params]

    @functools.cached_property
    def speaks_of_modes(self) -> bool:
        """Whether its code names one of torch's grad modes."""
        return bool(_MODES.search(self.index.module.code_for_node(self.node)))

    @functools.cached_property
    def abstract(self) -> bool:
        """Whether it is a method that is there to be overridden: what it returns is not told by its code."""
        if self.cls is None or not isinstance(self.node, cst.FunctionDef):
            return False
        if any(dotted(d).rsplit(".", 1)[-1] == "abstractmethod" for d in self.decorators):
            return True
        body = [
            small
            for part in self.node.body.body
            for small in (part.body if isinstance(part, cst.SimpleStatementLine) else (part,))
        ]
        return isinstance(body[-1], cst.Raise) and all(
            isinstance(part, cst.Pass | cst.Raise)
            or (isinstance(part, cst.Expr) and isinstance(part.value, cst.BaseString | cst.Ellipsis))
            for part in body
        )

    @property
    def bound(self) -> bool:
        """Whether the first parameter is the receiver."""
        return self.cls is not None and not self.static


class ClassInfo:
    """A class of this file, or of another one of the project that this file uses."""

    def __init__(self, node: cst.ClassDef, index: ModuleIndex) -> None:
        self.node = node
        self.name = node.name.value
        #: the module that defines it
        self.index = index
        self.bases: list[str] = []
        self.methods: dict[str, FunctionInfo] = {}
        #: what methods assign to attributes of self: the expressions, by attribute
        self.assigned: dict[str, list[cst.BaseExpression]] = {}
        self.buffers: set[str] = set()
        self._parents: list[ClassInfo] | None = None
        self._unknown = False

    @property
    def parents(self) -> list[ClassInfo]:
        """The bases whose code is known, in this file or another one of the project. Looked up when first asked."""
        if self._parents is None:
            self._parents = []  # while they are looked up: a class is not its own base
            found = {name: self._base(name) for name in self.bases}
            self._parents = [cls for cls in found.values() if cls is not None and cls is not self]
            self._unknown = any(cls is None and name.split(".")[0] not in _PLAIN_BASES for name, cls in found.items())
        return self._parents

    def _base(self, name: str) -> ClassInfo | None:
        own = self.index.classes
        return own[name] if name in own else self.index.linked_class(name)

    @property
    def has_unknown_base(self) -> bool:
        """Whether it builds on a class whose code is not known, those of torch and Python aside."""
        return any(cls._unknown for cls in list(self.ancestry()))

    def ancestry(self) -> Iterator[ClassInfo]:
        """This class and its bases, nearest first."""
        seen: set[int] = set()
        stack = [self]
        while stack:
            cls = stack.pop(0)
            if id(cls) not in seen:
                seen.add(id(cls))
                yield cls
                stack += cls.parents

    def method(self, name: str) -> FunctionInfo | None:
        """The method `name`, here or in a base class."""
        for cls in self.ancestry():
            if name in cls.methods:
                return cls.methods[name]
        return None

    def base_names(self) -> Iterator[str]:
        """Qualified names of all bases."""
        for cls in self.ancestry():
            yield from cls.bases

    @property
    def is_module(self) -> bool:
        """Whether it is an nn.Module, by its own bases or those of its bases."""
        return any(
            name.rsplit(".", 1)[-1] in ("Module", "LightningModule", "PreTrainedModel") or name.startswith("torch.nn.")
            for name in self.base_names()
        )

    @functools.cached_property
    def has_no_parameters(self) -> bool:
        """Whether it is a module whose code says that nothing in it is trained: a metric, a spectrogram."""
        if not self.is_module or self.has_unknown_base:
            return False
        for cls in self.ancestry():
            if any(name.rsplit(".", 1)[-1] not in ("Module", "ABC") for name in cls.bases if "." in name):
                return False
            plain = {
                param.name.value
                for method in cls.methods.values()
                for param in method.parameters
                if param.annotation is not None and set(names_in(param.annotation.annotation)) <= _PLAIN_TYPES
            }
            if not all(cls.index.untrained(value, plain) for values in cls.assigned.values() for value in values):
                return False
            if _REGISTERS.search(cls.index.module.code_for_node(cls.node)):
                return False
        return True

    @property
    def is_lightning(self) -> bool:
        """Whether Lightning drives it."""
        return any(name.rsplit(".", 1)[-1] in ("LightningModule",) for name in self.base_names())

    @property
    def optimizes_by_hand(self) -> bool:
        """Whether it switches Lightning's automatic optimization off."""
        return (
            any(
                not (isinstance(value, cst.Name) and value.value == "True")
                for cls in self.ancestry()
                for value in cls.assigned.get("automatic_optimization", [])
            )
            or self.method("automatic_optimization") is not None
        )

    @property
    def is_callback(self) -> bool:
        """Whether it is a callback."""
        return any(name.rsplit(".", 1)[-1] == "Callback" for name in self.base_names())

    @property
    def is_autograd_function(self) -> bool:
        """Whether it is a torch.autograd.Function."""
        return not self.is_module and any(
            name.endswith("autograd.Function") or name == "Function" for name in self.base_names()
        )


Link = Callable[["ModuleIndex", str], "FunctionInfo | ClassInfo | None"]


class ModuleIndex:
    """What a file defines, or, of another file of the project, the part that is used.

    path: the file. hops: how many imports away from the file that is judged (0 for that file itself). link: what finds
    a qualified name in other files of the project; None where the file stands alone.
    """

    def __init__(self, module: cst.Module, path: str = "", hops: int = 0, link: Link | None = None) -> None:
        self.module = module
        self.path = path
        self.hops = hops
        self._link = link
        #: what the names at the top hold, once the statements there have run
        self.names: dict[str, Value] = {}
        self.imports: dict[str, str] = {}
        #: modules of which all names are imported
        self.stars: list[str] = []
        self.functions: dict[str, FunctionInfo] = {}
        self.classes: dict[str, ClassInfo] = {}
        self.by_node: dict[int, FunctionInfo] = {}
        self.all_functions: list[FunctionInfo] = []
        #: dotted paths that are emptied somewhere: `x.clear()`, `del x[:]`, `self.x = []`
        self.emptied: dict[str, list[cst.CSTNode]] = {}
        #: dotted paths that are detached somewhere: `self.memory.detach_()`, `self.state = self.state.detach()`
        self.detached: set[str] = set()
        #: names that the module assigns at its top level
        self.globals: set[str] = set()
        self._scan(module.body, None, None, top=True)
        for cls in self.classes.values():
            cls.bases = [
                self.imports.get(name.split(".")[0], name.split(".")[0]) + name[len(name.split(".")[0]) :]
                for name in cls.bases
            ]

    def untrained(self, node: cst.BaseExpression, plain: set[str]) -> bool:
        """Whether an expression makes nothing that has parameters. plain: names of numbers and strings."""
        if isinstance(node, cst.Name):
            return node.value in plain or node.value in ("None", "True", "False") or node.value.isupper()
        if isinstance(node, cst.Call):
            head, _, rest = dotted(node.func).partition(".")
            found = self.imports.get(head) or CONVENTIONS.get(head, head)
            full = canonical(f"{found}.{rest}" if rest else found)
            plain_call = bool(_UNTRAINED.search(full) or know.PLAIN_MODULE.match(full))
            return plain_call and all(self.untrained(arg.value, plain) for arg in node.args)
        if isinstance(node, cst.Attribute):
            return dotted(node).startswith(("self.", "math.", "torch."))
        if isinstance(node, cst.BinaryOperation):
            return self.untrained(node.left, plain) and self.untrained(node.right, plain)
        if isinstance(node, cst.UnaryOperation):
            return self.untrained(node.expression, plain)
        if isinstance(node, (cst.Tuple, cst.List)):
            return all(self.untrained(element.value, plain) for element in node.elements)
        return isinstance(node, (cst.BaseNumber, cst.BaseString))

    @functools.cached_property
    def code(self) -> str:
        """The text of the module."""
        return self.module.code

    def __contains__(self, name: str) -> bool:
        """Whether a function or class of this name stands at the top."""
        return name in self.functions or name in self.classes

    def definition(self, names: tuple[str, ...]) -> FunctionInfo | ClassInfo | None:
        """The function, class or static method of a dotted name."""
        if len(names) == 1:
            return self.functions.get(names[0]) or self.classes.get(names[0])
        cls = self.classes.get(names[0])
        method = cls.method(names[1]) if cls is not None and len(names) == 2 else None
        return method if method is not None and (method.static or method.of_class) else None

    def linked(self, name: str) -> FunctionInfo | ClassInfo | None:
        """The function or class of another file of the project that `name` stands for here."""
        return self._link(self, name) if self._link is not None else None

    def from_a_star(self, name: str) -> FunctionInfo | ClassInfo | None:
        """What `name` stands for if one of the `from x import *` brings it."""
        if len(self.stars) > MOST_STARS or hasattr(builtins, name):
            return None
        for star in self.stars:
            found = self.linked(f"{star}{name}" if star.endswith(".") else f"{star}.{name}")
            if found is not None:
                return found
        return None

    def linked_class(self, name: str) -> ClassInfo | None:
        """The class of another file of the project that `name` stands for here."""
        found = self.linked(name)
        return found if isinstance(found, ClassInfo) else None

    def _scan(
        self,
        body: Sequence[cst.CSTNode],
        cls: ClassInfo | None,
        function: FunctionInfo | None,
        *,
        top: bool,
    ) -> None:
        for statement in body:
            if isinstance(statement, cst.SimpleStatementLine):
                for small in statement.body:
                    self._small(small, cls, function, top)
            elif isinstance(statement, cst.FunctionDef):
                self._function(statement, cls, function, top)
            elif isinstance(statement, cst.ClassDef):
                self._class(statement, top)
            else:
                for block in blocks(statement):
                    self._scan(block, cls, function, top=top)

    def _function(self, node: cst.FunctionDef, cls: ClassInfo | None, outer: FunctionInfo | None, top: bool) -> None:
        info = FunctionInfo(node, node.name.value, cls if outer is None else None, self)
        self.by_node[id(node)] = info
        self.all_functions.append(info)
        if outer is None:
            if cls is not None:
                cls.methods[info.name] = info
            elif top:
                self.functions[info.name] = info
        # within a method, `self` still means the class
        self._scan(statements(node.body), cls, info, top=False)

    def _class(self, node: cst.ClassDef, top: bool) -> None:
        cls = ClassInfo(node, self)
        cls.bases = [name for arg in node.bases if (name := dotted(_unsubscripted(arg.value)))]
        self.classes.setdefault(cls.name, cls)
        self._scan(statements(node.body), cls, None, top=False)

    def _small(
        self, node: cst.BaseSmallStatement, cls: ClassInfo | None, function: FunctionInfo | None, top: bool
    ) -> None:
        if isinstance(node, (cst.Import, cst.ImportFrom)):
            if function is None:
                self.imports.update(bindings(node))
                if isinstance(node, cst.ImportFrom) and isinstance(node.names, cst.ImportStar):
                    self.stars.append(module_of(node))
        elif isinstance(node, cst.Assign):
            for target in node.targets:
                self._assigned(target.target, node.value, cls, function, top)
        elif isinstance(node, cst.AnnAssign):
            if node.value is not None:
                self._assigned(node.target, node.value, cls, function, top)
        elif isinstance(node, cst.Expr):
            self._call(node.value, cls)
        elif isinstance(node, cst.Del):
            deleted = node.target
            if isinstance(deleted, cst.Subscript) and (path := dotted(deleted.value)):
                if any(isinstance(e.slice, cst.Slice) for e in deleted.slice):
                    self.emptied.setdefault(path, []).append(node)
            elif path := dotted(deleted):
                self.emptied.setdefault(path, []).append(node)

    def _assigned(
        self,
        target: cst.BaseExpression,
        value: cst.BaseExpression,
        cls: ClassInfo | None,
        function: FunctionInfo | None,
        top: bool,
    ) -> None:
        if isinstance(target, (cst.Tuple, cst.List)):
            values: list[cst.BaseExpression | None] = [None] * len(target.elements)
            if isinstance(value, (cst.Tuple, cst.List)) and len(value.elements) == len(values):
                values = [element.value for element in value.elements]
            for element, part in zip(target.elements, values, strict=True):
                if part is not None:
                    self._assigned(element.value, part, cls, function, top)
                elif top and isinstance(element.value, cst.Name):
                    self.globals.add(element.value.value)
                elif cls is not None and (path := dotted(element.value)).startswith("self."):
                    cls.assigned.setdefault(path[5:], []).append(value)
            return
        path = dotted(target)
        if not path:
            return
        if top and "." not in path:
            self.globals.add(path)
        if cls is not None and function is not None and path.startswith("self.") and path.count(".") == 1:
            cls.assigned.setdefault(path[5:], []).append(value)
        if isinstance(value, cst.Call) and isinstance(value.func, cst.Attribute) and value.func.attr.value == "detach":
            if dotted(value.func.value) == path:
                self.detached.add(path)
        if is_empty_container(value) and "." in path and not (function is not None and function.name == "__init__"):
            self.emptied.setdefault(path, []).append(target)

    def _call(self, node: cst.BaseExpression, cls: ClassInfo | None) -> None:
        if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
            return
        method = node.func.attr.value
        if method == "detach_" and (path := dotted(_unsubscripted(node.func.value))):
            self.detached.add(path)
        elif method == "clear" and (path := dotted(node.func.value)):
            self.emptied.setdefault(path, []).append(node)
        elif method == "register_buffer" and cls is not None and node.args:
            name = node.args[0].value
            if isinstance(name, cst.SimpleString) and isinstance(name.evaluated_value, str):
                cls.buffers.add(name.evaluated_value)


def _unsubscripted(node: cst.BaseExpression) -> cst.BaseExpression:
    return node.value if isinstance(node, cst.Subscript) else node


def is_empty_container(node: cst.BaseExpression) -> bool:
    """Whether an expression makes an empty container, or drops one (None)."""
    if isinstance(node, (cst.List, cst.Tuple)):
        return not node.elements
    if isinstance(node, cst.Dict):
        return not node.elements
    if isinstance(node, cst.Call):
        return not node.args and dotted(node.func).rsplit(".", 1)[-1] in (
            "list",
            "dict",
            "set",
            "deque",
            "OrderedDict",
            "defaultdict",
        )
    return isinstance(node, cst.Name) and node.value == "None"


def statements(body: cst.CSTNode) -> Sequence[cst.CSTNode]:
    """The statements of a block; those of a one-line suite are wrapped as one line."""
    if isinstance(body, cst.IndentedBlock):
        return body.body
    if isinstance(body, cst.SimpleStatementSuite):
        return (cst.SimpleStatementLine(body=body.body),)
    return ()


def blocks(node: cst.CSTNode) -> Iterator[Sequence[cst.CSTNode]]:
    """The blocks of a compound statement that is not a definition."""
    body = getattr(node, "body", None)
    if isinstance(body, cst.BaseSuite):
        yield statements(body)
    for name in ("orelse", "finalbody"):
        part = getattr(node, name, None)
        if isinstance(part, cst.If):
            yield (part,)
        elif part is not None:
            yield statements(part.body)
    for handler in getattr(node, "handlers", ()):
        yield statements(handler.body)
    for case in getattr(node, "cases", ()):
        yield statements(case.body)


def small_statements(
    body: Sequence[cst.CSTNode], but: tuple[type[cst.CSTNode], ...] = ()
) -> Iterator[cst.BaseSmallStatement]:
    """The simple statements of a block and of the blocks in it, in order; definitions and `but` are not entered."""
    for statement in body:
        if isinstance(statement, cst.SimpleStatementLine):
            yield from statement.body
        elif not isinstance(statement, (cst.FunctionDef, cst.ClassDef, *but)):
            for block in blocks(statement):
                yield from small_statements(block, but)
