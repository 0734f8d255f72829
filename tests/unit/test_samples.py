"""Samples as a drafter makes them: of what is committed, every position once, and none that nobody asked for."""

from __future__ import annotations

from typing import Any

import numpy as np

from coppice.adaptation.signals import Sample
from coppice.speculation.sampling import SamplingParams
from coppice.wire.common import Features
from coppice.wire.drafter import Advance, OpenDraft
from services.drafter.worker import WINDOW, Samples

WIDTH, PROMPT = 3, 10


class Taken:
    """Stands for the producer: wants something, keeps what it is given."""

    def __init__(self, demand: str) -> None:
        self.demand = demand
        self.samples: list[Sample] = []

    def demand_for(self, head: str) -> str:
        assert head == "a"
        return self.demand

    def sample(self, head: str, sample: Sample) -> None:
        assert head == "a"
        self.samples.append(sample)


def features(start: int, count: int) -> Features:
    rows = np.arange(start, start + count, dtype="<f4").repeat(WIDTH)
    return Features(start, count, "float32", rows.tobytes())


def sampled(demand: str, end: int) -> list[Sample]:
    """A text whose token at position p is p, committed one by one behind a prompt of ten tokens."""
    taken: Any = Taken(demand)
    samples = Samples(taken, "a")
    samples.open(0, OpenDraft("s", list(range(PROMPT)), SamplingParams(), features=features(0, PROMPT)))
    for position in range(PROMPT, end):
        samples.advance(0, Advance([position], features(position, 1)))
    samples.close(0)
    return taken.samples  # type: ignore[no-any-return]


def test_nothing_is_sent_that_nobody_asked_for() -> None:
    assert sampled("", 300) == []


def test_texts_hold_every_position_once_and_a_short_end_with_what_was_before_it() -> None:
    whole = [list(range(PROMPT, PROMPT + WINDOW)), list(range(PROMPT + WINDOW, PROMPT + 2 * WINDOW))]
    texts = sampled("texts", PROMPT + 2 * WINDOW + 15)
    assert [sample.tokens.tolist() for sample in texts] == whole  # the rest is too short to be worth a sample
    for sample in texts:
        assert sample.feature_rows()[:, 0].tolist() == sample.tokens[:-1].tolist()
        assert sample.session == "s"
    assert [sample.tokens.tolist() for sample in sampled("misses", 28)] == [list(range(28))]
