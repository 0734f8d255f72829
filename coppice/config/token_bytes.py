"""What each id of a tokenizer adds to a text, in bytes."""

import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

_CACHED_IDS = 1 << 14
NEIGHBOUR = "a"  # a piece in front of another, which so does not begin a text
# Byte-level BPE spells bytes that print as themselves, and all others, in their order, as the characters from 256 on.
_ALPHABET = sorted(ByteLevel.alphabet())
_BYTE_OF = dict(zip(_ALPHABET, sorted(range(256), key=lambda byte: (chr(byte) not in _ALPHABET, byte)), strict=True))
_HALF_CHARACTER = re.compile("<0x([89A-Fa-f][0-9A-Fa-f])>")  # a piece of ByteFallback
_EACH_ALONE = {"Replace", "ByteFallback", "Metaspace", "WordPiece", "Strip", "Fuse"}  # decoders of one piece at a time
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}  # may follow Fuse


class TokenBytes:
    """The bytes that each id of a tokenizer adds to a text. Without a tokenizer no id adds any."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder() if tokenizer else {}
        self.special = {token.content: number for number, token in added.items() if token.special}
        """ids of the tokens that are no text, by their names"""
        self._special = {*self.special.values()}
        decoder = tokenizer.decoder if tokenizer else None
        self.join = decoder.decode if decoder else " ".join  # pieces of the vocabulary to text
        state = json.loads(decoder.__getstate__()) if decoder else {"type": "Fuse"}
        steps = state.get("decoders", [state])
        kinds = [step["type"] for step in steps]
        fused = steps[kinds.index("Fuse") + 1 :] if "Fuse" in kinds else []
        self._byte_level, self._byte_fallback = kinds == ["ByteLevel"], "ByteFallback" in kinds
        self.context_free = self._byte_level or ({*kinds} <= _EACH_ALONE and fused in ([], [_STRIP]))
        """whether an id adds the same behind any other; where a decoder is of an unknown kind, it may not"""
        self.of = lru_cache(_CACHED_IDS)(self._of)

    def piece(self, token: int, special: bool = False) -> str:
        """An id's piece of the vocabulary; "" above it, and of a special token unless `special`."""
        if self.tokenizer is None or (token in self._special and not special):
            return ""
        return self.tokenizer.id_to_token(token) or ""

    def _of(self, token: int, special: bool = False, first: bool = False) -> bytes:
        """The bytes of an id; a special token has some only if `special`. first: it begins a text."""
        piece = self.piece(token, special)
        if not piece or not self.tokenizer:
            return b""
        if self._byte_level:
            is_spelled = self.tokenizer.model.token_to_id(piece) is not None and _BYTE_OF.keys() >= {*piece}
            return bytes(map(_BYTE_OF.__getitem__, piece)) if is_spelled else piece.encode()
        if self._byte_fallback and (byte := _HALF_CHARACTER.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        before = [] if first else [NEIGHBOUR]
        return self.join([*before, piece])[len(self.join(before)) :].encode()

    def of_prompt(self, ids: Iterable[int], text: str | None = None) -> list[bytes]:
        """The bytes of each id of a prompt, special ones too, but for those that are not in the `text` it came as."""
        result, first = list[bytes](), True
        for token in ids:
            special = text is None or token not in self._special or self.piece(token, True) in text
            result.append(self.of(token, special, first))
            first = first and not self.of(token, special)
        return result

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a prompt's ids, special ones too."""
        if self.context_free or self.tokenizer is None:
            return b"".join(self.of_prompt(ids)).decode(errors="replace")
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)
