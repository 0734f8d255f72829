"""The accept walks: the seeds' greedy rule, the target's law, and a text that does not depend on the tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from coppice.speculation.sampling import TOKEN_STREAM, Row, SamplingParams, decode_row, draw
from coppice.speculation.tree import DraftTree, TreeError, prune, union
from services.verifier.session import Walk, pq_draws, walk
from tests.reference import (
    EFFORT,
    Text,
    dense,
    independent_node_rule,
    keyed,
    longest_matching_prefix,
    make_tree,
    outcome_law,
    p_value,
    random_target,
    random_tree,
    rows_of,
    sequential_walk,
)

VOCAB = 4
GREEDY = SamplingParams()
SAMPLED = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_p=0.9, seed=2**64 - 1),
    SamplingParams(temperature=1.5, top_k=3, seed=2),
]


def committed(tree: DraftTree, outcome: Walk) -> Text:
    """The tokens after the root: the path's, and the next root."""
    path = tuple(int(tree.tokens[node - 1]) for node in outcome.path)
    return path if outcome.drawn is None else (*path, outcome.drawn)


def merged(*trees: DraftTree) -> DraftTree:
    return union(trees)


def counted(token_at: dict[int, int]) -> tuple[Callable[[int], int], list[int]]:
    """Draws by node, and the list of nodes that were asked for."""
    visited: list[int] = []

    def drawn(node: int) -> int:
        visited.append(node)
        return token_at[node]

    return drawn, visited


def pq_chain(tree: DraftTree, row_at: Callable[[int], Row], q_rows: NDArray[np.float64], seed: int) -> Walk:
    """The walk by the p/q rule of a chain whose root stands at position 0."""
    return walk(tree, pq_draws(tree, row_at, q_rows, seed, 0))


# Greedy.


def test_the_greedy_walk_is_the_longest_all_ones_prefix_over_the_rows_of_r() -> None:
    rng = np.random.default_rng(1)
    lengths = Counter[int]()
    for case in range(2_000 * EFFORT):
        tree = merged(*(random_tree(rng, max_nodes=24, vocab_size=2) for _ in range(1 + case % 3)))
        target = random_target(case, 2)
        outcome = walk(tree, keyed(tree, rows_of(target, tree, GREEDY), GREEDY, 5))
        expected = longest_matching_prefix(tree, target)
        assert committed(tree, outcome)[:-1] == expected
        assert outcome.drawn == int(np.argmax(target(expected)))
        lengths[len(expected)] += 1
    assert all(lengths[length] > 50 for length in range(5)), "too few long paths to mean anything"


# Sampling.


@pytest.mark.parametrize("params", SAMPLED, ids=["T1", "nucleus", "top-k"])
def test_the_walk_and_the_seeds_sequential_rule_both_have_the_targets_law(params: SamplingParams) -> None:
    tree = make_tree([(0, 0, -0.1), (2, 0, -0.2), (1, 1, -0.3), (3, 1, -0.4), (2, 2, -0.5), (0, 3, -0.6)])
    row_at = rows_of(random_target(3, VOCAB, sharpness=0.5), tree, params)
    rows = [row_at(node) for node in range(len(tree) + 1)]
    probs = [dense(row, VOCAB) for row in rows]
    law = {text: prob for text, prob in outcome_law(tree, probs.__getitem__).items() if prob > 0}
    rng = np.random.default_rng(4)
    walked, sequential = Counter[Text](), Counter[Text]()
    for seed in range(8_000 * EFFORT):
        step = params.model_copy(update={"seed": seed})
        walked[committed(tree, walk(tree, keyed(tree, rows.__getitem__, step, 9)))] += 1
        sequential[sequential_walk(tree, probs.__getitem__, rng)] += 1
    assert p_value(walked, law) > 1e-3
    assert p_value(sequential, law) > 1e-3


def test_the_independent_node_rule_of_the_nanogpt_seed_fails_that_check() -> None:
    p, q = np.array([0.40, 0.25, 0.15, 0.12, 0.08]), np.array([0.30, 0.30, 0.20, 0.10, 0.10])
    rng = np.random.default_rng(5)
    law = dict(enumerate(p.tolist()))
    tree = make_tree([(0, 0, -1.2), (1, 0, -1.2)])
    row = (np.arange(5), np.log(p))
    printed, coupled = Counter[int](), Counter[int]()
    for seed in range(8_000):
        printed[independent_node_rule(p, q, 2, rng)] += 1
        outcome = walk(tree, keyed(tree, lambda _: row, SamplingParams(temperature=1.0, seed=seed), 0))
        coupled[committed(tree, outcome)[0]] += 1
    assert p_value(coupled, law) > 1e-3
    assert p_value(printed, law) < 1e-12
    # Top-k children are no samples of q: the first is always on offer, and here always accepted.
    assert printed[0] / 8_000 > 0.9


def plain_text(target: Callable[[Text], NDArray[np.float32]], params: SamplingParams, length: int) -> Text:
    """Decoding one token at a time; the token at position i is drawn there."""
    text: Text = ()
    for position in range(length):
        text += (draw(*decode_row(target(text), params), params.seed, position),)
    return text


