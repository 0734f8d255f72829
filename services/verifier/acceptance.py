"""The accept walks: how much of a verified draft tree is text, and what comes after it.

`walk` serves every tree, greedy and sampled; `pq_chain` is the classic rejection rule, for chains that were sampled
from known rows. Neither knows where the target's rows come from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coppice.speculation.sampling import ACCEPT_STREAM, RESIDUAL_STREAM, Row, SamplingParams, draw, uniform
from coppice.speculation.tree import DraftTree, TreeError

RowAt = Callable[[int], Row]
"""The target's row after G at a node: the law of the token that follows it."""


@dataclass(frozen=True, slots=True)
class Walk:
    """Where a walk went and how it ended."""

    path: tuple[int, ...]
    """accepted nodes in order, root excluded"""
    end_row: Row | None
    """the law of the next root; None when the walk finished"""
    drawn: int | None
    """the next root as drawn from `end_row`; None when the walk finished"""
    finished: bool
    """the path ends at a stop token or at the limit, so that no next root is wanted"""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a device made of one session's rows."""

    drawn: list[int]
    """the token behind each row with logits, -1 where the row is refused; empty when none was drawn"""
    rows: list[int]
    """those that are text, ascending; of a step their KV lies in place"""


def walk(
    tree: DraftTree,
    root_position: int,
    row_at: RowAt,
    params: SamplingParams,
    stop_ids: Collection[int] = frozenset(),
    max_accept: int | None = None,
) -> Walk:
    """Follow the target's own draws through the tree for as long as it holds them.

    The token at depth d is drawn at absolute position root_position + d with the keyed noise, so it is the token plain
    decoding puts there, whatever the tree; a greedy row holds one id and draws it. Over a union every node that spells
    the text so far is followed, and the longest path is kept (Merged-Tree Dual Drafting, section 6.1); nodes that
    spell the same text have the same row, which is asked for once. At most `max_accept` drafts are accepted, and a stop
    token ends the path after itself. A drawn stop token that the tree does not hold is the next root like any other.
    """
    tokens, children = tree.tokens.tolist(), tree.children()
    at = [0]  # every node that spells the accepted text
    depth = 0
    while max_accept is None or depth < max_accept:
        row = row_at(at[0])
        token = draw(*row, params.seed, root_position + depth + 1)
        onward = [child for node in at for child in children[node] if tokens[child - 1] == token]
        if not onward:
            return Walk(path_to(tree, at[0]), row, token, finished=False)
        at, depth = onward, depth + 1
        if token in stop_ids:
            break
    return Walk(path_to(tree, at[0]), None, None, finished=True)


def walked(tree: DraftTree, reading: Reading, row_at: RowAt, stop_ids: Collection[int], max_accept: int) -> Walk:
    """The walk that a device took; a row holds the one id that was drawn there."""
    path = tuple(reading.rows[1:])
    end = path[-1] if path else 0
    if len(path) == max_accept or (end and int(tree.tokens[end - 1]) in stop_ids):
        return Walk(path, None, None, finished=True)
    row = row_at(end)
    return Walk(path, row, int(row[0][0]), finished=False)


def path_to(tree: DraftTree, node: int) -> tuple[int, ...]:
    """The nodes from the root, excluded, to `node`."""
    path = []
    while node:
        path.append(node)
        node = int(tree.parents[node - 1])
    return tuple(reversed(path))


def pq_chain(
    tree: DraftTree,
    row_at: RowAt,
    q_rows: NDArray[np.floating],
    seed: int,
    root_position: int,
    stop_ids: Collection[int] = frozenset(),
    max_accept: int | None = None,
) -> Walk:
    """Speculative sampling of one chain: accept x with probability min(1, p(x) / q(x)), else draw from max(p - q, 0).

    Exact in law when node i was sampled from `q_rows[i - 1]` of the (n, V) probabilities (an id from V on has none),
    with randomness other than the accept and the residual stream's, and when the chain's length does not depend on
    tokens it does not hold (Leviathan et al., arXiv 2211.17192, section 2.3; the chain of
    Tree-Based Speculative Decoding for NanoGPT). A chain accepted whole draws its bonus from the last row. Raises
    TreeError, reason "no-chain", for another tree, and "q-rows" for rows of another shape or that give a drafted token
    no probability.
    """
    if (tree.parents != np.arange(len(tree))).any():
        raise TreeError("no-chain", "parents", "the p/q rule needs a chain")
    if q_rows.ndim != 2 or len(q_rows) != len(tree):
        raise TreeError("q-rows", "q_rows", f"has shape {q_rows.shape} for {len(tree)} nodes")
    for depth, token in enumerate(tree.tokens[:max_accept].tolist()):
        row, q_row = row_at(depth), q_rows[depth]
        q = _drafted_probability(q_row, token)
        if uniform(seed, root_position + depth + 1, ACCEPT_STREAM) * q >= _probability(row, token):
            return _leave(depth, _residual(row, q_row), seed, root_position)
        if token in stop_ids:
            return Walk(tuple(range(1, depth + 2)), None, None, finished=True)
    if max_accept is not None and len(tree) >= max_accept:
        return Walk(tuple(range(1, max_accept + 1)), None, None, finished=True)
    return _leave(len(tree), row_at(len(tree)), seed, root_position)


def _leave(accepted: int, row: Row, seed: int, root_position: int) -> Walk:
    """The walk that ends after `accepted` drafts of a chain, its next root drawn from `row`."""
    drawn = draw(*row, seed, root_position + accepted + 1, RESIDUAL_STREAM)
    return Walk(tuple(range(1, accepted + 1)), row, drawn, finished=False)


def _probability(row: Row, token: int) -> float:
    """What a row gives a token; 0 outside its support."""
    ids, log_probs = row
    at = int(np.searchsorted(ids, token))
    return float(np.exp(log_probs[at])) if at < ids.size and ids[at] == token else 0.0


def _drafted_probability(q_row: NDArray[np.floating], token: int) -> float:
    """What the drafter gave its own token; TreeError if it could not have drafted it."""
    q = float(q_row[token]) if token < q_row.size else 0.0
    if not 0 < q < np.inf:
        raise TreeError("q-rows", "q_rows", f"gives the drafted token {token} the probability {q}")
    return q


def _residual(row: Row, q_row: NDArray[np.floating]) -> Row:
    """max(p - q, 0), renormalised."""
    ids, log_probs = row
    excess = np.exp(log_probs)
    inside = ids < q_row.size
    excess[inside] -= q_row[ids[inside]]
    left = np.flatnonzero(excess > 0)
    if not left.size:  # p = q up to rounding, so that a rejection has no probability of its own
        return row
    return ids[left], np.log(excess[left] / excess[left].sum())
