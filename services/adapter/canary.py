"""A canary: new weights that one replica drafts with, until queries say whether the others get them too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from coppice.adaptation.records import QueryRecord
from coppice.config.adaptation import DriftSettings
from coppice.weights.versions import Weights

from .bandit import Trigger
from .drift import mean_and_error

Verdict = Literal["undecided", "promote", "reject"]

LIMIT = 40  # queries of the new version after which a canary must be decided
TOLERANCE = 0.03  # share of the old tau that a new version may lack
CERTAINTY = 2.0  # standard errors that decide a canary before the limit


@dataclass
class Canary:
    """One version on trial, and what queries that ended meanwhile measured."""

    weights: Weights
    trigger: Trigger
    train_s: float
    queries: int = 0
    """that ended meanwhile, on whatever version"""
    old: list[QueryRecord] = field(default_factory=list)
    """those that lived on the live version"""
    new: list[QueryRecord] = field(default_factory=list)
    """those that lived on this one"""

    def observe(self, record: QueryRecord, version: int | None, live: int) -> None:
        """Take a query that lived on `version`, None: on several."""
        self.queries += 1
        if version == self.weights.version:
            self.new.append(record)
        elif version == live:
            self.old.append(record)

    def verdict(self, settings: DriftSettings, patience: int) -> Verdict:
        """Judge it by tau; after `patience` queries without a result it is rejected."""
        verdict = canary_verdict(settings, [one.tau for one in self.old], [one.tau for one in self.new])
        if verdict == "undecided" and self.queries >= patience:
            return "reject"  # its replica answers too little, or is gone
        return verdict


def canary_verdict(settings: DriftSettings, old: Sequence[float], new: Sequence[float]) -> Verdict:
    """Judge a version by the tau of queries on it and of queries on the old one meanwhile.

    It is promoted or rejected when its tau is surely above or below the old one less a tolerance, by the standard error
    of Welch's test; at the limit the mean alone decides.
    """
    if min(len(old), len(new)) < settings.canary_queries:
        return "undecided"
    (old_tau, old_error), (new_tau, new_error) = mean_and_error(old), mean_and_error(new)
    excess = new_tau - old_tau * (1 - TOLERANCE)
    if abs(excess) <= CERTAINTY * math.hypot(old_error, new_error) and len(new) < LIMIT:
        return "undecided"
    return "promote" if excess >= 0 else "reject"
