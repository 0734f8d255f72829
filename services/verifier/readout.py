"""What the sessions of a forward get of its output where that lies on a device, without waiting for it in between.

What the device is told of the rows comes with what the forward reads. It draws the token behind every row, walks all
trees and moves the accepted KV. Then the draws and the accepted rows come to the host in one copy, and the features of
the accepted rows in a second one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coppice.engine.engine import DTYPES, Engine, ForwardOutput
from coppice.engine.kv_cache import KVPool
from coppice.engine.rows import Piece
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree

from .acceptance import Reading
from .draws import Draws, draw_rows, tabulate
from .pruner import Job

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


def prepare(engine: Engine) -> None:
    """Have libraries prepare for rows of every law where an engine is on a device, so that no request waits for it."""
    device, size = engine.pool.device, engine.info.vocab_size
    if device.type == "cpu":
        return
    laws = [SamplingParams(temperature=1.0, top_p=top_p, top_k=top_k) for top_p, top_k in ((1, 0), (1, 2), (0.5, 0))]
    table, *cuts = tabulate([(np.array([0]), np.array([0]), law) for law in laws], size)
    with torch.inference_mode():
        logits = torch.zeros(1, size, dtype=DTYPES[engine.info.dtype], device=device)
        draw_rows(logits, Draws(torch.from_numpy(table).to(device), *cuts))


class Instructions(NamedTuple):
    """What the device is told of the rows of a forward: made before it, and sent with what it reads."""

    layout: Layout
    numbers: Ints
    """of six tables, one behind the other"""
    shapes: tuple[tuple[int, ...], ...]
    cuts: tuple[int, int, int]
    """of the draws: most_k, nuclei and cut"""


def instruct(jobs: Sequence[Job], pieces: Sequence[Piece], vocab_size: int) -> Instructions:
    """All that the device needs to judge the rows of all sessions."""
    layout = lay_out(jobs, pieces)
    rows, takers, asked, depth = layout
    jumps = [rows[PARENT]] if depth else []
    while len(jumps) < depth.bit_length():
        jumps.append(jumps[-1][jumps[-1]])
    drawn, *cuts = tabulate(asked, vocab_size)
    numbers = np.arange(rows.shape[1] + 1)
    of_jumps = np.array(jumps, np.int64).reshape(len(jumps), rows.shape[1])
    tables = (rows, of_jumps, numbers, np.array([0, *takers]), rows[SLOT, takers], drawn)
    flat = np.concatenate([table.ravel() for table in tables])
    return Instructions(layout, flat, tuple(table.shape for table in tables), (cuts[0], cuts[1], cuts[2]))


def read_out(
    jobs: Sequence[Job], pieces: Sequence[Piece], told: Instructions, output: ForwardOutput, pool: KVPool
) -> list[tuple[Reading | None, Tensor | None]]:
    """Of each job what came of its piece, and the (n, F) features of the rows that are text, on the host; nothing of a
    step that the host judges.
    """
    laid = _Laid.of(told, output)
    wanted = told.layout.rows[WANTED] > 0
    with torch.inference_mode():
        ids = draw_rows(output.logits, laid.draws)
        text = _walk(ids, laid.table, laid.jumps)
        is_text, numbers = text.long(), laid.numbers[:-1]
        if len(laid.targets):
            places = torch.where(text, laid.table[PLACE], 0)
            pool.move_there(laid.table[SLOT][laid.takers.scatter(0, places, numbers)[1:]], laid.targets)
        answer = torch.cat((ids, is_text)).cpu().numpy()
        accepted = answer[len(ids) :] > 0
        features = None
        if output.features is not None and (count := np.count_nonzero(accepted & wanted)):
            taken = is_text * laid.table[WANTED]
            sources = laid.numbers.scatter(0, taken.cumsum(0).mul_(taken), numbers)[1 : count + 1]
            features = output.features.index_select(0, sources).cpu()
    drawn = answer[: len(ids)].tolist()
    readings: list[tuple[Reading | None, Tensor | None]] = []
    first = first_kept = first_taken = 0
    for job, piece in zip(jobs, pieces, strict=True):
        end, end_kept, own = first + len(piece.tokens), first_kept + len(piece.keep), None
        rows = np.flatnonzero(accepted[first:end]).tolist()
        if features is not None and rows and wanted[first]:
            own = features[first_taken : first_taken + len(rows)]
            own = own.clone() if job.step is not None else own  # a window would keep the rows of all sessions
            first_taken += len(rows)
        readings.append((Reading([] if on_host(job) else drawn[first_kept:end_kept], rows) if rows else None, own))
        first, first_kept = end, end_kept
    return readings


class _Laid(NamedTuple):
    """What the device is told of a forward's rows."""

    table: Tensor
    """(8, T), of all rows"""
    jumps: Tensor
    """(J, T), the ancestor of each row 1, 2, 4, ... rows above it, no further up than its root"""
    numbers: Tensor
    """(T + 1,), 0, 1, 2, ..."""
    takers: Tensor
    """(K + 1,), rows whose places take KV, each from itself unless an accepted row takes it; the first is no place"""
    targets: Tensor
    """(K,) their slots"""
    draws: Draws

    @classmethod
    def of(cls, told: Instructions, output: ForwardOutput) -> _Laid:
        """The tables of what came with a forward."""
        assert output.beside is not None
        parts = output.beside.split_with_sizes([math.prod(shape) for shape in told.shapes])
        table, jumps, numbers, takers, targets, draws = (
            part.view(shape) for part, shape in zip(parts, told.shapes, strict=True)
        )
        return cls(table, jumps, numbers, takers, targets, Draws(draws, *told.cuts))


def _walk(ids: Tensor, table: Tensor, jumps: Tensor) -> Tensor:
    """(T,) bool: whether a row is text, given the (R,) draws. The work grows with the logarithm of the depth: after a
    jump a row knows of twice as many ancestors, or rows below it, as before.
    """
    _, roots, decided_by, drafted, ranks, *_ = table
    right: Tensor = drafted == TEXT
    if not len(jumps):
        return right
    right.logical_or_(ids[decided_by] == drafted)
    for ancestors in jumps:
        right = right & right[ancestors]
    best = torch.where(right, ranks, -1)
    for ancestors in jumps:
        best = best.scatter_reduce(0, ancestors, best, "amax")
    return right.logical_and_(best == best[roots])
