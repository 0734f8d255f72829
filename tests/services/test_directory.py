"""Replicas that come and go are found by DNS and by a registry in a real Redis, which is stopped and started."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from coppice.config.sections import DirectorySettings, ServerSettings
from coppice.config.settings import Settings
from coppice.errors import InvalidField, Unavailable
from coppice.rpc.channels import Dialer
from coppice.rpc.directory import LEASE_S, POLL_S, Directory, Registry, directory, own_registries
from coppice.rpc.redis_connection import Connection
from coppice.rpc.server import Serving
from coppice.stack.process import LocalRedis
from coppice.wire.common import FeatureRef
from services.drafter.service import Verifiers
from tests.fake_service import SERVICES, Anything
from tests.processes import without_waiting
from tests.services.test_signal_stream import client_of
from tests.signals import holds


@asynccontextmanager
async def running(where: Directory) -> AsyncIterator[list[tuple[str, ...]]]:
    """Follow a directory; gives every list that it told."""
    told: list[tuple[str, ...]] = []
    task = asyncio.create_task(where.run(told.append))
    yield told
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])


@without_waiting
async def test_an_address_holds_for_a_lease_after_it_was_listed_and_while_no_list_is_to_be_had() -> None:
    listed: list[str] | None = ["b:2", "c:3"]

    async def look() -> list[str]:
        if listed is None:
            raise Unavailable("is away")
        return listed

    async with running(Directory(["a:1"], {"list": look})) as told:
        await asyncio.sleep(POLL_S)
        assert told == [("a:1",), ("a:1", "b:2", "c:3")]
        for listed in (None, [], ["b:2"], None, ["b:2", "c:3"]):  # away, flushed, one is back, away, both are
            await asyncio.sleep(5 * LEASE_S if not listed else LEASE_S / 2)
        assert len(told) == 2
        listed = ["b:2"]
        await asyncio.sleep(LEASE_S / 2)
        assert len(told) == 2
        await asyncio.sleep(LEASE_S)
        assert told[2:] == [("a:1", "b:2")]


@without_waiting
async def test_names_are_looked_up_again_and_again() -> None:
    hosts: dict[str, list[str]] = {}

    async def getaddrinfo(host: str, port: int, **options: Any) -> list[Any]:
        if host not in hosts:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        families = [socket.AF_INET6 if ":" in ip else socket.AF_INET for ip in hosts[host]]
        return [(family, options["type"], 6, "", (ip, port)) for family, ip in zip(families, hosts[host], strict=True)]

    asyncio.get_running_loop().getaddrinfo = getaddrinfo  # type: ignore[method-assign]
    async with running(directory(["dns:pods:70", "dns:six:80", "a:1"], "drafter", "", "", "pool")) as told:
        for changed, addresses in (
            ({}, ["a:1"]),
            # a replica has one address of each family
            ({"pods": ["10.0.0.2", "10.0.0.1", "fd00::1"]}, ["10.0.0.1:70", "10.0.0.2:70", "a:1"]),
            ({"six": ["fd00::2"]}, ["10.0.0.1:70", "10.0.0.2:70", "[fd00::2]:80", "a:1"]),
            ({"pods": ["10.0.0.3"]}, ["10.0.0.3:70", "[fd00::2]:80", "a:1"]),
            ({"pods": [], "six": []}, ["10.0.0.3:70", "[fd00::2]:80", "a:1"]),
        ):
            hosts |= changed
            await asyncio.sleep(2 * LEASE_S)
            assert told[-1] == tuple(addresses)


async def test_replicas_register_where_a_registry_was_away(redis: LocalRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coppice.rpc.directory.LEASE_S", 0.6)
    monkeypatch.setattr("coppice.rpc.directory.POLL_S", 0.1)
    leaving, where = asyncio.Event(), Registry(redis.url, "drafter", "block")

    def registered(address: str, role: str = "drafter", pool: str = "block") -> asyncio.Task[None]:
        return asyncio.create_task(Registry(redis.url, role, pool).keep(address, leaving))

    async def until(*addresses: str) -> None:
        assert await holds(lambda: told[-1:] == [addresses])

    junk = {"unix:/tmp/x": "+inf", "x:99999": "+inf", b"\xff:1": "+inf"}
    client_of(redis).zadd("coppice:directory:drafter:block", junk)
    crashing = registered("b:2")
    others = [registered("a:1"), registered("d:4", pool="other"), registered("e:5", "verifier")]
    async with running(directory(["redis"], "drafter", "block", redis.url, "pool")) as told:
        await until("a:1", "b:2")
        crashing.cancel()
        await until("a:1")
        redis.stop()
        others.append(registered("c:3"))
        redis.start()
        await until("a:1", "c:3")
        leaving.set()
        await asyncio.wait(others)
        assert await where.look() == []
        await asyncio.sleep(1)
        assert told[-1] == ("a:1", "c:3")  # a registry that names nobody may have been flushed
    await where._connection.close()


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
    addresses = directory(["redis"], "verifier", "", redis.url, "drafter.verifiers")
    source, following = Verifiers(Dialer(), addresses), asyncio.create_task(addresses.run(lambda changed: None))
    ref = FeatureRef("127.0.0.1:1", "s", 0, 1)
    with pytest.raises(InvalidField, match=r"is not one of drafter\.verifiers"):
        await source.follow(ref)
    followed = asyncio.create_task(source.follow(ref))
    leaving, registry = asyncio.Event(), Registry(redis.url, "verifier", "")
    registered = asyncio.create_task(registry.keep(ref.verifier, leaving))  # a moment after an orchestrator knew
    (await followed).cancel()
    following.cancel()
    leaving.set()
    await asyncio.wait([following, registered])


async def test_a_service_leaves_the_registry_before_it_refuses_sessions(redis: LocalRedis) -> None:
    key, refusing = "coppice:directory:drafter:block", list[bool]()

    class Noticed(Registry):
        async def keep(self, address: str, leaving: asyncio.Event) -> None:
            await super().keep(address, leaving)
            refusing.append(serving.draining.is_set())

    serving = Serving(Settings(), "drafter", registries=[Noticed(redis.url, "drafter", "block")])
    await serving.start({SERVICES["drafter"]: Anything()})
    client = client_of(redis)
    assert await holds(lambda: client.zscore(key, serving.address) is not None)
    stopped = asyncio.create_task(serving.until_stopped())
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await stopped == 0
    assert refusing == [False]
    assert client.zscore(key, serving.address) is None


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
