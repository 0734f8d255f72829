"""The processes that serve one thing: which there are, which of them answer, and which is loaded least."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Generic, TypeVar

import grpc
import structlog

from coppice.backoff import Backoff
from coppice.errors import CoppiceError, Unavailable, from_rpc_error
from coppice.rpc.channels import Dialer

log = structlog.get_logger()

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 10.0
_SILENCES_TO_LOSE = 2
PROBE_S = 1.0
"""time between two looks at a replica, and how long it may take to answer one"""


class Replica:
    """One process: its channel, its sessions of this orchestrator, and a breaker."""

    def __init__(self, address: str, dialer: Dialer) -> None:
        self.address = address
        self.sessions = 0
        self.channel = dialer.open(address)
        self.cooling_until = 0.0
        self.silent = False
        """it left the latest looks unanswered"""
        self.unfit = ""
        """why it serves something else than the others, if it does"""
        self._backoff = Backoff(_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S)
        self._silences = 0
        self._gone = False

    @property
    def fit(self) -> bool:
        """Whether a new session may go there."""
        return not (self.silent or self.unfit) and self.cooling_until <= time.monotonic()

    def cool_down(self) -> bool:
        """Ask nothing of it for a while, longer than lately; returns False when it is cooling down already."""
        now = time.monotonic()
        if self.cooling_until > now:
            return False
        if now - self.cooling_until > _LONGEST_BACKOFF_S:
            self._backoff.succeed()
        self.cooling_until = now + self._backoff.fail()
        return True

    def well(self) -> None:
        """Note that it did what was asked of it: the next pause is a short one."""
        self._backoff.succeed()

    def answered(self, error: CoppiceError | None) -> None:
        """Take in how a look at it ended."""
        if error is None:
            self._silences, self.silent = 0, False
            return
        self._silences += 1
        lost = isinstance(error, Unavailable) or self._silences >= _SILENCES_TO_LOSE
        if lost and not self.silent:
            self.silent = True
            log.warning("a replica does not answer", replica=self.address, why=str(error)[:200])
            self.lose()

    def lose(self) -> None:
        """Called when it stopped answering: sessions that wait for it need not any longer."""

    def taken(self) -> None:
        """A session goes there."""
        self.sessions += 1

    def released(self) -> None:
        """A session ended; the last one of a replica that is no more closes its channel."""
        self.sessions -= 1
        self._close_if_idle()

    def leave(self) -> None:
        """It is not in the directory any more; its sessions go on to their end."""
        self._gone = True
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._gone and not self.sessions:
            task = asyncio.get_running_loop().create_task(self.channel.close())
            _closing.add(task)
            task.add_done_callback(_closing.discard)


_closing: set[asyncio.Task[None]] = set()

R = TypeVar("R", bound=Replica)


class Pool(ABC, Generic[R]):
    """Replicas that serve the same. `update` follows a directory, `watch` looks at each replica now and then."""

    def __init__(self, name: str, addresses: Sequence[str], dialer: Dialer) -> None:
        self.name, self._dialer = name, dialer
        self._by_address: dict[str, R] = {}
        self.update(addresses)

    @property
    def replicas(self) -> list[R]:
        """Those of the directory, fit or not."""
        return list(self._by_address.values())

    def update(self, addresses: Sequence[str]) -> None:
        """Take in which replicas there are now."""
        for address in self._by_address.keys() - set(addresses):
            self._by_address.pop(address).leave()
            log.info("a replica left", pool=self.name, replica=address)
        for address in addresses:
            if address not in self._by_address:
                self._by_address[address] = self.make(address)
                log.info("a replica came", pool=self.name, replica=address)

    def pick(self, avoid: Collection[R] = ()) -> R | None:
        """The least loaded fit replica."""
        fit = [replica for replica in self._by_address.values() if replica.fit and replica not in avoid]
        return min(fit, key=lambda replica: replica.sessions, default=None)

    async def look(self, replica: R) -> None:
        """Ask a replica what it serves and note how that ended."""
        try:
            await self.describe(replica)
        except grpc.RpcError as error:
            replica.answered(from_rpc_error(error))
        except CoppiceError as error:
            replica.answered(error)
        else:
            replica.answered(None)

    async def watch(self) -> None:
        """Look at every replica, for ever."""
        while True:
            await asyncio.gather(asyncio.sleep(PROBE_S), *(self.look(replica) for replica in self.replicas))

    @abstractmethod
    def make(self, address: str) -> R:
        """A replica at an address."""

    @abstractmethod
    async def describe(self, replica: R) -> None:
        """Ask it what it serves, for PROBE_S at most, and set `unfit`. Raises grpc.RpcError, CoppiceError."""
