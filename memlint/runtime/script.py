"""`memlint run`: an unmodified training script, with the optimizers' steps as the steps.

The script runs in this process as `__main__`, with its own argv. Its first optimizer leads: where that one steps, a
step ends (a GAN's second optimizer then belongs to the step of the first). A scaler that skips an optimizer's step
because of infinities ends a step all the same.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import os
import runpy
import sys
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from memlint.errors import UsageError
from memlint.runtime.backends import find
from memlint.runtime.budget import Budget
from memlint.runtime.loop import Loop
from memlint.runtime.report.record import record_of
from memlint.runtime.report.text import sparkline
from memlint.runtime.session import out_of_memory
from memlint.runtime.sites import is_ours
from memlint.runtime.verdict import Verdict
from memlint.units import format_bytes

_SHOWN_EVERY = 0.2
#: another optimizer leads after so many steps without one of the leader: its phase of the training has ended
_LEADER_GONE = 3
#: what a shell gives for a process that Ctrl-C ended
_INTERRUPTED = 130


@dataclass(frozen=True)
class Plan:
    """What to run and how to judge it.

    steps: measured steps after which the run ends; None: it runs to its end. constants: values for names that the
    script assigns at its top, in place of its own.
    """

    target: str
    arguments: Sequence[str]
    is_module: bool
    budget: Budget
    warmup: int
    steps: int | None
    trace: str
    constants: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Ran:
    """How it ended. code: the script's own exit code. record: the verdict as data."""

    code: int
    record: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Whether memory kept to the budget and nothing leaked."""
        return bool(self.record["passed"])


class Stop(BaseException):
    """Ends the script after its steps; no `except Exception` catches it, and `finally` blocks run."""


def run(plan: Plan, live: TextIO | None = None) -> Ran:
    """Run the script to its end or to its last step, and judge it. `live` takes a line that is kept up to date.

    Raises UsageError where there is no such script, BackendUnavailable where the device is not there.
    """
    backend = find(plan.budget.device)
    loop = Loop(backend, plan.budget, plan.warmup, trace=plan.trace)
    line = _Line(live, loop)
    last = None if plan.steps is None else plan.warmup + plan.steps

    def step() -> None:
        loop.boundary()
        line.show()
        if last is not None and loop.steps >= last and loop.tracing is None:
            raise Stop

    trouble: Verdict | None = None
    with _as_main(plan), _optimizer_steps(step):
        code = _code_of(plan)
        loop.start()
        try:
            exit_code, error = _execute(code, plan)
            interrupted = isinstance(error, KeyboardInterrupt)
            if error is not None and not interrupted:
                trouble = out_of_memory(error, loop.steps + 1)
                if trouble is None:
                    _print_error(error)
            del error
        finally:
            loop.stop()
            line.clear()
    outcome = loop.outcome()
    if not loop.records:
        outcome = outcome.noted("no optimizer step was seen, so nothing was measured")
    if interrupted:
        outcome = outcome.noted(f"interrupted in step {loop.steps + 1}")
    if trouble is not None:
        outcome = outcome.also(trouble)
    backend.stop()
    return Ran(exit_code, record_of(plan.target, outcome))


def _execute(code: types.CodeType | None, plan: Plan) -> tuple[int, BaseException | None]:
    """Run the code; its exit code, and the error that it ended with."""
    try:
        if code is None:
            runpy.run_module(plan.target, run_name="__main__", alter_sys=True)
        else:
            exec(code, vars(sys.modules["__main__"]))
    except Stop:
        return 0, None
    except KeyboardInterrupt as error:
        return _INTERRUPTED, error
    except Exception as error:
        return 1, error
    except BaseException as error:
        if not hasattr(error, "code"):
            return 1, error
        return _exit_code(error.code), None
    return 0, None


def _exit_code(value: object) -> int:
    """As the interpreter does: None is 0, a number is itself, anything else is printed and 1."""
    if value is None:
        return 0
    if isinstance(value, int):
        return int(value)
    print(value, file=sys.stderr)
    return 1


def _code_of(plan: Plan) -> types.CodeType | None:
    if plan.is_module:
        try:
            found = importlib.util.find_spec(plan.target)
        except (ImportError, ValueError):
            found = None
        if found is None:
            raise UsageError(f"-m {plan.target}: there is no such module")
        return None
    try:
        text = Path(plan.target).read_bytes()
    except OSError as error:
        raise UsageError(f"{plan.target}: cannot be read: {error.strerror}") from None
    try:
        tree = ast.parse(text, plan.target)
        for name, value in plan.constants.items():
            _set(tree, name, value, plan.target)
        return compile(tree, plan.target, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{plan.target}: {error}") from None


def _set(tree: ast.Module, name: str, value: object, where: str) -> None:
    """Give a name that is assigned at the top of the script another value. Raises UsageError where it is not."""
    found = False
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and any(
            isinstance(t, ast.Name) and t.id == name for t in targets
        ):
            node.value = ast.copy_location(ast.Constant(value), node)  # type: ignore[arg-type]
            found = True
    if not found:
        raise UsageError(f"{where}: {name} is not assigned at its top level")
    ast.fix_missing_locations(tree)


@contextmanager
def _as_main(plan: Plan) -> Iterator[None]:
    """argv, sys.path and `__main__` as the script would have them by itself."""
    saved = sys.argv[:], sys.path[:], sys.modules["__main__"]
    sys.argv = [plan.target, *plan.arguments]
    if plan.is_module:
        sys.path.insert(0, os.getcwd())
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(plan.target)))
        main = types.ModuleType("__main__")
        vars(main).update(__file__=plan.target, __builtins__=builtins, __cached__=None, __package__=None)
        sys.modules["__main__"] = main
    try:
        yield
    finally:
        sys.argv[:], sys.path[:], sys.modules["__main__"] = saved


@contextmanager
def _optimizer_steps(step: Callable[[], None]) -> Iterator[None]:
    """Call `step` where a training step ends."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from memlint.runtime.trace import hooks

    hooks.install()  # a trace begins within a hook, where torch allows no new ones
    leader = _Leader(step)
    hook = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: leader.stepped(optimizer))
    scaler: Any = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler  # torch 2.1 has the latter only
    update = scaler.update

    def updated(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = update(self, *args, **kwargs)
        leader.scaled()
        return result

    scaler.update = updated
    try:
        yield
    finally:
        scaler.update = update
        hook.remove()
        hooks.uninstall()


class _Leader:
    """Finds the optimizer whose steps end the steps."""

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step
        self._leader: weakref.ref[Any] | None = None
        self._others: dict[int, int] = {}
        self._since_update = 0

    def stepped(self, optimizer: Any) -> None:
        self._since_update += 1
        leading = None if self._leader is None else self._leader()
        if leading is not None and leading is not optimizer:
            count = self._others[id(optimizer)] = self._others.get(id(optimizer), 0) + 1
            if count < _LEADER_GONE:
                return
        if leading is not optimizer:
            self._leader = weakref.ref(optimizer)
        self._others.clear()
        self._step()

    def scaled(self) -> None:
        """The scaler has updated its scale: where no optimizer stepped since the last time, they were all skipped."""
        skipped, self._since_update = self._since_update == 0, 0
        if skipped:
            self._step()


def _print_error(error: BaseException) -> None:
    """The traceback as the script's own, without the frames of memlint and runpy."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not is_ours(name) and name != runpy.__file__ and not name.startswith("<frozen"):
            break
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


class _Line:
    """One line on a terminal: step, allocated, peak, and what stays a step."""

    def __init__(self, stream: TextIO | None, loop: Loop) -> None:
        self._stream, self._loop = stream, loop
        self._next = 0.0
        self._width = 0

    def show(self) -> None:
        """Write it, if the last time is long enough ago."""
        now = time.monotonic()
        if self._stream is None or now < self._next:
            return
        self._next = now + _SHOWN_EVERY
        text = self.text()
        self._stream.write("\r" + text.ljust(self._width))
        self._stream.flush()
        self._width = len(text)

    def text(self) -> str:
        """What the line says now."""
        loop, last = self._loop, self._loop.last()
        said = f"step {loop.steps}"
        if last is not None:
            said += f"  allocated {format_bytes(last.kept)}"
            if last.peak is not None:
                said += f"  peak {format_bytes(last.peak)}"
            series = loop.series()
            if len(series.measured) > 1:
                said += f"  {format_bytes(loop.growth().rate, signed=True)} a step"
                said += f"  {sparkline(series.kept[-16:])}"
        return said + ("  (tracing)" if loop.tracing is not None else "")

    def clear(self) -> None:
        """Leave nothing behind."""
        if self._stream is not None and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
