"""A registry of replicas in Redis: a sorted set for each pool, of addresses by the end of their lease."""

from __future__ import annotations

from coppice.config.sections import DirectorySettings
from coppice.store.connection import Connection

MAX_REPLICAS = 1024
"""of a pool that are read"""

# A member that begins with # says when the set was made, so that a flush is seen even when the first replicas are back
# before anybody looks.
_ENTER = """
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('ZADD', KEYS[1], '+inf', '#' .. now) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
return redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
"""
_LEAVE = "return redis.call('ZREM', KEYS[1], ARGV[1])"
_LIST = "return redis.call('ZREVRANGEBYSCORE', KEYS[1], '+inf', now, 'LIMIT', 0, ARGV[1])"


def registry_key(prefix: str, role: str, pool: str) -> str:
    """The sorted set of a pool's replicas; `pool` is a drafter's name, empty for other roles."""
    return f"{prefix}:directory:{role}:{pool}"


class Registry:
    """One pool's part of the registry, for one caller at a time. Its methods raise Unavailable."""

    def __init__(self, settings: DirectorySettings, role: str, pool: str) -> None:
        self.key = registry_key(settings.prefix, role, pool)
        self._connection = Connection(settings)

    async def enter(self, address: str, lease_s: float) -> None:
        """Add an address, or renew its lease; drop those whose lease is over."""
        await self._connection.run(_ENTER, self.key, address, round(1000 * lease_s))

    async def leave(self, address: str) -> None:
        """Remove an address."""
        await self._connection.run(_LEAVE, self.key, address)

    async def members(self) -> tuple[list[str], str]:
        """Read the addresses whose lease runs, and the mark of when the set was made; "" without a set."""
        members = [
            member.decode(errors="replace") for member in await self._connection.run(_LIST, self.key, MAX_REPLICAS)
        ]
        marks = [member for member in members if member.startswith("#")]
        return [member for member in members if member not in marks], marks[0] if marks else ""

    async def close(self) -> None:
        """End the connection."""
        await self._connection.close()
