"""Programs of frameworks: what memlint must report in them, and what it must leave alone.

docs/frameworks.md says why, a row a feature. A line that must be reported ends in its code; everything else must be
silent, notes included. A program that memlint gets wrong now is marked with what is wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.version import Version

from memlint.lint.analysis import AnalysisSettings, analyse
from memlint.lint.catalog import all_rules
from memlint.lint.source import SourceFile

DOCUMENT = Path(__file__).parents[2] / "docs" / "frameworks.md"
MARK = re.compile(r"#((?: ?,? ML\d{3})+)$")


@dataclass(frozen=True)
class Program:
    """A program of one row of docs/frameworks.md. `wrong`: what memlint does instead, where it errs."""

    row: str
    name: str
    code: str
    wrong: str = ""


def wanted(code: str) -> set[tuple[int, str]]:
    """The (line, code) pairs that a program's marks ask for."""
    found: set[tuple[int, str]] = set()
    for number, line in enumerate(code.splitlines(), 1):
        match = MARK.search(line)
        if match:
            found |= {(number, name) for name in re.findall(r"ML\d{3}", match.group(1))}
    return found


def reported(code: str) -> set[tuple[int, str]]:
    """What memlint says of a program, notes included."""
    settings = AnalysisSettings(oldest_torch=Version("2.1"))
    findings, failures = analyse(SourceFile("case.py", code.encode()), list(all_rules()), settings)
    assert not failures
    return {(finding.span.line, finding.code) for finding in findings}


