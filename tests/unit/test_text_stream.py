"""Text of an answer as its ids come: stop strings cut it wherever they begin, in a time that no request can raise."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.tokenizer import TextCodec, TextStream
from tests.tiny import make_target


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec(make_target(tmp_path_factory.mktemp("target")))


def pushed(codec: TextCodec, text: str, stops: Sequence[str]) -> tuple[list[str], bool]:
    """The pieces of a text whose ids come one by one, and whether a stop string ended it."""
    stream, pieces = TextStream(codec, [], stops), []
    for token in codec.encode(text):
        piece, stopped = stream.push(token)
        pieces.append(piece)
        if stopped:
            return pieces, True
    return [*pieces, stream.flush()], False


@given(st.text("ab", max_size=24), st.lists(st.text("ab", min_size=1, max_size=6), max_size=4))
@settings(max_examples=300, deadline=None)
def test_a_text_ends_before_the_first_stop_string(codec: TextCodec, text: str, stops: list[str]) -> None:
    pieces, stopped = pushed(codec, text, stops)
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    assert stopped == bool(ends)
    read = text[: ends[0]] if ends else text
    starts = [len(read) - len(stop) for stop in stops if ends and read.endswith(stop)]
    assert "".join(pieces) == read[: min(starts, default=len(read))]


def test_no_stop_strings_make_a_long_answer_slow(codec: TextCodec) -> None:
    """One of them is held back all the time, and the others are compared with what is held."""

    def seconds(stops: Sequence[str]) -> float:
        began = time.process_time()
        pushed(codec, "a" * 4096, stops)
        return time.process_time() - began

    assert seconds([*["b" * 256] * 15, "a" * 255 + "b"]) < 10 * seconds(["b" * 256] * 16)
