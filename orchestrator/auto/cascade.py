"""A cascade of two heads: the quick one is asked first, the other one only where it is worth its time.

The quick head's tree promises so many accepted drafts, the sum of its calibrated confidences. The second head is asked
when the step's own rate is expected to be higher with it,

    (1 + max(promise, gain)) / (quick step + seconds) > (1 + promise) / quick step.

It is the step's own rate that counts, not the text's: tokens that the quick head does not know have to be passed in any
case, and without the second one they are passed one by one. That a quick n-gram head answers where the text repeats
itself, and a trained one where it does not, is known from suffix trees beside trained drafters (Oliaro et al.,
SuffixDecoding, 2024); there a fixed number decides, here the seconds that both take.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

RECENT = 24  # promises that count
FIRST_DRAFTS = 12.0  # accepted drafts that are thought to have come true at first
MEMORY = 128.0  # steps that count


@dataclass(slots=True)
class Promises:
    """What the quick head's latest trees promised, and the tokens that these steps committed, whoever drafted them."""

    latest: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def see(self, promised: float, tokens: int) -> None:
        """Take in a step."""
        self.latest.append((promised, tokens))

    def filled(self, others: Promises) -> list[tuple[float, int]]:
        """These, and as many of others as are missing."""
        missing = RECENT - len(self.latest)
        return [*self.latest, *list(others.latest)[:missing]]


@dataclass(slots=True)
class Truth:
    """How much came true of what was expected: second heads are asked where text is harder than usual, and what a quick
    head promises is calibrated over greedy and sampled texts together.
    """

    expected: float = FIRST_DRAFTS
    gained: float = FIRST_DRAFTS

    def see(self, expected: float, gained: float) -> None:
        """Take in a step."""
        kept = 1 - 1 / MEMORY
        self.expected, self.gained = kept * self.expected + expected, kept * self.gained + gained

    @property
    def ratio(self) -> float:
        """Accepted drafts over the expected ones, at most 1."""
        return min(1.0, self.gained / self.expected)


@dataclass(frozen=True, slots=True)
class Cascade:
    """Two heads, by index. quick_s: a step with the first one alone; gain, seconds: of the second one behind it."""

    quick: int
    second: int
    quick_s: float
    gain: float
    seconds: float
    kept: float = 1.0  # of what the quick head promises

    def asks(self, promised: float) -> bool:
        """Whether to ask the second head."""
        return (1 + self.expected(promised)) * self.quick_s > (1 + self.kept * promised) * self.step_s(both=True)

    def expected(self, promised: float) -> float:
        """Accepted drafts of a step that asks both."""
        return max(self.kept * promised, self.gain)

    def step_s(self, both: bool) -> float:
        """Seconds of a step that asks the quick head, or both."""
        return self.quick_s + self.seconds * both

    def worth(self, promises: Iterable[tuple[float, int]], quick_gain: float) -> tuple[float, float]:
        """Accepted drafts and seconds of a mean step of the cascade, if the quick head alone gains so much a step.

        `promises` are of one step or more. How many steps their tokens would take is compared, by the cascade and by
        the quick head, not what as many steps would gain: where the second head is asked, the same tokens take fewer.
        """
        steps = quick_steps = seconds = 0.0
        quick_s, both_s = self.quick_s, self.quick_s + self.seconds
        for promised, tokens in promises:
            kept = self.kept * promised
            quick, expected = tokens / (1 + kept), max(kept, self.gain)
            asks = (1 + expected) * quick_s > (1 + kept) * both_s  # as in `asks`, which costs five calls
            here, here_s = (tokens / (1 + expected), both_s) if asks else (quick, quick_s)
            steps, quick_steps, seconds = steps + here, quick_steps + quick, seconds + here * here_s
        return (1 + quick_gain) * quick_steps / steps - 1, seconds / steps


def best_cascade(
    steps_s: Sequence[float], behind_s: Sequence[float], gains: Sequence[float], kept: float = 1.0
) -> Cascade:
    """The quickest of two heads or more, and behind it the one that commits most tokens a second with it.

    steps_s: of each head, a step with it alone; behind_s: what it adds to a step as the second one; gains: accepted
    drafts, as a second head's; kept: as in Cascade.
    """
    quick = min(range(len(steps_s)), key=steps_s.__getitem__)
    seconds = [at for at in range(len(gains)) if at != quick]
    others = [Cascade(quick, at, steps_s[quick], gains[at], behind_s[at], kept) for at in seconds]
    return max(others, key=lambda one: (1 + one.gain) / max(1e-9, one.step_s(both=True)))
