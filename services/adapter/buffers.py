"""Samples that wait for an update, a bounded buffer for each action (SpecBlock, algorithm 1, lines 9 to 15)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Literal

from coppice.adaptation.records import Kind, Sample

Dropped = Literal["stale", "overflow"]
CAPACITIES: dict[Kind, int] = {"head": 64, "full": 16}
"""samples an update learns from"""


class Buffers:
    """Samples by kind. A buffer is saturated when it holds as many as its capacity; then new ones push out old ones.

    A head sample holds a state of the weights that drafted: it is stale once the layers below the output layer have
    changed. A full sample holds the target's features, which no update changes.
    """

    def __init__(self, capacities: Mapping[Kind, int] | None = None) -> None:
        """capacities: samples of each kind, positive; CAPACITIES where not given."""
        self.capacities: dict[Kind, int] = CAPACITIES | dict(capacities or {})
        if min(self.capacities.values()) < 1:
            raise ValueError("capacities are positive")
        self._held: dict[Kind, deque[Sample]] = {kind: deque() for kind in self.capacities}
        self.oldest_state = 0
        """head samples of earlier versions are stale"""
        self.dropped: Counter[tuple[Kind, Dropped]] = Counter()

    def add(self, sample: Sample) -> bool:
        """Keep a sample unless it is stale; returns whether its buffer is saturated."""
        kind = sample.kind
        held = self._held[kind]
        if self._stale(sample):
            self.dropped[kind, "stale"] += 1
        else:
            held.append(sample)
            if len(held) > self.capacities[kind]:
                held.popleft()
                self.dropped[kind, "overflow"] += 1
        return self.saturated(kind)

    def saturated(self, kind: Kind) -> bool:
        """Whether the buffer of a kind is full."""
        return len(self._held[kind]) >= self.capacities[kind]

    def size(self, kind: Kind) -> int:
        """How many samples wait."""
        return len(self._held[kind])

    def take(self, kind: Kind) -> list[Sample]:
        """Empty the buffer of a kind; its samples, oldest first."""
        taken = list(self._held[kind])
        self._held[kind].clear()
        return taken

    def layers_changed(self, version: int) -> None:
        """From `version` on hidden states are others: a full update, or a rollback of one. Drops what became stale."""
        self.oldest_state = max(self.oldest_state, version)
        held = self._held["head"]
        kept = [sample for sample in held if not self._stale(sample)]
        self.dropped["head", "stale"] += len(held) - len(kept)
        held.clear()
        held.extend(kept)

    def _stale(self, sample: Sample) -> bool:
        return sample.kind == "head" and sample.version < self.oldest_state
