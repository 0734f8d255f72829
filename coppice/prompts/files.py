"""Files of prompts: JSON lines, or plain text with one prompt a line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from coppice.errors import InvalidField

# The first of these that a line has is its prompt; `turns` are a conversation's questions, of which the first is asked.
PROMPT_KEYS = ("ids", "turns", "prompt", "question", "problem", "text")


@dataclass(frozen=True, slots=True)
class FilePrompt:
    """One prompt: text or token ids, and what its line says of its origin."""

    prompt: str | tuple[int, ...]
    category: str = ""
    question_id: str = ""


def read_prompts(path: Path) -> list[FilePrompt]:
    """All prompts of a .txt file (one a line) or of JSON lines; empty lines are skipped.

    Raises InvalidField naming the file and the line that is no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidField("prompts", f"{path}: {error}") from None
    read = _read_json_line if path.suffix != ".txt" else lambda line, _: FilePrompt(line)
    prompts = [read(line, f"{path} line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise InvalidField("prompts", f"{path} holds none")
    return prompts


def demo_prompts() -> list[FilePrompt]:
    """The prompts that come with Coppice, in the categories code, maths and story."""
    return read_prompts(Path(str(files("coppice"))) / "prompts" / "demo.jsonl")


def _read_json_line(line: str, where: str) -> FilePrompt:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise InvalidField("prompts", f"{where}: {error}") from None
    key = next((key for key in PROMPT_KEYS if isinstance(fields, dict) and key in fields), None)
    if key is None:
        raise InvalidField("prompts", f"{where}: no object with one of {', '.join(PROMPT_KEYS)}")
    prompt = _read_value(key, fields[key])
    if prompt is None:
        raise InvalidField("prompts", f"{where}: {key} is empty or of the wrong type")
    return FilePrompt(prompt, str(fields.get("category", "")), str(fields.get("question_id", "")))


def _read_value(key: str, value: Any) -> str | tuple[int, ...] | None:
    if key == "ids":
        plain = isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)
        return tuple(value) or None if plain else None
    if key == "turns":
        value = value[0] if isinstance(value, list) and value else None
    return value if isinstance(value, str) and value else None
