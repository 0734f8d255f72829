"""A tree grown level by level: rows that see what earlier forwards wrote, against plain forwards of their paths."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from coppice.engine.batch import Earlier, Piece, pack
from coppice.engine.engine import Engine
from coppice.engine.kv_cache import BlockTable
from tests.services.test_engine import Tree, assert_same, engine_of, force_scattered, plain_logits, prefill, some_ids

NAMES = ("llama", "mistral-window", "gemma2")
ROWS = 12


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny forwards are fastest on one thread, and two fight on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Growth:
    """A random tree below a prefix, one level a forward; rows lie behind the prefix in the order of their levels."""

    def __init__(self, engine: Engine, name: str, prefix: list[int], seed: int) -> None:
        self.tree, self.prefix = Tree(ROWS, seed), prefix
        self.table: BlockTable = prefill(engine, name, prefix)[0]
        engine.pool.extend(self.table, len(prefix) + ROWS)
        order = sorted(range(ROWS), key=lambda row: self.tree.depths[row])
        self.place = {row: place for place, row in enumerate(order)}
        self.levels = [
            [row for row in order if self.tree.depths[row] == depth] for depth in sorted(set(self.tree.depths))
        ]

    def piece(self, level: int) -> Piece:
        """The rows of one level; the first is the root, which continues the prefix."""
        rows = self.levels[level]
        done = [row for earlier in self.levels[:level] for row in earlier]
        visible = np.zeros((len(rows), len(done)), np.bool_)
        for number, row in enumerate(rows):
            visible[number, [self.place[above] for above in self.tree.path(row)[:-1]]] = True
        positions = np.array([len(self.prefix) + self.tree.depths[row] for row in done], np.int64)
        tokens = [self.tree.tokens[row] for row in rows]
        unlinked, depths = [-1] * len(rows), [level] * len(rows)
        return Piece(
            self.table, len(self.prefix), tokens, unlinked, depths, range(len(rows)), Earlier(visible, positions)
        )

    def expected(self, name: str, level: int) -> Tensor:
        """(rows, V) from a plain causal forward over prefix and path of each row."""
        return torch.stack([plain_logits(name, self.prefix + self.tree.text(row))[-1] for row in self.levels[level]])


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_level_says_what_plain_forwards_of_its_paths_say(name: str, scattered: bool) -> None:
    engine = engine_of(name)
    grown = Growth(engine, "a", some_ids(20), seed=7)
    if scattered:
        force_scattered(engine, grown.table)
    assert len(grown.levels) > 3
    for level in range(len(grown.levels)):
        assert_same(engine.forward(pack([grown.piece(level)])).logits, grown.expected(name, level))


@pytest.mark.parametrize("name", NAMES)
def test_levels_of_several_sessions_packed_say_what_they_say_alone(name: str) -> None:
    engine = engine_of(name)
    growing = [Growth(engine, f"s{seed}", some_ids(length, seed), seed) for seed, length in enumerate((3, 40, 11))]
    for level in range(min(len(grown.levels) for grown in growing)):
        logits = engine.forward(pack([grown.piece(level) for grown in growing])).logits
        assert_same(logits, torch.cat([grown.expected(name, level) for grown in growing]))


def test_a_window_reaches_over_the_trees_own_levels() -> None:
    """A chain longer than the window: its end sees neither the prefix nor the first levels."""
    name, window = "mistral-window", 7
    engine, prefix, chain = engine_of(name), some_ids(10), some_ids(2 * window, 3)
    table, _ = prefill(engine, "a", prefix)
    engine.pool.extend(table, len(prefix) + len(chain))
    for depth, token in enumerate(chain):
        earlier = Earlier(np.ones((1, depth), np.bool_), len(prefix) + np.arange(depth))
        logits = engine.forward(pack([Piece(table, len(prefix), [token], [-1], [depth], [0], earlier)])).logits
        assert_same(logits[0], plain_logits(name, prefix + chain[: depth + 1])[-1])


def test_a_row_that_is_told_to_see_less_says_something_else() -> None:
    engine = engine_of("llama")
    grown = Growth(engine, "a", some_ids(20), seed=7)
    for level in range(3):
        engine.forward(pack([grown.piece(level)]))
    piece = grown.piece(3)
    assert piece.earlier is not None
    right = engine.forward(pack([piece])).logits
    piece.earlier.visible[:] = False
    assert (engine.forward(pack([piece])).logits - right).abs().max() > 1e-2
