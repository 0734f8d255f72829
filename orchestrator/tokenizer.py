"""Text to token ids: the target's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

from coppice.errors import InvalidField
from coppice.wire.drafter import vocabulary_hash
from coppice.wire.generation import ChatMessage

_MOST_BYTES = 16 << 20  # of a rendered chat
_ASSISTANT = "Hello."  # what the assistant says in the chat that tells how a template ends a turn


class ChatTemplate:
    """The chat template of a folder, rendered by transformers."""

    def __init__(self, folder: Path) -> None:
        """Does not fail: what is wrong with the folder's files is raised by `render`. Takes half a second, no torch."""
        from transformers import PreTrainedTokenizerFast

        self._error: Exception | None = None
        try:  # its templates and special tokens, without its vocabulary
            self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(
                folder, tokenizer_object=Tokenizer(BPE()), local_files_only=True
            )
        except Exception as error:
            self._error = error

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether a folder has one, usable or not."""
        config = folder / "tokenizer_config.json"
        return (
            (folder / "chat_template.jinja").is_file()
            or any(folder.glob("additional_chat_templates/*.jinja"))
            or (config.is_file() and b'"chat_template"' in config.read_bytes())
        )

    def render(self, messages: Sequence[ChatMessage], ask: bool = True) -> str:
        """The text that `apply_chat_template` makes of a conversation. Raises InvalidField.

        ask: up to where the assistant answers. A template may take any time and memory.
        """
        filled = [message.fields for message in messages]
        try:
            if self._error:
                raise self._error
            text: str = self._tokenizer.apply_chat_template(filled, tokenize=False, add_generation_prompt=ask)
            if len(text.encode()) > _MOST_BYTES:
                raise ValueError(f"a text of {len(text)} characters")
        except Exception as error:  # templates come with models and can raise anything
            reason = str(error).partition("\n")[0]
            if type(error).__name__ != "TemplateError":  # which is what a template's raise_exception raises
                reason = f"this target's chat template cannot be used: {type(error).__name__}: {reason}"
            raise InvalidField("chat.messages", reason) from None
        return text

    def turn_end(self, tokens: Iterable[str]) -> str:
        """With which of some tokens an assistant's turn ends; empty: with none of them. Raises InvalidField."""
        question = ChatMessage("user", "Hi")
        self.render([question])
        try:
            text = self.render([question, ChatMessage("assistant", _ASSISTANT)], ask=False)
        except InvalidField:
            return ""
        _, answered, rest = text.rpartition(_ASSISTANT)
        return max((token for token in tokens if answered and rest.strip().startswith(token)), key=len, default="")


class TextCodec:
    """A target's tokenizer.json and, if it has one, its chat template."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidField when tokenizer.json is unusable."""
        self.folder = folder
        try:
            self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:
            raise InvalidField("orchestrator.target", f"{folder / 'tokenizer.json'}: {error}") from None
        self.tokenizer.no_padding()  # of batches; a prompt is itself
        self.tokenizer.no_truncation()
        self.has_chat_template = ChatTemplate.is_in(folder)

    @classmethod
    def find(cls, folder: str) -> TextCodec | None:
        """The codec of a target's folder; None when it has no tokenizer.json, so that only ids work."""
        return cls(Path(folder)) if folder and (Path(folder) / "tokenizer.json").is_file() else None

    @cached_property
    def vocabulary_hash(self) -> bytes:
        """What a head's tokenizer is compared by."""
        return vocabulary_hash(self.tokenizer.get_vocab())

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def encode(self, text: str, bare: bool = False) -> list[int]:
        """Ids of a text, with the special tokens that the tokenizer puts around a prompt, or `bare` without them.

        The interpreter's lock is held all the time.
        """
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=not bare).ids
        return ids


def no_room(tokens: int, context: int) -> InvalidField:
    """The refusal of a prompt that fills the context."""
    return InvalidField("prompt", f"{tokens} tokens leave no room in a context of {context}")
