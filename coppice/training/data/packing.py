"""Packed corpora: each domain's token ids on disk, and an endless, resumable order in which to read them."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from coppice.training.data.corpora import END_OF_TEXT, HELD_OUT_MODULUS, Corpus, DataError

MAX_EPOCHS = 8
PROMPT_END = -1
Ids = NDArray[np.uint16] | NDArray[np.int64]


@dataclass(frozen=True)
class Packed:
    """One domain as two flat id arrays (documents joined and ended by the end-of-text id)."""

    name: str
    weight: float
    train: Ids
    held_out: Ids
    aligned: bool = False
    """whether rows begin at multiples of their length, never in between"""

    @property
    def of_prompts(self) -> bool:
        """Whether documents are prompts of chats, each followed by PROMPT_END."""
        return len(self.train) > 0 and int(self.train[-1]) == PROMPT_END


def pack_texts(texts: Iterable[str], tokenizer: Tokenizer, end: int) -> Ids:
    """Encode documents into one flat array, each followed by `end`. Prompts have their template's special tokens."""
    small, prompts = max(end + 1, tokenizer.get_vocab_size()) <= 1 << 16, end == PROMPT_END
    dtype: Any = np.uint16 if small and not prompts else np.int64
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=not prompts)
    parts = [np.array([*encoding.ids, end], dtype=dtype) for encoding in encodings]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


def save_packed(corpus: Corpus, tokenizer: Tokenizer, folder: Path, end: int) -> None:
    """Write NAME.train.npy and NAME.held_out.npy."""
    folder.mkdir(parents=True, exist_ok=True)
    order = np.random.default_rng(0).permutation(len(corpus.train))
    np.save(folder / f"{corpus.name}.train.npy", pack_texts((corpus.train[i] for i in order), tokenizer, end))
    np.save(folder / f"{corpus.name}.held_out.npy", pack_texts(corpus.held_out, tokenizer, end))


def load_packed(name: str, weight: float, folder: Path) -> Packed:
    """Map one domain's arrays from disk (they are never unpickled)."""
    parts = (folder / f"{name}.train.npy", folder / f"{name}.held_out.npy")
    train, held_out = (np.load(part, mmap_mode="r", allow_pickle=False) for part in parts)
    return Packed(name, weight, train, held_out)


class Reader:
    """Draws rows of `length + 1` ids from several domains in the proportion of their weights.

    All of its state is the number of tokens drawn from each domain (`drawn`), so a resumed run reads on exactly where
    the stopped one would have. An epoch is a fresh permutation of windows at a fresh offset; after MAX_EPOCHS a domain
    is left out and the others take its share.
    """

    def __init__(self, domains: list[Packed], seed: int, block: int, drawn: dict[str, int] | None = None) -> None:
        """`block` is the longest row that will be asked for, in tokens; every length must divide it."""
        self.domains, self.seed, self.block = domains, seed, block
        self.drawn = {d.name: 0 for d in domains} | (drawn or {})
        spare = {d.name: 0 if d.aligned else block for d in domains}  # for the offset
        self.usable = {d.name: (len(d.train) - 1) // block * block - spare[d.name] for d in domains}
        for d in domains:
            if self.usable[d.name] < block:
                raise DataError(f"{d.name}: {len(d.train)} tokens are too few for rows of {block}")
        self._orders: dict[str, tuple[tuple[int, int], NDArray[np.int64], int]] = {}

    def epochs(self, name: str) -> float:
        """Return how often the domain has been read."""
        return self.drawn[name] / self.usable[name]

    def next_row(self, length: int) -> Ids | None:
        """Return the next (length + 1,) ids, or None when every domain has been read MAX_EPOCHS times."""
        left = [d for d in self.domains if self.epochs(d.name) < MAX_EPOCHS]
        if not left:
            return None
        domain = min(left, key=lambda d: (self.drawn[d.name] + length) / d.weight)
        epoch, position = divmod(self.drawn[domain.name], self.usable[domain.name])
        starts, offset = self._order(domain, epoch, length)
        start = offset + int(starts[position // length]) * length
        self.drawn[domain.name] += length
        return domain.train[start : start + length + 1]

    def next_batch(self, rows: int, length: int) -> NDArray[np.int64] | None:
        """Return the next rows as (rows, length + 1) int64, or None when the data is used up."""
        batch = [row for row in (self.next_row(length) for _ in range(rows)) if row is not None]
        return np.stack(batch).astype(np.int64) if len(batch) == rows else None

    def _order(self, domain: Packed, epoch: int, length: int) -> tuple[NDArray[np.int64], int]:
        key = (epoch, length)
        cached = self._orders.get(domain.name)
        if cached is None or cached[0] != key:
            name_seed = int.from_bytes(domain.name.encode(), "little") % 2**32
            rng = np.random.default_rng([self.seed, name_seed, epoch, length])
            windows = self.usable[domain.name] // length
            cached = (key, rng.permutation(windows), 0 if domain.aligned else int(rng.integers(0, self.block)))
            self._orders[domain.name] = cached
        return cached[1], cached[2]


def held_out_rows(domain: Packed, rows: int, length: int) -> NDArray[np.int64] | None:
    """Return up to `rows` windows of (length + 1) ids, spread over the held-out text; None if it is too short."""
    windows = (len(domain.held_out) - 1) // length
    if windows < 1:
        return None
    starts = np.linspace(0, windows - 1, min(rows, windows)).astype(int) * length
    return np.stack([domain.held_out[s : s + length + 1] for s in starts]).astype(np.int64)


def held_out_batches(domains: Iterable[Packed], rows: int, length: int) -> dict[str, Tensor]:
    """Return `held_out_rows` as tensors, by the names of the domains that have such rows."""
    batches = {domain.name: held_out_rows(domain, rows, length) for domain in domains}
    return {name: torch.from_numpy(batch) for name, batch in batches.items() if batch is not None}


def check_held_out(domains: Iterable[Packed], tokens: int) -> None:
    """Raise DataError unless some domain holds out so many tokens: a run chooses its best weights by them."""
    held = {domain.name: len(domain.held_out) for domain in domains}
    if max(held.values()) < tokens:
        counts = ", ".join(f"{count} of {name}" for name, count in held.items())
        raise DataError(
            f"too few documents: one in {HELD_OUT_MODULUS} is held out, by its hash, to tell the best weights by, and "
            f"these are only {counts} (tokens; {tokens} of one are needed)"
        )


def prepare(corpora: list[Corpus], tokenizer: Tokenizer, folder: Path, end: int | None = None) -> list[Packed]:
    """Pack every corpus into `folder` and write data.json, which the model card is made from.

    `end` is the end-of-text id; None takes that of a tokenizer of our own.
    """
    last: Any = tokenizer.token_to_id(END_OF_TEXT) if end is None else end
    facts = {}
    for corpus in corpora:
        save_packed(corpus, tokenizer, folder, PROMPT_END if corpus.of_prompts else last)
        packed = load_packed(corpus.name, corpus.weight, folder)
        facts[corpus.name] = {
            "weight": corpus.weight,
            "sources": corpus.sources,
            "documents": len(corpus.train),
            "held_out_documents": len(corpus.held_out),
            "tokens": len(packed.train),
            "held_out_tokens": len(packed.held_out),
        }
    (folder / "data.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return open_prepared(folder)


def open_prepared(folder: Path) -> list[Packed]:
    """Load the domains that `prepare` wrote."""
    facts = json.loads((folder / "data.json").read_text(encoding="utf-8"))
    return [load_packed(name, fact["weight"], folder) for name, fact in facts.items()]
