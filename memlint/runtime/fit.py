"""`memlint fit`: the largest batch (or whatever is varied) that fits a card, what fills it, and what would help.

Everything is measured on the virtual device, by running steps: the values that are tried, and each change that might
help. Nothing is changed but this process, and that only while a change is tried.

This stands beside the runtime half and not in `virtual/`, since it needs the tracer to say what fills the card.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memlint.errors import UsageError
from memlint.runtime.budget import FEWEST_STEPS
from memlint.runtime.sites import shown_path
from memlint.units import format_bytes

#: of the card's memory, what is left free for what no prediction knows (fragmentation over time, libraries)
MARGIN = 0.05
STEPS = 3
_UNLIMITED = 1 << 60
_RANGE = re.compile(r"(\d+)\.\.(\d+)")

#: what a change is tried in: a context that is entered before the step is made
Change = Callable[[], "contextlib.AbstractContextManager[Any]"]


@dataclass(frozen=True, slots=True)
class Measured:
    """One value that was tried. Sizes in bytes; process: reserved and the CUDA context. error: why there is no size."""

    value: int
    allocated: int = 0
    reserved: int = 0
    process: int = 0
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Helps:
    """A change that was tried at one value. saves: bytes of the process."""

    name: str
    how: str
    measured: Measured
    saves: int


@dataclass(frozen=True, slots=True)
class Fit:
    """The answer. best: the largest value that fits, None if none does. limit: what the process may take, in bytes.

    monotone: whether no larger value fitted where a smaller one did not. categories: what was alive at the peak of
    `shown_at`, in bytes, the largest first; lines: the same by source line.
    """

    card: str
    torch: str
    name: str
    limit: int
    margin: float
    context: int
    best: int | None
    runs: tuple[Measured, ...]
    monotone: bool
    shown_at: int | None = None
    categories: tuple[tuple[str, int], ...] = ()
    lines: tuple[tuple[str, int], ...] = ()
    helps: tuple[Helps, ...] = field(default=())
    notes: tuple[str, ...] = field(default=())

    def fits(self, run: Measured) -> bool:
        """Whether a run stayed within the limit."""
        return not run.error and run.process <= self.limit


def parse_vary(text: str) -> tuple[str, tuple[int, ...] | range]:
    """`batch_size=1..512` or `batch_size=8,16,32` as a name and its values. Raises UsageError."""
    name, found, values = text.rpartition("=")
    if found and name and (match := _RANGE.fullmatch(values)):
        low, high = int(match[1]), int(match[2])
        if 1 <= low <= high:
            return name, range(low, high + 1)
    if found and name:
        try:
            numbers = tuple(sorted({int(value) for value in values.split(",")}))
        except ValueError:
            numbers = ()
        if numbers and numbers[0] >= 1:
            return name, numbers
    raise UsageError(f"--vary {text}: it wants NAME=LOW..HIGH or NAME=N,N,..., such as batch_size=1..512")


def largest(values: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of the values that fits, by bisection: `fits` is asked about log2(n) of them. None if none does."""
    low, high = 0, len(values) - 1
    best: int | None = None
    # most answers lie far below the end of a range: doubling finds the place with small, quick runs
    step = 1
    while low <= high:
        probe = min(low + step - 1, high) if best is not None or low == 0 else (low + high) // 2
        if fits(values[probe]):
            best, low, step = values[probe], probe + 1, step * 2
        else:
            high = probe - 1
            break
    while low <= high:
        middle = (low + high) // 2
        if fits(values[middle]):
            best, low = values[middle], middle + 1
        else:
            high = middle - 1
    return best


