"""Who drives a method: what frameworks hand to it, do with its result, and in which grad mode they call it.

Each fact is sourced in docs/frameworks.md, where the rows name file and version.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import libcst as cst

from memlint.lint.flow import knowledge as know
from memlint.lint.flow.facts import BackwardKind, FunctionFlow
from memlint.lint.flow.index import ClassInfo, FunctionInfo
from memlint.lint.flow.values import EMPTY, Grad, Kind, Method, Origin, Source, Value, of
from memlint.lint.imports import dotted

if TYPE_CHECKING:
    from memlint.lint.flow import Flow
    from memlint.lint.flow.calls import Calls

#: What Lightning runs under no_grad or inference_mode, of modules and (the `on_` hooks) of callbacks: all of its
#: evaluation and prediction loops (lightning 2.6.6, loops/utilities.py, `_no_grad_context`, on `_EvaluationLoop.run`
#: and `_PredictionLoop.run`; 1.9.5, trainer/trainer.py, `_run_evaluate`, `_run_predict`, `_run_sanity_check`, and
#: loops/epoch/training_epoch_loop.py, `_run_validation`).
_LIGHTNING_EVALUATION = re.compile(
    r"^(?:(?:validation|test|predict)_(?:step|step_end|epoch_end)|on_(?:validation|test|predict)_\w+)$"
)
_IGNITE_ENGINES = frozenset(("ignite.engine.Engine", "ignite.engine.engine.Engine"))
_IGNITE_TRAINERS = frozenset(("ignite.engine.create_supervised_trainer",))
#: what a skorch callback is given live in training (skorch 1.4.0, net.py, `NeuralNet.run_single_epoch`)
_SKORCH_LIVE = ("loss", "y_pred")


class Process(NamedTuple):
    """What an engine of Ignite runs for each batch.

    function: the process function, or the transform of a supervised trainer's output. live: the parameter of it that is
    a loss which backward has run on (of a transform), otherwise empty.
    """

    function: FunctionInfo
    live: str = ""


def entry_grad(info: FunctionInfo, otherwise: Grad) -> Grad:
    """The grad mode in which a framework calls a method; `otherwise` where none is known to call it."""
    if info.cls is None or not _LIGHTNING_EVALUATION.match(info.name) or _of_skorch(info.cls):
        return otherwise
    if info.cls.is_lightning or (info.name.startswith("on_") and info.cls.is_callback):
        return Grad.OFF
    if info.cls.has_unknown_base or any(each.name.value == "batch_idx" for each in info.parameters):
        return Grad.MAYBE  # the base, or what it is mixed into, may be Lightning's
    return otherwise


def backwards_result(function: FunctionFlow) -> bool:
    """Whether a framework runs backward on what this function returns."""
    cls = function.cls
    if cls is None:
        return False
    if function.name == "training_step" and cls.is_lightning:
        by_hand = any(event.kind is BackwardKind.MANUAL for event in function.backwards)
        return not by_hand and not cls.optimizes_by_hand
    if function.name == "compute_loss":
        return is_trainer(function)
    if function.name == "get_loss":  # skorch 1.4.0, net.py, `NeuralNet.train_step_single`
        return _of_skorch(cls)
    return False


def sums_result(function: FunctionFlow) -> bool:
    """Whether a framework adds what this function returns to a running sum, as it is."""
    return function.name == "training_step" and is_trainer(function)


def evaluates(function: FunctionFlow) -> str:
    """The framework that calls this function in eval mode with autograd on, for results without a graph; or empty."""
    if function.name == "prediction_step" and is_trainer(function):
        return "Trainer"
    if function.name == "validation_step" and function.cls is not None and _of_skorch(function.cls):
        return "NeuralNet"
    return ""


def keeps_log(function: FunctionFlow, text: str) -> bool:
    """Whether a call is that of a Trainer's `log`, which appends the dict to `state.log_history` as it is."""
    return text == "self.log" and is_trainer(function)


def runs_each_batch(function: FunctionFlow) -> bool:
    """Whether a framework calls this function once a batch, and the function itself runs backward and steps."""
    info = function.info
    if info is None:
        return False
    if info.cls is not None and info.name == "training_step" and info.cls.is_lightning:
        return any(event.kind is BackwardKind.MANUAL for event in function.backwards)
    return info.process


def is_trainer(function: FunctionFlow) -> bool:
    """Whether a method belongs to a subclass of transformers' Trainer.

    Other Trainers exist: the base must come from a library that builds on it, or the method be written for it.
    """
    if function.cls is None or function.info is None:
        return False
    bases = [base for base in function.cls.base_names() if base.rsplit(".", 1)[-1].endswith("Trainer")]
    if any(base.split(".")[0] in know.TRAINER_LIBRARIES for base in bases):
        return True
    names = {param.name.value for param in function.info.parameters}
    return bool(bases) and bool(names & {"return_outputs", "num_items_in_batch"})


def _of_skorch(cls: ClassInfo) -> bool:
    return any(base.startswith("skorch.") for base in cls.base_names())


# -- what parameters hold ----------------------------------------------------------------------------------------------


