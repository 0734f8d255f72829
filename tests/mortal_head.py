"""A head that fails when it is told to, by the first id of a session's text; its kind is added by an entry point."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from coppice.config.sections import DrafterSettings
from coppice.heads.base import DraftJob, Growth, Head
from coppice.speculation.tree import DraftTree
from coppice.wire.drafter import Advance, HeadDescription, OpenDraft

FAILS, DIES = 30, 31  # first ids: a draft raises an error that ends the session; one that ends the head's thread


class MortalHead(Head):
    """Drafts the root again."""

    def __init__(self, settings: DrafterSettings) -> None:
        self.description = HeadDescription(settings.name, settings.kind, 0)
        self._first: dict[int, int] = {}

    def open(self, key: int, opening: OpenDraft) -> Iterator[None]:
        """Note how the text begins."""
        self._first[key] = opening.ids[0]
        yield

    def close(self, key: int) -> None:
        """Forget it."""
        self._first.pop(key, None)

    def advance(self, key: int, advance: Advance) -> None:
        """Nothing is read."""

    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        """Draft, or fail."""
        first = {self._first[job.key] for job in jobs}
        if DIES in first:
            raise SystemExit("the head dies")
        if FAILS in first:
            raise RuntimeError("the head fails")
        for number, job in enumerate(jobs):
            yield [Growth(number, DraftTree.chain([job.root], np.array([-0.5], np.float32)), last=True)]
