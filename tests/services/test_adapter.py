"""The adapter process beside real drafters and a real Redis: records go in, weights come out, and can be taken back."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from redis import Redis

from coppice.client.adapter import AdapterClient
from coppice.config.settings import load_settings
from coppice.errors import InvalidField, NotFound, StaleFence, Unavailable
from coppice.limits import SKETCH
from coppice.rpc.channels import Dialer
from coppice.signals.records import (
    QueryRecord,
    Sample,
    query_to_fields,
    redis_key,
    sample_to_fields,
)
from coppice.stack.redis_server import LocalRedis
from coppice.v1 import drafter_pb2
from coppice.weights.versions import Weights, pack_update
from coppice.wire.adapter import STANDING_BY, HeadStatus
from coppice.wire.drafter import HeadDescription
from services.adapter.__main__ import serve
from services.adapter.decide import PROVEN_SHARE, YOUNG_SHARE
from services.adapter.push import MOST_AHEAD, DrafterLink
from services.adapter.state import FILE
from tests.processes import Service
from tests.pushes import altered
from tests.recorder import server_of
from tests.services.test_signal_stream import redis
from tests.signals import eventually
from tests.tiny import make_target
from tests.unit.test_feature_heads import HIDDEN, VOCAB, build, save_random

__all__ = ["redis"]  # the fixture

HEAD = "block"
KILLS = 20 if os.environ.get("COPPICE_PROOF") else 2
LENGTH = 24
PAPER, ALWAYS = ("adapter.policy", "full-only"), ("adapter.policy", "always")
QUICK = {"TEST_CONSTANTS": "services.adapter.loop.POLL_S=0.2 services.adapter.service.LEASE_S=1"}
StartService = Callable[..., Service]
Claim = Callable[[HeadStatus], bool]
Feed = Callable[[HeadStatus], None]
numbers = itertools.count()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), VOCAB, layers=8, hidden=HIDDEN, tokenizer=False)


@pytest.fixture(scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of head that learns."""
    return getattr(request, "param", "specblock")


@pytest.fixture(scope="module")
def head(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("head"), kind)


@pytest.fixture(scope="module")
def first(kind: str, head: Path, target: Path) -> Weights:
    """The checkpoint, as this process reads it."""
    return build(kind, head, target)[0].weights