def hand_over(flow: Flow, info: FunctionInfo, interpreter: Calls) -> None:
    """Bind what a framework gives to a method: results of the step, live losses."""
    if info.cls is not None and info.cls.is_lightning and info.name == "on_train_batch_end":
        if (step := info.cls.method("training_step")) is not None and len(info.parameters) > 1:
            _outputs_of_lightning(flow, info, step, interpreter)
    elif info.cls is not None and info.name == "on_batch_end" and _of_skorch(info.cls):
        live = frozenset(info.params[name] for name in _SKORCH_LIVE if name in info.params)
        for origin in live:
            origin.term = True
        _consume(interpreter, live)
    else:
        _output_of_ignite(flow, info, interpreter)


def _outputs_of_lightning(flow: Flow, info: FunctionInfo, step: FunctionInfo, interpreter: Calls) -> None:
    """`on_train_batch_end` gets the dict that `training_step` returned, of which only the loss is detached."""
    summary = flow.summary(step)
    if summary is None or summary.returns.kind is not Kind.CONTAINER or not summary.returns.direct:
        return
    origin, value = interpreter.container(info.node)
    for made in summary.returns.objects:
        for key, content in summary.fields.get(made, {}).items():
            interpreter.state.put(origin, key, Value(Kind.TENSOR) if key == "['loss']" else _bare(content), weak=True)
    interpreter.state.names[info.parameters[1].name.value] = value
    _consume(interpreter, summary.consumed)


def _output_of_ignite(flow: Flow, info: FunctionInfo, interpreter: Calls) -> None:
    """A handler of ITERATION_COMPLETED gets the engine, whose `state.output` is what the process function returned."""
    process = flow.handlers.get(id(info.node))
    for decorator in info.decorators:
        if isinstance(decorator, cst.Call) and isinstance(decorator.func, cst.Attribute):
            if decorator.func.attr.value == "on" and _each_iteration(decorator):
                process = process or _process_of(flow, interpreter.ev(decorator.func.value))
    names = [param.name.value for param in info.parameters][1 if info.bound else 0 :]
    if process is None or not names or names[0] not in info.params:
        return
    summary = flow.summary(process.function)
    if summary is None:
        return
    output, consumed = _bare(summary.returns), summary.consumed
    if process.live:
        loss = process.function.params.get(process.live)
        if loss is None or loss not in output.graph:
            return
        loss.term = True
        consumed = frozenset((loss,))
    state = info.params[names[0]].child(".state", info.node)
    interpreter.state.put(state, ".output", output)
    for made in output.objects:
        for key, content in summary.fields.get(made, {}).items():
            interpreter.state.put(made, key, _bare(content))
    _consume(interpreter, consumed)


def _bare(value: Value) -> Value:
    return value._replace(via=EMPTY)


def _consume(interpreter: Calls, origins: frozenset[Origin]) -> None:
    interpreter.state.consumed |= origins
    interpreter.state.maybe_consumed |= origins


def _each_iteration(call: cst.Call) -> bool:
    return bool(call.args) and "ITERATION" in dotted(
        call.args[0].value.func if isinstance(call.args[0].value, cst.Call) else call.args[0].value
    )


def _process_of(flow: Flow, engine: Value) -> Process | None:
    return next((flow.processes[o.site] for o in engine.objects if o.site in flow.processes), None)


# -- engines of Ignite -------------------------------------------------------------------------------------------------


def build_engine(flow: Flow, interpreter: Calls, name: str, node: cst.Call, given: list[Value]) -> Value | None:
    """An engine of Ignite that is built; None for anything else. given: the values of the arguments, in order."""
    if name in _IGNITE_ENGINES and given:
        function = _function_of(given[0])
        if function is None:
            return None
        function.process = True
        process = Process(function)
    elif name in _IGNITE_TRAINERS:
        place = next(
            (i for i, arg in enumerate(node.args) if arg.keyword and arg.keyword.value == "output_transform"), 4
        )
        function = _function_of(given[place]) if place < len(given) else None
        names = [param.name.value for param in function.parameters] if function is not None else []
        if function is None or len(names) != 4:  # x, y, y_pred, loss
            return None
        process = Process(function, names[3])
    else:
        return None
    origin = interpreter.origin(node, Source.CALL, name)
    flow.processes[origin.site] = process
    return of(origin)


def registrars(flow: Flow) -> list[FunctionInfo]:
    """The functions that add handlers to engines: what handlers are given is not known before they have run."""
    if "add_event_handler" not in flow.code or "ignite" not in flow.code:
        return []
    return [info for info in flow.index.all_functions if "add_event_handler" in flow.text(info.node)]


def add_handler(flow: Flow, node: cst.Call, engine: Value, given: list[Value]) -> None:
    """`engine.add_event_handler(Events.ITERATION_COMPLETED, handler)`."""
    process = _process_of(flow, engine)
    function = _function_of(given[1]) if len(given) > 1 else None
    if process is not None and function is not None and _each_iteration(node):
        flow.handlers[id(function.node)] = process


def _function_of(value: Value) -> FunctionInfo | None:
    if isinstance(value.info, FunctionInfo):
        return value.info
    return value.info.function if isinstance(value.info, Method) else None
