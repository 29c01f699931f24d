"""The command line: the only place that knows exit codes, streams and colours.

Exit 0: nothing found at or above --fail-on. 1: something found. 2: a failure, or a command that makes no sense; 1 never
hides 2. 130: Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import memlint
from memlint.errors import BudgetError, ConfigError, MemlintError, UsageError
from memlint.lint.model import Report, Severity
from memlint.reporters import ALL_FORMATS, RuleText, View

if TYPE_CHECKING:
    from memlint.config import Config
    from memlint.rules.base import Rule

CLEAN, FOUND, TROUBLE, INTERRUPTED = 0, 1, 2, 130
STDIN = "-"
_WIDEST = 120


def main(argv: Sequence[str] | None = None) -> int:
    """Run with `argv` (the process's own where None); the exit code."""
    options = parser().parse_args(argv)
    try:
        code: int = options.run(options)
    except MemlintError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return TROUBLE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _close_stdout()
        return CLEAN
    return code


# -- check -----------------------------------------------------------------------------------------------------------


def run_check(options: argparse.Namespace) -> int:
    """`memlint check`."""
    from memlint.lint.catalog import all_rules

    known = tuple(rule.code for rule in all_rules())
    config = configured(options, known)
    if options.statistics and config.output_format not in ("text", "concise"):
        raise UsageError(f"--statistics goes with text and concise; {config.output_format} carries the counts anyway")
    if config.write_baseline is not None and (STDIN in options.paths or config.diff):
        other = "--diff, which writes nothing" if config.diff else "standard input"
        raise UsageError(f"--write-baseline does not go with {other}")
    if STDIN in options.paths:
        if len(options.paths) > 1:
            raise UsageError("`-` (standard input) goes alone")
        return _check_stdin(options, config)
    if options.stdin_filename is not None:
        raise UsageError("--stdin-filename goes with the path `-`")
    from memlint.lint.engine import check
    from memlint.progress import Bar

    with Bar(visible=sys.stderr.isatty()) as bar:
        report = check(options.paths, config, progress=bar)
    if not report.results and not report.all_failures:
        print("warning: no Python files or notebooks found under the given paths", file=sys.stderr)
    if config.diff:
        return _show_diff(report)
    if config.write_baseline is not None:
        report = _write_baseline(report, config, config.write_baseline)
    return _show(report, config, options, sys.stdout, {})


def _write_baseline(report: Report, config: Config, path: str) -> Report:
    """Write all findings to the baseline; the report as the next run will see it."""
    from memlint.lint import baseline
    from memlint.lint.source import SourceLines
    from memlint.reporters.summary import plural

    text = baseline.text(report.findings, SourceLines({}), config.anchor)
    _write_file("--write-baseline", path, text)
    files = len({finding.path for finding in report.findings})
    said = f"wrote {plural(len(report.findings), 'finding')} in {plural(files, 'file')} to {path}"
    if report.all_failures:
        said += " (files that could not be checked are missing)"
    _write(sys.stderr, f"{said}\n")
    return baseline.absorbed(report)


def _check_stdin(options: argparse.Namespace, config: Config) -> int:
    from memlint.lint.discovery import display_path, is_excluded
    from memlint.lint.engine import check_text

    data = sys.stdin.buffer.read()
    name = "<stdin>" if options.stdin_filename is None else display_path(options.stdin_filename)
    if options.stdin_filename is not None and config.force_exclude and is_excluded(name, config.root, config.excludes):
        report, fixed = Report(), data
    else:
        report, fixed = check_text(data, name, config)
    if config.diff:
        return _show_diff(report)
    if config.fix:
        # the fixed source is what the caller asked for; what is left to say must not be mixed into it
        sys.stdout.buffer.write(fixed)
        sys.stdout.flush()
    return _show(report, config, options, sys.stderr if config.fix else sys.stdout, {name: fixed})


def configured(options: argparse.Namespace, known: Sequence[str]) -> Config:
    """The configuration of a run: the file's, with what the command line says."""
    from memlint import config as configuration

    places = options.paths
    if STDIN in places:
        places = [options.stdin_filename or "."]
    if options.isolated and options.config is not None:
        raise UsageError("--isolated and --config contradict each other")
    if options.isolated:
        config = configuration.isolated(places)
    else:
        config = configuration.load(places, known, ALL_FORMATS, options.config)
    for name in ("select", "ignore", "extend_select"):
        try:
            configuration.check_selectors(getattr(options, name) or (), known)
        except ConfigError as error:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError("\n".join(f"{flag}: {line}" for line in str(error).splitlines())) from None
    if options.write_baseline is not None and options.baseline:
        raise UsageError("--write-baseline writes all that is found, so it does not go with --baseline")
    said = {name: getattr(options, name) for name in _SETTINGS}
    if options.write_baseline is not None:
        said["baseline"] = ""  # the configuration's is about to be replaced
    return configuration.overridden(config, said)


def exit_code(report: Report, config: Config, exit_zero: bool) -> int:
    """What the run comes to; a failure is never hidden by findings."""
    if report.all_failures:
        return TROUBLE
    found = any(finding.severity >= config.fail_on for finding in report.findings)
    return FOUND if found and not exit_zero else CLEAN


def _show_diff(report: Report) -> int:
    diffs = "".join(result.diff for result in report.results)
    _write(sys.stdout, diffs)
    for failure in report.all_failures:
        where = failure.path if failure.line is None else f"{failure.path}:{failure.line}"
        _write(sys.stderr, f"cannot check {where}: {failure.kind.value}: {failure.detail}\n")
    if report.all_failures:
        return TROUBLE
    return FOUND if diffs else CLEAN


def _show(report: Report, config: Config, options: argparse.Namespace, stream: Any, given: dict[str, bytes]) -> int:
    """Write the report to `stream`, or to the file that the user named; the exit code.

    What a program reads from a file leaves `stream` to the text, for the people who read the log.
    """
    from dataclasses import replace

    from memlint.lint.source import SourceLines
    from memlint.reporters import render

    code = exit_code(report, config, options.exit_zero)
    form, to_file = config.output_format, options.output_file is not None
    view = View(
        width=_width(),
        colour=_colour(stream),
        # who lets notes fail a run wants to see them
        show_notes=config.show_notes or config.fail_on is Severity.NOTE,
        statistics=options.statistics,
        unsafe_fixes=config.unsafe_fixes,
        lines=SourceLines(given),
        fail_on=config.fail_on,
        exit_code=code,
        rules=_rule_texts() if form == "sarif" else (),
    )
    if not to_file:
        _write(stream, render(form, report, view))
    else:
        if form != "text":
            _write(stream, render("text", report, view))
        _write_file("--output-file", options.output_file, render(form, report, replace(view, colour=False)))
    if report.stale:
        _write(sys.stderr, _stale(report.stale, config))
    return code


def _stale(count: int, config: Config) -> str:
    from memlint.reporters.summary import plural

    gone = plural(count, "finding")
    return f"note: baseline {config.baseline}: {gone} no longer there (--write-baseline writes it anew)\n"


def _rule_texts() -> tuple[RuleText, ...]:
    from memlint.lint.catalog import all_rules
    from memlint.lint.docs import documentation, explained, markdown

    return tuple(
        RuleText(
            rule.code,
            rule.name,
            rule.severity,
            rule.summary(),
            documentation(rule),
            explained(rule, _WIDEST, False),
            markdown(rule),
        )
        for rule in all_rules()
    )


def _write_file(option: str, path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}") from error


# -- the terminal ----------------------------------------------------------------------------------------------------


def _write(stream: Any, text: str) -> None:
    # what the stream cannot encode (a path that is no UTF-8, a terminal without Unicode) must not end the run
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def _colour(stream: Any) -> bool:
    """NO_COLOR and FORCE_COLOR decide, where they are set and not empty; else whether somebody is looking."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return bool(stream.isatty()) and os.environ.get("TERM") != "dumb"


def _width() -> int:
    """The columns of the terminal (or of COLUMNS); lines longer than _WIDEST are hard to read."""
    import shutil

    return min(shutil.get_terminal_size((100, 24)).columns, _WIDEST)


def _close_stdout() -> None:
    """The reader has gone: nothing more can be said, and the interpreter must not complain about that at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# -- explain and rules -----------------------------------------------------------------------------------------------


def run_explain(options: argparse.Namespace) -> int:
    """`memlint explain CODE`."""
    from memlint.lint.catalog import all_rules
    from memlint.lint.docs import explained

    _write(sys.stdout, explained(_rule(options.code, all_rules()), _width(), _colour(sys.stdout)))
    return CLEAN


def _rule(text: str, rules: Sequence[Rule]) -> Rule:
    for rule in rules:
        if text.upper() == rule.code or text.lower() == rule.name:
            return rule
    import difflib

    names = [*(rule.code for rule in rules), *(rule.name for rule in rules)]
    near = difflib.get_close_matches(text.upper(), names, n=1) or difflib.get_close_matches(text.lower(), names, n=1)
    raise UsageError(
        f"unknown rule {text!r}; " + (f"did you mean {near[0]}?" if near else "`memlint rules` lists them")
    )


def run_rules(options: argparse.Namespace) -> int:
    """`memlint rules`."""
    from memlint.lint.catalog import all_rules
    from memlint.lint.docs import listed

    _write(sys.stdout, listed(all_rules(), _width(), _colour(sys.stdout)))
    return CLEAN


# -- run -------------------------------------------------------------------------------------------------------------


def run_script(options: argparse.Namespace) -> int:
    """`memlint run`: the script's own exit code, or 1 where it leaks or is over its budget."""
    from memlint.runtime.budget import Budget

    try:
        import torch  # noqa: F401
    except ImportError:
        raise UsageError("memlint run needs torch: pip install 'torch-memlint[runtime]'") from None
    from memlint.runtime.report.text import text_of
    from memlint.runtime.script import Plan, run

    if options.report is not None and not os.path.isdir(os.path.dirname(options.report) or "."):
        raise UsageError(f"--report {options.report}: there is no such folder")  # said now, not after the training
    limits = {"peak": options.budget, "reserved": options.reserved, "growth": options.growth, "device": options.device}
    for name, value in limits.items():
        try:
            Budget.parse({name: value})
        except BudgetError as error:
            option = "budget" if name == "peak" else name
            raise UsageError(f"--{option} {value}: {str(error).partition(': ')[2]}") from None
    plan = Plan(
        target=options.target,
        arguments=options.arguments,
        is_module=options.module,
        budget=Budget.parse(limits),
        warmup=options.warmup,
        steps=options.steps,
        trace=options.trace,
        constants=dict(map(_constant, options.set)),
    )
    if plan.constants and plan.is_module:
        raise UsageError("--set works for scripts, not for -m")
    ran = run(plan, sys.stderr if sys.stderr.isatty() else None)
    sys.stdout.flush()
    _write(sys.stderr, text_of(ran.record) + "\n")
    if options.report is not None:
        from memlint.runtime.report.record import json_of

        _write_file("--report", options.report, json_of([ran.record]))
    return ran.code if ran.passed else FOUND


def _constant(text: str) -> tuple[str, object]:
    """`BATCH_SIZE=64` as a name and a Python value."""
    import ast

    name, found, value = text.partition("=")
    try:
        if not found or not name.isidentifier():
            raise ValueError
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        raise UsageError(f"--set {text}: it wants NAME=VALUE, such as BATCH_SIZE=64") from None


# -- fit -------------------------------------------------------------------------------------------------------------


def run_fit(options: argparse.Namespace) -> int:
    """`memlint fit`: 1 where nothing fits."""
    try:
        import torch  # noqa: F401
    except ImportError:
        raise UsageError("memlint fit needs torch: pip install 'torch-memlint[runtime]'") from None
    from memlint.runtime import fit

    name, values = fit.parse_vary(options.vary)
    if ":" in options.target.replace(":\\", ""):
        make_step = fit.load(options.target)
        found = fit.fit(
            make_step,
            values,
            name=name,
            gpu=options.gpu,
            margin=options.margin,
            steps=options.steps,
            advise=options.advice,
        )
    else:
        found = fit.fit_script(
            options.target, options.arguments, name, values, gpu=options.gpu, margin=options.margin, steps=options.steps
        )
    if options.report is not None:
        _write_file("--report", options.report, fit.json_of(found))
    _write(sys.stdout, fit.text_of(found))
    return CLEAN if found.best is not None else FOUND


# -- the words -------------------------------------------------------------------------------------------------------

#: options that overrule the configuration
_SETTINGS = (
    "select",
    "ignore",
    "extend_select",
    "exclude",
    "extend_exclude",
    "target_torch",
    "fail_on",
    "show_notes",
    "jobs",
    "output_format",
    "force_exclude",
    "fix",
    "unsafe_fixes",
    "diff",
    "cache",
    "baseline",
    "write_baseline",
)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="memlint", description="Finds the code that makes PyTorch training run out of memory."
    )
    made.add_argument("--version", action="version", version=f"memlint {memlint.__version__}")
    commands = made.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_check(commands.add_parser("check", help="check files and folders", description="Check files and folders."))
    explain = commands.add_parser("explain", help="explain a rule", description="Explain a rule.")
    explain.add_argument("code", metavar="CODE", help="the rule's code or name")
    explain.set_defaults(run=run_explain)
    rules = commands.add_parser("rules", help="list all rules", description="List all rules.")
    rules.set_defaults(run=run_rules)
    _add_run_script(
        commands.add_parser(
            "run",
            help="run a training script and watch its memory",
            description="Run an unmodified training script: each optimizer step is a step. Exit 1 when it leaks or is"
            " over its budget, else the script's own exit code.",
        )
    )
    _add_fit(
        commands.add_parser(
            "fit",
            help="find the largest batch that fits a card, without one",
            description="Find the largest value (a batch size, say) with which a training step fits a card, by running"
            " steps on the virtual CUDA device. Exit 1 when no value fits.",
        )
    )
    return made


