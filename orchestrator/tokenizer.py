"""Text to token ids and back: the target's own tokenizer and chat template, whole characters, stop strings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from tokenizers.models import BPE

from coppice.errors import InvalidField
from coppice.messages.generation import ChatMessage
from coppice.messages.steps import vocabulary_hash

_PRIMING_IDS = 8  # of the prompt, so that a decoder that drops a text's leading space sees this is no beginning
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
