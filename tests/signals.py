"""What tests read of signals: the counters of a registry, and the streams of a Redis."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry
from redis import Redis

from coppice.adaptation.signals import QueryRecord, Sample, read_query, read_sample, redis_key
from coppice.telemetry import scrape


@dataclass
class Counts:
    """Records of one process so far."""

    produced: int = 0
    sent: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def settled(self) -> bool:
        """Whether every record was sent or dropped."""
        return self.produced == self.sent + self.dropped.total()


def counts(source: CollectorRegistry | str) -> Counts:
    """Of a registry of this process, or of another's HOST:PORT of metrics."""
    own = [] if isinstance(source, str) else source.collect()
    told = Counts()
    for sample in scrape(source) if isinstance(source, str) else (each for family in own for each in family.samples):
        if sample.name == "coppice_signals_produced_total":
            told.produced += int(sample.value)
        elif sample.name == "coppice_signals_sent_total":
            told.sent += int(sample.value)
        elif sample.name == "coppice_signals_dropped_total":
            told.dropped[sample.labels["reason"]] += int(sample.value)
    return told


def eventually(claim: Callable[[], bool], within_s: float = 20.0) -> bool:
    """Whether it holds before the time is over."""
    until = time.monotonic() + within_s
    while not (held := claim()) and time.monotonic() < until:
        time.sleep(0.05)
    return held


async def holds(claim: Callable[[], bool], within_s: float = 20.0) -> bool:
    """The same, while the loop goes on."""
    return await asyncio.to_thread(eventually, claim, within_s)


def queries(redis: Redis, head: str) -> list[QueryRecord]:
    """All query records of a head's stream."""
    entries: Any = redis.xrange(redis_key(head, "queries"))
    return [read_query(fields) for _, fields in entries]


def samples(redis: Redis, head: str) -> list[Sample]:
    """All samples of a head's stream."""
    entries: Any = redis.xrange(redis_key(head, "samples"))
    return [read_sample(fields) for _, fields in entries]
