"""What the texts of a process taught of `auto`'s arms: seconds belong to the machine and its load, gains to texts."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from .arms import PLAIN, SINGLE
from .similarity import Ended

COLD = 3  # take the fastest of an arm's first three steps: the first ones include warm-up
RATE = 0.1  # of the averages of seconds: a machine that slows down is noticed within ten steps
JOINT_TIME = 1.3  # of the slowest head's time, before route or merge was tried
MEMORY = (
    1024.0  # steps of all texts that count: heads are trained on, and a head that once gained little is tried again
)


@dataclass(slots=True)
class Seconds:
    """A moving average by load, of `count` steps there."""

    by_load: dict[int, tuple[float, int]] = field(default_factory=dict)

    def see(self, load: int, seconds: float, beside: float = 0.0) -> None:
        """Take in a step. `beside`: what else it took; a step that stalled counts as twice the usual one."""
        mean, count = self.by_load.get(load, (seconds, 0))
        count += 1
        if count <= COLD:
            mean = min(mean, seconds)
        else:
            mean += (min(seconds, 2 * mean + beside) - mean) * max(RATE, 1 / count)
        self.by_load[load] = mean, count

    def bound(self, load: int, seconds: float) -> None:
        """Take in that a step takes no longer, such as a plain one than a drafting one."""
        mean, count = self.by_load.get(load, (seconds, 0))
        if count and seconds < mean:
            self.by_load[load] = mean + RATE * (seconds - mean), count

    def at(self, load: int) -> float | None:
        """The mean at a load; where it was never seen, at the nearest one, of two the lower. None: nothing was seen."""
        if load in self.by_load:
            return self.by_load[load][0]
        nearest = min(self.by_load, key=lambda known: (abs(known - load), known), default=None)
        return None if nearest is None else self.by_load[nearest][0]

    def count(self, load: int) -> int:
        """Steps seen at a load."""
        return self.by_load.get(load, (0.0, 0))[1]


@dataclass(slots=True)
class Gain:
    """Accepted drafts of an arm's steps."""

    total: float = 0.0
    steps: float = 0.0

    def see(self, accepted: int) -> None:
        """Take in a step."""
        self.total += accepted
        self.steps += 1

    def fade(self, kept: float) -> None:
        """Let what was seen weigh less."""
        self.total *= kept
        self.steps *= kept

    def mean(self, first: float, weight: float) -> float:
        """Accepted drafts a step, where `weight` steps that gain `first` are taken as seen before."""
        return (weight * first + self.total) / (weight + self.steps)


@dataclass(slots=True)
class ArmStatistics:
    """What all texts taught of an arm."""

    extra: Seconds = field(default_factory=Seconds)
    """what a step takes beside a plain one"""
    opening: Seconds = field(default_factory=Seconds)
    """what a step takes besides in which its heads take in a text"""
    gains: tuple[Gain, Gain] = field(default_factory=lambda: (Gain(), Gain()))
    """of greedy and of sampled texts"""
    rounds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """that it was played for in greedy and in sampled texts; the steps of all texts under way make a round"""


@dataclass(slots=True)
class Statistics:
    """What all sessions of a process know together."""

    arms: defaultdict[str, ArmStatistics] = field(default_factory=lambda: defaultdict(ArmStatistics))
    plain: Seconds = field(default_factory=Seconds)
    """of plain steps"""
    load: int = 0
    """texts under way, in powers of two: 1; 2 and 3; 4 to 7"""
    steps: int = 0
    """of all texts so far"""
    ended: tuple[Ended[dict[str, Gain]], Ended[dict[str, Gain]]] = field(default_factory=lambda: (Ended(), Ended()))
    """what arms gained in greedy texts, and in sampled ones"""

    def forget(self, steps: int) -> None:
        """Let what was seen of gains before the latest steps count less."""
        for arm in self.arms.values():
            for gain in arm.gains:
                gain.fade(math.exp(-steps / MEMORY))

    def step_s(self, name: str) -> float:
        """What a step of an arm takes at this load, as far as is known."""
        plain_s = self.plain.at(self.load) or 0.0
        if name == PLAIN:
            return plain_s
        extra_s = self.arms[name].extra.at(self.load)
        if extra_s is None:
            alone = [arm.extra.at(self.load) or 0.0 for one, arm in self.arms.items() if one.startswith(SINGLE)]
            extra_s = JOINT_TIME * max(alone, default=0.0)
        return plain_s + extra_s
