"""`auto`: which heads to ask in a step, if any, by what steps lately gained and took (docs/policies.md).

An *arm* is plain, one head, or all heads routed or merged. The one that commits the most tokens a second is played,

    rate = (1 + gain) / (plain step + extra),

where gain is the accepted drafts and extra what a step of the arm takes beside a plain one. Another arm is tried for a
few rounds when its rate would be above the best one's if both gain one standard deviation more (an upper confidence
bound: Auer et al., 2002), and an allowance, a small share of all time, pays for what the tries are expected to lose.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from prometheus_client import Counter

from coppice.speculation.policy import Policy
from coppice.speculation.tree import prune

from .heads import accepted
from .loop import Step, StepPolicy

PLAIN, SINGLE = "plain", "single:"
PREDICTED = "predicted "  # an arm that drafts from a prediction is another arm

PLAIN_STEPS = 4  # that come first at every load
LEARN = 5  # rounds that a new head is played for, the first of which takes in the text
RUN = 4  # rounds that another arm is tried for: the first one may have to open streams and catch up
TRIED = 0.015  # share of the time that trying other arms may lose
FIRST_SAVED_S, MOST_SAVED_S = 0.2, 1.0  # of allowance: at first, and ever

FIRST_GAIN, FIRST_STEPS = 1.0, 4.0  # what an arm is thought to gain before it was tried, and how many steps that weighs
JOINT_GAIN, JOINT_TIME = 1.1, 1.3  # of the best head's gain and the slowest one's time, before route or merge was tried
TEXT_STEPS = 12.0  # steps of a text that weigh as much as what was known before it
PREDICTED_GAIN, PREDICTED_STEPS = 4.0, 4.0  # first gain and its weight of a head with a prediction, in each text anew
TEXT_MEMORY = 24.0  # steps of an arm in a text that count: a text may go from prose to code
MEMORY = 1024.0  # steps of all texts that count: heads are trained on, and one that gained little is tried again

COLD = 4  # first steps of an arm, of which the fastest counts: they include warm-up
RATE = 0.1  # of the averages of seconds: a machine that slows down is noticed within ten steps


@dataclass(frozen=True, slots=True)
class Arm:
    """One choice: the request's heads that are asked, by index, and how their trees become one."""

    name: str
    policy: Policy
    heads: tuple[int, ...]


def arms_of(heads: Sequence[str]) -> tuple[Arm, ...]:
    """Plain, each head alone, and with several heads all of them routed and merged."""
    every = tuple(range(len(heads)))
    alone = [Arm(SINGLE + name, Policy("route", tuple(heads)), (at,)) for at, name in enumerate(heads)]
    joint = [Arm(name, Policy(name, tuple(heads)), every) for name in ("route", "merge") if len(heads) > 1]
    return (Arm(PLAIN, Policy(PLAIN, ()), ()), *alone, *joint)


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

    def at(self, load: int) -> float | None:
        """The mean at a load; where it was never seen, at the nearest one, of two the lower. None: nothing was seen."""
        if load in self.by_load:
            return self.by_load[load][0]
        nearest = min(self.by_load, key=lambda seen: (abs(seen - load), seen), default=None)
        return None if nearest is None else self.by_load[nearest][0]

    def count(self, load: int) -> int:
        """Steps seen at a load."""
        return self.by_load.get(load, (0.0, 0))[1]


@dataclass(slots=True)
class Gain:
    """Accepted drafts of an arm's steps."""

    total: float = 0.0
    steps: float = 0.0

    def see(self, accepted: int, memory: float) -> None:
        """Take in a step; the `memory` latest ones count."""
        self.total += accepted - self.total / memory
        self.steps += 1 - self.steps / memory

    def mean(self, first: float, weight: float) -> float:
        """Accepted drafts a step, where `weight` steps that gain `first` are taken as seen before."""
        return (weight * first + self.total) / (weight + self.steps)


