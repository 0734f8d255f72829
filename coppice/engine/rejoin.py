"""Which sessions of the last batch are worth waiting for: those that usually are back within a batch's time.

If a service served whatever was queued when it became free, sessions would split into two alternating half-size
batches: while one half is served the other half comes back, and it stays so. It therefore waits briefly for sessions of
the last batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from statistics import median_low

LATEST = 5  # times away that count; one that was long, as when a head had to take in the text, leaves the median alone


@dataclass(slots=True)
class _Away:
    """One session, seconds on one clock."""

    answered: float = 0.0
    took: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST))

    @property
    def due(self) -> float:
        """When it should be back; at once when it never was."""
        return self.answered + (median_low(self.took) if self.took else 0.0)


class Rejoin:
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
        if away is not None:
            away.took.append(now - away.answered)

    def closed(self, key: Hashable) -> None:
        """A session ended."""
        self._sessions.pop(key, None)
        self.expected -= {key}

    def missing(self, here: Collection[Hashable], until: float) -> bool:
        """Whether some session of the last batch, none of those `here`, should be back by `until`.

        That is worth waiting for where `until` is a batch's time away: who misses a batch waits as long for the next
        one. Half of all times somebody is later than usual, so the wait is to its end, not to when they are due.
        """
        return any(self._sessions[key].due <= until for key in self.expected if key not in here)
