"""What each arm is expected to gain in one text, by its own steps, by texts like it and by all texts before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from coppice.speculation.routing import outcomes
from coppice.speculation.tree import DraftTree

from .arms import CASCADE, PLAIN, SINGLE, Arm, arms_of
from .cascade import Cascade, Promises, best_cascade
from .estimates import FIRST_GAIN, FIRST_STEPS, Gain
from .similarity import EndedText, sketch
from .statistics import Statistics

TEXT_STEPS = 12.0  # steps of a text that weigh as much as what was known before it
TEXT_MEMORY = 24.0  # steps of a text that count
JOINT_GAIN = 1.1  # of the best head's gain, before route or merge was tried
STRANGE = 3.0  # steps of a head in texts like this one that are tried for first
ALIKE = 0.5  # how far all arms gain more when one does: 0 not at all, 1 by the same factor
ELSEWHERE = 0.25  # of a step in a text like this one is what one in any text says of the gain
SAMPLED = 0.6  # of what a head gains in greedy texts it is thought to gain in sampled ones before it was tried there


class Turn(NamedTuple):
    """What a text does in its present step: an arm, at a hint of the verifier. fresh: its last step had another one."""

    arm: str
    hint: int | None
    fresh: bool


NO_CASCADE = Cascade(0, 0, 0.0, 0.0, 0.0)


@dataclass(slots=True)
class CascadePlan:
    """The cascade of a text: its two heads, and what the first one promised lately."""

    playing: Cascade = NO_CASCADE
    """of the present step"""
    best: Cascade = NO_CASCADE
    """by what is known now"""
    step_s: float = 0.0
    """what a step of the best one is expected to take"""
    promises: Promises = field(default_factory=Promises)
    expected: float = 0.0
    """accepted drafts of the present step, if it asks both heads"""


class TextEstimates:
    """One session's text: what arms gained in it. It reads and fills the statistics of all texts."""

    def __init__(
        self, statistics: Statistics, heads: Sequence[str], sampled: bool = False, prompt: Sequence[int] = ()
    ) -> None:
        """`prompt`: the ids by which it is like other texts, or not."""
        self.statistics, self.sampled = statistics, sampled
        self.arms = {arm.name: arm for arm in arms_of(heads)}
        self.steps = 0
        self.turn = Turn(PLAIN, None, False)
        self.cascade = CascadePlan()
        self.opened: set[int] = set()
        """heads that have taken in the text"""
        self._sketch = sketch(prompt)
        self._alike_gained = dict.fromkeys(self.arms, 0.0)
        self._alike_steps = {name: [0.0, 0.0] for name in self.arms}  # of greedy texts, of sampled ones
        self._total = dict.fromkeys(self.arms, 0.0)
        self._weight = dict.fromkeys(self.arms, 0.0)
        self._pending: list[tuple[str, int, DraftTree]] = []

    def begin(self) -> None:
        """Take in what the texts that this one is like gained, each as far as it is."""
        for share, text in self.statistics.ended.like(self._sketch):
            for name in self.arms.keys() & text.weight.keys():
                self._alike_gained[name] += share * text.total[name]
                self._alike_steps[name][text.sampled] += share * text.weight[name]

    def end(self) -> EndedText:
        """What later texts that are like this one may learn from it."""
        return EndedText(self._sketch, self.sampled, dict(self._total), dict(self._weight))

    # --- what is expected ---

    def gains(self) -> dict[str, float]:
        """Accepted drafts a step to be expected of each arm: first those of all texts, then more and more its own.

        A text that is easier than most for the arms it was tried with is thought to be so for the others too.
        """
        known = self.statistics
        usual = {name: self._usual(name) for name in self.arms if name.startswith(SINGLE)}
        joint = JOINT_GAIN * max(usual.values(), default=0.0)
        for name in ("route", "merge"):
            if name in self.arms:
                usual[name] = self.gain(name).mean(known.steps, joint) * self._suits(name)
        usual[PLAIN] = 0.0
        expected = gained = 0.0
        for name, gain in usual.items():
            expected += gain * self._weight[name]
            gained += self._total[name]
        before = TEXT_STEPS * max(usual.values())
        ease = ((before + gained) / (before + expected)) ** ALIKE if before else 1.0
        gains = {
            name: (TEXT_STEPS * gain * ease + self._total[name]) / (TEXT_STEPS + self._weight[name])
            for name, gain in usual.items()
        }
        return gains | {CASCADE: self._combined(gains)} if CASCADE in self.arms else gains

    def _combined(self, gains: dict[str, float]) -> float:
        """What the best cascade gains, by what its heads do; 0 before it is known what the quick one promises."""
        known, plan = self.statistics, self.cascade
        plain_s, steps_s, behind_s, expected = known.step_s(PLAIN), [], [], []
        singles = [SINGLE + head for head in self.arms[CASCADE].policy.heads]
        for name in singles:
            step_s, second_s = known.step_s(name), known.arms[name].behind.at(known.load)
            steps_s.append(step_s)
            behind_s.append(step_s - plain_s if second_s is None else second_s)
            expected.append(known.truth.ratio * gains[name])
        plan.best = best_cascade(steps_s, behind_s, expected, known.kept[self.sampled].ratio)
        promises = plan.promises.filled(known.promises[self.sampled])
        if not promises:
            plan.step_s = sum(steps_s)
            return 0.0
        gain, plan.step_s = plan.best.worth(promises, gains[singles[plan.best.quick]])
        return gain

    def _usual(self, head: str) -> float:
        """What a head gains in texts like this one; before it was tried in any, what it gains in others is a guess."""
        known = self.statistics
        others = known.arms[head].gains[not self.sampled]
        guess = others.mean(known.steps) * (SAMPLED if self.sampled else 1.0) if others.weight else FIRST_GAIN
        return self.gain(head).mean(known.steps, guess) * self._suits(head)

    def _suits(self, name: str) -> float:
        """How much more an arm gained in texts like this one than it gains in others."""
        steps = self._alike_steps[name]
        if not any(steps):
            return 1.0
        greedy, sampled = self.statistics.arms[name].gains
        now = self.statistics.steps
        means = greedy.mean(now), sampled.mean(now)
        first = FIRST_STEPS * means[self.sampled]
        expected = first + (steps[0] * means[0] + steps[1] * means[1])
        return (first + self._alike_gained[name]) / expected if expected else 1.0

    def gain(self, name: str) -> Gain:
        """What an arm gains in all texts that are drawn as this one."""
        return self.statistics.arms[name].gains[self.sampled]

    def weight(self, name: str) -> float:
        """Steps of this text that say what an arm gains."""
        return self._weight[name]

    def seen_before(self, name: str) -> float:
        """Steps of an arm in all texts before, as far as they say what it gains in this one."""
        return sum(self._alike_steps[name]) + ELSEWHERE * self.gain(name).left(self.statistics.steps)

    def strange(self, name: str) -> bool:
        """Whether it is unknown what a head gains in texts like this one."""
        return name.startswith(SINGLE) and self._weight[name] + sum(self._alike_steps[name]) < STRANGE

    def opening_s(self, name: str) -> float:
        """What it takes beside a usual step until the heads of an arm have taken in the text, as far as is known."""
        known, arm, longest = self.statistics, self.arm(name), 0.0
        for at in arm.heads:
            if at not in self.opened:
                longest = max(longest, known.arms[SINGLE + arm.policy.heads[at]].opening.at(known.load) or 0.0)
        return longest

    def arm(self, name: str) -> Arm:
        """An arm, a cascade with the heads that it asks now."""
        playing = self.cascade.playing
        return replace(self.arms[name], heads=(playing.quick, playing.second)) if name == CASCADE else self.arms[name]

    # --- what is learnt ---

    def promised(self, drafts: float, tokens: int, alone: bool) -> None:
        """Take in how many accepted drafts the quick head's tree promised in a step, and the tokens it committed.

        alone: no other head was asked, so that the accepted drafts are its own.
        """
        self.cascade.promises.see(drafts, tokens)
        self.statistics.promises[self.sampled].see(drafts, tokens)
        if alone:
            self.statistics.kept[self.sampled].see(drafts, tokens - 1)

    def goes_on(self, promised: float) -> bool:
        """Whether a cascade asks its second head too, when the first one's tree promises so many accepted drafts."""
        plan = self.cascade
        plan.expected = plan.playing.expected(promised)
        return plan.playing.asks(promised)

    def gained(self, name: str, accepted: int) -> None:
        """Take in what an arm gained in a step, or would have gained."""
        self.gain(name).see(accepted, self.statistics.steps)
        kept = 1 - 1 / TEXT_MEMORY
        self._total[name] = kept * self._total[name] + accepted
        self._weight[name] = kept * self._weight[name] + 1

    def drafted(self, head: str, start: int, tree: DraftTree) -> None:
        """Remember a tree that a head drafted, verified or not, for the tokens from `start` on: the text will tell."""
        self._pending.append((SINGLE + head, start, tree))

    def committed(self, ids: Sequence[int]) -> None:
        """Learn what the remembered trees would have gained, as far as the text says by now.

        Noise is keyed to positions, so that the text is the same whatever was verified.
        """
        pending, self._pending = self._pending, []
        for name, start, tree in pending:
            _, accepted = outcomes(tree, ids[start:])
            gain = int(accepted.sum())
            if gain < len(ids) - start or not len(tree):
                self.gained(name, gain)
            else:
                self._pending.append((name, start, tree))
