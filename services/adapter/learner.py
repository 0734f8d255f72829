"""The training copy of a head: updates from what it missed, held near the head as it was deployed.

SpecBlock, section 3.4 and algorithm 1, line 14: a step on the adaptation loss plus lambda KL(p_theta || p_theta0).
"""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coppice.adaptation.records import Kind, Sample
from coppice.config.adaptation import LearnerSettings
from coppice.config.sections import ADAPTED_KINDS
from coppice.errors import InvalidField
from coppice.heads.checkpoints import kind_in, load_head, public_weights
from coppice.heads.ranking import target_ids
from coppice.training.feature_heads import LOSSES
from coppice.training.losses import (
    DECAY,
    Anchor,
    HeadLoss,
    Student,
    bucket_of,
    divergence,
    overlap,
    soft_loss,
)
from coppice.training.run_folder import load_optimisers, optimiser_tensors
from coppice.weights.versions import weights_hash

from .atomic import BadFile, read_safetensors, replace_safetensors
from .windows import DraftVocabulary, Windows

BETAS = (0.9, 0.95)
KINDS: tuple[Kind, ...] = ("head", "full")
_JUDGES = ("rank_head", "confidence_head")
_JUDGED = 16  # windows, the latest ones, that weights are compared on


@dataclass(frozen=True)
class Update:
    """The result of one update. Losses are of the adaptation alone, in nats, without penalty, rank head or mask."""

    samples: int
    """how many it learned from"""
    loss_before: float
    loss_after: float
    seconds: float


class Interrupted(RuntimeError):
    """An update was given up, as the process is to end."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How an update learns, beside its rates."""

    head_passes: int = 1
    """times that a head-only update reads its samples"""
    full_passes: int = 2
    """times that a full update reads its samples"""
    batch: int = 8
    """samples of each optimiser step"""
    clip: float = 0.5
    """largest norm of a gradient"""
    penalty: float = 0.01
    """lambda, weight of the KL to the head as it was deployed"""
    blocks: int = 1
    """blocks that a SpecBlock head learns from each row"""
    steps: int = 7
    """steps that an EAGLE-3 head learns from each row"""
    every: int = 4
    """later blocks start from every so many rows"""


