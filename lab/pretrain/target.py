"""Training a small target model of our own from text: tokenizer, packed data, model, run."""

import json
import shutil
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from coppice.config.model import read_tokenizer
from coppice.training.data import END_OF_TEXT, Domain, read_corpora
from coppice.training.heads import HeadInTraining, Recipe, Trainer, TrainingConfig

SIZES = json.loads(Path(__file__).parents[1].joinpath("shapes.json").read_text("utf-8"))["demo"]
"""of the demo target: deep and narrow, so that few weights make a costly forward"""
TOKENIZER_CHARACTERS = 6_000_000
"""of a domain that train the tokenizer, about, so that no size decides; more does not change an 8k vocabulary"""
# Words with their leading space, single digits (sums are easier to learn digit by digit), runs of signs, runs of
# spaces: a code block's indentation is one token, its last space goes with the word.
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
HOW = "Trained from nothing on the text below: next-token cross-entropy, Muon and AdamW."


def train_tokenizer(texts: Iterable[str], sizes: Mapping[str, Any], folder: Path) -> None:
    """Train a byte-level BPE, whose id 0 is END_OF_TEXT, its only special token; written as transformers expects it."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytewise])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=sizes["vocab_size"],
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    length, wrapped = sizes["max_position_embeddings"], cast(Any, PreTrainedTokenizerFast)
    wrapped(
        tokenizer_object=tokenizer, model_max_length=length, clean_up_tokenization_spaces=False, **special
    ).save_pretrained(folder)


class Texts:
    """The documents of `--data` lines as one long text, read at positions as recorded answers are (TargetAnswers)."""

    def __init__(self, lines: list[str], folder: Path, sizes: Mapping[str, Any]) -> None:
        """Train the tokenizer into `folder` unless it is there. Raises DataError."""
        corpora = read_corpora(lines)
        if not (folder / "tokenizer.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            strides = [round(sum(map(len, corpus.train)) / TOKENIZER_CHARACTERS) for corpus in corpora]
            texts = (corpus.train[:: max(1, stride)] for corpus, stride in zip(corpora, strides, strict=True))
            train_tokenizer(chain.from_iterable(texts), sizes, folder)
        tokenizer, ids, self.domains = read_tokenizer(folder), list[int](), list[Domain]()
        self.facts: dict[str, dict[str, Any]] = {}
        for corpus in corpora:
            spans = []
            for documents in (corpus.train, corpus.held_out):
                first = len(ids)
                for encoding in tokenizer.encode_batch(documents):
                    ids += [*encoding.ids, 0]  # END_OF_TEXT
                spans.append(np.arange(first, len(ids)))
            self.domains.append(Domain(corpus.name, corpus.weight, *spans))
            self.facts[corpus.name] = corpus.facts() | {"tokens": len(spans[0])}
        self._ids = torch.tensor(ids)

    def read(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids at (B, T) positions, and those behind each."""
        at = positions.cpu()
        return self._ids[at].to(positions.device), self._ids[at + 1].to(positions.device)


class TargetInTraining(HeadInTraining):
    """A model of any class that learns the next token. Its blocks start as the identity: zero output projections."""

    def __init__(self, config: TrainingConfig) -> None:
        """`config.target` is the folder of the tokenizer."""
        super().__init__()
        self.tokenizer = config.target
        shape: dict[str, Any] = {**config.shape, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)}
        torch.manual_seed(config.seed)
        build: Any = AutoModelForCausalLM.from_config
        self.model = build(AutoConfig.for_model(**{"tie_word_embeddings": True, **shape})).train()
        for name, weight in self.model.get_decoder().layers.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)
            elif weight.ndim == 2:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def loss(self, texts: Any, rows: Tensor) -> Tensor:
        inputs, labels = texts.read(rows)
        logits = self.model(input_ids=inputs, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    def export(self, folder: Path) -> None:
        self.model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="40MB")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(self.tokenizer / name, folder / name)


def target_run(
    lines: list[str], work: Path, recipe: Recipe, sizes: Mapping[str, Any] = SIZES, **options: Any
) -> Trainer:
    """Read the texts, and make the run that trains a target in `work`; `options` are those of a TrainingConfig."""
    texts: Any = Texts(lines, work / "data", sizes)
    config = TrainingConfig("target", work / "data", texts, work, sizes, **options)
    return Trainer(TargetInTraining(config), config, recipe)