class Bench:
    """Drafters, an adapter, and a hand that writes records into Redis."""

    def __init__(
        self, start: StartService, target: Path, kind: str, head: Path, redis: LocalRedis, folder: Path
    ) -> None:
        self._start, self._target, self._kind, self._head, self._folder = start, target, kind, head, folder
        self.redis = redis
        self.draft_ids: list[int] = build(kind, head, target)[0].ranking.ids.tolist()
        self.drafters: list[Service] = []
        self.addresses: list[str] = []

    def drafter(self, port: int = 0, *more: str) -> Service:
        flags = ["--drafter.kind", self._kind, "--drafter.name", HEAD, "--drafter.path", str(self._head)]
        flags += ["--drafter.target", str(self._target), "--drafter.threads", "1", "--server.port", str(port)]
        made = self._start("services.drafter", *flags, *more)
        self.drafters.append(made)
        if made.address not in self.addresses:
            self.addresses.append(made.address)
        return made

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
        if "adapter.drafters" not in options:
            pairs += [("--adapter.drafters", f"{HEAD}={address}") for address in self.addresses]
        return self._start("services.adapter", *itertools.chain(*pairs), variables=QUICK)

    @property
    def state_file(self) -> Path:
        """What the adapter remembers of its head."""
        return self._folder / HEAD / FILE

    @property
    def store(self) -> Redis:
        return Redis.from_url(self.redis.url, socket_timeout=5)

    def query(self, version: int = 0, learnable: bool = True, samples: int = 1, **facts: Any) -> None:
        """One query that ended, and a text of it before it."""
        session, store = f"q{next(numbers)}", self.store
        for _ in range(samples):
            store.xadd(redis_key(HEAD, "samples"), as_entry(sample_to_fields(self.text(session, learnable))))
        store.xadd(redis_key(HEAD, "queries"), as_entry(query_to_fields(record(session, version, **facts))))

    def text(self, session: str, learnable: bool = True) -> Sample:
        """A text of a few tokens that follow each other, or of any tokens by chance."""
        rng = np.random.default_rng(int(session[1:]))
        ids = self.draft_ids
        tokens = np.array([ids[at % 5] if learnable else int(rng.choice(ids)) for at in range(LENGTH)])
        features = rng.standard_normal((LENGTH - 1, 3 * HIDDEN)).astype("<f4")
        return Sample(session, tokens, features.tobytes())

    def answer(self, status: HeadStatus) -> None:
        """Two queries on the live version."""
        self.query(status.version)
        self.query(status.version)

    def ask(self, status: HeadStatus, rates: tuple[float, float] = (20.0, 20.0), learnable: bool = True) -> None:
        """A query of one kind of text, as a drafter with the live routes would serve it.

        rates: tokens/s with the variant that drafts for a share of the kind, and with the other one.
        """
        kind, number = status.kinds[0] if status.kinds else None, next(numbers) // 2  # each query takes one too
        variant = kind.variant if kind and kind.share and number % 2 else kind.other if kind else 0
        first = kind is not None and kind.share > 0 and variant == kind.variant
        facts: dict[str, Any] = {"kind": kind.kind if kind and status.version else 0, "variant": variant}
        rate = rates[0 if first else 1] + 0.1 * (number % 7)
        self.query(status.version, learnable, tokens_per_s=rate, sketch=SKETCH_OF_A_KIND, s=0.0, **facts)

    def until(self, adapter: Service, claim: Claim, feed: Feed | None = None) -> Any:
        """Feed until the status is as claimed; returns it."""
        with AdapterClient(adapter.address) as client:
            for _ in range(400):
                (status,) = client.status(history=50)
                if claim(status):
                    return status
                if feed is not None:
                    feed(status)
                time.sleep(0.05)
        raise AssertionError(f"never came to pass; {status}\n{adapter.log[-3000:]}")

    def live(self) -> list[HeadDescription]:
        """What every drafter uses."""

        async def ask() -> list[HeadDescription]:
            descriptions = []
            for address in self.addresses:
                async with DrafterLink(address, Dialer()) as replica:
                    descriptions.append(await replica.describe())
            return descriptions

        return asyncio.run(ask())


@pytest.fixture
def bench(
    start_service: StartService, target: Path, kind: str, head: Path, redis: LocalRedis, tmp_path: Path
) -> Iterator[Bench]:
    made = Bench(start_service, target, kind, head, redis, tmp_path / "state")
    yield made
    for drafter in made.drafters:
        drafter.stop()


def as_entry(fields: Any) -> Any:
    return fields


SKETCH_OF_A_KIND = tuple(np.eye(SKETCH)[0].tolist())


def record(session: str, version: int, **facts: Any) -> QueryRecord:
    usual: dict[str, Any] = {"s": 9.0, "tau": 2.0, "new_tokens": 40, "steps": 20, "tokens_per_s": 50.0}
    return QueryRecord(session=session, versions=(version, version), **usual | facts)


