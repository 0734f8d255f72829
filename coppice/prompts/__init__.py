"""Files of prompts: JSON lines, or plain text with one prompt a line."""

import json
from dataclasses import dataclass
from pathlib import Path

from coppice.errors import InvalidField

# The first of these that a line has is its prompt; of `turns` (Spec-Bench, SPEED-Bench) the first one is.
PROMPT_KEYS = ("ids", "turns", "prompt", "question", "problem", "text")


@dataclass(frozen=True, slots=True)
class FilePrompt:
    """One prompt: text or token ids, and what its line says of its origin."""

    prompt: str | tuple[int, ...]
    category: str = ""
    question_id: int | str = ""
    where: str = ""
    """file and line"""

    @property
    def name(self) -> str:
        """Its place for people, with the question's id if it has one."""
        return f"{self.where} (question {self.question_id})" if self.question_id != "" else self.where


def read_prompts(path: Path) -> list[FilePrompt]:
    """All prompts of a .txt file (one a line) or of JSON lines. Raises InvalidField naming file and line."""
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
    prompt = fields[key]
    if key == "ids":
        is_prompt = isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt)
        prompt = tuple(prompt) if is_prompt else ()
    elif key == "turns":
        prompt = prompt[0] if isinstance(prompt, list) and prompt else ""
    if not prompt or not isinstance(prompt, str | tuple):
        raise InvalidField("prompts", f"{where}: {key} is empty or of the wrong type")
    question_id = fields.get("question_id", "")
    if type(question_id) is not int:
        question_id = str(question_id)
    return FilePrompt(prompt, str(fields.get("category", "")), question_id, where)