class Rates:
    """What steps of a process's texts gained and took by arm and load, and the arm that all of them play until each had
    a step: sessions that draft for different times would wait for each other's forwards.
    """

    def __init__(self) -> None:
        self.texts: list[AutoPolicy] = []  # under way
        self.load = 0  # their number in powers of two: 1; 2 and 3; 4 to 7
        self.plain = Seconds()
        self.extra: defaultdict[str, Seconds] = defaultdict(Seconds)  # what a step of an arm takes beside a plain one
        self.gains: defaultdict[tuple[str, bool], Gain] = defaultdict(Gain)  # of an arm in greedy and in sampled texts
        self.rounds: defaultdict[tuple[str, bool], float] = defaultdict(float)
        """that an arm was played for; the steps of all texts under way make a round"""
        self.arm = PLAIN  # that all texts play
        self._allowance_s = FIRST_SAVED_S
        self._steps = 0
        self._chosen_until = 0  # the step at which the arm is chosen anew
        self._trying = 0  # rounds that the arm is still to be tried for

    def decide(self, text: AutoPolicy, hint: int | None) -> Arm:
        """The arm of a text's next step. `hint` is the verifier's: 0 says that at the present load no node pays."""
        if not text.steps and text not in self.texts:
            self.texts.append(text)
            self.load = len(self.texts).bit_length()
            self._trying = 0  # it would have to open what is tried
        if self._steps >= self._chosen_until:
            self._choose(text, hint)
            self._chosen_until = self._steps + len(self.texts)
        text.hint, text.fresh = hint, self.arm != text.arm.name
        text.arm = text.arms[self.arm]
        return text.arm

    def end(self, text: AutoPolicy) -> None:
        """A text ends, or never began."""
        if text in self.texts:
            self.texts.remove(text)
            self.load = len(self.texts).bit_length()

    def observe(self, text: AutoPolicy, seconds: float, rows_s: float, accepted: int, opening: bool = False) -> None:
        """Take in a step. rows_s: what all sessions' draft nodes took of its forward, 0 when nobody knows. opening: a
        head had to prefill, so that its time says nothing of later ones.
        """
        text.steps += 1
        self._steps += 1
        self._allowance_s = min(MOST_SAVED_S, self._allowance_s + TRIED * seconds)
        if text.arm.name == PLAIN:
            self.plain.see(self.load, seconds - rows_s)
            return
        key = text.keys[text.arm.name]
        self.rounds[key] += 1 / max(1, len(self.texts))
        if opening:
            return
        extra_s = max(0.0, seconds - (self.plain.at(self.load) or seconds))
        if not (text.fresh and self.extra[key[0]].count(self.load)):  # else it catches up with the text
            self.extra[key[0]].see(self.load, extra_s, seconds - extra_s)
        if text.hint != 0:  # else all of it was left out, which says nothing of other loads
            self.gained(text, text.arm.name, accepted)

    def gained(self, text: AutoPolicy, name: str, accepted: int) -> None:
        """Take in what an arm gained in a step, or would have gained."""
        self.gains[text.keys[name]].see(accepted, MEMORY)
        text.own[name].see(accepted, TEXT_MEMORY)

    def _choose(self, text: AutoPolicy, hint: int | None) -> None:
        """Choose the arm of the next round. text: any of those under way."""
        if self.plain.count(self.load) < PLAIN_STEPS:
            self.arm = PLAIN
            return
        new = [] if hint == 0 else [name for name in text.arms if name.startswith(SINGLE)]
        # Those that were not played long enough, in greedy or in sampled texts as they are under way.
        new = [name for name in new if any(self.rounds[each.keys[name]] < LEARN for each in self.texts)]
        if new:
            self.arm = self.arm if self.arm in new else new[0]
            return
        if self._trying:
            self._trying -= 1
            return
        arms = {name: self.rates(name) for name in text.arms}
        best = self.arm = PLAIN if hint == 0 else max(arms, key=lambda name: arms[name][0])
        best_rate, best_hope = arms.pop(best)
        for name, (rate, hope) in sorted(arms.items(), key=lambda arm: -arm[1][1]):
            step_s = self.step_s(text, name)
            worth = 1 / step_s if hint == 0 else rate  # where no node pays, all of them are left out
            loss_s = RUN * len(self.texts) * step_s * max(0.0, 1 - worth / best_rate)
            if (hint == 0 or hope > best_hope) and loss_s <= self._allowance_s:
                self.arm, self._trying = name, RUN - 1
                self._allowance_s -= loss_s
                return

    def rates(self, name: str) -> tuple[float, float]:
        """Tokens a second of an arm in a mean text of those under way, and if it gains one standard deviation more."""
        count, own, before, gain = len(self.texts), 0.0, 0.0, 0.0
        for text in self.texts:
            gain += self.gain(text, name) / count
            own += text.own[name].steps / count
            before += self.gains[text.keys[name]].steps / count
        # Accepted drafts vary like geometric counts.
        doubt = math.sqrt(gain * (1 + gain) * (1 / (TEXT_STEPS + own) + 1 / (FIRST_STEPS + before)))
        seconds = self.step_s(self.texts[0], name)
        return (1 + gain) / seconds, (1 + gain + doubt) / seconds

    def gain(self, text: AutoPolicy, name: str) -> float:
        """Accepted drafts a step to be expected of an arm in a text."""
        if name == PLAIN:
            return 0.0
        first = FIRST_GAIN
        if not name.startswith(SINGLE):
            first = JOINT_GAIN * max([self.gain(text, SINGLE + head) for head in text.arms[name].policy.heads])
        elif text.is_predicted(name):
            return text.own[name].mean(PREDICTED_GAIN, PREDICTED_STEPS)
        return text.own[name].mean(self.gains[text.keys[name]].mean(first, FIRST_STEPS), TEXT_STEPS)

    def step_s(self, text: AutoPolicy, name: str) -> float:
        """What a step of an arm takes at this load, as far as is known."""
        plain_s = self.plain.at(self.load) or 0.0
        if name == PLAIN:
            return plain_s
        extra_s = self.extra[text.keys[name][0]].at(self.load)
        if extra_s is None:  # an arm that drafts from a prediction was never seen
            extra_s = self.extra[name].at(self.load)
        if extra_s is None:
            alone = [self.extra[SINGLE + head].at(self.load) or 0.0 for head in text.arms[name].policy.heads]
            extra_s = JOINT_TIME * max(alone)
        return plain_s + extra_s


