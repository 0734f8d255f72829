"""The noise that drafts are ranked with is that of its positions, whatever was asked for before."""

import numpy as np
import torch

from coppice.heads.ranking import Noise
from coppice.speculation import sampling

IDS = np.array([3, 5, 8, 900])


def test_rows_are_those_of_their_positions_however_a_session_moves() -> None:
    noise = Noise(torch.from_numpy(IDS))
    moves = [(7, 10, 4), (7, 10, 2), (7, 12, 4), (7, 30, 3), (7, 29, 3), (8, 29, 3), (0, 0, 2), (0, 1, 0), (0, 1, 5)]
    for seed, first, count in moves:
        expected = [sampling.noise(seed, position, IDS).astype(np.float32) for position in range(first, first + count)]
        rows = noise.rows(seed, first, count)
        assert rows.shape == (count, len(IDS))
        assert rows.tolist() == [row.tolist() for row in expected]
