"""Samples until their query says what they are for (SpecBlock, algorithm 1, line 10)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from coppice.adaptation.bandit import Action
from coppice.adaptation.records import Kind, Sample
from coppice.telemetry import AdapterMetrics
from services.adapter.buffers import Buffers

KINDS: dict[Action, Kind] = {Action.HEAD: "head", Action.FULL: "full"}
SESSIONS = 512
"""whose samples wait for their query's end, or whose query's end was heard"""
SAMPLES = 2048
"""that wait for their query's end"""


class Desk:
    """Sorts a head's samples into its buffers, and counts those that teach nothing."""

    def __init__(self, head: str, buffers: Buffers, draft_ids: Collection[int], metrics: AdapterMetrics) -> None:
        """draft_ids: target ids that the output layer can be taught."""
        self._head, self._buffers, self._draft_ids, self._metrics = head, buffers, draft_ids, metrics
        self._pending: OrderedDict[str, list[Sample]] = OrderedDict()
        self._waiting = 0
        self._decided: OrderedDict[str, Action] = OrderedDict()

    def take(self, sample: Sample) -> None:
        """Keep a sample until `claim`; one that comes behind it is sorted at once."""
        action = self._decided.get(sample.session)
        if action is not None:
            self._sort(action, [sample])
            return
        self._pending.setdefault(sample.session, []).append(sample)
        self._pending.move_to_end(sample.session)
        self._waiting += 1
        while len(self._pending) > SESSIONS or self._waiting > SAMPLES:
            self._drop(len(self._unpended(next(iter(self._pending)))), "unclaimed")

    def claim(self, session: str, action: Action) -> None:
        """A query ended, and its samples are for this."""
        self._decided[session] = action
        if len(self._decided) > SESSIONS:
            self._decided.popitem(last=False)
        self._sort(action, self._unpended(session))

    def _unpended(self, session: str) -> list[Sample]:
        samples = self._pending.pop(session, [])
        self._waiting -= len(samples)
        return samples

    def _sort(self, action: Action, samples: Sequence[Sample]) -> None:
        """A full sample holds what a head-only one does."""
        if action is Action.SKIP:
            self._drop(len(samples), "skipped")
            return
        before = self._buffers.dropped.copy()
        for sample in samples:
            if action is Action.HEAD and sample.target_id not in self._draft_ids:
                self._drop(1, "outside")
            elif KINDS[action] == sample.kind:
                self._buffers.add(sample)
            elif action is Action.HEAD:
                self._buffers.add(sample.as_head())
            else:
                self._drop(1, "unfit")
        for (_, why), count in (self._buffers.dropped - before).items():
            self._drop(count, why)

    def _drop(self, count: int, why: str) -> None:
        if count:
            self._metrics.dropped.labels(self._head, why).inc(count)
