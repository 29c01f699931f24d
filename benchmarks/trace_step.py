"""One training step that was recorded on a real GPU, run on the virtual device, allocation by allocation.

    python benchmarks/trace_step.py [--data TRACE.json.gz] [--card h100] [--least SHARE]

The trace holds the events of CUDA's caching allocator for a step of the transformer in the public repository
kkaitlyn111/cs336-a2-systems (its model: kkaitlyn111/cs336-assignment1), and the line of each allocation of forward and
optimizer. What is below does the same operations in the same order, written anew; a comment at a line's end names the
line of the recorded program whose operations it does. The repository's settings: "2.7b" in float32, batch 4, context
128, 10,000 tokens, no autocast, torch 2.6. The card is not named; the workspace of cuBLAS in the trace, 32 MiB, is
that of capability 9.0 in that version.

Both sequences are aligned by their longest common subsequence. Printed is how much of what CUDA allocated is predicted:
by size in order; by size and line; with the frees between, too; and what is missing and extra, by line and size. In
backward no line was recorded: sizes alone are compared there. Exit 1 where the share by size and line is below --least.
"""

from __future__ import annotations

import argparse
import gzip
import json
import linecache
import math
import re
import sys
from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from memlint.virtual.device import VirtualCuda, in_backward

DATA = Path(__file__).resolve().parents[1] / "fixtures" / "step_traces" / "transformer.json.gz"
WIDTH, HIDDEN, LAYERS, HEADS, VOCABULARY, BATCH, CONTEXT = 2560, 10240, 32, 32, 10_000, 4, 128
BACKWARD = "backward"


# -- the step ------------------------------------------------------------------------------------------------------


class Projection(nn.Module):
    """A matrix product without a bias.

    The recorded program says `einsum(weight, x)`. Which operand comes first in the product that einsum makes of it
    changed after torch 2.6, and with it the layout of all that follows; so that later versions take the recorded way,
    the product is written out as 2.6 had it.
    """

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        columns = x.permute(2, 0, 1).flatten(1)
        out = torch.bmm(self.weight.unsqueeze(0), columns.unsqueeze(0))  # transformer.py:22
        return out.view(-1, *x.shape[:2]).permute(1, 2, 0)


class Tokens(nn.Module):
    """An embedding that is looked up by indexing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]  # transformer.py:39


class Norm(nn.Module):
    """Root mean square normalisation from single operators."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # transformer.py:54
        scale = (length**2 / WIDTH + 1e-5).sqrt()  # transformer.py:55
        scaled = x / scale  # transformer.py:56
        return torch.einsum("d,bsd->bsd", self.weight, scaled)  # transformer.py:57


