"""Samples until their query says what they are for (SpecBlock, algorithm 1, line 10)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from coppice.adaptation.records import Sample

from .buffers import Drop

SESSIONS = 512
"""Sessions whose samples wait for their query's end, and ended queries whose late samples are still sorted"""
SAMPLES = 2048
"""Samples that wait for their query's end"""

Use = TypeVar("Use")
"""What the samples of a query are for"""


class Sorting(Generic[Use]):
    """Hands on a head's samples once their query has ended, with what they are for."""

    def __init__(self, keep: Callable[[Use, Sample], None], drop: Drop) -> None:
        self._keep, self._drop = keep, drop
        self._pending: OrderedDict[str, list[Sample]] = OrderedDict()
        self._waiting = 0
        self._decided: OrderedDict[str, Use] = OrderedDict()

    def take(self, sample: Sample) -> None:
        """Keep a sample until `claim`; one that comes after it is handed on at once."""
        if sample.session in self._decided:
            self._keep(self._decided[sample.session], sample)
            return
        self._pending.setdefault(sample.session, []).append(sample)
        self._pending.move_to_end(sample.session)
        self._waiting += 1
        while len(self._pending) > SESSIONS or self._waiting > SAMPLES:
            self._drop(len(self._pop(next(iter(self._pending)))), "unclaimed")

    def claim(self, session: str, use: Use) -> None:
        """Hand on the samples of a query that ended."""
        self._decided[session] = use
        if len(self._decided) > SESSIONS:
            self._decided.popitem(last=False)
        for sample in self._pop(session):
            self._keep(use, sample)

    def _pop(self, session: str) -> list[Sample]:
        samples = self._pending.pop(session, [])
        self._waiting -= len(samples)
        return samples
