"""`python -m lab.services.drafter`: services.drafter, with a head that sleeps instead of computing."""

import runpy
import time
from collections.abc import Iterator, Sequence

import numpy as np

from coppice.config.sections import DrafterSettings
from coppice.engine.engine import default_feature_layers
from coppice.heads import base
from coppice.heads.base import DraftJob, Growth, Head
from coppice.speculation.tree import DraftTree
from coppice.stack.process import module_of
from coppice.wire.drafter import Advance, HeadDescription, OpenDraft
from lab.services import Asleep, sleep_out

RANKS = 8  # nodes of a level, the first of which goes on
FIRST = 0.6  # share of the target's tokens that are the first of their level


class SleepingHead(Head):
    """A head whose forwards sleep, together for T_D, and whose trees hold three of five of the target's tokens."""

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
        """A tree of as many nodes as the budget has: levels of RANKS nodes behind the first one of the level before."""
        levels, ranks = np.divmod(np.arange(job.budget), RANKS)
        first, firsts = job.root, list[int]()
        for level in range(job.budget // RANKS + 1):
            target = self.asleep.next(first, job.committed_len + level)
            first = target if target < FIRST * self.asleep.vocab_size else (target + 1) % self.asleep.vocab_size
            firsts.append(first)
        return DraftTree(
            (np.array(firsts)[levels] + 2 * ranks) % self.asleep.vocab_size,
            np.where(levels > 0, (levels - 1) * RANKS + 1, 0),
            levels * np.log(FIRST) + np.where(ranks > 0, np.log((1 - FIRST) / RANKS), np.log(FIRST)),
        )


if __name__ == "__main__":
    base.build_head = SleepingHead
    runpy.run_module(module_of("services.drafter"), run_name="__main__", alter_sys=True)
