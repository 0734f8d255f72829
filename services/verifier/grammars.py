"""The compiled grammars of a verifier's target: each is compiled once, and neither loop nor target waits for it."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from coppice.config.token_bytes import TokenBytes
from coppice.engine.engine import EngineInfo
from coppice.errors import InvalidField
from coppice.speculation.grammar import FIELD, Guide, compile_grammar, make_vocabulary
from coppice.wire.common import Grammar

MOST_COMPILED = 32  # grammars that are kept, those that were used last; each holds some tens of megabytes at most


def vocabulary_of(tokenizer: Tokenizer, size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """The vocabulary of a target with `size` logits. Its tokenizer is good for nothing else from here on."""
    tokenizer.encode_special_tokens = True  # their names inside a text are text
    spelled = TokenBytes(tokenizer)
    special = {token for token in spelled.special.values() if token < size}
    tokens = [spelled.of(token, token in special) for token in range(size)]
    encode = partial(tokenizer.encode, add_special_tokens=False)
    # What a tokenizer puts in front of every text goes in front of a byte that is part of no longer piece.
    before = "" if b"".join(map(spelled.of, encode("a").ids)) == b"a" else "\x02"
    skipped = len(encode(before))
    numbers = {piece: token for token, piece in enumerate(tokens) if piece and token not in special}
    longest = max(map(len, numbers))

    def spell(text: str) -> list[int]:
        """A text's ids: the tokenizer's, or where these say something else, those of the longest pieces."""
        ids, whole, at = encode(before + text).ids[skipped:], text.encode(), 0
        if b"".join([tokens[token] for token in ids if token < size]) == whole:
            return ids
        ids = []
        while piece := next((whole[at:end] for end in range(at + longest, at, -1) if whole[at:end] in numbers), b""):
            ids.append(numbers[piece])
            at += len(piece)
        return ids

    return make_vocabulary(tokens, special, eos_ids, spell)


class Grammars:
    """Compiles grammars on one thread, which first prepares the vocabulary: some seconds of the interpreter's lock."""

    def __init__(self, folder: str, info: EngineInfo) -> None:
        self._file, self._info = Path(folder) / "tokenizer.json", info
        self._thread = ThreadPoolExecutor(1, "grammar")
        self.masking = ThreadPoolExecutor(1, "masks")
        """of masks that a forward on the CPU will need, which are computed beside it"""
        self._compiled = lru_cache(MOST_COMPILED)(self._compile)
        self.vocabulary: Future[LLTokenizer] = self._thread.submit(self._prepare)

    async def start(self, grammar: Grammar, ids: Sequence[int]) -> Guide:
        """The guide of an answer that begins with some ids. Raises InvalidField."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._guide, grammar, ids)

    def _prepare(self) -> LLTokenizer:
        info = self._info
        if not (self._file.is_file() and info.eos_ids):
            raise InvalidField(FIELD, "this target has no tokenizer.json, or names no id that ends a text")
        return vocabulary_of(Tokenizer.from_file(str(self._file)), info.vocab_size, info.eos_ids)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        return compile_grammar(self.vocabulary.result(), grammar.kind, grammar.text)

    def _guide(self, grammar: Grammar, ids: Sequence[int]) -> Guide:
        guide = Guide(self._compiled(grammar).deep_copy(), self._info.vocab_size)
        guide.append(ids)
        return guide
