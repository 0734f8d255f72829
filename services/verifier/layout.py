"""What a device is told of the rows of a forward, so that it can judge all sessions' trees by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coppice.engine.batch import Piece
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree

from .job import Job

Ints = NDArray[np.int64]

# Of the table of rows: a row's parent and its root, each the row itself where it has none; the row of logits whose draw
# decides about it, and the token that has to be drawn; where a path that ends at it ranks among those of its root; the
# place of its KV once it is accepted, counted from 1, and its slot now; whether its features are wanted.
PARENT, ROOT, DECIDED_BY, DRAFTED, RANK, PLACE, SLOT, WANTED = range(8)
TEXT, NEVER = -1, -2  # instead of a drafted token: the row is text whatever is drawn, or never is


class Layout(NamedTuple):
    """The T rows of a forward."""

    rows: Ints
    """(8, T), the table"""
    takers: Ints
    """(K,) rows whose places take the KV of accepted ones"""
    asked: list[tuple[Ints, Ints, SamplingParams]]
    """rows of logits that are drawn from, positions of the tokens behind them, and how"""
    depth: int
    """rows on the longest path below a root"""


def on_host(job: Job) -> bool:
    """Whether a job needs whole rows on the host: one with penalties, or a step under the p/q rule."""
    return job.opened.penalties is not None or (job.step is not None and job.step.q_rows is not None)


def lay_out(jobs: Sequence[Job], pieces: Sequence[Piece]) -> Layout:
    """Prompts are text, and the last row of one draws the first root. No walk goes below a session's limit or a stop
    token, so no draw decides there. What the host judges is never text here.
    """
    counts = np.array([len(piece.tokens) for piece in pieces])
    firsts = np.cumsum(counts) - counts
    kept = np.cumsum([0, *(len(piece.keep) for piece in pieces)])
    prompts = [job.step is None for job in jobs]
    host = [on_host(job) for job in jobs]
    limits = [job.opened.request.max_len - piece.prefix_len - 1 for job, piece in zip(jobs, pieces, strict=True)]
    wanted = [bool(job.opened.request.feature_layers) for job in jobs]
    of_session = np.array([firsts, counts, kept[:-1], prompts, host, limits, wanted])
    first, count, first_kept, prompt, never, limit, features = np.repeat(of_session, counts, axis=1)
    numbers, parents, depths, tokens = (
        np.arange(len(first)),
        *(
            np.array([value for piece in pieces for value in getattr(piece, name)], np.int64)
            for name in ("parents", "depths", "tokens")
        ),
    )
    alone = (parents < 0) | (prompt > 0)
    rows = np.zeros((8, len(first)), np.int64)
    rows[PARENT] = np.where(alone, numbers, first + parents)
    rows[ROOT] = np.where(prompt, numbers, first)
    rows[DECIDED_BY] = np.where(alone, 0, first_kept + parents)
    rows[DRAFTED] = np.where(alone, TEXT, np.where(depths > limit, NEVER, tokens))
    rows[DRAFTED, (never > 0) & (prompt == 0)] = NEVER
    rows[RANK] = depths * count - (numbers - first)
    rows[WANTED] = features * (rows[DRAFTED] != NEVER)
    layout = Layout(rows, np.zeros(0, np.int64), [], 0)
    takers: list[Ints] = []
    places = deepest = 0
    for number, (job, piece) in enumerate(zip(jobs, pieces, strict=True)):
        part = slice(firsts[number], firsts[number] + counts[number])
        if prompts[number]:
            if len(piece.keep) and counts[number] == len(job.prefill_left) and not host[number]:
                at, position = np.array([kept[number + 1] - 1]), np.array([piece.prefix_len + counts[number]])
                layout.asked.append((at, position, job.opened.request.sampling))
        elif not host[number]:
            at, positions = np.arange(kept[number], kept[number + 1]), piece.prefix_len + 1 + depths[part]
            layout.asked.append((at, positions, job.opened.request.sampling))
            if len(job.tree):
                depth = min(limits[number], max(piece.depths))
                deepest = max(deepest, depth)
                taking = _tree(rows[:, part], job, piece, depth, places)
                takers.append(taking + firsts[number])
                places += len(taking)
    return layout._replace(takers=np.concatenate(takers) if takers else layout.takers, depth=deepest)


def _tree(rows: Ints, job: Job, piece: Piece, depth: int, places: int) -> Ints:
    """Complete the table of one session's root and tree; returns the rows that take KV, behind `places` others."""
    tree, stop_ids = job.tree, job.opened.request.stop_ids
    if not stop_ids.isdisjoint(piece.tokens):
        stops = np.isin(tree.tokens, list(stop_ids))
        rows[DRAFTED, np.concatenate(([False], stops[tree.parents - 1] & (tree.parents > 0)))] = NEVER
    if (tree.parents == np.arange(len(tree))).all():  # a chain's rows lie right already
        return np.zeros(0, np.int64)
    depths = np.array(piece.depths)
    if (np.diff(tree.parents) < 0).any():
        rows[RANK] = depths * len(depths) - _met(tree)
    rows[SLOT] = piece.table.slots(piece.prefix_len + np.arange(len(depths)))
    rows[PLACE] = np.where((depths > 0) & (depths <= depth), places + depths, 0)
    return np.arange(1, depth + 1)


def _met(tree: DraftTree) -> Ints:
    """(n + 1,) how many nodes `walk` looks at before each: level by level, the children of those met first first. Of
    the nodes of one depth that spell the text its path ends at the first.
    """
    children, order = tree.children(), [0]
    for node in order:
        order += children[node]
    met = np.empty(len(order), np.int64)
    met[order] = np.arange(len(order))
    return met
