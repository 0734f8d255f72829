"""What the adapter counts."""

from __future__ import annotations

from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class AdapterMetrics:
    """What the adapter counts, by head."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        named: dict[str, Any] = {"registry": self.registry, "namespace": "coppice", "subsystem": "adapter"}
        counter: Any = partial(Counter, **named)
        gauge: Any = partial(Gauge, **named)
        histogram: Any = partial(Histogram, **named)
        self.read = counter("records_read", "records read from Redis", ["head", "stream"])
        self.malformed = counter("records_malformed", "records that are not what they should be", ["head", "stream"])
        self.lost = counter("records_lost", "records that were sent and never read: trimmed or flushed", ["stream"])
        self.dropped = counter("samples_dropped", "samples that taught nothing", ["head", "reason"])
        self.actions = counter("actions", "what queries were used for", ["head", "action"])
        self.updates = counter("updates", "updates trained", ["head", "action"])
        self.failed = counter("updates_failed", "updates that changed nothing or were not finite", ["head", "reason"])
        self.reverts = counter("reverts", "times the weights were taken back", ["head", "reason"])
        self.signal = histogram("signal", "s of a query", ["head"], buckets=(0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500))
        self.waiting = gauge("samples_waiting", "texts to learn from, by kind of text or by buffer", ["head", "group"])
        self.active = gauge("active", "1 while it is the active adapter, 0 while it stands by")
        self.version = gauge("version", "version that is to be in use", ["head"])
        self.live = gauge("replica_version", "version in use", ["head", "replica"])
        self.stale = gauge("replicas_stale", "replicas that do not use the weights they are to use", ["head"])
        self.paused = gauge("paused", "1 while paused", ["head"])
        seconds = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0)
        self.train_seconds = histogram("train_seconds", "time of an update", ["head", "action"], buckets=seconds)
        self.sync_seconds = histogram(
            "sync_seconds", "time of a weight sync to all replicas", ["head"], buckets=seconds
        )
