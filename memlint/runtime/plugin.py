"""The pytest plugin: hooks only. What a step is, how it is measured and judged is in session.py.

Nothing here imports torch until a test with a budget is set up.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from memlint import files
from memlint.errors import BackendUnavailable, BudgetError, MemlintError
from memlint.runtime import baseline as baselines
from memlint.runtime.backends import find, virtual_card
from memlint.runtime.baseline import Baseline
from memlint.runtime.budget import FEWEST_STEPS, MARK, STEPS, WARMUP, Budget, parse_device, parse_tolerance
from memlint.runtime.report import table
from memlint.runtime.report.record import json_of, record_of
from memlint.runtime.report.text import text_of
from memlint.runtime.session import ON_FAILURE, TRACE, Session, Tracing, again, out_of_memory, traced_through
from memlint.runtime.verdict import Outcome, Verdict, judge
from memlint.units import SizeError, parse_bytes

_SIGNATURE = (
    "memory_budget(peak=None, reserved=None, growth=None, warmup=3, steps=10, device='auto', baseline=None, "
    "cycles='warn'): the test is one training step; run it warmup + steps times and hold its memory to a budget"
)
_NO_DEFAULT = "none"


@dataclass(frozen=True)
class Settings:
    """What ini file and command line say; the command line wins, and a mark's own arguments win over both."""

    device: str = "auto"
    fallback: str = "cpu"
    warmup: int = WARMUP
    steps: int = STEPS
    growth: int | None = None
    trace: str = ON_FAILURE
    report: Path | None = None
    baseline: Baseline | None = None
    update_baseline: bool = False
    tolerance: float = baselines.TOLERANCE


# -- options ----------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("memlint", "memory budgets (memlint)")
    group.addoption("--memory-device", metavar="DEVICE", help="where budgets without a device of their own run: auto"
                    " (an accelerator, else memory_fallback_device), cpu, cuda, cuda:1, virtual:t4, ...")  # fmt: skip
    group.addoption("--memory-steps", metavar="N", help=f"steps that are measured (default {STEPS})")
    group.addoption("--memory-warmup", metavar="N", help=f"steps before measuring (default {WARMUP})")
    group.addoption("--memory-default-growth", metavar="SIZE", help="the growth that budgets allow which name none:"
                    " bytes a step, such as 0; 'none' judges no growth (default)")  # fmt: skip
    group.addoption("--memory-trace", metavar="WHEN", help="when steps are run again to say who holds what: on-failure"
                    " (default), always, never")  # fmt: skip
    group.addoption("--memory-report", metavar="FILE", help="write all that was measured as JSON")
    group.addoption("--memory-baseline", metavar="FILE", help="compare peaks with those saved in this file")
    group.addoption("--memory-update-baseline", action="store_true", default=None, help="save the peaks in the file of"
                    " --memory-baseline")  # fmt: skip
    for name, text in _INI.items():
        parser.addini(name, text, default=None)


_INI = {
    "memory_device": "default of --memory-device",
    "memory_fallback_device": "what device 'auto' means where there is no accelerator (default cpu)",
    "memory_steps": "default of --memory-steps",
    "memory_warmup": "default of --memory-warmup",
    "memory_default_growth": "default of --memory-default-growth",
    "memory_trace": "default of --memory-trace",
    "memory_report": "default of --memory-report",
    "memory_baseline": "default of --memory-baseline",
    "memory_baseline_tolerance": "how much more than the saved peak is allowed, such as 5%",
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _SIGNATURE)
    wrong: list[str] = []
    settings = _settings(config, wrong)
    if wrong:
        raise pytest.UsageError("\n".join(wrong))
    config.pluginmanager.register(Plugin(config, settings), "memlint-budgets")
    if "virtual" in (settings.device.split(":")[0], settings.fallback.split(":")[0]):
        config.pluginmanager.register(SeenAtImport(settings.device, settings.fallback), "memlint-virtual")


