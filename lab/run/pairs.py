"""What several methods answered to the same prompts in one cell, and figures that compare them in pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from coppice.client.completion import Completion
from coppice.testing.reference import Verdict
from lab.questions import Question
from lab.report import Row, make_row, repeat_share

MAX_REPEAT = 0.5  # of an answer's 4-grams: above, it loops, and loops flatter every drafter
RESAMPLES = 2000
ENOUGH = 15  # pairs that a figure of speed should rest on


@dataclass(frozen=True, slots=True)
class Cell:
    """One temperature, budget and number of sessions; methods are compared within a cell."""

    temperature: float
    budget: int
    sessions: int

    def __str__(self) -> str:
        return f"T={self.temperature:g}, budget {self.budget}, {self.sessions} session{'s' * (self.sessions != 1)}"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Tokens/s over other tokens/s: of all answers, with the bounds of its 95% interval, and of the median pair."""

    value: float
    low: float
    high: float
    median: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f}) {self.median:.2f}"


@dataclass(frozen=True)
class Pairs:
    """Answers of a cell by method, one entry a prompt, in the same order for all methods."""

    cell: Cell
    answers: Mapping[str, Sequence[Completion]]
    seed: int
    """of the bootstrap"""
    questions: Sequence[Question] = ()
    """what was asked, in the order of the answers; empty when nobody wants figures by benchmark"""

    def __len__(self) -> int:
        return len(next(iter(self.answers.values())))

    def few_repeats(self) -> Pairs:
        """The pairs in which at most half of the 4-grams repeat in every method's answer."""
        kept = [
            at
            for at, several in enumerate(zip(*self.answers.values(), strict=True))
            if all(repeat_share(answer.ids) <= MAX_REPEAT for answer in several)
        ]
        return self._some(kept)

    def by_benchmark(self) -> dict[str, Pairs]:
        """The pairs of each benchmark, in the order of the questions."""
        places: dict[str, list[int]] = {}
        for at, question in enumerate(self.questions):
            places.setdefault(question.benchmark, []).append(at)
        return {name: self._some(kept) for name, kept in places.items()}

    def _some(self, kept: Sequence[int]) -> Pairs:
        answers = {method: [mine[at] for at in kept] for method, mine in self.answers.items()}
        questions = [self.questions[at] for at in kept] if self.questions else ()
        return replace(self, answers=answers, questions=questions)

    def row(self, method: str, verdicts: Sequence[Verdict] = ()) -> Row:
        """A method's figures: pooled tokens over pooled steps, and over pooled seconds."""
        answers = self.answers[method]
        return make_row(method, answers, verdicts, self.cell.budget if answers[0].heads else 0, self.cell.sessions)

    def tokens_per_s(self, method: str) -> float:
        """Of all sessions, prefill left out."""
        return self.row(method).tokens_per_s

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
        ratios, pairs = (each[:, 0] / each[:, 1] * each[:, 3] / each[:, 2] for each in (sums, figures))
        value, (low, high) = float(ratios[0]), np.quantile(ratios[1:], (0.025, 0.975))
        # Rounding may move equal bounds apart.
        return Ratio(value, min(value, float(low)), max(value, float(high)), float(np.median(pairs)))

    def accepted(self, method: str) -> list[float]:
        """alpha_k: of the steps that accepted k - 1 drafts, the share that accepted one more (k = 1, 2, ...).

        An answer's last step is left out, for the limit of tokens cuts it. Unlike in SpecBlock's figure 5 it is the
        verified tree that is followed, not a greedy chain: it ends where trees do.
        """
        depths = [length - 1 for answer in self.answers[method] for length in answer.accept_lengths[:-1]]
        reached = [sum(depth >= k for depth in depths) for k in range(max(depths, default=0) + 2)]
        return [more / some for some, more in pairwise(reached) if some] if reached[1] else []

    def chosen(self, method: str) -> dict[str, float]:
        """Share of the steps that verified each head's tree; empty unless the method routes between heads."""
        if not method.startswith("route"):
            return {}
        steps = Counter(at for answer in self.answers[method] for at in answer.routed)
        return {head: steps[at] / steps.total() for at, head in enumerate(self.answers[method][0].heads)}
