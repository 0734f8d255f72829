"""The verifier as drafters in its own process know it: they follow its sessions without a call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from coppice.wire.common import FeatureRef, Features
from coppice.wire.verifier import Commit

from .feed import Committed, Feed
from .worker import Worker

WINDOW_BYTES = 1 << 30  # nobody waits between the parts of a window here


class _Hearing(Feed):
    """A follower that is told at once, but not before it has the rows that it asked for."""

    heard: Callable[[Commit], None] | None = None

    def __init__(self, layers: tuple[int, ...] | None, dtype: str) -> None:
        super().__init__(layers)
        self._dtype, self._early = dtype, list[Committed]()

    def put(self, committed: Committed | None) -> None:
        """Take a commit."""
        if committed is not None:
            self._early.append(committed)
            if self.heard is not None:
                asyncio.get_running_loop().call_soon(self.tell)

    def tell(self) -> None:
        """Pass on what was taken."""
        early, self._early = self._early, []
        for committed in early:
            if self.heard is not None:
                self.heard(self.told(committed, self._dtype))


class _Subscription:
    """Until it is closed."""

    def __init__(self, hearing: _Hearing, unfollow: Callable[[], None]) -> None:
        self._hearing, self._unfollow = hearing, unfollow

    def close(self) -> None:
        """Hear no more."""
        self._hearing.heard = None
        self._unfollow()


class Nearby:
    """A worker's sessions."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @property
    def address(self) -> str:
        """What a FeatureRef calls it."""
        return self._worker.address

    async def follow(self, ref: FeatureRef, heard: Callable[[Commit], None]) -> tuple[Features | None, _Subscription]:
        """As NearbyVerifier says."""
        dtype = self._worker.engine.info.dtype
        hearing = _Hearing(ref.layers if ref.count else None, dtype)
        unfollow = partial(self._worker.unfollow, ref.session, hearing)
        try:
            rows = await self._worker.features(ref, hearing)
        except BaseException:
            unfollow()
            raise
        hearing.heard = heard
        asyncio.get_running_loop().call_soon(hearing.tell)
        if not ref.count:
            return None, _Subscription(hearing, unfollow)
        data = b"".join([part for _, part in rows.parts(WINDOW_BYTES)])
        features = Features(ref.start + ref.count - rows.count, rows.count, dtype, data)
        return features, _Subscription(hearing, unfollow)