def fit(
    make_step: Callable[..., Any],
    values: Sequence[int],
    *,
    name: str = "batch_size",
    gpu: str = "t4",
    margin: float = MARGIN,
    steps: int = STEPS,
    advise: bool = True,
    fixed: Mapping[str, Any] | None = None,
) -> Fit:
    """The largest of `values` with which the step that `make_step(**{name: value})` returns fits on `gpu`.

    make_step builds the model and whatever else a step needs, on the device "cuda", and returns a function without
    arguments that runs one training step. margin: the part of the card that is to stay free. steps: how many are run
    for each value. advise: whether changes that might help are tried, too.

    Raises ConfigError for a card that is not known; what `make_step` raises passes through when the smallest value does
    not run at all.
    """
    import torch

    from memlint.virtual.cards import card, context_bytes

    on = card(gpu)
    context, _ = context_bytes(on, str(torch.__version__))
    limit = int(on.total_bytes * (1 - margin))

    def build(value: int) -> Callable[[], object]:
        return _step_of(make_step(**{name: value}, **(fixed or {})))

    runs: dict[int, Measured] = {}

    def measured(value: int) -> Measured:
        if value not in runs:
            runs[value] = measure(lambda: build(value), value, on.name, steps, strict=not runs)
        return runs[value]

    def fits(value: int) -> bool:
        run = measured(value)
        return not run.error and run.process <= limit

    ordered = sorted(values)
    best = largest(ordered, fits)
    tried = tuple(runs[value] for value in sorted(runs))
    answers = [not run.error and run.process <= limit for run in tried]
    monotone = answers == sorted(answers, reverse=True) and all(
        a.process <= b.process for a, b in itertools.pairwise(run for run in tried if not run.error)
    )
    found = Fit(on.title, str(torch.__version__), name, limit, margin, context, best, tried, monotone)
    shown = best if best is not None else ordered[0]
    found = _with_breakdown(found, lambda: build(shown), shown, on.name, steps)
    if advise:
        above = next((run.value for run in tried if best is not None and run.value > best), shown)
        found = _with_advice(found, build, above, on.name, steps)
    return found


def measure(
    make: Callable[[], Callable[[], object]],
    value: int,
    gpu: str,
    steps: int,
    change: Change | None = None,
    *,
    strict: bool = False,
) -> Measured:
    """Run some steps on a virtual card without a limit, and read its peaks over all of them."""
    import torch

    from memlint.virtual.device import VirtualCuda

    began = time.perf_counter()
    try:
        with VirtualCuda(gpu, capacity=_UNLIMITED) as virtual, (change or contextlib.nullcontext)():
            step = make()
            for _ in range(steps):
                step()
            virtual.settle()
            peak = virtual.allocator.counters.peak
            allocated, reserved = peak["allocated_bytes"], peak["reserved_bytes"]
            context = virtual.device.context
            del step
            gc.collect()
    except Exception as error:
        if strict:
            raise
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        return Measured(value, seconds=time.perf_counter() - began, error=f"{type(error).__name__}: {first}")
    finally:
        torch.clear_autocast_cache()
    return Measured(value, allocated, reserved, reserved + context, time.perf_counter() - began)


def _step_of(made: Any) -> Callable[[], object]:
    """The step in what `make_step` returned: itself, the last of a tuple, or its method `step`."""
    if isinstance(made, tuple) and made and callable(made[-1]):
        made = made[-1]
    if callable(made):
        return made  # type: ignore[no-any-return]
    step = getattr(made, "step", None)
    if callable(step):
        return step  # type: ignore[no-any-return]
    raise UsageError("make_step has to return a function without arguments that runs one training step")


# -- targets -----------------------------------------------------------------------------------------------------------


def load(target: str) -> Callable[..., Any]:
    """The function that `train.py:make_step` or `package.module:make_step` names. Raises UsageError."""
    place, _, name = target.rpartition(":")
    try:
        if place.endswith(".py") or os.sep in place:
            spec = importlib.util.spec_from_file_location("__memlint_fit__", place)
            if spec is None or spec.loader is None or not os.path.isfile(place):
                raise UsageError(f"{place}: there is no such file")
            sys.path.insert(0, os.path.dirname(os.path.abspath(place)))
            module = importlib.util.module_from_spec(spec)
            sys.modules["__memlint_fit__"] = module
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, os.getcwd())
            module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise UsageError(f"{target}: {error}") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{target}: there is no function {name!r}")
    return function  # type: ignore[no-any-return]


def fit_script(
    script: str,
    arguments: Sequence[str],
    name: str,
    values: Sequence[int],
    *,
    gpu: str = "t4",
    margin: float = MARGIN,
    steps: int = STEPS,
) -> Fit:
    """As `fit`, for an unmodified script: each value is a run of `memlint run` in a process of its own.

    name: a constant that the script assigns at its top, or `argv:--batch-size` for an option that it takes.
    Raises UsageError where the smallest value does not run.
    """
    import torch

    from memlint.virtual.cards import card, context_bytes

    on = card(gpu)
    context, _ = context_bytes(on, str(torch.__version__))
    limit = int(on.total_bytes * (1 - margin))
    runs: dict[int, Measured] = {}

    def fits(value: int) -> bool:
        if value not in runs:
            runs[value] = _run_script(script, arguments, name, value, on.name, steps, strict=not runs)
        run = runs[value]
        return not run.error and run.process <= limit

    best = largest(sorted(values), fits)
    tried = tuple(runs[value] for value in sorted(runs))
    answers = [not run.error and run.process <= limit for run in tried]
    shown = name.removeprefix("argv:")
    notes = ("a script is run as it is: for what would help, give a function: FILE.py:FUNCTION",)
    return Fit(
        on.title, str(torch.__version__), shown, limit, margin, context, best, tried,
        answers == sorted(answers, reverse=True), notes=notes,
    )  # fmt: skip