def metric(adapter: Service, name: str) -> dict[str, float]:
    """Samples of one metric by its labels."""
    from urllib.request import urlopen

    with urlopen(f"http://{adapter.metrics}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = [line.removeprefix(name).rsplit(" ", 1) for line in lines if line.startswith(name + "{")]
    return {labels: float(value) for labels, value in found}


@pytest.mark.parametrize("kind", ["specblock", "dspark"], indirect=True)
def test_a_variant_reaches_every_replica_and_one_that_comes_late_is_proven_and_can_be_taken_back(
    bench: Bench, first: Weights
) -> None:
    bench.drafter()
    late = bench.drafter()
    port = int(late.address.rpartition(":")[2])
    late.stop()
    adapter = bench.adapter()
    assert {one.reachable for one in bench.until(adapter, lambda status: True).replicas} == {True, False}
    assert eventually(lambda: bench.store.get(redis_key(HEAD, "demand")) == b"texts")
    status = bench.until(adapter, lambda now: bool(now.changes), bench.ask)
    assert status.changes[0].what in ("head", "full")
    assert {point.action for point in status.history} == {"skip", status.changes[0].what}
    assert (status.kinds[0].variant, status.kinds[0].share, status.kinds[0].other) == (1, YOUNG_SHARE, 0)
    bench.drafter(port)
    bench.until(adapter, lambda now: all(one.current for one in now.replicas))
    assert {one.weights_hash for one in bench.live()} == {status.weights_hash} != {first.hash}
    assert {one.weights_version for one in bench.live()} == {status.version}
    status = bench.until(adapter, lambda now: len(now.changes) > 1, lambda now: bench.ask(now, (30.0, 20.0)))
    assert (status.changes[1].what, status.kinds[0].share) == ("pays", PROVEN_SHARE)
    assert sum(metric(adapter, "coppice_adapter_updates_total").values()) >= 1
    with AdapterClient(adapter.address) as client:
        client.rollback(HEAD, 0)
    status = bench.until(adapter, lambda now: all(one.current for one in now.replicas))
    assert (status.kinds[0].variant, status.kinds[0].share) == (0, 0.0)
    assert {one.weights_hash for one in bench.live()} == {first.hash}
    assert adapter.stop() == 0


@pytest.mark.parametrize("learnable", [True, False], ids=["poisoned", "random"])
def test_a_variant_of_bad_texts_never_drafts_for_more_than_its_first_share(bench: Bench, learnable: bool) -> None:
    bench.drafter()
    adapter = bench.adapter()
    shares = set[float]()

    def feed(status: HeadStatus) -> None:
        shares.update(kind.share for kind in status.kinds)
        bench.ask(status, (12.0, 20.0), learnable)

    loses = lambda now: any(one.what == "loses" for one in now.changes)  # noqa: E731
    status = bench.until(adapter, lambda now: loses(now) or now.queries > 100, feed)
    shares.update(kind.share for kind in status.kinds)
    assert shares <= {0.0, YOUNG_SHARE}
    if learnable:  # texts that teach something, and not what is asked for
        assert (status.reverts, status.kinds[0].share) == (1, 0.0)
    else:  # nothing is learnt that held-out texts show
        assert not status.changes


def test_accepted_length_that_falls_over_three_windows_brings_the_good_weights_back(
    bench: Bench, first: Weights
) -> None:
    bench.drafter()
    adapter = bench.adapter(*PAPER)
    assert eventually(lambda: bench.store.get(redis_key(HEAD, "demand")) == b"misses")
    status = bench.until(adapter, lambda now: now.version == 1, lambda now: bench.query(tau=4.0))
    assert status.weights_hash != first.hash
    taus = (3.0 - 0.01 * number for number in itertools.count())
    status = bench.until(
        adapter, lambda now: now.reverts > 0, lambda now: bench.query(now.version, samples=0, tau=next(taus))
    )
    assert status.changes[-1].what == "revert"
    bench.until(adapter, lambda now: all(one.current for one in now.replicas))
    assert all(action.value is None for action in status.actions)


def test_a_restart_goes_on_where_it_ended_and_damaged_files_do_not_stop_it(bench: Bench, tmp_path: Path) -> None:
    drafter = bench.drafter()
    port = int(drafter.address.rpartition(":")[2])
    adapter = bench.adapter(*ALWAYS)
    before = bench.until(adapter, lambda status: status.version >= 2, bench.answer)
    with AdapterClient(adapter.address) as client:
        client.pause()
    bench.until(adapter, lambda status: status.doing == "idle")
    with AdapterClient(adapter.address) as client:
        (before,) = client.status(history=50)
    assert adapter.stop() == 0
    drafter.stop()
    bench.drafter(port)  # at version 0 again
    adapter = bench.adapter(*ALWAYS)
    after = bench.until(adapter, lambda status: all(one.current for one in status.replicas))
    assert (after.version, after.weights_hash, after.paused) == (before.version, before.weights_hash, True)
    assert (after.queries, after.events, after.changes) == (before.queries, before.events, before.changes)
    assert after.history == before.history
    assert bench.live()[0].weights_hash == before.weights_hash
    adapter.stop()
    state = tmp_path / "state" / HEAD
    (state / "learner.safetensors").write_bytes(b"damaged")
    newest = state / f"version-{after.version:08d}.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"x")
    adapter = bench.adapter(*ALWAYS)
    again = bench.until(adapter, lambda status: all(one.current for one in status.replicas))
    assert again.version > after.version  # earlier values under a new number
    assert again.weights_hash != after.weights_hash
    adapter.stop()
    (state / "state.json").write_bytes(b"{")
    adapter = bench.adapter(*ALWAYS)
    empty = bench.until(adapter, lambda status: all(one.current for one in status.replicas))
    assert (empty.queries, empty.paused) == (0, False)
    known = again.version  # the number that the drafter has for the weights
    bench.until(adapter, lambda now: now.version > known, lambda _: bench.query(version=known))


def test_operators_pause_resume_and_roll_back(bench: Bench, first: Weights) -> None:
    bench.drafter()
    adapter = bench.adapter(*ALWAYS)

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [str(Path(sys.executable).with_name("coppice")), "adapter", *arguments, "--address", adapter.address]
        return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)

    bench.until(adapter, lambda status: status.version >= 2, bench.answer)
    assert command("pause").returncode == 0
    status = bench.until(adapter, lambda status: status.paused and status.doing == "idle")
    for _ in range(5):
        bench.query(version=status.version)
    paused = bench.until(adapter, lambda now: now.queries == status.queries + 5)
    assert (paused.version, paused.events) == (status.version, status.events)
    assert eventually(lambda: bench.store.get(redis_key(HEAD, "demand")) is None)
    done = command("rollback", "--version", "0")
    assert (done.returncode, done.stdout) == (0, f"version {status.version + 1} is in use\n")
    assert bench.live()[0].weights_hash == first.hash
    refused = command("rollback", "--version", "77")
    assert refused.returncode == 2
    assert "77 is not there; there are 0" in refused.stderr
    assert command("resume").returncode == 0
    bench.until(adapter, lambda now: now.version > status.version + 1, bench.answer)
    shown = command("status")
    assert shown.returncode == 0
    assert "rollback" in shown.stdout
    told = json.loads(command("status", "--json").stdout)["heads"][0]
    assert (told["head"], len(told["history"])) == (HEAD, told["queries"])
    adapter.stop()
    assert command("status").returncode == 3


def test_a_stranger_is_told_what_is_wrong(bench: Bench) -> None:
    bench.drafter()
    adapter = bench.adapter(*ALWAYS)
    with AdapterClient(adapter.address) as client:
        with pytest.raises(NotFound, match="head other is not adapted here; there are block"):
            client.status("other")
        with pytest.raises(InvalidField, match="head"):
            client.pause("no name!")
        with pytest.raises(InvalidField, match="history"):
            client.status(history=10**6)
    store = bench.store
    for stream in (redis_key(HEAD, "queries"), redis_key(HEAD, "samples")):
        store.xadd(stream, {"meta": "{}"})
        store.xadd(stream, {"meta": b"\xff", "by": b"x" * 10, "n": b"1"})
    counted = lambda: sum(metric(adapter, "coppice_adapter_records_malformed_total").values())  # noqa: E731
    assert eventually(lambda: counted() == 4)
    bench.until(adapter, lambda status: status.version == 1, bench.answer)


def test_redis_may_die_be_flushed_and_trim_what_was_not_read(bench: Bench) -> None:
    bench.drafter()
    adapter = bench.adapter(*ALWAYS)
    version = bench.until(adapter, lambda status: status.version >= 1, bench.answer).version
    bench.store.flushall()
    version = bench.until(adapter, lambda status: status.version > version, bench.answer).version
    assert bench.redis.pid is not None
    os.kill(bench.redis.pid, signal.SIGKILL)
    time.sleep(1)
    bench.redis.stop()
    bench.redis.start()
    bench.until(adapter, lambda status: status.version > version, bench.answer)
    # Senders number what Redis took: 1 was read, 2 to 9 were trimmed before they could be.
    lost = lambda: metric(adapter, "coppice_adapter_records_lost_total").get('{stream="queries"}', 0.0)  # noqa: E731
    for number in (1, 10):
        fields = query_to_fields(record(f"n{number}", version)) | {b"by": b"sender", b"n": str(number).encode()}
        bench.store.xadd(redis_key(HEAD, "queries"), as_entry(fields))
    assert eventually(lambda: lost() == 8)
    assert adapter.stop() == 0


def test_an_adapter_that_is_killed_at_any_moment_leaves_drafters_it_can_take_up_again(bench: Bench) -> None:
    bench.drafter()
    chance = random.Random(3)
    newest = 0
    for left in reversed(range(KILLS)):
        adapter = bench.adapter(*ALWAYS)
        until = time.monotonic() + chance.uniform(0.2, 1.5)
        while time.monotonic() < until or not (left or bench.live()[0].weights_version):  # the last has done something
            bench.query(version=bench.live()[0].weights_version)
        adapter.kill()
        assert bench.live()[0].weights_version >= newest
        newest = bench.live()[0].weights_version
    adapter = bench.adapter(*ALWAYS)
    status = bench.until(adapter, lambda status: [one.current for one in status.replicas] == [True])
    assert bench.live()[0].weights_hash == status.weights_hash
    assert status.version >= newest > 0
    bench.until(adapter, lambda now: now.version > status.version, bench.answer)


def test_an_adapter_that_is_killed_reads_every_query_once(bench: Bench) -> None:
    bench.drafter()
    adapter = bench.adapter()
    for number in range(6):
        bench.query(samples=0)
        bench.until(adapter, lambda status, number=number: status.queries == number + 1)  # type: ignore[misc]
        time.sleep(0.5 * (number == 4))
    adapter.kill()
    bench.query(samples=0)  # nobody reads it now
    adapter = bench.adapter()
    bench.query(samples=0)
    bench.until(adapter, lambda status: status.queries == 8)
    adapter.stop()
    adapter = bench.adapter()
    bench.query(samples=0)
    bench.until(adapter, lambda status: status.queries >= 9)
    time.sleep(1)
    assert bench.until(adapter, lambda status: True).queries == 9


def test_weights_that_somebody_else_pushed_are_replaced(bench: Bench, first: Weights) -> None:
    bench.drafter()
    adapter = bench.adapter()
    bench.until(adapter, lambda status: True)

    async def push() -> None:
        async with DrafterLink(bench.addresses[0], Dialer()) as replica:
            await replica.push(*pack_update(HEAD, first, altered(first, 5, version=40)))

    asyncio.run(push())
    status = bench.until(adapter, lambda status: status.version > 40 and status.replicas[0].current)
    assert (status.weights_hash, bench.live()[0].weights_hash) == (first.hash, first.hash)


async def push(address: str, parent: Weights, weights: Weights) -> None:
    """As one who holds an adapter's certificate could."""
    async with DrafterLink(address, Dialer()) as replica:
        await replica.push(*pack_update(HEAD, parent, weights))


def test_a_version_that_nobody_can_have_made_is_refused_and_remembered_by_nobody(bench: Bench, first: Weights) -> None:
    bench.drafter()
    adapter = bench.adapter(*ALWAYS)
    for version in (1 << 64) - 1, 1 << 62, 1 << 53, (1 << 20) + 1:
        with pytest.raises(InvalidField, match="version"):
            asyncio.run(push(bench.addresses[0], first, altered(first, 7, version=version)))
    with pytest.raises(InvalidField, match="size"):
        asyncio.run(push(bench.addresses[0], first, large(first)))
    status = bench.until(adapter, lambda status: status.version >= 1, bench.answer)
    assert status.version < 100
    assert bench.live()[0].weights_version < 100


def test_versions_that_drafters_make_up_are_remembered_by_nobody(bench: Bench) -> None:
    """Neither in what the adapter shows nor in what it keeps, where they would take the place of true ones."""
    bench.drafter()
    adapter = bench.adapter()
    bench.query(version=0, samples=0)
    for version in range(20):
        bench.query(version=(1 << 52) + version, samples=0)
    bench.query(version=0, samples=0)
    status = bench.until(adapter, lambda status: status.queries == 22)
    assert [(one.version, one.queries) for one in status.versions] == [(0, 2)]
    assert {point.version for point in status.history} == {0, None}
    adapter.stop()
    assert str(1 << 52)[:10] not in (bench.state_file.read_text())


class Liar:
    """A drafter that takes no push and always says that it uses another version, one above what it is to use."""

    def __init__(self) -> None:
        self.version, self.pushes = 40, 0

    async def Draft(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        return
        yield

    async def DescribeHead(self, request: Any, context: Any) -> Any:
        said = {"name": HEAD, "kind": "specblock", "weights_hash": bytes(32), "weights_version": self.version}
        return drafter_pb2.DescribeHeadResponse(**said)

    async def SyncWeights(self, requests: AsyncIterator[Any], context: Any) -> Any:
        async for message in requests:
            if message.WhichOneof("kind") == "header":
                self.version, self.pushes = message.header.version + 1, self.pushes + 1
        raise StaleFence("old")


async def test_a_drafter_that_is_always_ahead_is_left_alone(bench: Bench, first: Weights) -> None:
    """The others keep the numbers that they have, and get their updates."""
    await asyncio.to_thread(bench.drafter)
    liar = Liar()
    async with server_of(drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"], liar) as server:
        bench.addresses.append(server.address)
        adapter = await asyncio.to_thread(bench.adapter, *ALWAYS)
        until = functools.partial(asyncio.to_thread, bench.until, adapter)
        served = lambda status: any(one.current for one in status.replicas)  # noqa: E731
        await asyncio.sleep(4)  # twenty looks
        before, pushes = await until(served), liar.pushes
        await asyncio.sleep(2)
        assert (liar.pushes, (await until(served)).version) == (pushes, before.version)
        assert 1 <= pushes <= 2 * MOST_AHEAD + 2
        await until(lambda now: now.version > before.version and served(now), bench.answer)


def large(weights: Weights) -> Weights:
    """A head whose first matrix has a few million rows."""
    name = next(name for name, tensor in weights.tensors.items() if tensor.dim() == 2)
    width = weights.tensors[name].shape[1]
    return weights.changed({name: torch.zeros((8 << 20) // width, width)}, weights.version + 1)


def test_a_second_adapter_stands_by_takes_over_and_finds_drafters_that_come_and_go(bench: Bench) -> None:
    registry = ("--directory.redis", bench.redis.url)
    following = ("adapter.drafters", f"{HEAD}=redis", "directory.redis", bench.redis.url)
    bench.drafter(0, *registry)
    flags = (*following, *ALWAYS)
    active, other = bench.adapter(*flags), bench.adapter(*flags)
    before = bench.until(active, lambda status: status.version >= 1 and status.doing == "idle", bench.answer)
    standing = bench.until(other, lambda status: status.doing == STANDING_BY)
    assert standing.version == 0
    with AdapterClient(other.address) as client, pytest.raises(Unavailable, match="stands by"):
        client.pause()
    active.process.send_signal(signal.SIGSTOP)
    taken = bench.until(other, lambda status: status.doing != STANDING_BY)
    assert taken.version >= before.version  # the folder is shared
    second = bench.drafter(0, *registry)
    bench.until(other, lambda status: [one.current for one in status.replicas] == [True, True])
    second.stop()
    bench.addresses.remove(second.address)
    bench.until(other, lambda status: len(status.replicas) == 1)
    labels = [f'{{head="{HEAD}",replica="{address}"}}' for address in bench.addresses]
    assert eventually(lambda: list(metric(other, "coppice_adapter_replica_version")) == labels)
    active.process.send_signal(signal.SIGCONT)
    assert active.process.wait(20) == 1
    active.exit_code = 0  # as it should be
    bench.until(other, lambda status: status.version > taken.version, bench.answer)
    assert other.stop() == 0


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--adaptation.redis", ""], "adaptation.redis: the adapter reads from Redis"),
        (["--adapter.heads", "block"], "adapter.heads: Value error, 'block' is not NAME=VALUE"),
        (["--adapter.drafters", "other=x:1"], "adapter.drafters: other is none of block"),
        (["--adapter.drafters", ""], "adapter.drafters"),
        (["--adapter.drafters", "block=dns:x"], "adapter.drafters: 'dns:x' is not HOST:PORT, dns:HOST:PORT or redis"),
    ],
)
def test_unusable_settings_are_named(flags: list[str], why: str, head: Path, target: Path) -> None:
    told = {"--adaptation.redis": "redis://127.0.0.1:1", "--adapter.heads": f"block={head}"}
    told |= {"--adapter.drafters": "block=127.0.0.1:1", "--adapter.target": str(target)}
    told |= dict(zip(flags[::2], flags[1::2], strict=True))
    with pytest.raises(InvalidField, match=re.escape(why)):
        asyncio.run(serve(load_settings([*itertools.chain(*told.items())])))
