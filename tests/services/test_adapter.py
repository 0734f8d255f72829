"""The adapter process beside real drafters and a real Redis: records go in, weights come out, and can be taken back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from redis import Redis

from coppice.adaptation.signals import QueryRecord, Sample, query_to_fields, redis_key, sample_to_fields
from coppice.client.adapter import AdapterClient
from coppice.config.settings import load_settings
from coppice.errors import InvalidField, NotFound
from coppice.limits import SKETCH
from coppice.rpc.channels import Dialer
from coppice.stack.process import LocalRedis
from coppice.telemetry import metric
from coppice.v1 import adapter_pb2 as pb
from coppice.wire.drafter import HeadDescription
from services.adapter.__main__ import serve
from services.adapter.loop import DrafterLink
from services.adapter.service import LEASE_KEY, Lease, LeaseLost
from tests.processes import Service, StartService
from tests.services.test_signal_stream import client_of
from tests.signals import eventually, holds
from tests.unit.test_cli import Run, run
from tests.unit.test_feature_heads import HIDDEN, build, save_random

__all__ = ["run"]  # a fixture

HEAD = "block"
KILLS = 20 if os.environ.get("COPPICE_PROOF") else 1
LENGTH = 24
ALWAYS = "adapter.policy", "always"
QUICK = {"TEST_CONSTANTS": "services.adapter.loop.POLL_S=0.2 services.adapter.service.LEASE_S=1"}
Claim = Callable[[pb.HeadStatus], bool]
Feed = Callable[[pb.HeadStatus], None]
numbers = itertools.count()


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("head"), "specblock")


class Bench:
    """Drafters, an adapter, and a hand that writes records into Redis."""

    def __init__(self, start: StartService, target: Path, head: Path, redis: LocalRedis, folder: Path) -> None:
        self._start, self._target, self._head, self._folder = start, target, head, folder
        self.redis, self.store = redis, Redis.from_url(redis.url, socket_timeout=5)
        own, _ = build("specblock", head, target)
        assert own.weights is not None
        self.first, self.draft_ids = own.weights, own.ranking.ids.tolist()
        self.drafters: list[Service] = []
        self.addresses: list[str] = []

    def drafter(self) -> None:
        flags = ["--drafter.kind", "specblock", "--drafter.name", HEAD, "--drafter.path", str(self._head)]
        flags += ["--drafter.target", str(self._target), "--drafter.threads", "1"]
        self.drafters.append(self._start("services.drafter", *flags))
        self.addresses.append(self.drafters[-1].address)

    def adapter(self, *flags: str) -> Service:
        """Quick to learn and to look; later flags win."""
        options = {
            "adaptation.redis": self.redis.url,
            "adapter.target": str(self._target),
            "adapter.heads": f"{HEAD}={self._head}",
            "adapter.folder": str(self._folder),
            "adapter.interval": "2",
            "adapter.cpu_share": "1",
        } | dict(zip(flags[::2], flags[1::2], strict=True))
        pairs = [(f"--{name}", value) for name, value in options.items()]
        pairs += [("--adapter.drafters", f"{HEAD}={address}") for address in self.addresses]
        return self._start("services.adapter", *itertools.chain(*pairs), variables=QUICK)

    def query(self, version: int = 0, samples: int = 1, **facts: Any) -> None:
        """One query that ended, and a text of it before it: a few tokens that follow each other."""
        session = f"q{next(numbers)}"
        tokens = np.array([self.draft_ids[at % 5] for at in range(LENGTH)])
        features = np.random.default_rng(int(session[1:])).standard_normal((LENGTH - 1, 3 * HIDDEN)).astype("<f4")
        for _ in range(samples):
            self.add("samples", sample_to_fields(Sample(session, tokens, features.tobytes())))
        usual: dict[str, Any] = {"s": 9.0, "tau": 2.0, "new_tokens": 40, "steps": 20, "tokens_per_s": 50.0}
        record = QueryRecord(session=session, versions=(version, version), **usual | facts)
        self.add("queries", query_to_fields(record))

    def add(self, stream: Literal["queries", "samples"], fields: Any) -> None:
        self.store.xadd(redis_key(HEAD, stream), fields)

    def answer(self, status: pb.HeadStatus) -> None:
        """Two queries on the live version."""
        self.query(status.version)
        self.query(status.version)

    def ask(self, status: pb.HeadStatus) -> None:
        """A query of one kind of text, as a drafter with the live routes would serve it."""
        kind, number = status.kinds[0] if status.kinds else None, next(numbers) // 2  # each query takes one too
        variant = kind.variant if kind and kind.share and number % 2 else kind.other if kind else 0
        facts: dict[str, Any] = {"kind": kind.kind if kind and status.version else 0, "variant": variant}
        rate = (30.0 if variant else 20.0) + 0.1 * (number % 7)
        self.query(status.version, tokens_per_s=rate, sketch=SKETCH_OF_A_KIND, s=0.0, **facts)

    def until(self, adapter: Service, claim: Claim, feed: Feed | None = None) -> Any:
        """Feed until the status is as claimed; returns it."""
        until = time.monotonic() + 120  # a full machine trains slowly
        with AdapterClient(adapter.address) as client:
            while time.monotonic() < until:
                (status,) = client.status(history=50)
                if claim(status):
                    return status
                if feed is not None:
                    feed(status)
                time.sleep(0.05)
        raise AssertionError(f"never came to pass; {status}\n{adapter.log[-3000:]}")

    def live(self) -> HeadDescription:
        """What the first drafter uses."""

        async def ask() -> HeadDescription:
            async with DrafterLink(self.addresses[0], Dialer()) as replica:
                return await replica.describe()

        return asyncio.run(ask())


@pytest.fixture
def bench(start_service: StartService, target: Path, head: Path, redis: LocalRedis, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(start_service, target, head, redis, tmp_path / "state")
    yield made
    for drafter in made.drafters:
        drafter.stop()


SKETCH_OF_A_KIND = tuple(np.eye(SKETCH)[0].tolist())


def count(adapter: Service, name: str) -> float:
    return metric(adapter.metrics, f"coppice_adapter_{name}_total")


def test_what_is_learnt_reaches_a_drafter_and_operators_see_it_and_take_it_back(bench: Bench, run: Run) -> None:
    bench.drafter()
    adapter = bench.adapter()

    def command(*arguments: str) -> tuple[int, str, str]:
        return run("adapter", *arguments, "--address", adapter.address)

    for fields in ({"meta": "{}"}, {"meta": b"\xff", "by": b"x" * 10, "n": b"1"}):
        bench.add("queries", fields)
        bench.add("samples", fields)
    assert eventually(lambda: count(adapter, "records_malformed") == 4)
    status = bench.until(adapter, lambda now: any(change.what == "pays" for change in now.changes), bench.ask)
    bench.until(adapter, lambda now: all(replica.current for replica in now.replicas))
    assert (bench.live().weights_hash, bench.live().weights_version) == (status.weights_hash, status.version)
    assert bench.live().weights_hash != bench.first.hash
    assert count(adapter, "updates") >= 1
    assert command("pause")[0] == 0
    bench.until(adapter, lambda now: now.paused and now.doing == "idle")
    assert eventually(lambda: bench.store.get(redis_key(HEAD, "demand")) is None)
    done = command("rollback", "--version", "0")
    assert done == (0, f"version {bench.live().weights_version} is in use\n", "")
    assert bench.live().weights_hash == bench.first.hash
    code, _, error = command("rollback", "--version", "77")
    assert (code, "77 is not there; there are 0" in error) == (2, True)
    assert command("resume")[0] == 0
    shown = json.loads(command("status", "--json")[1])["heads"][0]
    assert (shown["head"], shown["paused"], shown["changes"][-1]["what"]) == (HEAD, False, "rollback")
    assert "rollback" in command("status")[1]
    with AdapterClient(adapter.address) as client:
        with pytest.raises(NotFound, match="head other is not adapted here; there are block"):
            client.status("other")
        with pytest.raises(InvalidField, match="head"):
            client.pause("no name!")
        with pytest.raises(InvalidField, match="history"):
            client.status(history=10**6)
    assert adapter.stop() == 0
    assert command("status")[0] == 3


def test_an_adapter_that_is_killed_at_any_moment_reads_every_query_once_and_takes_its_drafters_up(bench: Bench) -> None:
    bench.drafter()
    adapter, chance, sent, newest = bench.adapter(*ALWAYS), random.Random(3), 0, 0
    current = lambda now: now.queries == sent and now.replicas[0].current  # noqa: E731
    for _ in range(KILLS):
        until = time.monotonic() + chance.uniform(0.2, 1.5)
        while time.monotonic() < until or bench.live().weights_version <= newest:
            bench.query(version=bench.live().weights_version)
            sent += 1
        adapter.kill()
        newest = bench.live().weights_version
        bench.query(version=newest)  # nobody reads it now
        sent += 1
        adapter = bench.adapter(*ALWAYS)
        status = bench.until(adapter, current)
        assert bench.live().weights_hash == status.weights_hash
    adapter.stop()
    adapter = bench.adapter(*ALWAYS)
    bench.query()
    sent += 1
    bench.until(adapter, current)
    bench.until(adapter, lambda now: now.events > 0, bench.answer)  # the kills may have come before any was saved


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("adapter.heads", "block", "adapter.heads: 'block' is not NAME=VALUE"),
        ("adapter.drafters", "other=x:1", "adapter.drafters: other is none of block"),
        ("adapter.drafters", "block=dns:x", "adapter.drafters: 'dns:x' is not HOST:PORT, dns:HOST:PORT or redis"),
    ],
)
def test_unusable_settings_are_named(name: str, value: str, reason: str, head: Path, target: Path) -> None:
    flags = {"adaptation.redis": "redis://127.0.0.1:1", "adapter.heads": f"block={head}"}
    flags |= {"adapter.drafters": "block=127.0.0.1:1", "adapter.target": str(target), name: value}
    with pytest.raises(InvalidField, match=re.escape(reason)):
        asyncio.run(serve(load_settings([part for flag, given in flags.items() for part in (f"--{flag}", given)])))


# Which adapter is the active one, by a lease in a real Redis: holders that end, hang, and are cut off.

LEASE_S = 1.0
LATE_S = 30.0  # longest wait for what comes soon on an idle machine


def lease_of(redis: LocalRedis) -> Lease:
    return Lease(redis.url, LEASE_S)


@asynccontextmanager
async def keeping_of(lease: Lease) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(lease.keep())
    yield task
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, LeaseLost):
        await task


async def test_one_has_it_and_another_when_it_is_given_back_also_while_redis_is_full(redis: LocalRedis) -> None:
    first, second = lease_of(redis), lease_of(redis)
    assert await first.take()
    client_of(redis).config_set("maxmemory", 1)
    async with keeping_of(first) as keeping:
        waiting = asyncio.create_task(second.wait())
        assert not await holds(lambda: keeping.done() or second.held() or not first.held(), 2 * LEASE_S)
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


async def test_without_redis_nobody_has_it_and_a_holder_goes_on_unless_another_had_it(redis: LocalRedis) -> None:
    first = lease_of(redis)
    redis.stop()
    assert not await first.take()
    waiting = asyncio.create_task(first.wait())
    redis.start()
    await asyncio.wait_for(waiting, LATE_S)
    async with keeping_of(first) as keeping:
        redis.stop()
        assert await holds(lambda: not first.held())
        redis.start()  # empty
        assert await holds(first.held)
        client_of(redis).flushall()
        await asyncio.sleep(LEASE_S)
        assert first.held()
        redis.stop()
        assert await holds(lambda: not first.held())
        redis.start()
        client_of(redis).hset(LEASE_KEY, mapping={"token": "another's"})
        await asyncio.wait([keeping], timeout=LATE_S)
        with pytest.raises(LeaseLost):
            keeping.result()
