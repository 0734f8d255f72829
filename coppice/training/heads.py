"""Training a draft head: what a kind of head gives to a run, the run that all kinds share, and the kind `lm`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, LlamaForCausalLM

from coppice.heads.checkpoints import read_output, read_target
from coppice.training.checkpoint import load_weights
from coppice.training.data.target_answers import TargetAnswers
from coppice.training.export import CARD, write_card, write_model
from coppice.training.losses.feature_losses import soft_target_loss
from coppice.training.run_folder import BEST, read_run, replacing
from coppice.training.target import Shape, build_model
from coppice.training.trainer import DEFAULTS, Rates, RunOptions, Schedule, Trainer

LM_SHAPE = Shape(hidden=128, layers=2, intermediate=384, heads=2, kv_heads=2, head_dim=64)
LM_RATES = Rates(muon=0.02, adam=4e-3, eval_tokens=50_000)


@dataclass(frozen=True)
class TrainingConfig:
    """What a head is built from before it is trained."""

    kind: str
    target: Path
    """folder of the target"""
    answers: TargetAnswers
    """what the target wrote; `answers.layers` are those of the features"""
    work: Path
    """folder of the run, which is not shipped"""
    shape: Mapping[str, int] = field(default_factory=dict)
    """fields of `--shape`"""
    objective: str = ""
    """`--loss`; empty: the kind's own"""
    options: RunOptions = DEFAULTS


class HeadInTraining(nn.Module):
    """A head while it is trained. A kind is a function from a TrainingConfig to one of these, ours or an entry point of
    the group `coppice.training`.

    Every thread has a replica with parameters of the same storage; all else of the module is shared.
    """

    best_by: ClassVar[str] = ""
    """the figure that is highest for the best weights; empty: the held-out loss is lowest"""

    def begin(self, share: Callable[[], float]) -> None:
        """Get ready for a run; `share` says how much of it is done, 0 to 1."""

    def loss(self, answers: TargetAnswers, rows: Tensor) -> Tensor:
        """Return the mean loss over (B, T) positions, each row a stretch of one text: see `answers.read(rows)`."""
        raise NotImplementedError

    def held_out_loss(self, answers: TargetAnswers, rows: Tensor) -> Tensor:
        """Return a loss that compares over the whole run, without gradients."""
        return self.loss(answers, rows)

    def figures(self) -> dict[str, float]:
        """Measure more on held-out text, by name."""
        return {}

    def export(self, folder: Path) -> None:
        """Write into an empty folder what the head of this kind is served from; the parameters are the best ones."""
        raise NotImplementedError


def train_head(head: HeadInTraining, config: TrainingConfig, schedule: Schedule, rates: Rates) -> bool:
    """Train in `config.work`; False when a signal stopped the run before its end."""
    answers = config.answers
    trainer = Trainer(
        head.to(config.options.device),
        lambda replica, rows, _: replica.loss(answers, rows),
        answers.domains(),
        schedule,
        config.work,
        rates,
        config.options,
        lambda replica, rows, _: replica.held_out_loss(answers, rows),
        head.figures,
        head.best_by,
    )
    head.begin(lambda: trainer.counters.tokens / schedule.tokens)
    return trainer.train(config.kind)


def export_head(head: HeadInTraining, config: TrainingConfig, out: Path) -> None:
    """Write the head folder `out` from the run's best weights; an older one is replaced when it is complete."""
    load_weights(config.work / BEST, dict(head.named_parameters()))
    with replacing(out) as partial:
        head.export(partial)
        if not (partial / CARD).exists():
            run = read_run(config.work)
            write_card(partial, f"A {config.kind} draft head for {run.target}", head, run)


def lm_schedule(tokens: int) -> Schedule:
    """Return a short run in small steps."""
    return Schedule(tokens=tokens, warmup=min(20_000, -(-tokens // 10)), batch=2048, length=128, long_length=256)


def build_student(config: Any, embedding: Tensor, shape: Shape, seed: int = 0) -> LlamaForCausalLM:
    """Make a small Llama over a target's vocabulary, whose embeddings start as the main components of the target's.

    `config` and `embedding` are the target's.
    """
    vocab, positions = len(embedding), config.max_position_embeddings
    student = build_model(shape.model_copy(update={"vocab": vocab, "positions": positions}), seed)
    with torch.no_grad():
        wide = embedding.float()
        left, strength, _ = torch.linalg.svd(wide - wide.mean(0), full_matrices=False)
        width = min(shape.hidden, len(strength))
        start = left[:, :width] * strength[:width]
        student.model.embed_tokens.weight[:, :width] = start * (0.02 / start.std().clamp_min(1e-8))
    return student


class LanguageModelInTraining(HeadInTraining):
    """A small causal LM that learns the target's distributions on its own answers."""

    output: Tensor

    def __init__(self, config: TrainingConfig, shape: Shape = LM_SHAPE) -> None:
        super().__init__()
        self.config, target = config, AutoConfig.from_pretrained(config.target).get_text_config()
        self.model: Any = build_student(target, read_target(config.target).embedding, shape, config.options.seed)
        self.register_buffer("output", read_output(config.target).float(), persistent=False)

    def loss(self, answers: TargetAnswers, rows: Tensor) -> Tensor:
        """Return the cross-entropy to the target's distributions."""
        answer = answers.read(rows)
        hidden = self.model.model(input_ids=answer.ids, use_cache=False).last_hidden_state.flatten(0, 1)
        return soft_target_loss(hidden, self.model.lm_head.weight, answer.final.flatten(0, 1), self.output)

    def export(self, folder: Path) -> None:
        """Write a model folder with the target's tokenizer."""
        write_model(folder, self.model, self.config.work)