LIGHTNING = [
    Program(
        "lightning.automatic",
        "a step that logs and returns its loss",
        """
import lightning.pytorch as pl
import torch.nn.functional as F

class Model(pl.LightningModule):
    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train/loss", loss, prog_bar=True)
        return loss
""",
    ),
    Program(
        "lightning.automatic",
        "losses of several heads summed in a loop and returned",
        """
import lightning.pytorch as pl
import torch.nn.functional as F

class Model(pl.LightningModule):
    def training_step(self, batch, batch_idx):
        x, targets = batch
        features = self.backbone(x)
        total = 0.0
        parts = []
        for name, head in self.heads.items():
            loss = F.cross_entropy(head(features), targets[name])
            parts.append(loss)
            total = total + loss
        return {"loss": total, "parts": [part.detach() for part in parts]}
""",
    ),
    Program(
        "lightning.automatic",
        "the step keeps its losses for the end of the epoch",
        """
import pytorch_lightning as pl
import torch
import torch.nn.functional as F

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 2)
        self.losses = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.losses.append(loss)  # ML102
        return loss

    def on_train_epoch_end(self):
        self.log("epoch_loss", torch.stack(self.losses).mean())
        self.losses.clear()
""",
    ),
    Program(
        "lightning.automatic",
        "the step sums its losses on itself",
        """
import lightning as L
import torch.nn.functional as F

class Model(L.LightningModule):
    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.running += loss  # ML101
        return {"loss": loss}
""",
    ),
    Program(
        "lightning.automatic",
        "an override of backward",
        """
import lightning as L

class Model(L.LightningModule):
    def backward(self, loss):
        loss.backward()

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).mean()
        return loss
""",
    ),
    Program(
        "lightning.batch-end",
        "the loss that on_train_batch_end gets is detached",
        """
import lightning as L
import torch.nn.functional as F

class Model(L.LightningModule):
    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.history.append(outputs["loss"])
        if len(self.history) > 100:
            self.history.pop(0)
""",
    ),
    Program(
        "lightning.batch-end",
        "the other entries that on_train_batch_end gets carry their graph",
        """
import lightning as L
import torch.nn.functional as F

class Model(L.LightningModule):
    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.history.append(outputs["logits"])  # ML102
""",
    ),
    Program(
        "lightning.manual",
        "two optimizers, two manual backwards",
        """
import lightning.pytorch as pl

class GAN(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        opt_g, opt_d = self.optimizers()
        fake = self.generator(batch)
        d_loss = self.discriminator(fake.detach()).mean() - self.discriminator(batch).mean()
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        g_loss = -self.discriminator(fake).mean()
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss})
""",
    ),
    Program(
        "lightning.manual",
        "losses kept after a manual backward",
        """
import lightning.pytorch as pl
import torch.nn.functional as F

class Model(pl.LightningModule):
    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        opt.zero_grad()
        self.manual_backward(loss)
        opt.step()
        self.losses.append(loss)  # ML102
""",
    ),
    Program(
        "lightning.manual",
        "a sum over inner steps of a manual loop",
        """
import lightning.pytorch as pl
import torch.nn.functional as F

class Model(pl.LightningModule):
    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        total = 0.0
        for x, y in batch:
            loss = F.mse_loss(self.net(x), y)
            opt.zero_grad()
            self.manual_backward(loss)
            opt.step()
            total += loss  # ML101
        self.log("loss", total / len(batch))
""",
    ),
    Program(
        "lightning.manual",
        "accumulation by hand, the loss divided",
        """
import lightning.pytorch as pl
import torch.nn.functional as F

class Model(pl.LightningModule):
    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        x, y = batch
        loss = F.mse_loss(self.net(x), y) / self.accumulation_steps
        self.manual_backward(loss)
        if (batch_idx + 1) % self.accumulation_steps == 0:
            opt.step()
            opt.zero_grad()
""",
    ),
    Program(
        "lightning.manual",
        "accumulation by hand, the loss not divided",
        """
import lightning.pytorch as pl
import torch.nn.functional as F

class Model(pl.LightningModule):
    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.manual_backward(loss)  # ML201
        if (batch_idx + 1) % self.accumulation_steps == 0:
            opt.step()
            opt.zero_grad()
""",
    ),
    Program(
        "lightning.evaluation",
        "validation collects attached-looking outputs",
        """
import lightning.pytorch as pl
import torch
import torch.nn.functional as F

class Model(pl.LightningModule):
    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.total += loss
        self.outputs.append({"logits": logits.cpu(), "loss": loss})

    def on_validation_epoch_end(self):
        self.log("val", torch.stack([o["loss"] for o in self.outputs]).mean())
        self.outputs.clear()
""",
    ),
    Program(
        "lightning.evaluation",
        "every hook of an evaluation runs without gradients",
        """
import lightning.pytorch as pl

class Model(pl.LightningModule):
    def on_validation_batch_start(self, batch, batch_idx, dataloader_idx=0):
        for view in batch:
            self.views.append(self.encoder(view).cpu())

    def on_test_start(self):
        self.encoder.eval()
        for batch in self.gallery:
            self.bank.append(self.encoder(batch).cpu())

    def on_predict_epoch_start(self):
        self.encoder.eval()
        for batch in self.gallery:
            self.bank.append(self.encoder(batch).cpu())

    def on_predict_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        for view in batch:
            self.views.append(self.encoder(view).cpu())
""",
    ),
    Program(
        "lightning.evaluation",
        "a callback's evaluation hooks run without gradients",
        """
import lightning.pytorch as pl

class Gallery(pl.Callback):
    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.eval()
        features = []
        for batch in self.loader:
            features.append(pl_module(batch).cpu())
        self.show(features)
""",
    ),
    Program(
        "lightning.evaluation",
        "a callback's training hooks run with gradients",
        """
import lightning.pytorch as pl

class Probe(pl.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.eval()
        correct = 0
        for x, y in self.loader:
            correct += (pl_module(x).argmax(1) == y).sum().item()  # ML401
        pl_module.train()
        pl_module.log("probe", correct)
""",
    ),
    Program(
        "lightning.evaluation",
        "a module's training hooks run with gradients",
        """
import lightning.pytorch as pl

class Model(pl.LightningModule):
    def on_train_epoch_end(self):
        self.net.eval()
        scores = []
        for x in self.probe_loader:
            scores.append(self.net(x).mean().item())  # ML401
        self.net.train()
        self.log("probe", sum(scores) / len(scores))
""",
    ),
    Program(
        "lightning.epoch-end",
        "validation_epoch_end with whole batches of logits",
        """
import pytorch_lightning as pl
import torch

class Model(pl.LightningModule):
    def validation_step(self, batch, batch_idx):
        logits = self.net(batch["image"])
        return {"logits": logits, "labels": batch["label"]}

    def validation_epoch_end(self, outputs):  # ML706
        logits = torch.cat([o["logits"] for o in outputs])
        self.log("mean", logits.mean())
""",
    ),
    Program(
        "lightning.epoch-end",
        "the hooks that replace them",
        """
import pytorch_lightning as pl

class Model(pl.LightningModule):
    def validation_step(self, batch, batch_idx):
        logits = self.net(batch["image"])
        self.accuracy.update(logits.argmax(1), batch["label"])

    def on_validation_epoch_end(self):
        self.log("acc", self.accuracy.compute())
        self.accuracy.reset()
""",
    ),
    Program(
        "lightning.log",
        "logging in a loop",
        """
import lightning.pytorch as pl
import torch.nn.functional as F

class Model(pl.LightningModule):
    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        for x, y in batch:
            loss = F.mse_loss(self.net(x), y)
            opt.zero_grad()
            self.manual_backward(loss)
            opt.step()
            self.log("loss", loss)
            self.log_dict({"train/loss": loss})
""",
    ),
    Program(
        "lightning.automatic",
        "a method that training_step and validation_step share keeps losses",
        """
import lightning.pytorch as pl
import torch.nn.functional as F

class Model(pl.LightningModule):
    def shared_step(self, batch, stage):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.losses[stage].append(loss)  # ML102
        return loss

    def training_step(self, batch, batch_idx):
        return self.shared_step(batch, "train")

    def validation_step(self, batch, batch_idx):
        return self.shared_step(batch, "val")
""",
    ),
    Program(
        "lightning.evaluation",
        "a method that only evaluation steps call",
        """
import lightning.pytorch as pl
import torch.nn.functional as F

class Model(pl.LightningModule):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def evaluation_step(self, batch):
        x, y = batch
        logits = self.net(x)
        self.outputs.append(logits)
        self.losses.append(F.cross_entropy(logits, y))

    def validation_step(self, batch, batch_idx):
        self.evaluation_step(batch)

    def test_step(self, batch, batch_idx):
        self.evaluation_step(batch)
""",
    ),
    Program(
        "lightning.evaluation",
        "a validation step that switches gradients on",
        """
import lightning.pytorch as pl
import torch
import torch.nn.functional as F

class Model(pl.LightningModule):
    def validation_step(self, batch, batch_idx):
        with torch.enable_grad():
            x = batch.requires_grad_()
            energy = self.net(x).sum()
            energy.backward()
            self.energies.append(energy)  # ML102
""",
    ),
    Program(
        "lightning.manual",
        "accumulation by hand, cleared in every micro-step",
        """
import lightning.pytorch as pl
import torch.nn.functional as F

class Model(pl.LightningModule):
    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        opt.zero_grad()  # ML202
        x, y = batch
        loss = F.mse_loss(self.net(x), y) / self.accumulation_steps
        self.manual_backward(loss)
        if (batch_idx + 1) % self.accumulation_steps == 0:
            opt.step()
""",
    ),
    Program(
        "lightning.manual",
        "a graph that is retained for nothing",
        """
import lightning.pytorch as pl
import torch

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        loss = self.net(batch).mean()
        opt.zero_grad()
        self.manual_backward(loss, retain_graph=True)  # ML105
        opt.step()
""",
    ),
    Program(
        "lightning.manual",
        "losses of minibatches, one manual backward",
        """
import lightning.pytorch as pl
import torch

class Agent(pl.LightningModule):
    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        losses = []
        for minibatch in batch:
            losses.append(self.loss(minibatch))
        opt.zero_grad()
        self.manual_backward(torch.stack(losses).mean())
        opt.step()
""",
    ),
    Program(
        "lightning.manual",
        "a graph of the gradients that nobody needs",
        """
import lightning.pytorch as pl

class Model(pl.LightningModule):
    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        loss = self.net(batch).mean()
        opt.zero_grad()
        self.manual_backward(loss, create_graph=True)  # ML106
        opt.step()
""",
    ),
    Program(
        "lightning.evaluation",
        "hooks of a callback that builds on another one",
        """
from lightning.pytorch.callbacks import ModelCheckpoint

class Keep(ModelCheckpoint):
    def on_validation_epoch_end(self, trainer, module):
        kept = []
        module.eval()
        for x in self.probes:
            kept.append(module(x).cpu())
        self.kept = kept
""",
    ),
    Program(
        "lightning.evaluation",
        "a method of training and validation keeps outputs of validation only",
        """
import lightning.pytorch as pl
import torch.nn.functional as F

class Model(pl.LightningModule):
    def shared_step(self, batch):
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        if not self.training:
            self.outputs.append(logits)
            self.losses.append(loss)
        return loss

    def training_step(self, batch, batch_idx):
        return self.shared_step(batch)

    def validation_step(self, batch, batch_idx):
        self.shared_step(batch)
""",
    ),
    Program(
        "lightning.epoch-end",
        "training_epoch_end with scalars, a note",
        """
import pytorch_lightning as pl
import torch
import torch.nn.functional as F

class Model(pl.LightningModule):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch["image"]), batch["label"])

    def training_epoch_end(self, outputs):  # ML706
        self.log("mean", torch.stack([o["loss"] for o in outputs]).mean())
""",
    ),
    Program(
        "lightning.automatic",
        "a window of losses that is returned as one",
        """
import lightning as L
import torch

class Model(L.LightningModule):
    def training_step(self, batch, batch_idx):
        self.window.append(self.net(batch).mean())
        if len(self.window) < 4:
            return None
        loss = torch.stack(self.window).mean()
        self.window = []
        return loss
""",
    ),
    Program(
        "lightning.automatic",
        "activations of a forward pass that the loss needs",
        """
import lightning as L

class Model(L.LightningModule):
    def forward(self, x):
        self.activations = []
        for layer in self.layers:
            x = layer(x)
            self.activations.append(x)
        return x

    def training_step(self, batch, batch_idx):
        out = self(batch)
        return out.mean() + sum(a.abs().mean() for a in self.activations)
""",
    ),
    Program(
        "lightning.automatic",
        "a buffer that a training step updates with its graph",
        """
import lightning as L
import torch

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 8))

    def training_step(self, batch, batch_idx):
        out = self.net(batch)
        self.center.mul_(0.9).add_(out.mean(0, keepdim=True) * 0.1)  # ML103
        return out.square().mean()

    def validation_step(self, batch, batch_idx):
        out = self.net(batch)
        self.center.mul_(0.9).add_(out.mean(0, keepdim=True) * 0.1)
""",
    ),
    Program(
        "lightning.manual",
        "losses that another method backwards",
        """
import lightning as L
import torch

class Model(L.LightningModule):
    def training_step(self, batch, batch_idx):
        self.pending.append(self.net(batch).mean())
        if len(self.pending) == 4:
            self.flush()

    def flush(self):
        opt = self.optimizers()
        opt.zero_grad()
        self.manual_backward(torch.stack(self.pending).mean())
        opt.step()
        self.pending.clear()
""",
    ),
    Program(
        "lightning.log",
        "a running mean of detached losses",
        """
import lightning as L
import torch

class Model(L.LightningModule):
    def training_step(self, batch, batch_idx):
        loss = self.net(batch).mean()
        self.total += loss.detach()
        self.log("mean", self.total / (batch_idx + 1))
        return loss

    def on_train_epoch_end(self):
        self.total = torch.tensor(0.0)
""",
    ),
    Program(
        "lightning.batch-end",
        "entries that the step detached, and one detached by the hook",
        """
import lightning as L
import torch.nn.functional as F

class Model(L.LightningModule):
    def training_step(self, batch, batch_idx):
        x, y = batch
        logits, hidden = self.net(x), self.net.hidden(x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits.detach(), "hidden": hidden}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.history.append(outputs["logits"])
        self.hidden.append(outputs["hidden"].detach())
""",
    ),
    Program(
        "lightning.automatic",
        "a method that training_step and validation_step share keeps a detached loss",
        """
import lightning.pytorch as pl
import torch.nn.functional as F

class Model(pl.LightningModule):
    def shared_step(self, batch, stage):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.losses[stage].append(loss.detach())
        return loss

    def training_step(self, batch, batch_idx):
        return self.shared_step(batch, "train")
""",
    ),
    Program(
        "lightning.automatic",
        "a method keeps parts of the loss, which training_step adds up",
        """
import lightning.pytorch as pl
import torch.nn.functional as F

class Model(pl.LightningModule):
    def shared_step(self, batch):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.parts.append(loss)
        return loss

    def training_step(self, batch, batch_idx):
        loss = self.shared_step(batch)
        return loss + 0.1 * sum(self.parts)
""",
    ),
    Program(
        "lightning.automatic",
        "a method keeps its losses, which another caller backwards later",
        """
import lightning.pytorch as pl
import torch.nn.functional as F

class Model(pl.LightningModule):
    def shared_step(self, batch):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.parts.append(loss)
        return loss

    def training_step(self, batch, batch_idx):
        return self.shared_step(batch)

    def warm_up(self, batches):
        for batch in batches:
            self.shared_step(batch)
        sum(self.parts).backward()
""",
    ),
    Program(
        "lightning.manual",
        "accumulation by hand as it should be, and a second optimizer that steps every time",
        """
import lightning.pytorch as pl
import torch.nn.functional as F

class Model(pl.LightningModule):
    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        x, y = batch
        loss = F.mse_loss(self.net(x), y) / self.accumulation_steps
        self.manual_backward(loss)
        if (batch_idx + 1) % self.accumulation_steps == 0:
            opt.step()
            opt.zero_grad()

class Gan(pl.LightningModule):
    def training_step(self, batch, batch_idx):
        opt_g, opt_d = self.optimizers()
        opt_d.zero_grad()
        self.manual_backward(self.loss_d(batch))
        opt_d.step()
        if (batch_idx + 1) % self.every_n_steps == 0:
            opt_g.zero_grad()
            self.manual_backward(self.loss_g(batch))
            opt_g.step()
""",
    ),
]

