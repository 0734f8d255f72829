"""Which of several adapters is the active one: the one that holds a lease in Redis."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time

import structlog

from coppice.config.adaptation import AdaptationSettings
from coppice.errors import Unavailable
from coppice.store.connection import Connection

log = structlog.get_logger()

_LOOKS = 5  # in the time of a lease, whoever has it

# A hash names the holder, and its time to live says when the lease ends: Redis prolongs that even while it is full. The
# hash outlasts the lease by this long: a holder that was stopped or cut off takes its own lease again, but not when
# somebody else had it meanwhile, for then it does not know what drafters use.
_KEPT_MS = 30 * 24 * 3600 * 1000
_TAKE = """
local holder = redis.call('HGET', KEYS[1], 'token')
local over = not holder or redis.call('PTTL', KEYS[1]) <= tonumber(ARGV[3]) and ARGV[4] == 'any'
if holder ~= ARGV[1] then
  if not over then return 0 end
  redis.call('HSET', KEYS[1], 'token', ARGV[1])
end
redis.call('PEXPIRE', KEYS[1], ARGV[2] + ARGV[3])
return 1
"""
_GIVE_BACK = "if redis.call('HGET', KEYS[1], 'token') == ARGV[1] then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end"


def lease_key(prefix: str) -> str:
    """Name the hash with the active adapter's `token`, which expires a month after its lease."""
    return f"{prefix}:adapter"


class LeaseLost(Exception):
    """Another adapter is the active one."""


class Lease:
    """One process's hold on the lease: `take` or `wait` for it, then `keep` it beside work that asks `held`."""

    def __init__(self, settings: AdaptationSettings, lease_s: float) -> None:
        self._connection, self._key, self._lease_s = Connection(settings), lease_key(settings.prefix), lease_s
        self._token = secrets.token_hex(16)
        self._until = 0.0

    def held(self) -> bool:
        """Tell whether the lease surely runs, by this machine's clock: nobody else can have it."""
        return time.monotonic() < self._until

    async def take(self) -> bool:
        """Take the lease; returns whether nobody else had it and Redis answered."""
        try:
            return await self._take("any")
        except Unavailable:
            return False

    async def wait(self) -> None:
        """Stand by until nobody else has the lease, and take it."""
        while True:
            if await self.take():
                return
            await asyncio.sleep(self._lease_s / _LOOKS)

    async def keep(self) -> None:
        """Renew the lease for ever; while Redis is away it may end, and begin again. Raises LeaseLost."""
        had = True
        while True:
            await asyncio.sleep(self._lease_s / _LOOKS)
            with contextlib.suppress(Unavailable):
                if not await self._take("own"):
                    raise LeaseLost("another adapter is the active one")
            if self.held() != had:
                had = self.held()
                log.warning("the lease goes on" if had else "the lease ended; nothing is pushed until redis is back")

    async def give_back(self) -> None:
        """End the lease, so that another adapter may take it at once."""
        self._until = 0.0
        with contextlib.suppress(Unavailable):
            await self._connection.run(_GIVE_BACK, self._key, self._token, _KEPT_MS)
        await self._connection.close()

    async def _take(self, whose: str) -> bool:
        """Ask for the lease. It counts from the asking, which is before Redis counts from."""
        asked = time.monotonic()
        lease_ms = round(1000 * self._lease_s)
        answer = await self._connection.run(_TAKE, self._key, self._token, lease_ms, _KEPT_MS, whose)
        taken = bool(answer == 1)
        self._until = asked + self._lease_s if taken else 0.0
        return taken
