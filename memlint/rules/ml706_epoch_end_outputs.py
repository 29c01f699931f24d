"""ML706: Lightning's epoch-end hooks keep what every step returned."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from memlint.lint.flow import Flow
from memlint.lint.flow.index import ClassInfo, FunctionInfo
from memlint.lint.flow.values import Kind, Source, Value
from memlint.lint.model import Severity
from memlint.rules import wording
from memlint.rules.base import Draft, Rule

#: each hook of Lightning 1.x that gets `outputs`, and the steps whose results these are
_HOOKS = {
    "training_epoch_end": ("training_step_end", "training_step"),
    "validation_epoch_end": ("validation_step_end", "validation_step"),
    "test_epoch_end": ("test_step_end", "test_step"),
}


#: entries of a result that are numbers, whoever computes them
_NUMBERS = re.compile(r"loss|acc|metric|score|count|num|size", re.I)


class EpochEndOutputs(Rule):
    """A Lightning `*_epoch_end(outputs)` hook makes Lightning keep what every step returned.

    Where the hook is there, Lightning 1.x collects the results of all steps of the epoch: detached, but on the device
    they were made on (pytorch-lightning 1.2.10, trainer/training_loop.py, `track_epoch_end_reduce_metrics`; it moves
    them to the CPU only under `move_metrics_to_cpu`). With scalars that is little. With logits, predictions or images
    in the result it grows by a batch of them each step, until the epoch ends. Lightning 2.0 removed the hooks for that
    reason (pull request 16520) and raises if they are there.

    It is right for scalar results (a note), and where a metric needs all predictions at once; then move them to the CPU
    in the step.

    Compute the metric as you go (torchmetrics' `update` and `compute`), or return only the loss and use
    `on_*_epoch_end()` without outputs.
    """

    code, name, severity = "ML706", "epoch-end-outputs", Severity.WARNING
    triggers = tuple(f"def {name}" for name in _HOOKS)
    bad = """
import pytorch_lightning as pl
import torch.nn.functional as F

class Model(pl.LightningModule):
    def training_step(self, batch, index):
        logits = self.net(batch["image"])
        loss = F.cross_entropy(logits, batch["label"])
        return {"loss": loss, "logits": logits, "labels": batch["label"]}

    def training_epoch_end(self, outputs):
        self.log("accuracy", sum((o["logits"].argmax(1) == o["labels"]).float().mean() for o in outputs))
"""
    good = """
import pytorch_lightning as pl
import torch.nn.functional as F

class Model(pl.LightningModule):
    def training_step(self, batch, index):
        logits = self.net(batch["image"])
        self.accuracy.update(logits.argmax(1), batch["label"])
        return F.cross_entropy(logits, batch["label"])

    def on_train_epoch_end(self):
        self.log("accuracy", self.accuracy.compute())
        self.accuracy.reset()
"""

    def check(self, flow: Flow) -> Iterator[Draft]:
        for cls in flow.index.classes.values():
            if not cls.is_lightning:
                continue
            for name, steps in _HOOKS.items():
                hook = cls.methods.get(name)
                if hook is not None and len(hook.parameters) == 2:
                    yield self.draft(flow, cls, hook, steps)

    def draft(self, flow: Flow, cls: ClassInfo, hook: FunctionInfo, steps: tuple[str, ...]) -> Draft:
        """The finding on one hook."""
        step = next((found for name in steps if (found := cls.method(name)) is not None), None)
        big = self.whole_batches(step) if step is not None else ""
        assert isinstance(hook.node, cst.FunctionDef)
        if big and step is not None:
            message = (
                f"`{hook.name}` makes Lightning keep what every `{step.name}` returns until the epoch ends, on the "
                f"device: {big} grows by a batch each step. Use a metric that is updated step by step, or move it to "
                "the CPU in the step (the hook is gone in Lightning 2.0)."
            )
            return self.finding(hook.node.name, message, related=[(step.node, "this is kept for every batch")])
        message = (
            f"`{hook.name}(outputs)` makes Lightning keep what every step returns until the epoch ends. Scalars are "
            "little; return nothing else. The hook is gone in Lightning 2.0: use a metric and the on_*_epoch_end hooks."
        )
        return self.finding(hook.node.name, message, severity=Severity.NOTE)

    @staticmethod
    def whole_batches(step: FunctionInfo) -> str:
        """The entry of a step's result that is as large as a batch: an output of a model, or a part of the batch."""
        summary = step.summary
        if summary is None or step.name.endswith("_end"):  # what it is given is a result, of any size
            return ""
        value = summary.returns
        if value.kind is not Kind.CONTAINER:
            return ""
        for origin in value.objects:
            for key, content in summary.fields.get(origin, {}).items():
                if key.startswith("['") and not _NUMBERS.search(key) and is_batch(step, content):
                    return f"`{wording.short(key[2:-2])}`"
        return ""


def is_batch(step: FunctionInfo, value: Value) -> bool:
    """Whether a value surely is a model's output, or an entry of the batch, as it is."""
    if value.kind in (Kind.NUMBER, Kind.NONE, Kind.CONTAINER) or not value.objects:
        return False
    batch = set(step.params.values())
    for origin in value.objects:
        site = origin.site
        base = site.whole.site
        item_of_batch = base is not site and base in batch
        if not item_of_batch and site.source is not Source.MODEL_CALL:
            return False
    return True
