"""Drafts on a device, which is pretended: what they copy and wait for, and that they are the CPU's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from coppice.config.sections import FEATURE_KINDS, TRAINED_KINDS, DrafterSettings
from coppice.engine.engine import Clock, Engine
from coppice.engine.kv_cache import KVPool
from coppice.heads.base import DraftJob, served_head
from coppice.heads.feature_head import FeatureHead
from coppice.heads.lm import LanguageModelHead
from coppice.heads.tree import Ranking
from coppice.speculation.sampling import SamplingParams
from coppice.wire.drafter import Advance
from tests.pretend import DEVICE, Counts, move, pretending
from tests.unit.test_feature_heads import Text, assert_same, drafted, opened, save_random

LENGTH, NEW, BUDGET, DEPTH = 40, 3, 30, 4
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8, seed=2**63 + 5)
SAMPLINGS = {"greedy": [GREEDY], "mixed": [GREEDY, SAMPLED]}
COPIES = {"specblock": (2, 2), "eagle3": (DEPTH, DEPTH), "lm": (DEPTH, DEPTH)}
"""of a draft, to the device and back: one of each for every forward; the places of noise are one more"""


def head_of(kind: str, folder: Path, target: Path, *, there: bool) -> Any:
    """A head on the CPU, or moved to the device of this thread."""
    torch.set_num_threads(1)
    if kind == "lm":
        return language_model(target, there=there)
    path = save_random(folder / kind, kind)
    target = path if kind == "mtp" else target
    settings = DrafterSettings(kind=kind, path=str(path), target=str(target), kv_tokens=4096, depth=DEPTH)
    with pytest.MonkeyPatch.context() as patch:
        if there:
            patch.setattr("coppice.heads.feature_head.prepack", lambda _: None)  # which CPUs alone do
        head: Any = served_head(settings)
    if there:
        move(head.model)
        for part in head.model.modules():
            if getattr(part, "frozen", None) is not None:
                part.frozen = part.frozen.to(DEVICE)
        head.pool, head.device = (
            KVPool(layers=head.model.kv_shapes, tokens=head.pool.free_tokens, device=DEVICE),
            torch.device(DEVICE),
        )
        head.embedding = head.embedding.to(DEVICE)
        head.ranking = Ranking(head.ranking.target_ids.to(DEVICE))
        head.timed = Clock(DEVICE)
    return head


def language_model(target: Path, *, there: bool) -> Any:
    """The target as its own drafter."""

    def load(path: str, *, kv_tokens: int, **_: object) -> Engine:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return Engine(move(model) if there else model, kv_tokens=kv_tokens)

    settings = DrafterSettings(kind="lm", path=str(target), device="cuda" if there else "cpu", depth=DEPTH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coppice.heads.lm.load_engine", load)
        return LanguageModelHead(settings)


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


@pytest.mark.parametrize("kind", [*FEATURE_KINDS, "lm"])
def test_drafts_are_those_of_the_cpu(kind: str, target: Path, tmp_path: Path) -> None:
    expected = drafts(head_of(kind, tmp_path, target, there=False), SEEDED)
    with pretending() as counts:
        made = drafts(head_of(kind, tmp_path, target, there=True), SEEDED, counts)
    for tree, other in zip(made, expected, strict=True):
        assert_same(tree, other, BUDGET)
        assert len(tree) > 3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", TRAINED_KINDS)
def test_drafts_on_a_gpu_are_those_of_the_cpu(kind: str, target: Path, tmp_path: Path) -> None:
    expected = drafts(head_of(kind, tmp_path, target, there=False), SEEDED)
    told = DrafterSettings(kind=kind, path=str(tmp_path / kind), target=str(target), kv_tokens=4096, depth=DEPTH)
    head: Any = served_head(told.model_copy(update={"device": "cuda"}))
    for tree, other in zip(drafts(head, SEEDED), expected, strict=True):
        assert_same(tree, other, BUDGET)


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize(("sessions", "name"), [(1, "greedy"), (12, "mixed")])
def test_drafts_copy_once_each_way_a_forward(kind: str, sessions: int, name: str, target: Path, tmp_path: Path) -> None:
    """The features of all sessions are in the first one."""
    samplings = [SAMPLINGS[name][-1 - at % len(SAMPLINGS[name])] for at in range(sessions)]
    with pretending() as counts:
        drafts(head_of(kind, tmp_path, target, there=True), samplings, counts)
        measured = replace(counts)
    to_device, to_host = COPIES[kind]
    to_device += name == "mixed"
    assert (measured.copies, measured.waits) == ((to_device, to_host), 0)