FABRIC = [
    Program(
        "fabric.backward",
        "a training loop",
        """
import lightning as L
import torch.nn.functional as F

def train(model, optimizer, loader):
    fabric = L.Fabric(accelerator="cuda")
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        fabric.log("loss", loss)
""",
    ),
    Program(
        "fabric.backward",
        "losses summed with their graph",
        """
from lightning.fabric import Fabric
import torch.nn.functional as F

def train(fabric: Fabric, model, optimizer, loader):
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        total += loss  # ML101
    return total / len(loader)
""",
    ),
    Program(
        "fabric.backward",
        "a Fabric under another name",
        """
import lightning as L
import torch.nn.functional as F

def train(model, optimizer, loader):
    runtime = L.Fabric(accelerator="cuda")
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        runtime.backward(loss)
        optimizer.step()
        losses.append(loss)  # ML102
    return losses
""",
    ),
    Program(
        "fabric.accumulation",
        "divided by hand, without synchronisation in between",
        """
import torch.nn.functional as F

def train(fabric, model, optimizer, loader, accum_steps):
    for i, (x, y) in enumerate(loader):
        waits = (i + 1) % accum_steps != 0
        with fabric.no_backward_sync(model, enabled=waits):
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss / accum_steps)
        if not waits:
            optimizer.step()
            optimizer.zero_grad()
""",
    ),
    Program(
        "fabric.accumulation",
        "not divided: fabric.backward divides nothing",
        """
import torch.nn.functional as F

def train(fabric, model, optimizer, loader, accum_steps):
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)  # ML201
        if (i + 1) % accum_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
""",
    ),
    Program(
        "fabric.accumulation",
        "cleared in every micro-step: its optimizers do not wait",
        """
import torch.nn.functional as F

def train(fabric, model, optimizer, loader, accum_steps):
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()  # ML202
        loss = F.cross_entropy(model(x), y) / accum_steps
        fabric.backward(loss)
        if (i + 1) % accum_steps == 0:
            optimizer.step()
""",
    ),
    Program(
        "fabric.log",
        "a dict of losses",
        """
import torch.nn.functional as F

def train(fabric, model, optimizer, loader):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        fabric.log_dict({"loss": loss}, step=step)
""",
    ),
    Program(
        "fabric.backward",
        "a graph that is retained for nothing",
        """
import torch
import torch.nn.functional as F

def train(fabric, optimizer, loader):
    model = torch.nn.Linear(8, 2)
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        fabric.backward(loss, retain_graph=True)  # ML105
        optimizer.step()
""",
    ),
    Program(
        "fabric.backward",
        "an evaluation with gradients",
        """
def validate(fabric, model, loader):
    model.eval()
    hits = 0
    for x, y in loader:
        hits += (model(x).argmax(1) == y).sum()  # ML401
    return fabric.all_reduce(hits)
""",
    ),
    Program(
        "fabric.backward",
        "a subclass that calls its own backward",
        """
from lightning.fabric import Fabric

class Runner(Fabric):
    def train(self, model, criterion, optimizer, loader):
        model, optimizer = self.setup(model, optimizer)
        losses = []
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            self.backward(loss)
            optimizer.step()
            losses.append(loss)  # ML102
        return losses
""",
    ),
    Program(
        "fabric.backward",
        "a graph that a second backward needs",
        """
import torch

def train(fabric, opt_d, opt_g, loader):
    generator = torch.nn.Linear(4, 4)
    discriminator = torch.nn.Linear(4, 1)
    for noise in loader:
        score = discriminator(generator(noise)).mean()
        opt_d.zero_grad()
        fabric.backward(score, retain_graph=True)
        opt_d.step()
        opt_g.zero_grad()
        fabric.backward(-score)
        opt_g.step()
""",
    ),
    Program(
        "fabric.backward",
        "a Fabric on a private attribute",
        """
class Runner:
    def train(self, model, criterion, optimizer, loader):
        losses = []
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            self._fabric.backward(loss)
            optimizer.step()
            losses.append(loss)  # ML102
        return losses
""",
    ),
    Program(
        "fabric.backward",
        "a parameter of another name that is annotated",
        """
from lightning.fabric import Fabric
from torch import optim

def train(runner: Fabric, model, stepper: optim.Optimizer, criterion, loader):
    total = 0.0
    for x, y in loader:
        stepper.zero_grad()
        loss = criterion(model(x), y)
        runner.backward(loss)
        stepper.step()
        total += loss  # ML101
    return total
""",
    ),
]

ACCELERATE = [
    Program(
        "accelerate.backward",
        "an accumulation context",
        """
from accelerate import Accelerator
import torch.nn.functional as F

def train(model, optimizer, scheduler, loader):
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    total = 0.0
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            total += loss.detach().float()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return total.item() / len(loader)
""",
    ),
    Program(
        "accelerate.backward",
        "losses summed with their graph",
        """
from accelerate import Accelerator

def train(model, optimizer, loader):
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    total = 0.0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            total += loss  # ML101
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return total
""",
    ),
    Program(
        "accelerate.backward",
        "divided by hand and again by the accelerator",
        """
from accelerate import Accelerator
import torch.nn.functional as F

def train(model, optimizer, loader, accum_steps):
    accelerator = Accelerator(gradient_accumulation_steps=accum_steps)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            loss = loss / accum_steps  # ML204
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
""",
    ),
    Program(
        "accelerate.backward",
        "divided by hand, by an accelerator that counts one step",
        """
from accelerate import Accelerator
import torch.nn.functional as F

def train(model, optimizer, loader, accum_steps):
    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y) / accum_steps
        accelerator.backward(loss)
        if (i + 1) % accum_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
""",
    ),
    Program(
        "accelerate.backward",
        "a plugin that counts the steps",
        """
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
import torch.nn.functional as F

def train(model, optimizer, loader, accum_steps):
    accelerator = Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=accum_steps))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y) / accum_steps  # ML204
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
""",
    ),
    Program(
        "accelerate.optimizer",
        "cleared in every micro-step: the prepared optimizer waits",
        """
from accelerate import Accelerator
import torch.nn.functional as F

def train(model, optimizer, loader):
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                optimizer.step()
""",
    ),
    Program(
        "accelerate.gather",
        "gathered losses of an evaluation without gradients",
        """
import torch

def evaluate(accelerator, model, loader):
    model.eval()
    losses = []
    for batch in loader:
        with torch.no_grad():
            outputs = model(**batch)
        losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(8)))
    return torch.cat(losses).mean()
""",
    ),
    Program(
        "accelerate.gather",
        "an evaluation with gradients",
        """
import torch

def evaluate(accelerator, model, loader, metric):
    model.eval()
    for batch in loader:
        outputs = model(**batch)  # ML401
        predictions, references = accelerator.gather_for_metrics((outputs.logits.argmax(-1), batch["labels"]))
        metric.add_batch(predictions=predictions, references=references)
    return metric.compute()
""",
    ),
    Program(
        "accelerate.gather",
        "on one process gather hands back the tensor itself",
        """
import torch.nn.functional as F

def train(accelerator, model, optimizer, loader):
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(accelerator.gather(loss))  # ML102
    return losses
""",
    ),
    Program(
        "accelerate.log",
        "trackers get what they are given",
        """
import torch.nn.functional as F

def train(accelerator, model, optimizer, loader):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        accelerator.log({"loss": loss.item()}, step=step)
        accelerator.log({"loss": loss}, step=step)  # ML112
""",
    ),
    Program(
        "accelerate.backward",
        "divided by the accelerator's own number of steps",
        """
import torch.nn.functional as F

def train(accelerator, model, optimizer, loader):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            loss = loss / accelerator.gradient_accumulation_steps  # ML204
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
""",
    ),
    Program(
        "accelerate.backward",
        "an accelerator on an attribute",
        """
from accelerate import Accelerator
import torch.nn.functional as F

class Runner:
    def __init__(self, config):
        self.accum_steps = config.accum_steps
        self.accelerator = Accelerator(gradient_accumulation_steps=config.accum_steps)

    def train(self, model, optimizer, loader):
        for x, y in loader:
            with self.accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y) / self.accum_steps  # ML204
                self.accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
""",
    ),
    Program(
        "accelerate.backward",
        "an accelerator under another name",
        """
from accelerate import Accelerator

def train(model, criterion, optimizer, loader):
    runner = Accelerator()
    model, optimizer, loader = runner.prepare(model, optimizer, loader)
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        runner.backward(loss)
        optimizer.step()
        losses.append(loss)  # ML102
    return losses
""",
    ),
    Program(
        "accelerate.optimizer",
        "cleared in every micro-step of a window by hand, without accumulate()",
        """
from accelerate import Accelerator
import torch.nn.functional as F

def train(model, optimizer, loader, accum_steps):
    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()  # ML202
        loss = F.cross_entropy(model(x), y) / accum_steps
        accelerator.backward(loss)
        if (i + 1) % accum_steps == 0:
            optimizer.step()
""",
    ),
    Program(
        "accelerate.backward",
        "a graph of the gradients that nobody needs",
        """
def train(accelerator, model, optimizer, loader):
    for x in loader:
        optimizer.zero_grad()
        loss = model(x).mean()
        accelerator.backward(loss, create_graph=True)  # ML106
        optimizer.step()
""",
    ),
    Program(
        "accelerate.optimizer",
        "cleared in every micro-step beside loss.backward(): the prepared optimizer waits",
        """
from accelerate import Accelerator

def train(model, criterion, optimizer, loader):
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            loss = criterion(model(x), y) / accelerator.gradient_accumulation_steps
            loss.backward()
            if accelerator.sync_gradients:
                optimizer.step()
""",
    ),
    Program(
        "accelerate.state-dict",
        "the best weights, which are no copies",
        """
def train(accelerator, model, optimizer, loader, validate, epochs):
    best, best_state = 1e9, None
    for _ in range(epochs):
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        score = validate(model)
        if score < best:
            best = score
            best_state = accelerator.unwrap_model(model).state_dict()  # ML703
    model.load_state_dict(best_state)
""",
    ),
    Program(
        "accelerate.state-dict",
        "the best weights of get_state_dict, which are no copies",
        """
def train(accelerator, model, optimizer, loader, validate, epochs):
    best, best_state = 1e9, None
    for _ in range(epochs):
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        score = validate(model)
        if score < best:
            best = score
            best_state = accelerator.get_state_dict(model)  # ML703
    model.load_state_dict(best_state)
""",
    ),
    Program(
        "accelerate.state-dict",
        "the best weights, copied",
        """
def train(accelerator, model, optimizer, loader, validate, epochs):
    best, best_state = 1e9, None
    for _ in range(epochs):
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        score = validate(model)
        if score < best:
            best = score
            best_state = {k: v.detach().cpu().clone() for k, v in accelerator.get_state_dict(model).items()}
    model.load_state_dict(best_state)
""",
    ),
    Program(
        "accelerate.backward",
        "divided by hand, by an accelerator that is told to count one step",
        """
from accelerate import Accelerator
import torch.nn.functional as F

def train(model, optimizer, loader, accum_steps):
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y) / accum_steps
        accelerator.backward(loss)
        if (i + 1) % accum_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
""",
    ),
    Program(
        "accelerate.state-dict",
        "the best weights of get_state_dict, copied, and some that are saved at once",
        """
def train(accelerator, model, optimizer, loader, validate, epochs):
    best, best_state = 1e9, None
    for epoch in range(epochs):
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        score = validate(model)
        if score < best:
            best = score
            best_state = {k: v.detach().cpu().clone() for k, v in accelerator.get_state_dict(model).items()}
        state = accelerator.get_state_dict(model)
        accelerator.save(state, f"{epoch}.pt")
    model.load_state_dict(best_state)
""",
    ),
]

