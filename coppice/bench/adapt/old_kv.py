"""What rows that older weights left in a session's KV cost after a swap: drafting along known texts, swapped midway."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coppice.adaptation.learner import Learner
from coppice.adaptation.records import Sample
from coppice.bench.paper.replay import Replay, replay
from coppice.config.sections import DrafterSettings
from coppice.heads.checkpoints import read_output
from coppice.heads.feature_head import FeatureHead
from coppice.heads.registry import build_head
from coppice.stack.spec import HeadSpec
from coppice.training.data.target_answers import Lesson
from coppice.weights.versions import Weights, pack_update

WAYS = ("old weights", "swapped midway, old KV kept", "new weights, KV of their own")
_TOP = 16


def window_samples(texts: Sequence[tuple[Lesson, int]], width: int, stride: int, output: Tensor) -> list[Sample]:
    """Full samples of at most `width` positions behind every `stride`-th token of the answers.

    They are what a drafter would send that missed there; output: (V, H), the target's output matrix.
    """
    found = []
    for text, prompt in texts:
        for position in range(prompt + stride, len(text.ids), stride):
            start = max(0, position - width)
            log_probs, ids = (text.final[position - 1].float() @ output.T).log_softmax(-1).topk(_TOP)
            found.append(
                Sample(
                    kind="full",
                    version=0,
                    session="replay",
                    position=position,
                    target_id=int(text.ids[position]),
                    miss=1.0,
                    tail=float(1 - log_probs.exp().sum()),
                    top_ids=ids.numpy(),
                    top_log_probs=log_probs.numpy(),
                    hidden=np.zeros(1, np.float32),
                    tokens=text.ids[start : position + 1].numpy().astype(np.int64),
                    features=text.features[start:position].float().numpy().tobytes(),
                )
            )
    return found


def learnt(head: HeadSpec, target: Path, texts: Sequence[tuple[Lesson, int]], updates: int) -> Learner:
    """The head after so many full updates on shares of the texts."""
    learner = Learner(str(head.path), target)
    samples = window_samples(texts, 32, 16, read_output(target).float())
    for share in np.array_split(np.arange(len(samples)), updates):
        learner.step("full", [samples[number] for number in share])
    return learner


def old_kv(
    head: HeadSpec, target: Path, learner: Learner, texts: Sequence[tuple[Lesson, int]], budget: int, threads: int
) -> dict[str, Replay]:
    """Drafts along the second half of each answer in each of the ways."""
    settings = DrafterSettings(kind=head.kind, name=head.name, path=str(head.path), target=str(target), threads=threads)
    found = dict.fromkeys(WAYS, Replay())
    for text, prompt in texts:
        middle = (prompt + len(text.ids)) // 2
        for way in WAYS:
            served: Any = build_head(settings)
            new = served.weights.changed(learner.changed(), 1)
            if way == WAYS[2]:
                swap(served, new)

            def halfway(way: str = way, served: FeatureHead[Any] = served, new: Weights = new) -> None:
                if way == WAYS[1]:
                    swap(served, new)

            found[way] += replay(served, text, prompt, budget, middle, halfway)
    return found


@torch.no_grad()
def swap(head: FeatureHead[Any], weights: Weights, parent: Weights | None = None) -> None:
    """Put weights to use as a push would that starts from `parent`, None: from those in use."""
    header, parts = pack_update(head.description.name, parent or head.weights, weights)
    staging = head.staging(header)
    for part in parts:
        staging.add(part)
    swapping = head.prepare_swap(staging)
    swapping.swap()
    swapping.release()
