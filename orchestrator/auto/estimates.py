"""What an arm of `auto` takes and what it gains: means that fade as more is seen."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

COLD = 3  # take the fastest of an arm's first three steps: the first ones include warm-up
RATE = 0.1  # of the averages of seconds
FIRST_GAIN, FIRST_STEPS = 1.0, 4.0  # what an arm is thought to gain before it was tried, and how many steps that weighs
MEMORY = 256.0  # steps of an arm, over all texts, that count
FORGET_STEPS = 4096.0  # after so many steps without it an arm is nearly unknown again


@dataclass(slots=True)
class Seconds:
    """A moving average by load, of `count` steps there."""

    by_load: dict[int, tuple[float, int]] = field(default_factory=dict)

    def see(self, load: int, seconds: float, beside: float = 0.0) -> None:
        """Take in a step, a stall as twice the mean and what it is `beside`; of the first COLD the shortest counts."""
        mean, count = self.by_load.get(load, (seconds, 0))
        count += 1
        if count <= COLD:
            mean = min(mean, seconds)
        else:
            mean += (min(seconds, 2 * mean + beside) - mean) * max(RATE, 1 / count)
        self.by_load[load] = max(0.0, mean), count

    def bound(self, load: int, seconds: float) -> None:
        """Take in that a step takes no longer, such as a plain one than a drafting one."""
        mean, count = self.by_load.get(load, (seconds, 0))
        if count and seconds < mean:
            self.by_load[load] = mean + RATE * (seconds - mean), count

    def at(self, load: int) -> float | None:
        """The mean at a load; where it was never seen, at the nearest one. None when nothing was seen."""
        if load in self.by_load:
            return self.by_load[load][0]
        nearest = self.nearest(load)
        return None if nearest is None else self.by_load[nearest][0]

    def nearest(self, load: int) -> int | None:
        """The load that was seen next to this one; of two the lower. None when nothing was seen."""
        if load in self.by_load:
            return load
        return min(self.by_load, key=lambda known: (abs(known - load), known), default=None)

    def count(self, load: int) -> int:
        """Steps seen at a load."""
        return self.by_load.get(load, (0.0, 0))[1]


@dataclass(slots=True)
class Gain:
    """What an arm gains over all texts, a fading mean."""

    total: float = 0.0
    weight: float = 0.0
    at: int = 0  # when it was seen last, in steps of all sessions
    rounds: float = 0.0  # it was played for, those that had to open streams included; all texts' steps make a round

    def left(self, now: int) -> float:
        """How many steps of it still count."""
        return self.weight * math.exp(-(now - self.at) / FORGET_STEPS)

    def mean(self, now: int, first: float = FIRST_GAIN) -> float:
        """Accepted drafts a step, `first` as long as it was not tried."""
        weight = self.left(now)
        mean = self.total / self.weight if self.weight else first
        return (first * FIRST_STEPS + mean * weight) / (FIRST_STEPS + weight)

    def see(self, accepted: int, now: int) -> None:
        """Take in a step."""
        kept = math.exp(-(now - self.at) / FORGET_STEPS) * (1 - 1 / MEMORY)
        self.total, self.weight, self.at = kept * self.total + accepted, kept * self.weight + 1, now


@dataclass(slots=True)
class ArmStatistics:
    """What all texts taught of an arm."""

    extra: Seconds = field(default_factory=Seconds)
    """what a step takes beside a plain one"""
    behind: Seconds = field(default_factory=Seconds)
    """what it takes beside a step of the quick head, as the second head of a cascade"""
    opening: Seconds = field(default_factory=Seconds)
    """what a step takes besides in which its heads take in a text"""
    gains: tuple[Gain, Gain] = field(default_factory=lambda: (Gain(), Gain()))
    """accepted drafts a step, of greedy and of sampled texts"""
