"""Samples until their query says what they are for (SpecBlock, algorithm 1, line 10)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from coppice.adaptation.bandit import Action
from coppice.adaptation.records import Kind, Sample

from .buffers import Buffers, Drop

KINDS: dict[Action, Kind] = {Action.HEAD: "head", Action.FULL: "full"}
SESSIONS = 512
"""Sessions whose samples wait for their query's end, and ended queries whose late samples are still sorted"""
SAMPLES = 2048
"""Samples that wait for their query's end"""


class Sorting:
    """Sorts a head's samples into its buffers once their query has ended."""

    def __init__(self, buffers: Buffers, draft_ids: Collection[int], drop: Drop) -> None:
        """`draft_ids` are the target ids that the output layer can be taught."""
        self.buffers, self._draft_ids, self._drop = buffers, draft_ids, drop
        self._pending: OrderedDict[str, list[Sample]] = OrderedDict()
        self._waiting = 0
        self._decided: OrderedDict[str, Action] = OrderedDict()

    def take(self, sample: Sample) -> None:
        """Keep a sample until `claim`; one that comes after it is sorted at once."""
        action = self._decided.get(sample.session)
        if action is not None:
            self._sort(action, [sample])
            return
        self._pending.setdefault(sample.session, []).append(sample)
        self._pending.move_to_end(sample.session)
        self._waiting += 1
        while len(self._pending) > SESSIONS or self._waiting > SAMPLES:
            self._drop(len(self._pop(next(iter(self._pending)))), "unclaimed")

    def claim(self, session: str, action: Action) -> None:
        """Sort the samples of a query that ended."""
        self._decided[session] = action
        if len(self._decided) > SESSIONS:
            self._decided.popitem(last=False)
        self._sort(action, self._pop(session))

    def _pop(self, session: str) -> list[Sample]:
        samples = self._pending.pop(session, [])
        self._waiting -= len(samples)
        return samples

    def _sort(self, action: Action, samples: Sequence[Sample]) -> None:
        for sample in samples:
            if action is Action.SKIP:
                self._drop(1, "skipped")
            elif action is Action.HEAD and sample.target_id not in self._draft_ids:
                self._drop(1, "outside")
            elif action is Action.HEAD:
                self.buffers.add(sample.as_head())
            elif sample.kind == "full":
                self.buffers.add(sample)
            else:
                self._drop(1, "unfit")
