"""What those hear who follow a session: each step's commit, as soon as its forward is done."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from torch import Tensor

from coppice.wire.common import Features
from coppice.wire.verifier import Commit

from .features import feature_bytes

MOST_UNREAD = 32  # commits; one that falls behind fetches what it missed


@dataclass(frozen=True, slots=True)
class Committed:
    """A commit with the (n, F) features of its positions, on the CPU, if the session has any, of its `layers`."""

    commit: Commit
    features: Tensor | None
    layers: tuple[int, ...]


@dataclass(eq=False, slots=True)
class Feed:
    """One follower: the torch thread hands it over to the event loop, where `put` and `commits` are called."""

    layers: tuple[int, ...] | None
    """whose features are wanted, empty: of all that the session has; None: none"""
    _waiting: asyncio.Queue[Committed | None] = field(default_factory=asyncio.Queue)

    def put(self, committed: Committed | None) -> None:
        """Take a commit, or None at the session's end; one that has not read enough hears no more."""
        if self._waiting.qsize() <= MOST_UNREAD:
            self._waiting.put_nowait(committed if self._waiting.qsize() < MOST_UNREAD else None)

    async def commits(self, dtype: str) -> AsyncIterator[Commit]:
        """Every commit with its features, of the model's dtype, until the session ends."""
        while (committed := await self._waiting.get()) is not None:
            yield self.told(committed, dtype)

    def told(self, committed: Committed, dtype: str) -> Commit:
        """A commit with the features that are wanted, of the model's dtype."""
        commit, rows = committed.commit, committed.features
        if self.layers is None or rows is None:
            return commit
        data = feature_bytes(rows, committed.layers, self.layers or committed.layers)
        return replace(commit, features=Features(commit.start, len(rows), dtype, data))
