"""A target's tokenizer, chat template and limits, read from its folder: known before any weight is loaded.

transformers and tokenizers are imported when they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from coppice.engine.engine import Context

_TOKENIZER = "tokenizer.json"
_ANSWER = "@an answer@"


class TargetText:
    """What turns texts into a target's ids, as transformers does, and back."""

    def __init__(self, target: Path) -> None:
        """Reads nothing yet."""
        self._target = target

    @property
    def has_tokenizer(self) -> bool:
        """Whether texts can be encoded."""
        return (self._target / _TOKENIZER).is_file()

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be encoded."""
        return self.has_tokenizer and bool(self._chat.chat_template)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self._config.vocab_size)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """The ids that end a text."""
        transformers: Any = import_module("transformers")
        try:
            told = transformers.GenerationConfig.from_pretrained(self._target, local_files_only=True).eos_token_id
        except OSError:  # there is no such file
            told = None
        told = self._config.eos_token_id if told is None else told
        return frozenset(told if isinstance(told, list | tuple) else [] if told is None else [told])

    def context(self, kv_tokens: int) -> Context:
        """How long a text may be that a verifier with so many KV tokens serves."""
        return Context.of(self._config, kv_tokens).served(kv_tokens)

    def encode(self, text: str, chat: bool = False) -> tuple[int, ...]:
        """Token ids of a text, as the tokenizer alone gives them, or of a user's message in the chat template."""
        if chat:
            text = self._rendered([("user", text)])
        return tuple(self._tokenizer.encode(text, add_special_tokens=not chat).ids)

    def encode_between(self, question: str, after: str, chat: bool) -> tuple[int, ...]:
        """Ids of what stands between the answer to a question and the answer to the one after it.

        Without a chat template the next question is a paragraph of its own.
        """
        text = f"\n\n{after}\n"
        if chat:
            _, _, text = self._rendered([("user", question), ("assistant", _ANSWER), ("user", after)]).rpartition(
                _ANSWER
            )
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Their text; the ids themselves with spaces between where there is no tokenizer."""
        if not self.has_tokenizer:
            return " ".join(map(str, ids))
        text: str = self._tokenizer.decode(list(ids))
        return text

    def ended(self, ids: Sequence[int]) -> Sequence[int]:
        """An answer up to the id that ends it, excluded; all of it without one."""
        return ids[: next((at for at, token in enumerate(ids) if token in self.eos_ids), len(ids))]

    def _rendered(self, messages: Sequence[tuple[str, str]]) -> str:
        told = [{"role": role, "content": content} for role, content in messages]
        text: str = self._chat.apply_chat_template(told, add_generation_prompt=True, tokenize=False)
        return text

    @cached_property
    def _chat(self) -> Any:
        transformers: Any = import_module("transformers")
        return transformers.AutoTokenizer.from_pretrained(self._target, local_files_only=True)

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self._target / _TOKENIZER))

    @cached_property
    def _config(self) -> Any:
        transformers: Any = import_module("transformers")
        config = transformers.AutoConfig.from_pretrained(self._target, local_files_only=True, trust_remote_code=False)
        return config.get_text_config()