TRAINER = [
    Program(
        "trainer.compute-loss",
        "a weighted loss",
        """
from transformers import Trainer
import torch.nn.functional as F

class Weighted(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits, labels, weight=self.weight)
        return (loss, outputs) if return_outputs else loss
""",
    ),
    Program(
        "trainer.compute-loss",
        "losses of several tasks are summed and returned",
        """
from transformers import Trainer
import torch.nn.functional as F

class MultiTask(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        total = 0.0
        for name, logits in outputs.items():
            total += F.cross_entropy(logits, inputs[name])
        return (total, outputs) if return_outputs else total
""",
    ),
    Program(
        "trainer.compute-loss",
        "losses are kept on the trainer",
        """
from transformers import Trainer
import torch.nn.functional as F

class Recording(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits, labels)
        self.losses.append(loss)  # ML102
        return (loss, outputs) if return_outputs else loss
""",
    ),
    Program(
        "trainer.compute-loss",
        "a loss that is summed on the trainer",
        """
from transformers import Seq2SeqTrainer

class Recording(Seq2SeqTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        loss = outputs.loss
        self.total += loss  # ML101
        return loss
""",
    ),
    Program(
        "trainer.accumulation",
        "a sum divided by the items of the window",
        """
from transformers import Trainer
import torch.nn.functional as F

class Tokens(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch
        return (loss, outputs) if return_outputs else loss
""",
    ),
    Program(
        "trainer.training-step",
        "an override that returns a detached loss",
        """
from transformers import Trainer

class Mine(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        return loss.detach() / self.args.gradient_accumulation_steps
""",
    ),
    Program(
        "trainer.training-step",
        "the trainer sums what training_step returns",
        """
from transformers import Trainer

class Mine(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        return loss  # ML101
""",
    ),
    Program(
        "trainer.training-step",
        "an override that keeps its loss",
        """
from transformers import Trainer

class Mine(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        inputs = self._prepare_inputs(inputs)
        loss = model(**inputs).loss
        self.accelerator.backward(loss)
        self.recent.append(loss)  # ML102
        return loss.detach()
""",
    ),
    Program(
        "trainer.prediction-step",
        "an override without gradients",
        """
from transformers import Trainer
import torch

class Mine(Trainer):
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            outputs = model(**inputs)
        return outputs.loss, outputs.logits, inputs["labels"]
""",
    ),
    Program(
        "trainer.prediction-step",
        "an override with gradients: the trainer collects its logits",
        """
from transformers import Trainer

class Mine(Trainer):
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        inputs = self._prepare_inputs(inputs)
        outputs = model(**inputs)  # ML401
        return outputs.loss, outputs.logits, inputs["labels"]
""",
    ),
    Program(
        "trainer.callback",
        "a callback evaluates: the Trainer calls it with gradients on",
        """
from transformers import TrainerCallback

class Probe(TrainerCallback):
    def on_epoch_end(self, args, state, control, model=None, **kwargs):
        model.eval()
        scores = []
        for batch in self.loader:
            scores.append(model(**batch).loss.item())  # ML401
        model.train()
        print(sum(scores) / len(scores))
""",
    ),
    Program(
        "trainer.accumulation",
        "the mean divided by the accumulation steps: right where the Trainer does not divide",
        """
from transformers import Trainer

class Mine(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs)
        loss = loss / self.args.gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()
""",
    ),
    Program(
        "trainer.prediction-step",
        "an evaluation loop of its own, with gradients",
        """
from transformers import Trainer

class Mine(Trainer):
    def evaluate(self, eval_dataset=None, **kwargs):
        self.model.eval()
        losses = []
        for batch in self.get_eval_dataloader(eval_dataset):
            losses.append(self.model(**batch).loss.item())  # ML401
        return {"eval_loss": sum(losses) / len(losses)}
""",
    ),
    Program(
        "trainer.compute-loss",
        "losses of evaluations: prediction_step calls compute_loss without gradients",
        """
from transformers import Trainer

class Recording(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss
        if not model.training:
            self.eval_losses.append(loss)
        return (loss, outputs) if return_outputs else loss
""",
    ),
    Program(
        "trainer.compute-loss",
        "metrics of a step as numbers",
        """
from transformers import Trainer

class Policy(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logps = model(**inputs).logits
        kl = (logps - inputs["reference"]).mean()
        loss = 0.1 * kl - (logps * inputs["advantages"]).mean()
        self._metrics["kl"].append(self.accelerator.gather_for_metrics(kl).mean().item())
        self._metrics["loss"].append(loss.item())
        return loss
""",
    ),
    Program(
        "trainer.compute-loss",
        "a metric of a step with its graph",
        """
from transformers import Trainer

class Policy(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logps = model(**inputs).logits
        kl = (logps - inputs["reference"]).mean()
        loss = 0.1 * kl - (logps * inputs["advantages"]).mean()
        self._metrics["kl"].append(kl)  # ML102
        return loss
""",
    ),
    Program(
        "trainer.log",
        "numbers are logged",
        """
from transformers import Trainer

class Mine(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss + outputs.logits.square().mean()
        self.log({"task": outputs.loss.item()})
        return loss
""",
    ),
    Program(
        "trainer.log",
        "a live loss goes into the history of the trainer",
        """
from transformers import Trainer

class Mine(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss + outputs.logits.square().mean()
        self.log({"task": outputs.loss})  # ML112
        return loss
""",
    ),
    Program(
        "trainer.generate",
        "generated texts",
        """
def evaluate(model, loader, tokenizer):
    model.eval()
    ids, texts = [], []
    for batch in loader:
        found = model.generate(**batch, max_new_tokens=20)
        ids.append(found.cpu())
        texts += tokenizer.batch_decode(found)
    return ids, texts
""",
    ),
    Program(
        "trainer.generate",
        "a forward pass of the same model",
        """
def evaluate(model, loader):
    model.eval()
    tokens = []
    for batch in loader:
        tokens.append(model(**batch).logits.argmax(-1).cpu())  # ML401
    return tokens
""",
    ),
    Program(
        "trainer.compute-loss",
        "a trainer of its own make that backwards what it keeps",
        """
from base import BaseTrainer
import torch

class Mine(BaseTrainer):
    def compute_loss(self, batch):
        loss = self.model(batch).mean()
        self.losses.append(loss)
        return loss

    def train_epoch(self, loader):
        for batch in loader:
            self.losses = []
            for micro in batch:
                self.compute_loss(micro)
            self.optimizer.zero_grad()
            torch.stack(self.losses).mean().backward()
            self.optimizer.step()
""",
    ),
    Program(
        "trainer.training-step",
        "a detached loss, and what the Trainer's own step returns",
        """
from transformers import Trainer

class Mine(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        return loss.detach() / self.args.gradient_accumulation_steps

class Other(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.count += 1
        return loss
""",
    ),
    Program(
        "trainer.prediction-step",
        "an override that hands on to the Trainer's own, and one that decides by itself",
        """
import torch
from transformers import Trainer

class Mine(Trainer):
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        return loss, logits.argmax(-1), labels

class Other(Trainer):
    @torch.no_grad()
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        return loss, outputs.logits, inputs["labels"]
""",
    ),
    Program(
        "trainer.log",
        "numbers go into the history",
        """
from transformers import Trainer

class Mine(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        task = outputs.loss.item()
        self.log({"task": task})
        return outputs.loss + outputs.logits.square().mean()
""",
    ),
]