def _settings(config: pytest.Config, wrong: list[str]) -> Settings:
    def said(name: str, parse: Callable[[Any], Any], default: Any) -> Any:
        option = f"--{name.replace('_', '-')}"
        value = config.getoption(name, default=None)
        if value is None:
            value, option = config.getini(name) or None, f"ini option {name}"
        if value is None:
            return default
        try:
            return parse(value)
        except (BudgetError, SizeError) as error:
            wrong.append(f"{option} {value}: {error}")
            return default

    root = config.rootpath
    file = said("memory_baseline", Path, None)
    update = bool(config.getoption("memory_update_baseline", default=None))
    if update and file is None:
        wrong.append("--memory-update-baseline: name the file with --memory-baseline or the ini option memory_baseline")
    saved = None
    if file is not None:
        try:
            saved = Baseline.read(root / file)
        except BudgetError as error:
            wrong.append(str(error))
    report = said("memory_report", Path, None)
    return Settings(
        device=said("memory_device", parse_device, "auto"),
        fallback=said("memory_fallback_device", parse_device, "cpu"),
        warmup=said("memory_warmup", _count(0), WARMUP),
        steps=said("memory_steps", _count(FEWEST_STEPS), STEPS),
        growth=said("memory_default_growth", lambda v: None if v == _NO_DEFAULT else parse_bytes(v), None),
        trace=said("memory_trace", _one_of(TRACE), ON_FAILURE),
        report=None if report is None else config.invocation_params.dir / report,
        baseline=saved,
        update_baseline=update,
        tolerance=said("memory_baseline_tolerance", parse_tolerance, baselines.TOLERANCE),
    )


