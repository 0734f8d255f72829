"""What several methods answered to the same prompts at one temperature, and figures that compare them in pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coppice.bench.peers import PEERS
from coppice.bench.report import repeat_share
from coppice.completion import Completion

MAX_REPEAT = 0.5  # of an answer's 4-grams: above, it loops, and loops flatter every drafter
RESAMPLES = 2000
ENOUGH = 15  # pairs that a figure of speed should rest on


@dataclass(frozen=True, slots=True)
class Ratio:
    """Tokens/s over other tokens/s, and the bounds of its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f})"


@dataclass(frozen=True)
class Pairs:
    """Answers by method, one entry a prompt and round, in the same order for all methods."""

    temperature: float
    answers: Mapping[str, Sequence[Completion]]
    sessions: int
    seed: int

    def __len__(self) -> int:
        return len(next(iter(self.answers.values())))

    def few_repeats(self) -> Pairs:
        """The pairs in which at most half of the 4-grams repeat in every method's answer."""
        kept = [
            at
            for at, several in enumerate(zip(*self.answers.values(), strict=True))
            if all(repeat_share(answer.ids) <= MAX_REPEAT for answer in several)
        ]
        answers = {method: [mine[at] for at in kept] for method, mine in self.answers.items()}
        return Pairs(self.temperature, answers, self.sessions, self.seed)

    def tau(self, method: str) -> float:
        """Tokens a target forward behind the prefill."""
        answers = self.answers[method]
        return self._tokens(method) / sum(answer.steps for answer in answers)

    def tokens_per_s(self, method: str) -> float:
        """Pooled tokens over pooled seconds, prefill left out; of all sessions."""
        return self._tokens(method) / sum(answer.decode_s for answer in self.answers[method]) * self.sessions

    def ratio(self, method: str, over: str) -> Ratio | None:
        """How much faster one method is than another, with a paired bootstrap; None without that other."""
        if over not in self.answers:
            return None
        figures = np.array(
            [
                (sum(mine.accept_lengths), mine.decode_s, sum(theirs.accept_lengths), theirs.decode_s)
                for mine, theirs in zip(self.answers[method], self.answers[over], strict=True)
            ]
        )
        drawn = np.random.default_rng(self.seed).integers(len(figures), size=(RESAMPLES, len(figures)))
        sums = np.vstack((figures.sum(0), figures[drawn].sum(1)))  # (1 + RESAMPLES, 4), the pairs themselves first
        ratios = sums[:, 0] / sums[:, 1] * sums[:, 3] / sums[:, 2]
        value, (low, high) = float(ratios[0]), np.quantile(ratios[1:], (0.025, 0.975))
        return Ratio(value, min(value, float(low)), max(value, float(high)))  # rounding may move equal ones apart

    def draft_ms(self, method: str) -> float:
        """Mean time a step waited for drafts, milliseconds."""
        answers = self.answers[method]
        return sum(answer.timings.draft_ns for answer in answers) / sum(answer.steps for answer in answers) / 1e6

    def chosen(self, method: str) -> dict[str, float]:
        """Share of the steps that verified each head's tree; empty unless the method routes between heads."""
        if method in PEERS or not method.startswith("route"):
            return {}
        steps = Counter(at for answer in self.answers[method] for at in answer.routed)
        return {head: steps[at] / steps.total() for at, head in enumerate(self.answers[method][0].heads)}

    def _tokens(self, method: str) -> int:
        return sum(sum(answer.accept_lengths) for answer in self.answers[method])