DEEPSPEED = [
    Program(
        "deepspeed.backward",
        "a training loop with accumulation",
        """
import deepspeed

def train(args, model, loader):
    model_engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model)
    total = 0.0
    for x, y in loader:
        loss = model_engine(x, y)
        model_engine.backward(loss)
        model_engine.step()
        total += loss.item()
    return total
""",
    ),
    Program(
        "deepspeed.backward",
        "losses summed with their graph",
        """
import deepspeed

def train(args, model, loader):
    model_engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model)
    total = 0.0
    for x, y in loader:
        loss = model_engine(x, y)
        model_engine.backward(loss)
        model_engine.step()
        total += loss  # ML101
    return total
""",
    ),
    Program(
        "deepspeed.backward",
        "an engine under another name",
        """
import deepspeed

def train(args, model, loader):
    ds, optimizer, _, _ = deepspeed.initialize(args=args, model=model)
    losses = []
    for x, y in loader:
        loss = ds(x, y)
        ds.backward(loss)
        ds.step()
        losses.append(loss)  # ML102
    return losses
""",
    ),
    Program(
        "deepspeed.backward",
        "what backward returns is the loss with its graph",
        """
def train(engine, loader):
    total = 0.0
    for x, y in loader:
        loss = engine(x, y)
        loss = engine.backward(loss)
        engine.step()
        total += loss  # ML101
    return total
""",
    ),
    Program(
        "deepspeed.accumulation",
        "the engine divides, steps and clears by itself",
        """
def train(engine, loader, accumulation_steps):
    for step, (x, y) in enumerate(loader):
        loss = engine(x, y)
        engine.backward(loss)
        if (step + 1) % accumulation_steps == 0:
            print(loss.item())
        engine.step()
""",
    ),
    Program(
        "deepspeed.accumulation",
        "divided by hand and again by the engine",
        """
def train(engine, loader, criterion):
    for x, y in loader:
        loss = criterion(engine(x), y)
        loss = loss / engine.gradient_accumulation_steps()  # ML204
        engine.backward(loss)
        engine.step()
""",
    ),
    Program(
        "deepspeed.accumulation",
        "divided by hand, the engine told not to",
        """
def train(engine, loader, criterion):
    for x, y in loader:
        loss = criterion(engine(x), y)
        loss = loss / engine.gradient_accumulation_steps()
        engine.backward(loss, scale_wrt_gas=False)
        engine.step()
""",
    ),
    Program(
        "deepspeed.pipeline",
        "train_batch returns a detached loss",
        """
import deepspeed

def train(args, net, iterator, steps):
    engine, _, _, _ = deepspeed.initialize(args=args, model=net)
    losses = []
    total = 0.0
    for _ in range(steps):
        loss = engine.train_batch(data_iter=iterator)
        losses.append(loss)
        total += loss
    return losses, total
""",
    ),
    Program(
        "deepspeed.backward",
        "an engine on an attribute",
        """
import deepspeed

class Runner:
    def __init__(self, args, model):
        self.engine, _, _, _ = deepspeed.initialize(args=args, model=model)

    def train(self, loader):
        losses = []
        for x, y in loader:
            loss = self.engine(x, y)
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss)  # ML102
        return losses
""",
    ),
    Program(
        "deepspeed.evaluation",
        "an engine in eval mode records graphs",
        """
def evaluate(model_engine, loader):
    model_engine.eval()
    total = 0.0
    for x, y in loader:
        total += model_engine(x, y).item()  # ML401
    return total
""",
    ),
    Program(
        "deepspeed.evaluation",
        "an engine without gradients",
        """
import torch

def evaluate(model_engine, loader):
    model_engine.eval()
    total = 0.0
    with torch.no_grad():
        for x, y in loader:
            total += model_engine(x, y)
    return total
""",
    ),
    Program(
        "deepspeed.backward",
        "the loss's own backward",
        """
def train(engine, loader):
    total = 0.0
    for x, y in loader:
        loss = engine(x, y)
        loss.backward()
        engine.step()
        total += loss  # ML101
    return total
""",
    ),
    Program(
        "deepspeed.backward",
        "losses that are backwarded later",
        """
def train(engine, loader):
    losses = []
    for batch in loader:
        losses.append(engine(batch))
    for loss in losses:
        engine.backward(loss)
    engine.step()
""",
    ),
]

