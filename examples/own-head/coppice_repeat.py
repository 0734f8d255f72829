"""A head that drafts what followed the last token when it last stood in the text, and a policy."""

from collections.abc import Iterator, Sequence

import numpy as np

from coppice.config.sections import DrafterSettings
from coppice.errors import InvalidField
from coppice.heads.base import DraftJob, Growth, Head
from coppice.speculation.policy import Choice
from coppice.speculation.tree import DraftTree, prune
from coppice.wire.drafter import Advance, HeadDescription, OpenDraft


class RepeatHead(Head):
    def __init__(self, settings: DrafterSettings) -> None:
        self.description = HeadDescription(settings.name or settings.kind, settings.kind, 0)
        self._texts: dict[int, list[int]] = {}

    def open(self, key: int, opening: OpenDraft) -> Iterator[None]:
        if opening.want_q_rows:
            raise InvalidField("open.want_q_rows", "this head does not sample")
        self._texts[key] = list(opening.ids)
        yield

    def close(self, key: int) -> None:
        self._texts.pop(key, None)

    def advance(self, key: int, advance: Advance) -> None:
        self._texts[key] += advance.ids

    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        for number, job in enumerate(jobs):
            text = self._texts[job.key]
            last = max((at for at, token in enumerate(text) if token == job.root), default=len(text))
            tokens = text[last + 1 :][: min(job.budget, 8)]
            scores = np.log(0.6) * np.arange(1, len(tokens) + 1)
            yield [Growth(number, DraftTree.chain(tokens, scores), last=True)]


def deepest(trees: Sequence[DraftTree], budget: int) -> Choice:
    """Verify the tree that goes furthest."""
    cut = [prune(tree, budget)[0] for tree in trees]
    best = max(range(len(cut)), key=lambda head: int(cut[head].depths().max()))
    return Choice(cut[best], best)
