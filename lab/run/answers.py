"""Answers as Spec-Bench's evaluation writes them, with what SPEED-Bench's adds: a file for each method of a cell."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coppice.client.completion import Completion
from coppice.prompts.files import FilePrompt
from coppice.testing.target_text import TargetText
from lab.run.pairs import Pairs


def write_answers(folder: Path, pairs: Pairs, text: TargetText, model: str) -> list[Path]:
    """A line for each question, all its turns in it; asked again to fill up a group, it is written once.

    `accept_lengths` count every token that a step commits, the root included, as Spec-Bench does. SPEED-Bench's
    `acceptance_lengths` leave out the last step of a turn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cell, written = pairs.cell, []
    for method, answers in pairs.answers.items():
        name = f"{method.removeprefix('single:')}-T{cell.temperature:g}-budget{cell.budget}-sessions{cell.sessions}"
        file = folder / f"{re.sub('[^A-Za-z0-9._-]', '_', name)}.jsonl"
        by_source: dict[FilePrompt, dict[int, Completion]] = {}
        for question, answer in zip(pairs.questions, answers, strict=True):
            source = question.source or FilePrompt(question.ids, question.benchmark)
            by_source.setdefault(source, {}).setdefault(question.turn, answer)
        lines = [
            _line(number, source, [turns[at] for at in sorted(turns)], text, f"{model}-{name}")
            for number, (source, turns) in enumerate(by_source.items(), 1)
        ]
        file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
        written.append(file)
    return written


def _line(
    number: int, source: FilePrompt, answers: Sequence[Completion], text: TargetText, model: str
) -> dict[str, Any]:
    asked = source.prompt if isinstance(source.prompt, str) else text.decode(source.prompt)
    said = [text.decode(text.ended(answer.ids)).strip() for answer in answers]
    question_id = number if source.question_id == "" else source.question_id
    return {
        "question_id": question_id,
        "category": source.category,
        "answer_id": f"{model}-{question_id}",
        "model_id": model,
        "turns": [asked, *source.later],
        "acceptance_lengths": [length for answer in answers for length in answer.accept_lengths[:-1] or (1,)],
        "choices": [
            {
                "index": 0,
                "turns": said,
                "decoding_steps": [answer.steps for answer in answers],
                "new_tokens": [answer.new_tokens for answer in answers],
                "wall_time": [answer.ttft_s + answer.decode_s for answer in answers],
                "accept_lengths": [length for answer in answers for length in answer.accept_lengths],
            }
        ],
        "tstamp": time.time(),
    }
