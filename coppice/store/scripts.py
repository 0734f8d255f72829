"""Scripts in a Redis that may come and go: each is atomic and goes by the clock of Redis, so no machine's matters."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from coppice.config.sections import RedisSettings
from coppice.errors import Unavailable
from coppice.store.connection import connect, disconnect

_NOW = "local t = redis.call('TIME') local now = t[1] * 1000 + math.floor(t[2] / 1000)\n"


class Store:
    """For one caller at a time. Needs Redis 5, for scripts that write what depends on the time."""

    def __init__(self, settings: RedisSettings) -> None:
        """Connects with the first call."""
        self._settings = settings
        self._client: Redis | None = None

    async def run(self, script: str, key: str, *arguments: str | int) -> Any:
        """What a Lua script about one key answers; `now` in it is milliseconds by the clock of Redis.

        Raises Unavailable after `timeout_s`, or when Redis does not answer or refuses: it may have run, or not.
        """
        if self._client is None:
            self._client = connect(self._settings)
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                return await self._client.eval(_NOW + script, 1, key, *map(str, arguments))
        except (RedisError, OSError, TimeoutError) as error:
            await self.close()
            raise Unavailable(f"redis: {type(error).__name__}") from None
        except BaseException:
            await self.close()  # a call that was cancelled must not leave its answer to the next one
            raise

    async def close(self) -> None:
        """End the connection."""
        client, self._client = self._client, None
        if client is not None:
            await disconnect(client)