AMP = [
    Program(
        "amp.scaler",
        "a training loop",
        """
import torch

def train(model, criterion, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda")
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        total += loss.item()
    return total
""",
    ),
    Program(
        "amp.scaler",
        "losses summed with their graph",
        """
from torch.cuda.amp import GradScaler as Scaling
import torch

def train(model, criterion, optimizer, loader):
    amp = Scaling()
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        with torch.cuda.amp.autocast():
            loss = criterion(model(x), y)
        amp.scale(loss).backward()
        amp.step(optimizer)
        amp.update()
        total += loss  # ML101
    return total
""",
    ),
    Program(
        "amp.scaler",
        "the scaled loss is kept",
        """
import torch

def train(model, criterion, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda")
    kept = []
    for x, y in loader:
        optimizer.zero_grad()
        scaled = scaler.scale(criterion(model(x), y))
        scaled.backward()
        scaler.step(optimizer)
        scaler.update()
        kept.append(scaled)  # ML102
    return kept
""",
    ),
    Program(
        "amp.accumulation",
        "not divided: the scale is no division by the number of micro-steps",
        """
import torch

def train(model, criterion, optimizer, loader, accum_steps):
    scaler = torch.amp.GradScaler("cuda")
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda"):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()  # ML201
        if (i + 1) % accum_steps == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
    ),
    Program(
        "amp.accumulation",
        "divided",
        """
import torch

def train(model, criterion, optimizer, loader, accum_steps):
    scaler = torch.amp.GradScaler("cuda")
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda"):
            loss = criterion(model(x), y) / accum_steps
        scaler.scale(loss).backward()
        if (i + 1) % accum_steps == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
""",
    ),
    Program(
        "amp.accumulation",
        "cleared in every micro-step",
        """
import torch

def train(model, criterion, optimizer, loader, accum_steps):
    scaler = torch.amp.GradScaler("cuda")
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()  # ML202
        loss = criterion(model(x), y) / accum_steps
        scaler.scale(loss).backward()
        if (i + 1) % accum_steps == 0:
            scaler.step(optimizer)
            scaler.update()
""",
    ),
    Program(
        "amp.autocast",
        "autocast does not switch autograd off",
        """
import torch

def evaluate(model, loader):
    model.eval()
    hits = 0
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for x, y in loader:
            hits += (model(x).argmax(1) == y).sum().item()  # ML401
    return hits
""",
    ),
    Program(
        "amp.autocast",
        "autocast beside no_grad",
        """
import torch

def evaluate(model, loader):
    model.eval()
    hits = 0
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        for x, y in loader:
            hits += (model(x).argmax(1) == y).sum().item()
    return hits
""",
    ),
    Program(
        "apex.scale-loss",
        "a training loop",
        """
from apex import amp

def train(model, criterion, optimizer, loader):
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses
""",
    ),
    Program(
        "apex.scale-loss",
        "losses kept with their graph",
        """
from apex import amp

def train(model, criterion, optimizer, loader):
    losses = []
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss)  # ML102
        total += loss  # ML101
    return losses, total
""",
    ),
    Program(
        "apex.scale-loss",
        "an accumulation that is not divided",
        """
from apex import amp

def train(model, criterion, optimizer, loader, accum_steps):
    for i, (x, y) in enumerate(loader):
        loss = criterion(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()  # ML201
        if (i + 1) % accum_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
""",
    ),
    Program(
        "amp.scaler",
        "parts of a scaled sum",
        """
import torch

class Runner:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cuda")

    def train(self, model, optimizer, loader):
        totals = {}
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cuda"):
                parts = model(x, y)
                loss = sum(parts.values())
            self.scaler.scale(loss).backward()
            self.scaler.step(optimizer)
            self.scaler.update()
            for name, part in parts.items():
                totals[name] = totals.get(name, 0.0) + part.item()
        return totals
""",
    ),
    Program(
        "amp.scaler",
        "a graph that is retained for nothing",
        """
import torch

def train(criterion, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda")
    model = torch.nn.Linear(8, 2)
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        scaler.scale(loss).backward(retain_graph=True)  # ML105
        scaler.step(optimizer)
        scaler.update()
""",
    ),
]

IGNITE = [
    Program(
        "ignite.trainer",
        "the output is a number unless told otherwise",
        """
from ignite.engine import create_supervised_trainer, Events

def build(model, optimizer, loss_fn):
    trainer = create_supervised_trainer(model, optimizer, loss_fn, device="cuda")
    losses = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def keep(engine):
        losses.append(engine.state.output)

    return trainer, losses
""",
    ),
    Program(
        "ignite.trainer",
        "an output that keeps the loss as it is, collected",
        """
from ignite.engine import create_supervised_trainer, Events

def build(model, optimizer, loss_fn):
    trainer = create_supervised_trainer(
        model, optimizer, loss_fn, output_transform=lambda x, y, y_pred, loss: loss
    )
    losses = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def keep(engine):
        losses.append(engine.state.output)  # ML102

    return trainer, losses
""",
    ),
    Program(
        "ignite.process-function",
        "a function that returns its loss",
        """
from ignite.engine import Engine

def build(model, optimizer, criterion):
    def update(engine, batch):
        model.train()
        optimizer.zero_grad()
        x, y = batch
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Engine(update)
""",
    ),
    Program(
        "ignite.process-function",
        "a function that collects its loss",
        """
from ignite.engine import Engine

def build(model, optimizer, criterion):
    history = []

    def update(engine, batch):
        model.train()
        optimizer.zero_grad()
        x, y = batch
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        history.append(loss)  # ML102
        return loss.item()

    return Engine(update), history
""",
    ),
    Program(
        "ignite.process-function",
        "a handler that collects a live output",
        """
from ignite.engine import Engine, Events

def build(model, optimizer, criterion):
    history = []

    def update(engine, batch):
        optimizer.zero_grad()
        x, y = batch
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    trainer = Engine(update)

    @trainer.on(Events.ITERATION_COMPLETED)
    def keep(engine):
        history.append(engine.state.output)  # ML102

    return trainer, history
""",
    ),
    Program(
        "ignite.process-function",
        "an accumulation that is not divided",
        """
from ignite.engine import Engine

def build(model, optimizer, criterion, accumulation_steps):
    def update(engine, batch):
        x, y = batch
        loss = criterion(model(x), y)
        loss.backward()  # ML201
        if engine.state.iteration % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return Engine(update)
""",
    ),
    Program(
        "ignite.evaluator",
        "an evaluation function without gradients",
        """
from ignite.engine import Engine
import torch

def build(model):
    def evaluate_step(engine, batch):
        model.eval()
        with torch.no_grad():
            x, y = batch
            return model(x), y

    return Engine(evaluate_step)
""",
    ),
    Program(
        "ignite.metrics",
        "metrics detach what they are given",
        """
from ignite.metrics import RunningAverage, Accuracy

def train(model, criterion, optimizer, loader):
    loss_average = RunningAverage(output_transform=lambda x: x)
    accuracy_average = RunningAverage(output_transform=lambda x: x)
    for x, y in loader:
        optimizer.zero_grad()
        logits = model(x)
        loss = criterion(logits, y)
        loss.backward()
        optimizer.step()
        loss_average.update(loss)
        accuracy_average.update((logits.argmax(1) == y).float().mean().item())
""",
    ),
    Program(
        "ignite.metrics",
        "metrics on attributes",
        """
from ignite.metrics import RunningAverage

class Runner:
    def __init__(self):
        self.loss_average = RunningAverage(output_transform=lambda x: x)
        self.accuracy_average = RunningAverage(output_transform=lambda x: x)

    def train(self, model, criterion, optimizer, loader):
        for x, y in loader:
            optimizer.zero_grad()
            logits = model(x)
            loss = criterion(logits, y)
            loss.backward()
            optimizer.step()
            self.loss_average.update(loss)
            self.accuracy_average.update((logits.argmax(1) == y).float().mean().item())
""",
    ),
    Program(
        "ignite.handlers",
        "a handler evaluates: the engine calls it with gradients on",
        """
from ignite.engine import Events

def attach(trainer, model, loader):
    @trainer.on(Events.EPOCH_COMPLETED)
    def validate(engine):
        model.eval()
        hits = 0
        for x, y in loader:
            hits += (model(x).argmax(1) == y).sum().item()  # ML401
        print(hits)
""",
    ),
    Program(
        "ignite.handlers",
        "a handler evaluates without gradients",
        """
from ignite.engine import Events
import torch

def attach(trainer, model, loader):
    @trainer.on(Events.EPOCH_COMPLETED)
    @torch.no_grad()
    def validate(engine):
        model.eval()
        hits = 0
        for x, y in loader:
            hits += (model(x).argmax(1) == y).sum().item()
        print(hits)
""",
    ),
    Program(
        "ignite.process-function",
        "an accumulation that is divided",
        """
from ignite.engine import Engine
import torch

def build(model, optimizer, criterion, scaler, accumulation_steps):
    def update(engine, batch):
        model.train()
        x, y = batch
        with torch.autocast("cuda"):
            loss = criterion(model(x), y) / accumulation_steps
        scaler.scale(loss).backward()
        if engine.state.iteration % accumulation_steps == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return {"loss": loss.item()}

    return Engine(update)
""",
    ),
    Program(
        "ignite.process-function",
        "handlers that collect numbers, and one that looks at a live output",
        """
from ignite.engine import Engine, Events

def build(model, optimizer, criterion):
    history = []

    def update(engine, batch):
        optimizer.zero_grad()
        x, y = batch
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return {"loss": loss, "number": loss.item()}

    trainer = Engine(update)

    @trainer.on(Events.ITERATION_COMPLETED(every=10))
    def keep(engine):
        history.append(engine.state.output["number"])
        print(engine.state.output["loss"])

    return trainer, history
""",
    ),
    Program(
        "ignite.process-function",
        "a handler that is added collects a live entry of the output",
        """
from ignite.engine import Engine, Events

history = []

def update(engine, batch):
    optimizer.zero_grad()
    x, y = batch
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    return {"loss": loss, "number": loss.item()}

def keep(engine):
    history.append(engine.state.output["loss"])  # ML102

def build():
    trainer = Engine(update)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, keep)
    return trainer
""",
    ),
    Program(
        "ignite.process-function",
        "an accumulation that is divided, in a file of its own",
        """
from ignite.engine import Engine

def build(model, optimizer, criterion, accumulation_steps):
    def update(engine, batch):
        x, y = batch
        loss = criterion(model(x), y) / accumulation_steps
        loss.backward()
        if engine.state.iteration % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return Engine(update)
""",
    ),
    Program(
        "ignite.trainer",
        "an output that is a number, collected",
        """
from ignite.engine import create_supervised_trainer, Events

def build(model, optimizer, loss_fn):
    trainer = create_supervised_trainer(
        model, optimizer, loss_fn, output_transform=lambda x, y, y_pred, loss: loss.item()
    )
    losses = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def keep(engine):
        losses.append(engine.state.output)

    return trainer, losses
""",
    ),
]

SKORCH = [
    Program(
        "skorch.train-step",
        "an override of the step",
        """
from skorch import NeuralNetClassifier
from skorch.dataset import unpack_data

class Net(NeuralNetClassifier):
    def train_step_single(self, batch, **fit_params):
        self._set_training(True)
        x, y = unpack_data(batch)
        y_pred = self.infer(x, **fit_params)
        loss = self.get_loss(y_pred, y, X=x, training=True)
        loss.backward()
        return {"loss": loss, "y_pred": y_pred}
""",
    ),
    Program(
        "skorch.train-step",
        "an override that keeps its loss",
        """
from skorch import NeuralNetClassifier
from skorch.dataset import unpack_data

class Net(NeuralNetClassifier):
    def train_step_single(self, batch, **fit_params):
        x, y = unpack_data(batch)
        y_pred = self.infer(x, **fit_params)
        loss = self.get_loss(y_pred, y, X=x, training=True)
        loss.backward()
        self.losses_.append(loss)  # ML102
        return {"loss": loss, "y_pred": y_pred}
""",
    ),
    Program(
        "skorch.get-loss",
        "a penalty is added",
        """
from skorch import NeuralNet

class Net(NeuralNet):
    def get_loss(self, y_pred, y_true, *args, **kwargs):
        loss = super().get_loss(y_pred, y_true, *args, **kwargs)
        for parameter in self.module_.parameters():
            loss = loss + self.weight * parameter.abs().sum()
        return loss
""",
    ),
    Program(
        "skorch.get-loss",
        "the loss is kept",
        """
from skorch import NeuralNet
import torch.nn.functional as F

class Net(NeuralNet):
    def get_loss(self, y_pred, y_true, X=None, training=False):
        loss = F.cross_entropy(y_pred, y_true)
        self.losses_.append(loss)  # ML102
        return loss
""",
    ),
    Program(
        "skorch.get-loss",
        "losses of validation are kept",
        """
from skorch import NeuralNet
import torch.nn.functional as F

class Net(NeuralNet):
    def get_loss(self, y_pred, y_true, X=None, training=False):
        loss = F.cross_entropy(y_pred, y_true)
        if not training:
            self.losses_.append(loss)
        return loss
""",
    ),
    Program(
        "skorch.validation-step",
        "an override without gradients",
        """
from skorch import NeuralNet
from skorch.dataset import unpack_data
import torch

class Net(NeuralNet):
    def validation_step(self, batch, **fit_params):
        self._set_training(False)
        x, y = unpack_data(batch)
        with torch.no_grad():
            y_pred = self.infer(x, **fit_params)
            loss = self.get_loss(y_pred, y, X=x, training=False)
        return {"loss": loss, "y_pred": y_pred}
""",
    ),
    Program(
        "skorch.validation-step",
        "an override with gradients: callbacks keep its predictions until the epoch ends",
        """
from skorch import NeuralNet
from skorch.dataset import unpack_data

class Net(NeuralNet):
    def validation_step(self, batch, **fit_params):
        self._set_training(False)
        x, y = unpack_data(batch)
        y_pred = self.infer(x, **fit_params)  # ML401
        loss = self.get_loss(y_pred, y, X=x, training=False)
        return {"loss": loss, "y_pred": y_pred}
""",
    ),
    Program(
        "skorch.infer",
        "an override of infer",
        """
from skorch import NeuralNet

class Net(NeuralNet):
    def infer(self, x, **fit_params):
        outputs = super().infer(x, **fit_params)
        parts = []
        for part in outputs:
            parts.append(part)
        return parts
""",
    ),
    Program(
        "skorch.callback",
        "a callback keeps the live loss of a step",
        """
from skorch.callbacks import Callback

class Record(Callback):
    def on_batch_end(self, net, batch=None, training=False, loss=None, y_pred=None, **kwargs):
        if training:
            self.losses_.append(loss)  # ML102
""",
    ),
    Program(
        "skorch.callback",
        "a callback keeps numbers",
        """
from skorch.callbacks import Callback

class Record(Callback):
    def on_batch_end(self, net, batch=None, training=False, loss=None, y_pred=None, **kwargs):
        if training:
            self.losses_.append(loss.item())
            self.entropies_.append(y_pred.detach().softmax(1).std().item())
""",
    ),
    Program(
        "skorch.callback",
        "a callback keeps the loss of validation, and a number in training",
        """
from skorch.callbacks import Callback

class Record(Callback):
    def on_batch_end(self, net, batch=None, training=False, loss=None, y_pred=None, **kwargs):
        if not training:
            self.losses_.append(loss)
        else:
            self.numbers_.append(loss.item())
""",
    ),
]

TORCHMETRICS = [
    Program(
        "torchmetrics.update",
        "a mean of live losses beside a mean of numbers",
        """
from torchmetrics import MeanMetric

def train(model, criterion, optimizer, loader):
    loss_metric = MeanMetric()
    accuracy_metric = MeanMetric()
    for x, y in loader:
        optimizer.zero_grad()
        logits = model(x)
        loss = criterion(logits, y)
        loss.backward()
        optimizer.step()
        loss_metric.update(loss)
        accuracy_metric.update((logits.argmax(1) == y).float().mean().item())
    return loss_metric.compute()
""",
    ),
    Program(
        "torchmetrics.update",
        "metrics on attributes: a mean of live losses beside a mean of numbers",
        """
import torchmetrics

class Runner:
    def __init__(self):
        self.loss_metric = torchmetrics.MeanMetric()
        self.accuracy_metric = torchmetrics.MeanMetric()

    def train(self, model, criterion, optimizer, loader):
        for x, y in loader:
            optimizer.zero_grad()
            logits = model(x)
            loss = criterion(logits, y)
            loss.backward()
            optimizer.step()
            self.loss_metric.update(loss)
            self.accuracy_metric.update((logits.argmax(1) == y).float().mean().item())
""",
    ),
    Program(
        "torchmetrics.update",
        "a meter that is no torchmetrics",
        """
from utils import AverageMeter

def train(model, criterion, optimizer, loader):
    losses = AverageMeter()
    accuracy = AverageMeter()
    loss_meter, accuracy_meter = losses, accuracy
    for x, y in loader:
        optimizer.zero_grad()
        logits = model(x)
        loss = criterion(logits, y)
        loss.backward()
        optimizer.step()
        loss_meter.update(loss, x.size(0))  # ML101
        accuracy_meter.update((logits.argmax(1) == y).float().mean().item(), x.size(0))
""",
    ),
    Program(
        "torchmetrics.list-state",
        "a list state keeps the tensors that it is given",
        """
from torchmetrics import CatMetric

def train(model, criterion, optimizer, loader):
    values = CatMetric()
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        values.update(loss)  # ML102
    return values.compute()
""",
    ),
    Program(
        "torchmetrics.list-state",
        "a list state that gets detached tensors",
        """
from torchmetrics import CatMetric

def train(model, criterion, optimizer, loader):
    values = CatMetric()
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        values.update(loss.detach())
    return values.compute()
""",
    ),
    Program(
        "torchmetrics.forward",
        "the value of a batch, read as a number",
        """
from torchmetrics.classification import MulticlassAccuracy

def train(model, criterion, optimizer, loader):
    accuracy = MulticlassAccuracy(10)
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        logits = model(x)
        loss = criterion(logits, y)
        loss.backward()
        optimizer.step()
        total += accuracy(logits, y)
    return total / len(loader), accuracy.compute()
""",
    ),
    Program(
        "torchmetrics.forward",
        "the value of a batch of a differentiable metric carries its graph",
        """
from torchmetrics import MeanSquaredError

def train(model, optimizer, loader):
    metric = MeanSquaredError()
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = metric(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss  # ML101
    return total / len(loader)
""",
    ),
    Program(
        "torchmetrics.compute",
        "values of epochs",
        """
from torchmetrics import MeanMetric

def train(model, criterion, optimizer, loader, epochs):
    history = []
    metric = MeanMetric()
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            metric.update(loss)
        history.append(metric.compute())
        metric.reset()
    return history
""",
    ),
    Program(
        "torchmetrics.update",
        "predictions go to a metric, numbers to another",
        """
import torch
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

def train(criterion, optimizer, loader):
    model = torch.nn.Linear(8, 2)
    accuracy_metric = MulticlassAccuracy(2)
    loss_metric = MeanMetric()
    for x, y in loader:
        optimizer.zero_grad()
        logits = model(x)
        loss = criterion(logits, y)
        loss.backward()
        optimizer.step()
        accuracy_metric.update(logits, y)
        loss_metric.update(loss.item())
    return accuracy_metric.compute(), loss_metric.compute()
""",
    ),
    Program(
        "torchmetrics.forward",
        "a metric of a Lightning module, logged",
        """
import lightning.pytorch as pl
import torch.nn.functional as F
from torchmetrics.classification import MulticlassAccuracy

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.train_accuracy = MulticlassAccuracy(10)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.train_accuracy(logits, y)
        self.log("accuracy", self.train_accuracy)
        return loss
""",
    ),
    Program(
        "torchmetrics.update",
        "a metric does not switch autograd off for the model",
        """
from torchmetrics.classification import MulticlassAccuracy

def validate(model, loader):
    model.eval()
    accuracy = MulticlassAccuracy(10)
    for x, y in loader:
        accuracy.update(model(x), y)  # ML401
    return accuracy.compute()
""",
    ),
    Program(
        "torchmetrics.list-state",
        "a list state of what is made without gradients",
        """
import torch
from torchmetrics import CatMetric

def validate(model, loader):
    values = CatMetric()
    model.eval()
    with torch.no_grad():
        for x, _ in loader:
            values.update(model(x))
    return values.compute()
""",
    ),
]

PIPELINING = [
    Program(
        "pipelining.step",
        "a schedule runs backward by itself",
        """
import torch
from torch.distributed.pipelining import ScheduleGPipe

def train(stage, optimizer, loss_fn, loader):
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_fn)
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        losses = []
        output = schedule.step(x, target=y, losses=losses)
        optimizer.step()
        total += torch.stack(losses).mean().item()
    return total
""",
    ),
    Program(
        "pipelining.step",
        "the losses it hands back carry their graph",
        """
import torch
from torch.distributed.pipelining import ScheduleGPipe

def train(stage, optimizer, loss_fn, loader):
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_fn)
    history = []
    for x, y in loader:
        optimizer.zero_grad()
        losses = []
        schedule.step(x, target=y, losses=losses)
        optimizer.step()
        history.append(torch.stack(losses).mean())  # ML102
    return history
""",
    ),
    Program(
        "pipelining.step",
        "one list for all steps: the schedule empties it",
        """
from torch.distributed.pipelining import Schedule1F1B

def train(stage, optimizer, loss_fn, loader):
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_fn)
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        schedule.step(x, target=y, losses=losses)
        optimizer.step()
