"""One head's loop with stand-ins, and which adapter is the active one, by a lease in a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coppice.adaptation.signals import QueryRecord, Sample
from coppice.adaptation.weights import Weights, variant_name
from coppice.client.adapter import STANDING_BY
from coppice.config.sections import AdapterSettings
from coppice.config.settings import load_settings
from coppice.errors import InvalidField, StaleFence
from coppice.limits import MAX_VERSION_STEP, SKETCH
from coppice.rpc.channels import Dialer
from coppice.stack.process import LocalRedis
from coppice.v1 import adapter_pb2 as pb
from coppice.wire import drafter as wire
from services.adapter import loop as head_loop
from services.adapter.__main__ import serve
from services.adapter.decide import PROVEN_SHARE, YOUNG_SHARE, Arm, Trained
from services.adapter.loop import FILE, AdapterMetrics, HeadLoop, Replicas
from services.adapter.service import LEASE_KEY, Lease, LeaseLost
from services.drafter.staging import Staging
from tests.fake_service import SERVICES
from tests.pushes import Case
from tests.recorder import server_of
from tests.services.test_signal_stream import client_of
from tests.signals import holds
from tests.unit.test_feature_heads import save_random


def test_unusable_settings_are_named(target: Path, tmp_path: Path) -> None:
    flags = {"adaptation.redis": "redis://127.0.0.1:1", "adapter.heads": f"block={save_random(tmp_path, 'specblock')}"}
    flags |= {"adapter.drafters": "block=127.0.0.1:1", "adapter.target": str(target)}
    for name, value, reason in (
        ("heads", "block", "adapter.heads: 'block' is not NAME=VALUE"),
        ("drafters", "other=x:1", "adapter.drafters: other is none of block"),
        ("drafters", "block=dns:x", "adapter.drafters: 'dns:x' is not HOST:PORT, dns:HOST:PORT or redis"),
    ):
        told = [f"--{flag}={given}" for flag, given in (flags | {f"adapter.{name}": value}).items()]
        with pytest.raises(InvalidField, match=re.escape(reason)):
            asyncio.run(serve(load_settings(told)))


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


# One head's loop with drafters and a learner that stand in: what it decides, pushes, remembers and takes back.

HEAD = "block"
FIRST = Weights.of({"lm_head.weight": torch.zeros(6, 4), "fc.weight": torch.ones(4)})
KIND = tuple(np.eye(SKETCH)[0].tolist())
numbers = itertools.count()


@dataclass
class Drafter:
    """Takes pushes as a drafter does, and drafts nothing."""

    live: Weights = FIRST
    parents: list[int] = field(default_factory=list)  # of the pushes

    async def DescribeHead(self, request: Any, context: Any) -> Any:
        live = self.live
        return wire.head_to_wire(wire.HeadDescription(HEAD, "specblock", 6, live.version, weights_hash=live.hash))

    async def SyncWeights(self, requests: AsyncIterator[Any], context: Any) -> Any:
        header = wire.read_weights(await anext(requests))
        assert isinstance(header, wire.WeightsHeader)
        self.parents.append(header.parent)
        return await self.take(header, requests)

    async def take(self, header: wire.WeightsHeader, requests: AsyncIterator[Any]) -> Any:
        staging = Staging(header, Case(HEAD, FIRST, self.live).holder)
        async for message in requests:
            staging.add(wire.read_weights(message))  # type: ignore[arg-type]
        self.live = staging.finish()
        return wire.synced_to_wire(wire.WeightsSynced(self.live.version, self.live.hash))


class Liar(Drafter):
    """Takes no push, and always uses a version above the one that it is to use."""

    async def take(self, header: wire.WeightsHeader, requests: AsyncIterator[Any]) -> Any:
        self.live = FIRST.changed({"fc.weight": torch.zeros(4)}, header.version + 1)
        raise StaleFence("old")


class Learner:
    """Moves one tensor, and says by how much drafts became longer."""

    def __init__(self, after: float = 2.5, error: Exception | None = None) -> None:
        self.config = SimpleNamespace(vocab_size=6, feature_width=2)
        self.stopped = SimpleNamespace(set=lambda: None)
        self.after, self.error, self.updates = after, error, 0

    def learn(
        self, arm: Arm, begin: Mapping[str, Tensor], texts: Sequence[Sample], held_out: Sequence[Sample], penalty: float
    ) -> tuple[Trained, dict[str, Tensor]]:
        self.updates += 1
        if self.error:
            raise self.error
        return Trained(len(texts), 2.0, self.after, 0.1), {"lm_head.weight": begin["lm_head.weight"] + 1}


class Rig:
    """A loop, its drafters, and a hand that gives it records."""

    def __init__(self, folder: Path, drafters: Sequence[Drafter], learner: Learner, policy: str) -> None:
        self.folder, self.drafters, self.learner, self.policy = folder, list(drafters), learner, policy
        self.addresses: list[str] = []
        self.active = True
        self._exit = AsyncExitStack()

    async def start(self) -> None:
        for drafter in self.drafters:
            await self.serve(drafter)
        await self.restart()

    async def serve(self, drafter: Drafter, address: str = "") -> None:
        port = int(address.rpartition(":")[2] or 0)
        server = await self._exit.enter_async_context(server_of(SERVICES["drafter"], drafter, port))
        self.addresses[:] = sorted({*self.addresses, server.address})

    async def restart(self) -> None:
        """Begin a loop in the same folder; the one before was killed or stopped."""

        async def forever(changed: Any) -> None:
            await asyncio.Event().wait()

        async def on_thread(work: Callable[..., Any], *arguments: Any) -> Any:
            return work(*arguments)

        where, learner = SimpleNamespace(run=forever, addresses=self.addresses), self.learner
        replicas = Replicas(HEAD, where, FIRST, Dialer(), AdapterMetrics(), lambda: self.active)  # type: ignore[arg-type]
        settings = AdapterSettings(policy=self.policy, interval=2)
        self.loop = HeadLoop(learner, replicas, settings, self.folder, on_thread)  # type: ignore[arg-type]
        assert self.loop.status(0).doing == STANDING_BY
        await self.loop.start()
        self._running = asyncio.create_task(self.loop.run())

    async def kill(self) -> None:
        self._running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._running

    async def stop(self) -> None:
        await self.kill()
        await self.loop.stop()

    async def close(self) -> None:
        await self.stop()
        await self._exit.aclose()

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    @property
    def status(self) -> pb.HeadStatus:
        return self.loop.status(50)

    def query(self, version: int | None = None, **facts: Any) -> None:
        """One query that ended, and a text of it before it."""
        session = f"q{next(numbers)}"
        self.loop.take_sample(Sample(session, np.arange(4), np.ones((3, 2), "<f4").tobytes()))
        seen = self.status.version if version is None else version
        usual: dict[str, Any] = {"s": 9.0, "tau": 2.0, "new_tokens": 40, "steps": 20, "tokens_per_s": 50.0}
        self.loop.take_query(QueryRecord(session=session, versions=(seen, seen), **usual | facts))

    def ask(self, rates: tuple[float, float] = (20.0, 20.0)) -> None:
        """A query of one kind of text, at the rate of its variant or of the other one."""
        kinds, number = self.status.kinds, next(numbers) // 2  # a query takes one, too
        kind = kinds[0] if kinds and kinds[0].share else None
        variant = 0 if kind is None else (kind.variant, kind.other)[number % 2]
        rate = rates[number % 2 if kind else 1] + 0.1 * (number % 7)
        self.query(tokens_per_s=rate, s=0.0, sketch=KIND, kind=1 if kind else 0, variant=variant)

    async def until(
        self, claim: Callable[[pb.HeadStatus], object], feed: Callable[[], None] | None = None
    ) -> pb.HeadStatus:
        """Feed until the status is as claimed; returns it."""
        async with asyncio.timeout(60):
            while not claim(self.status):
                if feed is not None:
                    feed()
                await asyncio.sleep(0.01)
        return self.status


@asynccontextmanager
async def rig_of(
    folder: Path, drafters: Sequence[Drafter] = (), learner: Learner | None = None, policy: str = "bandit"
) -> AsyncIterator[Rig]:
    rig = Rig(folder, drafters or [Drafter()], learner or Learner(), policy)
    await rig.start()
    try:
        yield rig
    finally:
        await rig.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loop, "POLL_S", 0.05)


def all_current(status: pb.HeadStatus) -> bool:
    return all(replica.current for replica in status.replicas)


async def test_a_variant_reaches_every_replica_is_proven_and_can_be_taken_back(tmp_path: Path) -> None:
    early, late = Drafter(), Drafter()
    async with rig_of(tmp_path, [early]) as rig:
        assert rig.loop.demand == "texts"
        status = await rig.until(lambda now: now.changes, rig.ask)
        assert status.changes[0].what in ("head", "full")
        assert {point.action for point in status.history} == {"skip", status.changes[0].what}
        assert [(kind.variant, kind.share, kind.other) for kind in status.kinds] == [(1, YOUNG_SHARE, 0)]
        await rig.serve(late)
        await rig.until(lambda now: len(now.replicas) == 2 and all_current(now))
        assert early.live.hash == late.live.hash == status.weights_hash
        assert early.live.version == late.live.version == status.version
        tensor = early.live.tensors[variant_name(1, "lm_head.weight")]
        assert torch.equal(tensor, FIRST.tensors["lm_head.weight"] + 1)
        status = await rig.until(lambda now: len(now.changes) > 1, lambda: rig.ask((30.0, 20.0)))
        assert (status.changes[1].what, status.kinds[0].share) == ("pays", PROVEN_SHARE)
        assert status.good_version == status.version
        assert early.parents == [0, early.live.version - 1]  # the routes alone were sent
        assert await rig.loop.rollback(0) == status.version + 1
        assert all_current(rig.status)
        assert (rig.status.kinds[0].variant, rig.status.kinds[0].share) == (0, 0.0)
        assert early.live.hash == late.live.hash == FIRST.hash


async def test_a_variant_that_is_slower_drafts_for_its_first_share_and_is_taken_back(tmp_path: Path) -> None:
    async with rig_of(tmp_path) as rig:
        shares = set[float]()

        def feed() -> None:
            shares.update(kind.share for kind in rig.status.kinds)
            rig.ask((12.0, 20.0))

        status = await rig.until(lambda now: any(change.what == "loses" for change in now.changes), feed)
        assert shares == {0.0, YOUNG_SHARE}
        assert (status.reverts, status.kinds[0].share) == (1, 0.0)


@pytest.mark.parametrize("learner", [Learner(after=2.0), Learner(error=FloatingPointError("not finite"))])
async def test_an_update_that_fails_or_is_no_better_is_thrown_away(tmp_path: Path, learner: Learner) -> None:
    async with rig_of(tmp_path, learner=learner) as rig:
        status = await rig.until(lambda now: learner.updates and now.doing == "idle", rig.ask)
        assert (status.changes, status.version) == ([], 0)
        assert rig.drafters[0].live is FIRST


async def test_accepted_length_that_falls_over_three_windows_brings_the_good_weights_back(tmp_path: Path) -> None:
    async with rig_of(tmp_path, policy="full-only") as rig:
        assert rig.loop.demand == "misses"
        status = await rig.until(lambda now: now.version == 1 and all_current(now), lambda: rig.query(tau=4.0))
        assert status.weights_hash == rig.drafters[0].live.hash != FIRST.hash
        taus = (3.0 - 0.01 * number for number in itertools.count())
        await rig.until(lambda now: now.reverts, lambda: rig.query(tau=next(taus)))
        status = await rig.until(lambda now: now.changes[-1].what == "revert" and all_current(now))
        assert not any(action.HasField("value") for action in status.actions)


async def test_a_restart_goes_on_where_it_ended_and_damaged_files_do_not_stop_it(tmp_path: Path) -> None:
    drafter = Drafter()
    async with rig_of(tmp_path, [drafter], policy="always") as rig:
        await rig.until(lambda now: now.version >= 2, rig.query)
        rig.loop.pause(True)
        before = await rig.until(lambda now: now.doing == "idle")
        await rig.stop()
        drafter.live = FIRST  # restarted, too
        await rig.restart()
        after = rig.status
        assert (after.version, after.weights_hash, after.paused) == (before.version, before.weights_hash, True)
        assert (after.queries, after.events, after.changes) == (before.queries, before.events, before.changes)
        assert (after.history, after.versions) == (before.history, before.versions)
        assert drafter.live.hash == before.weights_hash
        await rig.stop()
        newest = tmp_path / f"version-{after.version:08d}.safetensors"
        newest.write_bytes(newest.read_bytes()[:-1] + b"x")
        await rig.restart()
        again = await rig.until(all_current)
        assert drafter.live.hash == again.weights_hash != after.weights_hash
        assert drafter.live.version > after.version  # earlier values under a new number
        await rig.stop()
        (tmp_path / FILE).write_text('{"live": "many", "positions": {"queries": "$"}}')
        await rig.restart()
        empty = await rig.until(all_current)
        assert (empty.queries, empty.paused) == (0, False)
        known = drafter.live.version  # the number that it has for the weights is one of theirs
        await rig.until(lambda now: now.version > known, lambda: rig.query(known))


async def test_nothing_is_pushed_or_saved_while_the_lease_is_not_its_own(tmp_path: Path) -> None:
    async with rig_of(tmp_path, policy="always") as rig:
        await rig.until(lambda now: now.version == 1, rig.query)
        await rig.until(lambda now: now.doing == "idle")
        rig.active = False
        files = rig.files
        for _ in range(10):
            rig.query()
            await asyncio.sleep(0.02)
        assert rig.status.doing == STANDING_BY
        assert (rig.drafters[0].live.version, rig.files) == (1, files)
        rig.active = True
        await rig.until(lambda now: now.version > 1, rig.query)


async def test_versions_that_drafters_make_up_are_remembered_by_nobody(tmp_path: Path) -> None:
    """Neither in what the adapter shows nor in what it keeps, where they would take the place of true ones."""
    wild = Drafter(FIRST.changed({}, MAX_VERSION_STEP + 1))
    async with rig_of(tmp_path, [Drafter(), wild]) as rig:
        for version in range(20):
            rig.query((1 << 52) + version)
        rig.query(0)
        assert [(version.version, version.queries) for version in rig.status.versions] == [(0, 1)]
        versions = {point.version if point.HasField("version") else None for point in rig.status.history}
        assert versions == {0, None}
        assert sorted(replica.reachable for replica in rig.status.replicas) == [False, True]
        assert rig.loop.state.newest == 0
        await rig.stop()
        assert str(1 << 52)[:10] not in (tmp_path / FILE).read_text()


async def test_weights_of_others_are_replaced_and_a_drafter_that_lies_harms_no_other(tmp_path: Path) -> None:
    liar, honest = Liar(FIRST.changed({"fc.weight": torch.zeros(4)}, 40)), Drafter()
    async with rig_of(tmp_path, [liar, honest], policy="always") as rig:
        await rig.until(lambda now: now.version > 0 and honest.live.version == now.version, rig.query)
        rig.loop.pause(True)
        await rig.until(lambda now: now.doing == "idle")
        other = honest.live = FIRST.changed({"fc.weight": torch.full((4,), 7.0)}, rig.status.version + 40)
        status = await rig.until(lambda now: rig.loop.state.newest > other.version)
        assert (honest.live.hash, honest.live.version) == (status.weights_hash, other.version + 1)
        rig.loop.pause(False)
        await rig.until(lambda now: now.version > status.version, lambda: rig.query(honest.live.version))
        await rig.until(lambda now: honest.live.version == now.version > other.version + 1)
        await rig.until(lambda now: sorted(replica.current for replica in now.replicas) == [False, True])
