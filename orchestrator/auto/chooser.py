"""`auto`: which heads to ask in a step, if any, from what steps lately gained and took.

A choice is an *arm*: plain, one head, a cascade of two, or all heads routed or merged. Its rate is the tokens that a
step commits over the seconds that it takes,

    rate = (1 + gain) / (plain step + extra),

where gain is the accepted drafts and extra all that a step of the arm takes beside a plain one: drafting, additional
rows, and waiting for others that draft too. Gains belong to a text (text_estimates.py). Seconds belong to the machine
and its load, and all sessions share them (statistics.py). Five rules choose:

1. At a load that is new, a few plain steps come first: all other seconds are measured beside them.
2. A text that comes with a prediction begins with a head that drafts from it, if it is alone: it fits or it does not,
   and that shows within a few steps.
3. A head that is new, to greedy texts or to sampled ones, is played for a few rounds.
4. Otherwise the arm with the best rate is played. Plain is one of the arms, so it is the floor.
5. Another arm is tried for a few rounds when its rate would, with some luck, be above the best arm's with as much luck,
   and when an allowance pays for what the tries are expected to lose. The allowance grows by a small share of all time,
   so what exploring costs is bounded whatever the arms are like: arms that lose little are tried often, hopeless ones
   hardly ever.

A cascade asks the quickest head first, and the one that goes best with it where the step is faster so (`goes_on` in
text_estimates.py). That a quick n-gram head answers where a text repeats itself, and a trained one where it does not,
is known from suffix trees beside trained drafters (Oliaro et al., SuffixDecoding, 2024). There a fixed number decides,
here the seconds that both take. Only a single text is played so.

Luck is one standard deviation of what is known of a gain. The choice is deterministic given what steps took and gained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from .arms import CASCADE, PLAIN, SINGLE, Arm
from .statistics import Statistics
from .text_estimates import BOTH, FIRST_STEPS, TEXT_STEPS, TextEstimates, Turn

PLAIN_STEPS = 4  # that come first at every load: of the first three only the fastest counts
LEARN = 5  # rounds that a new head is played for: the first takes in the text, of the next three the fastest counts
PREDICTED_TRIES = 3  # steps at the begin of a text that draft from its prediction
TRIED = 0.015  # share of the time that trying other arms may lose
FIRST_SAVED_S, MOST_SAVED_S = 0.2, 1.0  # of allowance: by the first greedy and the first sampled text, and ever
RUN = 4  # rounds an arm is tried in a row: the first one may have to open streams and catch up


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
        text.turn = Turn(self._now, hint, self._now != text.turn.arm)
        return text.arms[self._now]

    def _begin(self, text: TextEstimates) -> None:
        """A text joins."""
        self.texts.append(text)
        text.begin()
        self.statistics.load = len(self.texts).bit_length()
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
            text.end()
            self.statistics.load = len(self.texts).bit_length()
            self.statistics.forget(text.steps)

    def soon(self, text: TextEstimates) -> tuple[int, ...]:
        """The heads that a text which begins will ask soon, if they are to take it in."""
        return text.arms[text.first or self._best].heads

    # --- what a step came to ---

    def observe(self, text: TextEstimates, step: StepSeen) -> None:
        """Take in what the step of the last choice came to."""
        known, (name, hint, fresh) = self.statistics, text.turn
        text.steps += 1
        known.steps += 1
        self.allowance_s = min(MOST_SAVED_S, self.allowance_s + TRIED * step.seconds)
        settled = not fresh or len(self.texts) == 1  # else others still end what they drafted before
        if name == PLAIN:
            if settled:
                known.plain.see(known.load, step.seconds - step.rows_s)
            return
        if name == CASCADE:  # a step that asked its first head alone says what that head takes
            both = len(step.asked) > 1
            text.gained(BOTH, both)
            alone = SINGLE + text.arms[name].policy.heads[step.asked[0]]
            arm = known.arms[text.keys[name if both else alone]]
        else:
            arm = known.arms[text.keys[name]]
        arm.rounds[text.sampled] += 1 / max(1, len(self.texts))
        known.plain.bound(known.load, step.seconds - step.rows_s)
        extra_s = max(0.0, step.seconds - (known.plain.at(known.load) or step.seconds))
        text.opened.update(step.asked)
        if step.opening:
            arm.opening.see(known.load, max(0.0, extra_s - (arm.extra.at(known.load) or 0.0)), step.seconds)
            return
        catches_up = fresh and arm.extra.count(known.load) > 0  # with the text, as later steps do not
        if settled and not catches_up:
            arm.extra.see(known.load, extra_s, step.seconds - extra_s)
        if hint != 0:  # else all of it was left out, which says nothing of other loads
            text.gained(name, step.accepted)

    # --- the choice ---

    def _choose(self, text: TextEstimates, hint: int | None) -> None:
        """Choose the arm of the next round. text: any of those under way."""
        if self.statistics.plain.count(self.statistics.load) < PLAIN_STEPS:
            self._now = PLAIN
            return
        if text.first and len(self.texts) == 1 and text.steps < PREDICTED_TRIES:
            self._now = text.first
            return
        new = [name for name in text.arms if name.startswith(SINGLE) and self._new(name)] if hint != 0 else []
        if new:
            self._now = self._now if self._now in new else new[0]
            return
        if self._trying > 0:
            self._trying -= 1
            return
        text.pair_heads()
        worth = self._worth(text)
        best = PLAIN if hint == 0 else max(worth, key=lambda name: worth[name].rate)
        self._best = self._now = best
        losses = {
            name: self._run_loss_s(name, arm._replace(tokens=1.0) if hint == 0 else arm, worth[best].rate)
            for name, arm in worth.items()
            if name != best and (hint == 0 or arm.hope > worth[best].hope)
        }
        affordable = [name for name, loss_s in losses.items() if loss_s <= self.allowance_s]
        if affordable:
            self._now = max(affordable, key=lambda name: worth[name].hope)
            self._trying = RUN - 1
            self.allowance_s -= losses[self._now]

    def _new(self, head: str) -> bool:
        """Whether a head was not played long enough, in greedy or in sampled texts as they are under way."""
        return any(self.statistics.arms[text.keys[head]].rounds[text.sampled] < LEARN for text in self.texts)

    def _worth(self, text: TextEstimates) -> dict[str, Worth]:
        """What a step of each arm comes to, as far as is known, in a mean text of those under way.

        Accepted drafts vary like geometric counts, and both what is known of all texts and of these is a mean of some.
        """
        count, gains, worth = len(self.texts), [each.gains() for each in self.texts], {}
        for name in text.arms:
            if name == CASCADE and count > 1:  # some would have to wait for those whose second head drafts
                continue
            gain = sum([each[name] for each in gains]) / count
            own = sum([each.own[each.keys[name]].steps for each in self.texts]) / count
            before = sum([each.steps_before(name) for each in self.texts]) / count
            doubt = math.sqrt(gain * (1 + gain) * (1 / (TEXT_STEPS + own) + 1 / (FIRST_STEPS + before)))
            seconds = text.step_s(name)
            worth[name] = Worth(1 + gain, seconds, (1 + gain) / seconds, (1 + gain + doubt) / seconds)
        return worth

    def _run_loss_s(self, name: str, worth: Worth, best_rate: float) -> float:
        """What a run of tries of an arm loses against the best one."""
        lost_s = RUN * len(self.texts) * (worth.seconds - worth.tokens / best_rate)
        return max(0.0, lost_s + sum([text.opening_s(name) for text in self.texts]))
