"""What each arm is expected to gain in one text: by all texts before it, by those that it is like, and more and more by
its own steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from .arms import CASCADE, PLAIN, SINGLE, Arm, arms_of
from .similarity import sketch
from .statistics import Gain, Statistics

FIRST_GAIN, FIRST_STEPS = 1.0, 4.0  # what an arm is thought to gain before it was tried, and how many steps that weighs
JOINT_GAIN = 1.1  # of the best head's gain, before route, merge or a cascade was tried
PREDICTED_GAIN = 4.0  # what a head with a prediction is thought to gain before one was tried
FIRST_SHARE = 0.5  # of a cascade's steps that ask both heads, before it was tried
ALIKE_STEPS = 8.0  # steps in texts like this one that weigh as much as those in all texts
TEXT_STEPS = 12.0  # steps of a text that weigh as much as what was known before it
PREDICTED_STEPS = 4.0  # the same of a head with a prediction: other texts' predictions say little of this one
PAIRED = 4  # steps of a text after which its cascade's heads are picked anew
TEXT_MEMORY = 24.0  # steps of an arm in a text that count: a text may go from prose to code
PREDICTED = "predicted "  # an arm that drafts from a prediction is another arm
BOTH = "both"  # a cascade's steps gain 1 of this where they ask both heads, 0 where they do not


class Turn(NamedTuple):
    """What a text does in its present step: an arm, at a hint of the verifier. fresh: its last step had another one."""

    arm: str
    hint: int | None
    fresh: bool


class TextEstimates:
    """One session's text: what arms gained in it. It reads and fills the statistics of all texts."""

    def __init__(
        self,
        statistics: Statistics,
        heads: Sequence[str],
        sampled: bool = False,
        prompt: Sequence[int] = (),
        predicted: Collection[str] = (),
    ) -> None:
        """prompt: the ids by which it is like other texts, or not. predicted: the heads that have a prediction."""
        self.statistics, self.sampled, self._predicted = statistics, sampled, predicted
        self._sketch = sketch(prompt)
        self.arms = {arm.name: arm for arm in arms_of(heads)}
        self.keys = {name: name for name in (*self.arms, BOTH)}
        """what an arm's gains and seconds are kept under: those of a cascade under the pair of its heads"""
        for name, arm in self.arms.items():
            if name != CASCADE and self.is_predicted(arm):
                self.keys[name] = PREDICTED + name
        self.steps = 0
        self.turn = Turn(PLAIN, None, False)
        self.opened: set[int] = set()
        """heads that have taken in the text"""
        self.own: defaultdict[str, Gain] = defaultdict(Gain)
        """what each arm gained in this text; a cascade by its pair of heads"""
        self._elsewhere: dict[str, float] = {}  # steps before this text
        self._alike: defaultdict[str, Gain] = defaultdict(Gain)
        """what each arm gained in texts like this one"""

    def is_predicted(self, arm: Arm) -> bool:
        """Whether an arm drafts from a prediction."""
        return any(arm.policy.heads[at] in self._predicted for at in arm.heads)

    @property
    def first(self) -> str | None:
        """The arm of a head that has a prediction: whether it fits is to be known at once."""
        return next((name for name in self.arms if name.startswith(SINGLE) and self.keys[name] != name), None)

    def begin(self) -> None:
        """Take in what the texts that this one is like gained, each as far as it is."""
        self._elsewhere = {key: arm.gains[self.sampled].steps for key, arm in self.statistics.arms.items()}
        for share, own in self.statistics.ended[self.sampled].like(self._sketch):
            for name, gain in own.items():
                self._alike[name].total += share * gain.total
                self._alike[name].steps += share * gain.steps

    def end(self) -> None:
        """Leave what it gained to the texts that will be like this one."""
        self.statistics.ended[self.sampled].add(self._sketch, self.own)

    def usual(self, name: str) -> Gain:
        """What an arm gained in all texts that are drawn as this one."""
        return self.statistics.arms[self.keys[name]].gains[self.sampled]

    def steps_before(self, name: str) -> float:
        """Steps of an arm as far as they say what it gains in this text: those in texts unlike it say little."""
        key, usual = self.keys[name], self.usual(name).steps
        elsewhere = self._elsewhere.get(key, 0.0)
        return min(ALIKE_STEPS, elsewhere) + max(0.0, usual - elsewhere) + self._alike[key].steps

    def gains(self) -> dict[str, float]:
        """Accepted drafts a step to be expected of each arm."""
        heads = [name for name in self.arms if name.startswith(SINGLE)]
        gains = {PLAIN: 0.0} | {name: self._alone(name) for name in heads}
        joint = JOINT_GAIN * max(gains.values())
        return gains | {name: self._mean(name, joint) for name in self.arms if name not in gains}

    def _alone(self, name: str) -> float:
        """What a head gains alone."""
        if self.keys[name] == name:
            return self._mean(name, FIRST_GAIN)
        return self._mean(name, PREDICTED_GAIN, PREDICTED_STEPS)

    def _mean(self, name: str, first: float, before: float = TEXT_STEPS) -> float:
        """What an arm gains in this text; `first` before it was tried anywhere, which `before` steps of it outweigh."""
        key, usual = self.keys[name], self.usual(name).mean(first, FIRST_STEPS)
        return self.own[key].mean(self._alike[key].mean(usual, ALIKE_STEPS), before)

    def step_s(self, name: str) -> float:
        """What a step of an arm takes. How often a cascade asks both heads belongs to the text."""
        if name != CASCADE:
            key = self.keys[name]  # with a prediction trees are larger
            return self.statistics.step_s(key if self.statistics.arms[key].extra.by_load else name)
        quick_s, both_s = self._cascade_s()
        return quick_s + self._mean(BOTH, FIRST_SHARE) * (both_s - quick_s)

    def pair_heads(self) -> None:
        """Now and then pair the quickest head and the one that commits most tokens a second behind it."""
        if CASCADE not in self.arms or (self.keys[CASCADE] != CASCADE and self.steps % PAIRED):
            return
        cascade, plain_s = self.arms[CASCADE], self.statistics.step_s(PLAIN)
        names = [SINGLE + head for head in cascade.policy.heads]
        extras = [self.step_s(name) - plain_s for name in names]
        quick = min(range(len(names)), key=extras.__getitem__)
        rates = {
            at: (1 + self._alone(name)) / (plain_s + extras[quick] + extras[at])
            for at, name in enumerate(names)
            if at != quick
        }
        second = max(rates, key=rates.__getitem__)
        if cascade.heads != (quick, second):
            self.arms[CASCADE] = replace(cascade, heads=(quick, second))
        self.keys[CASCADE] = f"{CASCADE}:{self.keys[names[quick]]}/{self.keys[names[second]]}"

    def _cascade_s(self) -> tuple[float, float]:
        """What a step of the cascade takes that asks the first head alone, and one that asks both."""
        cascade, known = self.arms[CASCADE], self.statistics
        quick_s, second_s = [self.step_s(SINGLE + cascade.policy.heads[at]) for at in cascade.heads]
        plain_s, extra_s = known.step_s(PLAIN), known.arms[self.keys[CASCADE]].extra.at(known.load)
        return quick_s, quick_s + second_s - plain_s if extra_s is None else plain_s + extra_s

    def goes_on(self, promised: float) -> bool:
        """Whether a cascade's step is faster with its second head, if the first one promises so many accepted drafts.

        It is the step's own rate that counts: what the first head does not know must be passed in any case.
        """
        cascade = self.arms[CASCADE]
        second = SINGLE + cascade.policy.heads[cascade.heads[1]]
        quick_s, both_s = self._cascade_s()
        return (1 + max(promised, self._alone(second))) / both_s > (1 + promised) / quick_s

    def gained(self, name: str, accepted: int) -> None:
        """Take in what an arm gained in a step, or would have gained."""
        self.usual(name).see(accepted)
        own = self.own[self.keys[name]]
        own.fade(1 - 1 / TEXT_MEMORY)
        own.see(accepted)

    def opening_s(self, name: str) -> float:
        """What it takes beside a usual step until the heads of an arm have taken in the text, as far as is known."""
        known, arm = self.statistics, self.arms[name]
        missing = [known.arms[self.keys[SINGLE + arm.policy.heads[at]]] for at in arm.heads if at not in self.opened]
        return max([head.opening.at(known.load) or 0.0 for head in missing], default=0.0)
