"""Files of prompts: JSON lines, or plain text with one prompt a line."""

import json
from dataclasses import dataclass
from pathlib import Path

from coppice.errors import InvalidField

# The first of these that a line has is its prompt; `turns` are a conversation's questions (Spec-Bench, SPEED-Bench).
PROMPT_KEYS = ("ids", "turns", "prompt", "question", "problem", "text")
# What SPEED-Bench's files hold in place of texts that are not its own.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


@dataclass(frozen=True, slots=True)
class FilePrompt:
    """One prompt: text or token ids, the questions that follow its answer, and what its line says of its origin."""

    prompt: str | tuple[int, ...]
    category: str = ""
    question_id: int | str = ""
    later: tuple[str, ...] = ()
    where: str = ""
    """file and line"""

    @property
    def name(self) -> str:
        """Its place for people, with the question's id if it has one."""
        return f"{self.where} (question {self.question_id})" if self.question_id != "" else self.where


def read_prompts(path: Path) -> list[FilePrompt]:
    """All prompts of a .txt file (one a line) or of JSON lines. Raises InvalidField naming file and line."""
    if path.suffix == ".parquet":
        why = f'{path} is Parquet; as JSON lines: pandas.read_parquet(...).to_json(..., orient="records", lines=True)'
        raise InvalidField("prompts", why)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidField("prompts", f"{path}: {error}") from None
    read = _read_json_line if path.suffix != ".txt" else lambda line, where: FilePrompt(line, where=where)
    prompts = [read(line, f"{path} line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise InvalidField("prompts", f"{path} holds none")
    return prompts


def demo_prompts() -> list[FilePrompt]:
    """The prompts that come with Coppice, in the categories code, maths and story."""
    return read_prompts(Path(__file__).parent / "demo.jsonl")


def _read_json_line(line: str, where: str) -> FilePrompt:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise InvalidField("prompts", f"{where}: {error}") from None
    key = next((key for key in PROMPT_KEYS if isinstance(fields, dict) and key in fields), None)
    if key is None:
        raise InvalidField("prompts", f"{where}: no object with one of {', '.join(PROMPT_KEYS)}")
    turns = fields[key] if key == "turns" else [fields[key]]
    if key == "ids":
        is_prompt = isinstance(turns[0], list) and all(type(token) is int and token >= 0 for token in turns[0])
        turns = [tuple(turns[0])] if is_prompt and turns[0] else []
    else:
        is_prompt = isinstance(turns, list) and all(isinstance(turn, str) and turn for turn in turns)
    if not (is_prompt and turns):
        raise InvalidField("prompts", f"{where}: {key} is empty or of the wrong type")
    prompt, *later = turns
    if any(isinstance(turn, str) and turn.startswith(PLACEHOLDER) for turn in (prompt, *later)):
        raise InvalidField("prompts", f"{where}: a placeholder; SPEED-Bench's prepare_data.py fetches the text")
    question_id = fields.get("question_id", "")
    if type(question_id) is not int:
        question_id = str(question_id)
    return FilePrompt(prompt, str(fields.get("category", "")), question_id, tuple(later), where)
