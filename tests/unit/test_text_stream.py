"""Text of ids: one function of them for every family of tokenizers, whatever comes, and stop strings in it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from coppice.config.token_bytes import TokenBytes
from coppice.wire.common import Fence
from coppice.wire.generation import Chunk, GenerationRequest
from coppice.wire.verifier import Verdict, VerifyTimings
from orchestrator.loop import Output, Step
from orchestrator.text import TextStream

CORPUS = [
    "the cat saw the dog's hat, didn't it?",
    "a man can't see. The end!",
    "naïve café über 語の猫 🙂 ok",
    "\t\n  two",
] * 3
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


MAKERS: dict[str, Callable[[], Tokenizer]] = {
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
    return st.lists(words | some, max_size=4).map(lambda parts: [*chain(*parts)])


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
@settings(max_examples=30, deadline=None)
def test_a_text_is_what_the_tokenizer_decodes_and_comes_while_it_is_made(family: str, data: st.DataObject) -> None:
    """Where it differs, bytes of ByteFallback are no UTF-8 (docs/http.md), or an unknown decoder looks ahead."""
    tokens = data.draw(ids(family))
    whole, wanted = text_of(family, tokens), decoded(family, tokens)
    if family == "byte-level" or "\ufffd" not in wanted:
        assert whole == wanted or family == "strips both ends"
    if family in KNOWN:
        pieces, _ = pieces_of(TextStream(made(family)[1]), tokens)
        for at in range(1, len(tokens)):
            begun = text_of(family, tokens[:at])
            assert len(begun) - 3 <= len("".join(pieces[:at])) <= len(begun)
        spelled = b"".join(map(made(family)[1].of, tokens))
        assert spelled.decode(errors="replace") == whole
    if family != "strips both ends":
        prompt = made(family)[0].decode(tokens, skip_special_tokens=False)
        assert made(family)[1].decode(tokens) == prompt or (family != "byte-level" and "\ufffd" in prompt)


@pytest.mark.parametrize("family", MAKERS)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_a_stop_string_is_found_wherever_it_stands(family: str, data: st.DataObject) -> None:
    tokens = data.draw(ids(family))
    text = text_of(family, tokens)
    places = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 6))
    stops = [text[at : at + size] for at, size in data.draw(st.lists(places, max_size=3))] if text else []
    pieces, stopped = pieces_of(TextStream(made(family)[1], [*stops, "never in it"]), tokens)
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    assert stopped == bool(ends)
    read = text[: ends[0]] if ends else text
    kept = [len(read) - len(stop) for stop in stops if read.endswith(stop)]
    assert "".join(pieces) == read[: min([*kept, len(read)])]


def work(family: str, token: int, count: int, stops: Sequence[str] = ()) -> int:
    """Calls and joined pieces of an answer of one id."""
    tokens, total = TokenBytes(made(family)[0]), 0
    join = tokens.join

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal total
        total += event in ("call", "c_call")

    def counting(pieces: list[str]) -> str:
        nonlocal total
        total += len(pieces)
        return join(pieces)

    tokens.join = counting
    sys.setprofile(profile)
    try:
        pieces_of(TextStream(tokens, stops), [token] * count)
    finally:
        sys.setprofile(None)
    return total


@pytest.mark.parametrize("family", MAKERS)
def test_an_answer_costs_a_time_in_proportion_to_its_ids(family: str) -> None:
    """Ids that make no character too, and a stop string that is held back all the time."""
    tokenizer, tokens = made(family)
    half = next((number for number in range(tokenizer.get_vocab_size()) if tokens.of(number) == b"\xa9"), 5)
    assert any(pieces_of(TextStream(tokens), [half] * 9)[0][:4])
    assert work(family, half, 2000) < 2.1 * work(family, half, 1000)
    assert work(family, half, 1000) < 4 * work(family, tokenizer.encode("a").ids[0], 1000)
    if family == "byte-level":
        a, held = tokenizer.token_to_id("a") or 0, [*["b" * 256] * 15, "a" * 255 + "b"]
        assert work(family, a, 4096, held) < 10 * work(family, a, 4096, ["b" * 256] * 16)


@pytest.mark.parametrize("trees", [False, True])
def test_a_chunk_goes_out_every_so_many_steps_and_at_the_end(trees: bool) -> None:
    chunks: list[Chunk] = []
    request = GenerationRequest(text="a", max_new_tokens=9, want_trees=trees)
    output = Output(request, TokenBytes(None), frozenset(), chunks.append, 3)
    step = Step(1, None, [])
    step.verdict = Verdict(Fence(1, 1, 0), (), None, VerifyTimings())
    for token in range(9):
        output.commit((token,), 0, (0.0,), ())
        output.flush(step if token else None)
    together = [(1,), (2,), (3,), (4,), (5,), (6,), (7,), (8,)] if trees else [(1, 2, 3), (4, 5, 6), (7, 8)]
    assert [chunk.ids for chunk in chunks] == [(0,), *together]


def answered(tokens: Sequence[int], end: int, **told: Any) -> tuple[str, str | None]:
    """The text of an answer of these ids, and why it is over."""
    chunks: list[Chunk] = []
    request = GenerationRequest(text="a", max_new_tokens=len(tokens), want_log_probs=True, **told)
    output = Output(request, made("byte-level")[1], frozenset([end]), chunks.append)
    for token in tokens:
        if output.finish is None:
            output.commit((token,), 0, (-1.0,), ())
            output.flush(None)
    text = "".join(chunk.text for chunk in chunks)
    assert text == "".join(piece for chunk in chunks for piece in chunk.pieces) or told.get("stop")
    return text, output.finish


@pytest.mark.parametrize("mark", ["<tool>", "<|end|>"])
def test_an_id_that_ends_a_text_is_no_part_of_it(mark: str) -> None:
    tokenizer, _ = made("byte-level")
    end, half, *letters = (tokenizer.token_to_id(piece) or 0 for piece in (mark, "Ã", *"abcda"))
    a, cut = letters[0], ("\ufffd",)
    for before, text in (([a, a], "aa"), ([a, half], "a\ufffd"), ([], "")):
        for stops in ((), ("tool", ">", "end")):
            assert answered([*before, end], end, stop=stops) == (text, "eos")
    assert answered([a, end, a], end, include_stop=True, keep_special_tokens=True) == (f"a{mark}", "eos")
    assert answered([a, half, end], end, stop=cut) == ("a", "stop")  # of what is flushed, too
    for kept, text in ((False, "ab"), (True, "abcd")):
        assert answered(letters, end, stop=("cd", "a?"), include_stop=kept)[0] == text
    assert answered([a, half], end, stop=cut, min_tokens=2) == ("a\ufffd", "length")
