"""Where training text comes from: `--data NAME=GLOB[:WEIGHT]` lines, the documents they name and the held-out rule."""

import glob
import hashlib
import json
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
