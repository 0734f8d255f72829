"""Drift control: has an update made drafts worse? (SpecBlock, section 3.4; algorithm 1, lines 22 to 24)

Pure and deterministic, with JSON state, as `services.adapter.bandit`. tau is a query's mean accepted length, tokens
committed by one verifier call; a head that is never right has 1.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from pydantic import BaseModel, ConfigDict

from coppice.config.adaptation import DriftSettings

Reason = Literal["falling", "collapse"]

WINDOWS = 3  # consecutive windows over which tau must fall
COLLAPSE = 0.5  # one window is an alarm below this share of what drafting gained, tau - 1, in the last good one


class Window(BaseModel):
    """The tau of a window of queries: its mean, its standard error, and the version that drafted most of them."""

    tau: float
    error: float
    version: int | None


class Alarm(BaseModel):
    """Accepted length has fallen: in which way, and the version of the weights before it, if it is known."""

    model_config = ConfigDict(frozen=True)

    reason: Reason
    good_version: int | None


class DriftState(BaseModel):
    """All that drift control knows, as JSON can hold it."""

    taus: list[float] = []  # of the window that is filling
    versions: list[int | None] = []
    windows: list[Window] = []  # the last ones that closed, oldest first


class Drift:
    """Watches the accepted length of one head: `observe` each query that ended, `reset` after a revert."""

    def __init__(self, settings: DriftSettings, state: DriftState | None = None) -> None:
        self.settings, self.state = settings, state or DriftState()

    def observe(self, tau: float, version: int | None) -> Alarm | None:
        """Take a query; returns an alarm if it closes a window and accepted length has fallen (line 22).

        `version`: as in `services.adapter.bandit.Query`.
        """
        state, settings = self.state, self.settings
        state.taus.append(tau)
        state.versions.append(version)
        if len(state.taus) < settings.window:
            return None
        known = [version for version in state.versions if version is not None]
        mean, error = mean_and_error(state.taus)
        window = Window(tau=mean, error=error, version=statistics.mode(known) if known else None)
        state.taus, state.versions = [], []
        state.windows = [*state.windows, window][-WINDOWS:]
        if len(state.windows) > 1 and self._collapsed(*state.windows[-2:]):
            return Alarm(reason="collapse", good_version=state.windows[-2].version)
        if len(state.windows) == WINDOWS and self._falling():
            return Alarm(reason="falling", good_version=state.windows[0].version)
        return None

    def reset(self) -> None:
        """Forget all windows: the weights were taken back (line 23), and these say nothing of those after."""
        self.state.taus, self.state.versions, self.state.windows = [], [], []

    def _falling(self) -> bool:
        windows = self.state.windows
        monotonic = all(later.tau < earlier.tau for earlier, later in pairwise(windows))
        return monotonic and self._surely_lower(windows[0], windows[-1])

    def _collapsed(self, good: Window, window: Window) -> bool:
        """Tell whether a new version lost most of what drafting gained; the same version cannot have."""
        if good.version == window.version:
            return False
        far = window.tau - 1 < COLLAPSE * (good.tau - 1)
        return far and self._surely_lower(good, window)

    def _surely_lower(self, earlier: Window, later: Window) -> bool:
        return earlier.tau - later.tau > self.settings.certainty * math.hypot(earlier.error, later.error)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of two values or more, and its standard error."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
