"""ML601: workers that copy the Python objects of a Dataset."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow.facts import CallEvent
from memlint.lint.flow.index import ClassInfo, FunctionInfo
from memlint.lint.flow.syntax import nodes
from memlint.lint.imports import dotted
from memlint.lint.model import Severity
from memlint.rules.base import Draft, Rule
from memlint.rules.loaders import is_torch_dataset, surely_loaded_by, workers
from memlint.rules.training import assignments, body_of

_READERS = frozenset(
    """
    json.load json.loads pickle.load pickle.loads yaml.safe_load yaml.load dill.load joblib.load orjson.loads ujson.load
    """.split()
)
#: what the elements of arrays and tensors are asked for, too
_ARRAY_ATTRIBUTES = frozenset(
    "shape dtype size copy astype float long to clone unsqueeze reshape view numpy mean max min sum T values".split()
)


class WorkerCopiesObjects(Rule):
    """A Dataset keeps many Python objects, and workers read them.

    A forked worker shares the memory of its parent until one of them writes, and reading a Python object writes: its
    reference count. Page by page every worker gets its own copy of the lists, dicts and strings that it touches, so
    host memory grows during the first epochs up to the size of the objects times the number of workers (pytorch issue
    13246). Nothing in the file tells how large they are: with small data it does no harm, so this is a note.

    Arrays are right: a numpy array, a tensor, an Arrow table or a pandas column of numbers is one object, whatever its
    size.

    Keep the objects as bytes: serialise each one into one numpy byte array with an array of offsets, and unpickle it in
    `__getitem__`; or read them from disk (a memory map, LMDB, Arrow).
    """

    code, name, severity = "ML601", "worker-copies-objects", Severity.NOTE
    triggers = ("num_workers",)
    bad = """
import json
from torch.utils.data import DataLoader, Dataset

class Captions(Dataset):
    def __init__(self, path):
        with open(path) as file:
            self.rows = [json.loads(line) for line in file]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]["text"]

def loader(path):
    return DataLoader(Captions(path), batch_size=32, num_workers=8)
"""
    good = bad.replace("num_workers=8", "num_workers=0")

    def check(self, flow: Flow) -> Iterator[Draft]:
        for cls in flow.index.classes.values():
            reader, maker = cls.methods.get("__getitem__"), cls.methods.get("__init__")
            if reader is None or maker is None or not is_torch_dataset(cls):
                continue
            loader = next((call for call in surely_loaded_by(flow, cls) if workers(call) not in (0, None)), None)
            if loader is not None:
                yield from self.attributes(flow, cls, maker, reader, loader)

    def attributes(
        self, flow: Flow, cls: ClassInfo, maker: FunctionInfo, reader: FunctionInfo, loader: CallEvent
    ) -> Iterator[Draft]:
        """The attributes that hold objects and are read by the workers."""
        seen: set[str] = set()
        for assigned in assignments(body_of(maker.node)):
            path = dotted(assigned.target)
            if not path.startswith("self.") or path.count(".") != 1 or path in seen:
                continue
            if "dataset" in path:
                continue  # it wraps another one
            elements = elements_of(reader.node, path)
            if not elements or is_array(flow, assigned.value):
                continue
            if read_from_text(flow, assigned.value) or objects(reader.node, elements):
                seen.add(path)
                yield self.draft(cls, assigned.target, path, loader)

    def draft(self, cls: ClassInfo, node: cst.BaseExpression, path: str, loader: CallEvent) -> Draft:
        """The finding."""
        message = (
            f"`{path}` holds Python objects that the workers of `{cls.name}` read: each read changes a reference "
            "count, so every worker ends up with its own copy of all of them. If they are many, keep them as bytes in "
            "one numpy array (with offsets), or on disk."
        )
        return self.finding(node, message, related=[(loader.node, "the workers are started for this loader")])


def elements_of(reader: cst.CSTNode, path: str) -> list[cst.Subscript]:
    """The places where a method takes an element of an attribute."""
    return [
        node
        for node in nodes(reader)
        if isinstance(node, cst.Subscript)
        and dotted(node.value) == path
        and len(node.slice) == 1
        and isinstance(node.slice[0].slice, cst.Index)
    ]


def is_array(flow: Flow, value: cst.BaseExpression) -> bool:
    """Whether an expression is made by numpy, torch or pandas: one object, not many."""
    name = flow.qualify(dotted(value.func)) if isinstance(value, cst.Call) else ""
    return name.split(".")[0] in ("numpy", "torch", "pandas", "pyarrow", "h5py", "zarr", "datasets")


def objects(reader: cst.CSTNode, elements: list[cst.Subscript]) -> bool:
    """Whether elements are used as objects: by an attribute, or by a text key."""
    taken = {id(element) for element in elements}
    names = {
        assigned.target.value
        for assigned in assignments(body_of(reader))
        if id(assigned.value) in taken and isinstance(assigned.target, cst.Name)
    }

    def is_element(node: cst.BaseExpression) -> bool:
        return id(node) in taken or (isinstance(node, cst.Name) and node.value in names)

    for node in nodes(reader):
        if isinstance(node, cst.Attribute) and is_element(node.value) and node.attr.value not in _ARRAY_ATTRIBUTES:
            return True
        if isinstance(node, cst.Subscript) and is_element(node.value):
            key = node.slice[0].slice
            if isinstance(key, cst.Index) and isinstance(key.value, cst.SimpleString):
                return True
    return False


def read_from_text(flow: Flow, value: cst.BaseExpression) -> bool:
    """Whether an expression is what a reader of objects gives, or a display of that."""
    if isinstance(value, (cst.ListComp, cst.DictComp)):
        value = value.elt if isinstance(value, cst.ListComp) else value.value
    return isinstance(value, cst.Call) and flow.qualify(dotted(value.func)) in _READERS