class GatedMLP(nn.Module):
    """SwiGLU: the sigmoid of one projection times it, times another."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.down = Projection(HIDDEN, WIDTH), Projection(WIDTH, HIDDEN)
        self.up = Projection(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        active = torch.sigmoid(gate) * gate  # transformer.py:78
        product = active * up  # transformer.py:79
        out: Tensor = self.down(product)
        return out


class Rotary(nn.Module):
    """Rotates neighbours in pairs, written into zeros."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table: Tensor
        self.register_buffer("table", torch.empty(CONTEXT, width // 2, 2))

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        pairs = x.view(*x.shape[:-1], -1, 2)
        cosine = self.table[places, :, 0]  # transformer.py:117
        sine = self.table[places, :, 1]  # transformer.py:118
        cosine, sine = cosine.unsqueeze(1), sine.unsqueeze(1)
        turned = torch.zeros_like(pairs)  # transformer.py:125
        turned[..., 0] = cosine * pairs[..., 0] - sine * pairs[..., 1]  # transformer.py:126
        turned[..., 1] = sine * pairs[..., 0] + cosine * pairs[..., 1]  # transformer.py:127
        return turned.reshape(x.shape)


def softmax(x: Tensor) -> Tensor:
    """From single operators."""
    largest = torch.max(x, dim=-1, keepdim=True)[0]  # transformer.py:135
    raised = torch.exp(x - largest)  # transformer.py:138
    total = torch.sum(raised, dim=-1, keepdim=True)  # transformer.py:140
    return raised / total  # transformer.py:142


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention from single operators."""
    width = query.shape[-1]
    scores = torch.einsum("...qd,...kd->...qk", query, key)  # transformer.py:147
    scores = scores / math.sqrt(width)  # transformer.py:148
    scores = scores.masked_fill(mask == False, -1e9)  # noqa: E712  # transformer.py:151
    shares = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", shares, value)  # transformer.py:154


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (Projection(WIDTH, WIDTH) for _ in range(3))
        self.out = Projection(WIDTH, WIDTH)
        self.rotary = Rotary(WIDTH // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = [each(x) for each in (self.query, self.key, self.value)]
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        places = torch.arange(length, device=x.device).unsqueeze(0).expand(batch, -1)  # transformer.py:199
        query, key = self.rotary(query, places), self.rotary(key, places)
        mask = torch.ones(length, length, device=x.device).triu(diagonal=1).to(torch.bool)  # transformer.py:204
        mask = ~mask  # transformer.py:205
        mixed = attend(query, key, value, mask.expand(batch, HEADS, -1, -1))
        mixed = mixed.transpose(1, 2).reshape(batch, length, -1)  # transformer.py:211
        out: Tensor = self.out(mixed)
        return out


class Block(nn.Module):
    """Attention and the MLP, each behind a norm and beside the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.attention = Norm(), Attention()
        self.norm_mlp, self.mlp = Norm(), GatedMLP()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm_attention(x)
        inner = self.attention(inner)
        x = x + inner  # transformer.py:245
        inner = self.norm_mlp(x)
        inner = self.mlp(inner)
        out: Tensor = x + inner  # transformer.py:250
        return out


class Transformer(nn.Module):
    """The language model."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = Tokens()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = Norm(), Projection(VOCABULARY, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """From single operators; rows are numbered on the CPU, as in the recorded program."""
    logits, targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    largest = torch.max(logits, dim=-1, keepdim=True).values  # training.py:21
    logits = logits - largest  # training.py:22
    raised = torch.exp(logits)  # training.py:25
    total = raised.sum(dim=-1)  # training.py:26
    of_targets = logits[torch.arange(logits.shape[0]), targets]  # training.py:29
    losses = torch.log(total) - of_targets  # training.py:31
    return losses.mean()  # training.py:33


class AdamW:
    """Decoupled weight decay, one parameter after the other, from single operators."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.state: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}

    def step(self) -> None:
        rate, first, second, eps, decay = 1e-4, 0.9, 0.95, 1e-8, 0.01
        for each in self.parameters:
            gradient = each.grad
            if gradient is None:
                continue
            if each not in self.state:
                mean = torch.zeros_like(each.data)  # optimizers.py:82
                square = torch.zeros_like(each.data)  # optimizers.py:84
                self.state[each] = (mean, square)
            mean, square = self.state[each]
            mean.mul_(first).add_(gradient, alpha=1 - first)
            square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
            divisor = (square.sqrt() / math.sqrt(1 - second)).add_(eps)  # optimizers.py:100
            each.data.addcdiv_(mean, divisor, value=-rate / (1 - first))
            each.data.add_(each.data, alpha=-rate * decay)


# -- both sequences ------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """An allocation of `nbytes`, or a free; at which line of the recorded program, by which operator if known."""

    nbytes: int
    line: str
    operator: str = ""
    freed: bool = False


def recorded(path: Path) -> list[Event]:
    """What CUDA did in the step."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    found = []
    for (action, _, nbytes, _), site in zip(trace["events"], trace["sites"], strict=True):
        if action in ("alloc", "free_completed"):
            found.append(Event(nbytes, site or BACKWARD, freed=action != "alloc"))
    return found


_LINE = re.compile(r"# (\w+\.py:\d+)$")


def _line() -> str:
    """The line of the recorded program that the step is at: that of the innermost frame in this file that names one."""
    if in_backward():
        return BACKWARD
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == __file__:
            found = _LINE.search(linecache.getline(__file__, frame.f_lineno).rstrip())
            if found:
                return found[1]
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


def predicted(card: str) -> list[Event]:
    """What the virtual device does in the step."""
    events: list[Event] = []
    sizes: dict[int, int] = {}

    def note(action: str, index: int, address: int, nbytes: int, operator: str) -> None:
        if action == "alloc":
            sizes[address] = nbytes
            events.append(Event(nbytes, _line(), operator.removeprefix("aten::")))
        elif address in sizes:
            events.append(Event(sizes.pop(address), "", operator.removeprefix("aten::"), freed=True))

    with VirtualCuda(card) as virtual, torch.device("cuda"):
        model = Transformer()
        optimizer = AdamW(list(model.parameters()))
        ids = torch.randint(0, VOCABULARY, (BATCH, CONTEXT))
        with torch.no_grad():
            model(ids)  # other passes forward ran before: cuBLAS has its workspace of this thread
        virtual.settle()
        virtual.device.listener = note
        with torch.device("cpu"):  # what names no device is made on the CPU
            logits = model(ids)  # held until the end of the step, as in the recorded program
            loss = cross_entropy(logits, ids)
            loss.backward()  # type: ignore[no-untyped-call]  # benchmark.py:233
            optimizer.step()
        virtual.settle()
        virtual.device.listener = None
    return events


# -- comparison ----------------------------------------------------------------------------------------------------


def common(first: Sequence[Hashable], second: Sequence[Hashable]) -> list[tuple[int, int]]:
    """The places of a longest common subsequence of both.

    With one bit for each place of `second` and one number a row, as by Crochemore et al., A fast and practical
    bit-vector algorithm for the longest common subsequence problem (2001); a zero bit is where the length grows.
    """
    where: dict[Hashable, int] = {}
    for at, item in enumerate(second):
        where[item] = where.get(item, 0) | 1 << at
    everything = (1 << len(second)) - 1
    rows = [everything]
    for item in first:
        row, match = rows[-1], where.get(item, 0)
        rows.append(((row + (row & match)) | (row & ~match)) & everything)
    pairs = []
    at, end = len(first), len(second)
    while at and end:
        if rows[at] >> (end - 1) & 1:
            end -= 1  # the last of `second` is in no longest one
        elif not rows[at - 1] >> (end - 1) & 1:
            at -= 1
        else:
            at, end = at - 1, end - 1
            pairs.append((at, end))
    return pairs[::-1]


def peak(events: Sequence[Event]) -> int:
    """The most bytes in use above what was in use at the start."""
    now = most = 0
    for event in events:
        now += -event.nbytes if event.freed else event.nbytes
        most = max(most, now)
    return most


def _shown(title: str, counts: Counter[tuple[str, str, int]]) -> None:
    print(f"\n{title}: {counts.total()}")
    for (line, operator, nbytes), count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        print(f"  {count:5d} x {nbytes:>11,} bytes  {line}  {operator}".rstrip())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="the trace (default: %(default)s)")
    parser.add_argument("--card", default="h100", help="the card (default: %(default)s)")
    parser.add_argument("--least", type=float, default=0.0, help="the least share, 0 to 1 (default: %(default)s)")
    options = parser.parse_args()
    if not options.data.is_file():
        print(f"error: {options.data}: there is no such trace; --data names another place", file=sys.stderr)
        return 2
    real, ours = recorded(options.data), predicted(options.card)
    taken = [event for event in real if not event.freed]
    made = [event for event in ours if not event.freed]

    sized = common([event.nbytes for event in taken], [event.nbytes for event in made])
    lined = common([(event.nbytes, event.line) for event in taken], [(event.nbytes, event.line) for event in made])
    every = common([(event.nbytes, event.freed) for event in real], [(event.nbytes, event.freed) for event in ours])
    for title, pairs, whole, other in (
        ("allocations by size, in order", sized, taken, made),
        ("allocations by size and line, in order", lined, taken, made),
        ("allocations and frees by size, in order", every, real, ours),
    ):
        share = len(pairs) / len(whole)
        print(f"{title}: {len(pairs)} of {len(whole)} predicted ({share:.2%}), {len(other) - len(pairs)} extra")
    for name, held in (("backward", True), ("forward and optimizer", False)):
        whole = [event for event in taken if (event.line == BACKWARD) is held]
        hit = sum((taken[at].line == BACKWARD) is held for at, _ in lined)
        print(f"  of which {name}: {hit} of {len(whole)} ({hit / len(whole):.2%})")
    high, said = peak(real), peak(ours)
    print(f"peak above the start: {high:,} bytes on CUDA, {said:,} here ({said / high - 1:+.3%})")

    found = {at for at, _ in lined}
    used = {at for _, at in lined}
    _shown("missing", Counter((e.line, "", e.nbytes) for at, e in enumerate(taken) if at not in found))
    _shown("extra", Counter((e.line, e.operator, e.nbytes) for at, e in enumerate(made) if at not in used))
    return 0 if len(lined) >= options.least * len(taken) else 1


if __name__ == "__main__":
    sys.exit(main())
