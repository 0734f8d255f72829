"""Recipes: ways to train a head on recorded answers of the target, those of the adapter's policies and others."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from coppice.adaptation.fitting import BATCH, RATE, fit
from coppice.adaptation.learner import Learner
from coppice.adaptation.records import Kind, Sample
from coppice.bench.adapt.adapt import DEMO_FLAGS
from coppice.bench.paper.replay import Missed
from coppice.config.adaptation import AdaptationSettings
from coppice.heads.public_state import public_weights
from coppice.training.data.answerer import Answer

RANK = 8
WINDOW = AdaptationSettings().window
"""tokens of a text that is learnt as a whole, its last ones"""
MISS_WINDOW, STRIDE = int(DEMO_FLAGS["adaptation.window"]), int(DEMO_FLAGS["adaptation.stride"])
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
class Recorded:
    """An answer of the target, and what the head as deployed missed along it."""

    text: Answer
    prompt: int
    """tokens of its prompt"""
    misses: tuple[Missed, ...] = ()


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


class LowRankLearner(Learner):
    """Learns deltas of a low rank to the matrices of a head, and nothing else."""

    def __init__(self, folder: Path, target: Path) -> None:
        """Load the head of `folder` for the target of another folder. Raises InvalidField."""
        super().__init__(folder, target)
        model, generator = self.student.model.requires_grad_(False), torch.Generator().manual_seed(0)
        for name, layer in list(model.named_modules()):
            # The target's output layer is no parameter, and of so small a matrix a delta is as large.
            if type(layer) is nn.Linear and isinstance(layer.weight, nn.Parameter) and min(layer.weight.shape) > RANK:
                owner, _, own = name.rpartition(".")
                setattr(model.get_submodule(owner), own, _LowRank(layer, generator))

    def tensors(self) -> dict[str, Tensor]:
        """Return the deployed tensors by their public names with the deltas added: copies."""
        merged = deepcopy(self.frozen.model)
        with torch.no_grad():
            for name, layer in self.student.model.named_modules():
                if isinstance(layer, _LowRank):
                    merged.get_parameter(f"{name}.weight").add_(layer.up @ layer.down)
        return public_weights(merged, self.config)


class _LowRank(nn.Module):
    """A frozen layer, and the two factors of a delta that is 0 at first."""

    def __init__(self, layer: nn.Linear, generator: torch.Generator) -> None:
        super().__init__()
        self.layer = layer
        down = torch.randn(RANK, layer.in_features, generator=generator)
        self.down = nn.Parameter(down / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, RANK))

    def forward(self, states: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        out: Tensor = self.layer(states) + states @ self.down.T @ self.up.T
        return out
