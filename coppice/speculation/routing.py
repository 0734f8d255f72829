"""Scores of draft trees, the choice between heads, and the online calibration that makes their scores comparable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from coppice.speculation.calibration import BoolArray
from coppice.speculation.tree import DraftTree

Rule = Literal["mean", "sum"]


def mean_confidence(tree: DraftTree) -> float:
    """mu_h, the mean of c_i = exp(s_i) over the nodes (Dual-Draft Routing, section 5); 0 for an empty tree."""
    return sum_confidence(tree) / max(1, len(tree))


def sum_confidence(tree: DraftTree) -> float:
    """The sum of c_i: the expected number of accepted drafts if the drafter is calibrated; 0 for an empty tree.

    Unlike the mean it does not fall when a tree grows, so a small confident tree does not beat a larger one that
    holds it.
    """
    return float(np.exp(tree.log_probs, dtype=np.float64).sum())


def route(trees: Sequence[DraftTree], rule: Rule = "mean") -> int:
    """Index of the tree to verify, the argmax of the heads' scores; ties go to the first. Raises ValueError without
    trees. Calibrate the trees before: heads are as confident as they were trained to be.
    """
    score = mean_confidence if rule == "mean" else sum_confidence
    return int(np.argmax([score(tree) for tree in trees]))


def _reached(tree: DraftTree, continuation: Sequence[int]) -> list[int]:
    """For each of the n + 1 nodes its depth where the path to it spells the text, else -1. The root is at depth 0."""
    reached, end = [0], len(continuation)
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        depth = reached[parent]
        reached.append(depth + 1 if 0 <= depth < end and continuation[depth] == token else -1)
    return reached


def first_miss(tree: DraftTree, continuation: Sequence[int]) -> tuple[int, int] | None:
    """Where a head's own tree first left the text: (depth of the node it left at, the node); None if it never did.

    `continuation` is the target's tokens after the root. The tree left it at the first node on it that has children
    none of which is the target's token; a text that leads to a leaf was drafted as far as the tree goes.
    """
    reached = _reached(tree, continuation)
    deepest = max(reached)
    left = [parent for parent in tree.parents.tolist() if reached[parent] == deepest]
    return (deepest, min(left)) if left and deepest < len(continuation) else None


def outcomes(tree: DraftTree, continuation: Sequence[int]) -> tuple[BoolArray, BoolArray]:
    """What the text said about every node of a head's own tree: ((n,) offered, (n,) accepted).

    `continuation` is the target's tokens after the root: the accepted path and the next root. A node was offered when
    its parent spells the text (the root always does), and accepted when it does too. So a tree that was not verified,
    or was pruned before it was, is judged like one that was.
    """
    reached = np.array(_reached(tree, continuation))
    before = reached[tree.parents]
    return (before >= 0) & (before < len(continuation)), reached[1:] >= 0
