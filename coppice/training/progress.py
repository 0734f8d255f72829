"""What a training run prints: a line now and then."""

import time

PRINT_S = 20.0
"""between two lines about steps"""


class Progress:
    """Reports steps (smoothed loss and tokens/s) and evaluations of a run of `total` tokens."""

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total = title, total
        self._loss, self._speed, self._printed = 0.0, 0.0, 0.0

    def step(self, step: int, tokens: int, loss: float, tokens_per_s: float) -> None:
        """Report that an optimiser step is done; `tokens` have been seen so far."""
        keep = 0.95 if self._loss else 0.0
        self._loss = keep * self._loss + (1 - keep) * loss
        self._speed = keep * self._speed + (1 - keep) * tokens_per_s
        if time.monotonic() - self._printed > PRINT_S:
            self._printed = time.monotonic()
            facts = f"{tokens:,}/{self.total:,} tokens  loss {self._loss:.3f}  {self._speed:.0f} tokens/s"
            self._line(f"step {step}  {facts}")

    def evaluation(self, tokens: int, mean: float, held_out: dict[str, float]) -> None:
        """Report a held-out measurement: the weighted mean and each domain, in nats a token."""
        parts = "  ".join(f"{name} {loss:.3f}" for name, loss in held_out.items())
        self._line(f"held out after {tokens:,} tokens: {mean:.3f} ({parts})")

    def _line(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {self.title}: {text}", flush=True)
