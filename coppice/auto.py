"""`auto`: which heads to ask in a step, if any, and what to verify, from what steps lately gained and took.

A choice is an *arm*: plain, one head, or all heads routed or merged. Its rate is the tokens a step commits over the
seconds it takes,

    rate = (1 + gain) / (plain step + extra),

where gain is the accepted drafts and extra all that a step of the arm takes beside a plain one: drafting, additional
rows, and waiting for others that draft too. Only the gain belongs to a text; seconds belong to the machine and its
load, each load's are its own, and all sessions share them, and so the gain that a greedy or a sampled text begins with.

What an arm gained in the texts that a new one is like (`coppice/likeness.py`) says more of it than what it gained in
others. A head that is new is played for a few steps (LEARN), once in a process's life for greedy and once for sampled
texts; what all heads together would gain and take is guessed from theirs. At every load a few plain steps come first.
From then on trying an arm that is not the best so far costs what it loses against that one, and such losses are paid
from an allowance, a small share of all time (TRIED), first for heads that were not seen in texts like this one. A run
of tries begins when all of it can be paid: one step would open streams and say nothing. So what exploring costs is
bounded, whatever the arms are like; arms that cost little are tried often, hopeless ones hardly ever. Deterministic
given what it is told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from coppice.gains import FIRST_GAIN, FIRST_STEPS, Gain, Known, Seconds
from coppice.likeness import Memory, Remembered, sketch
from coppice.policy import Policy
from coppice.routing import outcomes
from coppice.tree import DraftTree

PLAIN = "plain"
SINGLE = "single:"
LEARN = 5  # rounds that a new head is played for
STRANGE = 3.0  # steps of a head in texts like this one that are tried for first
JOINT_GAIN, JOINT_TIME = 1.1, 1.3  # of the best head's gain and the slowest one's time, before route or merge was tried
TRIED = 0.015  # share of the time that trying other arms may lose
FIRST_SAVED_S, MOST_SAVED_S = 0.2, 1.0  # of allowance: by the first greedy and the first sampled text, and ever
TEXT_STEPS = 12.0  # steps of a text that weigh as much as what was known before it
ALIKE = 0.5  # how far all arms gain more when one does: 0 not at all, 1 by the same factor
ELSEWHERE = 0.25  # of a step in a text like this one is what one in any text says of the gain
TEXT_MEMORY = 24.0  # steps of a text that count
SAMPLED = 0.6  # of what a head gains in greedy texts it is thought to gain in sampled ones before it was tried there
STAY = 1.01  # how much better another arm must be
HOPE = 1.0  # standard deviations an untried arm may be better than it looks
HOPELESS = 0.9  # of the best rate: a head that even with that has less drafts along unseen only
SELDOM = 8  # every so many steps
RUN = 4  # steps an arm is tried in a row: the first one may have to open streams and catch up
FIRST_PLAIN = 2  # plain steps that are seen at once at every load
PLAIN_STEPS = 8  # that are tried for, as far as the allowance goes


@dataclass(frozen=True, slots=True)
class Arm:
    """One choice: how the trees become one, and the request's heads that are asked, by index."""

    name: str
    policy: Policy
    heads: tuple[int, ...]


def arms_of(heads: Sequence[str]) -> tuple[Arm, ...]:
    """Plain, each head alone, and with several heads route and merge."""
    alone = [Arm(SINGLE + name, Policy("route", tuple(heads)), (at,)) for at, name in enumerate(heads)]
    every = tuple(range(len(heads)))
    joint = [Arm(name, Policy(name, tuple(heads)), every) for name in ("route", "merge")] if len(heads) > 1 else []
    return (Arm(PLAIN, Policy(PLAIN, ()), ()), *alone, *joint)


@dataclass(frozen=True, slots=True)
class StepSeen:
    """What a step came to.

    rows_s: what all sessions' draft nodes took of its forward, 0 when nobody knows. opening: a head that was asked had
    first to take in the text, so that the step says nothing of later ones.
    """

    seconds: float
    rows_s: float
    accepted: int
    opening: bool = False


