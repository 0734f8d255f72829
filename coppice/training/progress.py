"""What a long command says while it works: what it is doing, how much of it is done, and the time left."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

LINE_S = 15.0  # between two lines where there is no terminal


class Progress(Bar):
    """A bar with counts and the time left on a terminal, elsewhere a line every 15 s. What is printed stays."""

    def __init__(self, unit: str, total: int | None = None) -> None:
        """`unit`: what is counted; `total`: how many of them there are, if that is known."""
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}")
        console = Console(highlight=False, soft_wrap=True)
        super().__init__(
            *columns,
            TimeRemainingColumn(),
            console=console,
            transient=True,
            speed_estimate_period=3600,
            disable=not console.is_terminal,
        )
        self._unit, self._printed = unit, time.monotonic()
        self._task = self.add_task("starting", total=total, rate=unit)

    def say(self, doing: str) -> None:
        self.update(self._task, description=doing)

    def add(self, count: int = 1) -> None:
        self.advance(self._task, count)
        self._print_line()

    def reach(self, done: int, total: int) -> None:
        """Say how many are done, of so many; the first call says how many were done before."""
        self.update(self._task, completed=min(done, total), total=total)
        if speed := self.tasks[0].speed:
            self.update(self._task, rate=f"{self._unit}, {speed:.1f} {self._unit}/s")
        self._print_line()

    def _print_line(self) -> None:
        if self.console.is_terminal or time.monotonic() - self._printed < LINE_S:
            return
        self._printed = time.monotonic()
        (task,) = self.tasks
        total = f" of {task.total:.0f}" if task.total else ""
        left = f", {task.time_remaining:.0f} s left" if task.time_remaining else ""
        self.print(f"{task.description}: {task.completed:.0f}{total} {task.fields['rate']}{left}")