class Learner:
    """A head in training and its frozen copy, with an optimiser for each kind of update that keeps its moments."""

    def __init__(
        self,
        folder: str | Path,
        target: str | Path,
        settings: LearnerSettings | None = None,
        recipe: Recipe = Recipe(),
    ) -> None:
        """Load the head of `folder` for the target of another folder. Raises InvalidField."""
        self.settings, self.recipe = settings or LearnerSettings(), recipe
        self.kind = kind_in(folder)
        if self.kind not in ADAPTED_KINDS:
            kinds = ", ".join(ADAPTED_KINDS)
            raise InvalidField("adapter.heads", f"{folder} is a {self.kind} head; adapted are {kinds}, no others")
        loaded = load_head(self.kind, folder, target)
        self.config = loaded.config
        embedding = loaded.embedding.to(self.settings.device)
        self.student = Student(loaded.model.to(self.settings.device), embedding)
        self.frozen = Student(copy.deepcopy(loaded.model).requires_grad_(False), embedding)
        draft_ids = target_ids(loaded.model, loaded.config).to(self.settings.device)
        self.vocabulary = DraftVocabulary(draft_ids, loaded.config.vocab_size)
        self.updates: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self._optimisers = {kind: self._optimiser(kind) for kind in KINDS}
        self.stopped = threading.Event()
        """set by another thread: no more optimiser steps"""

    # --- weights ---

    def tensors(self) -> dict[str, Tensor]:
        """Return the training copy's float tensors by their public names: views, not copies."""
        return public_weights(self.student.model, self.config)

    def deployed(self) -> dict[str, Tensor]:
        """Return the frozen copy's tensors: version 0."""
        return public_weights(self.frozen.model, self.config)

    def changed(self) -> dict[str, Tensor]:
        """Return copies, on the CPU, of all tensors that differ from version 0."""
        return differing(self.deployed(), self.tensors())

    @torch.no_grad()
    def revert(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Go back to version 0 with these tensors in the place of its own; optimisers forget their moments.

        Raises ValueError, changing nothing, when a tensor is not the head's or not finite.
        """
        own, given = self.tensors(), dict(tensors or {})
        for name, tensor in given.items():
            if name not in own or own[name].shape != tensor.shape or not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name} is no finite tensor of this head")
        for name, was in self.deployed().items():
            own[name].copy_(given.get(name, was))
        self._optimisers = {kind: self._optimiser(kind) for kind in KINDS}

    def parts(self, kind: Kind) -> list[nn.Module]:
        """Return the modules that an update of a kind may change."""
        model: Any = self.student.model
        if kind == "full":
            return [model]
        taught = "lm_head" if getattr(model, "markov_head", None) is None else "markov_head"
        return [part for name in (taught, *_JUDGES) if (part := getattr(model, name, None)) is not None]

    def _optimiser(self, kind: Kind) -> torch.optim.AdamW:
        rate = self.settings.head_rate if kind == "head" else self.settings.full_rate
        weights = [weight for part in self.parts(kind) for weight in part.parameters()]
        return torch.optim.AdamW(weights, lr=rate, betas=BETAS, weight_decay=0.0)

    # --- updates ---

    def step(self, kind: Kind, samples: Sequence[Sample], *, anchored: bool = True) -> Update:
        """Learn from one or more samples of the kind; those of a head update must be of draft ids.

        anchored=False leaves the penalty out (online distillation).

        Raises FloatingPointError when the loss or a weight is not finite: the weights are then as they were. Raises
        Interrupted once `stopped` is set, with the update half done.
        """
        began = time.perf_counter()
        was = {name: tensor.detach().clone() for name, tensor in self.tensors().items()}
        learn: Any = self._learn_head if kind == "head" else self._learn_full
        before, after = learn(samples, self.recipe.penalty if anchored else 0.0)
        if not all(
            bool(torch.isfinite(tensor).all()) for tensor in (torch.tensor([before, after]), *self.tensors().values())
        ):
            with torch.no_grad():
                for name, tensor in self.tensors().items():
                    tensor.copy_(was[name])
            self._optimisers[kind] = self._optimiser(kind)
            raise FloatingPointError(f"a {kind} update of {len(samples)} samples is not finite")
        self.updates[kind] += 1
        return Update(len(samples), before, after, time.perf_counter() - began)

    def _learn_head(self, samples: Sequence[Sample], penalty: float) -> tuple[float, float]:
        """Teach the output layer or the Markov table the target's distributions, then the rank head or the confidence
        head: what they judge has moved.
        """
        model: Any = self.student.model
        before_it = torch.tensor([one.previous_id for one in samples], device=self.settings.device)
        hidden = torch.from_numpy(np.stack([one.hidden for one in samples])).to(self.settings.device).float()
        taught = torch.stack([self.vocabulary.log_probs(one) for one in samples])
        gold = torch.tensor([self.vocabulary.number_of(one.target_id) for one in samples], device=hidden.device)
        with torch.no_grad():
            deployed: Any = self.frozen.model
            near = _logits(deployed, hidden, before_it)
            before = soft_loss(_logits(model, hidden, before_it), taught).item()
        batches = list(self._batches("head", len(samples)))
        for rows in batches:
            logits = _logits(model, hidden[rows], before_it[rows])
            self._descend("head", soft_loss(logits, taught[rows]) + penalty * divergence(logits, near[rows]))
        with torch.no_grad():
            logits = _logits(model, hidden, before_it)
        if getattr(model, "confidence_head", None) is not None:
            chances = overlap(logits, taught)
            for rows in batches:
                said = model.confidence(hidden[rows], before_it[rows])
                self._descend("head", F.binary_cross_entropy_with_logits(said, chances[rows]))
        if hasattr(model, "rank_head"):
            buckets = bucket_of(logits, gold)
            for rows in batches:
                self._descend("head", F.cross_entropy(model.rank(hidden[rows], logits[rows]).float(), buckets[rows]))
        return before, soft_loss(logits, taught).item()

    def _learn_full(self, samples: Sequence[Sample], penalty: float) -> tuple[float, float]:
        """Teach every slot of every row of the windows, under the mask that it is served with.

        An anchored update begins with the deployed weights where they know these windows better than what was learnt
        since: traffic that comes back finds them as they were.
        """
        windows = Windows(samples, self.vocabulary)
        positions, loss = windows.positions, self.loss_on(windows)
        judged = positions[-_JUDGED:]
        before = self._judged(self.student, loss, judged)
        if penalty and self.changed() and self._judged(self.frozen, loss, judged) < before:
            self.revert()
        anchored = replace(loss, anchor=Anchor(self.frozen, penalty)) if penalty else loss
        for rows in self._batches("full", len(samples)):
            self._descend("full", anchored(self.student, positions[rows], positions[rows]))
        return before, self._judged(self.student, loss, judged)

    def loss_on(self, windows: Windows) -> HeadLoss:
        if self.config.slots == 1:
            return HeadLoss(windows, blocks=self.recipe.steps, decay=DECAY)
        if self.kind == "dspark":  # of a text's own tokens cross-entropy teaches several times as much as L1
            return HeadLoss(windows, **LOSSES[self.kind] | {"every": self.recipe.every, "distance": soft_loss})
        return HeadLoss(windows, blocks=self.recipe.blocks, every=self.recipe.every)

    @torch.no_grad()
    def _judged(self, student: Student, loss: HeadLoss, positions: Tensor) -> float:
        """Return the mean loss over texts, on rows that do not depend on how good the head is."""
        judge = replace(loss, rank_on=lambda: False, cut=self.config.slots)
        parts = torch.split(positions, self.recipe.batch)
        total: float = sum(judge(student, part, part).item() * len(part) for part in parts)
        return total / len(positions)

    def _batches(self, kind: Kind, count: int) -> Iterator[Tensor]:
        """Yield the rows of each optimiser step: every sample once a pass, in an order of the update's number."""
        order = torch.Generator().manual_seed(self.updates[kind])
        for _ in range(self.recipe.head_passes if kind == "head" else self.recipe.full_passes):
            for rows in torch.split(torch.randperm(count, generator=order), self.recipe.batch):
                yield rows.to(self.settings.device)

    def _descend(self, kind: Kind, loss: Tensor) -> None:
        if self.stopped.is_set():
            raise Interrupted("an update was given up")
        optimiser = self._optimisers[kind]
        self.student.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        weights = [weight for group in optimiser.param_groups for weight in group["params"]]
        nn.utils.clip_grad_norm_(weights, self.recipe.clip, foreach=True)
        optimiser.step()
        self.student.zero_grad(set_to_none=True)

    # --- restart ---

    def save(self, file: Path) -> None:
        """Write what the next update depends on beside the weights as one file, complete or not at all."""
        tensors: dict[str, Tensor] = {}
        for kind, optimiser in self._optimisers.items():
            held = optimiser_tensors([optimiser], dict(self.student.model.named_parameters()))
            tensors |= {f"{kind}|{name}": tensor for name, tensor in held.items()}
        weights, digest = (weights_hash(each).hex() for each in (self.tensors(), tensors))
        facts = {"updates": self.updates, "weights": weights, "tensors": digest}
        replace_safetensors(file, tensors, {"state": json.dumps(facts)})

    def load(self, file: Path) -> None:
        """Go on from what `save` wrote beside the weights that the training copy has.

        Raises BadFile, changing nothing, for a damaged file or one of other weights.
        """
        tensors, metadata = read_safetensors(file)
        try:
            facts = json.loads(metadata["state"])
            updates: dict[Kind, int] = {kind: int(facts["updates"][kind]) for kind in KINDS}
            weights, digest = facts["weights"], facts["tensors"]
        except (KeyError, ValueError, TypeError) as error:
            raise BadFile(f"{file}: {error}") from None
        if weights != weights_hash(self.tensors()).hex():
            raise BadFile(f"{file} is of other weights")
        if digest != weights_hash(tensors).hex():
            raise BadFile(f"{file} is damaged")
        parameters: dict[str, Tensor] = dict(self.student.model.named_parameters())
        for kind, optimiser in self._optimisers.items():
            begin = f"{kind}|"
            own = {name.removeprefix(begin): one for name, one in tensors.items() if name.startswith(begin)}
            load_optimisers([optimiser], parameters, own)
        self.updates = updates


def _logits(model: Any, hidden: Tensor, previous: Tensor) -> Tensor:
    """Return the (n, D) logits that (n, hidden) normed states give behind (n,) tokens."""
    logits: Tensor = model.lm_head(hidden)
    return logits if getattr(model, "markov_head", None) is None else logits + model.bias(previous)


def differing(was: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies, on the CPU, of the tensors that are not bit for bit what they were."""
    return {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in now.items()
        if not torch.equal(tensor.view(torch.int32), was[name].view(torch.int32))
    }
