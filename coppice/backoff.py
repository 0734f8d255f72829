"""How long to wait before something that failed is tried again."""

from __future__ import annotations


class Backoff:
    """Pauses that double with every failure, from `first_s` up to `longest_s`, until something succeeds."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._next_s = first_s

    @property
    def fresh(self) -> bool:
        """Whether nothing has failed since the last success."""
        return self._next_s == self._first_s

    def fail(self) -> float:
        """Note a failure. Return the pause that it calls for, in seconds."""
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self._longest_s)
        return pause_s

    def succeed(self) -> None:
        """Note a success: the next pause is the first one again."""
        self._next_s = self._first_s
