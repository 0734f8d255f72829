"""What a verifier keeps of texts: whatever is opened, closed, forked and given up, a session finds its KV and rows."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from coppice.engine.kv_cache import BlockTable, KVPool, KVShape, OutOfBlocks
from coppice.errors import InvalidField
from coppice.speculation.sampling import SamplingParams
from coppice.wire.common import FeatureRef, committed_hash
from coppice.wire.verifier import OpenSession
from services.verifier.features import FeatureWindow, Feed, Numbers, Window, columns, packed
from services.verifier.prefix import Prefix, PrefixCache
from services.verifier.session import Session
from tests.reference import EFFORT, check_pool

SIZE = 4


def opening(ids: list[int]) -> OpenSession:
    return OpenSession("s", ids, SamplingParams(), frozenset(), len(ids) + 1, salt="a")


class Cached:
    """A cache over a pool of so many blocks, and what its sessions wrote."""

    def __init__(self, blocks: int = 40, share: float = 1.0, runs: bool = True) -> None:
        self.registry = CollectorRegistry()
        self.pool = KVPool(layers=[KVShape(1, 1, 1)], tokens=blocks * SIZE, block_size=SIZE, dtype=torch.float64)
        self.pool._prefers_runs = runs
        self.cache = PrefixCache(self.pool, int(share * blocks * SIZE), self.registry)
        self.sessions = 0

    def open(
        self, ids: list[int], salt: str = "a", room: int = 0, layers: tuple[int, ...] = (), scored: bool = False
    ) -> Prefix:
        """Open a session and prefill what is missing of its ids."""
        self.sessions += 1
        asked = replace(opening(ids), session=f"s{self.sessions}", salt=salt, feature_layers=layers)
        prefix = self.cache.open(replace(asked, want_prompt_log_probs=scored), len(ids) + room)
        self.commit(prefix, ids, prefix.reused_tokens)
        return prefix

    def commit(self, prefix: Prefix, ids: list[int], start: int) -> None:
        """Write the KV of a text's ids from `start` on, and commit them."""
        slots = torch.from_numpy(prefix.table.slots(np.arange(start, len(ids))))
        for stored in self.pool.layers[0]:
            stored[slots, 0, 0] = torch.from_numpy(values(ids)[start:])
        layers = prefix._layers
        prefix.append(ids[start:], features(ids, layers)[start:] if layers else None)
        self.cache.fill(prefix)

    def read(self, prefix: Prefix, count: int) -> NDArray[np.float64]:
        """The KV of a session's first tokens."""
        keys, held = self.pool.layers[0]
        slots = torch.from_numpy(prefix.table.slots(np.arange(count)))
        assert torch.equal(keys[slots], held[slots])
        return keys[slots, 0, 0].numpy()

    def count(self, name: str) -> float:
        """A metric."""
        return self.registry.get_sample_value(f"coppice_verifier_prefix_cache_{name}") or 0.0


def values(ids: list[int]) -> NDArray[np.float64]:
    """A number for each id that depends on all ids before it."""
    states, state = [], committed_hash(())
    for token in ids:
        state = committed_hash([token], state)
        states.append(float(state >> 12))
    return np.array(states)


def features(ids: list[int], layers: tuple[int, ...]) -> Any:
    """(n, len(layers)) of a text."""
    return values(ids)[:, None] + np.array(layers)


@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_every_session_finds_the_kv_of_its_own_text(runs: bool, share: float) -> None:
    choose, made = random.Random(3), Cached(share=share, runs=runs)
    texts = [[choose.randrange(9) for _ in range(30)] for _ in range(3)]
    live: dict[int, tuple[Prefix, list[int]]] = {}
    reused = full = 0
    for step in range(1000 * EFFORT):
        if live and choose.random() < 0.45:
            prefix, ids = live.pop(choose.choice(list(live)))
            assert np.array_equal(made.read(prefix, len(ids)), values(ids))
            made.cache.close(prefix)
            texts.append(ids[: choose.randrange(1, 60)])
            texts = texts[-40:]
        elif live and choose.random() < 0.5:
            prefix, ids = live[choose.choice(list(live))]
            more = [choose.randrange(9) for _ in range(min(choose.randrange(7), prefix.table.capacity - len(ids)))]
            ids += more
            made.commit(prefix, ids, len(ids) - len(more))
        else:
            ids = choose.choice(texts)[: choose.randrange(1, 60)]
            ids = [*ids, *(choose.randrange(9) for _ in range(choose.randrange(9)))]
            try:
                prefix = made.open(ids, room=choose.randrange(16))
            except OutOfBlocks:
                full += 1
                assert made.pool.free_tokens < len(ids) + 16
            else:
                live[step] = prefix, ids
                reused += prefix.reused_tokens
                assert prefix.reused_tokens < len(ids)
        check_pool(made.pool)
        cached = len(made.cache._held)
        assert cached == np.count_nonzero(made.pool._used_at) <= made.cache._most
        assert made.count("tokens") == cached * SIZE
    for prefix, _ in live.values():
        made.cache.close(prefix)
    check_pool(made.pool)
    assert (made.pool.used_tokens, made.pool.free_tokens) == (0, 40 * SIZE)
    assert reused > 500
    assert full > 2
    assert made.count("hits_total") == reused
    assert made.count("evictions_total") > 50


