"""How candidates are scored beside the target's own noise, which is kept between steps: most positions were drafted at
before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coppice.heads.base import DraftJob
from coppice.heads.models.layers import HeadConfig, largest
from coppice.speculation import sampling, sampling_torch


def places(jobs: Sequence[DraftJob]) -> NDArray[np.int64]:
    """(2 * J,): the seeds' bits of jobs, and the positions that their first drafted tokens would stand at."""
    seeds = np.array([job.sampling.seed for job in jobs], np.uint64).view(np.int64)
    return np.concatenate((seeds, np.array([job.committed_len + 1 for job in jobs], np.int64)))


def noise_there(places: Tensor, depths: int, ids: Tensor) -> Tensor:
    """(J, depths, V) float32 noise of (V,) target ids, made on a device that has the jobs' places."""
    seeds, firsts = places.view(2, -1, 1)
    positions = firsts + torch.arange(depths, device=ids.device)
    made = sampling_torch.noise(seeds.expand_as(positions).flatten(), positions.flatten(), ids)
    return made.float().view(*positions.shape, -1)


class Noise:
    """That of the ids of a draft vocabulary at a session's next positions."""

    def __init__(self, ids: Tensor) -> None:
        """`ids` are the (V,) target ids, on the device that drafts."""
        self._ids = ids
        self._seed = self._first = 0
        self._rows = torch.empty(0, len(ids), device=ids.device)

    def rows(self, seed: int, first: int, count: int) -> Tensor:
        """Return the (count, V) float32 noise of the positions from `first` on."""
        passed = first - self._first
        known = self._rows[passed:] if seed == self._seed and passed >= 0 else self._rows[:0]
        if len(known) < count:
            known = torch.cat((known, self._made(seed, range(first + len(known), first + count))))
        self._seed, self._first, self._rows = seed, first, known
        return known[:count]

    def _made(self, seed: int, positions: range) -> Tensor:
        """Return the noise of these positions. On a CPU numpy makes it in half of torch's time."""
        if self._ids.is_cuda:
            at = torch.tensor(positions, device=self._ids.device)
            seeds = torch.full_like(at, int(np.uint64(seed).view(np.int64)))
            return sampling_torch.noise(seeds, at, self._ids).float()
        ids = self._ids.numpy()
        rows = np.empty((len(positions), len(ids)), np.float32)
        for row, position in zip(rows, positions, strict=True):
            row[:] = sampling.noise(seed, position, ids)
        return torch.from_numpy(rows)


class Ranking:
    """The target ids of a draft vocabulary, and how its logits and the noise make scores."""

    def __init__(self, target_ids: Tensor) -> None:
        """`target_ids` are the (draft vocabulary,) ids, on the device that drafts."""
        self.ids, self.target_ids = target_ids.cpu().numpy(), target_ids

    def score(self, logits: Tensor, job: DraftJob, noise: Tensor | None) -> None:
        """Turn (..., draft vocabulary) float32 logits, in place, into the scores of a job whose noise is as wide."""
        if job.sampling.temperature:
            logits /= job.sampling.temperature
        if noise is not None:
            logits += noise

    def likeliest(
        self, scores: Tensor, width: int, *more: Tensor, always: Tensor | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], list[NDArray[np.int64]]]:
        """Return (..., width) target ids and log-scores of the best of (..., V) scores, best first, and more.

        A width above V is V. `always` are (..., 1) draft ids that are the last ones where they are not among the best;
        the first of (..., 1) more are their places, when there are any. The others are (..., 1) integers as they came.
        """
        width = min(width, scores.shape[-1])
        scores = scores.log_softmax(-1)
        values, indices = largest(scores, width)
        if always is None:
            best, log_scores, *others = on_host(indices, values, *more)
            return self.ids[best], log_scores, others
        best, log_scores, ids, theirs, *others = on_host(indices, values, always, scores.gather(-1, always), *more)
        found = best == ids
        places = found.argmax(-1, keepdims=True)
        absent = ~found.any(-1)
        if absent.any():
            best[absent, -1], log_scores[absent, -1], places[absent] = ids[absent, 0], theirs[absent, 0], width - 1
        return self.ids[best], log_scores, [places, *others]


def greedy_ids(rows: Tensor) -> Tensor:
    """Return the (...) int64 ids of the largest of (..., V) logits, of several the lowest.

    On a CPU numpy's: torch's takes three to seven times as long there.
    """
    return rows.argmax(-1) if rows.is_cuda else torch.from_numpy(np.asarray(rows.float().numpy().argmax(-1)))


def on_host(*parts: Tensor) -> list[NDArray[Any]]:
    """Return (..., N) tensors of integers and float32 as arrays, after one transfer from the device."""
    if not parts[0].is_cuda:
        return [part.numpy() for part in parts]
    packed = torch.cat([part if part.is_floating_point() else part.int().view(torch.float32) for part in parts], dim=-1)
    arrays = np.split(packed.cpu().numpy(), np.cumsum([part.shape[-1] for part in parts])[:-1], axis=-1)
    pairs = zip(parts, arrays, strict=True)
    return [array if part.is_floating_point() else array.view(np.int32) for part, array in pairs]


def target_ids(model: Any, config: HeadConfig) -> Tensor:
    """Return the (draft vocabulary,) int64 target id of each draft id; d2t holds offsets, as public checkpoints do."""
    ids: Tensor = torch.arange(config.draft_vocab_size) + model.d2t.cpu()
    return ids
