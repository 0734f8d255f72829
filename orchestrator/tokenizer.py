"""Text to token ids and back: the target's own tokenizer and chat template, whole characters, stop strings."""

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
from tokenizers.decoders import DecodeStream

from coppice.errors import InvalidField
from coppice.messages.generation import ChatMessage
from coppice.messages.steps import vocabulary_hash

_PRIMING_IDS = 8  # of the prompt, so that a decoder that drops a text's leading space sees this is no beginning


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
        plain = [message.fields for message in messages]
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


class TextStream:
    """Turns one answer's ids into text, whole characters only, and watches for stop strings."""

    def __init__(self, codec: TextCodec | None, before: Sequence[int], stops: Sequence[str], least: int = 0) -> None:
        """`before`: the ids in front of the answer. No stop string ends its first `least` tokens."""
        self._codec, self._stops, self._least = codec, stops, least
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._pending: list[int] = []  # ids whose characters are not complete
        self._held = ""  # text that may turn out to begin a stop string
        if codec is not None:
            for token in before[-_PRIMING_IDS:]:
                self._decoder.step(codec.tokenizer, token)

    def push(self, token: int) -> tuple[str, bool]:
        """Text that is certain now that `token` came, and whether a stop string was met (and cut off)."""
        if self._codec is None:
            return "", False
        self._least -= 1
        self._pending.append(token)
        piece = self._decoder.step(self._codec.tokenizer, token)
        if piece is None:
            return "", False
        self._pending.clear()
        if self._least >= 0:
            return piece, False
        return self._release(self._held + piece)

    def alone(self, token: int) -> str:
        """The text of one id by itself."""
        text: str = self._codec.tokenizer.decode([token], skip_special_tokens=False) if self._codec else ""
        return text

    def _release(self, text: str) -> tuple[str, bool]:
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = _overlap(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What is left when the answer ends elsewhere than at a stop string."""
        rest = self._codec.tokenizer.decode(self._pending, skip_special_tokens=True) if self._codec else ""
        return self._held + rest


def _overlap(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of `stops`, none of which is in it as a whole.

    Over an answer it takes a time in proportion to its text: beyond what was held before only new characters are tried.
    """
    longest = min(len(text), max(map(len, stops), default=1) - 1)
    ends = (text[len(text) - size :] for size in range(longest, 0, -1))
    return next((len(end) for end in ends if any(stop.startswith(end) for stop in stops)), 0)