""",
    ),
    Program(
        "pipelining.eval",
        "an evaluation without gradients",
        """
import torch

def evaluate(schedule, loader):
    total = 0.0
    for x, y in loader:
        losses = []
        with torch.no_grad():
            schedule.eval(x, target=y, losses=losses)
        total += torch.stack(losses).mean()
    return total
""",
    ),
    Program(
        "pipelining.step",
        "losses of a schedule that splits backward in two, which detaches them",
        """
import torch
from torch.distributed.pipelining import ScheduleInterleavedZeroBubble

def train(stages, optimizer, loss_fn, loader):
    schedule = ScheduleInterleavedZeroBubble(stages, n_microbatches=4, loss_fn=loss_fn)
    history = []
    for x, y in loader:
        optimizer.zero_grad()
        losses = []
        schedule.step(x, target=y, losses=losses)
        optimizer.step()
        history.append(torch.stack(losses).mean())
    return history
""",
    ),
]

FUNC = [
    Program(
        "func.grad",
        "the gradient of a function, of parameters that ask for none",
        """
import torch
from torch.func import functional_call, grad_and_value

def train(model, loss_fn, loader, rate):
    params = {name: p.detach() for name, p in model.named_parameters()}

    def compute(params, x, y):
        return loss_fn(functional_call(model, params, (x,)), y)

    total = 0.0
    for x, y in loader:
        grads, loss = grad_and_value(compute)(params, x, y)
        params = {name: p - rate * grads[name] for name, p in params.items()}
        total += loss
    return params, total
""",
    ),
    Program(
        "func.functional-call",
        "a stateless call, its loss backwarded and kept",
        """
import torch
import torch.nn.functional as F

def train(model, optimizer, loader):
    params = dict(model.named_parameters())
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)
        loss.backward()
        optimizer.step()
        total += loss  # ML101
    return total
""",
    ),
    Program(
        "func.functional-call",
        "a stateless call, its loss backwarded",
        """
import torch
import torch.nn.functional as F

def train(model, optimizer, loader):
    params = dict(model.named_parameters())
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total
""",
    ),
    Program(
        "func.vmap",
        "losses of samples, one backward",
        """
import torch

def train(model, optimizer, sample_loss, loader):
    history = []
    for x, y in loader:
        optimizer.zero_grad()
        losses = torch.vmap(sample_loss)(model(x), y)
        losses.mean().backward()
        optimizer.step()
        history.append(losses.detach())
    return history
""",
    ),
    Program(
        "func.vmap",
        "losses of samples are kept with their graph",
        """
import torch

def train(model, optimizer, sample_loss, loader):
    history = []
    for x, y in loader:
        optimizer.zero_grad()
        losses = torch.vmap(sample_loss)(model(x), y)
        losses.mean().backward()
        optimizer.step()
        history.append(losses)  # ML102
    return history
""",
    ),
    Program(
        "autograd.grad",
        "gradients carry no graph",
        """
import torch

def saliency(model, criterion, loader):
    model.eval()
    maps = []
    for x, y in loader:
        x.requires_grad_()
        loss = criterion(model(x), y)
        (gradient,) = torch.autograd.grad(loss, x)
        maps.append(gradient)
    return maps
""",
    ),
    Program(
        "autograd.grad",
        "the loss of the gradient is kept",
        """
import torch

def train(model, criterion, loader, rate):
    losses = []
    for x, y in loader:
        loss = criterion(model(x), y)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads):
                p -= rate * g
        losses.append(loss)  # ML102
    return losses
