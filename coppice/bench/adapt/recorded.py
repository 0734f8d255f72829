"""Recorded answers of the target, and the samples that a drafter would send of them while a head serves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from coppice.adaptation.records import Kind, Sample
from coppice.bench.adapt.adapt import DEMO_FLAGS
from coppice.bench.paper.replay import Missed
from coppice.config.adaptation import AdaptationSettings
from coppice.training.data.answerer import Answer

WINDOW = AdaptationSettings().window
"""tokens of a text that is learnt as a whole, its last ones"""
MISS_WINDOW, STRIDE = int(DEMO_FLAGS["adaptation.window"]), int(DEMO_FLAGS["adaptation.stride"])


@dataclass(frozen=True)
class Recorded:
    """An answer of the target, and what the head as deployed missed along it."""

    text: Answer
    prompt: int
    """tokens of its prompt"""
    misses: tuple[Missed, ...] = ()


def text_sample(one: Recorded) -> Sample:
    """The end of a text, as a drafter sends it where texts are wanted."""
    end = len(one.text.ids) - 1
    return _window(one.text, end, WINDOW - 1)


def miss_samples(kind: Kind, one: Recorded) -> Iterator[Sample]:
    """The misses along a text, as a drafter sends them; between those of full samples lie some positions."""
    sampled = one.prompt
    for missed in one.misses:
        position = missed[0].position
        if kind == "head":
            yield _window(one.text, position, MISS_WINDOW, missed).as_head()
        elif position >= sampled + STRIDE:
            sampled = position
            yield _window(one.text, position, MISS_WINDOW, missed)


def _window(text: Answer, position: int, most: int, missed: Missed | None = None) -> Sample:
    """A position of a text, and up to so many before it."""
    start = max(0, position - most)
    rejection, miss = missed or (None, None)
    return Sample(
        kind="full",
        version=0,
        session="recorded",
        position=position,
        target_id=int(text.ids[position]),
        miss=miss.value if miss else 0.0,
        tail=rejection.tail if rejection else 0.0,
        top_ids=rejection.top_ids if rejection else np.empty(0, np.int64),
        top_log_probs=rejection.top_log_probs if rejection else np.empty(0, np.float32),
        hidden=miss.hidden if miss else np.empty(0, np.float32),
        tokens=text.ids[start : position + 1].numpy().astype(np.int64),
        features=text.features[start:position].float().numpy().tobytes(),
        previous_id=miss.previous if miss else 0,
    )
