"""What is remembered of kinds of text."""

from __future__ import annotations

from pydantic import BaseModel

PROVEN_SHARE = 15 / 16
"""of a kind's texts for a variant that pays: the rest goes on being measured against it"""
_FIRST_SPREAD = 0.16  # mean squared distance assumed of a kind of few texts
_PRIOR_DRAG = 0.15  # share of its speed that serving is expected to lose while an update trains


class Gain(BaseModel):
    """What a variant gains over what drafts for the rest of its kind of text, in the same minutes."""

    share: float = 0.0
    """of tau"""
    error: float = 0.0
    """standard error"""
    variant: int = 0
    """queries that it drafted"""
    others: int = 0
    """queries that it was compared with"""


class KindState(BaseModel):
    """All that is known of a kind."""

    centre: list[float]
    spread: float = _FIRST_SPREAD
    """mean squared distance from the centre"""
    queries: int = 0
    last: int = 0
    """number of the latest query"""
    query_s: float = 0.0
    """mean seconds of a query"""
    tau: float = 1.0
    """mean accepted length with the deployed weights"""
    variant: int = 0
    """what drafts for `share` of the texts; 0: the deployed weights"""
    share: float = 0.0
    other: int = 0
    """what drafts for the others"""
    since: int = 0
    """version of the weights that the measurements below begin with"""
    with_variant: list[float] = []
    with_other: list[float] = []
    learnt: int = 0
    """queries before the last update"""
    updates: int = 0
    failures: int = 0
    """in a row that were no better"""
    expected_gain: float | None = None
    """of the next update, share of tau; None: nothing is known of it"""

    @property
    def young(self) -> bool:
        """Whether its variant has to be measured yet."""
        return 0 < self.share < PROVEN_SHARE


class KindsState(BaseModel):
    """All kinds, by place; None: a place that no kind has."""

    kinds: list[KindState | None] = []
    queries: int = 0
    step_s: float = 0.0
    """mean time of a step while nothing is trained"""
    drag: float = _PRIOR_DRAG
    """share by which steps were longer while something was"""
