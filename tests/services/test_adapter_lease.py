"""Which adapter is the active one, by a lease in a real Redis: holders that end, hang, and are cut off."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from coppice.stack.redis_server import LocalRedis
from services.adapter.service import LEASE_KEY, Lease, LeaseLost
from tests.services.test_signal_stream import client_of, redis
from tests.signals import eventually

__all__ = ["redis"]  # the fixture

LEASE_S = 1.0
LATE_S = 30.0
"""longest wait for what comes soon on an idle machine"""


def lease_of(redis: LocalRedis) -> Lease:
    return Lease(redis.url, LEASE_S)


@asynccontextmanager
async def kept(lease: Lease) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(lease.keep())
    yield task
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, LeaseLost):
        await task


async def soon(claim: Callable[[], bool], within_s: float = LATE_S) -> bool:
    return await asyncio.to_thread(eventually, claim, within_s)


async def test_one_has_it_and_another_when_it_is_given_back_also_while_redis_is_full(redis: LocalRedis) -> None:
    first, second = lease_of(redis), lease_of(redis)
    assert await first.take()
    client_of(redis).config_set("maxmemory", 1)
    async with kept(first) as keeping:
        waiting = asyncio.create_task(second.wait())
        assert not await soon(lambda: keeping.done() or second.held() or not first.held(), 2 * LEASE_S)
        client_of(redis).config_set("maxmemory", 0)
    await first.give_back()
    assert not first.held()
    await asyncio.wait_for(waiting, LATE_S)
    assert second.held()
    await first.give_back()  # changes nothing: it is not its own any more
    assert not await first.take()
    assert second.held()


async def test_a_holder_that_hangs_is_succeeded_and_knows(redis: LocalRedis) -> None:
    first, second = lease_of(redis), lease_of(redis)
    assert await first.take()
    assert not await second.take()
    began = asyncio.get_running_loop().time()
    await asyncio.wait_for(second.wait(), LATE_S)
    assert asyncio.get_running_loop().time() - began > LEASE_S / 2
    assert not first.held()  # by its own clock, before it hears of it
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(first.keep(), LATE_S)
    await second.give_back()
    with pytest.raises(LeaseLost):  # somebody else had it meanwhile
        await asyncio.wait_for(first.keep(), LATE_S)


async def test_a_holder_goes_on_after_redis_was_away_unless_somebody_else_had_it(redis: LocalRedis) -> None:
    first = lease_of(redis)
    assert await first.take()
    async with kept(first) as keeping:
        redis.stop()
        assert await soon(lambda: not first.held())
        redis.start()  # empty
        assert await soon(first.held)
        client_of(redis).flushall()
        await asyncio.sleep(LEASE_S)
        assert first.held()
        redis.stop()
        assert await soon(lambda: not first.held())
        redis.start()
        client_of(redis).hset(LEASE_KEY, mapping={"token": "another's"})
        await asyncio.wait([keeping], timeout=LATE_S)
        with pytest.raises(LeaseLost):
            keeping.result()


async def test_nobody_has_it_while_redis_is_away(redis: LocalRedis) -> None:
    redis.stop()
    lease = lease_of(redis)
    assert not await lease.take()
    waiting = asyncio.create_task(lease.wait())
    redis.start()
    await asyncio.wait_for(waiting, LATE_S)
    assert lease.held()
