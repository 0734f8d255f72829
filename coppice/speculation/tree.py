"""Draft trees as flat arrays: checks, masks, paths, and the union of several heads' trees.

Node 0 is the root, the target's own token; it is part of every tree and stored in none. Node i (from 1) is entry i - 1
of the arrays. A parent's number is below its child's, so one pass in order always meets parents first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coppice.limits import LOG_PROB_TOLERANCE

IntArray = NDArray[np.int64]


class TreeError(ValueError):
    """A tree that must not be verified: `reason` is a slug to count by, `field` the array at fault."""

    def __init__(self, reason: str, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.reason = reason
        self.field = field


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """A draft tree of n nodes, root excluded. What came from outside goes through `validate` before all else."""

    tokens: IntArray
    """(n,) token ids"""
    parents: IntArray
    """(n,) number of each node's parent, 0 for the root"""
    log_probs: NDArray[np.float32]
    """(n,) cumulative draft log-scores, s_i of Dual-Draft Routing, section 4"""

    def __post_init__(self) -> None:
        # Values of another kind stay as they are for `validate` to refuse: a cast would turn NaN into an id.
        for name, kinds, dtype in _FIELDS:
            array = np.asarray(getattr(self, name))
            if array.dtype.kind in kinds or not array.size:
                array = array.astype(dtype, copy=False)
            object.__setattr__(self, name, array)

    @staticmethod
    def empty() -> DraftTree:
        """The tree of plain decoding: the root alone."""
        return DraftTree(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))

    @staticmethod
    def chain(tokens: ArrayLike, log_probs: ArrayLike) -> DraftTree:
        """One branch: each of the (n,) tokens follows the one before it."""
        tokens = np.asarray(tokens)
        return DraftTree(tokens, np.arange(tokens.size), np.asarray(log_probs))

    def __len__(self) -> int:
        """Number of nodes, root excluded."""
        return self.tokens.size

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DraftTree):
            return NotImplemented
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name, _, _ in _FIELDS)

    def depths(self) -> IntArray:
        """(n + 1,) pos(0) = 0, pos(i) = pos(parent) + 1 (Merged-Tree Dual Drafting, section 4.3)."""
        depths = [0]
        for parent in self.parents.tolist():
            depths.append(depths[parent] + 1)
        return np.array(depths, np.int64)

    def children(self) -> list[list[int]]:
        """For each of the n + 1 nodes the numbers of its children, ascending."""
        children: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents.tolist(), start=1):
            children[parent].append(node)
        return children


_FIELDS = (("tokens", "iu", np.int64), ("parents", "iu", np.int64), ("log_probs", "iuf", np.float32))


def validate(tree: DraftTree, vocab_size: int, max_nodes: int = 64, max_depth: int = 16) -> None:
    """Raise TreeError unless a tree from outside is safe to verify.

    Reasons: "shape", "dtype", "length-mismatch", "too-large", "token-range", "parent-order" (cycles, forward parents,
    numbers out of range), "log-prob" (not finite, above 0), "child-above-parent" and "too-deep".
    """
    size = tree.tokens.size
    for name, _, dtype in _FIELDS:
        array = getattr(tree, name)
        if array.ndim != 1:
            raise TreeError("shape", name, f"has {array.ndim} dimensions, must have 1")
        if array.dtype != dtype:
            raise TreeError("dtype", name, f"holds {array.dtype} values")
        if array.size != size:
            raise TreeError("length-mismatch", name, f"has {array.size} entries, tokens has {size}")
    if size > max_nodes:
        raise TreeError("too-large", "tokens", f"has {size} nodes, at most {max_nodes} are allowed")
    if not size:
        return
    if tree.tokens.min() < 0 or tree.tokens.max() >= vocab_size:
        raise TreeError("token-range", "tokens", f"has an id outside 0..{vocab_size - 1}")
    if tree.parents.min() < 0 or (tree.parents > np.arange(size)).any():
        raise TreeError("parent-order", "parents", "has a parent that does not come before its child")
    scores = np.concatenate((np.zeros(1, np.float32), tree.log_probs))
    # Written so that NaN fails too.
    if not (scores.min() > -np.inf and scores.max() <= LOG_PROB_TOLERANCE):
        raise TreeError("log-prob", "log_probs", "has a value that is not finite or is above 0")
    if (tree.log_probs > scores[tree.parents] + LOG_PROB_TOLERANCE).any():
        raise TreeError("child-above-parent", "log_probs", "has a node that scores above its parent")
    if tree.depths().max() > max_depth:
        raise TreeError("too-deep", "parents", f"has a path of more than {max_depth} nodes")


