"""Training text: `--data NAME=GLOB[:WEIGHT]` lines, their documents and chats, the held-out rule, and rows of ids."""

import glob
import hashlib
import json
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coppice.errors import InvalidField

END_OF_TEXT = "<|endoftext|>"
STDLIB_GLOB = "python:stdlib"
HUB = "hf:"
LINE = re.compile(rf"([A-Za-z0-9_-]+)=({HUB}[^:]+:[^:]+|{STDLIB_GLOB}|(?!{HUB}).+?)(?::([^:]*))?")
NUMBER = r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?"
HELD_OUT_MODULUS = 20
FIELDS: dict[tuple[str, ...], str] = {
    **dict.fromkeys((("messages",), ("conversations",)), "chats"),
    **dict.fromkeys((("question", "answer"), ("problem", "solution")), "texts"),
    **dict.fromkeys((("text",), ("content",), ("story",)), "texts"),
    ("prompt",): "prompts",
}
"""of a row, of which the first counts that is there, and the kind of document that they hold"""
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
SKIPPED_FOLDERS = {"test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo"}
SKIPPED_FOLDERS |= {"site-packages", "__pycache__", "pydoc_data", "encodings"}
CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")
MAX_EPOCHS = 8
Messages = list[dict[str, Any]]
Places = NDArray[np.int64]


class DataError(InvalidField):
    """A `--data` line, a file or a row that cannot be used; the message names it."""

    def __init__(self, reason: str) -> None:
        super().__init__("--data", reason)


@dataclass
class Corpus:
    """One `--data` line, and its documents once they are read, split by `is_held_out`."""

    name: str
    pattern: str
    weight: float = 1.0  # the share of the training tokens, relative to the other lines
    train: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # the names of its files, for the model card
    kind: str = "texts"  # texts, prompts that are answered whole, or chats: prompts that are in a template

    @property
    def public(self) -> str:
        """The line without directories, for model cards."""
        pattern = self.pattern if self.pattern.startswith(HUB) else Path(self.pattern).name
        return f"{self.name}={pattern}:{self.weight:g}"

    def facts(self) -> dict[str, Any]:
        """Return what a model card says of it."""
        counts = {"documents": len(self.train), "held_out_documents": len(self.held_out)}
        return {"weight": self.weight, "sources": self.sources} | counts

    def read(self, render: Callable[[Messages], str] | None = None) -> None:
        """Read and split the documents. `render` gives a chat up to an answer in the target's template.

        A chat is a prompt for each turn of its user; all of them are held out or none. Raises DataError for no files,
        an unreadable one, a bad row, chats where there is no template, and documents of two kinds.
        """
        where, seen = f"{self.name}={self.pattern}", set[str]()
        for kind, document in self._documents(where):
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
            if kind != self.kind and seen:
                raise DataError(f"{where}: holds {self.kind} and {kind}; give each a line of its own")
            self.kind = kind
            if texts[0] not in seen:
                seen.add(texts[0])
                (self.held_out if is_held_out(texts[0]) else self.train).extend(texts)
        if not self.train:
            raise DataError(f"{where}: no training document in it")

    def _documents(self, where: str) -> Iterator[tuple[str, str | Messages]]:
        """Yield the kind of each document of all files or of a data set, and its stripped text or a chat's messages."""
        pattern, skipped = self.pattern, set[str]()
        if pattern.startswith(HUB):
            self.sources, rows = [pattern], enumerate(_hub_rows(pattern, where), start=1)
            yield from (_document(row, f"{where}, row {number}") for number, row in rows)
            return
        if pattern == STDLIB_GLOB:
            pattern, skipped = f"{sysconfig.get_path('stdlib')}/**/*.py", SKIPPED_FOLDERS
        files = (path for path in map(Path, sorted(glob.glob(pattern, recursive=True))) if path.is_file())
        paths = [path for path in files if not skipped & set(path.parts)]
        if not paths:
            raise DataError(f"{where}: no file matches")
        self.sources = [path.name for path in paths[:20]]
        if len(paths) > 20:
            self.sources.append(f"and {len(paths) - 20} more files")
        for path in paths:
            try:
                content = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise DataError(f"{path}: cannot be read as UTF-8 text ({error})") from None
            if path.suffix == ".jsonl":
                lines = enumerate(content.split("\n"), start=1)
                yield from (_document(line, f"{path}, line {number}") for number, line in lines if line.strip())
            else:
                yield from (("texts", part.strip()) for part in content.split(END_OF_TEXT) if part.strip())


def parse_corpora(lines: Iterable[str]) -> list[Corpus]:
    """Parse `NAME=GLOB[:WEIGHT]` lines, unread; the weight defaults to 1. Raises DataError that names the line."""
    corpora: dict[str, Corpus] = {}
    for line in lines:
        if not (parts := LINE.fullmatch(line)):
            how = "NAME=GLOB[:WEIGHT], such as stories=texts/*.txt:0.4, or NAME=hf:ORG/NAME:SPLIT[:WEIGHT]"
            raise DataError(f"{line!r}: expected {how}")
        name, pattern, weight = parts.groups("1")
        if name in corpora:
            raise DataError(f"{line!r}: {name} is the name of another line")
        if not re.fullmatch(NUMBER, weight) or not float(weight):
            raise DataError(f"{line!r}: WEIGHT must be a positive number, not {weight!r}")
        corpora[name] = Corpus(name, pattern, float(weight))
    return list(corpora.values())


