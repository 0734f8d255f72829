"""Training text: `--data NAME=GLOB[:WEIGHT]` lines, their documents, the held-out rule, and packed rows of ids."""

from __future__ import annotations

import glob
import hashlib
import json
import re
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from coppice.errors import InvalidField

END_OF_TEXT = "<|endoftext|>"
STDLIB_GLOB = "python:stdlib"
HELD_OUT_MODULUS = 20
TEXT_FIELDS = ("text", "content", "story", "prompt")
CHAT_FIELDS = ("messages", "conversations")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
Messages = list[dict[str, Any]]
ANSWER_FIELDS = (("question", "answer"), ("problem", "solution"))
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo"}
SKIPPED_FOLDERS |= {"site-packages", "__pycache__", "pydoc_data", "encodings"}
CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")


class DataError(InvalidField):
    """A `--data` line, a file or a row that cannot be used; the message names it."""

    def __init__(self, why: str) -> None:
        super().__init__("--data", why)


@dataclass(frozen=True)
class DataSpec:
    """One parsed `--data` line. `weight` is the share of the training tokens, relative to the other lines."""

    name: str
    pattern: str
    weight: float

    @property
    def public(self) -> str:
        """The line without directories, for model cards."""
        return f"{self.name}={Path(self.pattern).name}:{self.weight:g}"


@dataclass
class Corpus:
    """The documents of one domain, split by `is_held_out`; `sources` says what they are, for the model card."""

    name: str
    weight: float
    train: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    of_prompts: bool = False
    """whether documents are chats up to an answer, in a template"""


def parse_spec(line: str) -> DataSpec:
    """Parse `NAME=GLOB[:WEIGHT]`; the weight defaults to 1. Raises DataError that names the line."""
    name, equals, rest = line.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z0-9_-]+", name) or not rest:
        raise DataError(f"{line!r}: expected NAME=GLOB[:WEIGHT], such as stories=texts/*.txt:0.4")
    pattern, colon, last = rest.rpartition(":")
    if not colon or rest == STDLIB_GLOB:
        return DataSpec(name, rest, 1.0)
    try:
        weight = float(last)
    except ValueError:
        raise DataError(f"{line!r}: WEIGHT must be a number, not {last!r}") from None
    if not 0 < weight < float("inf"):
        raise DataError(f"{line!r}: WEIGHT must be positive, not {last}")
    return DataSpec(name, pattern, weight)


def parse_specs(lines: list[str]) -> list[DataSpec]:
    """Parse all `--data` lines; names must be distinct and there must be at least one."""
    if not lines:
        raise DataError("at least one NAME=GLOB[:WEIGHT] is needed")
    specs = [parse_spec(line) for line in lines]
    names = [spec.name for spec in specs]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise DataError(f"the name {repeated[0]!r} is given twice")
    return specs


