"""Whether a draft model's ids mean what its target's do."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoConfig

from coppice.engine.attention import one_line
from coppice.errors import InvalidField
from coppice.messages.steps import vocabulary_hash

_TOKENIZER = "tokenizer.json"


def common_width(folder: str | Path, target: str | Path) -> int:
    """Return the target's vocabulary width, in logits, for a draft model with the same vocabulary.

    Where both folders have a tokenizer.json, ids must name the same tokens in both. Then the widths may differ in rows
    that no token has: a family's small models are often padded otherwise than its large ones. Raises InvalidField.
    """
    own, wanted = _width(folder), _width(target)
    mine, theirs = (_tokenizer_file(place) for place in (folder, target))
    tokens = 0
    if mine.is_file() and theirs.is_file():
        first = _read(mine, Tokenizer.from_file, str(mine)).get_vocab()
        if not filecmp.cmp(mine, theirs, shallow=False):
            second = _read(theirs, Tokenizer.from_file, str(theirs)).get_vocab()
            if first != second:
                odd = sorted(first.items() ^ second.items(), key=lambda item: (item[1], item[0]))[0]
                why = f"its tokenizer is not the target's: they differ in token {odd[0]!r}, id {odd[1]}"
                raise InvalidField("drafter.path", f"{folder}: {why}")
        tokens = max(first.values(), default=-1) + 1
    if own != wanted and not 0 < tokens <= min(own, wanted):
        raise InvalidField("drafter.path", f"{folder}: vocab_size is {own}, the target's is {wanted}")
    return wanted


def tokenizer_hash(folder: str | Path) -> bytes:
    """Return the hash of a folder's tokenizer.json, by which others know its vocabulary; empty without the file.

    Raises InvalidField.
    """
    file = _tokenizer_file(folder)
    return vocabulary_hash(_read(file, Tokenizer.from_file, str(file)).get_vocab()) if file.is_file() else b""


def _tokenizer_file(folder: str | Path) -> Path:
    """A folder's tokenizer.json, or that of the folder which its config.json names as `tokenizer`, to save a copy."""
    own = Path(folder) / _TOKENIZER
    if own.is_file():
        return own
    config = _read(folder, json.loads, (Path(folder) / "config.json").read_text(encoding="utf-8"))
    return Path(folder, str(config.get("tokenizer", "")), _TOKENIZER)


def _width(folder: str | Path) -> int:
    config = _read(folder, AutoConfig.from_pretrained, folder, local_files_only=True, trust_remote_code=False)
    return int(config.get_text_config().vocab_size)


def _read(place: str | Path, read: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What a library reads there. Raises InvalidField for what it cannot use."""
    try:
        return read(*arguments, **options)
    except Exception as error:  # tokenizers raises nothing narrower
        raise InvalidField("drafter.path", f"{place} cannot be read: {one_line(error)}") from None