class AutoPolicy(StepPolicy):
    """One request as `auto` knows it: its arms, and what they gained in it. It plays the arm that all texts play."""

    def __init__(
        self,
        rates: Rates,
        heads: Sequence[str],
        choices: Counter,
        sampled: bool = False,
        predicted: Collection[str] = (),
    ) -> None:
        """choices: counts steps by arm. predicted: the heads that have a prediction."""
        self._rates, self._heads, self._choices = rates, heads, choices
        self.arms = {arm.name: arm for arm in arms_of(heads)}
        predicting = {name for name, arm in self.arms.items() if any(heads[at] in predicted for at in arm.heads)}
        self.keys = {name: (PREDICTED * (name in predicting) + name, sampled) for name in self.arms}
        """what all texts' gains of an arm are kept under"""
        self.own: defaultdict[str, Gain] = defaultdict(Gain)
        self.steps = 0
        self.arm = self.arms[PLAIN]
        self.fresh = False  # whether its step before had another arm
        self.hint: int | None = None
        super().__init__(self.arm.policy, ())

    def is_predicted(self, arm: str) -> bool:
        """Whether an arm drafts from a prediction."""
        return self.keys[arm][0] != arm

    def heads(self, step: Step) -> Sequence[int]:
        self.policy = self._rates.decide(self, step.hint).policy
        return self.arm.heads

    @property
    def soon(self) -> Sequence[int]:
        return self.arms[self._rates.arm].heads

    def budget(self, most: int, hint: int | None) -> int:
        """As the verifier hints, by all texts; a prediction, and the rare tries at a hint of 0, draft all they may."""
        return min(most, hint) if hint and not self.is_predicted(self.arm.name) else most

    def observe(self, step: Step) -> None:
        """Take in the step's seconds, and what it gained."""
        verdict = step.verdict
        times = verdict.timings
        rows_ns = times.forward_ns - (times.plain_ns or times.forward_ns)
        self._rates.observe(self, step.took_ns / 1e9, rows_ns / 1e9, len(verdict.accepted), step.opening)
        self._choices.labels(self.arm.name).inc()

    def learn(self, step: Step) -> None:
        """Take in what each head would have gained alone in a step of several."""
        verdict = step.verdict
        nodes = len(verdict.verified) if verdict.pruned else step.budget
        if len(step.asked) > 1 and nodes:  # where all of it was left out, the step says nothing of the heads
            for at in step.asked:
                tree, _ = prune(step.drafts[at].scored, nodes)
                self._rates.gained(self, SINGLE + self._heads[at], len(accepted(tree, step.offered)))

    def close(self) -> None:
        self._rates.end(self)