def is_held_out(text: str) -> bool:
    """Tell whether a document is in the twentieth of all that no model of this project is trained on."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_MODULUS == 0


def load_corpus(spec: DataSpec, render: Callable[[Messages], str] | None = None) -> Corpus:
    """Read and split one domain. `render` gives a chat up to an answer in the target's template.

    A chat is a prompt for each turn of its user; all of them are held out or none. Raises DataError for no files, an
    unreadable one, a bad row, chats where there is no template, and chats beside texts.
    """
    corpus, where = Corpus(spec.name, spec.weight), f"{spec.name}={spec.pattern}"
    seen: set[str] = set()
    for document in _documents(spec, corpus.sources):
        if isinstance(document, str):
            texts = [document]
        elif render is None:
            raise DataError(f"{where}: chats teach heads, whose target has a template, and no targets")
        else:
            ends = [at for at, message in enumerate(document, start=1) if message["role"] == "user"]
            try:
                texts = [render(document[:end]) for end in ends]
            except Exception as error:  # a template may raise anything
                raise DataError(f"{where}: the target's chat template: {str(error).splitlines()[0]}") from error
        if (of_prompts := document is not texts[0]) is not corpus.of_prompts and seen:
            raise DataError(f"{where}: holds chats and texts; give each a line of its own")
        corpus.of_prompts = of_prompts
        if texts[0] in seen:
            continue
        seen.add(texts[0])
        (corpus.held_out if is_held_out(texts[0]) else corpus.train).extend(texts)
    if not corpus.train:
        raise DataError(f"{where}: no training document in it")
    return corpus


def _documents(spec: DataSpec, sources: list[str]) -> Iterator[str | Messages]:
    pattern, skipped = spec.pattern, set[str]()
    if pattern == STDLIB_GLOB:
        pattern, skipped = f"{sysconfig.get_path('stdlib')}/**/*.py", SKIPPED_FOLDERS
    files = (path for path in map(Path, sorted(glob.glob(pattern, recursive=True))) if path.is_file())
    paths = [path for path in files if not skipped & set(path.parts)]
    if not paths:
        raise DataError(f"{spec.name}={spec.pattern}: no file matches")
    sources.extend(path.name for path in paths[:20])
    if len(paths) > 20:
        sources.append(f"and {len(paths) - 20} more files")
    for path in paths:
        yield from read_documents(path)


def read_documents(path: Path) -> Iterator[str | Messages]:
    """Yield a .txt, .md, .py or .jsonl file's stripped, non-empty documents, and a .jsonl file's chats as messages.

    Raises DataError for an unreadable one.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text ({error})") from None
    if path.suffix == ".jsonl":
        for number, line in enumerate(content.split("\n"), start=1):
            if line.strip():
                yield _row(line, f"{path}, line {number}")
        return
    for part in content.split(END_OF_TEXT):
        if part.strip():
            yield part.strip()


def _row(line: str, where: str) -> str | Messages:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object")
    if name := next((name for name in CHAT_FIELDS if name in row), None):
        return _messages(row[name], f"{where}: field {name!r}")
    known: tuple[tuple[str, ...], ...] = (*ANSWER_FIELDS, *((name,) for name in TEXT_FIELDS))
    names = next((names for names in known if names[0] in row), None)
    if names is None:
        fields = ", ".join((*CHAT_FIELDS, *TEXT_FIELDS))
        raise DataError(f"{where}: none of the fields {fields} or question and answer is there")
    for name in names:
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise DataError(f"{where}: field {name!r} must be a non-empty string")
    if len(names) == 1:
        return str(row[names[0]]).strip()
    question, answer = (CALCULATOR_MARK.sub("", row[name]).strip() for name in names)
    return f"Question: {question}\nAnswer: {answer}"


def _messages(given: Any, where: str) -> Messages:
    """Read OpenAI's messages or ShareGPT's, which have other names for a role and for its text."""
    if not isinstance(given, list) or not all(isinstance(message, dict) for message in given):
        raise DataError(f"{where} must be a list of messages")
    messages = [
        {**message, "role": SHAREGPT_ROLES.get(message["from"], message["from"]), "content": message.get("value")}
        if isinstance(message.get("from"), str)
        else message
        for message in given
    ]
    if not any(message.get("role") == "user" for message in messages):
        raise DataError(f"{where} has no message of a user")
    if number := next(
        (n for n, message in enumerate(messages, start=1) if not isinstance(message.get("role"), str)), 0
    ):
        raise DataError(f"{where}: message {number} has no role")
    return messages


MAX_EPOCHS = 8
PROMPT_END = -1
"""behind each prompt of a chat, where documents have the end-of-text id"""
Ids = NDArray[np.uint16] | NDArray[np.int64]


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a model folder, without transformers' wrapper."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy a tokenizer's files, so that a draft model's folder is complete by itself."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)


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