def _count(least: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        if not value.isdigit() or int(value) < least:
            raise BudgetError(f"it wants a whole number of at least {least}")
        return int(value)

    return parse


def _one_of(known: tuple[str, ...]) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value not in known:
            raise BudgetError(f"it wants one of {', '.join(known)}")
        return value

    return parse


class SeenAtImport:
    """Files with budgets are imported as if the virtual card were there.

    Else `device = "cuda" if torch.cuda.is_available() else "cpu"` at their top would be settled before any test runs.
    """

    def __init__(self, device: str, fallback: str) -> None:
        self._device, self._fallback = device, fallback

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        if not isinstance(collector, pytest.Module) or b"memory_budget" not in collector.path.read_bytes():
            return (yield)
        card = virtual_card(self._device, self._fallback)  # imports torch, where it is installed
        if card is None:
            return (yield)
        from memlint.virtual.surface import seen

        with seen(card):
            return (yield)


# -- one test ---------------------------------------------------------------------------------------------------------


class Measured:
    """What the plugin keeps for one test with a budget, or with the `memory` fixture.

    values: the arguments of its marks; None where it has no mark.
    """

    def __init__(self, item: pytest.Item, values: Mapping[str, Any] | None, settings: Settings) -> None:
        self.item = item
        self.values = values
        self.settings = settings
        self.budget = self.budget_with({})
        self.session: Session | None = None
        self.memory: Memory | None = None
        self.record: dict[str, Any] | None = None
        self._setting_up = False

    def budget_with(self, limits: Mapping[str, Any]) -> Budget:
        """The budget of the marks and of `limits`, with the run's defaults. Raises BudgetError."""
        said = {**(self.values or {}), **limits}
        budget, settings = Budget.parse(said), self.settings
        return replace(
            budget,
            growth=budget.growth if "growth" in said else settings.growth,
            warmup=settings.warmup if budget.warmup is None else budget.warmup,
            steps=settings.steps if budget.steps is None else budget.steps,
        )

    def start(self) -> None:
        """Begin to count, before the test's fixtures are set up. Raises BackendUnavailable."""
        settings = self.settings
        self.record = self.memory = None
        device = self.budget.device if self.budget.device != "auto" else settings.device
        self.session = Session(find(device, settings.fallback), self.budget, settings.trace)
        self.session.start()

    def stop(self) -> None:
        """Leave torch as it was."""
        if self.session is not None:
            self.session.stop()
            self.session = None

    @contextmanager
    def shared_fixture(self) -> Iterator[None]:
        """What is set up within does not count: which test comes first and sets it up is chance."""
        session = self.session
        if session is None or self._setting_up:  # one shared fixture asks for another
            yield
            return
        self._setting_up = True
        before = session.allocated()
        try:
            yield
        finally:
            self._setting_up = False
            session.leave_out(session.allocated() - before)

    def call(self, body: Callable[[], object]) -> None:
        """The test: its steps, then the verdict. The test's own errors pass through."""
        session, memory = self.session, self.memory
        assert session is not None
        trouble: Verdict | None = None
        try:
            if memory is None:
                session.run(body)
            else:
                memory.driver = session
                body()
        except Exception as error:
            trouble = out_of_memory(error, len(session.records) + 1)
            if trouble is None:
                raise
        if memory is not None and not memory.steps_seen and trouble is None:
            if self.values is not None:
                pytest.fail("memory budget: no step was measured: use `with memory.step():` or memory.run()", False)
            return
        retrace = again(body) if memory is None else traced_through(lambda tracing: memory.again(tracing, body))
        earlier = [] if memory is None else memory.earlier
        outcome = session.outcome(
            retrace,
            self._labels,
            lambda found: [*([] if trouble is None else [trouble]), *earlier, *self._against_baseline(found)],
        )
        self.record = record_of(self.item.nodeid, outcome)
        # JUnit takes the properties of the item when it is torn down
        properties = [item for item in self.item.user_properties if not item[0].startswith("memory_")]
        self.item.user_properties[:] = [*properties, *_properties(self.record)]
        if not outcome.passed:
            pytest.fail(text_of(self.record), pytrace=False)
        self._warn_of_cycles(outcome)

    def _against_baseline(self, found: Outcome) -> Iterator[Verdict]:
        saved, wanted = self.settings.baseline, found.budget.baseline
        if saved is None or wanted is False or self.settings.update_baseline or not found.series.measured:
            return
        key = baselines.device_key({"device": found.device, "card": found.card, "torch": found.torch})
        entry = saved.entry(key, self.item.nodeid)
        if entry is not None:
            tolerance = self.settings.tolerance if wanted is None or wanted is True else wanted
            yield baselines.compare(entry, found.series.peak, found.series.reserved_peak, tolerance)

    def _labels(self) -> dict[int, str]:
        """Fixtures by the id of their values, and the instance of the test's class."""
        labels: dict[int, str] = {}
        request = getattr(self.item, "_request", None)
        for name, definition in getattr(request, "_fixture_defs", {}).items():
            cached = getattr(definition, "cached_result", None)
            if cached is not None and not isinstance(cached[0], _PLAIN):
                labels[id(cached[0])] = name
        for name, value in getattr(self.item, "funcargs", {}).items():
            if not isinstance(value, _PLAIN):
                labels.setdefault(id(value), name)
        instance = getattr(self.item, "instance", None)
        if instance is not None:
            labels.setdefault(id(instance), "self")
        return labels

    def _warn_of_cycles(self, outcome: Outcome) -> None:
        __tracebackhide__ = True
        for verdict in outcome.verdicts:
            if verdict.limit == "cycles":
                named = "".join(f"; {cycle.path} ({cycle.site})" for cycle in outcome.traced.cycles)
                self.item.warn(MemoryCycleWarning(f"{verdict.message}{named}"))


_PLAIN = (type(None), bool, int, float, str, bytes, type)


class MemoryCycleWarning(UserWarning):
    """Tensors are freed by a garbage collection only. cycles="fail" makes it a failure, cycles="ignore" quiet."""


class Memory:
    """The `memory` fixture, for tests that are more than one step.

    `with memory.step(): ...` is one step; `memory.run(step, steps=5)` runs one several times. The limits are those of
    the test's mark; `run` takes more of them, for this run. The verdict comes at the end of the test.
    """

    def __init__(self, measured: Measured) -> None:
        self._measured = measured
        self.driver: Session | Tracing | None = None
        self.steps_seen = 0
        #: limits that earlier runs of the same test did not keep
        self.earlier: list[Verdict] = []
        self._runs = 0
        self._failed_run: int | None = None

    def step(self) -> AbstractContextManager[None]:
        """One training step. Raises BudgetError outside of the test's body."""
        return self._step()

    @contextmanager
    def _step(self) -> Iterator[None]:
        driver = self.driver
        if driver is None:
            raise BudgetError("memory.step() belongs into the test, not into a fixture")
        with driver.step():
            yield
        if isinstance(driver, Session):
            self.steps_seen += 1

    def run(self, step: Callable[[], object], **limits: Any) -> None:
        """Run `step` warmup + steps times. Takes the arguments of the mark; raises BudgetError for bad ones."""
        driver = self.driver
        if driver is None:
            raise BudgetError("memory.run() belongs into the test, not into a fixture")
        self._runs += 1
        if isinstance(driver, Tracing):
            for _ in range(driver.steps):
                with driver.step() if self._runs == self._failed_run else nullcontext():
                    step()
            return
        if driver.records:
            self._close(driver)
        driver.budget = self._measured.budget_with(limits)
        driver.run(step)
        self.steps_seen += len(driver.records)

    def again(self, tracing: Tracing, body: Callable[[], object]) -> None:
        """The test once more, the run traced that did not keep its limits, or the last."""
        if self._runs:
            self._failed_run = self._failed_run or self._runs
        else:
            tracing.steps = min(self.steps_seen, tracing.steps)
        self.driver, self._runs = tracing, 0
        body()

    @property
    def allocated(self) -> int:
        """Bytes alive now, above those alive before the test."""
        session = self._measured.session
        return 0 if session is None else session.allocated()

    def _close(self, session: Session) -> None:
        """Judge the steps so far by their own limits, and begin anew."""
        series = session.series()
        failed = [verdict for verdict in judge(session.budget, series, series.growth()) if not verdict.passed]
        if failed and self._failed_run is None:
            self._failed_run = max(self._runs - 1, 1)
        self.earlier += failed
        session.records.clear()


def arguments_of(item: pytest.Item) -> dict[str, Any] | None:
    """The arguments of a test's marks, the nearer one's before the others'; None without a mark. Raises BudgetError."""
    marks = list(item.iter_markers(MARK))
    if not marks:
        return None
    values: dict[str, Any] = {}
    for mark in reversed(marks):
        if mark.args:
            raise BudgetError(f"{', '.join(map(repr, mark.args))}: it takes keyword arguments only, such as peak=...")
        values.update(mark.kwargs)
    if inspect.iscoroutinefunction(getattr(item, "function", None)):
        raise BudgetError("an async test cannot be run as a step")
    return values


def _wants_memory(item: pytest.Item) -> bool:
    definitions = getattr(item, "_fixtureinfo", None)
    found: Any = getattr(definitions, "name2fixturedefs", {}).get("memory")
    return bool(found) and inspect.unwrap(found[-1].func) is inspect.unwrap(_plain_memory)


# -- hooks ------------------------------------------------------------------------------------------------------------

_KEY = pytest.StashKey[Measured]()


def _plain_memory(request: pytest.FixtureRequest) -> Memory:
    """Measure steps within a test: `with memory.step(): ...` or `memory.run(step_fn, steps=5)` (memlint)."""
    measured: Measured | None = request.node.stash.get(_KEY, None)
    if measured is None:
        raise BudgetError("memory: take the fixture as an argument, so that it is there before all others are set up")
    measured.memory = Memory(measured)
    return measured.memory


memory = pytest.fixture(name="memory")(_plain_memory)


class Plugin:
    """What lives as long as the session of pytest."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self.config = config
        self.settings = settings
        self.records: dict[str, dict[str, Any]] = {}
        self.collected: set[str] = set()
        self.wrong: list[str] = []
        self.said: list[str] = []

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        self.collected.update(item.nodeid for item in items)  # also those that -k leaves out
        yield
        for item in items:  # after the hooks of conftest files, which may add marks
            try:
                values = arguments_of(item)
                if values is not None or _wants_memory(item):
                    item.stash[_KEY] = Measured(item, values, self.settings)
            except MemlintError as error:
                self.wrong.extend(f"{item.nodeid}: memory_budget: {line}" for line in str(error).splitlines())
        if self.wrong and self._worker is None:
            raise pytest.UsageError("\n".join(self.wrong))
        if self.wrong:
            items.clear()  # an error does not travel from a worker; the controller says what was wrong

    @property
    def _worker(self) -> dict[str, Any] | None:
        """What a worker of xdist gives to the controller at its end; None in any other process."""
        output: dict[str, Any] | None = getattr(self.config, "workeroutput", None)
        return output

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        measured = item.stash.get(_KEY, None)
        if measured is not None:
            try:
                measured.start()
            except BackendUnavailable as error:
                item.add_marker(pytest.mark.skip(reason=f"memory budget: {error}"))
        result: Any = yield
        if measured is not None and result.excinfo is not None:
            measured.stop()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Iterator[None]:
        item = request._pyfuncitem
        measured = item.stash.get(_KEY, None)
        shared = measured is not None and fixturedef.scope != "function"
        with measured.shared_fixture() if shared and measured is not None else nullcontext():
            yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        measured = item.stash.get(_KEY, None)
        if measured is not None:
            measured.stop()  # where the test was not called, as with --setup-only
        yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        measured = item.stash.get(_KEY, None)
        if measured is None or measured.session is None:
            yield
            return
        test: Any = item
        original = test.obj

        @functools.wraps(original)
        def stepped(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            measured.call(lambda: original(*args, **kwargs))

        test.obj = stepped
        try:
            yield
        finally:
            test.obj = original
            measured.stop()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        result: Any = yield
        measured = item.stash.get(_KEY, None)
        if measured is None or call.when != "call" or measured.record is None:
            return
        result.get_result().memlint = measured.record

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        record = getattr(report, "memlint", None)
        if record is not None:
            self.records[report.nodeid] = record

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._worker is not None:
            self._worker.update(memlint_collected=sorted(self.collected), memlint_wrong=self.wrong)
            return
        if self.wrong:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
            self.said.extend(f"error: {line}" for line in dict.fromkeys(self.wrong))
            return
        records = list(self.records.values())
        try:
            self._write(records)
        except BudgetError as error:
            self.said.append(f"error: {error}")
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = getattr(node, "workeroutput", {})
        self.collected.update(output.get("memlint_collected", ()))
        self.wrong.extend(output.get("memlint_wrong", ()))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        records = list(self.records.values())
        if not records and not self.said:
            return
        terminalreporter.section("memory budgets")
        if records:
            width = terminalreporter._tw.fullwidth
            head, *lines = table.table(records, width)
            terminalreporter.write_line(head, bold=True)
            for record, line in zip(records, lines, strict=True):
                colour = {"green": True} if record["passed"] else {"red": True}
                terminalreporter.write_line(line, **colour)
            for record in records:
                if record["passed"]:
                    for note in record["notes"]:
                        terminalreporter.write_line(f"note: {record['test']}: {note}")
        for line in self.said:
            terminalreporter.write_line(line)

    def _write(self, records: list[dict[str, Any]]) -> None:
        settings = self.settings
        if settings.report is not None:
            _write_text(settings.report, json_of(records), "--memory-report")
        summary = os.environ.get("GITHUB_STEP_SUMMARY")
        if summary and records:
            try:
                with open(summary, "a", encoding="utf-8") as file:
                    file.write(table.markdown(records))
            except OSError as error:
                self.said.append(f"note: the step summary could not be written: {error}")
        if settings.baseline is not None:
            self._baseline(settings.baseline, records)

    def _baseline(self, saved: Baseline, records: list[dict[str, Any]]) -> None:
        measured = [record for record in records if record["peak"] is not None]
        devices = sorted({baselines.device_key(record) for record in measured})
        # of a file of which tests were named, or --lf picked some, the others were not looked for
        all_collected = not any("::" in str(arg) for arg in self.config.args) and not self.config.getoption("lf", False)
        stale = {device: saved.stale(device, self.collected) for device in devices if all_collected}
        if self.settings.update_baseline:
            good = [record for record in measured if record["passed"]]
            changed = saved.update(good)
            for device, tests in stale.items():
                saved.drop(device, tests)
            saved.write()
            gone = sum(map(len, stale.values()))
            left = len(measured) - len(good)
            self.said.append(
                f"baseline: {changed} of {len(good)} peaks changed in {saved.path}"
                + (f", {gone} of tests that are gone dropped" if gone else "")
                + (f", {left} of failed tests left as they were" if left else "")
            )
            return
        for record in measured:
            if saved.entry(baselines.device_key(record), record["test"]) is None:
                self.said.append(f"baseline: {record['test']} has no entry; --memory-update-baseline writes one")
        for device, tests in stale.items():
            self.said.extend(f"baseline: {test} is gone, but has an entry for {device}" for test in tests)


def _properties(record: Mapping[str, Any]) -> list[tuple[str, object]]:
    """What goes into JUnit's <property> elements: sizes in bytes."""
    properties: list[tuple[str, object]] = [
        ("memory_device", record["device"]),
        ("memory_verdict", table.verdict_of(record)),
        ("memory_growth_per_step", record["growth"]["rate"]),
    ]
    if record["peak"] is not None:
        properties.append(("memory_peak", record["peak"]))
    if record["reserved"] is not None:
        properties.append(("memory_reserved", record["reserved"]))
    if record["budget"]["peak"] is not None:
        properties.append(("memory_budget", record["budget"]["peak"]))
    return properties


def _write_text(path: Path, text: str, option: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, text.encode())
    except OSError as error:
        raise BudgetError(f"{option}: {path} cannot be written: {error}") from None
