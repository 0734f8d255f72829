"""Draft trees: the seeds' worked examples, agreement with slow references, and what an outside tree may not be."""

from __future__ import annotations

import numpy as np
import pytest

from coppice.speculation.tree import DraftTree, TreeError, extend, prune, union, validate
from tests import reference
from tests.reference import EFFORT, random_tree, text_at

VOCAB = 4


def same_depths_and_children(tree: DraftTree) -> None:
    assert tree.depths().tolist() == [len(reference.ancestors(tree, node)) - 1 for node in range(len(tree) + 1)]
    for node, children in enumerate(tree.children()):
        assert children == [i for i in range(1, len(tree) + 1) if tree.parents[i - 1] == node]


def same_union(trees: list[DraftTree]) -> None:
    merged = union(trees)
    before = 0
    for tree in trees:
        for node in range(1, len(tree) + 1):  # phi(i) = n_1 + ... + i
            assert text_at(merged, before + node) == text_at(tree, node)
            assert merged.log_probs[before + node - 1] == tree.log_probs[node - 1]
        before += len(tree)
    assert len(merged) == before


def same_prune(tree: DraftTree, budget: int) -> None:
    pruned, kept = prune(tree, budget)
    assert kept.tolist() == reference.best_first(tree, budget)
    assert [text_at(pruned, i + 1) for i in range(len(pruned))] == [text_at(tree, int(node)) for node in kept]
    assert np.array_equal(pruned.log_probs, tree.log_probs[kept - 1])
    validate(pruned, VOCAB, max_nodes=budget, max_depth=256)


def test_random_trees_and_their_deltas_agree_with_the_references() -> None:
    rng = np.random.default_rng(2)
    for case in range(1_000 * EFFORT):
        tree = random_tree(rng, max_nodes=40 if case % 50 == 0 else 9, vocab_size=VOCAB)
        validate(tree, VOCAB, max_depth=64)
        same_depths_and_children(tree)
        same_prune(tree, budget=int(rng.integers(0, 10)))
        if case % 4 == 0:
            trees = [tree] + [random_tree(rng, max_nodes=6, vocab_size=VOCAB) for _ in range(int(rng.integers(0, 4)))]
            same_union(trees)
            same_prune(union(trees), budget=int(rng.integers(0, 30)))
            same_depths_and_children(union(trees))
        cut = int(rng.integers(0, len(tree) + 1))
        start = DraftTree(tree.tokens[:cut], tree.parents[:cut], tree.log_probs[:cut])
        assert extend(start, DraftTree(tree.tokens[cut:], tree.parents[cut:], tree.log_probs[cut:])) == tree


def test_pruning_scores_that_rise_along_a_path_still_keeps_ancestors_within_the_budget() -> None:
    rng = np.random.default_rng(3)
    for _ in range(300 * EFFORT):
        tree = random_tree(rng)
        tree = DraftTree(tree.tokens, tree.parents, -rng.exponential(size=len(tree)).astype(np.float32))
        pruned, kept = prune(tree, 5)
        assert len(pruned) == min(5, len(tree))
        assert [text_at(pruned, i + 1) for i in range(len(pruned))] == [text_at(tree, int(node)) for node in kept]


def test_the_empty_tree_and_the_chain_are_trees() -> None:
    empty, chain = DraftTree.empty(), DraftTree.chain([3, 2, 1], [-1.0, -2.0, -3.0])
    for tree in (empty, chain):
        validate(tree, VOCAB)
        same_depths_and_children(tree)
    assert union([]) == empty
    assert union([empty, chain]) == chain
    assert prune(chain, 2)[0] == DraftTree.chain([3, 2], [-1.0, -2.0])
    assert chain != empty
    validate(DraftTree.chain([1, 2], [1e-6, 2e-6]), VOCAB)  # rounding above zero and above the parent
    with pytest.raises(ValueError, match="budget"):
        prune(empty, -1)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("tokens", "parents", "log_probs", "reason", "field"),
    [
        ([1, 2], [0], [-1.0, -2.0], "length-mismatch", "parents"),
        ([1, 2], [0, 1], [-1.0], "length-mismatch", "log_probs"),
        ([[1]], [0], [-1.0], "shape", "tokens"),
        ([1.5], [0], [-1.0], "dtype", "tokens"),
        ([1], [NAN], [-1.0], "dtype", "parents"),
        ([1] * 65, [0] * 65, [-1.0] * 65, "too-large", "tokens"),
        ([100], [0], [-1.0], "token-range", "tokens"),
        ([2**63], [0], [-1.0], "token-range", "tokens"),
        ([1, 2], [2, 1], [-1.0, -1.0], "parent-order", "parents"),
        ([1], [-1], [-1.0], "parent-order", "parents"),
        ([1], [2**64 - 1], [-1.0], "parent-order", "parents"),
        ([1], [0], [NAN], "log-prob", "log_probs"),
        ([1], [0], [INF], "log-prob", "log_probs"),
        ([1], [0], [0.5], "log-prob", "log_probs"),
        ([1, 2], [0, 1], [-1.0, -0.5], "child-above-parent", "log_probs"),
        ([1] * 17, list(range(17)), [-1.0] * 17, "too-deep", "parents"),
    ],
)
def test_nonsense_is_refused(tokens: object, parents: object, log_probs: object, reason: str, field: str) -> None:
    tree = DraftTree(np.array(tokens), np.array(parents), np.array(log_probs))
    with pytest.raises(TreeError) as caught:
        validate(tree, vocab_size=100)
    assert (caught.value.reason, caught.value.field) == (reason, field)
    assert str(caught.value).startswith(field)
