"""Training samples for the adapter: what the head missed, on demand with the text before it, or whole texts alone."""

from __future__ import annotations

from collections import deque

import numpy as np

from coppice.adaptation.producer import Producer
from coppice.adaptation.records import Sample
from coppice.heads.base import Miss
from coppice.wire.common import Features, Rejection

_LEAST_TEXT = 16  # committed positions of a text's end that are worth a sample


class Window:
    """A session's latest committed positions: ids and feature rows, as they came; `most` of them and an advance."""

    def __init__(self, most: int) -> None:
        self.most, self.end, self.dtype = most, 0, "float32"
        self.sampled = 0  # the end of the last full sample, before the first one the prompt's end
        self._ids: deque[int] = deque()
        self._rows: deque[bytes] = deque()

    def append(self, ids: list[int], features: Features) -> None:
        """Take the features of positions up to a new end, `ids` those of its last positions."""
        while len(self._ids) > self.most:
            self._ids.popleft()
            self._rows.popleft()
        inline, count = features.inline or b"", features.count
        width = len(inline) // max(1, count)
        new = min(count, len(ids)) if self._ids else min(count, self.most)  # of a prompt no more than is ever read
        self.dtype = features.dtype or "float32"
        self._ids += ids[len(ids) - new :]
        self._rows += (inline[at * width : (at + 1) * width] for at in range(count - new, count))
        self.end = features.start + count
        self.sampled = self.sampled or self.end

    def upto(self, position: int) -> tuple[list[int], bytes]:
        """Ids and features of the last positions before `position`, at most `most`."""
        stop = len(self._ids) - (self.end - position)
        start = max(0, stop - self.most)
        ids, rows = list(self._ids), list(self._rows)
        return ids[start:stop], b"".join(rows[start:stop])


class Samples:
    """Makes samples while someone wants them."""

    def __init__(self, producer: Producer, head: str, window: int, stride: int) -> None:
        """`window`: positions of a full sample; `stride`: those between two of one session, for they overlap."""
        self._producer, self._head, self._most, self._stride = producer, head, window, stride

    @property
    def of_texts(self) -> bool:
        """Whether texts are wanted, and nothing of misses."""
        return self._producer.demand_for(self._head) == "text"

    def window(self) -> Window:
        """For a session that begins."""
        return Window(self._most)

    def offer_text(self, session: str, window: Window, version: int, *, ended: bool) -> None:
        """Queue the window as a text if texts are wanted and it is full of what was not sampled yet, or has ended."""
        new = window.end - window.sampled
        if not self.of_texts or new < (min(self._most, _LEAST_TEXT) if ended else self._most):
            return
        ids, features = window.upto(window.end)
        window.sampled = window.end
        self._producer.sample(
            self._head,
            Sample(
                kind="full",
                version=version,
                session=session,
                position=window.end - 1,
                target_id=ids[-1],
                miss=0.0,
                tail=0.0,
                top_ids=np.empty(0, np.int64),
                top_log_probs=np.empty(0, np.float32),
                hidden=np.empty(0, np.float32),
                tokens=np.array(ids, np.int64),
                features=features[: len(features) // len(ids) * (len(ids) - 1)],
                dtype=window.dtype,
            ),
        )

    def offer(self, session: str, window: Window, version: int, rejection: Rejection, miss: Miss) -> None:
        """Queue a sample of the miss if any is wanted, the advance that told of it being in the window."""
        kind = self._producer.demand_for(self._head)
        if kind not in ("head", "full"):
            return
        ids, features = window.upto(rejection.position) if kind == "full" else ([], b"")
        if kind == "full":
            if len(ids) < 2 or rejection.position < window.sampled + self._stride:
                return
            window.sampled = rejection.position
        tokens = [*ids, rejection.target_id] if ids else []
        self._producer.sample(
            self._head,
            Sample(
                kind=kind,
                version=version,
                session=session,
                position=rejection.position,
                target_id=rejection.target_id,
                miss=miss.value,
                tail=min(1.0, max(0.0, rejection.tail)),
                top_ids=rejection.top_ids,
                top_log_probs=rejection.top_log_probs,
                hidden=miss.hidden,
                tokens=np.array(tokens, np.int64),
                features=features,
                dtype=window.dtype,
                previous_id=miss.previous,
            ),
        )
