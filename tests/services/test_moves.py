"""Sessions of a crowded drafter go on at one that has just come; their texts are the same."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from coppice.client.client import AsyncClient
from coppice.heads.base import DraftJob, Growth
from coppice.telemetry import metric
from tests.processes import Service, until
from tests.recorder import Recorder, drafter_of
from tests.services.test_features import IDS, model, start_verifier, target, truth, verifier

__all__ = ["model", "start_verifier", "target", "truth", "verifier"]  # fixtures

SESSIONS = 7
NEW = 300


class Slow(Recorder):
    """Takes its time over every draft until told to `hurry`."""

    hurry = threading.Event()

    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        if not self.hurry.is_set():
            time.sleep(0.15)
        yield from super().draft(jobs)


async def test_sessions_move_to_a_drafter_that_comes(
    start_service: Callable[..., Service], verifier: Service, truth: list[int]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    old, new = Slow(truth=truth), Slow(truth=truth)

    async with drafter_of(old) as drafter:
        heads = f'["slow={drafter.address}", "slow=127.0.0.1:{port}"]'
        flags = ["--orchestrator.verifiers", verifier.address, "--orchestrator.draft_deadline_ms", "2000"]
        service = await asyncio.to_thread(start_service, "orchestrator", *flags, "--orchestrator.heads", heads)
        async with AsyncClient(service.address) as client:
            asked = [
                asyncio.create_task(client.generate(IDS, policy="single:slow", max_new_tokens=NEW, ignore_eos=True))
                for _ in range(SESSIONS)
            ]
            await until(lambda: len(old.open_sessions) == SESSIONS)
            async with drafter_of(new, port=port):
                await until(lambda: {len(old.open_sessions), len(new.open_sessions)} == {3, 4})
                Slow.hurry.set()
                answers = await asyncio.gather(*asked)
        assert [list(answer.ids) for answer in answers] == [truth[len(IDS) :][:NEW]] * SESSIONS
        assert await asyncio.to_thread(metric, service.metrics, "coppice_heads_benched_total") <= 1
        await asyncio.to_thread(service.stop)