""",
    ),
    Program(
        "autograd.grad",
        "a gradient penalty has a graph and is backwarded",
        """
import torch

def train(critic, optimizer, loader):
    for real, fake in loader:
        optimizer.zero_grad()
        mixed = (0.5 * real + 0.5 * fake).requires_grad_()
        score = critic(mixed)
        (gradient,) = torch.autograd.grad(score.sum(), mixed, create_graph=True)
        penalty = ((gradient.norm(2, dim=1) - 1) ** 2).mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        loss.backward()
        optimizer.step()
""",
    ),
    Program(
        "autograd.grad",
        "a gradient penalty is summed with its graph",
        """
import torch

def train(critic, optimizer, loader):
    total = 0.0
    for real, fake in loader:
        optimizer.zero_grad()
        mixed = (0.5 * real + 0.5 * fake).requires_grad_()
        score = critic(mixed)
        (gradient,) = torch.autograd.grad(score.sum(), mixed, create_graph=True)
        penalty = ((gradient.norm(2, dim=1) - 1) ** 2).mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        loss.backward()
        optimizer.step()
        total += penalty  # ML101
    return total
""",
    ),
    Program(
        "autograd.function",
        "forward and backward run without gradients",
        """
import torch

class Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        total = torch.zeros_like(x[0])
        states = []
        for step in x:
            total += step * weight
            states.append(total)
        return torch.stack(states)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum()
""",
    ),
    Program(
        "autograd.function",
        "an output is kept on ctx",
        """
import torch

class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.exp(x)
        ctx.y = y  # ML108
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.y
""",
    ),
    Program(
        "hooks.forward",
        "a hook that keeps outputs with their graph",
        """
import torch

def record(model, loader):
    kept = []

    def hook(module, inputs, output):
        kept.append(output)  # ML107

    model.layer.register_forward_hook(hook)
    for x in loader:
        model(x)
    return kept
""",
    ),
    Program(
        "hooks.forward",
        "a hook that keeps detached outputs and is removed",
        """
import torch

def record(model, loader):
    kept = []

    def hook(module, inputs, output):
        kept.append(output.detach().cpu())

    handle = model.layer.register_forward_hook(hook)
    with torch.no_grad():
        for x in loader:
            model(x)
    handle.remove()
    return kept
""",
    ),
    Program(
        "hooks.tensor",
        "gradients that a tensor hook gets carry no graph",
        """
def train(model, criterion, optimizer, loader):
    norms = []
    for x, y in loader:
        optimizer.zero_grad()
        features = model.encoder(x)
        features.register_hook(lambda gradient: norms.append(gradient.norm()))
        criterion(model.head(features), y).backward()
        optimizer.step()
    return norms
""",
    ),
    Program(
        "compile.model",
        "a compiled model is a model",
        """
import torch

def evaluate(net, loader):
    compiled = torch.compile(net)
    compiled.eval()
    hits = 0
    for x, y in loader:
        hits += (compiled(x).argmax(1) == y).sum().item()  # ML401
    return hits
""",
    ),
    Program(
        "compile.model",
        "a compiled model without gradients",
        """
import torch

@torch.inference_mode()
def evaluate(net, loader):
    compiled = torch.compile(net)
    compiled.eval()
    hits = 0
    for x, y in loader:
        hits += (compiled(x).argmax(1) == y).sum().item()
    return hits
""",
    ),
    Program(
        "compile.step",
        "a compiled step returns its loss",
        """
import torch

@torch.compile
def step(model, criterion, optimizer, x, y):
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    return loss

def train(model, criterion, optimizer, loader):
    total = 0.0
    for x, y in loader:
        total += step(model, criterion, optimizer, x, y)  # ML101
    return total
""",
    ),
    Program(
        "compile.step",
        "compiled anew in every epoch",
        """
import torch

def train(model, criterion, optimizer, loader, epochs):
    for _ in range(epochs):
        fast = torch.compile(model)  # ML705
        for x, y in loader:
            optimizer.zero_grad()
            criterion(fast(x), y).backward()
            optimizer.step()
""",
    ),
    Program(
        "func.functional-call",
        "functorch's functional model",
        """
from functorch import make_functional_with_buffers

def train(model, criterion, optimizer, loader):
    fmodel, params, buffers = make_functional_with_buffers(model)
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(fmodel(params, buffers, x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss)  # ML102
    return losses
""",
    ),
    Program(
        "hooks.backward",
        "gradients that a module's backward hook gets carry no graph",
        """
def record(model, criterion, loader):
    norms = []

    def hook(module, grad_input, grad_output):
        norms.append(grad_output[0].norm())

    handle = model.layer.register_full_backward_hook(hook)
    for x, y in loader:
        criterion(model(x), y).backward()
    handle.remove()
    return norms
""",
    ),
    Program(
        "hooks.saved-tensors",
        "saved tensors packed for the host",
        """
import torch

def train(model, criterion, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
""",
    ),
    Program(
        "compile.model",
        "a module compiled in place",
        """
import torch

def train(model, criterion, optimizer, loader):
    model.compile(mode="max-autotune")
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss  # ML101
    return total
""",
    ),
    Program(
        "func.grad",
        "the value of a function of live parameters carries their graph",
        """
from torch.func import functional_call, grad_and_value

def train(model, loss_fn, optimizer, loader):
    params = dict(model.named_parameters())

    def compute(params, x, y):
        return loss_fn(functional_call(model, params, (x,)), y)

    total = 0.0
    for x, y in loader:
        grads, loss = grad_and_value(compute)(params, x, y)
        for name, parameter in params.items():
            parameter.grad = grads[name].detach()
        optimizer.step()
        total += loss  # ML101
    return total
""",
        wrong="silent: nothing is known of what grad_and_value returns",
    ),
    Program(
        "func.grad",
        "jacobians carry no graph unless asked for",
        """
import torch

def jacobians(model, loader):
    model.eval()
    found = []
    for x in loader:
        found.append(torch.autograd.functional.jacobian(model, x).cpu())
    return found
""",
    ),
    Program(
        "autograd.function",
        "an output is kept on ctx by setup_context",
        """
import torch

class Exp(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return torch.exp(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.y = output  # ML108

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.y
""",
    ),
    Program(
        "autograd.function",
        "an output is kept on ctx under custom_fwd",
        """
import torch

class Exp(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx, x):
        y = torch.exp(x)
        ctx.y = y  # ML108
        return y

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        return grad * ctx.y
""",
    ),
    Program(
        "hooks.forward",
        "a hook of all modules that keeps outputs",
        """
import torch

kept = []

def hook(module, inputs, output):
    kept.append(output)  # ML107

torch.nn.modules.module.register_module_forward_hook(hook)
""",
    ),
    Program(
        "func.grad",
        "gradients of samples",
        """
from torch.func import functional_call, grad, vmap

def gradients(model, criterion, loader):
    model.eval()
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss_of(params, x, y):
        return criterion(functional_call(model, params, (x.unsqueeze(0),)), y.unsqueeze(0))

    of_samples = vmap(grad(loss_of), in_dims=(None, 0, 0))
    found = []
    for x, y in loader:
        found.append(of_samples(params, x, y)["weight"].cpu())
    return found
""",
    ),
    Program(
        "func.functional-call",
        "inner steps whose graph the outer backward needs",
        """
import torch
from torch.func import functional_call

def meta_train(model, criterion, optimizer, tasks, rate, inner):
    for batch in tasks:
        optimizer.zero_grad()
        outer = 0.0
        for support_x, support_y, query_x, query_y in batch:
            params = dict(model.named_parameters())
            for _ in range(inner):
                loss = criterion(functional_call(model, params, (support_x,)), support_y)
                grads = torch.autograd.grad(loss, params.values(), create_graph=True)
                params = {k: p - rate * g for (k, p), g in zip(params.items(), grads)}
            outer += criterion(functional_call(model, params, (query_x,)), query_y)
        outer.backward()
        optimizer.step()
""",
    ),
    Program(
        "hooks.forward",
        "a hook of all modules whose list is emptied, and one that keeps shapes",
        """
import torch
from torch.nn.modules.module import register_module_forward_hook

kept, shapes = [], []

def hook(module, inputs, output):
    kept.append(output)

def look(module, inputs, output):
    shapes.append(output.shape)

register_module_forward_hook(hook)
register_module_forward_hook(look)

def start():
    kept.clear()
""",
    ),
    Program(
        "hooks.forward",
        "a hook of all modules, imported by its own name",
        """
from torch.nn.modules.module import register_module_forward_hook

kept = []

def hook(module, inputs, output):
    kept.append(output)  # ML107

register_module_forward_hook(hook)
""",
    ),
]

PROGRAMS = (
    LIGHTNING + FABRIC + ACCELERATE + TRAINER + DEEPSPEED + AMP + IGNITE + SKORCH + TORCHMETRICS + PIPELINING + FUNC
)


PARAMETERS = [
    pytest.param(
        program,
        id=f"{program.row}: {program.name}",
        marks=[pytest.mark.xfail(strict=True, reason=program.wrong)] if program.wrong else [],
    )
    for program in PROGRAMS
]


@pytest.mark.parametrize("program", PARAMETERS)
def test_programs(program: Program) -> None:
    assert reported(program.code) == wanted(program.code)


def test_every_row_of_the_document_has_programs() -> None:
    rows = re.findall(r"^\| `([a-z]+\.[a-z-]+)` \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == {program.row for program in PROGRAMS}


def test_programs_have_names_of_their_own() -> None:
    names = [(program.row, program.name) for program in PROGRAMS]
    assert len(names) == len(set(names))
