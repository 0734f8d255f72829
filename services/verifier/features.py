"""The target's features of a session's positions: which are kept, and how they and the commits reach its followers."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from coppice.errors import InvalidField
from coppice.limits import CHUNK_BYTES
from coppice.rpc.link import Inbox
from coppice.wire.common import FeatureRef, Features
from coppice.wire.verifier import Commit

Numbers = NDArray[Any]  # Feature rows on the host: float32, or the bits of bfloat16, which numpy does not have.
FEATURE_WINDOW = 4096  # positions whose features a session keeps for followers
MOST_UNREAD = 32  # commits that wait for a follower; then it is cut off, and may follow again


class FeatureWindow:
    """The features of a session's latest positions, at most FEATURE_WINDOW rows and a chunk."""

    def __init__(self) -> None:
        self.start = self.end = 0  # the first position held, and one behind the last
        self._chunks: deque[Numbers] = deque()

    def append(self, rows: Numbers) -> None:
        """Add (n, F) rows of the next positions and forget what lies before the window. Nobody writes to them again."""
        self._chunks.append(rows)
        self.end += len(rows)
        while len(self._chunks) > 1 and self.end - self.start - len(self._chunks[0]) >= FEATURE_WINDOW:
            self.start += len(self._chunks.popleft())

    def newest(self, end: int) -> tuple[int, int]:
        """Where the rows begin that a follower may begin with, and how many they are; `end`: of the session's text."""
        count = min(self.end - self.start, FEATURE_WINDOW)
        return end - count, count

    def since(self, start: int, end: int) -> tuple[int, list[Numbers]]:
        """The first position from `start` on that is here, and rows from there, at most FEATURE_WINDOW, chunk by chunk.

        Raises InvalidField when none of the positions before `end` is here.
        """
        first, at = max(start, self.start, self.end - FEATURE_WINDOW), self.start
        if first >= min(end, self.end):
            raise InvalidField("ref", f"positions {start}..{end - 1} are not in {self.start}..{self.end - 1}")
        chunks = []
        for rows in self._chunks:
            if at + len(rows) > first:
                chunks.append(rows[max(0, first - at) :])
            at += len(rows)
        return first, chunks


Committed = tuple[Commit, Numbers | None]
"""A step's commit, and the (n, F) features of its positions, of the session's layers, if it has any."""
Window = tuple[int, list[Numbers], tuple[int, ...]]
"""The position of the first row, the rows chunk by chunk, and the layers that they are of."""


class Feed:
    """What one follower of a session is sent: feature rows, unless the reference counts none, then each step's commit.

    It is iterated on the event loop; `put` takes what the torch thread hands over.
    """

    def __init__(
        self, ref: FeatureRef, dtype: str, begin: Callable[[Feed], Awaitable[Window]], end: Callable[[Feed], None]
    ) -> None:
        """`begin` has the session feed this and gives the rows that are there; `end` undoes it. dtype: of features."""
        self.ref, self._dtype, self._begin, self._end = ref, dtype, begin, end
        self._unread = Inbox(lambda committed: committed, MOST_UNREAD)
        self._layers: tuple[int, ...] = ()  # of the session's features

    def put(self, committed: Committed | None) -> None:
        """Take a commit, or None when the session has ended. A follower that does not read is dropped."""
        if committed is None or not self._unread.put(committed):
            self._unread.end()

    def cancel(self) -> None:
        """End the iteration and leave the session."""
        self._unread.end()
        self._end(self)

    async def rows(self) -> AsyncIterator[Features]:
        """The feature rows that are there. Raises NotFound, InvalidField, Overloaded."""
        first, chunks, self._layers = await self._begin(self)
        for count, data in packed(chunks, self._layers, self.ref.layers or self._layers, CHUNK_BYTES):
            yield Features(first, count, self._dtype, data)
            first += count

    async def pass_on(self, take: Callable[[Commit], None]) -> None:
        """Behind `rows`, have `take` called with every commit as it comes, until the session or the feed ends."""
        await self._unread.listen(lambda committed: take(self._commit(*committed)))

    async def __aiter__(self) -> AsyncIterator[Features | Commit]:
        async for features in self.rows():
            yield features
        async for committed in self._unread:
            yield self._commit(*committed)

    def _commit(self, commit: Commit, rows: Numbers | None) -> Commit:
        if rows is None or not self.ref.count:
            return commit
        data: Any = columns(rows, self._layers, self.ref.layers or self._layers).data.cast("B")  # copied into a frame
        return replace(commit, features=Features(commit.start, len(rows), self._dtype, data))


def packed(
    chunks: list[Numbers], layers: tuple[int, ...], picked: tuple[int, ...], most_bytes: int
) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of rows, the `picked` columns of (n, F) chunks with those of `layers`, in parts of at most
    `most_bytes`, or of one row; each is made when its turn comes.
    """
    for rows in chunks:
        own = columns(rows, layers, picked)
        most = max(1, most_bytes // own[0].nbytes)
        for at in range(0, len(own), most):
            part = own[at : at + most]
            yield len(part), part.tobytes()


def columns(rows: Numbers, layers: tuple[int, ...], picked: tuple[int, ...]) -> Numbers:
    """The columns of the `picked` layers, in their order, of (n, F) rows with those of `layers`."""
    if picked == layers:
        return rows
    by_layer = rows.reshape(len(rows), len(layers), rows.shape[1] // len(layers))
    return by_layer[:, [layers.index(layer) for layer in picked]].reshape(len(rows), -1)