def drafted_by(policy: str, rng: np.random.Generator) -> DraftTree:
    """What a step of a policy verifies."""
    first, second = random_tree(rng, 24, VOCAB), random_tree(rng, 24, VOCAB)
    match policy:
        case "chain":
            return DraftTree.chain(rng.integers(0, VOCAB, 5), -np.arange(5.0))
        case "merge":
            return merged(first, second)
        case "pruned":
            return prune(merged(first, second), 8)[0]
        case "late" if rng.random() < 0.5:
            return DraftTree.empty()
    return first


@pytest.mark.parametrize("params", [GREEDY, *SAMPLED], ids=["greedy", "T1", "nucleus", "top-k"])
@pytest.mark.parametrize("policy", ["chain", "tree", "merge", "pruned", "late"])
def test_the_text_does_not_depend_on_the_tree(params: SamplingParams, policy: str) -> None:
    rng = np.random.default_rng(6)
    accepted = 0
    for case in range(6 * EFFORT):
        target = random_target(case, VOCAB)
        text: Text = plain_text(target, params, 1)
        while len(text) < 60:
            tree = drafted_by(policy, rng)
            outcome = walk(tree, keyed(tree, rows_of(target, tree, params, text), params, len(text) - 1))
            text += committed(tree, outcome)
            accepted += len(outcome.path)
        assert text == plain_text(target, params, len(text))
    assert accepted > 30


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
    draw_at, visited = counted(draws)
    assert walk(TREE, draw_at, **told) == Walk(path, drawn)
    assert visited == visits


# The p/q rule.


def drafted_chain(row_after: Callable[[Text], Row], length: int, seed: int) -> tuple[DraftTree, NDArray[np.float64]]:
    """A chain sampled from a drafter's rows after the root, with its (n, V) probabilities."""
    text: Text = ()
    q_rows = np.zeros((length, VOCAB))
    for depth in range(length):
        row = row_after(text)
        q_rows[depth] = dense(row, VOCAB)
        text += (draw(*row, seed, depth + 1, TOKEN_STREAM),)
    scores = np.cumsum([np.log(q_rows[depth, token]) for depth, token in enumerate(text)])
    return DraftTree.chain(text, scores), q_rows


def decoded(model: Callable[[Text], NDArray[np.float32]], params: SamplingParams) -> Callable[[Text], Row]:
    """A model's rows after G."""
    return cache(lambda text: decode_row(model(text), params))


@pytest.mark.parametrize("params", [SAMPLED[0], SAMPLED[2]], ids=["T1", "top-k"])
def test_the_pq_chain_has_the_targets_law(params: SamplingParams) -> None:
    p_after = decoded(random_target(8, VOCAB, sharpness=1.0), params)
    q_after = decoded(random_target(9, VOCAB, sharpness=1.0), SAMPLED[0])
    counts, lengths = Counter[Text](), Counter[int]()
    for seed in range(6_000 * EFFORT):
        tree, q_rows = drafted_chain(q_after, 2, seed)
        rows = [p_after(tuple(tree.tokens[:depth].tolist())) for depth in range(3)]
        outcome = pq_chain(tree, rows.__getitem__, q_rows, seed)
        text = committed(tree, outcome)
        lengths[len(outcome.path)] += 1
        while len(text) < 3:  # later steps, with noise of their own
            text += (draw(*p_after(text), seed, 1_000 + len(text)),)
        counts[text] += 1
    law: dict[Text, float] = {(): 1.0}
    for _ in range(3):
        law = {(*t, x): law[t] * p for t in law for x, p in enumerate(dense(p_after(t), VOCAB).tolist()) if p > 0}
    assert p_value(counts, law) > 1e-3
    assert min(lengths[length] for length in range(3)) > 200


def test_a_rejected_draft_is_replaced_from_the_residual() -> None:
    row = (np.arange(3), np.log([0.5, 0.3, 0.2]))
    q_rows = np.array([[0.2, 0.7, 0.1]])
    outcomes = [pq_chain(DraftTree.chain([1], [-0.4]), lambda _: row, q_rows, seed) for seed in range(1_000)]
    rejected = Counter(outcome.drawn for outcome in outcomes if not outcome.path)
    assert p_value(rejected, {0: 0.75, 2: 0.25}) > 1e-3


def test_the_pq_rule_refuses_a_tree_that_is_no_chain() -> None:
    with pytest.raises(TreeError, match="chain") as caught:
        pq_chain(TREE, lambda _: (np.array([0]), np.zeros(1)), np.ones((5, 9)), 0)
    assert (caught.value.reason, caught.value.field) == ("no-chain", "parents")


@pytest.mark.parametrize(
    "q_rows", [np.ones((2, 4)), np.ones(4), np.zeros((1, 4)), np.full((1, 4), np.nan), np.ones((1, 2))]
)
def test_the_pq_rule_refuses_rows_its_chain_cannot_have_come_from(q_rows: NDArray[np.float64]) -> None:
    with pytest.raises(TreeError) as caught:
        pq_chain(DraftTree.chain([3], [-1.0]), lambda _: (np.array([1]), np.zeros(1)), q_rows, 0)
    assert (caught.value.reason, caught.value.field) == ("q-rows", "q_rows")
