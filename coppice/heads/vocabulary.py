"""Whether a draft model's ids mean what its target's do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoConfig

from coppice.config.model_size import Context
from coppice.engine.attention import one_line
from coppice.errors import InvalidField
from coppice.wire.drafter import vocabulary_hash

_TOKENIZER = "tokenizer.json"


def common_width(folder: str | Path, target: str | Path) -> int:
    """Return the target's vocabulary width, in logits, for a draft model with the same vocabulary.

    Where both folders have a tokenizer.json, ids must name the same tokens in both, but for added tokens that one of
    them does not have. Then the widths may differ in rows that no common token has: a family's small models are often
    padded otherwise than its large ones. Raises InvalidField.
    """
    own, wanted = _config(folder).vocab_size, _config(target).vocab_size
    tokens = 0
    if (mine := _tokenizer(folder)) and (theirs := _tokenizer(target)):
        first, second = mine.get_vocab(), theirs.get_vocab()
        of_one = {*mine.get_vocab(with_added_tokens=False)} ^ {*theirs.get_vocab(with_added_tokens=False)}
        odd = [token for token in first.keys() | second.keys() if first.get(token) != second.get(token)]
        odd = [token for token in odd if token in of_one or (token in first and token in second)]
        if odd:
            number, token = min((first.get(token, second.get(token, 0)), token) for token in odd)
            why = f"its tokenizer is not the target's: they differ in token {token!r}, id {number}"
            raise InvalidField("drafter.path", f"{folder}: {why}")
        tokens = max((first[token] for token in first.keys() & second.keys()), default=-1) + 1
    if own != wanted and not 0 < tokens <= min(own, wanted):
        raise InvalidField("drafter.path", f"{folder}: vocab_size is {own}, the target's is {wanted}")
    return int(wanted)


def context_of(folder: str | Path, otherwise: int) -> int:
    """Return how many tokens a target's texts may have; `otherwise` where it names no limit. Raises InvalidField."""
    return Context.of(_config(folder), otherwise).tokens


def tokenizer_hash(folder: str | Path) -> bytes:
    """Return the hash of a folder's tokenizer.json, by which others know its vocabulary; empty without the file.

    Raises InvalidField.
    """
    tokenizer = _tokenizer(folder)
    return vocabulary_hash(tokenizer.get_vocab()) if tokenizer else b""


def _tokenizer(folder: str | Path) -> Tokenizer | None:
    file = Path(folder) / _TOKENIZER
    return _read(file, Tokenizer.from_file, str(file)) if file.is_file() else None


def _config(folder: str | Path) -> Any:
    config = _read(folder, AutoConfig.from_pretrained, folder, local_files_only=True, trust_remote_code=False)
    return config.get_text_config()


def _read(place: str | Path, read: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What a library reads there. Raises InvalidField for what it cannot use."""
    try:
        return read(*arguments, **options)
    except Exception as error:  # tokenizers raises nothing narrower
        raise InvalidField("drafter.path", f"{place} cannot be read: {one_line(error)}") from None
