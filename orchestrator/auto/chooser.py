"""`auto`: which heads to ask in a step, if any, and what to verify, from what steps lately gained and took.

A choice is an *arm*: plain, one head, a cascade of two, or all heads routed or merged. Its rate is the tokens a step
commits over the seconds it takes,

    rate = (1 + gain) / (plain step + extra),

where gain is the accepted drafts and extra all that a step of the arm takes beside a plain one: drafting, additional
rows, and waiting for others that draft too. Only the gain belongs to a text; seconds belong to the machine and its
load, each load's are its own, and all sessions share them, and so the gain that a greedy or a sampled text begins with.

A cascade (cascade.py) asks the quickest head first, the one that goes best with it where that pays, and
merges both trees. What it is worth follows from what both heads gain alone and from what the quick one's trees promise,
so it needs no tries of its own. Only a single text is played so: of several that are verified together some would
have to wait for those whose second head drafts.

What an arm gained in the texts that a new one is like (similarity.py) says more of it than what it gained in
others. A head that is new is played for a few steps (LEARN), once in a process's life for greedy and once for sampled
texts; what all heads together would gain and take is guessed from theirs. At every load a few plain steps come first.
From then on trying an arm that is not the best so far costs what it loses against that one, and such losses are paid
from an allowance, a small share of all time (TRIED), first for heads that were not seen in texts like this one. A run
of tries begins when all of it can be paid: one step would open streams and say nothing. So what exploring costs is
bounded, whatever the arms are like; arms that cost little are tried often, hopeless ones hardly ever. Deterministic
given what it is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from coppice.speculation.routing import outcomes
from coppice.speculation.tree import DraftTree
from orchestrator.auto.arms import CASCADE, PLAIN, SINGLE, Arm, arms_of
from orchestrator.auto.cascade import Cascade, Promises, best_cascade
from orchestrator.auto.estimates import FIRST_GAIN, FIRST_STEPS, Gain
from orchestrator.auto.similarity import Remembered, sketch
from orchestrator.auto.statistics import JOINT_GAIN, LEARN, TEXT_STEPS, Experience

STRANGE = 3.0  # steps of a head in texts like this one that are tried for first
ALIKE = 0.5  # how far all arms gain more when one does: 0 not at all, 1 by the same factor
ELSEWHERE = 0.25  # of a step in a text like this one is what one in any text says of the gain
TEXT_MEMORY = 24.0  # steps of a text that count
SAMPLED = 0.6  # of what a head gains in greedy texts it is thought to gain in sampled ones before it was tried there
SELDOM = 8  # every so many steps


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
        self._cascade = self._best_cascade = Cascade(0, 0, 0.0, 0.0, 0.0)  # that is played, by what is known now
        self._promises = Promises()
        self._expected = 0.0  # accepted drafts of the present step, if it asks both heads
        self.cascade_s = 0.0  # that a step of the cascade is expected to take
        self.steps = 0  # so far
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
        known, arm = self._experience, self._arm(name)
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
        if not self.steps and self not in known.texts:
            known.begin(self)
        if known.steps >= known.chosen_until:
            known.choose(tuple(self.arms), hint)
            known.chosen_until = known.steps + len(known.texts)
        self._played, self._cascade = known.now, self._best_cascade
        return self._arm(self._played)

    @property
    def soon(self) -> tuple[int, ...]:
        """The heads that a text which begins will ask soon, if they are to take it in."""
        return self._arm(self._experience.soon).heads

    def _arm(self, name: str) -> Arm:
        """An arm, a cascade with the heads that it asks now."""
        arm = self.arms[name]
        return replace(arm, heads=(self._cascade.quick, self._cascade.second)) if name == CASCADE else arm

    @property
    def quick(self) -> int:
        """The head whose promises are to be told."""
        return self._cascade.quick

    def promised(self, drafts: float, tokens: int, alone: bool) -> None:
        """Take in how many accepted drafts the quick head's tree promised in a step, and the tokens it committed.

        alone: no other head was asked, so that the accepted drafts are its own.
        """
        for promises in (self._promises, self._experience.promises[self.sampled]):
            promises.see(drafts, tokens)
        if alone:
            self._experience.kept[self.sampled].see(drafts, tokens - 1)

    def goes_on(self, promised: float) -> bool:
        """Whether a cascade asks its second head too, when the first one's tree promises so many accepted drafts."""
        self._expected = self._cascade.expected(promised)
        return self._cascade.asks(promised)

    def gains(self) -> dict[str, float]:
        """Accepted drafts a step to be expected of this text: first those of all texts, then more and more its own.

        A text that is easier than most for the arms it was tried with is thought to be so for the others too.
        """
        known = self._experience
        usual = {name: self._usual(name) for name in self.arms if name.startswith(SINGLE)}
        joint = JOINT_GAIN * max(usual.values(), default=0.0)
        joined = [name for name in ("route", "merge") if name in self.arms]
        usual |= {name: self.gain(name).mean(known.steps, joint) * self._suits(name) for name in joined}
        usual[PLAIN] = 0.0
        expected = sum(usual[name] * self._weight[name] for name in usual)
        before, gained = TEXT_STEPS * max(usual.values()), sum(self._total[name] for name in usual)
        ease = ((before + gained) / (before + expected)) ** ALIKE if before else 1.0
        gains = {
            name: (TEXT_STEPS * usual[name] * ease + self._total[name]) / (TEXT_STEPS + self._weight[name])
            for name in usual
        }
        return gains | {CASCADE: self._combined(gains)} if CASCADE in self.arms else gains

    def _combined(self, gains: dict[str, float]) -> float:
        """What the best cascade gains, by what its heads do; 0 before it is known what the quick one promises."""
        known, singles = self._experience, [SINGLE + head for head in self.arms[CASCADE].policy.heads]
        steps_s, plain_s = [known.step_s(name) for name in singles], known.step_s(PLAIN)
        behind_s = [known.known(name).behind.at(known.load) for name in singles]
        seconds = [
            step_s - plain_s if behind is None else behind for step_s, behind in zip(steps_s, behind_s, strict=True)
        ]
        expected = [known.truth.ratio * gains[name] for name in singles]
        best = self._best_cascade = best_cascade(steps_s, seconds, expected, known.kept[self.sampled].ratio)
        promises = self._promises.filled(known.promises[self.sampled])
        gain, self.cascade_s = best.worth(promises, gains[singles[best.quick]]) if promises else (0.0, sum(steps_s))
        return gain

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
        self.steps += 1
        known.spent(step.seconds)
        alone = not fresh or len(known.texts) == 1  # else others still end what they drafted before
        if name == PLAIN:
            if alone:
                known.plain.see(known.load, step.seconds - step.rows_s)
            return
        arm, gain = known.known(name), self.gain(name)
        gain.rounds += 1 / max(1, len(known.texts))
        known.plain.bound(known.load, step.seconds - step.rows_s)
        usual_s = known.plain.at(known.load) or step.seconds
        extra = arm.extra
        if name == CASCADE and step.asked:  # its seconds are those of its last head
            arm = known.known(SINGLE + self.arms[name].policy.heads[step.asked[-1]])
            extra = arm.extra
            if len(step.asked) > 1:
                usual_s, extra = max(usual_s, self._cascade.quick_s), arm.behind
                known.truth.see(self._expected, step.accepted)
        extra_s = max(0.0, step.seconds - usual_s)
        self._opened.update(step.asked)
        if step.opening:
            opening_s = max(0.0, extra_s - (extra.at(known.load) or 0.0))
            arm.opening.see(known.load, opening_s, step.seconds)
            if name != known.best and gain.rounds > LEARN:
                known.allowance_s -= opening_s
            return
        catches_up = fresh and name != CASCADE and extra.count(known.load) > 0  # with the text, as later steps do not
        if alone and not catches_up:
            extra.see(known.load, extra_s, step.seconds - extra_s)
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
        return SINGLE + head not in self._experience.hopeless or self.steps % SELDOM == 0

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