def extend(tree: DraftTree, *deltas: DraftTree) -> DraftTree:
    """The tree with streamed deltas appended; their parents are numbers in the whole tree. Validate the result."""
    return DraftTree(*(np.concatenate([getattr(part, name) for part in (tree, *deltas)]) for name, _, _ in _FIELDS))


def graft(tree: DraftTree, tokens: Sequence[int]) -> DraftTree:
    """The tree with a branch of these tokens from the root, each as certain as the root; its own nodes stay."""
    known, children, log_probs = tree.tokens.tolist(), tree.children(), tree.log_probs.copy()
    at = depth = 0
    for token in tokens:
        same = [child for child in children[at] if known[child - 1] == token]
        if not same:
            break
        at, depth = same[0], depth + 1
        log_probs[at - 1] = 0
    rest, size = tokens[depth:], len(tree)
    parents = [at, *range(size + 1, size + len(rest))][: len(rest)]
    branch = DraftTree(np.array(rest, np.int64), np.array(parents, np.int64), np.zeros(len(rest), np.float32))
    return extend(DraftTree(tree.tokens, tree.parents, log_probs), branch)


def union(trees: Sequence[DraftTree]) -> DraftTree:
    """Splice the heads' trees under one root.

    The first head keeps its numbers; every later one is shifted by the nodes before it, phi(i) = n_1 + ... + i, and
    phi(0) = 0 (Merged-Tree Dual Drafting, section 4.1).
    """
    if not trees:
        return DraftTree.empty()
    sizes, whole = [len(tree) for tree in trees], extend(*trees)
    shifts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    return DraftTree(whole.tokens, np.where(whole.parents > 0, whole.parents + shifts, 0), whole.log_probs)


def prune(tree: DraftTree, budget: int) -> tuple[DraftTree, IntArray]:
    """Keep the `budget` most confident nodes, every kept node with its ancestors; ties go to the lower number.

    Confidence is exp(s_i); as no continuation is likelier than its prefix, a node counts for no more than its parent.
    The second value is the old numbers of the kept nodes, ascending. Raises ValueError on a negative budget.
    """
    if budget < 0:
        raise ValueError(f"budget must not be negative, is {budget}")
    if len(tree) <= budget:
        return tree, np.arange(1, len(tree) + 1)
    # A parent is never below its child and has the lower number, so a stable order lists it first.
    ranked = np.argsort(-path_scores(tree), kind="stable")
    kept = np.sort(ranked[:budget]) + 1
    return select(tree, kept), kept


def path_scores(tree: DraftTree) -> NDArray[np.float64]:
    """(n,) log-score of each node or of its least likely ancestor, whichever is less: never above the parent's."""
    scores = [0.0]
    for score, parent in zip(tree.log_probs.tolist(), tree.parents.tolist(), strict=True):
        scores.append(min(score, scores[parent]))
    return np.array(scores[1:])


def select(tree: DraftTree, kept: IntArray) -> DraftTree:
    """The tree of these nodes, ascending and with all their ancestors, numbered anew in their order."""
    numbers = np.zeros(len(tree) + 1, np.int64)
    numbers[kept], at = np.arange(1, kept.size + 1), kept - 1
    return DraftTree(tree.tokens[at], numbers[tree.parents[at]], tree.log_probs[at])


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens from the root down to each node, the root left out."""
    known: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        known.append((*known[parent], token))
    return known[1:]
