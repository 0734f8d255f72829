"""Pushes of weights as they come over the wire: one at a time, checked whole before the head hears of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import structlog

from coppice.errors import CoppiceError, InvalidField, Overloaded, Unavailable
from coppice.limits import Limits
from coppice.messages.weights import WeightsHeader, WeightsPart, WeightsSynced
from coppice.rpc.sessions import StreamWaits
from coppice.wire.drafter import read_weights

from .worker import Worker

log = structlog.get_logger()

PART_S = 30.0  # longest wait for a part of it: others wait for its end
DROP_S = 5.0  # longest wait for the end of a push that is refused or needless


class WeightSync:
    """Takes pushes for a worker's head."""

    def __init__(self, worker: Worker, limits: Limits, waits: StreamWaits) -> None:
        self._worker, self._limits, self._waits = worker, limits, waits
        self._turn = asyncio.Lock()

    async def take(self, messages: AsyncIterator[Any]) -> WeightsSynced:
        """Read one push to its end and put it to use; a push of what is in use is acknowledged unchecked.

        The answer may be lost when the weights are in use already, so a sender asks again with the same push. Raises
        Overloaded beside another push, and what Staging raises.
        """
        try:
            if self._turn.locked():
                raise Overloaded("another weight sync is running")
            async with self._turn:
                return await self._take(messages)
        except CoppiceError as error:
            log.warning("weights refused", why=str(error))
            await self._drop(messages)
            raise

    async def _take(self, messages: AsyncIterator[Any]) -> WeightsSynced:
        began = time.perf_counter()
        header = await self._next(messages)
        if not isinstance(header, WeightsHeader):
            raise InvalidField("kind", "the first message of a weight sync is header")
        staging = self._worker.staging(header)
        if staging.in_use:
            await self._drop(messages)
            return WeightsSynced(header.version, header.weights_hash)
        while (part := await self._next(messages)) is not None:
            if not isinstance(part, WeightsPart):
                raise InvalidField("kind", "every message but the first is part")
            await asyncio.to_thread(staging.add, part)  # hashing it would hold up the deltas of every session
        swap_ns = await self._worker.replace_weights(staging)
        took = round(time.perf_counter() - began, 3)
        log.info("weights in use", version=header.version, bytes=header.size, took_s=took, swap_us=swap_ns // 1000)
        return WeightsSynced(header.version, header.weights_hash, swap_ns)

    async def _drop(self, messages: AsyncIterator[Any]) -> None:
        """Read what still comes. A sender whose write fails reports that, and not the status that we end with."""
        with contextlib.suppress(TimeoutError, CoppiceError):
            async with asyncio.timeout(DROP_S):
                while await self._waits.next(messages) is not None:
                    pass

    async def _next(self, messages: AsyncIterator[Any]) -> WeightsHeader | WeightsPart | None:
        """The next message; None at the end. Raises Unavailable when none comes for a while."""
        try:
            async with asyncio.timeout(PART_S):
                message = await self._waits.next(messages)
        except TimeoutError:
            raise Unavailable(f"no part for {PART_S:g} s") from None
        return None if message is None else read_weights(message, self._limits.weights_bytes)
