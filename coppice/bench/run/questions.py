"""What `coppice bench run` asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coppice.bench.options import file_prompts
from coppice.errors import InvalidField

if TYPE_CHECKING:
    from coppice.bench.reference import Reference
    from coppice.client.client import Client


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt as ids; the benchmark is its file where there are several files, else its category."""

    ids: tuple[int, ...]
    benchmark: str = ""


def read_questions(
    files: Sequence[Path],
    count: int,
    client: Client,
    reference: Reference,
    category: str | None,
    chat: bool,
    warm_up: int = 0,
) -> tuple[list[Question], list[Question]]:
    """The first `count` of every file, or of Coppice's own prompts, and the `warm_up` after them.

    `chat` sends texts as a user's message. Of a conversation's turns the first is asked. Raises InvalidField, also for
    a target without a chat template.
    """
    if chat and not client.describe().has_chat_template:
        raise InvalidField("chat", "this target has no chat template")
    asked: list[Question] = []
    warming: list[Question] = []
    names = benchmark_names(files) if files else ["prompts"]
    for file, name in zip(files or (None,), names, strict=True):
        prompts = file_prompts(file, count + warm_up, client, category)
        if warm_up and len(prompts) < count + warm_up:
            why = f"there are {len(prompts)} prompts in {name}, too few for {count} and {warm_up} to warm up with"
            raise InvalidField("warm_up", why)
        for number, one in enumerate(prompts):
            ids = reference.encode(one.prompt, chat) if isinstance(one.prompt, str) else one.prompt
            question = Question(ids, name if len(files) > 1 else one.category or name)
            (asked if number < count else warming).append(question)
    return asked, warming


def benchmark_names(files: Sequence[Path]) -> list[str]:
    """A name for each file: its own, or its folder's where several are called alike (gsm8k/question.jsonl), or all."""
    full = [file.resolve() for file in files]
    ways = [file.stem for file in full], [file.parent.name for file in full], list(map(str, full))
    return next(names for names in ways if len(set(names)) == len(set(full)))
