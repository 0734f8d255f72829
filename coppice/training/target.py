"""Training a small target model of our own from text: tokenizer, packed data, model, run."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from coppice.training.data.corpora import Corpus, load_corpus, parse_specs
from coppice.training.data.packing import Packed, open_prepared, prepare
from coppice.training.data.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from coppice.training.losses.feature_losses import next_token_loss
from coppice.training.trainer import DEFAULTS, Rates, RunOptions, Schedule, Trainer

TOKENIZER_CHARACTERS = 6_000_000
"""Text a domain gives to the tokenizer's training; more does not change an 8k vocabulary."""


class Shape(BaseModel):
    """A Llama's sizes. The defaults are the demo target: deep and narrow, so that few weights make a costly forward."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vocab: PositiveInt = 8192
    hidden: PositiveInt = 256
    layers: PositiveInt = 20
    intermediate: PositiveInt = 768
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    head_dim: PositiveInt = 64
    positions: PositiveInt = 1024


def build_model(shape: Shape, seed: int = 0) -> LlamaForCausalLM:
    """Make a fresh Llama model in float32 whose blocks start as the identity (zero output projections)."""
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.positions,
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


def language_model_loss(model: Any, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the next-token loss of a tied causal LM; inputs and labels are (B, T)."""
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    return next_token_loss(hidden.flatten(0, 1), model.lm_head.weight, labels.flatten())


def prepare_data(lines: list[str], folder: Path, shape: Shape) -> list[Packed]:
    """Read `--data`, train the tokenizer and pack all into `folder`, unless that was done with the same lines."""
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
    """Take documents of about TOKENIZER_CHARACTERS in all, so that no domain's size decides the vocabulary."""
    total = sum(len(text) for text in corpus.train)
    stride = max(1, round(total / TOKENIZER_CHARACTERS))
    return corpus.train[::stride]


def train_target(
    lines: list[str],
    work: Path,
    schedule: Schedule,
    *,
    shape: Shape | None = None,
    rates: Rates | None = None,
    options: RunOptions = DEFAULTS,
) -> bool:
    """Train into `work`; False when a signal stopped the run before its end."""
    shape = shape or Shape()
    domains = prepare_data(lines, work / "data", shape)
    model: Any = build_model(shape, options.seed)
    model.to(options.device)
    model.config.save_pretrained(work)
    trainer = Trainer(model, language_model_loss, domains, schedule, work, rates, options)
    return trainer.train("target")