@pytest.fixture
def cached() -> Cached:
    return Cached()


def ids_of(seed: int, length: int = 20) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50) for _ in range(length)]


@pytest.mark.parametrize(
    ("salt", "scored", "share"), [("b", False, 1), ("", False, 1), ("a", True, 1), ("a", False, 0.0)]
)
def test_nobody_is_served_what_is_not_theirs(salt: str, scored: bool, share: float) -> None:
    cached = Cached(share=share)
    cached.cache.close(cached.open(ids_of(3)))
    assert cached.open(ids_of(3), salt, scored=scored).reused_tokens == 0
    assert cached.count("hits_total") == 0
    assert cached.open(ids_of(3)).reused_tokens == (16 if share else 0)


def test_blocks_come_with_the_features_that_are_wanted_or_not_at_all(cached: Cached) -> None:
    text = ids_of(5)
    cached.cache.close(cached.open(text))  # without any
    first = cached.open(text, layers=(2, 5))
    assert first.reused_tokens == 0
    cached.cache.close(first)
    for layers, reused in (((5,), 16), ((), 16), ((2, 5), 16), ((2, 3), 0)):
        again = cached.open(text, layers=layers)
        assert again.reused_tokens == reused
        for number, block in enumerate(again.blocks[: reused // SIZE]):
            assert block.features is not None
            at = slice(number * SIZE, (number + 1) * SIZE)
            assert np.array_equal(block.features, features(text, block.layers)[at])
        cached.cache.close(again)


def test_what_was_used_longest_ago_is_given_up_first_and_a_text_from_its_end() -> None:
    cached = Cached(blocks=15)
    for seed in (6, 7, 8):
        cached.cache.close(cached.open(ids_of(seed)))  # the pool is full
    cached.cache.close(cached.open(ids_of(6)))
    cached.cache.close(cached.open(ids_of(9, 8)))
    kept = {seed: len(cached.cache._find(opening(ids_of(seed)))) for seed in (6, 7, 8)}
    assert kept == {6: 4, 7: 3, 8: 4}


# --- which columns of a session's features a head gets: those of the layers that it reads, in its order ---


HELD, HIDDEN, ROWS = (4, 1, 7, 2), 6, 5


def rows() -> Numbers:
    return np.random.default_rng(3).normal(size=(ROWS, len(HELD) * HIDDEN)).astype(np.float32)


def part(rows: Numbers, layer: int) -> Numbers:
    at = HELD.index(layer) * HIDDEN
    return rows[:, at : at + HIDDEN]


@pytest.mark.parametrize("wanted", [HELD, (2, 4), (7, 7, 1)])
def test_a_window_travels_in_parts_of_whole_rows(wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(1)
    rows = generator.normal(size=(200, len(HELD) * HIDDEN)).astype(np.float32)
    whole = np.concatenate([part(rows, layer) for layer in wanted], axis=1)
    assert np.array_equal(columns(rows, HELD, wanted), whole)
    monkeypatch.setattr("services.verifier.features.FEATURE_WINDOW", 90)
    window, row_bytes = FeatureWindow(), whole[0].nbytes
    for chunk in np.split(rows, np.cumsum(generator.integers(1, 15, 13))):
        window.append(chunk)
    for start in (0, 150, 199):
        first, chunks = window.since(start, 200)
        assert first == max(start, 110)
        for most in (1, 3 * row_bytes + 1, 1 << 20):
            parts = list(packed(chunks, HELD, wanted, most))
            assert b"".join(data for _, data in parts) == whole[first:].tobytes()
            assert all(len(data) == count * row_bytes <= max(most, row_bytes) for count, data in parts)
    for start, end in ((200, 201), (0, 110)):
        with pytest.raises(InvalidField, match="not in"):
            window.since(start, end)


def test_a_follower_gets_the_layers_that_it_names() -> None:
    opening = OpenSession("s", [1] * ROWS, SamplingParams(), frozenset(), 99, feature_layers=HELD)
    table = BlockTable("s", 32, np.empty(0, np.int64), 0, True)
    session = Session(0, opening, Prefix(table, [], "", HELD), 50)
    session.commit([1] * ROWS, rows())

    def follow(start: int, count: int, layers: tuple[int, ...] = ()) -> Window:
        ref = FeatureRef("", "s", start, count, layers)
        return session.follow(Feed(ref, "float32", lambda feed: asyncio.sleep(0, None), lambda feed: None))  # type: ignore[arg-type]

    first, chunks, layers = follow(1, 4)
    assert (first, layers) == (1, HELD)
    assert np.array_equal(np.concatenate(chunks), rows()[1:])
    assert follow(1, 4, (2, 4))[0] == 1
    with pytest.raises(InvalidField, match=r"ref\.layers: 3 is not one of the session's layers \(4, 1, 7, 2\)"):
        follow(1, 4, (2, 3))
    with pytest.raises(InvalidField, match="ends behind the 5 committed positions"):
        follow(1, 5)
    assert len(session.feeds) == 2
