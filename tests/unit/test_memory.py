"""The memory of a look-up head: bounded, forgets by age, apart for each salt, and looked up like a text before."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.config.sections import DrafterSettings
from coppice.heads.base import DraftJob, Head
from coppice.heads.ngram import BLOCKS, CHUNK, SALTS, Lookup, Memory
from coppice.heads.registry import build_head
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree, validate
from coppice.wire.drafter import Advance, OpenDraft
from tests.reference import EFFORT

GREEDY = SamplingParams()
PROMPT = [7, 8, 9]
VOCAB = 1000


def make_head(memory_tokens: int, kind: str = "lookup") -> Head:
    return build_head(DrafterSettings(kind=kind, memory_tokens=memory_tokens))


def opened(head: Head, key: int, ids: list[int], salt: str, prediction: tuple[int, ...] = ()) -> int:
    """Opens a session; returns in how many chunks."""
    return sum(1 for _ in head.open(key, OpenDraft("s", ids, GREEDY, salt=salt, prediction=prediction)))


def say(head: Head, text: list[int], salt: str, prediction: tuple[int, ...] = ()) -> None:
    """A session whose answer is all of a text but its beginning."""
    opened(head, 1, text[:3], salt, prediction)
    head.advance(1, Advance(text[3:]))
    head.close(1)


def drafted(head: Head, salt: str, prompt: list[int], prediction: tuple[int, ...] = ()) -> DraftTree:
    """What a new session drafts behind a prompt, without being remembered."""
    opened(head, 2, prompt[:-1], salt, prediction)
    (growths,) = head.draft([DraftJob(2, prompt[-1], len(prompt) - 1, 31, GREEDY)])
    tree = growths[0].nodes
    validate(tree, VOCAB)
    return tree


def text(number: int, length: int = 20) -> list[int]:
    """One of texts that share no token."""
    return list(range(number * length, (number + 1) * length))


def test_a_text_is_drafted_again_to_its_end() -> None:
    head = make_head(1000)
    said = text(0)
    assert len(drafted(head, "a", said[:5])) == 0
    head.close(2)
    say(head, said, "a")
    tree = drafted(head, "a", said[:5])
    assert tree.tokens.tolist() == said[5 : 5 + len(tree)]
    assert len(tree) > 6
    head.close(2)
    for salt in ("b", ""):  # nobody else sees it
        assert len(drafted(head, salt, said[:5])) == 0


@pytest.mark.parametrize(("tokens", "kind", "salt"), [(0, "lookup", "a"), (1000, "lookup", ""), (1000, "bigram", "a")])
def test_nothing_is_remembered_unless_it_is_wanted(tokens: int, kind: str, salt: str) -> None:
    head = make_head(tokens, kind)
    say(head, text(0), salt)
    assert head.remembered == 0
    assert make_head(1000).remembered == 0
    opened(head, 2, text(0)[:5], salt)
    (growths,) = head.draft([DraftJob(2, 5, 5, 31, GREEDY)])
    assert not set(text(0)[6:]) & set(growths[0].nodes.tokens.tolist())


def test_the_oldest_texts_are_forgotten_first() -> None:
    head = make_head(400)
    for number in range(40):
        say(head, text(number), "a")
        assert head.remembered <= 400
    known = []
    for number in range(40):
        known.append(len(drafted(head, "a", text(number)[:5])) > 0)
        head.close(2)  # a prompt of five tokens in place of the oldest texts
    latest = known.index(True)
    assert all(known[latest:])
    assert 21 < latest < 40 - 10


def test_the_salt_that_was_used_longest_ago_is_forgotten() -> None:
    head = make_head(100)
    for number in range(SALTS):
        say(head, text(0), str(number))
    full = head.remembered
    say(head, [1, 2, 3, 4], "0")
    say(head, text(0), "one more")
    assert head.remembered == full + 5
    assert len(drafted(head, "0", text(0)[:5])) > 0
    head.close(2)
    assert len(drafted(head, "1", text(0)[:5])) == 0


def test_a_long_text_is_taken_in_by_chunks_and_its_end_kept() -> None:
    head = make_head(10 * CHUNK)
    long = [n % VOCAB for n in range(0, 77 * 12 * CHUNK, 77)]
    say(head, long, "a")
    assert CHUNK < head.remembered <= 10 * CHUNK
    assert opened(head, 2, PROMPT, "a") >= 10


@settings(max_examples=60 * EFFORT, deadline=None)
@given(lengths=st.lists(st.integers(1, 90), max_size=60), most=st.integers(1, 300))
def test_a_memory_is_bounded_in_tokens_and_parts_whatever_it_hears(lengths: list[int], most: int) -> None:
    memory = Memory(most)
    for length in lengths:
        memory.add([1] * length)
        assert memory.tokens == sum(len(block.ids) for block in memory.blocks) <= most
        assert all(len(newer.ids) + len(older.ids) > most // BLOCKS for newer, older in pairwise(list(memory.blocks)))


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@settings(max_examples=100 * EFFORT, deadline=None)
@given(texts=st.lists(tokens, max_size=5), ids=tokens, root=st.integers(0, 2))
def test_a_memory_is_looked_up_as_if_it_stood_before_the_text(
    texts: list[list[int]], ids: list[int], root: int
) -> None:
    memory, whole = Memory(1000), Lookup()
    for number, earlier in enumerate(texts):
        memory.add(earlier)
        whole.extend([*earlier, VOCAB + number])
    for _ in memory.count():
        pass
    model = Lookup(memory.blocks)
    model.extend(ids)
    whole.extend(ids)
    state, expected = model.start(root), whole.start(root)

    def following(occurrences: list[tuple[list[int], int, int]]) -> list[tuple[int, list[int]]]:
        return [(length, text[at - length + 1 : at + 1]) for text, at, length in occurrences]

    assert following(state) == following(expected)
    assert all(0 <= token < VOCAB for token in model.followers(state))
