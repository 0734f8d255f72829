"""The accept walks: the seeds' greedy rule, how they end, and what the p/q rule refuses; for their law see test_law."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree, TreeError, union
from services.verifier.session import Walk, pq_draws, walk
from tests.reference import EFFORT, Text, keyed, longest_matching_prefix, make_tree, random_target, random_tree, rows_of

GREEDY = SamplingParams()


def committed(tree: DraftTree, outcome: Walk) -> Text:
    """The tokens after the root: the path's, and the next root."""
    path = tuple(int(tree.tokens[node - 1]) for node in outcome[0])
    return path if outcome[1] is None else (*path, outcome[1])


# Greedy.


def test_the_greedy_walk_is_the_longest_all_ones_prefix_over_the_rows_of_r() -> None:
    rng = np.random.default_rng(1)
    lengths = Counter[int]()
    for case in range(1_000 * EFFORT):
        tree = union([random_tree(rng, max_nodes=24, vocab_size=2) for _ in range(1 + case % 3)])
        target = random_target(case, 2)
        outcome = walk(tree, keyed(tree, rows_of(target, tree, GREEDY), GREEDY, 5))
        expected = longest_matching_prefix(tree, target)
        assert committed(tree, outcome)[:-1] == expected
        assert outcome[1] == int(np.argmax(target(expected)))
        lengths[len(expected)] += 1
    assert all(lengths[length] > 25 for length in range(5)), "too few long paths to mean anything"


# How a walk ends, and what it asks for.


TREE = make_tree([(1, 0, -0.1), (2, 0, -0.2), (3, 1, -0.3), (4, 1, -0.4), (5, 3, -0.5)])
DRAWS = {0: 1, 1: 3, 3: 5, 5: 0}


@pytest.mark.parametrize(
    ("draws", "told", "path", "drawn", "visits"),
    [
        ({0: 1, 1: 3, 3: 9}, {}, (1, 3), 9, [0, 1, 3]),
        ({0: 7}, {}, (), 7, [0]),
        (DRAWS, {"stop_ids": {3, 9}}, (1, 3), None, [0, 1]),
        ({0: 1, 1: 9}, {"stop_ids": {9}}, (1,), 9, [0, 1]),  # a stop token that was not drafted is the next root
        *((DRAWS, {"max_accept": limit}, (1, 3, 5)[:limit], None, [0, 1, 3][:limit]) for limit in range(4)),
        (DRAWS, {"max_accept": 4}, (1, 3, 5), 0, [0, 1, 3, 5]),
    ],
)
def test_where_a_walk_ends_and_which_rows_it_asks_for(
    draws: dict[int, int], told: dict[str, Any], path: tuple[int, ...], drawn: int | None, visits: list[int]
) -> None:
    visited: list[int] = []

    def draw_at(node: int) -> int:
        visited.append(node)
        return draws[node]

    assert (walk(TREE, draw_at, **told), visited) == ((path, drawn), visits)


# The p/q rule.


CHAIN = DraftTree.chain([3], [-1.0])


@pytest.mark.parametrize(
    ("tree", "q_rows", "reason", "field"),
    [
        (TREE, np.ones((5, 9)), "no-chain", "parents"),
        *((CHAIN, rows, "q-rows", "q_rows") for rows in (np.ones((2, 4)), np.ones(4), np.zeros((1, 4)))),
        *((CHAIN, rows, "q-rows", "q_rows") for rows in (np.full((1, 4), np.nan), np.ones((1, 2)))),
    ],
)
def test_the_pq_rule_refuses_rows_its_chain_cannot_have_come_from(
    tree: DraftTree, q_rows: NDArray[np.float64], reason: str, field: str
) -> None:
    with pytest.raises(TreeError) as caught:
        walk(tree, pq_draws(tree, lambda _: (np.array([1]), np.zeros(1)), q_rows, 0, 0))
    assert (caught.value.reason, caught.value.field) == (reason, field)