def _add_fit(fit: argparse.ArgumentParser) -> None:
    fit.set_defaults(run=run_fit)
    fit.add_argument("--gpu", default="t4", metavar="CARD", help="the card, such as t4, rtx-3090 or a100-80gb (t4)")
    fit.add_argument(
        "--vary",
        required=True,
        metavar="NAME=A..B",
        help="what is varied: an argument of the function, a constant at the script's top, or argv:--option;"
        " with its values as A..B or N,N,...",
    )
    fit.add_argument("--margin", type=_share, default=0.05, metavar="PART", help="what stays free of the card (5%%)")
    fit.add_argument("--steps", type=_whole(1), default=3, metavar="N", help="steps to run for each value (3)")
    fit.add_argument("--no-advice", dest="advice", action="store_false", help="do not try what would help")
    fit.add_argument("--report", metavar="FILE", help="write all that was measured as JSON")
    fit.add_argument("target", metavar="TARGET", help="FILE.py:FUNCTION or MODULE:FUNCTION, or a script")
    fit.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="what a script gets as its argv")


def _share(text: str) -> float:
    """A part of a whole, as 0.05 or 5%."""
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no part of a whole, such as 5%")
    return value


def _add_run_script(run: argparse.ArgumentParser) -> None:
    run.set_defaults(run=run_script)
    run.add_argument("--steps", type=_whole(3), metavar="N", help="stop after so many measured steps (run to the end)")
    run.add_argument("--warmup", type=_whole(0), default=3, metavar="N", help="steps before measuring (3)")
    run.add_argument("--budget", metavar="SIZE", help="the most that may be allocated at one time, such as 20GiB")
    run.add_argument("--reserved", metavar="SIZE", help="the most that the allocator may hold at one time")
    run.add_argument("--growth", default="0", metavar="SIZE", help="bytes that may stay a step (0)")
    run.add_argument("--device", default="auto", help="auto (an accelerator, else the CPU), cpu, cuda, virtual:t4, ...")
    run.add_argument(
        "--trace",
        choices=("on-failure", "always", "never"),
        default="on-failure",
        help="when to trace steps, to say who holds what (on-failure)",
    )
    run.add_argument("--report", metavar="FILE", help="write all that was measured as JSON")
    run.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="run with another value for a constant that the script assigns at its top",
    )
    run.add_argument("-m", dest="module", action="store_true", help="the target is a module, as for python -m")
    run.add_argument("target", metavar="SCRIPT", help="the script")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="what the script gets as its argv")


