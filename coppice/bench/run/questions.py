"""What `coppice bench run` asks, and the answers in the files that other tools read."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coppice.bench.options import file_prompts
from coppice.errors import InvalidField

if TYPE_CHECKING:
    from coppice.bench.reference import Reference
    from coppice.client.client import Client
    from coppice.client.completion import Completion


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt as ids; the benchmark is its file where there are several files, else its category."""

    ids: tuple[int, ...]
    benchmark: str = ""
    category: str = ""
    question_id: str = ""


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
    found: list[Question] = []
    warming: list[Question] = []
    names = benchmark_names(files) if files else ["prompts"]
    for file, name in zip(files or (None,), names, strict=True):
        prompts = file_prompts(file, count + warm_up, client, category)
        if warm_up and len(prompts) < count + warm_up:
            why = f"there are {len(prompts)} prompts in {name}, too few for {count} and {warm_up} to warm up with"
            raise InvalidField("warm_up", why)
        for number, one in enumerate(prompts, 1):
            ids = reference.encode(one.prompt, chat) if isinstance(one.prompt, str) else one.prompt
            benchmark = name if len(files) > 1 else one.category or name
            question = Question(ids, benchmark, one.category, one.question_id or str(number))
            (found if number <= count else warming).append(question)
    return found, warming


def benchmark_names(files: Sequence[Path]) -> list[str]:
    """A name for each file: its own, or its folder's where several are called alike (gsm8k/question.jsonl), or all."""
    full = [file.resolve() for file in files]
    ways = [file.stem for file in full], [file.parent.name for file in full], list(map(str, full))
    return next(names for names in ways if len(set(names)) == len(set(full)))


def write_answers(
    folder: Path, model_id: str, asked: Sequence[Question], answers: Sequence[Completion], reference: Reference
) -> None:
    """BENCHMARK/MODEL_ID.jsonl in the usual harness's format: a line a question, a choice each time it was asked.

    Times and tokens are of the whole call, prefill included, in all methods alike; accept_lengths count the root.
    """
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for question, answer in zip(asked, answers, strict=True):
        line = lines.setdefault(
            (question.benchmark, question.question_id),
            {
                "question_id": int(question.question_id) if question.question_id.isdigit() else question.question_id,
                "category": question.category or question.benchmark,
                "answer_id": uuid.uuid4().hex,
                "model_id": model_id,
                "choices": [],
                "tstamp": time.time(),
            },
        )
        line["choices"].append(
            {
                "index": len(line["choices"]),
                "turns": [answer.text or reference.decode(answer.ids)],
                "decoding_steps": [answer.steps],
                "new_tokens": [answer.new_tokens],
                "wall_time": [answer.ttft_s + answer.decode_s],
                "accept_lengths": list(answer.accept_lengths),
            }
        )
    for benchmark in dict.fromkeys(name for name, _ in lines):
        mine = [line for (name, _), line in lines.items() if name == benchmark]
        _write(folder / _file_name(benchmark) / f"{_file_name(model_id)}.jsonl", mine)


def _write(file: Path, lines: Iterable[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]", "-", text)
