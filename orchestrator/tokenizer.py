"""Text to token ids: the target's own tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from coppice.errors import InvalidField
from coppice.messages.generation import ChatMessage
from coppice.messages.steps import vocabulary_hash


class TextCodec:
    """A target's tokenizer.json and, if it has one, its chat template."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidField when tokenizer.json is unusable."""
        self.folder = folder
        try:
            self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:
            raise InvalidField("orchestrator.target", f"{folder / 'tokenizer.json'}: {error}") from None
        config = folder / "tokenizer_config.json"
        self._config: dict[str, Any] = json.loads(config.read_text()) if config.is_file() else {}
        self._template = _chat_template(folder, self._config)

    @classmethod
    def find(cls, folder: str) -> TextCodec | None:
        """The codec of a target's folder; None when it has no tokenizer.json, so that only ids work."""
        return cls(Path(folder)) if folder and (Path(folder) / "tokenizer.json").is_file() else None

    @property
    def has_chat_template(self) -> bool:
        """Whether chat prompts work."""
        return self._template is not None

    @cached_property
    def vocabulary_hash(self) -> bytes:
        """What a head's tokenizer is compared by."""
        return vocabulary_hash(self.tokenizer.get_vocab())

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def encode(self, prompt: str | Sequence[ChatMessage], bare: bool = False) -> list[int]:
        """Ids of a text, with the special tokens the tokenizer puts around a prompt, or of a conversation.

        `bare` is a text without them. The interpreter's lock is held all the time. Raises InvalidField.
        """
        if not isinstance(prompt, str):
            return self._encode_chat(prompt)
        ids: list[int] = self.tokenizer.encode(prompt, add_special_tokens=not bare).ids
        return ids

    def _encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Ids of a conversation up to where the assistant answers. Raises InvalidField."""
        if self._template is None:
            raise InvalidField("chat", "this target has no chat template")
        special = {
            name: _content(self._config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        plain = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._template.render(messages=plain, add_generation_prompt=True, **special)
        except jinja2.TemplateError as error:
            raise InvalidField("chat.messages", str(error)) from None
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def no_room(tokens: int, context: int) -> InvalidField:
    """The refusal of a prompt that fills the context."""
    return InvalidField("prompt", f"{tokens} tokens leave no room in a context of {context}")


def _content(token: str | dict[str, Any] | None) -> str:
    """A special token's text, which tokenizer_config.json holds plainly or as an object."""
    return str(token.get("content", "")) if isinstance(token, dict) else token or ""


def _chat_template(folder: Path, config: dict[str, Any]) -> jinja2.Template | None:
    file = folder / "chat_template.jinja"
    source = file.read_text() if file.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several named ones
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    if not source:
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
