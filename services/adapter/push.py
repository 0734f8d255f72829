"""Weights on their way to the drafters of one head: which each replica is to use, and the pushes until it does."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence

import grpc
import structlog

from coppice import failpoints
from coppice.errors import CoppiceError, InvalidField, from_rpc_error
from coppice.limits import MAX_VERSION_STEP
from coppice.rpc.channels import Dialer
from coppice.rpc.directory import Directory
from coppice.telemetry import AdapterMetrics
from coppice.v1 import drafter_pb2
from coppice.v1.drafter_pb2_grpc import DrafterServiceStub
from coppice.weights.versions import Weights, pack_update
from coppice.wire.adapter import ReplicaStatus
from coppice.wire.drafter import (
    HeadDescription,
    WeightsHeader,
    WeightsPart,
    WeightsSynced,
    read_head,
    read_synced,
    weights_to_wire,
)

DESCRIBE_S = 5.0


class DrafterLink:
    """One drafter that weights are pushed to; an async context manager that closes its channel."""

    def __init__(self, address: str, dialer: Dialer) -> None:
        """Connects with the first call."""
        self.address = address
        self._channel = dialer.open(address)
        self._stub = DrafterServiceStub(self._channel)

    async def describe(self, deadline_s: float = DESCRIBE_S) -> HeadDescription:
        """Ask what it serves, the version and hash in use among others. Raises CoppiceError."""
        try:
            return read_head(await self._stub.DescribeHead(drafter_pb2.DescribeHeadRequest(), timeout=deadline_s))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def push(self, header: WeightsHeader, parts: Sequence[WeightsPart], deadline_s: float = 60) -> WeightsSynced:
        """Send an update; returns when the next draft reads it.

        What was pushed may be in use also when this raises DeadlineExceeded or Unavailable: the same push again is
        acknowledged then. Raises the CoppiceError it was refused with, InvalidField on an answer about other weights.
        """
        try:
            synced = read_synced(await self._stub.SyncWeights(_messages(header, parts), timeout=deadline_s))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        if (synced.version, synced.weights_hash) != (header.version, header.weights_hash):
            raise InvalidField("weights_hash", f"{self.address} answers with version {synced.version} of other weights")
        return synced

    async def close(self) -> None:
        """End the channel."""
        await self._channel.close()

    async def __aenter__(self) -> DrafterLink:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _messages(
    header: WeightsHeader, parts: Sequence[WeightsPart]
) -> AsyncIterator[drafter_pb2.SyncWeightsRequest]:
    yield weights_to_wire(header)
    for part in parts:
        yield weights_to_wire(part)


log = structlog.get_logger()

MOST_AHEAD = 3
"""Looks in a row at which a replica may be ahead of the weights that it is to use"""
_LEFT_ALONE_S = 60.0  # a replica that is ahead more often
_RECENT = 4  # versions an update may start from, besides the checkpoint


class _Drafter:
    """One drafter, as it answered last."""

    def __init__(self, address: str, dialer: Dialer) -> None:
        self.link, self.address = DrafterLink(address, dialer), address
        self.description: HeadDescription | None = None  # None: it did not answer last
        self.trouble = ""
        self.times_ahead = 0  # since it was current
        self.left_alone_until = 0.0


class Replicas:
    """Pushes what a replica lacks: the tensors that differ from what it uses, or from the checkpoint."""

    def __init__(
        self,
        head: str,
        where: Directory,
        checkpoint: Weights,
        dialer: Dialer,
        metrics: AdapterMetrics,
        may_push: Callable[[], bool],
    ) -> None:
        """`checkpoint`: version 0. `may_push` is asked before every push."""
        self._head, self._where, self._metrics = head, where, metrics
        self._dialer = dataclasses.replace(dialer, head=head)
        self.checkpoint = self._live = checkpoint
        self._may_push = may_push
        self._replicas: list[_Drafter] = []
        self._gone: list[_Drafter] = []  # whose channels a call may use yet
        self._update(where.addresses)
        self._recent: OrderedDict[bytes, Weights] = OrderedDict()
        self._busy = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._replicas)

    async def follow(self) -> None:
        """Add replicas that the directory names anew and forget those it names no more, until cancelled."""
        await self._where.run(self._update)

    def _update(self, addresses: Sequence[str]) -> None:
        known = {replica.address: replica for replica in self._replicas}
        for address in known.keys() - set(addresses):
            log.info("a replica is gone", head=self._head, replica=address)
            self._gone.append(known[address])
        self._replicas = [known.get(address) or _Drafter(address, self._dialer) for address in sorted(addresses)]

    async def _forget(self) -> None:
        """Close the channels of replicas that are gone, while no call runs."""
        while self._gone:
            replica = self._gone.pop()
            await replica.link.close()
            if all(replica.address != other.address for other in self._replicas):
                with contextlib.suppress(KeyError):  # it never answered
                    self._metrics.live.remove(self._head, replica.address)

    async def look(self) -> None:
        """Ask every replica what it uses."""
        async with self._busy:
            await asyncio.gather(*map(self._describe, self._replicas))

    def use(self, weights: Weights) -> None:
        """Set what replicas are to use."""
        self._recent[weights.hash] = self._live = weights
        self._recent.move_to_end(weights.hash)
        while len(self._recent) > _RECENT:
            self._recent.popitem(last=False)

    async def bring(self) -> None:
        """Push the live weights to every replica that does not use them."""
        async with self._busy:
            await self._forget()
            await asyncio.gather(*map(self._bring, self._replicas))
        self._metrics.stale.labels(self._head).set(sum(not self._is_current(replica) for replica in self._replicas))

    @property
    def newest(self) -> int:
        """The highest version that a replica uses; 0: none answers."""
        return max(
            (replica.description.weights_version for replica in self._replicas if replica.description), default=0
        )

    @property
    def ahead(self) -> bool:
        """Whether a replica uses other weights than the live ones under their number or a higher one.

        Number 0 is the checkpoint that it was deployed with: a replica with another checkpoint is not ahead.
        """
        return any(map(self._is_ahead, self._replicas))

    def numbers_in_use(self) -> list[int]:
        """Return the numbers that replicas have for the live weights."""
        current = filter(self._is_current, self._replicas)
        return [replica.description.weights_version for replica in current if replica.description]

    def _is_current(self, replica: _Drafter) -> bool:
        return replica.description is not None and replica.description.weights_hash == self._live.hash

    def _is_ahead(self, replica: _Drafter) -> bool:
        used = replica.description
        return used is not None and not self._is_current(replica) and used.weights_version >= max(1, self._live.version)

    def status(self) -> list[ReplicaStatus]:
        """Report each replica as it answered last."""
        return [
            ReplicaStatus(
                replica.address,
                replica.description is not None,
                replica.description.weights_version if replica.description else 0,
                self._is_current(replica),
            )
            for replica in self._replicas
        ]

    async def close(self) -> None:
        """End the channels."""
        await asyncio.gather(*(replica.link.close() for replica in (*self._replicas, *self._gone)))

    async def _describe(self, replica: _Drafter) -> None:
        """Ask a replica what it uses. One that says what cannot be, or is ahead again and again, counts as silent."""
        if time.monotonic() < replica.left_alone_until:
            return
        try:
            replica.description = await replica.link.describe()
        except CoppiceError as error:
            replica.description = None
            self._note(replica, f"does not answer: {error}")
            return
        version = replica.description.weights_version
        if version > self._live.version + MAX_VERSION_STEP:
            replica.description = None
            self._note(replica, f"says that it uses version {version}, which nobody can have made")
            return
        replica.times_ahead = 0 if self._is_current(replica) else replica.times_ahead + self._is_ahead(replica)
        if replica.times_ahead > MOST_AHEAD:
            replica.times_ahead = MOST_AHEAD - 1
            replica.left_alone_until = time.monotonic() + _LEFT_ALONE_S
            replica.description = None
            self._note(replica, f"is ahead of what it is to use again and again: left alone for {_LEFT_ALONE_S:g} s")
            return
        self._metrics.live.labels(self._head, replica.address).set(version)

    async def _bring(self, replica: _Drafter) -> None:
        """Push what this replica lacks beside what it uses now. What fails is tried again with the next look."""
        await self._describe(replica)
        used, live = replica.description, self._live
        if used is None:
            return
        if self._is_current(replica):
            replica.trouble = ""
            return
        parent = self._recent.get(used.weights_hash, self.checkpoint)
        if parent.version != used.weights_version or not parent.tensors.keys() <= live.tensors.keys():
            parent = self.checkpoint  # an update takes no tensors away
        header, parts = await asyncio.to_thread(pack_update, self._head, parent, live)
        if not self._may_push():
            return
        try:
            failpoints.hit("adapter.push")
            synced = await replica.link.push(header, parts)
            failpoints.hit("adapter.acknowledge")
        except CoppiceError as error:
            self._note(replica, f"refused version {live.version}: {error}")
            return
        replica.trouble = ""
        log.info("pushed", replica=replica.address, version=synced.version, bytes=header.size)
        await self._describe(replica)

    def _note(self, replica: _Drafter, trouble: str) -> None:
        """Log a trouble once, not with every look."""
        if trouble != replica.trouble:
            log.warning("a replica is in trouble", replica=replica.address, why=trouble)
        replica.trouble = trouble