def read_corpora(lines: Iterable[str], render: Callable[[Messages], str] | None = None) -> list[Corpus]:
    """Parse the lines and read what they name. Raises DataError."""
    corpora = parse_corpora(lines)
    for corpus in corpora:
        corpus.read(render)
    return corpora


def is_held_out(text: str) -> bool:
    """Tell whether a document is in the twentieth of all that no model of this project is trained on."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % HELD_OUT_MODULUS == 0


def _hub_rows(pattern: str, where: str) -> Iterable[Any]:
    """Read a data set, hf:ORG/NAME:SPLIT or hf:FOLDER:SPLIT, by the package of that name. Raises DataError."""
    name, _, split = pattern.removeprefix(HUB).rpartition(":")
    try:
        rows: Iterable[Any] = import_module("datasets").load_dataset(name, split=split)
    except ImportError:
        raise DataError(f"{where}: data sets are read by the package datasets: pip install datasets") from None
    except Exception as error:  # of the Hub, the network, or the data set's own files
        raise DataError(f"{where}: {type(error).__name__}: {str(error).partition(chr(10))[0]}") from None
    return rows


def _document(row: object, where: str) -> tuple[str, str | Messages]:
    """Return the kind of document of a row, or of its JSON, and its text or chat. Raises DataError."""
    if isinstance(row, str):
        try:
            row = json.loads(row)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object")
    names = next((names for names in FIELDS if names[0] in row), None)
    if names is None:
        fields = ", ".join(names[0] for names in FIELDS if len(names) == 1)
        raise DataError(f"{where}: none of the fields {fields} or question and answer is there")
    if (kind := FIELDS[names]) == "chats":
        return kind, _messages(row[names[0]], f"{where}: field {names[0]!r}")
    for name in names:
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise DataError(f"{where}: field {name!r} must be a non-empty string")
    if kind == "prompts":
        return kind, row[names[0]]  # ends as it does: a space behind it would be the answer's first token
    if len(names) == 1:
        return kind, row[names[0]].strip()
    question, answer = (CALCULATOR_MARK.sub("", row[name]).strip() for name in names)
    return kind, f"Question: {question}\nAnswer: {answer}"


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
    for number, message in enumerate(messages, start=1):
        if not isinstance(message.get("role"), str):
            raise DataError(f"{where}: message {number} has no role")
    return messages


@dataclass(frozen=True)
class Domain:
    """One domain as positions of training text and of held-out text in one long text."""

    name: str
    weight: float
    train: Places
    held_out: Places


class Reader:
    """Draws rows of `length + 1` positions from several domains in the proportion of their weights.

    All of its state is the number of tokens drawn from each domain (`drawn`), so a resumed run reads on exactly where
    the stopped one would have. An epoch is a fresh permutation of windows; after MAX_EPOCHS a domain is left out and
    the others take its share.
    """

    def __init__(self, domains: list[Domain], seed: int, block: int) -> None:
        """`block` is the longest row that will be asked for, in tokens; every length must divide it."""
        self.domains, self.seed = domains, seed
        self.drawn = {domain.name: 0 for domain in domains}
        self.usable = {domain.name: (len(domain.train) - 1) // block * block for domain in domains}
        for domain in domains:
            if self.usable[domain.name] < block:
                raise DataError(f"{domain.name}: {len(domain.train)} tokens are too few for rows of {block}")

    def next_batch(self, rows: int, length: int) -> Places | None:
        """Return the next rows as (rows, length + 1), or None when all domains were read MAX_EPOCHS times."""
        batch = [row for row in (self.next_row(length) for _ in range(rows)) if row is not None]
        return np.stack(batch) if len(batch) == rows else None

    def next_row(self, length: int) -> Places | None:
        """Return the next (length + 1,) positions, or None when every domain has been read MAX_EPOCHS times."""
        left = [d for d in self.domains if self.drawn[d.name] < MAX_EPOCHS * self.usable[d.name]]
        if not left:
            return None
        domain = min(left, key=lambda d: (self.drawn[d.name] + length) / d.weight)
        epoch, position = divmod(self.drawn[domain.name], self.usable[domain.name])
        order = _permutation(self.seed, domain.name, epoch, length, self.usable[domain.name] // length)
        start = int(order[position // length]) * length
        self.drawn[domain.name] += length
        return domain.train[start : start + length + 1]


@lru_cache(maxsize=64)
def _permutation(seed: int, name: str, epoch: int, length: int, windows: int) -> Places:
    own = int.from_bytes(name.encode(), "little") % 2**32
    return np.random.default_rng([seed, own, epoch, length]).permutation(windows)


def held_out_batches(domains: Iterable[Domain], rows: int, length: int) -> dict[str, Tensor]:
    """Return up to `rows` held-out windows of (length + 1) positions of each domain that has some, spread over it."""
    batches = {}
    for domain in domains:
        if (windows := (len(domain.held_out) - 1) // length) > 0:
            starts = np.linspace(0, windows - 1, min(rows, windows)).astype(int) * length
            batch = np.stack([domain.held_out[start : start + length + 1] for start in starts])
            batches[domain.name] = torch.from_numpy(batch)
    return batches


def check_held_out(counts: Mapping[str, int], least: int) -> None:
    """Raise DataError unless some domain holds out so much: a run chooses its best weights by it."""
    if max(counts.values()) < least:
        each = ", ".join(f"{count} of {name}" for name, count in counts.items())
        raise DataError(
            f"too few documents: one in {HELD_OUT_MODULUS} is held out, by its hash, to tell the best weights by, and "
            f"these are only {each} ({least} of one are needed)"
        )