@dataclass(slots=True)
class Experience:
    """What all sessions of a process know together, and the arm that they play together.

    Sessions that draft for different times would fall into groups that wait for each other's forwards, so all of them
    play the same arm, chosen anew when each had a step.
    """

    arms: dict[str, Known] = field(default_factory=dict)
    texts: list[Chooser] = field(default_factory=list)  # of the sessions under way
    memory: Memory = field(default_factory=Memory)  # of those before
    plain: Seconds = field(default_factory=Seconds)  # of plain steps
    kinds: set[bool] = field(default_factory=set)  # whether there were greedy texts, and sampled ones
    allowance_s: float = 0.0
    steps: int = 0
    best: str = PLAIN
    hopeless: frozenset[str] = frozenset()
    now: str = PLAIN
    trying: int = 0  # rounds that the present arm is still to be tried
    chosen_until: int = 0  # the step at which the arm is chosen anew

    def known(self, arm: str) -> Known:
        """What is known of an arm."""
        return self.arms.setdefault(arm, Known())

    @property
    def load(self) -> int:
        """Texts under way, in powers of two: 1; 2 and 3; 4 to 7."""
        return len(self.texts).bit_length()

    def begin(self, text: Chooser) -> None:
        """A text joins."""
        self.texts.append(text)
        text.recall(self.memory.like(text.sketch))
        self.trying = 0  # it would have to open what is tried
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
        gains = [text.gains() for text in self.texts]
        worth = {name: self._worth(name, sum(each[name] for each in gains) / len(gains)) for name in arms}
        rates = {name: tokens / seconds for name, (tokens, _, seconds) in worth.items()}
        best = PLAIN if hint == 0 else max(rates, key=rates.__getitem__)
        if hint != 0 and rates[best] < STAY * rates[self.best]:
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
        plain_s = self.plain.at(self.load) or 0.0
        if name == PLAIN:
            return 1.0, 0.0, plain_s
        weight = sum(text.weight(name) for text in self.texts) / len(self.texts)
        before = sum(text.seen_before(name) for text in self.texts) / len(self.texts)
        doubt = math.sqrt(gain * (1 + gain) * (1 / (TEXT_STEPS + weight) + 1 / (FIRST_STEPS + before)))
        return 1 + gain, doubt, plain_s + self._extra_s(name)

    def _extra_s(self, name: str) -> float:
        """What an arm takes beside a plain step, as far as is known."""
        known = self.known(name).extra
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


