"""`auto`: which heads to ask in a step, if any, and what to verify, from what steps lately gained and took.

A choice is an *arm*: plain, one head, a cascade of two, or all heads routed or merged. Its rate is the tokens a step
commits over the seconds it takes,

    rate = (1 + gain) / (plain step + extra),

where gain is the accepted drafts and extra all that a step of the arm takes beside a plain one: drafting, additional
rows, and waiting for others that draft too. Only the gain belongs to a text (text_estimates.py). Seconds belong to the
machine and its load, and all sessions share them (statistics.py).

A cascade (cascade.py) asks the quickest head first, the one that goes best with it where that pays, and merges both
trees. What it is worth follows from what both heads gain alone and from what the quick one's trees promise, so it needs
no tries of its own. Only a single text is played so: of several that are verified together some would have to wait for
those whose second head drafts.

A head that is new is played for a few steps (LEARN), once in a process's life for greedy and once for sampled texts. At
every load a few plain steps come first. From then on trying an arm that is not the best so far costs what it loses
against that one, and such losses are paid from an allowance, a small share of all time (TRIED), first for heads that
were not seen in texts like this one. A run of tries begins when all of it can be paid: one step would open streams and
say nothing. So what exploring costs is bounded, whatever the arms are like; arms that cost little are tried often,
hopeless ones hardly ever. Deterministic given what it is told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .arms import CASCADE, PLAIN, SINGLE, Arm
from .estimates import FIRST_STEPS
from .statistics import Statistics
from .text_estimates import TEXT_STEPS, TextEstimates, Turn

LEARN = 5  # rounds that a new head is played for
TRIED = 0.015  # share of the time that trying other arms may lose
FIRST_SAVED_S, MOST_SAVED_S = 0.2, 1.0  # of allowance: by the first greedy and the first sampled text, and ever
STAY = 1.01  # how much better another arm must be
HOPE = 1.0  # standard deviations an untried arm may be better than it looks
HOPELESS = 0.9  # of the best rate: a head that even with that has less drafts along unseen only
SELDOM = 8  # such a head drafts along every so many steps
RUN = 4  # steps an arm is tried in a row: the first one may have to open streams and catch up
FIRST_PLAIN = 2  # plain steps that are seen at once at every load
PLAIN_STEPS = 8  # that are tried for, as far as the allowance goes


@dataclass(frozen=True, slots=True)
class StepSeen:
    """What a step came to.

    rows_s: what all sessions' draft nodes took of its forward, 0 when nobody knows. asked: the heads that were.
    opening: one of them had first to take in the text, so that the step says nothing of later ones.
    """

    seconds: float
    rows_s: float
    accepted: int
    asked: tuple[int, ...] = ()
    opening: bool = False


class Worth(NamedTuple):
    """What a step of an arm is expected to come to; `hope` is its rate if it is as much better as may well be."""

    tokens: float
    seconds: float
    rate: float
    hope: float


class Chooser:
    """Chooses the arm that all sessions of a process play together.

    Sessions that draft for different times would fall into groups that wait for each other's forwards, so all of them
    play the same arm, chosen anew when each had a step.
    """

    def __init__(self) -> None:
        self.statistics = Statistics()
        self.texts: list[TextEstimates] = []
        """of the sessions under way"""
        self.allowance_s = 0.0
        self._best = PLAIN
        self._now = PLAIN
        self._soon = PLAIN  # what looks best for a text that begins
        self._hopeless: frozenset[str] = frozenset()
        self._trying = 0  # rounds that the present arm is still to be tried
        self._chosen_until = 0  # the step at which the arm is chosen anew
        self._kinds: set[bool] = set()  # whether there were greedy texts, and sampled ones

    # --- texts come and go ---

    def decide(self, text: TextEstimates, hint: int | None) -> Arm:
        """The arm of a text's next step. `hint` is the verifier's: 0 says that at the present load no node pays."""
        if not text.steps and text not in self.texts:
            self._begin(text)
        if self.statistics.steps >= self._chosen_until:
            self._choose(text, hint)
            self._chosen_until = self.statistics.steps + len(self.texts)
        text.turn, text.cascade.playing = Turn(self._now, hint, self._now != text.turn.arm), text.cascade.best
        return text.arm(self._now)

    def _begin(self, text: TextEstimates) -> None:
        """A text joins."""
        self.texts.append(text)
        self.statistics.load = len(self.texts).bit_length()
        text.begin()
        self._trying = 0  # it would have to open what is tried
        if self._now == CASCADE:
            self._chosen_until = 0
        if text.sampled not in self._kinds:
            self._kinds.add(text.sampled)
            self.allowance_s += FIRST_SAVED_S

    def end(self, text: TextEstimates) -> None:
        """A text ends, or never began."""
        if text in self.texts:
            self.texts.remove(text)
            self.statistics.load = len(self.texts).bit_length()
            self.statistics.ended.texts.append(text.end())

    def soon(self, text: TextEstimates) -> tuple[int, ...]:
        """The heads that a text which begins will ask soon, if they are to take it in."""
        return text.arm(self._soon).heads

    def hears(self, text: TextEstimates, head: str) -> bool:
        """Whether to learn in this step what a head would gain that the arm does not ask."""
        return SINGLE + head not in self._hopeless or text.steps % SELDOM == 0

    # --- what a step came to ---

    def observe(self, text: TextEstimates, step: StepSeen) -> None:
        """Take in what the step of the last choice came to."""
        known, (name, hint, fresh) = self.statistics, text.turn
        text.steps += 1
        known.steps += 1
        self.allowance_s = min(MOST_SAVED_S, self.allowance_s + TRIED * step.seconds)
        alone = not fresh or len(self.texts) == 1  # else others still end what they drafted before
        if name == PLAIN:
            if alone:
                known.plain.see(known.load, step.seconds - step.rows_s)
            return
        gain = text.gain(name)
        gain.rounds += 1 / max(1, len(self.texts))
        known.plain.bound(known.load, step.seconds - step.rows_s)
        usual_s, arm = known.plain.at(known.load) or step.seconds, known.arms[name]
        extra = arm.extra
        if name == CASCADE and step.asked:  # its seconds are those of its last head
            arm = known.arms[SINGLE + text.arms[name].policy.heads[step.asked[-1]]]
            extra = arm.extra
            if len(step.asked) > 1:
                usual_s, extra = max(usual_s, text.cascade.playing.quick_s), arm.behind
                known.truth.see(text.cascade.expected, step.accepted)
        extra_s = max(0.0, step.seconds - usual_s)
        text.opened.update(step.asked)
        if step.opening:
            opening_s = max(0.0, extra_s - (extra.at(known.load) or 0.0))
            arm.opening.see(known.load, opening_s, step.seconds)
            if name != self._best and gain.rounds > LEARN:
                self.allowance_s -= opening_s
            return
        catches_up = fresh and name != CASCADE and extra.count(known.load) > 0  # with the text, as later steps do not
        if alone and not catches_up:
            extra.see(known.load, extra_s, step.seconds - extra_s)
        if hint != 0:  # else all of it was left out, which says nothing of other loads
            text.gained(name, step.accepted)

    # --- the choice ---

    def _choose(self, text: TextEstimates, hint: int | None) -> None:
        """Choose the arm of the next round. text: any of those under way."""
        if self.statistics.plain.count(self.statistics.load) < FIRST_PLAIN:
            self._now = PLAIN
            return
        new = [name for name in text.arms if name.startswith(SINGLE) and self._new(name)] if hint != 0 else []
        if new:
            self._now = self._now if self._now in new else new[0]
            return
        worth = self._worth(text)
        rates = {name: arm.rate for name, arm in worth.items()}
        self._soon = max(rates, key=rates.__getitem__)
        if len(self.texts) == 1 and not text.steps:  # others may begin together with it
            worth.pop(CASCADE, None)
            rates.pop(CASCADE, None)
        best = PLAIN
        if hint != 0:
            best = max(rates, key=rates.__getitem__)
            if rates[best] < STAY * rates.get(self._best, 0.0):
                best = self._best
        best_rate = rates[best]
        self._hopeless = frozenset([name for name, arm in worth.items() if arm.hope < HOPELESS * best_rate])
        # All nodes would be left out at a hint of 0.
        losses = {
            name: len(self.texts) * (arm.seconds - (1.0 if hint == 0 else arm.tokens) / best_rate)
            for name, arm in worth.items()
            if name != best
        }
        wanted = losses if hint == 0 else self._wanted(losses, worth, best_rate)
        affordable = {name: worth[name].hope for name in wanted if self._affords(name, losses[name])}
        self._best, self._now = best, self._tried(affordable) or best
        self.allowance_s -= max(0.0, losses.get(self._now, 0.0))

    def _new(self, head: str) -> bool:
        """Whether a head was not played long enough, in greedy or in sampled texts as they are under way."""
        return any(text.gain(head).rounds < LEARN for text in self.texts)

    def _worth(self, text: TextEstimates) -> dict[str, Worth]:
        """What a step of each arm comes to, as far as is known; only a single text is played as a cascade.

        Accepted drafts vary like geometric counts, and both what is known of all texts and of these is a mean of some.
        """
        count, all_gains, worth = len(self.texts), [each.gains() for each in self.texts], {}
        for name in text.arms:
            if name == CASCADE and count > 1:
                continue
            seconds = self.statistics.step_s(name, self.texts[0].cascade.step_s)
            gain = weight = before = doubt = 0.0
            if name != PLAIN:
                for each, gains in zip(self.texts, all_gains, strict=True):
                    gain += gains[name]
                    weight += each.weight(name)
                    before += each.seen_before(name)
                gain, weight, before = gain / count, weight / count, before / count
                doubt = math.sqrt(gain * (1 + gain) * (1 / (TEXT_STEPS + weight) + 1 / (FIRST_STEPS + before)))
            worth[name] = Worth(1 + gain, seconds, (1 + gain) / seconds, (1 + gain + HOPE * doubt) / seconds)
        return worth

    def _wanted(self, losses: Mapping[str, float], worth: Mapping[str, Worth], best_rate: float) -> list[str]:
        """Arms worth a try: heads that no text like these has seen, else what may be better than the best."""
        strange = [name for name in losses if any(text.strange(name) for text in self.texts)]
        return strange or [name for name in losses if worth[name].hope > best_rate or self._unsure(name)]

    def _affords(self, name: str, loss_s: float) -> bool:
        """Whether what a step of an arm loses can be paid, or what all of a run of tries does before it begins."""
        if name == self._now and self._trying > 0:
            return loss_s <= self.allowance_s
        return RUN * loss_s + sum([text.opening_s(name) for text in self.texts]) <= self.allowance_s

    def _unsure(self, name: str) -> bool:
        """Whether a plain step is to be seen for the sake of its time."""
        return name == PLAIN and self.statistics.plain.count(self.statistics.load) < PLAIN_STEPS

    def _tried(self, affordable: Mapping[str, float]) -> str:
        """The arm to try instead of the best one; empty for none."""
        if self._trying > 0 and self._now in affordable:
            self._trying -= 1
            return self._now
        self._trying = RUN - 1 if affordable else 0
        if PLAIN in affordable and self._unsure(PLAIN):
            return PLAIN
        return max(affordable, key=affordable.__getitem__, default="")
