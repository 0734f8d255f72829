"""Replicas that come and go are found by DNS and by a registry in a real Redis, which is stopped and flushed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from coppice.config.sections import DirectorySettings, ServerSettings
from coppice.config.settings import Settings
from coppice.errors import InvalidField
from coppice.limits import Limits
from coppice.rpc.channels import Dialer
from coppice.rpc.directory import Registry, directory, own_registries, registry_key
from coppice.rpc.redis_connection import Connection
from coppice.rpc.server import Serving
from coppice.stack.redis_server import LocalRedis
from coppice.v1 import drafter_pb2
from coppice.wire.common import FeatureRef
from services.drafter.following import Verifiers
from tests.clock import without_waiting
from tests.services.test_signal_stream import client_of, redis
from tests.signals import eventually

__all__ = ["redis"]  # the fixture

WITHIN_S = 5.0
"""in which an addition or a loss is to be noticed"""


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the usual ones."""
    monkeypatch.setattr("coppice.rpc.directory.LEASE_S", 0.6)
    monkeypatch.setattr("coppice.rpc.directory.POLL_S", 0.1)


class Watcher:
    """Every list that a directory told."""

    def __init__(self) -> None:
        self.lists: list[tuple[str, ...]] = []
        self._news = asyncio.Event()

    def changed(self, addresses: tuple[str, ...]) -> None:
        self.lists.append(addresses)
        self._news.set()

    async def until(self, *addresses: str, within_s: float = WITHIN_S) -> None:
        """Wait until it tells exactly these."""
        try:
            async with asyncio.timeout(within_s):
                while not self.lists or self.lists[-1] != addresses:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            pytest.fail(f"{addresses} were never told; {self.lists}")


@asynccontextmanager
async def watching(
    places: Sequence[str], url: str, role: str = "drafter", pool: str = "block"
) -> AsyncIterator[Watcher]:
    watcher = Watcher()
    task = asyncio.create_task(directory(places, role, pool, url, "pool").run(watcher.changed))
    yield watcher
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])


class Replica:
    """One that is registered until it leaves or crashes."""

    def __init__(self, url: str, address: str, role: str = "drafter", pool: str = "block", lease_s: float = 0) -> None:
        registry, self._leaving = Registry(url, role, pool), asyncio.Event()
        registry.lease_s = lease_s or registry.lease_s
        self._task = asyncio.create_task(registry.keep(address, self._leaving))

    async def leave(self) -> None:
        self._leaving.set()
        await asyncio.wait([self._task])

    async def crash(self) -> None:
        """Do what a killed process does: nothing any more."""
        self._task.cancel()
        await asyncio.wait([self._task])


@asynccontextmanager
async def registered(url: str, *addresses: str, **more: Any) -> AsyncIterator[list[Replica]]:
    replicas = [Replica(url, address, **more) for address in addresses]
    yield replicas
    for replica in replicas:
        await replica.leave()


async def test_replicas_are_found_when_they_come_when_they_leave_and_when_they_crash(redis: LocalRedis) -> None:
    async with AsyncExitStack() as stack:
        seen = await stack.enter_async_context(watching(["redis"], redis.url))
        (_, second) = await stack.enter_async_context(registered(redis.url, "a:1", "b:2"))
        await stack.enter_async_context(registered(redis.url, "d:4", pool="other"))
        await stack.enter_async_context(registered(redis.url, "e:5", role="verifier"))
        junk = {"unix:/tmp/x": "+inf", "x:99999": "+inf", b"\xff:1": "+inf"}
        client_of(redis).zadd(registry_key("drafter", "block"), junk)
        await seen.until("a:1", "b:2")
        (third,) = await stack.enter_async_context(registered(redis.url, "c:3"))
        await seen.until("a:1", "b:2", "c:3")
        await third.leave()
        await seen.until("a:1", "b:2")
        await second.crash()
        await seen.until("a:1")


