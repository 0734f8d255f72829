"""Samples of texts until they are learnt from (SpecBlock, algorithm 1, lines 9 to 15)."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

from coppice.signals.records import Sample

SESSIONS = 512
"""sessions whose samples wait for their query's end, and ended queries whose late samples are still taken"""
SAMPLES = 2048
"""samples that wait for their query's end"""
_LEARNT, _HELD_OUT = 128, 8  # texts of a group, the latest ones
_HELD_OUT_EVERY = 6  # of the texts one is held out, to measure by


class Groups:
    """The texts of a head: until their query has ended, then in the group that it is of."""

    def __init__(self, drop: Callable[[int, str], None]) -> None:
        """`drop` counts samples that teach nothing, with the reason."""
        self._drop = drop
        self._pending: OrderedDict[str, list[Sample]] = OrderedDict()
        self._waiting = 0
        self._ended: OrderedDict[str, int] = OrderedDict()
        self._taken = 0
        self._learnt: dict[int, deque[Sample]] = {}
        self._held_out: dict[int, deque[Sample]] = {}

    def take(self, sample: Sample) -> None:
        """Hold a sample until `claim`; one that comes after it joins its group at once."""
        if sample.session in self._ended:
            self._add(self._ended[sample.session], sample)
            return
        self._pending.setdefault(sample.session, []).append(sample)
        self._pending.move_to_end(sample.session)
        self._waiting += 1
        while len(self._pending) > SESSIONS or self._waiting > SAMPLES:
            self._drop(len(self._pop(next(iter(self._pending)))), "unclaimed")

    def claim(self, session: str, group: int) -> None:
        """Put the samples of a query that ended into a group; 0: drop them."""
        self._ended[session] = group
        if len(self._ended) > SESSIONS:
            self._ended.popitem(last=False)
        for sample in self._pop(session):
            self._add(group, sample)

    def forget(self, group: int) -> None:
        """Empty a group."""
        self._learnt.pop(group, None)
        self._held_out.pop(group, None)

    def counts(self) -> dict[int, int]:
        """Return how many texts there are to learn from, by group."""
        return {group: len(texts) for group, texts in self._learnt.items()}

    def of(self, group: int) -> tuple[list[Sample], list[Sample]]:
        """Return the texts of a group to learn from, and those held out."""
        return list(self._learnt.get(group, ())), list(self._held_out.get(group, ()))

    def _add(self, group: int, sample: Sample) -> None:
        if not group:
            self._drop(1, "skipped")
            return
        self._taken += 1
        held_out = self._taken % _HELD_OUT_EVERY == 0
        texts, most = (self._held_out, _HELD_OUT) if held_out else (self._learnt, _LEARNT)
        texts.setdefault(group, deque(maxlen=most)).append(sample)

    def _pop(self, session: str) -> list[Sample]:
        samples = self._pending.pop(session, [])
        self._waiting -= len(samples)
        return samples
