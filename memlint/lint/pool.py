"""Many files over several processes.

Chunks of about equal size, the largest files first, keep all processes busy to the end. No more chunks are handed out
than there are processes, so that when one dies it is known among which files to look for the one that killed it.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memlint.lint.model import Failure, FailureKind, FileResult

if TYPE_CHECKING:
    import multiprocessing.context
    from concurrent.futures import Future, ProcessPoolExecutor
    from multiprocessing.synchronize import Event

    from memlint.config import Config
    from memlint.lint.discovery import Candidate
    from memlint.lint.engine import Checker, Progress
    from memlint.rules.base import Rule

#: below this many bytes of source a second process costs more than it saves (measured: about 0.1 s to start)
_WORTH_A_PROCESS = 300_000
_CHUNK_BYTES = 150_000
_CHUNK_FILES = 40
#: every how many chunks a process looks for garbage in what is new, and in all that it holds
_COLLECTION, _FULL_COLLECTION = 4, 40

Chunk = list[tuple[int, "Candidate"]]


def useful_jobs(files: Sequence[Candidate], wanted: int | None) -> int:
    """How many processes to use: what is wanted (None: one a CPU), but no more than the work is worth."""
    most = wanted if wanted is not None else _cpus()
    if most == 1 or len(files) < 2:
        return 1
    return max(1, min(most, len(files), sum(file.size for file in files) // _WORTH_A_PROCESS))


def run(
    files: Sequence[Candidate], config: Config, rules: Sequence[Rule], jobs: int, progress: Progress | None
) -> list[FileResult]:
    """The results of `files`, in their order."""
    return _Run(files, config, rules, jobs, progress).results()


class _Run:
    """One run over a pool of processes, and over new ones where a process dies."""

    def __init__(
        self,
        files: Sequence[Candidate],
        config: Config,
        rules: Sequence[Rule],
        jobs: int,
        progress: Progress | None,
    ) -> None:
        self._total = len(files)
        self._waiting = list(_chunks(files))
        self._jobs = jobs
        self._progress = progress
        self._context = _context()
        self._stop = self._context.Event()
        self._setup = (config, tuple(rules), self._stop)
        self._done: dict[int, FileResult] = {}

    def results(self) -> list[FileResult]:
        while self._waiting:
            suspects = self._until_a_process_dies()
            for chunk in suspects:
                for item in chunk:
                    self._alone(item)
        return [self._done[index] for index in range(self._total)]

    def _until_a_process_dies(self) -> list[Chunk]:
        """Work through what waits; where a process dies, the chunks among which the cause must be."""
        from concurrent.futures import FIRST_COMPLETED, wait
        from concurrent.futures.process import BrokenProcessPool

        executor = self._executor(self._jobs)
        running: dict[Future[list[tuple[int, FileResult]]], Chunk] = {}
        try:
            while self._waiting or running:
                while self._waiting and len(running) < self._jobs:
                    running[executor.submit(_check_chunk, self._waiting[-1])] = self._waiting[-1]
                    self._waiting.pop()
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in sorted(finished, key=lambda future: future.exception() is not None):
                    self._take(future.result())
                    del running[future]
        except BrokenProcessPool:
            return list(running.values()) or [self._waiting.pop()]
        except BaseException:
            # the processes finish the file that they are at, which may be about to be written
            self._stop.set()
            raise
        finally:
            executor.shutdown(wait=True, cancel_futures=True)
        return []

    def _alone(self, item: tuple[int, Candidate]) -> None:
        """Check one file in a process of its own; if it dies this is the file."""
        from concurrent.futures.process import BrokenProcessPool

        executor = self._executor(1)
        try:
            self._take(executor.submit(_check_chunk, [item]).result())
        except BrokenProcessPool:
            index, file = item
            detail = "the process that checked this file died (out of memory, or a defect of memlint)"
            self._take([(index, FileResult(file.display, failures=(_died(file, detail),)))])
        except BaseException:
            self._stop.set()
            raise
        finally:
            executor.shutdown(wait=True, cancel_futures=True)

    def _executor(self, jobs: int) -> ProcessPoolExecutor:
        from concurrent.futures import ProcessPoolExecutor

        return ProcessPoolExecutor(jobs, mp_context=self._context, initializer=_start, initargs=self._setup)

    def _take(self, results: list[tuple[int, FileResult]]) -> None:
        self._done.update(results)
        if self._progress is not None:
            self._progress(len(self._done), self._total)


def _died(file: Candidate, detail: str) -> Failure:
    return Failure(file.display, FailureKind.WORKER_DIED, detail)


def _chunks(files: Sequence[Candidate]) -> Iterator[Chunk]:
    """Chunks of files with their index, the last chunk first (they are taken from the end).

    Neighbours stay together: they import the same modules, of which a process remembers what it has read.
    """
    chunk: Chunk = []
    size = 0
    for index, file in reversed(list(enumerate(files))):
        if chunk and (size + file.size > _CHUNK_BYTES or len(chunk) >= _CHUNK_FILES):
            yield chunk
            chunk, size = [], 0
        chunk.append((index, file))
        size += file.size
    if chunk:
        yield chunk


def _context() -> multiprocessing.context.BaseContext:
    """How processes start: a fork has all imports done already, but is safe only without other threads."""
    import multiprocessing
    import threading

    alone = threading.active_count() == 1
    return multiprocessing.get_context("fork" if sys.platform == "linux" and alone else "spawn")


def _cpus() -> int:
    """The CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# -- in the processes ------------------------------------------------------------------------------------------------

_checker: Checker
_stopped: Event
_collections = 0


def _start(config: Config, rules: Sequence[Rule], stop: Event) -> None:
    """Make a process ready: Ctrl-C is the main process's to handle, and what is loaded by now is no garbage."""
    global _checker, _stopped
    import signal

    from memlint.lint.engine import Checker

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _checker, _stopped = Checker(config, rules), stop
    gc.disable()
    gc.freeze()


def _check_chunk(chunk: Chunk) -> list[tuple[int, FileResult]]:
    results = []
    for index, candidate in chunk:
        if _stopped.is_set():
            break
        results.append((index, _checker.file(candidate)))
    _collect()
    return results


def _collect() -> None:
    """Free what a chunk leaves in cycles. What lives long, which is more and more, is looked through now and then."""
    global _collections
    _collections += 1
    if _collections % _COLLECTION == 0:
        gc.collect(2 if _collections % _FULL_COLLECTION == 0 else 1)
