"""Connections to Redis."""

from __future__ import annotations

import contextlib
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from coppice.config.sections import RedisSettings


def connect(settings: RedisSettings) -> Redis:
    """A client that never tries again by itself: what it sends again may have arrived.

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


async def disconnect(client: Redis) -> None:
    """End its connections, those in use too."""
    with contextlib.suppress(RedisError, OSError, TimeoutError):
        await client.connection_pool.disconnect(inuse_connections=True)
