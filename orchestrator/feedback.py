"""What the adapter is told of a request that ended: one record for each head that can learn, made off the hot path."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from coppice.signals.producer import Producer
from coppice.signals.records import QueryRecord

from .head_session import HeadSession
from .step_loop import Decoding

LAST_MISS_S = 2.0  # how long a drafter may take to say the last one


class Signals:
    """Takes over the heads of requests that ended."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._tasks: set[asyncio.Task[None]] = set()

    def of_misses(self, head: str) -> bool:
        """Whether an adapter wants to know what a head misses."""
        return self._producer.demand_for(head) == "misses"

    def ended(self, session: str, decoding: Decoding, heads: Sequence[HeadSession]) -> None:
        """Fetch the heads' last misses, close the heads and queue their records, all in the background."""
        task = asyncio.create_task(self._finish(session, decoding, heads))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Wait for what is under way and for the queue, at most a few seconds each."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_MISS_S)
        await self._producer.stop()

    async def _finish(self, session: str, decoding: Decoding, heads: Sequence[HeadSession]) -> None:
        try:
            step = decoding.steps + 1
            await asyncio.gather(*(head.last_miss(decoding.text, step, LAST_MISS_S) for head in heads))
        finally:
            for head in heads:
                head.close()
        for head in heads:
            if head.signal.learns:
                self._producer.query(head.pool.name, _record(session, decoding, head))


def _record(session: str, decoding: Decoding, head: HeadSession) -> QueryRecord:
    result, signal = decoding.output.result, head.signal
    kind, variant = next(iter(signal.choices), (0, 0))
    return QueryRecord(
        session=session,
        s=signal.s,
        tau=result.tau,
        new_tokens=result.new_tokens,
        steps=result.steps,
        tokens_per_s=result.new_tokens / max(1, result.timings.decode_ns) * 1e9,
        versions=(signal.first_version, signal.last_version),
        kind=kind,
        variant=variant,
        sketch=signal.sketch if len(signal.choices) == 1 else (),
    )
