"""How often a head's drafts are right, as `acceptance` in its config.json says: training or a measurement writes it.

It is what the head reaches on the kind of text that it knows least of, so that no honest use falls below it for long.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, zip_longest
from operator import mul
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coppice.errors import InvalidField
from coppice.limits import MAX_TREE_DEPTH

LEAST_TRIALS = 30
"""of a depth on each kind of text: of deeper ones nothing is expected, and of a text with fewer its kind counts"""
LEAST_LENGTH = 1.1
"""tokens a step below which no draft pays"""
_Z = 2.58
_CONFIG, _NAME = "config.json", "acceptance"

Share = Annotated[float, Field(ge=0, le=1)]
Counts = Sequence[tuple[int, int]]
"""(right, tried) of the best token at depth 1, 2, ..., tried where the best ones before it were right"""


class Expectation(BaseModel):
    """How often a head's best token is right at depth 1, 2, ... when the best ones before it were."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    by_depth: tuple[Share, ...] = Field((), max_length=MAX_TREE_DEPTH)
    """at least, on every text that was measured"""
    texts: dict[str, tuple[Share, ...]] = {}
    """the shares measured on each kind of text"""

    @property
    def lengths(self) -> dict[str, float]:
        """Tokens that a step commits with a chain of the head's best tokens, the root's included, by kind of text."""
        return {kind: 1 + sum(accumulate(shares, mul)) for kind, shares in self.texts.items()}


def expectation(measured: Mapping[str, Sequence[Counts]]) -> Expectation:
    """Return what is expected of a head that was measured on some texts of each kind, a sequence of counts each.

    Of each depth the least of all texts' shares (of those with LEAST_TRIALS) and of the lower ends of the kinds' 99%
    intervals (Wilson, 1927), as deep as every kind was tried so often: texts of one kind differ, and a request is one.
    """
    kinds = {
        kind: [_total(column) for column in zip_longest(*texts, fillvalue=(0, 0))] for kind, texts in measured.items()
    }
    by_depth = []
    for depth, totals in enumerate(zip(*kinds.values(), strict=False)):
        if min(tried for _, tried in totals) < LEAST_TRIALS:
            break
        counts = [text[depth] for texts in measured.values() for text in texts if depth < len(text)]
        shares = [right / tried for right, tried in counts if tried >= LEAST_TRIALS]
        by_depth.append(round(min(*shares, *(_lower_end(*total) for total in totals), 1.0), 4))
    texts = {kind: tuple(round(right / tried, 4) for right, tried in totals if tried) for kind, totals in kinds.items()}
    return Expectation(by_depth=tuple(by_depth), texts=texts)


def _total(counts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    right, tried = zip(*counts, strict=True)
    return sum(right), sum(tried)


def _lower_end(right: int, tried: int) -> float:
    share, z2 = right / tried, _Z * _Z / tried
    return max(0.0, (share + z2 / 2 - math.sqrt(z2 * (share * (1 - share) + z2 / 4))) / (1 + z2))


def read_expectation(folder: str | Path) -> Expectation:
    """Return what a model's folder expects, nothing if it does not say. Raises InvalidField."""
    file = Path(folder) / _CONFIG
    try:
        return Expectation.model_validate(json.loads(file.read_text(encoding="utf-8")).get(_NAME) or {})
    except (OSError, ValueError, ValidationError) as error:
        raise InvalidField("drafter.path", f"{file}: {_NAME}: {str(error).splitlines()[0]}") from None


def warning_of(folder: Path) -> str:
    """Return why not to serve a head; empty when it may pay, or its folder is not there. Raises InvalidField."""
    lengths = read_expectation(folder).lengths.values() if (folder / _CONFIG).exists() else ()
    best = max(lengths, default=LEAST_LENGTH)
    return "" if best >= LEAST_LENGTH else f"expected tau {best:.2f}: drafting with it costs time"
