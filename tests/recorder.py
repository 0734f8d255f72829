"""A draft head that remembers the features it is given, a drafter around it, and a verifier whose sessions feed it what
a test says: all in the test's own process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest
import torch

from coppice.heads.base import DraftJob, Growth, Head
from coppice.limits import CHUNK_BYTES, Limits
from coppice.rpc.channels import Dialer
from coppice.rpc.directory import directory
from coppice.rpc.server import Door, add_service, server_options
from coppice.speculation.tree import DraftTree
from coppice.telemetry import SessionMetrics
from coppice.wire.common import FeatureRef, Features, Rejection
from coppice.wire.drafter import Advance, HeadDescription, OpenDraft
from coppice.wire.verifier import Commit, fed_to_wire
from services.drafter.service import DrafterServicer, Verifiers
from services.drafter.worker import Worker
from tests.fake_service import SERVICES
from tests.processes import Service, StartService
from tests.sessions import continuation, hidden_states, values
from tests.unit.test_feature_heads import VOCAB

LAYERS = (2, 3, 1)


@dataclass
class Seen:
    """What a head was given in one session."""

    ids: list[int]
    layers: tuple[int, ...]
    features: list[Features | None] = field(default_factory=list)
    wants_misses: bool = False
    rejections: list[Rejection] = field(default_factory=list)

    def check(self, model: Any, start: int) -> None:
        """Every position from `start` on has its row, in order, and it is the target's hidden state."""
        at = start
        for part in self.features:
            assert part is not None
            assert (part.start, part.dtype, part.ref) == (at, "float32", None)
            at += part.count
        assert at == len(self.ids)
        expected = hidden_states(model, self.ids, self.layers)[start:]
        torch.testing.assert_close(values(self.features), expected, atol=1e-4, rtol=1e-4)


class Recorder(Head):
    """Drafts three right tokens, and remembers. Openings wait for `gate`; it breaks at an opening (0) or an advance."""

    def __init__(self, layers: tuple[int, ...] = LAYERS, truth: Sequence[int] = (), breaks_at: int = -1) -> None:
        self.description = HeadDescription("recorder", "recorder", 0, feature_layers=layers)
        self.truth, self.breaks_at = truth, breaks_at
        self.seen: list[Seen] = []
        self.open_sessions: dict[int, Seen] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.jobs: list[DraftJob] = []

    def open(self, key: int, opening: OpenDraft) -> Iterator[None]:
        assert self.gate.wait(30)
        if self.breaks_at == 0:
            raise RuntimeError("breaks here")
        self.open_sessions[key] = Seen(
            list(opening.ids), self.description.feature_layers, [opening.features], opening.want_misses
        )
        self.seen.append(self.open_sessions[key])
        yield

    def close(self, key: int) -> None:
        self.open_sessions.pop(key, None)

    def advance(self, key: int, advance: Advance) -> None:
        seen = self.open_sessions[key]
        if len(seen.features) == self.breaks_at:
            raise RuntimeError("breaks here")
        if advance.rejection is not None:
            seen.rejections.append(advance.rejection)
        if advance.ids:
            seen.ids += advance.ids
            seen.features.append(advance.features)

    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        self.jobs += jobs
        ahead = [self.truth[job.committed_len + 1 :][:3] for job in jobs]
        yield [Growth(at, DraftTree.chain(ids, [-0.1, -0.2, -0.3][: len(ids)]), True) for at, ids in enumerate(ahead)]


@asynccontextmanager
async def server_of(service: Any, servicer: object, port: int = 0, door: Door | None = None) -> AsyncIterator[Any]:
    """A server in this process; gives something with its address."""
    server = grpc.aio.server(options=server_options(Limits(), "drafter"))
    add_service(server, service, servicer, door)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    yield SimpleNamespace(address=f"127.0.0.1:{port}")
    await server.stop(0)


@asynccontextmanager
async def drafter_of(head: Head, allowed: Sequence[str] = (), port: int = 0) -> AsyncIterator[Any]:
    """A drafter that serves a head of this process; gives something with its address."""
    worker, bounds = Worker(lambda: head, SessionMetrics("drafter")), Limits()
    await worker.start()
    verifiers = directory(allowed, "verifier", "", "", "drafter.verifiers") if allowed else None
    servicer = DrafterServicer({"head": worker}, bounds, Verifiers(Dialer(), verifiers))
    async with server_of(SERVICES["drafter"], servicer, port) as server:
        yield server
    await worker.stop()
    assert not worker.failed.is_set()


class Feeder:
    """VerifierService with one method. What it feeds may grow while it is followed, or end by `hangs`."""

    def __init__(self, items: Iterable[Features | Commit] = (), hangs: bool = True) -> None:
        self.items, self.hangs = list(items), hangs
        self.go, self.followed, self.dropped = asyncio.Event(), 0, 0
        self.commits: list[Commit] = []  # fed when `go` is set

    async def FetchFeatures(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.followed += 1
        try:
            for item in self.rows(request):
                yield b"".join(fed_to_wire(item))
            await self.go.wait()
            for commit in self.commits:
                yield b"".join(fed_to_wire(commit))
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
    async with server_of(SERVICES["verifier"], feeder) as server:
        yield FeatureRef(server.address, "s", 0, 1)


@asynccontextmanager
async def fed(features: Features) -> AsyncIterator[Features]:
    """A session that has these rows, as a client refers to it."""
    feeder = Feeder(parts_of(features))
    feeder.go.set()
    async with feeding(feeder) as ref:
        yield Features(features.start, features.count, features.dtype, None, ref)


# A verifier whose text is known, for drafters that follow its sessions.

WINDOW = 24
IDS = list(range(7, 47))
TINY_TARGET = {"vocab": VOCAB, "layers": 6, "tokenizer": False}


@pytest.fixture(scope="module")
def truth(model: Any) -> list[int]:
    """The prompt and what plain decoding says behind it."""
    return [*IDS, *continuation(model, IDS, 460)]


@pytest.fixture(scope="module")
def start_verifier(start_service: StartService, target: Path) -> StartService:
    flags = ["--verifier.target", str(target), "--verifier.threads", "1"]
    window = {"TEST_CONSTANTS": f"services.verifier.features.FEATURE_WINDOW={WINDOW}"}
    return lambda *more: start_service("services.verifier", *flags, *more, variables=window)


@pytest.fixture(scope="module")
def verifier(start_verifier: StartService) -> Service:
    return start_verifier()


def fetched(verifier: str, session: str, start: int = 0, end: int = len(IDS)) -> Features:
    """Features of the positions start..end-1 by reference."""
    count = end - start
    return Features(start, count, "float32", None, FeatureRef(verifier, session, start, count))
