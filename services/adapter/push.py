"""Weights on their way to the drafters of one head: which each replica is to use, and the pushes until it does."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence

import grpc
import structlog

from coppice import failpoints
from coppice.adaptation.weights import Weights, pack_update
from coppice.errors import CoppiceError, InvalidField, from_rpc_error
from coppice.limits import MAX_VERSION_STEP
from coppice.rpc.channels import Dialer, Stub
from coppice.rpc.directory import Directory
from coppice.v1 import adapter_pb2 as pb
from coppice.v1 import drafter_pb2
from coppice.wire.drafter import (
    HeadDescription,
    WeightsHeader,
    WeightsPart,
    WeightsSynced,
    read_head,
    read_synced,
    weights_to_wire,
)

from .state import AdapterMetrics

log = structlog.get_logger()

DESCRIBE_S, PUSH_S = 5.0, 60.0
MOST_AHEAD = 3
"""Looks in a row at which a replica may be ahead of the weights that it is to use; then it counts as silent"""


class DrafterLink(contextlib.AbstractAsyncContextManager["DrafterLink"]):
    """One drafter that weights are pushed to; an async context manager that closes its channel."""

    def __init__(self, address: str, dialer: Dialer) -> None:
        """Connects with the first call."""
        self.address = address
        self.used: HeadDescription | None = None
        """what it answered last, None: it did not"""
        self.trouble = ""
        self.times_ahead = 0
        """in a row"""
        self._channel = dialer.open(address)
        self._stub = Stub(self._channel, drafter_pb2)

    async def describe(self) -> HeadDescription:
        """Ask what it serves, the version and hash in use among others. Raises CoppiceError."""
        try:
            return read_head(await self._stub.DescribeHead(drafter_pb2.DescribeHeadRequest(), timeout=DESCRIBE_S))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def push(self, header: WeightsHeader, parts: Sequence[WeightsPart]) -> WeightsSynced:
        """Send an update; returns when the next draft reads it.

        What was pushed may be in use also when this raises DeadlineExceeded or Unavailable: the same push again is
        acknowledged then. Raises the CoppiceError it was refused with, InvalidField on an answer about other weights.
        """

        async def messages() -> AsyncIterator[drafter_pb2.SyncWeightsRequest]:
            yield weights_to_wire(header)
            for part in parts:
                yield weights_to_wire(part)

        try:
            synced = read_synced(await self._stub.SyncWeights(messages(), timeout=PUSH_S))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        if (synced.version, synced.weights_hash) != (header.version, header.weights_hash):
            raise InvalidField("weights_hash", f"{self.address} answers with version {synced.version} of other weights")
        return synced

    async def close(self) -> None:
        """End the channel."""
        await self._channel.close()

    async def __aexit__(self, *_: object) -> None:
        await self.close()


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
        self._may_push = may_push
        self.checkpoint = self._before = self._live = checkpoint
        self._links: dict[str, DrafterLink] = {}
        self._busy = asyncio.Lock()

    async def follow(self) -> None:
        """Look where the replicas are, until cancelled."""
        await self._where.run(lambda addresses: None)

    def use(self, weights: Weights) -> None:
        """Set what replicas are to use."""
        self._before, self._live = self._live, weights

    async def bring(self) -> None:
        """Ask every replica that the directory names what it uses, and push the live weights to those of others."""
        async with self._busy:
            addresses = self._where.addresses
            for address in self._links.keys() - set(addresses):
                log.info("a replica is gone", head=self._head, replica=address)
                await self._links.pop(address).close()
                with contextlib.suppress(KeyError):  # it never answered
                    self._metrics.live.remove(self._head, address)
            for address in addresses:
                if address not in self._links:
                    self._links[address] = DrafterLink(address, self._dialer)
            await asyncio.gather(*map(self._bring, self._links.values()))
        self._metrics.stale.labels(self._head).set(sum(not self._is_current(link) for link in self._links.values()))

    @property
    def ahead(self) -> int:
        """The highest version of a replica that uses other weights under the live ones' number or a higher one, or 0.

        Number 0 is the checkpoint that it was deployed with: a replica with another checkpoint is not ahead.
        """
        return max((self._lead(link) for link in self._links.values()), default=0)

    def numbers(self) -> set[int]:
        """Return the numbers that the live weights have, here and at replicas."""
        current = filter(self._is_current, self._links.values())
        return {self._live.version, *(link.used.weights_version for link in current if link.used)}

    def status(self) -> list[pb.ReplicaStatus]:
        """Report each replica as it answered last."""
        return [
            pb.ReplicaStatus(
                address=address,
                reachable=link.used is not None,
                version=link.used.weights_version if link.used else 0,
                current=self._is_current(link),
            )
            for address, link in sorted(self._links.items())
        ]

    async def close(self) -> None:
        """End the channels."""
        await asyncio.gather(*(link.close() for link in self._links.values()))

    def _is_current(self, link: DrafterLink) -> bool:
        return link.used is not None and link.used.weights_hash == self._live.hash

    def _lead(self, link: DrafterLink) -> int:
        """Return the version of a replica that is ahead, else 0."""
        ahead = link.used and not self._is_current(link) and link.used.weights_version >= max(1, self._live.version)
        return link.used.weights_version if link.used and ahead else 0

    async def _describe(self, link: DrafterLink) -> None:
        """Ask a replica what it uses. One that says what cannot be, or is ahead again and again, counts as silent."""
        try:
            used = link.used = await link.describe()
        except CoppiceError as error:
            link.used = None
            self._note(link, f"does not answer: {error}")
            return
        ahead = self._lead(link) > 0
        link.times_ahead = 0 if self._is_current(link) else link.times_ahead + ahead
        impossible = used.weights_version > self._live.version + MAX_VERSION_STEP
        if impossible or (ahead and link.times_ahead > MOST_AHEAD):
            link.used = None
            self._note(link, f"uses version {used.weights_version}, which is not of this adapter's making")
            return
        self._metrics.live.labels(self._head, link.address).set(used.weights_version)

    async def _bring(self, link: DrafterLink) -> None:
        """Push what this replica lacks beside what it uses now. What fails is tried again with the next look."""
        await self._describe(link)
        used, live, before = link.used, self._live, self._before
        if used is None or self._lead(link):  # it refuses a number that is not above its own
            return
        if self._is_current(link):
            link.trouble = ""
            return
        knows = (used.weights_version, used.weights_hash) == (before.version, before.hash)
        adds = before.tensors.keys() <= live.tensors.keys()  # an update takes no tensors away
        header, parts = await asyncio.to_thread(
            pack_update, self._head, before if knows and adds else self.checkpoint, live
        )
        if not self._may_push():
            return
        try:
            failpoints.hit("adapter.push")
            synced = await link.push(header, parts)
            failpoints.hit("adapter.acknowledge")
        except CoppiceError as error:
            self._note(link, f"refused version {live.version}: {error}")
            return
        log.info("pushed", replica=link.address, version=synced.version, bytes=header.size)
        await self._describe(link)

    def _note(self, link: DrafterLink, trouble: str) -> None:
        """Log a trouble once, not with every look."""
        if trouble != link.trouble:
            log.warning("a replica is in trouble", replica=link.address, why=trouble)
        link.trouble = trouble