def _run_script(
    script: str, arguments: Sequence[str], name: str, value: int, gpu: str, steps: int, *, strict: bool
) -> Measured:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.json")
        command = [sys.executable, "-m", "memlint", "run", "--device", f"virtual:{gpu}", "--trace", "never"]
        command += ["--warmup", "1", "--steps", str(max(FEWEST_STEPS, steps)), "--growth", str(_UNLIMITED)]
        command += ["--report", report]
        option = name.removeprefix("argv:")
        given = list(arguments)
        if option != name:
            given = _with_option(given, option, value)
        else:
            command += ["--set", f"{name}={value}"]
        ran = subprocess.run([*command, script, *given], capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - began
        try:
            with open(report, encoding="utf-8") as file:
                record = json.load(file)["tests"][0]
        except (OSError, ValueError, LookupError):
            record = None
    oom = record is not None and any(verdict["limit"] == "oom" for verdict in record["verdicts"])
    if oom:
        return Measured(value, seconds=seconds, error="out of memory")
    if record is None or ran.returncode not in (0, 1) or not record["steps"] or (ran.returncode and record["passed"]):
        lines = [line for line in ran.stderr.splitlines() if line.strip()]
        said = next(
            (line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "it ended without a step"
        )
        if strict:
            raise UsageError(f"{script} does not run with {option}={value}: {said}")
        return Measured(value, seconds=seconds, error=said)
    process = int(record["details"]["process"])
    reserved = process - int(record["details"]["context"])
    return Measured(value, int(record["peak"] or 0), reserved, process, seconds)


def _with_option(arguments: list[str], option: str, value: int) -> list[str]:
    """The arguments with an option set, in place of what it was set to."""
    kept = []
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument == option:
            skip = True
        elif not argument.startswith(f"{option}="):
            kept.append(argument)
    return [*kept, option, str(value)]


# -- what fills the card ---------------------------------------------------------------------------------------------


def _with_breakdown(found: Fit, make: Callable[[], Callable[[], object]], value: int, gpu: str, steps: int) -> Fit:
    from memlint.runtime.backends.virtual import VirtualBackend
    from memlint.runtime.session import Tracing, traced_through

    backend = VirtualBackend(gpu, capacity=_UNLIMITED)
    backend.start()
    try:
        made: list[Callable[[], object]] = []

        def first(tracing: Tracing) -> None:
            made.append(make())
            for _ in range(tracing.steps):
                with tracing.step():
                    made[0]()

        traced = traced_through(first)(Tracing(backend.device_type, max(2, steps)))
        made.clear()
    finally:
        backend.stop()
    breakdown = traced.peak
    if breakdown is None:
        return found
    lines = tuple(
        (f"{shown_path(group.site.path)}:{group.site.line}" if group.site is not None else "elsewhere", group.nbytes)
        for group in breakdown.groups
    )
    return replace(found, shown_at=value, categories=tuple(breakdown.categories), lines=lines)


# -- what would help -------------------------------------------------------------------------------------------------


def _with_advice(found: Fit, build: Callable[[int], Callable[[], object]], value: int, gpu: str, steps: int) -> Fit:
    base = next((run for run in found.runs if run.value == value and not run.error), None)
    if base is None:
        return found
    helps: list[Helps] = []
    tries: list[tuple[str, str, Callable[[], Measured]]] = [
        (name, how, _try(build, value, gpu, steps, change)) for name, how, change in CHANGES
    ]
    if value > 1:
        half = value // 2
        tries.append(
            (
                f"{found.name}={half}, accumulated over 2",
                "run two micro-steps before optimizer.step(), the loss divided by 2",
                lambda: measure(lambda: _accumulated(build(half)), half, gpu, steps),
            )
        )
    for name, how, run in tries:
        tried = run()
        saves = base.process - tried.process
        if not tried.error and saves > base.process // 200:
            helps.append(Helps(name, how, tried, saves))
    return replace(found, helps=tuple(sorted(helps, key=lambda each: -each.saves)))


def _try(
    build: Callable[[int], Callable[[], object]], value: int, gpu: str, steps: int, change: Change
) -> Callable[[], Measured]:
    def run() -> Measured:
        wrapped = change()
        holder: list[Any] = []

        @contextlib.contextmanager
        def entered() -> Iterator[None]:
            with wrapped as around:
                holder.append(around)
                yield

        def make() -> Callable[[], object]:
            step = build(value)
            around = holder[0] if holder else None
            return around(step) if callable(around) else step

        return measure(make, value, gpu, steps, entered)

    return run


def _accumulated(step: Callable[[], object]) -> Callable[[], object]:
    """Two micro-steps to each optimizer step: gradients of the first are there while the second runs."""
    from torch.optim import Optimizer

    def run() -> None:
        with _patched((Optimizer, "zero_grad", lambda *args, **kwargs: None), *_no_steps()):
            step()
        with _patched((Optimizer, "zero_grad", lambda *args, **kwargs: None)):
            step()
        for optimizer in _optimizers():
            optimizer.zero_grad()

    return run


def _optimizers() -> list[Any]:
    from torch.optim import Optimizer

    from memlint.runtime.tracker import objects_of

    return objects_of(Optimizer)


def _no_steps() -> list[tuple[Any, str, Any]]:
    return [(type(optimizer), "step", lambda *args, **kwargs: None) for optimizer in _optimizers()]


@contextlib.contextmanager
def _patched(*places: tuple[Any, str, Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name, value in places:
            had = name in vars(owner)
            before = getattr(owner, name)
            setattr(owner, name, value)
            stack.callback(setattr, owner, name, before) if had else stack.callback(delattr, owner, name)
        yield


@contextlib.contextmanager
def _autocast() -> Iterator[Any]:
    import torch

    dtype = torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16

    def around(step: Callable[[], object]) -> Callable[[], object]:
        # only the forward passes: modules run under autocast, the backward does not
        call = torch.nn.Module.__call__
        depth = [0]

        def cast(module: Any, *args: Any, **kwargs: Any) -> Any:
            if depth[0]:
                return call(module, *args, **kwargs)
            depth[0] += 1
            try:
                with torch.autocast("cuda", dtype=dtype):
                    return call(module, *args, **kwargs)
            finally:
                depth[0] -= 1

        def run() -> None:
            with _patched((torch.nn.Module, "__call__", cast)):
                step()

        return run

    yield around


@contextlib.contextmanager
def _checkpointed() -> Iterator[Any]:
    import torch
    from torch.utils.checkpoint import checkpoint

    from memlint.runtime.tracker import objects_of

    def around(step: Callable[[], object]) -> Callable[[], object]:
        found = False
        for holder in objects_of(torch.nn.Module):
            children = list(holder.children())
            kinds = {type(child) for child in children}
            if (
                not isinstance(holder, (torch.nn.ModuleList, torch.nn.Sequential))
                or len(children) < 2
                or len(kinds) > 1
            ):
                continue
            if not any(True for _ in children[0].children()):
                continue  # single layers are not worth it
            for block in children:
                _checkpoint(block, checkpoint)
                found = True
        if not found:
            raise UsageError("no repeated blocks were found")
        return step

    yield around


def _checkpoint(block: Any, checkpoint: Any) -> None:
    forward = block.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    block.forward = run


@contextlib.contextmanager
def _optimizer_defaults(fused: bool, foreach: bool) -> Iterator[None]:
    from torch.optim import adam, adamw, optimizer, sgd

    def choose(*args: Any, **kwargs: Any) -> tuple[bool, bool]:
        return fused, foreach

    places = [
        (module, "_default_to_fused_or_foreach", choose)
        for module in (adam, adamw, optimizer, sgd)
        if hasattr(module, "_default_to_fused_or_foreach")
    ]
    with _patched(*places):
        yield


@contextlib.contextmanager
def _other_optimizer(kind: str) -> Iterator[None]:
    import torch

    def make(params: Any, lr: Any = 1e-3, **_: Any) -> Any:
        return torch.optim.SGD(params, lr=lr) if kind == "sgd" else _adam8(params, lr)

    names = [name for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "RMSprop") if hasattr(torch.optim, name)]
    with _patched(*((torch.optim, name, make) for name in names)):
        yield


def _adam8(params: Any, lr: Any) -> Any:
    """Adam with moments of one byte and a float32 scale for each 256 of them (bitsandbytes' block-wise optimizers)."""
    import torch

    class Adam8bit(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None and "state1" not in self.state[p]:
                        for name in ("state1", "state2"):
                            self.state[p][name] = torch.zeros_like(p, dtype=torch.uint8)
                            self.state[p][f"{name}_absmax"] = torch.zeros(-(-p.numel() // 256), device=p.device)
            return None

    return Adam8bit()


@contextlib.contextmanager
def _set_to_none() -> Iterator[None]:
    from torch.optim import Optimizer

    zero = Optimizer.zero_grad

    def clear(self: Any, set_to_none: bool = True) -> None:
        zero(self, set_to_none=True)

    with _patched((Optimizer, "zero_grad", clear)):
        yield


@contextlib.contextmanager
def _sdpa() -> Iterator[Any]:
    import torch

    from memlint.runtime.tracker import objects_of

    def around(step: Callable[[], object]) -> Callable[[], object]:
        configs = {id(c): c for m in objects_of(torch.nn.Module) if (c := getattr(m, "config", None)) is not None}
        eager = [c for c in configs.values() if getattr(c, "_attn_implementation", None) == "eager"]
        if not eager:
            raise UsageError("no eager attention was found")
        for config in eager:
            config._attn_implementation = "sdpa"
        return step

    yield around


CHANGES: tuple[tuple[str, str, Change], ...] = (
    ("autocast", "run the forward pass under torch.autocast('cuda', ...)", _autocast),
    ("checkpointed blocks", "torch.utils.checkpoint around each repeated block, use_reentrant=False", _checkpointed),
    ("zero_grad(set_to_none=True)", "free gradients between steps", _set_to_none),
    ("foreach=False", "give the optimizer foreach=False", lambda: _optimizer_defaults(False, False)),
    ("fused=True", "give the optimizer fused=True", lambda: _optimizer_defaults(True, False)),
    ("8-bit Adam", "an optimizer with 8-bit state, such as bitsandbytes' AdamW8bit", lambda: _other_optimizer("8bit")),
    ("SGD", "an optimizer without state", lambda: _other_optimizer("sgd")),
    ("sdpa attention", "attn_implementation='sdpa'", _sdpa),
)


# -- text --------------------------------------------------------------------------------------------------------------


def text_of(found: Fit) -> str:
    """The answer for a terminal."""
    return "\n".join(_lines(found)) + "\n"


def json_of(found: Fit) -> str:
    """The answer as JSON."""
    return json.dumps({"version": 1, **dataclasses.asdict(found)}, indent=2) + "\n"


def _lines(found: Fit) -> Iterator[str]:
    head = f"virtual {found.card}, torch {found.torch}"
    room = f"{format_bytes(found.limit)} with a margin of {found.margin:.0%}"
    if found.best is None:
        yield f"memlint fit: no {found.name} that was tried fits on a {head} ({room})"
    else:
        yield f"memlint fit: {found.name}={found.best} is the largest that fits on a {head} ({room})"
    yield ""
    yield f"{found.name:>12}  {'allocated':>10}  {'reserved':>10}  {'process':>10}"
    for run in found.runs:
        if run.error:
            yield f"{run.value:>12}  {run.error}"
            continue
        mark = "fits" if found.fits(run) else "too much"
        sizes = "  ".join(f"{format_bytes(size):>10}" for size in (run.allocated, run.reserved, run.process))
        yield f"{run.value:>12}  {sizes}  {mark}"
    yield f"  process: reserved and about {format_bytes(found.context)} of CUDA context (an estimate)"
    if not found.monotone:
        yield "  careful: a larger value took less than a smaller one, so a larger one than the answer may fit, too"
    if found.categories:
        yield ""
        yield f"alive at the peak with {found.name}={found.shown_at}:"
        for name, nbytes in found.categories:
            yield f"  {format_bytes(nbytes):>10}  {name}"
        for line, nbytes in found.lines:
            yield f"  {format_bytes(nbytes):>10}  {line}"
    if found.helps:
        yield ""
        yield f"what would help, measured with {found.name}={found.helps[0].measured.value} (or as said):"
        for each in found.helps:
            yield f"  -{format_bytes(each.saves):>9}  {each.name}: {each.how}"
    for note in found.notes:
        yield f"note: {note}"
