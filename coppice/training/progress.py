"""What a training run prints: a live bar on a terminal, plain lines elsewhere."""

import time

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Progress:
    """Reports steps (smoothed loss and tokens/s) and evaluations."""

    def __init__(self, title: str, console: Console | None = None, seconds: float = 20.0) -> None:
        """Where there is no terminal, a line is printed every so many `seconds`."""
        self.title, self.seconds = title, seconds
        self.console = console or Console()
        self._bar: RichProgress | None = None
        self._total, self._loss, self._speed, self._printed = 0, 0.0, 0.0, 0.0

    def start(self, tokens: int) -> None:
        """Begin a run of `tokens` tokens."""
        self._total = tokens
        if self.console.is_terminal:
            facts = TextColumn("{task.fields[facts]}")
            columns = (TextColumn("{task.description}"), BarColumn(), facts, TimeRemainingColumn())
            self._bar = RichProgress(*columns, console=self.console)
            self._bar.add_task(self.title, total=tokens, facts="")
            self._bar.start()

    def step(self, step: int, tokens: int, loss: float, tokens_per_s: float) -> None:
        """Report that an optimiser step is done; `tokens` have been seen so far."""
        keep = 0.95 if self._loss else 0.0
        self._loss = keep * self._loss + (1 - keep) * loss
        self._speed = keep * self._speed + (1 - keep) * tokens_per_s
        facts = f"{tokens:,}/{self._total:,} tokens  loss {self._loss:.3f}  {self._speed:.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=tokens, facts=facts)
        elif time.monotonic() - self._printed > self.seconds:
            self._printed = time.monotonic()
            self._line(f"step {step}  {facts}")

    def evaluation(self, tokens: int, mean: float, held_out: dict[str, float]) -> None:
        """Report a held-out measurement: the weighted mean and each domain, in nats a token."""
        parts = "  ".join(f"{name} {loss:.3f}" for name, loss in held_out.items())
        self._line(f"held out after {tokens:,} tokens: {mean:.3f} ({parts})")

    def stop(self) -> None:
        """End the live bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _line(self, text: str) -> None:
        if self.console.is_terminal:
            self.console.print(text)
        else:
            print(f"{time.strftime('%H:%M:%S')} {self.title}: {text}", flush=True)