def prepare(corpora: list[Corpus], tokenizer: Tokenizer, folder: Path, end: int) -> list[Packed]:
    """Pack every corpus into NAME.train.npy and NAME.held_out.npy in `folder`, and write data.json for the model card.

    `end` is the end-of-text id.
    """
    facts = {}
    for corpus in corpora:
        order = np.random.default_rng(0).permutation(len(corpus.train))
        last = PROMPT_END if corpus.of_prompts else end
        train = pack_texts((corpus.train[i] for i in order), tokenizer, last)
        held_out = pack_texts(corpus.held_out, tokenizer, last)
        np.save(folder / f"{corpus.name}.train.npy", train)
        np.save(folder / f"{corpus.name}.held_out.npy", held_out)
        facts[corpus.name] = {
            "weight": corpus.weight,
            "sources": corpus.sources,
            "documents": len(corpus.train),
            "held_out_documents": len(corpus.held_out),
            "tokens": len(train),
            "held_out_tokens": len(held_out),
        }
    (folder / "data.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return open_prepared(folder)


def open_prepared(folder: Path) -> list[Packed]:
    """Map the domains that `prepare` wrote from disk; nothing is unpickled."""
    facts = json.loads((folder / "data.json").read_text(encoding="utf-8"))

    def load(file: str) -> Ids:
        ids: Ids = np.load(folder / file, mmap_mode="r", allow_pickle=False)
        return ids

    return [
        Packed(name, fact["weight"], load(f"{name}.train.npy"), load(f"{name}.held_out.npy"))
        for name, fact in facts.items()
    ]


class Reader:
    """Draws rows of `length + 1` ids from several domains in the proportion of their weights.

    All of its state is the number of tokens drawn from each domain (`drawn`), so a resumed run reads on exactly where
    the stopped one would have. An epoch is a fresh permutation of windows at a fresh offset; after MAX_EPOCHS a domain
    is left out and the others take its share.
    """

    def __init__(self, domains: list[Packed], seed: int, block: int) -> None:
        """`block` is the longest row that will be asked for, in tokens; every length must divide it."""
        self.domains, self.seed, self.block = domains, seed, block
        self.drawn = {domain.name: 0 for domain in domains}
        self.usable: dict[str, int] = {}
        for domain in domains:
            spare = 0 if domain.aligned else block  # for the offset
            self.usable[domain.name] = (len(domain.train) - 1) // block * block - spare
            if self.usable[domain.name] < block:
                raise DataError(f"{domain.name}: {len(domain.train)} tokens are too few for rows of {block}")
        self._orders: dict[str, tuple[tuple[int, int], NDArray[np.int64], int]] = {}

    def next_row(self, length: int) -> Ids | None:
        """Return the next (length + 1,) ids, or None when every domain has been read MAX_EPOCHS times."""
        left = [d for d in self.domains if self.drawn[d.name] < MAX_EPOCHS * self.usable[d.name]]
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
            rng = np.random.default_rng([self.seed, seed_of(domain.name), epoch, length])
            windows = self.usable[domain.name] // length
            cached = (key, rng.permutation(windows), 0 if domain.aligned else int(rng.integers(0, self.block)))
            self._orders[domain.name] = cached
        return cached[1], cached[2]


def seed_of(name: str) -> int:
    """A seed of a domain's own."""
    return int.from_bytes(name.encode(), "little") % 2**32


def held_out_batches(domains: Iterable[Packed], rows: int, length: int) -> dict[str, Tensor]:
    """Return up to `rows` held-out windows of (length + 1) ids of each domain that has some, spread over its text."""
    batches = {}
    for domain in domains:
        if (windows := (len(domain.held_out) - 1) // length) > 0:
            starts = np.linspace(0, windows - 1, min(rows, windows)).astype(int) * length
            batch = np.stack([domain.held_out[start : start + length + 1] for start in starts])
            batches[domain.name] = torch.from_numpy(batch.astype(np.int64))
    return batches


def check_held_out(domains: Iterable[Packed], tokens: int) -> None:
    """Raise DataError unless some domain holds out so many tokens: a run chooses its best weights by them."""
    counts = {domain.name: len(domain.held_out) for domain in domains}
    if max(counts.values()) < tokens:
        each = ", ".join(f"{count} of {name}" for name, count in counts.items())
        raise DataError(
            f"too few documents: one in {HELD_OUT_MODULUS} is held out, by its hash, to tell the best weights by, and "
            f"these are only {each} (tokens; {tokens} of one are needed)"
        )
