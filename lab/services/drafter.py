"""`python -m lab.services.drafter`: services.drafter, with a head that sleeps instead of computing."""

from __future__ import annotations

import runpy
import time
from collections.abc import Iterator, Sequence

import numpy as np

from coppice.config.sections import DrafterSettings
from coppice.engine.engine import default_feature_layers
from coppice.heads import registry
from coppice.heads.base import DraftJob, Growth, Head
from coppice.speculation.tree import DraftTree
from coppice.stack.spec import module_of
from coppice.wire.drafter import Advance, HeadDescription, OpenDraft
from lab.services.asleep import Asleep, Ids, sleep_out

RANKS = 8
"""nodes of a level, the best of which goes on"""
OTHERS = 14
"""ranks among which the target's token is where it is not the first: half of them are in the tree"""
FIRST = 0.6
"""share of the target's tokens that are of the first rank: tau is 3 with eight levels"""


class SleepingHead(Head):
    """A head whose forwards sleep, together for T_D, and whose trees hold three of five of the target's tokens as the
    best of their level.

    It is given the target's features and reads none: to hand them to a device is part of the time slept.
    """

    def __init__(self, settings: DrafterSettings) -> None:
        self.asleep = asleep = Asleep.read(settings.target)
        layers = default_feature_layers(asleep.layers)
        self.description = HeadDescription(settings.name, settings.kind, asleep.vocab_size, feature_layers=layers)

    def open(self, key: int, opening: OpenDraft) -> Iterator[None]:
        """Nothing is kept of a text."""
        yield

    def close(self, key: int) -> None:
        """Nothing was kept."""

    def advance(self, key: int, advance: Advance) -> None:
        """Nothing is kept."""

    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        """Sleep for T_D, whatever the jobs."""
        began_ns = time.perf_counter_ns()
        grown = [Growth(number, self._tree(job), last=True) for number, job in enumerate(jobs)]
        self.forward_ns += sleep_out(began_ns, self.asleep.t_d_ms)
        yield grown

    def _tree(self, job: DraftJob) -> DraftTree:
        """A tree of as many nodes as the budget has: levels of RANKS nodes behind the best one of the level before."""
        levels, ranks = np.divmod(np.arange(job.budget), RANKS)
        best, targets = job.root, list[int]()
        for level in range(job.budget // RANKS + 1):
            targets.append(self.asleep.next(best, job.committed_len + level))
            best = targets[-1] if self._first(targets[-1]) else self._other(targets[-1], 0)
        target = np.array(targets)[levels]
        rank = np.where(self._first(target), 0, 1 + target % OTHERS)
        return DraftTree(
            np.where(ranks == rank, target, self._other(target, ranks)),
            np.where(levels > 0, (levels - 1) * RANKS + 1, 0),
            levels * np.log(FIRST) + np.where(ranks > 0, np.log((1 - FIRST) / OTHERS), np.log(FIRST)),
        )

    def _first(self, target: Ids) -> Ids:
        """Whether the target's token is the best of its level."""
        return target < FIRST * self.asleep.vocab_size

    def _other(self, target: Ids, rank: Ids) -> Ids:
        """A token that is not the target's, another one for each rank."""
        return (target + 1 + rank) % self.asleep.vocab_size


if __name__ == "__main__":
    registry.build_head = SleepingHead
    runpy.run_module(module_of("services.drafter"), run_name="__main__", alter_sys=True)