class Chooser:
    """One session's part in the choice: what its own text gained. To be closed at its end."""

    def __init__(
        self, experience: Experience, heads: Sequence[str], sampled: bool = False, prompt: Sequence[int] = ()
    ) -> None:
        """`prompt`: the ids by which it is like other texts, or not."""
        self.sketch = sketch(prompt)
        self.arms = {arm.name: arm for arm in arms_of(heads)}
        self._experience, self.sampled = experience, sampled
        self._played = PLAIN
        self._hint: int | None = None
        self._alike_gained = dict.fromkeys(self.arms, 0.0)
        self._alike_steps = {name: [0.0, 0.0] for name in self.arms}  # of greedy texts, of sampled ones
        self._total = dict.fromkeys(self.arms, 0.0)
        self._weight = dict.fromkeys(self.arms, 0.0)
        self._opened: set[int] = set()  # heads that have taken it in
        self._before = PLAIN  # the arm of the step before
        self._steps = 0
        self._pending: list[tuple[str, int, DraftTree]] = []

    def close(self) -> None:
        """The session ends, or never began."""
        if self in self._experience.texts:
            self._experience.texts.remove(self)
            ended = Remembered(self.sketch, self.sampled, dict(self._total), dict(self._weight))
            self._experience.memory.texts.append(ended)

    def strange(self, name: str) -> bool:
        """Whether it is unknown what a head gains in texts like this one."""
        return name.startswith(SINGLE) and self._weight[name] + self.seen_alike(name) < STRANGE

    def opening_s(self, name: str) -> float:
        """What it takes beside a usual step until the heads of an arm have taken in the text, as far as is known."""
        known, arm = self._experience, self.arms[name]
        closed = [known.known(SINGLE + arm.policy.heads[at]) for at in arm.heads if at not in self._opened]
        return max((head.opening.at(known.load) or 0.0 for head in closed), default=0.0)

    def recall(self, alike: Sequence[tuple[float, Remembered]]) -> None:
        """Take in the texts that this one is like, each as far as it is."""
        for share, text in alike:
            for name in self.arms.keys() & text.weight.keys():
                self._alike_gained[name] += share * text.total[name]
                self._alike_steps[name][text.sampled] += share * text.weight[name]

    def seen_alike(self, name: str) -> float:
        """Steps of an arm in texts like this one."""
        return sum(self._alike_steps[name])

    def seen_before(self, name: str) -> float:
        """Steps of an arm in all texts before, as far as they say what it gains in this one."""
        return self.seen_alike(name) + ELSEWHERE * self.gain(name).left(self._experience.steps)

    def decide(self, hint: int | None) -> Arm:
        """The arm of the next step. `hint` is the verifier's: 0 says that at the present load no node pays."""
        known, self._hint = self._experience, hint
        if not self._steps and self not in known.texts:
            known.begin(self)
        if known.steps >= known.chosen_until:
            known.choose(tuple(self.arms), hint)
            known.chosen_until = known.steps + len(known.texts)
        self._played = known.now
        return self.arms[self._played]

    def gains(self) -> dict[str, float]:
        """Accepted drafts a step to be expected of this text: first those of all texts, then more and more its own.

        A text that is easier than most for the arms it was tried with is thought to be so for the others too.
        """
        known = self._experience
        usual = {name: self._usual(name) for name in self.arms if name.startswith(SINGLE)}
        joint = JOINT_GAIN * max(usual.values(), default=0.0)
        joined = [name for name in self.arms if name not in usual]
        usual |= {name: self.gain(name).mean(known.steps, joint) * self._suits(name) for name in joined}
        usual[PLAIN] = 0.0
        expected = sum(usual[name] * weight for name, weight in self._weight.items())
        before = TEXT_STEPS * max(usual.values())
        ease = ((before + sum(self._total.values())) / (before + expected)) ** ALIKE if before else 1.0
        return {
            name: (TEXT_STEPS * usual[name] * ease + self._total[name]) / (TEXT_STEPS + self._weight[name])
            for name in self.arms
        }

    def _usual(self, head: str) -> float:
        """What a head gains in texts like this one; before it was tried in any, what it gains in others is a guess."""
        known = self._experience
        others = known.known(head).gains[not self.sampled]
        guess = others.mean(known.steps) * (SAMPLED if self.sampled else 1.0) if others.weight else FIRST_GAIN
        return self.gain(head).mean(known.steps, guess) * self._suits(head)

    def _suits(self, name: str) -> float:
        """How much more an arm gained in texts like this one than it gains in others."""
        gains, now = self._experience.known(name).gains, self._experience.steps
        means = [gain.mean(now) for gain in gains]
        first = FIRST_STEPS * means[self.sampled]
        expected = first + sum(steps * mean for steps, mean in zip(self._alike_steps[name], means, strict=True))
        return (first + self._alike_gained[name]) / expected if expected else 1.0

    def gain(self, name: str) -> Gain:
        """What an arm gains in texts that are drawn as this one."""
        return self._experience.known(name).gains[self.sampled]

    def weight(self, name: str) -> float:
        """Steps of this text that say what an arm gains."""
        return self._weight[name]

    def observe(self, step: StepSeen) -> None:
        """Take in what the step of the last choice came to."""
        known, name = self._experience, self._played
        fresh, self._before = self._before != name, name
        self._steps += 1
        known.spent(step.seconds)
        alone = not fresh or len(known.texts) == 1  # else others still end what they drafted before
        if name == PLAIN:
            if alone:
                known.plain.see(known.load, step.seconds - step.rows_s)
            return
        arm, gain = known.known(name), self.gain(name)
        gain.rounds += 1 / max(1, len(known.texts))
        known.plain.bound(known.load, step.seconds - step.rows_s)
        extra_s = max(0.0, step.seconds - (known.plain.at(known.load) or step.seconds))
        self._opened.update(self.arms[name].heads)
        if step.opening:
            opening_s = max(0.0, extra_s - (arm.extra.at(known.load) or 0.0))
            arm.opening.see(known.load, opening_s, step.seconds)
            if name != known.best and gain.rounds > LEARN:
                known.allowance_s -= opening_s
            return
        if alone:
            arm.extra.see(known.load, extra_s, step.seconds - extra_s)
        if self._hint != 0:  # else all of it was left out, which says nothing of other loads
            self.gained(name, step.accepted)

    def gained(self, name: str, accepted: int) -> None:
        """Take in what an arm gained in a step, or would have gained."""
        self.gain(name).see(accepted, self._experience.steps)
        kept = 1 - 1 / TEXT_MEMORY
        self._total[name] = kept * self._total[name] + accepted
        self._weight[name] = kept * self._weight[name] + 1

    def hears(self, head: str) -> bool:
        """Whether to learn in this step what a head would gain that the arm does not ask."""
        return SINGLE + head not in self._experience.hopeless or self._steps % SELDOM == 0

    def drafted(self, head: str, start: int, tree: DraftTree) -> None:
        """Remember a tree that a head drafted, verified or not, for the tokens from `start` on: the text will tell."""
        self._pending.append((SINGLE + head, start, tree))

    def committed(self, ids: Sequence[int]) -> None:
        """Learn what the remembered trees would have gained, as far as the text says by now.

        Noise is keyed to positions, so that the text is the same whatever was verified.
        """
        waiting = []
        for name, start, tree in self._pending:
            _, accepted = outcomes(tree, ids[start:])
            gain = int(accepted.sum())
            if gain < len(ids) - start or not len(tree):
                self.gained(name, gain)
            else:
                waiting.append((name, start, tree))
        self._pending = waiting
