"""What the sessions of a forward get of its output where that lies on a device, without waiting for it in between.

The device draws the token behind every row, walks all trees and moves the accepted KV. Then the draws and the accepted
rows come to the host in one copy, and the features of the accepted rows in a second one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from coppice.engine.batch import Piece
from coppice.engine.engine import ForwardOutput
from coppice.engine.kv_cache import KVPool
from coppice.speculation.sampling_torch import Draws, draw_rows, tabulate

from .acceptance import Reading
from .job import Job
from .layout import PARENT, PLACE, SLOT, TEXT, WANTED, Layout, lay_out, on_host


def read_out(
    jobs: Sequence[Job], pieces: Sequence[Piece], output: ForwardOutput, pool: KVPool
) -> list[tuple[Reading | None, Tensor | None]]:
    """Of each job what came of its piece, and the (n, F) features of the rows that are text, on the host; nothing of a
    step that the host judges.
    """
    layout = lay_out(jobs, pieces)
    laid = _upload(layout, output.logits.shape[1], pool.device)
    wanted = layout.rows[WANTED] > 0
    with torch.inference_mode():
        ids = draw_rows(output.logits, laid.draws)
        text = _walk(ids, laid.table, laid.jumps)
        is_text, numbers = text.long(), laid.numbers[:-1]
        if len(laid.targets):
            places = torch.where(text, laid.table[PLACE], 0)
            pool.move_there(laid.table[SLOT][laid.takers.scatter(0, places, numbers)[1:]], laid.targets)
        told = torch.cat((ids, is_text)).cpu().numpy()
        accepted = told[len(ids) :] > 0
        features = None
        if output.features is not None and (count := np.count_nonzero(accepted & wanted)):
            taken = is_text * laid.table[WANTED]
            sources = laid.numbers.scatter(0, taken.cumsum(0).mul_(taken), numbers)[1 : count + 1]
            features = output.features.index_select(0, sources).cpu()
    drawn = told[: len(ids)].tolist()
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


def _upload(layout: Layout, vocab_size: int, device: torch.device) -> _Laid:
    """All that the device needs, in one copy."""
    rows, takers, asked, depth = layout
    jumps = [rows[PARENT]]
    while len(jumps) < depth.bit_length():
        jumps.append(jumps[-1][jumps[-1]])
    drawn, most_k, nuclei = tabulate(asked, vocab_size)
    arrays = [rows, np.stack(jumps), np.arange(rows.shape[1] + 1), np.array([0, *takers]), rows[SLOT, takers], drawn]
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).to(device, non_blocking=True)
    table, of_jumps, numbers, taking, slots, draws = (
        part.view(array.shape)
        for part, array in zip(flat.split_with_sizes([array.size for array in arrays]), arrays, strict=True)
    )
    return _Laid(table, of_jumps[: depth.bit_length()], numbers, taking, slots, Draws(draws, most_k, nuclei))


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
