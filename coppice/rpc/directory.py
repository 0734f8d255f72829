"""Where the replicas of a pool are: a static list, DNS, or a registry in Redis that replicas keep themselves in.

An address holds for one lease after it was last listed; while a list is away or empty, what it named last holds. Which
replicas are alive is for health checks to say.
"""

import asyncio
import contextlib
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial

import structlog

from coppice.config.settings import Settings
from coppice.errors import InvalidField, Unavailable
from coppice.limits import MAX_ADDRESS_CHARS

log = structlog.get_logger()

Look = Callable[[], Awaitable[Iterable[str]]]
"""Lists the addresses of a directory; raises Unavailable"""

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
MAX_REPLICAS = 1024  # of a pool that are read
LEASE_S, POLL_S = 3.0, 0.5
"""how long a replica is believed to be where it was listed; time between two looks at a registry or at DNS"""
_ANY_HOST = frozenset({"0.0.0.0", "::", "[::]"})  # noqa: S104


def _split(address: str) -> tuple[str, int] | None:
    """Host, without brackets, and port; None for what is no HOST:PORT."""
    match = _ADDRESS.fullmatch(address)
    if not match or len(address) > MAX_ADDRESS_CHARS or not 0 < int(match[2]) < 1 << 16:
        return None
    return match[1].strip("[]"), int(match[2])


_ENTER = """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
return redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
"""
_LEAVE = "return redis.call('ZREM', KEYS[1], ARGV[1])"
_LIST = "return redis.call('ZREVRANGEBYSCORE', KEYS[1], '+inf', now, 'LIMIT', 0, ARGV[1])"


class Registry:
    """One pool's replicas in Redis, for one caller at a time: it keeps one of them registered, or lists all."""

    def __init__(self, url: str, role: str, pool: str) -> None:
        from coppice.rpc.redis_connection import Connection

        self.key = f"coppice:directory:{role}:{pool}"  # a sorted set; `pool` is empty but for drafters
        self._connection = Connection(url)

    async def keep(self, address: str, leaving: asyncio.Event) -> None:
        """Register HOST:PORT by a lease that is renewed, until `leaving`; then leave. Redis may come and go."""
        before = None
        while not leaving.is_set():
            reason = ""
            try:
                await self._connection.run(_ENTER, self.key, address, round(1000 * LEASE_S))
            except Unavailable as error:
                reason = str(error)
            if bool(reason) != before:
                say, event = (log.warning, "not registered") if reason else (log.info, "registered")
                say(event, at=self.key, address=address, why=reason)
            before = bool(reason)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEASE_S / 3):
                    await leaving.wait()
        with contextlib.suppress(Unavailable):
            await self._connection.run(_LEAVE, self.key, address)
        await self._connection.close()

    async def look(self) -> list[str]:
        """The addresses whose lease runs. Raises Unavailable."""
        members = await self._connection.run(_LIST, self.key, MAX_REPLICAS)
        return [name for member in members if _split(name := member.decode(errors="replace"))]


async def resolve(host: str, port: int) -> list[str]:
    """The A records of a name, or where it has none its AAAA records: a replica with both is one."""
    try:
        records = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Unavailable(str(error)) from None
    v4 = [f"{at[0]}:{port}" for family, *_, at in records if family == socket.AF_INET]
    return v4 or [f"[{at[0]}]:{port}" for family, *_, at in records if family == socket.AF_INET6]


class Directory:
    """Follows the places where the replicas of one pool are listed."""

    def __init__(self, fixed: Sequence[str], lists: Mapping[str, Look]) -> None:
        self._fixed, self._lists = fixed, lists
        self._until: dict[str, dict[str, float]] = {name: {} for name in lists}  # when each address' lease is over

    @property
    def addresses(self) -> tuple[str, ...]:
        """What is known now, sorted: before `run` those of the static list."""
        return tuple(sorted({*self._fixed}.union(*self._until.values())))

    @property
    def news_s(self) -> float:
        """How long it may take until a new replica is known, seconds; 0: the list is static."""
        return 2 * POLL_S if self._lists else 0.0

    async def run(self, changed: Callable[[tuple[str, ...]], None]) -> None:
        """Call `changed` with the sorted addresses, once there are any, and when they change, until cancelled."""
        latest: tuple[str, ...] = ()

        def notify() -> None:
            nonlocal latest
            if self.addresses != latest:
                latest = self.addresses
                changed(latest)

        notify()
        await asyncio.gather(*(self._follow(name, look, notify) for name, look in self._lists.items()))
        await asyncio.Event().wait()

    async def _follow(self, name: str, look: Look, notify: Callable[[], None]) -> None:
        clock, lost = asyncio.get_running_loop().time, False
        while True:
            try:
                listed = [*await look()]
                if not listed:
                    raise Unavailable("is empty")
                if lost:
                    log.info("a directory is back", at=name, replicas=len(listed))
                lost = False
            except Unavailable as error:
                if not lost:
                    log.warning("a directory is lost; what it named last holds", at=name, why=str(error))
                lost, listed = True, [*self._until[name]]
            until = self._until[name] | dict.fromkeys(listed, clock() + LEASE_S)
            self._until[name] = {address: over for address, over in until.items() if over > clock()}
            notify()
            await asyncio.sleep(POLL_S)


def directory(places: Sequence[str], role: str, pool: str, redis: str, field: str) -> Directory:
    """The directory that `places` make together: HOST:PORT, dns:HOST:PORT and redis, the URL of the registry. `pool` is
    a drafter's name, and empty for verifiers. Raises InvalidField naming the setting `field`.
    """
    if not places:
        raise InvalidField(field, "names none")
    fixed: list[str] = []
    lists: dict[str, Look] = {}
    for place in places:
        if place == "redis":
            if not redis:
                raise InvalidField(field, "redis is the registry of directory.redis, which is not set")
            lists.setdefault(place, Registry(redis, role, pool).look)
        elif place.startswith("dns:") and (name := _split(place.removeprefix("dns:"))):
            lists[place] = partial(resolve, *name)
        elif _split(place):
            fixed.append(place)
        else:
            raise InvalidField(field, f"{place!r} is not HOST:PORT, dns:HOST:PORT or redis")
    return Directory(fixed, lists)


def drafter_pools(pairs: Sequence[str], redis: str, field: str) -> dict[str, Directory]:
    """Directories by pool, in the order of the NAME=PLACE `pairs`. Raises InvalidField naming the setting `field`."""
    places: dict[str, list[str]] = {}
    for pair in pairs:
        name, _, place = pair.partition("=")
        places.setdefault(name, []).append(place)
    return {name: directory(each, "drafter", name, redis, field) for name, each in places.items()}


def own_registries(settings: Settings, role: str, *pools: str) -> list[Registry]:
    """Where a service keeps itself registered; `pools` are a drafter's names. Raises InvalidField for the host."""
    if not settings.directory.redis:
        return []
    host = settings.server.advertise or settings.server.host
    if host in _ANY_HOST or not _split(f"{host}:1"):
        raise InvalidField("server.advertise", f"a registry needs the host others reach this one by, not {host!r}")
    return [Registry(settings.directory.redis, role, pool) for pool in pools or ("",)]
