"""What a long command says while it works: what it is doing, how much of it is done, and the time left."""

from __future__ import annotations

from threading import Event, Thread
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

LINE_S = 15.0
"""between two lines where there is no terminal"""


class Progress:
    """A bar with counts and the time left on a terminal, elsewhere a line every 15 s."""

    def __init__(self, unit: str, total: int | None = None) -> None:
        """`unit`: what is counted; `total`: how many of them there are, if that is known."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
        self._console, self._unit, self._ended = Console(), unit, Event()
        self._bar = Bar(
            *columns,
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            speed_estimate_period=3600,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=total, rate="")
        self._lines = Thread(target=self._print_lines, daemon=True)

    def say(self, doing: str) -> None:
        """Show what is being done now."""
        self._bar.update(self._task, description=doing)

    def add(self, count: int = 1) -> None:
        """Count what is done."""
        self._bar.advance(self._task, count)

    def reach(self, done: int, total: int) -> None:
        """Say how many are done, of so many; the first call says how many were done before."""
        self._bar.update(self._task, completed=min(done, total), total=total)
        speed = self._bar.tasks[0].speed
        self._bar.update(self._task, rate=f"{speed:.1f} {self._unit}/s" if speed else "")

    def print(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(line, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        if not self._console.is_terminal:
            self._lines.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._bar.stop()

    def _print_lines(self) -> None:
        while not self._ended.wait(LINE_S):
            (task,) = self._bar.tasks
            line = f"{task.description}: {task.completed:.0f} {self._unit}"
            if task.total:
                line = f"{task.description}: {task.completed:.0f} of {task.total:.0f} {self._unit}"
                if seconds := task.time_remaining:
                    line += f", {seconds} s left"
            self.print(", ".join(filter(None, (line, task.fields["rate"]))))
