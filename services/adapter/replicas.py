"""The drafters of one pool: which weights each is to use, and the pushes until it does."""

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
_KNOWN = 4  # versions an update may start from, besides the checkpoint


class _Drafter:
    """One drafter, as it answered last."""

    def __init__(self, address: str, dialer: Dialer, wanted: Weights) -> None:
        self.link = DrafterLink(address, dialer)
        self.address, self.wanted = address, wanted
        self.description: HeadDescription | None = None  # None: it did not answer last
        self.trouble = ""
        self.times_ahead = 0  # since it was current
        self.left_alone_until = 0.0

    @property
    def ahead(self) -> bool:
        """Whether it uses other weights than it is to use under their number or a higher one.

        Number 0 is the checkpoint that it was deployed with: a replica with another checkpoint is not ahead.
        """
        used = self.description
        return used is not None and not self.current and used.weights_version >= max(1, self.wanted.version)

    @property
    def current(self) -> bool:
        return self.description is not None and self.description.weights_hash == self.wanted.hash


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
        self._checkpoint = self._wanted = checkpoint
        self._may_push = may_push
        self._replicas: list[_Drafter] = []
        self._gone: list[_Drafter] = []  # whose channels a call may use yet
        self._update(where.addresses)
        self._known: OrderedDict[bytes, Weights] = OrderedDict()
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
        self._replicas = [
            known.get(address) or _Drafter(address, self._dialer, self._wanted) for address in sorted(addresses)
        ]

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

    def want(self, weights: Weights, first_only: bool = False) -> None:
        """Set what replicas are to use; `first_only`: the first one that answered last, which is the canary."""
        self._known[weights.hash] = weights
        self._known.move_to_end(weights.hash)
        while len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        if not first_only:
            self._wanted = weights
        chosen = [replica for replica in self._replicas if replica.description] if first_only else self._replicas
        for replica in chosen[:1] if first_only else chosen:
            replica.wanted = weights

    async def bring(self) -> None:
        """Push to every replica the weights that it is to use and does not."""
        async with self._busy:
            await self._forget()
            await asyncio.gather(*map(self._bring, self._replicas))
        self._metrics.stale.labels(self._head).set(sum(not replica.current for replica in self._replicas))

    @property
    def newest(self) -> int:
        """The highest version that a replica uses; 0: none answers."""
        return max(
            (replica.description.weights_version for replica in self._replicas if replica.description), default=0
        )

    def ahead(self, weights: Weights) -> bool:
        """Tell whether a replica that is to use these weights is ahead of them."""
        return any(one.ahead for one in self._replicas if one.wanted is weights)

    def renumber(self, before: Weights, after: Weights) -> None:
        """Take the same weights under another number."""
        self._known[after.hash] = after
        if self._wanted is before:
            self._wanted = after
        for replica in self._replicas:
            if replica.wanted is before:
                replica.wanted = after

    def in_use(self) -> list[tuple[Weights, int]]:
        """Return the weights that replicas use and are to use, with the number that each replica has for them."""
        return [
            (one.wanted, one.description.weights_version) for one in self._replicas if one.current and one.description
        ]

    def status(self) -> list[ReplicaStatus]:
        """Report each replica as it answered last."""
        return [
            ReplicaStatus(
                one.address,
                one.description is not None,
                one.description.weights_version if one.description else 0,
                one.current,
            )
            for one in self._replicas
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
        if version > replica.wanted.version + MAX_VERSION_STEP:
            replica.description = None
            self._note(replica, f"says that it uses version {version}, which nobody can have made")
            return
        replica.times_ahead = 0 if replica.current else replica.times_ahead + replica.ahead
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
        used, wanted = replica.description, replica.wanted
        if used is None:
            return
        if replica.current:
            replica.trouble = ""
            return
        known = self._known.get(used.weights_hash)
        parent = known if known is not None and known.version == used.weights_version else self._checkpoint
        if not parent.tensors.keys() <= wanted.tensors.keys():  # an update takes no tensors away
            parent = self._checkpoint
        header, parts = await asyncio.to_thread(pack_update, self._head, parent, wanted)
        if not self._may_push():
            return
        try:
            failpoints.hit("adapter.push")
            synced = await replica.link.push(header, parts)
            failpoints.hit("adapter.acknowledge")
        except CoppiceError as error:
            self._note(replica, f"refused version {wanted.version}: {error}")
            return
        replica.trouble = ""
        log.info("pushed", replica=replica.address, version=synced.version, bytes=header.size)
        await self._describe(replica)

    def _note(self, replica: _Drafter, trouble: str) -> None:
        """Log a trouble once, not with every look."""
        if trouble != replica.trouble:
            log.warning("a replica is in trouble", replica=replica.address, why=trouble)
        replica.trouble = trouble
