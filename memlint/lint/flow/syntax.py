"""Questions about expressions that need no state."""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import libcst as cst

from memlint.lint.flow import knowledge as know
from memlint.lint.imports import dotted


@functools.lru_cache(maxsize=4096)
def literal(text: str) -> Any:
    """The value of a string or number in the source; the same few come again and again."""
    return ast.literal_eval(text)


def place(node: cst.BaseExpression) -> str:
    """A text that is the same for two expressions that name the same place, or empty for anything else.

    Names, attributes, and subscripts whose index is itself a place or a literal: `self.sums[k + 1]`, `out["loss"]`.
    """
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        base = place(node.value)
        return f"{base}.{node.attr.value}" if base else ""
    if isinstance(node, cst.Subscript):
        base = place(node.value)
        keys = [index(element) for element in node.slice]
        return f"{base}[{','.join(keys)}]" if base and all(keys) else ""
    return ""


def index(element: cst.SubscriptElement) -> str:
    """The text of a subscript that is an index, not a slice."""
    return expression(element.slice.value) if isinstance(element.slice, cst.Index) else ""


def expression(node: cst.BaseExpression) -> str:
    """A text for simple expressions (places, literals, arithmetic on them), empty for others."""
    if isinstance(node, (cst.Integer, cst.Float)):
        return node.value
    if isinstance(node, cst.SimpleString):
        return repr(node.evaluated_value)
    if isinstance(node, cst.BinaryOperation):
        left, right = expression(node.left), expression(node.right)
        return f"({left}{type(node.operator).__name__}{right})" if left and right else ""
    if isinstance(node, cst.UnaryOperation):
        inner = expression(node.expression)
        return f"{type(node.operator).__name__}{inner}" if inner else ""
    if isinstance(node, cst.Tuple):
        parts = [expression(element.value) for element in node.elements]
        return f"({','.join(parts)})" if all(parts) else ""
    return place(node)


def walk(node: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """An expression and the expressions in it, displays and comprehensions excepted.

    libcst's own `children` builds each list by running a visitor, which is too slow for every test in a file.
    """
    stack: list[cst.BaseExpression] = [node]
    while stack:
        item = stack.pop()
        yield item
        if isinstance(item, cst.Attribute):
            stack.append(item.value)
        elif isinstance(item, (cst.BinaryOperation, cst.BooleanOperation)):
            stack += (item.right, item.left)
        elif isinstance(item, cst.Call):
            stack += [arg.value for arg in item.args]
            stack.append(item.func)
        elif isinstance(item, cst.Comparison):
            stack += [target.comparator for target in item.comparisons]
            stack.append(item.left)
        elif isinstance(item, cst.UnaryOperation):
            stack.append(item.expression)
        elif isinstance(item, cst.Subscript):
            stack += [e.slice.value for e in item.slice if isinstance(e.slice, cst.Index)]
            stack.append(item.value)
        elif isinstance(item, cst.IfExp):
            stack += (item.orelse, item.body, item.test)
        elif isinstance(item, (cst.Tuple, cst.List)):
            stack += [element.value for element in item.elements]


def names_in(node: cst.BaseExpression) -> Iterator[str]:
    """All names that an expression mentions, attributes by their last part."""
    for item in walk(node):
        if isinstance(item, cst.Name):
            yield item.value
        elif isinstance(item, cst.Attribute):
            yield item.attr.value


def is_periodic(test: cst.BaseExpression) -> bool:
    """Whether a test is true once in a while: `step % n == 0`, `accelerator.sync_gradients`, `is_last_micro_step`."""
    if isinstance(test, cst.Name) and know.WINDOW_NAME.search(test.value):
        return True
    for item in walk(test):
        if isinstance(item, cst.BinaryOperation) and isinstance(item.operator, cst.Modulo):
            return not isinstance(item.left, (cst.SimpleString, cst.FormattedString))
        if isinstance(item, cst.Attribute) and item.attr.value in (
            "sync_gradients",
            "is_gradient_accumulation_boundary",
        ):
            return True
    return False


def modulus(test: cst.BaseExpression) -> cst.BaseExpression | None:
    """The `n` of a test on `x % n`."""
    for item in walk(test):
        if isinstance(item, cst.BinaryOperation) and isinstance(item.operator, cst.Modulo):
            return item.right
    return None


def reads(node: cst.BaseExpression, target: str) -> bool:
    """Whether an operand of a sum is (a multiple of) what `target` holds, graph and all."""
    if place(node) == target:
        return True
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, (cst.Multiply, cst.Divide)):
        return reads(node.left, target) or reads(node.right, target)
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        method = node.func.attr.value
        if method == "get" and node.args:  # totals.get(k, 0)
            key = expression(node.args[0].value)
            return bool(key) and f"{place(node.func.value)}[{key}]" == target
        return method in know.TRANSPARENT_METHODS and reads(node.func.value, target)
    return False


def addends(node: cst.BaseExpression, target: str) -> list[cst.BaseExpression] | None:
    """What `target = node` adds to the old value of `target`; None where the old value does not stay in the sum."""
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, (cst.Add, cst.Subtract)):
        for side, other in ((node.left, node.right), (node.right, node.left)):
            if reads(side, target):
                return [other]
            inner = addends(side, target)
            if inner is not None:
                return [*inner, other]
        return None
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, (cst.Multiply, cst.Divide)):
        return addends(node.left, target) or addends(node.right, target)
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        method = node.func.attr.value
        if method in ("add", "sub", "lerp") and node.args:
            if reads(node.func.value, target):
                return [node.args[0].value]
            if dotted(node.func.value) == "torch" and len(node.args) > 1:
                for mine, rest in ((0, 1), (1, 0)):
                    if reads(node.args[mine].value, target):
                        return [node.args[rest].value]
        elif method in know.TRANSPARENT_METHODS:
            return addends(node.func.value, target)
    return None


@functools.cache
def _child_fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    """The fields of a node type that may hold code: not whitespace, punctuation or comments."""
    skipped = ("whitespace", "leading_lines", "lines_after", "lpar", "rpar", "comma", "header", "footer", "semicolon")
    return tuple(field.name for field in dataclasses.fields(kind) if not field.name.startswith(skipped))


def nodes(root: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """All nodes of code below and including `root`, in the order of the text."""
    stack = [root]
    while stack:
        item = stack.pop()
        yield item
        below: list[cst.CSTNode] = []
        for name in _child_fields(type(item)):
            value = getattr(item, name)
            if isinstance(value, cst.CSTNode):
                below.append(value)
            elif isinstance(value, (tuple, list)):
                below += [part for part in value if isinstance(part, cst.CSTNode)]
        stack += reversed(below)


def holds(root: cst.CSTNode, node: cst.CSTNode) -> bool:
    """Whether `node` is `root` or stands below it."""
    return any(each is node for each in nodes(root))


#: what a flag is called that says whether a function is called in training
_TRAINING_FLAGS = frozenset(("training", "is_training", "train_mode", "is_train"))


def runs_in_eval_mode(test: cst.BaseExpression, taken: bool) -> bool:
    """Whether a branch runs only in eval mode: `if not self.training`, the `else` of `if module.training`."""
    while isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        test, taken = test.expression, not taken
    if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And) is taken:
        return runs_in_eval_mode(test.left, taken) or runs_in_eval_mode(test.right, taken)
    if isinstance(test, cst.Name):
        return test.value in _TRAINING_FLAGS and not taken
    return isinstance(test, cst.Attribute) and test.attr.value in _TRAINING_FLAGS and not taken
