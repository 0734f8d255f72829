"""What the sessions of a process know together of `auto`'s arms, and the arm that they play."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from orchestrator.auto.arms import CASCADE, PLAIN, SINGLE
from orchestrator.auto.cascade import Promises, Truth
from orchestrator.auto.estimates import FIRST_STEPS, Gain, Known, Seconds
from orchestrator.auto.similarity import Memory, Remembered, Sketch

LEARN = 5  # rounds that a new head is played for
JOINT_GAIN, JOINT_TIME = 1.1, 1.3  # of the best head's gain and the slowest one's time, before route or merge was tried
TRIED = 0.015  # share of the time that trying other arms may lose
FIRST_SAVED_S, MOST_SAVED_S = 0.2, 1.0  # of allowance: by the first greedy and the first sampled text, and ever
TEXT_STEPS = 12.0  # steps of a text that weigh as much as what was known before it
STAY = 1.01  # how much better another arm must be
HOPE = 1.0  # standard deviations an untried arm may be better than it looks
HOPELESS = 0.9  # of the best rate: a head that even with that has less drafts along unseen only
RUN = 4  # steps an arm is tried in a row: the first one may have to open streams and catch up
WORKED_OUT = 1.04  # times the seconds of a cascade count, as its worth is not seen
FIRST_PLAIN = 2  # plain steps that are seen at once at every load
PLAIN_STEPS = 8  # that are tried for, as far as the allowance goes


class Text(Protocol):
    """A text under way, as far as the choice needs it."""

    sketch: Sketch
    sampled: bool
    steps: int
    cascade_s: float

    def recall(self, alike: Sequence[tuple[float, Remembered]]) -> None:
        """Take in the texts that this one is like, each as far as it is."""

    def gains(self) -> dict[str, float]:
        """Accepted drafts a step to be expected of each arm."""

    def gain(self, name: str) -> Gain:
        """What an arm gains in texts that are drawn as this one."""

    def weight(self, name: str) -> float:
        """Steps of this text that say what an arm gains."""

    def seen_before(self, name: str) -> float:
        """Steps of an arm in all texts before, as far as they say what it gains in this one."""

    def strange(self, name: str) -> bool:
        """Whether it is unknown what a head gains in texts like this one."""

    def opening_s(self, name: str) -> float:
        """What it takes beside a usual step until the heads of an arm have taken in the text."""


@dataclass(slots=True)
class Experience:
    """What all sessions of a process know together, and the arm that they play together.

    Sessions that draft for different times would fall into groups that wait for each other's forwards, so all of them
    play the same arm, chosen anew when each had a step.
    """

    arms: dict[str, Known] = field(default_factory=dict)
    texts: list[Text] = field(default_factory=list)  # of the sessions under way
    memory: Memory = field(default_factory=Memory)  # of those before
    plain: Seconds = field(default_factory=Seconds)  # of plain steps
    promises: tuple[Promises, Promises] = field(default_factory=lambda: (Promises(), Promises()))
    """of greedy texts, of sampled ones"""
    kept: tuple[Truth, Truth] = field(default_factory=lambda: (Truth(), Truth()))  # of these promises
    truth: Truth = field(default_factory=Truth)  # of second heads
    kinds: set[bool] = field(default_factory=set)  # whether there were greedy texts, and sampled ones
    allowance_s: float = 0.0
    steps: int = 0
    best: str = PLAIN
    hopeless: frozenset[str] = frozenset()
    now: str = PLAIN
    soon: str = PLAIN  # what looks best for a text that begins
    trying: int = 0  # rounds that the present arm is still to be tried
    chosen_until: int = 0  # the step at which the arm is chosen anew

    def known(self, arm: str) -> Known:
        """What is known of an arm."""
        return self.arms.setdefault(arm, Known())

    @property
    def load(self) -> int:
        """Texts under way, in powers of two: 1; 2 and 3; 4 to 7."""
        return len(self.texts).bit_length()

    def begin(self, text: Text) -> None:
        """A text joins."""
        self.texts.append(text)
        text.recall(self.memory.like(text.sketch))
        self.trying = 0  # it would have to open what is tried
        if self.now == CASCADE:
            self.chosen_until = 0
        if text.sampled not in self.kinds:
            self.kinds.add(text.sampled)
            self.allowance_s += FIRST_SAVED_S

    def spent(self, seconds: float) -> None:
        """Take in a step's time: a share of it may be lost by trying."""
        self.steps += 1
        self.allowance_s = min(MOST_SAVED_S, self.allowance_s + TRIED * seconds)

    def choose(self, arms: Sequence[str], hint: int | None) -> str:
        """The arm of the next round."""
        if self.plain.count(self.load) < FIRST_PLAIN:
            self.now = PLAIN
            return self.now
        new = [name for name in arms if name.startswith(SINGLE) and self._new(name)]
        if hint != 0 and new:
            self.now = self.now if self.now in new else new[0]
            return self.now
        alone = len(self.texts) == 1
        arms = [name for name in arms if name != CASCADE or alone]
        gains = [text.gains() for text in self.texts]
        worth = {name: self._worth(name, sum(each[name] for each in gains) / len(gains)) for name in arms}
        rates = {name: tokens / seconds for name, (tokens, _, seconds) in worth.items()}
        self.soon = max(rates, key=rates.__getitem__)
        if alone and not self.texts[0].steps:  # others may begin together with it
            rates.pop(CASCADE, 0.0)
            worth.pop(CASCADE, None)
        best = PLAIN if hint == 0 else max(rates, key=rates.__getitem__)
        if hint != 0 and rates[best] < STAY * rates.get(self.best, 0.0):
            best = self.best
        # All nodes would be left out at a hint of 0.
        losses = {
            name: len(self.texts) * (seconds - (1.0 if hint == 0 else tokens) / rates[best])
            for name, (tokens, _, seconds) in worth.items()
            if name != best
        }
        hopes = {name: (tokens + HOPE * doubt) / seconds for name, (tokens, doubt, seconds) in worth.items()}
        self.hopeless = frozenset(name for name, hope in hopes.items() if hope < HOPELESS * rates[best])
        wanted = set(losses)
        if hint != 0:
            strange = {name for name in losses if any(text.strange(name) for text in self.texts)}  # these first
            wanted = strange or {name for name in losses if hopes[name] > rates[best] or self._unsure(name)}
        affordable = {name: hopes[name] for name in losses if name in wanted and self._affords(name, losses[name])}
        self.best, self.now = best, self._tried(affordable) or best
        self.allowance_s -= max(0.0, losses.get(self.now, 0.0))
        return self.now

    def _new(self, head: str) -> bool:
        """Whether a head was not played long enough, in greedy or in sampled texts as they are under way."""
        return any(text.gain(head).rounds < LEARN for text in self.texts)

    def _worth(self, name: str, gain: float) -> tuple[float, float, float]:
        """Tokens a step, how far they are in doubt, and seconds, all as far as is known.

        Accepted drafts vary like geometric counts, and both what is known of all texts and of these is a mean of some.
        """
        if name == PLAIN:
            return 1.0, 0.0, self.step_s(name)
        weight = sum(text.weight(name) for text in self.texts) / len(self.texts)
        before = sum(text.seen_before(name) for text in self.texts) / len(self.texts)
        doubt = math.sqrt(gain * (1 + gain) * (1 / (TEXT_STEPS + weight) + 1 / (FIRST_STEPS + before)))
        return 1 + gain, doubt, self.step_s(name)

    def step_s(self, name: str) -> float:
        """What a step of an arm takes, as far as is known."""
        return (self.plain.at(self.load) or 0.0) + (self._extra_s(name) if name != PLAIN else 0.0)

    def _extra_s(self, name: str) -> float:
        """What an arm takes beside a plain step, as far as is known."""
        known = self.known(name).extra
        if name == CASCADE:
            return max(0.0, WORKED_OUT * self.texts[0].cascade_s - self.step_s(PLAIN))
        if name.startswith(SINGLE) or known.count(self.load):
            return self._here_s(known)
        alone = (self._here_s(arm.extra) for one, arm in self.arms.items() if one.startswith(SINGLE))
        return max(self._here_s(known), JOINT_TIME * max(alone, default=0.0))

    def _here_s(self, extra: Seconds) -> float:
        """What drafting takes at this load; where that was never seen, as much more as a plain step takes more."""
        nearest = extra.nearest(self.load)
        if nearest is None:
            return 0.0
        there_s, here_s = self.plain.at(nearest), self.plain.at(self.load)
        return (extra.at(nearest) or 0.0) * (here_s / there_s if there_s and here_s else 1.0)

    def _goes_on(self, name: str) -> bool:
        """Whether it is being tried already."""
        return name == self.now and self.trying > 0

    def _affords(self, name: str, loss_s: float) -> bool:
        """Whether what a step of an arm loses can be paid, or what all of a run of tries does before it begins."""
        if self._goes_on(name):
            return loss_s <= self.allowance_s
        return RUN * loss_s + sum(text.opening_s(name) for text in self.texts) <= self.allowance_s

    def _unsure(self, name: str) -> bool:
        """Whether a plain step is to be seen for the sake of its time."""
        return name == PLAIN and self.plain.count(self.load) < PLAIN_STEPS

    def _tried(self, affordable: dict[str, float]) -> str:
        """The arm to try instead of the best one; empty for none."""
        if self._goes_on(self.now) and self.now in affordable:
            self.trying -= 1
            return self.now
        self.trying = RUN - 1 if affordable else 0
        if PLAIN in affordable and self._unsure(PLAIN):
            return PLAIN
        return max(affordable, key=affordable.__getitem__) if affordable else ""
