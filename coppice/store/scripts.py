"""Scripts in a Redis that may come and go: each is atomic and goes by the clock of Redis, so no machine's matters."""

from __future__ import annotations

from typing import Any

from coppice.config.sections import RedisSettings
from coppice.store.connection import Connection

_NOW = "local t = redis.call('TIME') local now = t[1] * 1000 + math.floor(t[2] / 1000)\n"


class Store:
    """Runs scripts for one caller at a time. Needs Redis 5, for scripts that write what depends on the time."""

    def __init__(self, settings: RedisSettings) -> None:
        """Connects with the first call."""
        self._connection = Connection(settings)

    async def run(self, script: str, key: str, *arguments: str | int) -> Any:
        """Return the answer of a Lua script about one key; `now` in it is milliseconds by the clock of Redis.

        Raises Unavailable after `timeout_s`, or when Redis does not answer or refuses: it may have run, or not.
        """
        async with self._connection.exchange() as client:
            return await client.eval(_NOW + script, 1, key, *map(str, arguments))

    async def close(self) -> None:
        """End the connection."""
        await self._connection.close()
