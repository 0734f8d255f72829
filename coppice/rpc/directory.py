"""Where the replicas of a pool are: a static list, DNS, or a registry in Redis that replicas keep themselves in.

If a directory does not answer, or is empty, the last known addresses stay in use. Which of them are alive is for
health checks to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable, Sequence

import structlog

from coppice.config.settings import Settings
from coppice.errors import InvalidField, Unavailable
from coppice.limits import MAX_ADDRESS_CHARS

log = structlog.get_logger()

Changed = Callable[[tuple[str, ...]], None]
"""Told the sorted addresses; never none"""

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
MAX_REPLICAS = 1024
"""of a pool that are read"""
LEASE_S, POLL_S = 3.0, 0.5
"""how long the registry believes a replica; time between two looks at a registry or at DNS"""
_ANY_HOST = frozenset({"0.0.0.0", "::", "[::]"})  # noqa: S104


def _split(address: str) -> tuple[str, int] | None:
    """Host, without brackets, and port; None for what is no HOST:PORT."""
    match = _ADDRESS.fullmatch(address)
    if not match or len(address) > MAX_ADDRESS_CHARS or not 0 < int(match[2]) < 1 << 16:
        return None
    return match[1].strip("[]"), int(match[2])


# A member that begins with # says when the set was made, so that a flush is seen even when the first replicas are back
# before anybody looks.
_ENTER = """
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('ZADD', KEYS[1], '+inf', '#' .. now) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
return redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
"""
_LEAVE = "return redis.call('ZREM', KEYS[1], ARGV[1])"
_LIST = "return redis.call('ZREVRANGEBYSCORE', KEYS[1], '+inf', now, 'LIMIT', 0, ARGV[1])"


def registry_key(role: str, pool: str) -> str:
    """The sorted set of a pool's replicas; `pool` is a drafter's name, empty for other roles."""
    return f"coppice:directory:{role}:{pool}"


class Registry:
    """One pool's replicas in Redis, for one caller at a time: it keeps one of them registered, or lists all."""

    def __init__(self, url: str, role: str, pool: str) -> None:
        from coppice.rpc.redis_connection import Connection

        self.name = "redis"
        self.key = registry_key(role, pool)
        self._connection = Connection(url)
        self.lease_s = LEASE_S
        self._made_at = ""

    async def keep(self, address: str, leaving: asyncio.Event) -> None:
        """Register HOST:PORT by a lease that is renewed, until `leaving`; then leave. Redis may come and go."""
        registered, troubled = False, False
        while not leaving.is_set():
            try:
                await self._connection.run(_ENTER, self.key, address, round(1000 * self.lease_s))
                if not registered:
                    log.info("registered", at=self.key, address=address)
                registered, troubled = True, False
            except Unavailable as error:
                if not troubled:
                    log.warning("not registered", at=self.key, why=str(error))
                registered, troubled = False, True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.lease_s / 3):
                    await leaving.wait()
        if registered:
            with contextlib.suppress(Unavailable):
                await self._connection.run(_LEAVE, self.key, address)
        await self.close()

    async def look(self) -> frozenset[str]:
        """The addresses whose lease runs. Raises Unavailable for none, too, and after a flush."""
        members = await self._connection.run(_LIST, self.key, MAX_REPLICAS)
        names = [member.decode(errors="replace") for member in members]
        addresses = frozenset(name for name in names if _split(name))
        made_at = next((name for name in names if name.startswith("#")), "")
        before, self._made_at = self._made_at, made_at or self._made_at
        if not addresses:
            raise Unavailable("is empty")
        if before not in ("", made_at):
            raise Unavailable("was emptied")
        return addresses

    async def close(self) -> None:
        """End the connection."""
        await self._connection.close()


class _Dns:
    """The A records of a name, or where it has none its AAAA records: a replica with both is one replica."""

    def __init__(self, host: str, port: int) -> None:
        self.name = f"dns:{host}:{port}"
        self._host, self._port = host, port

    async def look(self) -> frozenset[str]:
        loop = asyncio.get_running_loop()
        try:
            records = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise Unavailable(str(error)) from None
        v4 = frozenset(f"{at[0]}:{self._port}" for family, *_, at in records if family == socket.AF_INET)
        v6 = frozenset(f"[{at[0]}]:{self._port}" for family, *_, at in records if family == socket.AF_INET6)
        if not v4 and not v6:
            raise Unavailable("is empty")
        return v4 or v6

    async def close(self) -> None:
        """As of a Registry."""


