"""The tokens behind the rows of a forward, drawn on the device where the logits are, in one copy to the host.

What top-k and top-p keep of a row is everything above some logit, and of what is at it the lowest ids. So a draw reads
a row once, whatever its law: one operator draws from all rows, and only those that top-k or top-p cuts are sorted.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from coppice.engine.engine import DTYPES, Engine
from coppice.engine.rows import NOTHING, Ints
from coppice.speculation.sampling import TOP_P_SLACK, SamplingParams, position_keys

from .session import Job

ROW, KEY, TOP_K, TEMPERATURE, TOP_P, LEAST = range(6)
COLUMNS = KEY, TEMPERATURE, LEAST  # what the kernel reads of a table
_ROWS_AT_ONCE = 64  # that are sorted: their probabilities are float64 and as wide as the vocabulary

Sampled = tuple[Ints, Ints, SamplingParams]  # (N,) numbers of rows, (N,) positions and how they are drawn, not greedily


class Draws(NamedTuple):
    """How S sampled rows of a forward are drawn, those that top-p cuts first, then those that top-k alone cuts."""

    table: Tensor
    """(6, S) int64 where the logits are: the row's number, the bits of its position's key and top_k, 0 for all; then
    the bits of float64: temperature, top_p and the logarithm of min_p"""
    masks: Tensor  # (G, 1 + B / 8) int64 beside it: the number of a row and what a grammar leaves of it
    most_k: int  # the largest top_k
    nuclei: int  # rows that top-p cuts
    cut: int  # rows that top-p or top-k cuts


def draw_jobs(jobs: Sequence[Job], logits: Tensor) -> list[int]:
    """The id behind each of the (R, V) rows of logits, of a prompt the last; greedy where the host draws."""
    sampled, guided, first = list[Sampled](), list[Ints](), 0
    for job in jobs:
        piece, sampling = job.piece, job.session.request.sampling
        rows = np.arange(len(piece.keep))[0 if job.step else -1 :]
        if not job.on_host and len(rows):
            if sampling.temperature:
                positions = piece.prefix_len + 1 + np.array(piece.depths)[np.array(piece.keep, np.int64)[rows]]
                sampled.append((first + rows, positions, sampling))
            if guide := job.session.guide:
                # While the device does the forward, which they would hold up in the copy of its inputs.
                masks = guide.masks([job.step.root] if job.step else [], job.tree)
                guided.append(np.column_stack([first + rows, masks.view(np.int64)]))
        first += len(piece.keep)
    with torch.inference_mode():
        ids: list[int] = draw_rows(logits, tabulate(sampled, guided, logits.shape[1], logits.device)).tolist()
    return ids


def tabulate(sampled: Sequence[Sampled], guided: Sequence[Ints], vocab_size: int, device: torch.device) -> Draws:
    """Draws on a device, by one copy. guided: parts of `masks`."""

    def most(law: SamplingParams) -> int:
        return law.top_k if law.top_k < vocab_size else 0

    ordered = sorted(sampled, key=lambda rows: (rows[2].top_p == 1, not most(rows[2])))
    laws, counts = [law for _, _, law in ordered], [len(rows) for rows, _, _ in ordered]
    top_k, at = [most(law) for law in laws], np.concatenate([NOTHING, *(positions for _, positions, _ in ordered)])
    numbers = [(law.temperature, law.top_p, math.log(law.min_p) if law.min_p else -math.inf) for law in laws]
    table = np.empty((6, len(at)), np.int64)
    table[ROW] = np.concatenate([NOTHING, *(rows for rows, _, _ in ordered)])
    table[KEY] = position_keys([law.seed for law in laws], counts, at).view(np.int64)
    table[TOP_K], table[TEMPERATURE:] = np.repeat(top_k, counts), np.repeat(numbers, counts, axis=0).T.view(np.int64)
    nuclei = sum([count for law, count in zip(laws, counts, strict=True) if law.top_p < 1])
    only_k = sum([count for law, k, count in zip(laws, top_k, counts, strict=True) if law.top_p == 1 and k])
    sent = torch.from_numpy(np.concatenate([table.ravel(), *(masks.ravel() for masks in guided)])).to(device)
    masks = sent[table.size :].view(-1, 1 + -(-vocab_size // 64))
    return Draws(sent[: table.size].view(table.shape), masks, max(top_k, default=0), nuclei, nuclei + only_k)


def mask_rows(logits: Tensor, masks: Tensor) -> Tensor:
    """The (R, V) logits with what grammars leave of some rows. masks: as Draws has them."""
    rows, bits = masks[:, 0], masks[:, 1:].contiguous().view(torch.uint8)
    allowed = bits[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1
    forbidden = allowed.flatten(1)[:, : logits.shape[1]] == 0
    return logits.index_copy(0, rows, logits.index_select(0, rows).masked_fill_(forbidden, -torch.inf))


def draw_rows(logits: Tensor, draws: Draws) -> Tensor:
    """(R,) int64: the token of each of (R, V) rows of logits, the greedy one of those that are not sampled.

    What `sampling.draw` takes from the row that `sampling.decode_row` makes, -1 where that refuses it. Nothing is
    copied to the host or waited for. A draw depends on its own row alone: without top_p no number is a sum over the
    row, which is rounded by how many rows are added up at once. Between devices logarithms may differ in their last
    bit: another token is drawn where two sums are within 1e-14 of each other, as often as that.
    """
    if len(draws.masks):
        logits = mask_rows(logits, draws.masks)
    best = logits.argmax(-1)
    highest = logits.gather(1, best[:, None])[:, 0]
    ids = torch.where(highest.abs() < torch.inf, best, -1)
    if not draws.table.shape[1]:
        return ids
    return ids.index_copy_(
        0, draws.table[ROW], keyed_argmax(logits, highest, draws.table, *_edges(logits, highest, draws))
    )


def _edges(logits: Tensor, highest: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """For each of the rows that are cut the lowest logit that is kept, and the last token of those that have it."""
    table, _, most_k, nuclei, cut = draws
    edges, lasts = [logits.new_empty(0)], [table.new_empty(0)]
    for first in range(0, nuclei, _ROWS_AT_ONCE):
        some = table[:, first : min(first + _ROWS_AT_ONCE, nuclei)]
        ordered, order = logits.index_select(0, some[ROW]).sort(descending=True, stable=True)
        temperature, top_p = some[TEMPERATURE : TOP_P + 1, :, None].view(torch.float64)
        scores = ordered.double().sub_(highest.index_select(0, some[ROW])[:, None]).div_(temperature)
        if most_k:
            top_k = some[TOP_K, :, None]
            kth = ordered.gather(1, (top_k - 1).clamp_(min=0))
            scores.masked_fill_((ordered < kth) & (top_k > 0), -torch.inf)
        probs = scores.exp_()
        probs /= probs.sum(-1, keepdim=True)
        count = (probs.cumsum(-1) - probs < top_p - TOP_P_SLACK).sum(-1, keepdim=True).clamp_(min=1)
        edges.append(ordered.gather(1, count - 1)[:, 0])
        lasts.append(order.gather(1, count - 1)[:, 0])
    for first in range(nuclei, cut, _ROWS_AT_ONCE):
        some = table[:, first : min(first + _ROWS_AT_ONCE, cut)]
        largest = logits.index_select(0, some[ROW]).topk(most_k).values
        edges.append(largest.gather(1, some[TOP_K, :, None] - 1)[:, 0])
        lasts.append(torch.full_like(some[ROW], logits.shape[1]))  # of those that tie with the k-th all are kept
    return torch.cat(edges), torch.cat(lasts)


def keyed_argmax(logits: Tensor, highest: Tensor, table: Tensor, edges: Tensor, lasts: Tensor) -> Tensor:
    """(S,) int64: the token of each sampled row whose score and noise add up to the most, of several the lowest.

    It is -1 without a finite highest logit. logits (R, V), highest (R,), table (6, S) as Draws has it; edges (C,) and
    lasts (C,): what is kept of the first C.
    """
    from .draws_triton import draw  # Triton comes with torch for CUDA only

    return draw(logits, highest, table, edges, lasts, columns=COLUMNS)


def warm_up(engine: Engine) -> None:
    """Have libraries prepare for rows of every law where an engine is on a device, so that no request waits for it."""
    if engine.pool.device.type == "cpu":
        return
    laws = [SamplingParams(temperature=1.0, top_p=top_p, top_k=top_k) for top_p, top_k in ((1, 0), (1, 2), (0.5, 0))]
    size, device = engine.info.vocab_size, engine.pool.device
    with torch.inference_mode():
        logits = torch.zeros(1, size, dtype=DTYPES[engine.info.dtype], device=device)
        draw_rows(logits, tabulate([(np.array([0]), np.array([0]), law) for law in laws], [], size, device))
