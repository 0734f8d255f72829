"""What the texts of a process taught of `auto`'s arms: seconds belong to the machine and its load, gains to texts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from .arms import CASCADE, PLAIN, SINGLE
from .cascade import Promises, Truth
from .estimates import ArmStatistics, Seconds
from .similarity import EndedTexts

JOINT_TIME = 1.3  # of the slowest head's time, before route or merge was tried
WORKED_OUT = 1.04  # times the seconds of a cascade count, as its worth is not seen


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
    ended: EndedTexts = field(default_factory=EndedTexts)
    promises: tuple[Promises, Promises] = field(default_factory=lambda: (Promises(), Promises()))
    """of quick heads, in greedy and in sampled texts"""
    kept: tuple[Truth, Truth] = field(default_factory=lambda: (Truth(), Truth()))
    """how far these promises came true"""
    truth: Truth = field(default_factory=Truth)
    """how far what second heads were expected to gain came true"""

    def step_s(self, name: str, cascade_s: float = 0.0) -> float:
        """What a step of an arm takes at this load, as far as is known. cascade_s: that of the present cascade."""
        plain_s = self.plain.at(self.load) or 0.0
        if name == PLAIN:
            return plain_s
        if name == CASCADE:
            return plain_s + max(0.0, WORKED_OUT * cascade_s - plain_s)
        extra = self.arms[name].extra
        if name.startswith(SINGLE) or extra.count(self.load):
            return plain_s + self._here_s(extra)
        alone = [self._here_s(arm.extra) for one, arm in self.arms.items() if one.startswith(SINGLE)]
        return plain_s + max(self._here_s(extra), JOINT_TIME * max(alone, default=0.0))

    def _here_s(self, extra: Seconds) -> float:
        """What drafting takes at this load; where that was never seen, as much more as a plain step takes more."""
        nearest = extra.nearest(self.load)
        if nearest is None:
            return 0.0
        seconds = extra.by_load[nearest][0]
        if nearest == self.load:
            return seconds
        there_s, here_s = self.plain.at(nearest), self.plain.at(self.load)
        return seconds * (here_s / there_s if there_s and here_s else 1.0)