class Directory:
    """Follows the places where the replicas of one pool are listed."""

    def __init__(self, fixed: Sequence[str], sources: Sequence[Registry | _Dns]) -> None:
        self._fixed, self._sources = frozenset(fixed), sources
        self._found: dict[str, frozenset[str]] = {}

    @property
    def addresses(self) -> tuple[str, ...]:
        """What is known now, sorted: before `run` those of the static list."""
        return tuple(sorted(self._fixed.union(*self._found.values())))

    @property
    def news_s(self) -> float:
        """How long it may take until a new replica is known, seconds; 0: the list is static."""
        return 2 * POLL_S if self._sources else 0.0

    async def run(self, changed: Changed) -> None:
        """Call `changed` with the addresses as soon as there are any, and whenever they change, until cancelled."""
        latest: tuple[str, ...] = ()

        def notify() -> None:
            nonlocal latest
            if self.addresses != latest:
                latest = self.addresses
                changed(latest)

        notify()
        if not self._sources:
            await asyncio.Event().wait()
        async with asyncio.TaskGroup() as group:
            for source in self._sources:
                group.create_task(self._follow(source, notify))

    async def _follow(self, source: Registry | _Dns, notify: Callable[[], None]) -> None:
        """Poll. For one lease after a failure no address is removed: replicas need that long to register again."""
        clock = asyncio.get_running_loop().time
        last: frozenset[str] = frozenset()
        troubled, hold_until = False, 0.0
        try:
            while True:
                try:
                    addresses = await source.look()
                except Unavailable as error:
                    if not troubled:
                        log.warning("a directory is lost; what it named last holds", at=source.name, why=str(error))
                    troubled = True
                else:
                    if troubled:
                        log.info("a directory is back", at=source.name, replicas=len(addresses))
                        troubled, hold_until = False, clock() + LEASE_S if last else 0.0
                    last = addresses | last if clock() < hold_until else addresses
                    self._found[source.name] = last
                    notify()
                await asyncio.sleep(POLL_S)
        finally:
            await source.close()


def directory(places: Sequence[str], role: str, pool: str, redis: str, field: str) -> Directory:
    """The directory that `places` make together: HOST:PORT, dns:HOST:PORT and redis in any mixture.

    `role` is verifier or drafter, `pool` a drafter's name and empty for verifiers; `redis` the URL of the registry,
    which has one target. Raises InvalidField naming the setting `field`.
    """
    if not places:
        raise InvalidField(field, "names none")
    fixed: list[str] = []
    sources: dict[str, Registry | _Dns] = {}
    for place in places:
        if place == "redis":
            if not redis:
                raise InvalidField(field, "redis is the registry of directory.redis, which is not set")
            sources.setdefault(place, Registry(redis, role, pool))
        elif place.startswith("dns:") and (name := _split(place.removeprefix("dns:"))):
            sources.setdefault(place, _Dns(*name))
        elif _split(place):
            fixed.append(place)
        else:
            raise InvalidField(field, f"{place!r} is not HOST:PORT, dns:HOST:PORT or redis")
    return Directory(fixed, list(sources.values()))


def drafter_pools(pairs: Sequence[str], redis: str, field: str) -> dict[str, Directory]:
    """Directories by pool, in the order of the NAME=PLACE `pairs`. Raises InvalidField naming the setting `field`."""
    places: dict[str, list[str]] = {}
    for pair in pairs:
        name, _, place = pair.partition("=")
        places.setdefault(name, []).append(place)
    return {name: directory(each, "drafter", name, redis, field) for name, each in places.items()}


def own_registries(settings: Settings, role: str, *pools: str) -> list[Registry]:
    """Where a service keeps itself registered, none without a registry: `pools` are a drafter's names.

    Raises InvalidField for a host that others cannot reach.
    """
    if not settings.directory.redis:
        return []
    host = settings.server.advertise or settings.server.host
    if host in _ANY_HOST or not _split(f"{host}:1"):
        raise InvalidField("server.advertise", f"a registry needs the host others reach this one by, not {host!r}")
    return [Registry(settings.directory.redis, role, pool) for pool in pools or ("",)]
