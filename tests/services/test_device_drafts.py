"""Drafts on a device, which is pretended: what they copy and wait for, and that they are the CPU's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coppice.config.sections import FEATURE_KINDS, DrafterSettings
from coppice.heads.base import DraftJob, served_head
from coppice.heads.feature_head import FeatureHead
from coppice.speculation.sampling import SamplingParams
from coppice.wire.drafter import Advance
from tests.pretend import Counts, pretending
from tests.tiny import make_target
from tests.unit.test_feature_heads import Text, assert_same, drafted, opened, save_random

LENGTH, NEW, BUDGET, DEPTH = 40, 3, 30, 4
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8, seed=2**63 + 5)
SAMPLINGS = {"greedy": [GREEDY], "mixed": [GREEDY, SAMPLED]}
COPIES = {"specblock": (2, 2), "eagle3": (DEPTH, DEPTH), "lm": (DEPTH, DEPTH)}
"""of a draft, to the device and back: one of each for every forward; the places of noise are one more"""


def head_of(kind: str, folder: Path, target: Path, device: str) -> Any:
    """A head of random weights."""
    torch.set_num_threads(1)
    path = make_target(folder / kind, 96, tokenizer=False) if kind == "lm" else save_random(folder / kind, kind)
    own = path if kind == "mtp" else target
    settings = DrafterSettings(
        kind=kind, path=str(path), target=str(own), kv_tokens=4096, depth=DEPTH, device=device, dtype="float32"
    )
    return served_head(settings)


def drafts(head: FeatureHead, samplings: Sequence[SamplingParams], counts: Counts | None = None) -> list[Any]:
    """The trees of two steps of a session for each sampling; the device's counts are those of the second."""
    texts = [Text.random(60 + at, at, len(head.description.feature_layers) or 3) for at in range(len(samplings))]
    for key, text in enumerate(texts):
        opened(head, key, text, LENGTH + key % 3)
    trees = []
    for step in range(2):
        jobs = []
        for key, (text, sampling) in enumerate(zip(texts, samplings, strict=True)):
            length = LENGTH + key % 3 + step * NEW
            if step:
                old = length - NEW
                head.advance(key, Advance(text.ids[old:length], text.inline(old, length)))
            jobs.append(DraftJob(key, text.ids[length], length, BUDGET, sampling))
        if counts is not None:
            drafted(head, jobs)  # the same once more: inputs of this size are made now
            counts.clear()
        trees += drafted(head, jobs)
    for key in range(len(texts)):
        head.close(key)
    assert head.forward_ns > 0
    return trees


SEEDED = [SAMPLINGS["mixed"][at % 2].model_copy(update={"seed": at}) for at in range(5)]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*FEATURE_KINDS, "lm"])
def test_drafts_are_those_of_the_cpu(kind: str, target: Path, tmp_path: Path) -> None:
    made, expected = (drafts(head_of(kind, tmp_path, target, device), SEEDED) for device in ("cuda", "cpu"))
    for tree, other in zip(made, expected, strict=True):
        assert_same(tree, other, BUDGET)
        assert len(tree) > 3


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize(("sessions", "name"), [(1, "greedy"), (12, "mixed")])
def test_drafts_copy_once_each_way_a_forward(kind: str, sessions: int, name: str, target: Path, tmp_path: Path) -> None:
    """The features of all sessions are in the first one."""
    samplings = [SAMPLINGS[name][-1 - at % len(SAMPLINGS[name])] for at in range(sessions)]
    with pretending() as counts:
        drafts(head_of(kind, tmp_path, target, "cuda"), samplings, counts)
        measured = replace(counts)
    to_device, to_host = COPIES[kind]
    to_device += name == "mixed"
    assert (measured.copies, measured.waits) == ((to_device, to_host), 0)
