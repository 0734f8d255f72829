"""What a kind of head gives to training, and the kind `lm`, a small causal LM over the target's vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from coppice.heads.checkpoints import read_output, read_target
from coppice.training.answers import TargetAnswers
from coppice.training.losses import soft_target_loss
from coppice.training.run_folder import read_run, write_model

LM_SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 384,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


@dataclass(frozen=True)
class RunOptions:
    """Whether a run goes on from its newest checkpoint, and where and how it is done."""

    resume: bool = False
    device: str = "cpu"
    num_workers: int = 1
    """training threads"""
    seed: int = 0


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
    options: RunOptions = RunOptions()


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


def build_llama(seed: int, **sizes: int) -> LlamaForCausalLM:
    """Make a fresh Llama in float32 whose blocks start as the identity (zero output projections).

    sizes: fields of LlamaConfig. Id 0 begins, ends and pads texts.
    """
    config = LlamaConfig(
        **sizes,  # type: ignore[arg-type]
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                p.zero_()
            elif p.ndim == 2 and ".layers." in name:
                nn.init.normal_(p, std=p.shape[1] ** -0.5)
    model.train()
    return model


def build_student(embedding: Tensor, positions: int, sizes: Mapping[str, int], seed: int = 0) -> LlamaForCausalLM:
    """Make a small Llama over a target's vocabulary, whose embeddings start as the main components of the target's.

    `embedding` (V, H) and `positions` are the target's.
    """
    student = build_llama(seed, **sizes, vocab_size=len(embedding), max_position_embeddings=positions)
    with torch.no_grad():
        wide = embedding.float()
        left, strength, _ = torch.linalg.svd(wide - wide.mean(0), full_matrices=False)
        width = min(sizes["hidden_size"], len(strength))
        start = left[:, :width] * strength[:width]
        student.model.embed_tokens.weight[:, :width] = start * (0.02 / start.std().clamp_min(1e-8))
    return student


class LanguageModelInTraining(HeadInTraining):
    """A small causal LM that learns the target's distributions on its own answers."""

    output: Tensor

    def __init__(self, config: TrainingConfig, sizes: Mapping[str, int] = LM_SIZES) -> None:
        super().__init__()
        self.config, target = config, AutoConfig.from_pretrained(config.target).get_text_config()
        embedding, positions = read_target(config.target).embedding, target.max_position_embeddings
        self.model: Any = build_student(embedding, positions, sizes, config.options.seed)
        self.register_buffer("output", read_output(config.target).float(), persistent=False)

    def loss(self, answers: TargetAnswers, rows: Tensor) -> Tensor:
        """Return the cross-entropy to the target's distributions."""
        answer = answers.read(rows)
        hidden = self.model.model(input_ids=answer.ids, use_cache=False).last_hidden_state.flatten(0, 1)
        return soft_target_loss(hidden, self.model.lm_head.weight, answer.final.flatten(0, 1), self.output)

    def export(self, folder: Path) -> None:
        """Write a model folder with the target's tokenizer."""
        title = f"A small draft model for {read_run(self.config.work).target}"
        write_model(folder, self.model, self.config.work, title)
