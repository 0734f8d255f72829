"""Who is likely to be back soon: sessions that were answered together wait for one another, so that they share a batch.

Whoever takes only what is there when it becomes free falls into two groups of sessions that wait for each other's
batches, each half as large as it could be.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass

RATE = 0.2  # of both averages
DEVIATIONS = 2.0  # beyond the mean that are waited for
LEAST_S = 1e-3
MOST_WAIT = 0.8  # of a batch's time: those that miss it wait at least that long for the next one


@dataclass(slots=True)
class _Away:
    """One session, seconds on one clock."""

    answered: float = 0.0
    known: bool = False  # whether it came back before
    mean: float = 0.0
    deviation: float = 0.0


class Returns:
    """Learns for each session how long it stays away between an answer and its next step."""

    def __init__(self) -> None:
        self._sessions: dict[Hashable, _Away] = {}
        self.expected: frozenset[Hashable] = frozenset()
        """those of the last batch that are still open"""

    def answered(self, keys: Iterable[Hashable], now: float) -> None:
        """These were the last batch, whose answers go out now."""
        self.expected = frozenset(keys)
        for key in self.expected:
            self._sessions.setdefault(key, _Away()).answered = now

    def came(self, key: Hashable, now: float) -> None:
        """A session's next step is here."""
        away = self._sessions.get(key)
        if away is None:
            return
        took = now - away.answered
        if away.known:
            away.deviation += RATE * (abs(took - away.mean) - away.deviation)
            away.mean += RATE * (took - away.mean)
        else:
            away.known, away.mean = True, took

    def closed(self, key: Hashable) -> None:
        """A session ended."""
        self._sessions.pop(key, None)
        self.expected -= {key}

    def wait_until(self, here: Collection[Hashable], latest: float) -> float:
        """When those of the last batch should be back that usually are by `latest`; 0 when there are none to wait for.

        here: whose steps wait. One that never came back yet is waited for to the end.
        """
        dues = (self._due(self._sessions[key], latest) for key in self.expected if key not in here)
        return max((due for due in dues if due <= latest), default=0.0)

    def _due(self, away: _Away, otherwise: float) -> float:
        return away.answered + away.mean + max(LEAST_S, DEVIATIONS * away.deviation) if away.known else otherwise