def _add_check(check: argparse.ArgumentParser) -> None:
    check.set_defaults(run=run_check)
    check.add_argument("paths", nargs="*", default=["."], metavar="PATH", help="files and folders (.); - is stdin")
    _add_selection(check.add_argument_group("rules"))
    _add_fixes(check.add_argument_group("fixes"))
    _add_output(check.add_argument_group("output"))
    _add_baseline(check.add_argument_group("baseline"))
    _add_files(check.add_argument_group("files"))
    _add_run(check.add_argument_group("run"))


def _add_selection(group: Any) -> None:
    codes = {"type": _listed, "action": "extend", "metavar": "CODES"}
    group.add_argument("--select", help="check these codes or prefixes only, or ALL (comma-separated)", **codes)
    group.add_argument("--ignore", help="leave these out", **codes)
    group.add_argument("--extend-select", help="check these, too", **codes)
    group.add_argument(
        "--target-torch",
        type=_checked("check_version"),
        metavar="VERSION",
        help="the oldest torch that the code supports, such as 1.13",
    )


def _add_fixes(group: Any) -> None:
    group.add_argument("--fix", action="store_true", default=None, help="apply fixes that change no result")
    group.add_argument(
        "--unsafe-fixes", action="store_true", default=None, help="with --fix or --diff: all other fixes, too"
    )
    group.add_argument("--diff", action="store_true", default=None, help="show what --fix would change; write nothing")


