"""Which earlier texts a text is like, by the tokens of its prompt: what an arm gained there it may gain here.

A prompt becomes a unit vector of the logarithms of its tokens' counts, ids hashed into WIDTH buckets. Seen from the
mean of all prompts, those of one domain point the same way and those of another the opposite way, whatever they have
in common, such as a system prompt or the words of a language.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

WIDTH = 1024
MOST = 256  # texts that are remembered

Sketch = NDArray[np.float64]
T = TypeVar("T")


def sketch(ids: Sequence[int]) -> Sketch:
    """(WIDTH,) of a prompt, of length 1; all 0 for no ids."""
    counts = np.bincount(np.asarray(ids, dtype=np.int64) % WIDTH, minlength=WIDTH)
    weights = np.log1p(counts)
    return np.asarray(weights / max(1.0, float(np.linalg.norm(weights))))


class Ended(Generic[T]):
    """The latest texts that have ended, with what is remembered of each."""

    def __init__(self) -> None:
        self._texts: deque[tuple[Sketch, T]] = deque(maxlen=MOST)

    def add(self, prompt: Sketch, text: T) -> None:
        """Remember a text."""
        self._texts.append((prompt, text))

    def like(self, new: Sketch) -> list[tuple[float, T]]:
        """The texts that a new one is like, the most alike with weight 1; none when it is like no other."""
        if not self._texts:
            return []
        known = np.stack([prompt for prompt, _ in self._texts])
        mean = (known.sum(axis=0) + new) / (len(known) + 1)
        known, new = known - mean, new - mean
        lengths = np.linalg.norm(known, axis=1) * np.linalg.norm(new)
        cosines = known @ new / np.maximum(lengths, 1e-9)
        most = cosines.max()
        if most <= 0:
            return []
        return [(float(each / most), text) for each, (_, text) in zip(cosines, self._texts, strict=True) if each > 0]
