"""A progress bar for people who wait: on a terminal, and only once a run has taken a moment."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

_PATIENCE = 1.0


class Bar:
    """Called with (done, all). It draws itself only when called: a drawing thread would make forking unsafe."""

    def __init__(self, visible: bool) -> None:
        self._visible = visible
        self._start = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """Show how far the run is."""
        if not self._visible or time.monotonic() - self._start < _PATIENCE:
            return
        if self._bar is None:
            self._bar = self._made(total)
        self._bar.update(self._bar.task_ids[0], completed=done)
        self._bar.refresh()

    @staticmethod
    def _made(total: int) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("checking"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        bar = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
        bar.add_task("", total=total)
        bar.start()
        return bar