def _add_output(group: Any) -> None:
    group.add_argument("--output-format", choices=ALL_FORMATS, help="how to report (text)")
    group.add_argument(
        "-o",
        "--output-file",
        metavar="FILE",
        help="write the report to a file; any format but text beside the text on the terminal",
    )
    group.add_argument("--show-notes", action="store_true", default=None, help="show each note, not one line a code")
    group.add_argument("--statistics", action="store_true", help="show how often each code was found")
    group.add_argument(
        "--fail-on",
        type=_checked("check_severity"),
        metavar="SEVERITY",
        help="exit 1 from this severity on: note, warning (the default) or error",
    )
    group.add_argument("--exit-zero", action="store_true", help="exit 0 even if something is found")


def _add_baseline(group: Any) -> None:
    group.add_argument("--baseline", metavar="FILE", help="report only what this file does not hold")
    group.add_argument(
        "--no-baseline", dest="baseline", action="store_const", const="", help="report what the baseline holds, too"
    )
    group.add_argument("--write-baseline", metavar="FILE", help="write all that is found to this file")


def _add_files(group: Any) -> None:
    patterns = {"type": _listed, "action": "extend", "metavar": "PATTERNS"}
    group.add_argument("--exclude", help="files to leave out, in place of the defaults (comma-separated)", **patterns)
    group.add_argument("--extend-exclude", help="more files to leave out", **patterns)
    group.add_argument(
        "--force-exclude", action="store_true", default=None, help="leave out excluded files even if they are named"
    )
    group.add_argument("--stdin-filename", metavar="NAME", help="the name of what comes from stdin")


def _add_run(group: Any) -> None:
    group.add_argument("--config", metavar="FILE", help="the configuration file")
    group.add_argument("--isolated", action="store_true", help="ignore all configuration files")
    group.add_argument(
        "--no-cache", dest="cache", action="store_false", default=None, help="neither read nor write cached results"
    )
    group.add_argument("-j", "--jobs", type=_jobs, metavar="N", help="how many processes (one a CPU)")


def _listed(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _checked(name: str) -> Any:
    """An argument type from the check of the configuration's key, so that both take the same."""

    def convert(text: str) -> Any:
        from memlint import config

        try:
            return getattr(config, name)(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _whole(least: int) -> Any:
    def convert(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number, {least} or more")
        return int(text)

    return convert


def _jobs(text: str) -> int:
    from memlint.config import check_jobs

    try:
        return check_jobs(int(text))
    except (ConfigError, ValueError):
        raise argparse.ArgumentTypeError("must be a whole number, 1 or more") from None
