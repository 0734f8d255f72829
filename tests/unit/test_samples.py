"""Samples as a drafter makes them: what is asked for, no more of a text than a window, and no window twice."""

from __future__ import annotations

from typing import Any

import numpy as np

from coppice.adaptation.records import Sample
from coppice.heads.base import Miss
from coppice.wire.common import Features, Rejection
from services.drafter.samples import Samples

WIDTH, PROMPT = 3, 10


class Taken:
    """Stands for the producer: wants a kind, keeps what it is given."""

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


def offered(demand: str, positions: list[int], window: int = 6, stride: int = 4) -> list[Sample]:
    """A text whose token at position p is p, missed at some positions after a prompt of ten tokens."""
    taken: Any = Taken(demand)
    samples = Samples(taken, "a", window, stride)
    text = samples.window()
    text.append(list(range(PROMPT)), features(0, PROMPT))
    for position in range(PROMPT, max(positions) + 1):
        if position in positions:  # told with the advance that ends before it
            rejection = Rejection(position, 0, position, np.array([position]), np.array([-0.5], np.float32), 0.2)
            samples.offer("s", text, 1, rejection, Miss(0.75, np.ones(4, np.float32)))
        text.append([position], features(position, 1))
    return taken.samples  # type: ignore[no-any-return]


def test_features_of_no_position_are_nothing_to_take() -> None:
    text = Samples(Taken("full"), "a", 6, 4).window()  # type: ignore[arg-type]
    text.append([1, 2], Features(0, 0, "float32", b"1234"))
    assert text.upto(0) == ([], b"")


def test_nothing_is_sent_that_nobody_asked_for() -> None:
    assert offered("", [11, 12, 15]) == []


def test_a_full_sample_holds_the_window_before_the_miss_and_the_next_one_begins_a_stride_later() -> None:
    found = offered("full", [11, 13, 14, 15, 18, 19])
    assert [sample.position for sample in found] == [14, 18]  # the prompt ends at 10
    for sample in found:
        assert sample.tokens.tolist() == list(range(sample.position - 6, sample.position + 1))
        assert sample.feature_rows()[:, 0].tolist() == list(range(sample.position - 6, sample.position))
        assert (sample.target_id, sample.miss, sample.hidden.tolist()) == (sample.position, 0.75, [1.0] * 4)


def test_head_samples_are_small_and_of_every_miss() -> None:
    found = offered("head", [11, 12, 13])
    assert [sample.position for sample in found] == [11, 12, 13]
    assert all(not len(sample.tokens) and not sample.features for sample in found)
    assert [sample.as_head() == sample or sample.as_head().kind for sample in offered("full", [14])] == ["head"]


def test_texts_hold_every_position_once_and_nothing_of_misses() -> None:
    taken: Any = Taken("text")
    samples = Samples(taken, "a", 20, 4)
    text = samples.window()
    text.append(list(range(PROMPT)), features(0, PROMPT))
    for position in range(PROMPT, 57):
        rejection = Rejection(position, 0, position, np.array([position]), np.array([-0.5], np.float32), 0.2)
        samples.offer("s", text, 1, rejection, Miss(0.75, np.ones(4, np.float32)))
        text.append([position], features(position, 1))
        samples.offer_text("s", text, 1, ended=False)
    samples.offer_text("s", text, 1, ended=True)
    assert [sample.tokens.tolist() for sample in taken.samples] == [
        list(range(10, 30)),
        list(range(30, 50)),
    ]  # the rest is too short to be worth a sample
    for sample in taken.samples:
        assert sample.feature_rows()[:, 0].tolist() == sample.tokens[:-1].tolist()
        assert (len(sample.hidden), len(sample.top_ids), sample.miss) == (0, 0, 0.0)
    short = samples.window()
    short.append(list(range(PROMPT)), features(0, PROMPT))
    short.append(list(range(PROMPT, 28)), features(PROMPT, 18))
    samples.offer_text("t", short, 1, ended=True)
    assert taken.samples[-1].tokens.tolist() == list(range(8, 28))
