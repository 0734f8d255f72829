"""Samples that wait for an update, a bounded buffer for each kind (SpecBlock, algorithm 1, lines 9 to 15)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping

from coppice.adaptation.records import Kind, Sample

from .bandit import Action

KINDS: dict[Action, Kind] = {Action.HEAD: "head", Action.FULL: "full"}
Drop = Callable[[int, str], None]
"""Counts samples that teach nothing, and why"""


class Buffers:
    """Samples by kind. A full buffer drops its oldest sample for each new one.

    A head sample holds a state of the weights that drafted: it is stale once the layers below the output layer have
    changed. A full sample holds the target's features, which no update changes.
    """

    def __init__(self, capacities: Mapping[Kind, int], draft_ids: Collection[int], drop: Drop) -> None:
        """`capacities` are the samples that an update of each kind learns from, positive.

        draft_ids: target ids that the output layer can be taught.
        """
        self.capacities = capacities
        self._draft_ids, self._drop = draft_ids, drop
        self._held: dict[Kind, deque[Sample]] = {kind: deque() for kind in capacities}
        self._oldest_version = 0  # head samples of earlier versions are stale

    def keep(self, action: Action, sample: Sample) -> None:
        """Keep a sample for what its query was decided to be for (algorithm 1, line 10), if it is fit for that."""
        if action is Action.SKIP:
            self._drop(1, "skipped")
        elif action is Action.FULL and sample.kind == "full":
            self.add(sample)
        elif action is Action.FULL or not len(sample.hidden):
            self._drop(1, "unfit")
        elif sample.target_id not in self._draft_ids:
            self._drop(1, "outside")
        else:
            self.add(sample.as_head())

    def add(self, sample: Sample) -> None:
        """Keep a sample unless it is stale."""
        if self._stale(sample):
            self._drop(1, "stale")
            return
        held = self._held[sample.kind]
        held.append(sample)
        if len(held) > self.capacities[sample.kind]:
            held.popleft()
            self._drop(1, "overflow")

    def size(self, kind: Kind) -> int:
        """Count the samples that wait."""
        return len(self._held[kind])

    def take(self, kind: Kind) -> list[Sample]:
        """Empty the buffer of a kind; returns its samples, oldest first."""
        samples = list(self._held[kind])
        self._held[kind].clear()
        return samples

    def layers_changed(self, version: int) -> None:
        """Drop the head samples of versions before this one: it changed the layers that make their states."""
        self._oldest_version = max(self._oldest_version, version)
        held = self._held["head"]
        fresh = [sample for sample in held if not self._stale(sample)]
        self._drop(len(held) - len(fresh), "stale")
        self._held["head"] = deque(fresh)

    def _stale(self, sample: Sample) -> bool:
        return sample.kind == "head" and sample.version < self._oldest_version
