"""What every kind of draft head does for a drafter: hold sessions by key and draft for many of them at once.

A head knows nothing of streams, fences or threads. Its drafter calls it from one thread (the one that owns torch),
has checked ids, budgets and lengths, and turns what it raises into the end of one session.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coppice.messages import Advance, HeadDescription, OpenDraft
from coppice.sampling import SamplingParams
from coppice.tree import DraftTree


@dataclass(frozen=True, slots=True)
class DraftJob:
    """One tree that is wanted: below `root`, which stands at absolute position `committed_len`.

    A child of the root is drawn at position committed_len + 1, a node of depth d at committed_len + d: noise of other
    positions couples with nothing.
    """

    key: int
    root: int
    committed_len: int
    budget: int
    sampling: SamplingParams
    coupled: bool = True
    want_q_rows: bool = False

    @property
    def noisy(self) -> bool:
        """Whether candidates are ranked with the target's noise; greedy drawing has none."""
        return self.coupled and self.sampling.temperature > 0


@dataclass(frozen=True, slots=True)
class Growth:
    """Nodes to append to one job's tree; parents are numbers in the whole tree."""

    job: int
    """index into the jobs of the call"""
    nodes: DraftTree
    last: bool
    """nothing more comes for this job"""
    q_rows: NDArray[np.float32] | None = None
    """(len(nodes), vocab_size) probabilities the nodes were sampled from; only for jobs that want them"""


class Head(ABC):
    """One set of draft weights and the sessions drafting with it.

    `description` says kind, vocabulary width (0: any id will do), weights version and the target layers whose features
    are needed; its session counts are the drafter's business. `forward_ns` is the time spent inside the head's own nn
    forward since construction and only grows, also while `draft` is between two yields; a head without one leaves it 0.
    """

    description: HeadDescription
    forward_ns: int = 0

    @abstractmethod
    def open(self, key: int, opening: OpenDraft) -> Iterator[None]:
        """Start session `key` on a prompt, a bounded chunk of work for each item taken from the iterator.

        `key` must be new. Between two items the drafter serves other sessions, but nothing of this one before the
        iterator is exhausted. Raises InvalidField for what this head cannot do (`want_q_rows` without a vocabulary).
        """

    @abstractmethod
    def close(self, key: int) -> None:
        """Forget session `key`, whose opening may have failed or never begun: an unknown key is no error."""

    @abstractmethod
    def advance(self, key: int, advance: Advance) -> None:
        """Append committed ids, the earlier root first, with their features and the rejection if they were sent.

        `key` must be open. Changes this session alone. Leave forwards to `draft`, where sessions share them.
        """

    @abstractmethod
    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        """Draft for several sessions together and yield what grew as soon as it exists.

        Keys must be open and distinct. Each job ends with exactly one Growth that has `last`; of what it holds in all,
        at most MAX_TREE_NODES nodes, the `budget` likeliest count. Scores are those of coupled drafting when the job is
        `coupled` at T > 0:
        log_softmax(log_softmax(logits / T) + noise(seed, position, id)) of each row, summed along the path. With
        `want_q_rows` the tree is a sampled chain whose length does not depend on the tokens drawn (the p/q rule is
        exact only then). Nothing that a later draft depends on changes, save caches: the same job may come again,
        also after an exception, which spoils no other session.
        """
