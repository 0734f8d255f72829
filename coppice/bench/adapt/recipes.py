"""Recipes: ways to train a head on recorded answers of the target, those of the adapter's policies and others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from coppice.adaptation.fitting import BATCH, RATE, fit
from coppice.adaptation.learner import Learner
from coppice.adaptation.records import Kind
from coppice.bench.adapt.adapt import DEMO_FLAGS
from coppice.bench.adapt.low_rank import LowRankLearner
from coppice.bench.adapt.recorded import Recorded, miss_samples, text_sample

UPDATES: dict[Kind, int] = {kind: int(DEMO_FLAGS[f"adapter.{kind}_samples"]) for kind in ("head", "full")}
"""samples of an update from misses"""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One way to train a head that begins as it was deployed."""

    layers: Literal["head", "full", "low-rank"]
    """`head`: those that a head-only update changes; `low-rank`: deltas of rank 8 to all matrices"""
    misses: bool = False
    """whether it learns from misses, as policy `paper` does; else from whole texts, as policy `bandit` does"""
    rate: float = RATE
    """of whole texts"""
    batch: int = BATCH
    """texts of an optimiser step; 0: all of them"""
    mixed: bool = False
    """whether texts that the head was trained for are learnt beside the others"""


RECIPES = {
    "head-misses": Recipe("head", misses=True),
    "head-texts": Recipe("head", rate=1e-2),
    "low-rank": Recipe("low-rank", rate=1e-2),
    "full-misses": Recipe("full", misses=True),
    "full-texts": Recipe("full"),
    "full-mixed": Recipe("full", mixed=True),
    "full-large-steps": Recipe("full", batch=0),
}


@dataclass(frozen=True)
class Trained:
    """What a recipe made of a head."""

    tensors: dict[str, Tensor]
    """all that differ from the deployed weights"""
    seconds: float
    """of processor time; torch has one thread"""


def train(
    recipe: Recipe, folder: Path, target: Path, texts: Sequence[Recorded], familiar: Sequence[Recorded]
) -> Trained:
    """Train a head of `folder` on texts; `familiar` ones are read by recipes that mix them in."""
    learner = (LowRankLearner if recipe.layers == "low-rank" else Learner)(folder, target)
    if recipe.misses:
        seconds = _learn_misses(learner, "head" if recipe.layers == "head" else "full", texts)
    else:
        if recipe.layers == "head":
            learner.student.requires_grad_(False)
            for part in learner.parts("head"):
                part.requires_grad_(True)
        samples = [text_sample(one) for one in [*texts, *(familiar if recipe.mixed else ())]]
        began = time.process_time()
        fit(learner, {}, samples, (), lambda: None, rate=recipe.rate, batch=recipe.batch or len(samples))
        seconds = time.process_time() - began
    return Trained(learner.changed(), seconds)


def _learn_misses(learner: Learner, kind: Kind, texts: Sequence[Recorded]) -> float:
    """Make updates from every miss, the last one from fewer samples; returns the seconds."""
    samples = [sample for one in texts for sample in miss_samples(kind, one)]
    if kind == "head":
        samples = [sample for sample in samples if sample.target_id in learner.vocabulary.target_ids]
    began = time.process_time()
    for at in range(0, len(samples), UPDATES[kind]):
        learner.step(kind, samples[at : at + UPDATES[kind]])
    return time.process_time() - began
