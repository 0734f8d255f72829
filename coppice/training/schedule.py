"""Batch size, row length and learning rate as functions of the tokens seen, so that `--tokens` may change on resume."""

import math

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt


class Schedule(BaseModel):
    """Warm-up, then constant and linear decay to zero (WSD), or cosine to zero. All lengths are in tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: PositiveInt
    """Tokens of the whole run."""
    warmup: PositiveInt = 60_000
    cosine: bool = False
    decay: PositiveFloat = 0.3
    """Share of the run over which the rate falls to zero."""
    length: PositiveInt = 256
    long_length: PositiveInt = 512
    """Row length in the last `long_share` of the run: positions beyond `length` must have been seen once."""
    long_share: float = 0.15
    batch: PositiveInt = 4096
    small_batch: PositiveInt = 2048
    """Tokens a step before `small_until`: early gradients agree, so more steps are worth more than better ones."""
    small_until: int = 1_500_000

    def rate(self, seen: int) -> float:
        """Return the factor on every learning rate after `seen` tokens."""
        risen = (seen + self.batch) / self.warmup
        if self.cosine:
            return max(0.0, min(risen, 0.5 + 0.5 * math.cos(math.pi * min(1.0, seen / self.tokens))))
        return max(0.0, min(1.0, (self.tokens - seen) / (self.tokens * self.decay), risen))

    def shape(self, seen: int) -> tuple[int, int]:
        """Return (rows, length) of the step after `seen` tokens."""
        length = self.long_length if seen >= self.tokens * (1 - self.long_share) else self.length
        batch = self.small_batch if seen < self.small_until else self.batch
        return max(1, batch // length), length
