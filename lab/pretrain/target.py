"""Training a small target model of our own from text: tokenizer, packed data, model, run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from coppice.training.data import END_OF_TEXT, Corpus, Packed, load_corpus, open_prepared, parse_specs, prepare
from coppice.training.heads import HeadInTraining, RunOptions, build_llama
from coppice.training.run_folder import BEST, load_weights, replacing, write_model
from coppice.training.trainer import Rates, Schedule, Trainer

SIZES = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "num_hidden_layers": 20,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
"""of the demo target: deep and narrow, so that few weights make a costly forward"""
TOKENIZER_CHARACTERS = 6_000_000
"""Text a domain gives to the tokenizer's training; more does not change an 8k vocabulary."""
# Words with their leading space, single digits (sums are easier to learn digit by digit), runs of signs, runs of
# spaces: a code block's indentation is one token, its last space goes with the word.
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
HOW = "Trained from nothing on the text below: next-token cross-entropy, Muon and AdamW."


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of `vocab_size` ids; id 0 is END_OF_TEXT, the only special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`, as transformers expects them."""
    wrapped: Any = PreTrainedTokenizerFast
    wrapped(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def prepare_data(lines: list[str], folder: Path, sizes: Mapping[str, int]) -> list[Packed]:
    """Read `--data`, train the tokenizer and pack all into `folder`, unless that was done with the same lines."""
    record = folder / "lines.json"
    if record.exists() and json.loads(record.read_text(encoding="utf-8")) == lines:
        return open_prepared(folder)
    corpora = [load_corpus(spec) for spec in parse_specs(lines)]
    texts = chain.from_iterable(_tokenizer_text(corpus) for corpus in corpora)
    tokenizer = train_tokenizer(texts, sizes["vocab_size"])
    save_tokenizer(tokenizer, folder, sizes["max_position_embeddings"])
    packed = prepare(corpora, tokenizer, folder, end=0)
    record.write_text(json.dumps(lines) + "\n", encoding="utf-8")
    return packed


def _tokenizer_text(corpus: Corpus) -> list[str]:
    """Take documents of about TOKENIZER_CHARACTERS in all, so that no domain's size decides the vocabulary."""
    total = sum(len(text) for text in corpus.train)
    return corpus.train[:: max(1, round(total / TOKENIZER_CHARACTERS))]


class Texts:
    """Packed domains as one long text, read at positions as recorded answers are (TargetAnswers)."""

    def __init__(self, packed: list[Packed]) -> None:
        parts = [ids for domain in packed for ids in (domain.train, domain.held_out)]
        self._ids = torch.from_numpy(np.concatenate(parts).astype(np.int64))
        ends = np.cumsum([len(part) for part in parts])
        spans = [np.arange(end - len(part), end) for part, end in zip(parts, ends, strict=True)]
        self._domains = [
            replace(domain, train=train, held_out=held_out)
            for domain, train, held_out in zip(packed, spans[::2], spans[1::2], strict=True)
        ]

    def domains(self) -> list[Packed]:
        """The positions of each domain, to be drawn as ids are."""
        return self._domains

    def read(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids at (B, T) positions, and those behind each."""
        ids, at = self._ids.to(positions.device), positions
        return ids[at], ids[at + 1]


class TargetInTraining(HeadInTraining):
    """A Llama that learns the next token."""

    def __init__(self, sizes: Mapping[str, int], seed: int) -> None:
        super().__init__()
        self.model: Any = build_llama(seed, **sizes)

    def loss(self, texts: Any, rows: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats of the tokens behind (B, T) positions."""
        inputs, labels = texts.read(rows)
        hidden = self.model.model(input_ids=inputs, use_cache=False).last_hidden_state
        return next_token_loss(hidden.flatten(0, 1), self.model.lm_head.weight, labels.flatten())


def next_token_loss(hidden: Tensor, embedding: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats of hidden (T, H), embedding (V, H) tied to the output, labels (T,)."""
    total = hidden.new_zeros(())
    for h, y in zip(torch.split(hidden, 512), torch.split(labels, 512), strict=True):
        total = total + F.cross_entropy((h @ embedding.T).float(), y, reduction="sum")
    return total / labels.numel()


def train_target(
    lines: list[str],
    work: Path,
    schedule: Schedule,
    options: RunOptions,
    sizes: Mapping[str, int] = SIZES,
    rates: Rates | None = None,
) -> TargetInTraining | None:
    """Train into `work`; None when a signal stopped the run before its end."""
    texts = Texts(prepare_data(lines, work / "data", sizes))
    target = TargetInTraining(sizes, options.seed)
    target.to(options.device)
    trainer = Trainer(target, texts, schedule, work, rates or Rates(), options)
    return target if trainer.train("target") else None


def export(target: TargetInTraining, work: Path, out: Path) -> None:
    """Write the model folder `out` from the best weights in `work`; an older one is replaced when it is complete."""
    load_weights(work / BEST, dict(target.named_parameters()))
    with replacing(out) as partial:
        write_model(partial, target.model, work, "A small target model", HOW)
