"""Runs one function abstractly: branches are joined, loops run to a fixpoint."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from memlint.lint.flow import frameworks
from memlint.lint.flow import knowledge as know
from memlint.lint.flow.calls import Calls
from memlint.lint.flow.expressions import ANY, made_by_call
from memlint.lint.flow.facts import (
    BackwardKind,
    Division,
    Guard,
    Life,
    Loop,
    Region,
    Store,
    StoreKind,
)
from memlint.lint.flow.index import statements
from memlint.lint.flow.state import State, merge
from memlint.lint.flow.syntax import addends, expression, is_periodic, names_in, place, walk
from memlint.lint.flow.values import (
    EMPTY,
    NONE,
    NUMBER,
    UNKNOWN,
    Grad,
    Instance,
    Kind,
    Source,
    Value,
    combine,
    join,
    known_constant,
    of,
)
from memlint.lint.imports import bindings, canonical, dotted

#: passes over a loop body at most, by nesting depth; a third pass only refines what the second found
_PASSES = (4, 3, 3, 2)


class _Exits:
    """The states in which a loop is left or continued early."""

    def __init__(self) -> None:
        self.breaks: State | None = None
        self.continues: State | None = None


class Interpreter(Calls):
    """Executes statements. After `run`, the flow's function record holds all that happened."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.exits: list[_Exits] = []
        self.dead = False
        self.returned: Value | None = None
        #: what early returns of odd values give
        self.given_up: Value | None = None
        self.return_state: State | None = None
        self.raised = False

    # -- running ---------------------------------------------------------------------------------------------------

    def block(self, body: Sequence[cst.CSTNode]) -> None:
        """Execute statements until the end is no longer reachable."""
        for statement in body:
            if self.dead:
                return
            self.statement(statement)

    def suite(self, node: cst.CSTNode, state: State) -> State | None:
        """Execute a block from `state`; None if its end is not reached."""
        self.state, self.dead = state, False
        self.block(statements(node))
        return None if self.dead else self.state

    def resume(self, state: State | None) -> None:
        """Go on from `state`."""
        self.dead = state is None
        if state is not None:
            self.state = state

    def statement(self, node: cst.CSTNode) -> None:
        """Execute one statement."""
        if isinstance(node, cst.SimpleStatementLine):
            for small in node.body:
                if not self.dead:
                    self.small(small)
        elif isinstance(node, cst.If):
            self.if_(node)
        elif isinstance(node, cst.For):
            self.for_(node)
        elif isinstance(node, cst.While):
            self.while_(node)
        elif isinstance(node, cst.With):
            self.with_(node)
        elif isinstance(node, (cst.Try, cst.TryStar)):
            self.try_(node)
        elif isinstance(node, cst.FunctionDef):
            self.define(node)
        elif isinstance(node, cst.ClassDef):
            self.class_(node)
        elif isinstance(node, cst.Match):
            self.match(node)

    def define(self, node: cst.FunctionDef) -> None:
        """A nested function sees the names of this one."""
        info = self.flow.function_at(node, node.name.value, self.function.index)
        if not self.function.is_module or info.closure is not None:
            info.closure = self.visible()
        decorated = [self.ev(decorator) for decorator in info.decorators] if not self.function.is_module else []
        del decorated
        if not self.function.is_module:
            self.bind_name(node.name.value, Value(Kind.FUNCTION, info=info))

    def class_(self, node: cst.ClassDef) -> None:
        """A class statement binds its name."""
        info = self.function.index.classes.get(node.name.value)
        if info is not None and not self.function.is_module:
            for method in info.methods.values():
                method.closure = self.visible()
            self.bind_name(node.name.value, Value(Kind.CLASS, info=info))

    # -- branches --------------------------------------------------------------------------------------------------

    def if_(self, node: cst.If) -> None:
        """Both branches from the same state, joined after."""
        test = self.ev(node.test)
        decided = known_constant(test)
        before = self.state
        periodic = is_periodic(node.test)
        yes = no = None
        if decided is ... or decided:
            with self.within(Guard(node, node.test, True, periodic)):
                state = before.copy()
                self.narrow(state, node.test, True)
                yes = self.suite(node.body, state)
        if decided is ... or not decided:
            with self.within(Guard(node, node.test, False, periodic)):
                state = before.copy() if yes is None or yes is not before else before
                self.narrow(state, node.test, False)
                if isinstance(node.orelse, cst.If):
                    self.state, self.dead = state, False
                    self.if_(node.orelse)
                    no = None if self.dead else self.state
                elif node.orelse is not None:
                    no = self.suite(node.orelse.body, state)
                else:
                    no = state
        self.resume(merge(yes, no))

    def narrow(self, state: State, test: cst.BaseExpression, truth: bool) -> None:
        """What a test says about the names in it: `isinstance(x, Tensor)`, `x is None`, `x.requires_grad`."""
        if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
            self.narrow(state, test.expression, not truth)
        elif isinstance(test, cst.BooleanOperation):
            if isinstance(test.operator, cst.And) is truth:
                self.narrow(state, test.left, truth)
                self.narrow(state, test.right, truth)
        elif isinstance(test, cst.Call) and test.args and isinstance(test.args[0].value, cst.Name):
            name = test.args[0].value.value
            callee = dotted(test.func)
            if callee == "isinstance" and len(test.args) > 1:
                types = expression(test.args[1].value)
                if types.rsplit(".", 1)[-1] in ("Tensor", "Variable"):
                    if not truth:
                        state.names[name] = NUMBER
                elif truth and set(types.strip("()").split(",")) <= {"int", "float", "str", "bool"} and types:
                    state.names[name] = NUMBER
            elif callee == "callable" and truth:
                state.names[name] = UNKNOWN
            elif callee in ("torch.is_tensor", "is_tensor") and not truth:
                state.names[name] = NUMBER
            elif callee == "hasattr" and len(test.args) > 1 and not truth:
                if expression(test.args[1].value) in ("'item'", "'detach'", "'data'", "'requires_grad'", "'cpu'"):
                    state.names[name] = NUMBER
        elif isinstance(test, cst.Attribute) and test.attr.value == "requires_grad" and not truth:
            if isinstance(test.value, cst.Name):
                state.names[test.value.value] = Value(Kind.TENSOR)
        elif isinstance(test, cst.Call) and dotted(test.func) == "torch.is_grad_enabled" and not test.args:
            state.grad = Grad.ON if truth else Grad.OFF

    def match(self, node: cst.Match) -> None:
        """Each case from the same state."""
        self.ev(node.subject)
        before, after = self.state, self.state
        for case in node.cases:
            end = self.suite(case.body, before.copy())
            merged = merge(after, end)
            assert merged is not None
            after = merged
        self.resume(after)

    # -- loops -----------------------------------------------------------------------------------------------------

    def for_(self, node: cst.For) -> None:
        """A for loop."""
        loop = self.flow.loop_at(node)
        loop.count = isinstance(node.iter, cst.Call) and dotted(node.iter.func) in (
            "range",
            "trange",
            "itertools.count",
        )
        self.loop(loop, node.body, node.orelse, lambda: self.bind_iteration(node.target, node.iter, loop))

    def while_(self, node: cst.While) -> None:
        """A while loop."""
        loop = self.flow.loop_at(node)
        loop.count = True
        endless = known_constant(self.ev(node.test)) not in (..., None, False, 0)
        self.loop(loop, node.body, node.orelse, lambda: self.ev(node.test), endless=endless)

    def loop(self, loop: Loop, body: cst.BaseSuite, orelse: cst.Else | None, begin, *, endless: bool = False) -> None:  # type: ignore[no-untyped-def]
        """Run a loop body until nothing new is learnt."""
        self.flow.enter_loop(self.function, loop, self.loops)
        entry = self.state
        head = entry
        after: State | None = None
        for _ in range(_PASSES[min(len(self.loops), len(_PASSES) - 1)]):
            exits = _Exits()
            self.exits.append(exits)
            self.state, self.dead = head.copy(), False
            begin()
            with self.within(loop):
                end = self.suite(body, self.state)
            self.exits.pop()
            back = merge(end, exits.continues)
            new_head = merge(entry, back.age(loop)) if back is not None else entry
            assert new_head is not None
            after = exits.breaks if endless else merge(new_head, exits.breaks)
            if new_head.same(head):
                break
            head = new_head
        if orelse is not None and after is not None:
            after = merge(self.suite(orelse.body, after), exits.breaks)
        self.resume(after)

    # -- with and try ----------------------------------------------------------------------------------------------

    def with_(self, node: cst.With) -> None:
        """A with block: it may switch autograd."""
        before = self.state.grad
        managers: list[str] = []
        values: list[Value] = []
        for item in node.items:
            value = self.ev(item.item)
            callee = item.item.func if isinstance(item.item, cst.Call) else item.item
            text = dotted(callee)
            managers.append(text)
            values.append(value)
            if value.kind is Kind.GRAD_MODE:
                self.state.grad = value.info if isinstance(value.info, Grad) else Grad.MAYBE
            elif (know.MAYBE_OFF.search(text) and value.kind is not Kind.NUMBER) or self.enters_off(value):
                self.state.grad = Grad.MAYBE
            if item.asname is not None:
                bound = value if value.kind is not Kind.GRAD_MODE else NONE
                self.assign(item.asname.name, bound, None)
        with self.within(Region(node, "with", tuple(managers), tuple(values))):
            end = self.suite(node.body, self.state)
        if end is not None:
            end.grad = before
        self.resume(end)

    @staticmethod
    def enters_off(value: Value) -> bool:
        """Whether a context manager of a known class speaks of grad modes."""
        cls = value.info.cls if isinstance(value.info, Instance) else None
        enter = cls.method("__enter__") if cls is not None else None
        return enter is not None and enter.speaks_of_modes

    def try_(self, node: cst.Try | cst.TryStar) -> None:
        """A try statement: a handler may start from any point of the body."""
        before = self.state.copy()
        with self.within(Region(node, "try")):
            end = self.suite(node.body, self.state)
        middle = merge(before, end)
        assert middle is not None
        after = end
        if node.orelse is not None and end is not None:
            after = self.suite(node.orelse.body, end)
        for handler in node.handlers:
            state = middle.copy()
            if handler.name is not None and isinstance(handler.name.name, cst.Name):
                state.names[handler.name.name.value] = of(
                    self.flow.origin_at(handler, Source.ITEM, "exception", "exception", self.loops, state.grad)
                )
            with self.within(Region(handler, "handler")):
                after = merge(after, self.suite(handler.body, state))
        if node.finalbody is not None:
            start = merge(after, middle.copy()) if after is None else after
            assert start is not None
            with self.within(Region(node, "finally")):
                end = self.suite(node.finalbody.body, start)
            after = None if after is None else end
        self.resume(after)

    # -- small statements ------------------------------------------------------------------------------------------

    def small(self, node: cst.BaseSmallStatement) -> None:
        """Execute a simple statement."""
        if isinstance(node, cst.Expr):
            value = self.ev(node.value)
            if (call := self.function.calls.get(id(node.value))) is not None:
                call.discarded = True
            if value.kind is Kind.GRAD_MODE and isinstance(node.value, cst.Call):
                if dotted(node.value.func).endswith("set_grad_enabled"):
                    self.state.grad = value.info
                    if value.info is not Grad.ON and not self.function.is_module and not self.function.foreign:
                        self.flow.switches_grad = True
        elif isinstance(node, cst.Assign):
            self.assignment(node)
        elif isinstance(node, cst.AnnAssign):
            if node.value is not None:
                self.rebind(node, node.target, node.value)
        elif isinstance(node, cst.AugAssign):
            self.augmented(node)
        elif isinstance(node, cst.Return):
            self.return_(node)
        elif isinstance(node, cst.Raise):
            if node.exc is not None:
                self.ev(node.exc)
            self.dead = True
        elif isinstance(node, (cst.Break, cst.Continue)):
            if self.exits:
                exits = self.exits[-1]
                if isinstance(node, cst.Break):
                    exits.breaks = merge(exits.breaks, self.state)
                else:
                    exits.continues = merge(exits.continues, self.state)
            self.dead = True
        elif isinstance(node, cst.Del):
            self.delete(node.target)
        elif isinstance(node, cst.Assert):
            self.ev(node.test)
            self.narrow(self.state, node.test, True)
        elif isinstance(node, (cst.Import, cst.ImportFrom)):
            for local, full in bindings(node):
                self.bind_name(local, Value(Kind.REFERENCE, info=canonical(full)))

    def return_(self, node: cst.Return) -> None:
        """A return hands its value to the caller."""
        value = self.ev(node.value) if node.value is not None else NONE
        self.function.returns[id(node)] = (node, value, self.path)
        for store in self.vias(value):
            store.returned = True
        if frameworks.sums_result(self.function) and node.value is not None and value.graph:
            running = cst.Name("Trainer")
            self.store(StoreKind.ACCUMULATE, node, node.value, running, UNKNOWN, value, helper="tr_loss")
        if frameworks.backwards_result(self.function):
            loss = value
            if value.kind is Kind.CONTAINER:
                loss = self.field(value, "['loss']", node)
            if loss.graph:
                self.backward(BackwardKind.FRAMEWORK, node, loss, (), "", node.value)
        if self.gives_up(node):
            self.given_up = value if self.given_up is None else join(self.given_up, value)
        else:
            self.returned = value if self.returned is None else join(self.returned, value)
        merged = merge(self.return_state, self.state)
        self.return_state = merged
        self.dead = True

    def gives_up(self, node: cst.Return) -> bool:
        """`if loss == 0: return loss`, `if not loss.isfinite(): return loss`: a way out for odd values."""
        frame = self.path[-1] if self.path else None
        if not isinstance(node.value, cst.Name) or not isinstance(frame, Guard) or not frame.taken:
            return False
        test = frame.test.expression if isinstance(frame.test, cst.UnaryOperation) else frame.test
        if isinstance(test, cst.Comparison):
            number = isinstance(test.comparisons[0].comparator, (cst.Integer, cst.Float))
            return number and isinstance(test.left, cst.Name) and test.left.value == node.value.value
        odd = isinstance(test, cst.Call) and dotted(test.func).rsplit(".", 1)[-1] in ("isnan", "isinf", "isfinite")
        return odd and node.value.value in names_in(test)

    def delete(self, target: cst.BaseDelTargetExpression) -> None:
        """`del x`, `del x[:]`, `del x[i]`."""
        if isinstance(target, cst.Name):
            self.state.names.pop(target.value, None)
        elif isinstance(target, cst.Subscript):
            base = self.ev(target.value)
            if any(isinstance(element.slice, cst.Slice) for element in target.slice):
                for origin in base.objects:
                    self.state.clear(origin)
        elif isinstance(target, cst.Tuple):
            for element in target.elements:
                if isinstance(element.value, (cst.Name, cst.Subscript)):
                    self.delete(element.value)

    # -- assignments -----------------------------------------------------------------------------------------------

    def assignment(self, node: cst.Assign) -> None:
        """`a = b = value`."""
        if len(node.targets) == 1:
            self.rebind(node, node.targets[0].target, node.value)
            return
        value = self.ev(node.value)
        for target in node.targets:
            self.assign(target.target, value, node.value)

    def rebind(self, node: cst.CSTNode, target: cst.BaseExpression, value_node: cst.BaseExpression) -> None:
        """`target = value`, which may be a running sum in disguise."""
        where = place(target) if isinstance(target, (cst.Name, cst.Attribute, cst.Subscript)) else ""
        if where and isinstance(value_node, cst.IfExp):
            self.rebind_conditional(node, target, value_node, where)
            return
        value = self.ev(value_node)
        if where and (value.graph or value.via):
            kept = self.running(node, target, where, value_node, value)
            if kept is value and isinstance(target, cst.Name):
                self.bound_plainly(target, value_node, value)
            value = kept
        self.assign(target, value, value_node)

    def bound_plainly(self, target: cst.Name, value_node: cst.BaseExpression, value: Value) -> None:
        """Remember a plain binding of a name: a running value may start there."""
        found = self.function.bindings.setdefault(target.value, {})
        found[id(value_node)] = (value_node, self.path, value)

    def rebind_conditional(
        self, node: cst.CSTNode, target: cst.BaseExpression, value_node: cst.IfExp, where: str
    ) -> None:
        """`total = loss if total is None else total + loss`: each branch is an assignment of its own."""
        self.ev(value_node.test)
        results = []
        summed = False
        for branch in (value_node.body, value_node.orelse):
            value = self.ev(branch)
            kept = self.running(node, target, where, branch, value)
            summed = summed or kept is not value
            if kept is value and isinstance(target, cst.Name):
                self.bound_plainly(target, branch, value)
            results.append(kept)
        self.assign(target, join(results[0], results[1]), None if summed else value_node)

    def running(
        self,
        node: cst.CSTNode,
        target: cst.BaseExpression,
        where: str,
        value_node: cst.BaseExpression,
        value: Value,
    ) -> Value:
        """If `target = value` adds to what target holds, or concatenates to it, record the store."""
        if not value.graph and not value.via:
            return value
        parts = addends(value_node, where)
        kind = StoreKind.ACCUMULATE
        if parts is None:
            parts = self.concatenated_parts(value_node, where)
            kind = StoreKind.CONCATENATE
        if not parts:
            return value
        old = self.ev(target)
        if old.kind is Kind.CONTAINER and kind is StoreKind.ACCUMULATE:
            kind = StoreKind.COLLECT
        if self.state.grad is Grad.OFF and kind is not StoreKind.COLLECT:
            return Value(Kind.TENSOR, via=value.via)
        for part in parts:
            content, spread = self.ev(part), False
            if kind is StoreKind.COLLECT and content.kind is Kind.CONTAINER:
                content = self.iterate(content, part)._replace(via=self.vias(content))
                part, spread = only_element(part)
            kept = self.store(kind, node, part, target, old, content, spread=spread, rebinds=True)
            value = value._replace(via=value.via | kept.via)
        return value

    def concatenated_parts(self, node: cst.BaseExpression, where: str) -> list[cst.BaseExpression] | None:
        """The other parts of `torch.cat([where, ...])`."""
        if not isinstance(node, cst.Call) or not node.args:
            return None
        name = dotted(node.func)
        if name.rsplit(".", 1)[-1] not in ("cat", "concat", "concatenate", "stack", "hstack", "vstack"):
            return None
        given = node.args[0].value
        if not isinstance(given, (cst.Tuple, cst.List)):
            return None
        elements = [element.value for element in given.elements]
        if not any(place(element) == where for element in elements):
            return None
        return [element for element in elements if place(element) != where]

    def augmented(self, node: cst.AugAssign) -> None:
        """`target += value` and its kin."""
        target, operator = node.target, node.operator
        old = self.ev(target)
        added = self.ev(node.value)
        if isinstance(target, cst.Subscript) and self.ev(target.value).kind is Kind.NUMBER:
            self.proved_plain(added)  # an array of numpy takes no tensor that requires grad
            return
        adds = isinstance(operator, (cst.AddAssign, cst.SubtractAssign))
        divided = isinstance(operator, cst.DivideAssign) or (
            isinstance(operator, cst.MultiplyAssign) and known_constant(added) is ...
        )
        if not adds:
            if isinstance(operator, cst.DivideAssign) and old.graph:
                self.function.divisions[id(node)] = Division(node, node.value, old, self.path)
            if ".grad" in (text := dotted(target)) and text.endswith(("grad", "grad.data")):
                self.function.scales_grad = True
            if not old.graph and not added.graph:
                kind = Kind.NUMBER if old.kind is Kind.NUMBER and added.kind in PLAIN_KINDS else old.kind
                result = Value(kind, via=old.via, divided=old.divided or divided)
            else:
                result = combine([old, added], Kind.TENSOR if Kind.TENSOR in (old.kind, added.kind) else Kind.UNKNOWN)
                result = result._replace(divided=old.divided or divided, terms=old.terms)
            self.assign(target, result, None, keep_bound=True)
            return
        if old.kind is Kind.CONTAINER or added.kind is Kind.CONTAINER:
            self.extended(node, old, added)
            return
        if not added.graph:
            kind = NUMBER.kind if added.kind in PLAIN_KINDS and old.kind in PLAIN_KINDS else old.kind
            self.assign(target, old._replace(kind=kind, direct=False, info=None), None, keep_bound=True)
            return
        result = combine([old, added], Kind.TENSOR if Kind.TENSOR in (old.kind, added.kind) else Kind.UNKNOWN)
        result = result._replace(
            divided=added.divided and (old.divided or old.kind in PLAIN_KINDS or not old.graph),
            terms=old.terms | added.terms,
        )
        if self.state.grad is Grad.OFF:
            result = Value(Kind.TENSOR, via=old.via | added.via)
        else:
            kept = self.store(StoreKind.ACCUMULATE, node, node.value, target, old, added)
            result = result._replace(via=old.via | kept.via)
        self.assign(target, result, None, keep_bound=True)

    def extended(self, node: cst.AugAssign, old: Value, added: Value) -> None:
        """`list += [x]`."""
        content = added
        value_node, spread = only_element(node.value)
        if added.kind is Kind.CONTAINER:
            content = self.iterate(added, node.value)._replace(via=self.vias(added))
        holders = old.objects
        if isinstance(node.value, cst.Tuple) and isinstance(node.target, cst.Name) and old.kind is not Kind.CONTAINER:
            # what a tuple is added to is one: the name is bound to a new tuple, whoever handed in the old one
            old, holders = old._replace(graph=EMPTY, direct=False), EMPTY
        kept = self.store(StoreKind.COLLECT, node, value_node, node.target, old, content, spread=spread)
        for holder in holders:
            self.state.put(holder, ANY, kept, weak=True)
        if not holders and isinstance(node.target, cst.Name):
            self.assign(node.target, old._replace(via=old.via | kept.via), None, keep_bound=True)

    def assign(
        self,
        target: cst.BaseExpression,
        value: Value,
        node: cst.BaseExpression | None,
        keep_bound: bool = False,
    ) -> None:
        """Bind `value` to a target of any form."""
        if isinstance(target, cst.Name):
            self.state.names[target.value] = value
            if not keep_bound:
                self.state.bound[target.value] = frozenset((self.loops,))
        elif isinstance(target, (cst.Tuple, cst.List)):
            self.unpack(target, value)
        elif isinstance(target, cst.StarredElement):
            self.assign(target.value, value.derived(), None)
        elif isinstance(target, cst.Attribute):
            self.assign_attribute(target, value, node)
        elif isinstance(target, cst.Subscript):
            self.assign_item(target, value, node)

    def bind_name(self, name: str, value: Value) -> None:
        """Bind a name by definition or import."""
        self.state.names[name] = value
        self.state.bound[name] = frozenset((self.loops,))

    def unpack(self, target: cst.Tuple | cst.List, value: Value) -> None:
        """`a, b = value`."""
        starred = any(isinstance(element, cst.StarredElement) for element in target.elements)
        for place_, element in enumerate(target.elements):
            if starred:
                part = self.iterate(value, element)
                self.assign(element.value, part, None)
            elif value.kind is Kind.TENSOR or (value.graph and not value.direct):
                self.assign(element.value, value.derived(), None)
            else:
                node = element.value if isinstance(element.value, cst.Attribute) else None
                self.assign(element.value, self.field(value, f"[{place_}]", element.value), node)

    def assign_attribute(self, target: cst.Attribute, value: Value, node: cst.BaseExpression | None) -> None:
        """`base.attr = value`."""
        base = self.ev(target.value)
        attr = target.attr.value
        if attr == "requires_grad":
            flag = known_constant(value)
            if flag is False:
                self.freeze(base, dotted(target.value))
            elif flag is True or base.kind is not Kind.MODULE:
                self.function.asks_grad = True  # or may do so
                if flag is True and isinstance(target.value, cst.Name) and base.graph and made_by_calls(base):
                    # torch refuses this on anything but a leaf: what made it recorded no graph
                    leaf = of(self.origin(target, Source.LEAF, target.value.value), Kind.TENSOR)
                    self.assign(target.value, leaf, None)
            return
        if attr == "grad" and value.kind is Kind.NONE:
            self.function.clears_grad = True
        if attr in ("data", "grad"):
            return
        for origin in base.objects:
            self.state.put(origin, f".{attr}", value, weak=len(base.objects) > 1)
        self.placed(target, value, node)

    def assign_item(self, target: cst.Subscript, value: Value, node: cst.BaseExpression | None) -> None:
        """`base[key] = value`."""
        base = self.ev(target.value)
        if base.kind is Kind.NUMBER:
            self.proved_plain(value)  # an array of numpy takes no tensor that requires grad
            return
        keys = [self.ev(e.slice.value) for e in target.slice if isinstance(e.slice, cst.Index)]
        sliced = len(keys) != len(target.slice) or len(keys) != 1
        key = "[?]" if sliced else self.key_of(target, keys[0])
        kept = value
        if node is not None and (value.graph or value.via):
            kept = self.kept_item(target, base, keys, key, value, node)
        for origin in base.objects:
            if key in ("[?]", "[-1]"):
                self.state.put(origin, ANY, kept, weak=True)
            else:
                self.state.put(origin, key, kept, weak=len(base.objects) > 1)
        if base.kind is Kind.TENSOR and isinstance(target.value, cst.Name):
            self.assign(target.value, combine([base, kept], Kind.TENSOR), None, keep_bound=True)

    def kept_item(
        self,
        target: cst.Subscript,
        base: Value,
        keys: list[Value],
        key: str,
        value: Value,
        node: cst.BaseExpression,
    ) -> Value:
        """`base[key] = value` keeps value; it collects where the key is another one in each iteration."""
        kind = StoreKind.ASSIGN
        loops = self.loops
        if base.kind is Kind.TENSOR:
            kind = StoreKind.UPDATE
        elif key == "[?]" and loops and keys:
            fresh = {origin for held in keys for origin in held.graph if origin.loops[-1:] == loops[-1:]}
            if fresh or self.counts(target):
                kind = StoreKind.COLLECT
        kept = self.store(kind, target, node, target.value, base, value)
        if kind is StoreKind.COLLECT:
            for store in kept.via - value.via:
                store.keyed = True
                store.across = loops[-1] if store.across is not None else None
        return kept

    @staticmethod
    def key_names(target: cst.Subscript) -> set[str]:
        """The names in a subscript's index."""
        found: set[str] = set()
        for element in target.slice:
            if isinstance(element.slice, cst.Index):
                found |= {item.value for item in walk(element.slice.value) if isinstance(item, cst.Name)}
        return found

    def counts(self, target: cst.Subscript) -> bool:
        """Whether the index of a subscript is bound in the innermost loop."""
        loops = self.loops
        for name in self.key_names(target):
            places = self.state.bound.get(name, frozenset())
            if loops and any(loops[-1] in around for around in places):
                return True
        return False

    def placed(self, target: cst.Attribute, value: Value, node: cst.BaseExpression | None) -> None:
        """An attribute keeps what is assigned to it: until the next assignment."""
        if node is None or not (value.graph or value.via):
            return
        via = self.vias(value)
        for store in via:
            store.passed = True
        if any(origin.source is not Source.ALLOC for origin in value.graph):
            self.store(StoreKind.ASSIGN, target, node, target, self.ev(target.value), value)


def made_by_calls(value: Value) -> bool:
    """Whether all that a value keeps came from calls."""
    return all(made_by_call(origin) for origin in value.graph)


def only_element(node: cst.BaseExpression) -> tuple[cst.BaseExpression, bool]:
    """The element of a display of one (and False), or the expression itself: its elements are meant (and True)."""
    if isinstance(node, (cst.List, cst.Tuple)) and len(node.elements) == 1:
        element = node.elements[0]
        if not isinstance(element, cst.StarredElement):
            return element.value, False
    return node, True


PLAIN_KINDS = (Kind.NUMBER, Kind.NONE)

__all__ = ["EMPTY", "Interpreter", "Life", "Store"]
