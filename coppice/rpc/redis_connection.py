"""Connections to a Redis that may come and go. Scripts in it are atomic and go by its own clock."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from coppice.errors import Unavailable

TIMEOUT_S = 1.0  # for Redis to answer


_NOW = "local t = redis.call('TIME') local now = t[1] * 1000 + math.floor(t[2] / 1000)\n"


class Connection:
    """A client for one caller at a time. It is made with the first exchange and given up after any trouble.

    redis-py sends nothing again, as it may have arrived, and bounds no call: it would with asyncio.wait_for, which on
    Python 3.11 loses a cancellation that comes when what it waits for is just done.
    """

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s`: how long Redis may take to answer."""
        self._url, self._timeout_s = url, timeout_s
        self._client: Redis | None = None

    @contextlib.asynccontextmanager
    async def exchange(self, more_s: float = 0.0) -> AsyncIterator[Redis]:
        """Lend the client for one exchange of at most `timeout_s` + `more_s` seconds. One that was cut short, by a
        cancellation too, is never used again: its answer would be the next caller's.

        Raises Unavailable when Redis does not answer in time or refuses: what was sent may have arrived, or not.
        """
        if self._client is None:
            tls: dict[str, Any] = {"ssl_check_hostname": True} if self._url.startswith("rediss://") else {}
            never = Retry(NoBackoff(), 0)
            self._client = Redis.from_url(
                self._url, socket_timeout=None, socket_connect_timeout=self._timeout_s, retry=never, **tls
            )
        try:
            async with asyncio.timeout(self._timeout_s + more_s):
                yield self._client
        except (RedisError, OSError, TimeoutError) as error:
            await self.close()
            raise Unavailable(f"redis: {type(error).__name__}") from None
        except BaseException:
            await self.close()
            raise

    async def run(self, script: str, key: str, *arguments: str | int) -> Any:
        """The answer of a Lua script about one key; `now` in it is milliseconds of Redis. Raises as `exchange` does."""
        async with self.exchange() as client:
            return await client.eval(_NOW + script, 1, key, *map(str, arguments))

    async def close(self) -> None:
        """Close the client's sockets, those in use too."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                await client.connection_pool.disconnect(inuse_connections=True)
