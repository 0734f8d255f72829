"""Training a draft head of kind `lm`: a small causal LM that learns the target's distributions on its own answers."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, LlamaForCausalLM

from coppice.heads.checkpoints import read_output, read_target
from coppice.training.data.target_answers import TargetAnswers
from coppice.training.losses.chunked import soft_target_loss
from coppice.training.schedule import Schedule
from coppice.training.target import Shape, build_model
from coppice.training.trainer import DEFAULTS, Rates, RunOptions, Trainer
from coppice.training.workers import LossFunction

LM_SHAPE = Shape(hidden=128, layers=2, intermediate=384, heads=2, kv_heads=2, head_dim=64)
LM_RATES = Rates(muon=0.02, adam=4e-3, eval_tokens=50_000)


def lm_schedule(tokens: int) -> Schedule:
    """Return a short run in small steps."""
    return Schedule(tokens=tokens, warmup=20_000, batch=2048, length=128, long_length=256)


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


def distillation_loss(answers: TargetAnswers, output: Tensor) -> LossFunction:
    """Return the student's loss against the distributions of a target, whose output layer is `output`."""

    def loss(student: Any, inputs: Tensor, _labels: Tensor) -> Tensor:
        answer = answers.read(inputs)
        hidden = student.model(input_ids=answer.ids, use_cache=False).last_hidden_state.flatten(0, 1)
        return soft_target_loss(hidden, student.lm_head.weight, answer.final.flatten(0, 1), output)

    return loss


def train_lm(
    answers: TargetAnswers,
    target: Path,
    work: Path,
    schedule: Schedule,
    *,
    shape: Shape = LM_SHAPE,
    rates: Rates = LM_RATES,
    options: RunOptions = DEFAULTS,
) -> bool:
    """Train into `work`; False when a signal stopped the run before its end."""
    config = AutoConfig.from_pretrained(target)
    student: Any = build_student(config, read_target(target).embedding, shape, options.seed)
    student.to(options.device)
    student.config.save_pretrained(work)
    loss = distillation_loss(answers, read_output(target).float().to(options.device))
    trainer = Trainer(student, loss, answers.domains(), schedule, work, rates, options)
    return trainer.train("lm")
