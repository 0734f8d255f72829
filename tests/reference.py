"""Slow, obvious versions of what coppice computes fast, and small random worlds to compare them in."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from coppice.engine.kv_cache import KVPool
from coppice.speculation.sampling import Row, SamplingParams, decode_row, draw
from coppice.speculation.tree import DraftTree

EFFORT = 10 if os.environ.get("COPPICE_PROOF") == "1" else 1
"""Factor on the number of random cases; `COPPICE_PROOF=1` is the full count."""

Text = tuple[int, ...]
Logits = NDArray[np.float32]
Outcome = TypeVar("Outcome", bound=Hashable)


# Trees.


def make_tree(nodes: Iterable[tuple[int, int, float]]) -> DraftTree:
    """A tree from (token, parent, log_prob) of each node."""
    tokens, parents, log_probs = zip(*nodes, strict=True) if (nodes := list(nodes)) else ((), (), ())
    return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64), np.array(log_probs, np.float32))


def random_tree(rng: np.random.Generator, max_nodes: int = 16, vocab_size: int = 4) -> DraftTree:
    """A valid tree with few tokens and coarse scores, so that duplicates and ties are common."""
    size = int(rng.integers(0, max_nodes + 1))
    reach = int(rng.integers(1, max_nodes + 1))  # 1 makes a chain
    log_probs = [0.0]
    nodes = []
    for node in range(1, size + 1):
        parent = int(rng.integers(max(0, node - reach), node))
        log_probs.append(log_probs[parent] - 0.25 * int(rng.integers(0, 5)))
        nodes.append((int(rng.integers(0, vocab_size)), parent, log_probs[-1]))
    return make_tree(nodes)


def ancestors(tree: DraftTree, node: int) -> list[int]:
    """Anc(i) = {i, parent(i), ..., 0}."""
    return [0] if node == 0 else [node, *ancestors(tree, int(tree.parents[node - 1]))]


def text_at(tree: DraftTree, node: int) -> Text:
    """The tokens from the root, excluded, to a node."""
    return tuple(int(tree.tokens[i - 1]) for i in reversed(ancestors(tree, node)) if i)


def paths(tree: DraftTree) -> list[list[int]]:
    """All root-to-leaf paths."""
    inner = set(tree.parents.tolist())
    leaves = [node for node in range(len(tree) + 1) if node not in inner]
    return [ancestors(tree, leaf)[::-1] for leaf in leaves]


def best_first(tree: DraftTree, budget: int) -> list[int]:
    """The nodes kept by growing from the root, always with the best-scored node whose parent is in."""
    kept = {0}
    for _ in range(min(budget, len(tree))):
        open_nodes = [n for n in range(1, len(tree) + 1) if n not in kept and int(tree.parents[n - 1]) in kept]
        kept.add(max(open_nodes, key=lambda n: (tree.log_probs[n - 1], -n)))
    return sorted(kept - {0})


# Targets and drafters.


def random_target(seed: int, vocab_size: int, sharpness: float = 1.5) -> Callable[[Text], Logits]:
    """A model: logits are a fixed random function of the text."""

    @cache
    def logits(text: Text) -> Logits:
        rng = np.random.default_rng([seed, *text])
        return (sharpness * rng.standard_normal(vocab_size)).astype(np.float32)

    return logits


def rows_of(
    target: Callable[[Text], Logits], tree: DraftTree, params: SamplingParams, prefix: Text = ()
) -> Callable[[int], Row]:
    """`row_at` of a target over a tree that stands after `prefix` (root included)."""
    return lambda node: decode_row(target(prefix + text_at(tree, node)), params)


def dense(row: Row, vocab_size: int) -> NDArray[np.float64]:
    """A row after G as (V,) probabilities."""
    probs = np.zeros(vocab_size)
    probs[row[0]] = np.exp(row[1])
    return probs


# Acceptance.


def keyed(
    tree: DraftTree, row_at: Callable[[int], Row], params: SamplingParams, root_position: int
) -> Callable[[int], int]:
    """The ids that the keyed noise draws behind the nodes of a tree whose root stands at a position."""
    return lambda node: draw(*row_at(node), params.seed, root_position + len(text_at(tree, node)) + 1)


def longest_matching_prefix(tree: DraftTree, target: Callable[[Text], Logits]) -> Text:
    """a(c) over the root-to-leaf paths and the text of the best row (Merged-Tree Dual Drafting, section 6.1)."""
    best: Text = ()
    for row in paths(tree):
        matched: Text = ()
        for node in row[1:]:
            if tree.tokens[node - 1] != np.argmax(target(matched)):
                break
            matched = (*matched, int(tree.tokens[node - 1]))
        best = max(best, matched, key=len)
    return best


# Statistics.


def p_value(counts: Mapping[Outcome, int], law: Mapping[Outcome, float]) -> float:
    """Chi-square p-value that the counted outcomes follow `law`; cells expected fewer than 5 times are pooled."""
    total = sum(counts.values())
    assert all(law.get(outcome, 0) > 0 for outcome in counts), "an outcome that the law does not have"
    observed, expected, rare = [], [], [0.0, 0.0]
    for outcome, prob in law.items():
        if total * prob >= 5:
            observed.append(float(counts.get(outcome, 0)))
            expected.append(total * prob)
        else:
            rare[0] += counts.get(outcome, 0)
            rare[1] += total * prob
    if rare[1] > 0:
        observed.append(rare[0])
        expected.append(rare[1])
    assert len(observed) > 1, "a certain outcome tests nothing"
    return float(stats.chisquare(observed, expected, sum_check=False).pvalue)


# KV.


def check_pool(pool: KVPool) -> None:
    """Every block has as many owners as tables have it, one unless it is kept, and every table holds its tokens."""
    owners = pool._owners.copy()
    assert (owners[pool._used_at == 0] <= 1).all(), "a block that is not kept is shared"
    for table in pool._tables.values():
        np.subtract.at(owners, table.blocks, 1)
        assert table.num_tokens <= table.capacity, table
        assert table.consecutive == bool((np.diff(table.blocks) == 1).all()), table
    assert not owners.any(), f"blocks leaked or owned twice: {np.flatnonzero(owners).tolist()}"


# Predictions.

EDITS = ("rename", "insert", "constant")
SHARE = 0.1  # of an answer's places that are edited
LINE = 6  # ids of an inserted line


def edited(ids: Text, kind: str, rng: random.Random) -> Text:
    """A version of an answer with edits of a kind in SHARE of its places: ids replaced by others of the answer, some of
    them everywhere alike (rename) or each by itself (constant), or as many lines of LINE ids inserted.
    """
    count = round(SHARE * len(ids))
    if kind == "rename":
        often, renamed, left = Counter(ids), dict[int, int](), count
        for token in rng.sample(sorted(often), len(often)):
            if often[token] <= left:
                renamed[token] = rng.choice([other for other in ids if other != token] or ids)
                left -= often[token]
        return tuple(renamed.get(token, token) for token in ids)
    places = set(rng.sample(range(len(ids)), count))
    made: list[int] = []
    for at, token in enumerate(ids):
        if at not in places:
            made.append(token)
        elif kind == "insert":
            made += [*rng.choices(ids, k=LINE), token]
        else:
            made.append(rng.choice([other for other in ids if other != token] or ids))
    return tuple(made)