async def test_a_registry_that_is_away_takes_nothing_away_and_comes_back(
    redis: LocalRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease_s = 1.0
    monkeypatch.setattr("coppice.rpc.directory.LEASE_S", lease_s)
    async with watching(["c:3", "redis"], redis.url) as seen, registered(redis.url, "a:1", "b:2") as (first, second):
        await seen.until("a:1", "b:2", "c:3")
        before = len(seen.lists)
        redis.stop()
        async with registered(redis.url, "d:4") as (fourth,):
            await asyncio.sleep(1.2 * lease_s)
            redis.start()
            await seen.until("a:1", "b:2", "c:3", "d:4")
            assert redis.pid is not None
            os.kill(redis.pid, signal.SIGSTOP)
            await asyncio.sleep(1.2 * lease_s)
            os.kill(redis.pid, signal.SIGCONT)
            await asyncio.sleep(lease_s / 2)
            assert all({"a:1", "b:2", "c:3"} <= {*names} for names in seen.lists[before:])
            await fourth.leave()
        await first.leave()
        await seen.until("b:2", "c:3")
        await second.leave()  # a registry that names nobody may have been flushed
        await asyncio.sleep(0.3)
        assert seen.lists[-1] == ("b:2", "c:3")


async def test_a_flush_takes_nothing_away_however_soon_some_are_back(
    redis: LocalRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coppice.rpc.directory.LEASE_S", 3.0)
    async with watching(["redis"], redis.url) as seen, registered(redis.url, "a:1", lease_s=0.2):
        async with registered(redis.url, "b:2"):
            await seen.until("a:1", "b:2")
            known = len(seen.lists)
            client, key = client_of(redis), registry_key("drafter", "block")
            client.flushall()
            assert await asyncio.to_thread(eventually, lambda: client.zscore(key, "a:1") is not None)
            assert client.zscore(key, "b:2") is None
            await asyncio.sleep(1.2)  # by now it is back, too
            assert len(seen.lists) == known
        await seen.until("a:1")


class Names:
    """What a resolver would answer, by host; a host that is not there does not exist."""

    def __init__(self) -> None:
        self.hosts: dict[str, list[str]] = {}

    async def getaddrinfo(self, host: str, port: int, **asked: Any) -> list[Any]:
        if host not in self.hosts:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        families = [socket.AF_INET6 if ":" in ip else socket.AF_INET for ip in self.hosts[host]]
        return [
            (family, asked["type"], 6, "", (ip, port)) for family, ip in zip(families, self.hosts[host], strict=True)
        ]


@without_waiting
async def test_names_are_looked_up_again_and_again() -> None:
    names = Names()
    asyncio.get_running_loop().getaddrinfo = names.getaddrinfo  # type: ignore[method-assign]
    async with watching(["dns:pods:70", "dns:six:80", "a:1"], "") as seen:
        await seen.until("a:1")
        names.hosts["pods"] = ["10.0.0.2", "10.0.0.1", "fd00::1"]  # a replica has one address of each family
        await seen.until("10.0.0.1:70", "10.0.0.2:70", "a:1")
        names.hosts["six"] = ["fd00::2"]
        await seen.until("10.0.0.1:70", "10.0.0.2:70", "[fd00::2]:80", "a:1")
        names.hosts["pods"] = ["10.0.0.3"]
        await seen.until("10.0.0.3:70", "[fd00::2]:80", "a:1")
        known = len(seen.lists)
        names.hosts.clear()
        await asyncio.sleep(0.3)
        assert len(seen.lists) == known
        names.hosts["pods"] = ["10.0.0.4"]
        await seen.until("10.0.0.4:70", "[fd00::2]:80", "a:1")


@pytest.mark.parametrize("place", ["", "host", "host:0", "host:65536", "http://host:1", "fd00::1:5", "dns:host"])
def test_a_bad_place_names_its_setting(place: str) -> None:
    for places, reason in (
        ([place], f"{place!r} is not HOST:PORT, dns:HOST:PORT or redis"),
        (["redis"], "redis is the registry of directory.redis, which is not set"),
        ([], "names none"),
    ):
        with pytest.raises(InvalidField, match=rf"^drafter\.verifiers: {re.escape(reason)}"):
            directory(places, "verifier", "", "", "drafter.verifiers")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "no host"])
async def test_what_nobody_can_reach_is_not_registered(host: str) -> None:
    settings = Settings(server=ServerSettings(host=host), directory=DirectorySettings(redis="redis://127.0.0.1:1"))
    with pytest.raises(InvalidField, match=r"^server\.advertise: "):
        own_registries(settings, "verifier")
    assert own_registries(settings.model_copy(update={"directory": DirectorySettings()}), "verifier") == []
    advertised = settings.server.model_copy(update={"advertise": "10.0.0.1"})
    assert len(own_registries(settings.model_copy(update={"server": advertised}), "drafter", "a", "b")) == 2


async def test_features_come_from_whom_the_directory_names(redis: LocalRedis) -> None:
    source = Verifiers(Dialer(), directory(["redis"], "verifier", "", redis.url, "drafter.verifiers"))
    following = asyncio.create_task(source.run())
    ref = FeatureRef("127.0.0.1:1", "s", 0, 1)
    with pytest.raises(InvalidField, match=r"is not one of drafter\.verifiers"):
        await source.follow(ref)
    followed = asyncio.create_task(source.follow(ref))
    async with registered(redis.url, ref.verifier, role="verifier", pool=""):  # a moment after an orchestrator knew
        (await followed).cancel()
    following.cancel()
    await asyncio.wait([following])


async def test_a_service_leaves_the_registry_before_it_refuses_sessions(redis: LocalRedis) -> None:
    key, refusing = registry_key("drafter", "block"), list[bool]()

    class Noticed(Registry):
        async def keep(self, address: str, leaving: asyncio.Event) -> None:
            await super().keep(address, leaving)
            refusing.append(serving.draining.is_set())

    serving = Serving(ServerSettings(), Limits(), "drafter", registries=[Noticed(redis.url, "drafter", "block")])
    await serving.start(drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"], Mute())
    client = client_of(redis)
    assert await asyncio.to_thread(eventually, lambda: client.zscore(key, serving.address) is not None)
    stopped = asyncio.create_task(serving.until_stopped())
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await stopped == 0
    assert refusing == [False]
    assert client.zscore(key, serving.address) is None


ENDING = """
import atexit, sys, time
from coppice.config.settings import Settings
from coppice.rpc.server import run_service

async def serve(settings):
    return 0

def teardown():
    print("tears down", flush=True)
    time.sleep(0.5)

atexit.register(teardown)
sys.exit(run_service(serve, Settings))
"""


def test_a_second_sigterm_while_libraries_are_taken_down_changes_nothing() -> None:
    with subprocess.Popen((sys.executable, "-c", ENDING), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "tears down\n"
        process.terminate()
        assert process.wait(20) == 0


class Mute:
    """Answers nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


async def test_a_cancellation_is_never_lost_wherever_a_call_of_redis_is(redis: LocalRedis) -> None:
    store = Connection(redis.url)
    lost = []
    for turns in range(40):
        await store.run("return 1", "key")  # connected
        call = asyncio.create_task(store.run("return 1", "key"))
        for _ in range(turns):
            await asyncio.sleep(0)
        if call.cancel():
            await asyncio.wait([call])
            lost += [] if call.cancelled() else [turns]
    await store.close()
    assert lost == []
