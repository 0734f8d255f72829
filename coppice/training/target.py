"""Training a small target model of our own from text: tokenizer, packed data, model, run."""

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from coppice.training.corpora import Corpus, load_corpus, parse_specs
from coppice.training.losses import next_token_loss
from coppice.training.packing import Packed, open_prepared, prepare
from coppice.training.progress import Progress
from coppice.training.schedule import Schedule
from coppice.training.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from coppice.training.trainer import LossFunction, Rates, Trainer

TOKENIZER_CHARACTERS = 6_000_000
"""Text a domain gives to the tokenizer's training; more does not change an 8k vocabulary."""


class TargetShape(BaseModel):
    """The demo target: deep and narrow, so that a forward is expensive next to a draft while weights stay small."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocab: PositiveInt = 8192
    hidden: PositiveInt = 256
    layers: PositiveInt = 20
    intermediate: PositiveInt = 768
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    head_dim: PositiveInt = 64
    positions: PositiveInt = 1024


def build_model(shape: TargetShape, seed: int = 0) -> LlamaForCausalLM:
    """A fresh Llama model in float32 whose blocks start as the identity (zero output projections)."""
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.positions,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                p.zero_()
            elif p.ndim == 2 and ".layers." in name:
                nn.init.normal_(p, std=p.shape[1] ** -0.5)
    return model.train()


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 where it is fast (CUDA), float32 elsewhere."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def language_model_loss(model: LlamaForCausalLM, compiled: bool = False) -> LossFunction:
    """The next-token loss of a tied causal LM as a function of (inputs, labels), both (B, T)."""

    def loss(inputs: Tensor, labels: Tensor) -> Tensor:
        with autocast(inputs.device):
            hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
            return next_token_loss(hidden.flatten(0, 1), model.lm_head.weight, labels.flatten())

    function: Callable[..., Tensor] = torch.compile(loss, dynamic=False) if compiled else loss
    return function


def prepare_data(lines: list[str], folder: Path, shape: TargetShape) -> list[Packed]:
    """Read `--data`, train the tokenizer and pack everything into `folder`, unless that was done with the same lines."""
    record = folder / "lines.json"
    if record.exists() and json.loads(record.read_text(encoding="utf-8")) == lines:
        return open_prepared(folder)
    corpora = [load_corpus(spec) for spec in parse_specs(lines)]
    tokenizer = train_tokenizer(chain.from_iterable(_tokenizer_text(c) for c in corpora), shape.vocab)
    save_tokenizer(tokenizer, folder, shape.positions)
    packed = prepare(corpora, load_tokenizer(folder), folder)
    record.write_text(json.dumps(lines) + "\n", encoding="utf-8")
    return packed


def _tokenizer_text(corpus: Corpus) -> list[str]:
    """Documents of about TOKENIZER_CHARACTERS in all, so that no domain's size decides the vocabulary."""
    total = sum(len(text) for text in corpus.train)
    stride = max(1, round(total / TOKENIZER_CHARACTERS))
    return corpus.train[::stride]


def train_target(
    lines: list[str],
    work: Path,
    schedule: Schedule,
    *,
    shape: TargetShape | None = None,
    rates: Rates | None = None,
    resume: bool = False,
    compiled: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> Trainer:
    """Train into `work`; the returned trainer's counters say how far it came."""
    shape = shape or TargetShape()
    domains = prepare_data(lines, work / "data", shape)
    model = build_model(shape, seed).to(device)
    trainer = Trainer(model, language_model_loss(model, compiled), domains, schedule, work, rates, seed)
    if resume:
        trainer.resume()
    trainer.train(Progress("target"))
    return trainer
