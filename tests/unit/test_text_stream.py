"""Text of ids: one function of them for every family of tokenizers, whatever comes, and stop strings in it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from coppice.messages.generation import Chunk, GenerationRequest
from orchestrator.output import Output
from orchestrator.text import TextStream, TokenBytes

CORPUS = ["the cat saw the dog's hat, didn't it?", "a man can't see. The end!", "naïve café über 語の猫 🙂 ok", "\t\n  two"] * 3
SPECIAL = ["<s>", "</s>", "<unk>"]
SPACED = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


def byte_level(decoder: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.decoder = decoder or decoders.ByteLevel()
    return tokenizer


def sentence_piece(decoder: Any) -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS[:2], trainers.BpeTrainer(vocab_size=80))
    model = json.loads(trained.to_str())["model"]
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁▁", *model["vocab"]]
    ids = {piece: number for number, piece in enumerate(pieces)}
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("▁▁", normalized=False)])  # as Gemma's are
    return tokenizer


def word_piece(decoder: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=SPECIAL))
    tokenizer.decoder = decoder
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=70, special_tokens=SPECIAL, unk_token="<unk>")
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


MAKERS = {
    "byte-level": byte_level,
    "llama": lambda: sentence_piece(decoders.Sequence([*SPACED, decoders.Strip(" ", 1, 0)])),
    "gemma": lambda: sentence_piece(decoders.Sequence(SPACED)),
    "WordPiece": lambda: word_piece(decoders.WordPiece()),
    "Unigram": unigram,
    "no decoder": lambda: word_piece(None),
    "strips both ends": lambda: sentence_piece(decoders.Sequence([*SPACED, decoders.Strip(" ", 1, 1)])),
    "behind byte-level": lambda: byte_level(decoders.Sequence([decoders.ByteLevel(), decoders.Replace("e", "E")])),
}
KNOWN = list(MAKERS)[:6]


@cache
def made(family: str) -> tuple[Tokenizer, TokenBytes]:
    """A small tokenizer with an added token of each kind."""
    tokenizer = MAKERS[family]()
    tokenizer.add_tokens(["<tool>"])
    tokenizer.add_special_tokens(["<|end|>"])
    tokens = TokenBytes(tokenizer)
    assert tokens.context_free == (family in KNOWN)
    return tokenizer, tokens


def ids(family: str) -> st.SearchStrategy[list[int]]:
    """Of a family: texts, ids at random, special ones, and some above the tokenizer's."""
    tokenizer, _ = made(family)
    size = tokenizer.get_vocab_size()
    words = st.text("the cat's ïé語🙂猫,!  \n", max_size=12).map(lambda text: tokenizer.encode(text).ids)
    some = st.lists(st.integers(0, size + 8), max_size=12) | st.lists(st.integers(size - 4, size + 4), max_size=4)
    return st.lists(words | some, max_size=4).map(lambda parts: sum(parts, []))


def pieces_of(stream: TextStream, tokens: Sequence[int]) -> tuple[list[str], bool]:
    """The pieces of a text whose ids come one by one, and whether a stop string ended it."""
    pieces = []
    for token in tokens:
        piece, stopped = stream.push(token)
        pieces.append(piece)
        if stopped:
            return pieces, True
    rest, stopped = stream.flush()
    return [*pieces, rest], stopped


def text_of(family: str, tokens: Sequence[int]) -> str:
    return "".join(pieces_of(TextStream(made(family)[1]), tokens)[0])


def decoded(family: str, tokens: Sequence[int]) -> str:
    """What the tokenizer says that ids add behind another one, special tokens left out."""
    tokenizer, _ = made(family)
    before = tokenizer.encode("a").ids
    return tokenizer.decode([*before, *tokens])[len(tokenizer.decode(before)) :]


@pytest.mark.parametrize("family", MAKERS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_text_is_what_the_tokenizer_decodes_and_comes_while_it_is_made(family: str, data: st.DataObject) -> None:
    """Where it differs, bytes of ByteFallback are no UTF-8 (docs/http.md), or a decoder of an unknown kind looks ahead."""
    tokens = data.draw(ids(family))
    whole, wanted = text_of(family, tokens), decoded(family, tokens)
    if family == "byte-level" or "\ufffd" not in wanted:
        assert whole == wanted or family == "strips both ends"
    pieces, _ = pieces_of(TextStream(made(family)[1]), tokens)
    for at in range(len(tokens)):
        known = text_of(family, tokens[: at + 1])
        assert len(known) - 3 <= len("".join(pieces[: at + 1])) <= len(known)
    if family in KNOWN:
        spelled = b"".join(map(made(family)[1].of, tokens))
        assert spelled.decode(errors="replace") == whole


@pytest.mark.parametrize("family", MAKERS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_stop_string_is_found_wherever_it_stands(family: str, data: st.DataObject) -> None:
    tokens = data.draw(ids(family))
    text = text_of(family, tokens)
    places = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 6))
    stops = [text[at : at + size] for at, size in data.draw(st.lists(places, max_size=3))] if text else []
    pieces, stopped = pieces_of(TextStream(made(family)[1], [*stops, "never in it"]), tokens)
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    assert stopped == bool(ends)
    read = text[: ends[0]] if ends else text
    assert "".join(pieces) == read[: min([len(read) - len(stop) for stop in stops if read.endswith(stop)] or [len(read)])]


@given(st.text("ab", max_size=24), st.lists(st.text("ab", min_size=1, max_size=6), max_size=4))
@settings(max_examples=300, deadline=None)
def test_a_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    tokenizer, tokens = made("byte-level")
    alone = [tokenizer.token_to_id(character) for character in text]
    pieces, stopped = pieces_of(TextStream(tokens, stops), alone)
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    assert stopped == bool(ends)
    read = text[: ends[0]] if ends else text
    starts = [len(read) - len(stop) for stop in stops if ends and read.endswith(stop)]
    assert "".join(pieces) == read[: min(starts, default=len(read))]
