"""A verifier for tests of drafters: whoever follows a session is sent what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from coppice.limits import CHUNK_BYTES
from coppice.v1 import verifier_pb2
from coppice.wire.common import FeatureRef, Features
from coppice.wire.verifier import Commit, fed_to_wire
from tests.recorder import server_of


class Feeder:
    """VerifierService with one method. What it feeds may grow while it is followed, or end by `hangs`."""

    def __init__(self, items: Iterable[Features | Commit] = (), hangs: bool = True) -> None:
        self.items, self.hangs = list(items), hangs
        self.go, self.followed, self.dropped = asyncio.Event(), 0, 0
        self.commits: list[Commit] = []
        """fed when `go` is set"""

    async def FetchFeatures(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.followed += 1
        try:
            for item in self.rows(request):
                yield fed_to_wire(item)
            await self.go.wait()
            for commit in self.commits:
                yield fed_to_wire(commit)
            if self.hangs:
                await asyncio.Event().wait()
        finally:
            self.dropped += 1

    def rows(self, request: Any) -> Iterable[Features | Commit]:
        """What is fed at once."""
        return self.items

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def parts_of(features: Features) -> Iterable[Features]:
    """Rows as messages that are not too large."""
    rows = features.inline or b""
    width = len(rows) // features.count
    most = CHUNK_BYTES // width
    for at in range(0, features.count, most):
        count = min(most, features.count - at)
        yield Features(features.start + at, count, features.dtype, rows[at * width : (at + count) * width])


@asynccontextmanager
async def feeding(feeder: Feeder) -> AsyncIterator[FeatureRef]:
    """Serves a feeder; gives a reference to its session `s`."""
    async with server_of(verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"], feeder) as server:
        yield FeatureRef(server.address, "s", 0, 1)


@asynccontextmanager
async def fed(features: Features) -> AsyncIterator[Features]:
    """A session that has these rows, as a client refers to it."""
    feeder = Feeder(parts_of(features))
    feeder.go.set()
    async with feeding(feeder) as ref:
        yield Features(features.start, features.count, features.dtype, None, ref)
