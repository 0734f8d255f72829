"""The keyed noise that drafts are ranked with, kept between steps: most positions were drafted at before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coppice.heads.base import DraftJob
from coppice.speculation import sampling, sampling_torch

NOTHING = np.zeros(0, np.int64)


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
            return sampling_torch.noise(seed, torch.tensor(positions, device=self._ids.device), self._ids).float()
        ids = self._ids.numpy()
        rows = np.empty((len(positions), len(ids)), np.float32)
        for row, position in zip(rows, positions, strict=True):
            row[:] = sampling.noise(seed, position, ids)
        return torch.from_numpy(rows)
