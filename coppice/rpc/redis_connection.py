"""Connections to a Redis that may come and go.

Scripts in it are atomic and go by its own clock, so no machine's matters.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from coppice.config.sections import RedisSettings
from coppice.errors import Unavailable


def connect(settings: RedisSettings) -> Redis:
    """Make a client that never tries again by itself: what it sends again may have arrived.

    Bound its calls with asyncio.timeout. redis-py bounds them with asyncio.wait_for, which on Python 3.11 loses a
    cancellation that comes when what it waits for is just done.
    """
    encrypted = settings.redis.startswith("rediss://")
    tls: dict[str, Any] = {"ssl_ca_certs": settings.redis_ca or None, "ssl_check_hostname": True} if encrypted else {}
    return Redis.from_url(
        settings.redis,
        socket_timeout=None,
        socket_connect_timeout=settings.timeout_s,
        retry=Retry(NoBackoff(), 0),
        **tls,
    )


_NOW = "local t = redis.call('TIME') local now = t[1] * 1000 + math.floor(t[2] / 1000)\n"


class Connection:
    """A client for one caller at a time. It is made with the first exchange and given up after any trouble."""

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self._client: Redis | None = None

    @contextlib.asynccontextmanager
    async def exchange(self, more_s: float = 0.0) -> AsyncIterator[Redis]:
        """Lend the client for one exchange of at most `timeout_s` + `more_s` seconds.

        Raises Unavailable when Redis does not answer in time or refuses: what was sent may have arrived, or not. A
        client whose exchange was cut short, by a cancellation too, is never used again: its answer would be the next
        caller's.
        """
        if self._client is None:
            self._client = connect(self._settings)
        try:
            async with asyncio.timeout(self._settings.timeout_s + more_s):
                yield self._client
        except (RedisError, OSError, TimeoutError) as error:
            await self.close()
            raise Unavailable(f"redis: {type(error).__name__}") from None
        except BaseException:
            await self.close()
            raise

    async def run(self, script: str, key: str, *arguments: str | int) -> Any:
        """Return the answer of a Lua script about one key; `now` in it is milliseconds by the clock of Redis.

        Needs Redis 5, for scripts that write what depends on the time. Raises Unavailable as `exchange` does.
        """
        async with self.exchange() as client:
            return await client.eval(_NOW + script, 1, key, *map(str, arguments))

    async def close(self) -> None:
        """Close the client's sockets, those in use too."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                await client.connection_pool.disconnect(inuse_connections=True)
