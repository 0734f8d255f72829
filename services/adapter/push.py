"""Weights on their way to the drafters of one head: which each replica is to use, and the pushes until it does."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence

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


class DrafterLink(contextlib.AbstractAsyncContextManager["DrafterLink"]):
    """One drafter that weights are pushed to; an async context manager that closes its channel."""

    def __init__(self, address: str, dialer: Dialer) -> None:
        self.address = address
        self.used: HeadDescription | None = None
        """what it answered last, None: it did not"""
        self.trouble = ""
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
        messages: Sequence[WeightsHeader | WeightsPart] = (header, *parts)
        try:
            synced = read_synced(await self._stub.SyncWeights(map(weights_to_wire, messages), timeout=PUSH_S))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        if (synced.version, synced.weights_hash) != (header.version, header.weights_hash):
            raise InvalidField("weights_hash", f"{self.address} answers with version {synced.version} of other weights")
        return synced

    async def close(self) -> None:
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
        self.checkpoint = self._before = self.live = checkpoint
        self._links: dict[str, DrafterLink] = {}
        self._busy = asyncio.Lock()

    async def follow(self) -> None:
        """Look where the replicas are, until cancelled."""
        await self._where.run(lambda addresses: None)

    def use(self, weights: Weights) -> None:
        self._before, self.live = self.live, weights

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

    def numbers(self) -> set[int]:
        """Return the numbers that the live weights have, here and at replicas."""
        current = filter(self._is_current, self._links.values())
        return {self.live.version, *(link.used.weights_version for link in current if link.used)}

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
        await asyncio.gather(*(link.close() for link in self._links.values()))

    def _is_current(self, link: DrafterLink) -> bool:
        return link.used is not None and link.used.weights_hash == self.live.hash

    async def _describe(self, link: DrafterLink) -> None:
        """Ask a replica what it uses. One with a version far above any that it was given counts as silent."""
        try:
            link.used = await link.describe()
        except CoppiceError as error:
            link.used = None
            self._note(link, f"does not answer: {error}")
            return
        version = link.used.weights_version
        if version > self.live.version + MAX_VERSION_STEP:
            link.used = None
            self._note(link, f"uses version {version}, which is not of this adapter's making")
            return
        self._metrics.live.labels(self._head, link.address).set(version)

    async def _bring(self, link: DrafterLink) -> None:
        """Push what this replica lacks beside what it uses now, under a number above its own: it refuses any other.
        What fails is tried again with the next look.
        """
        await self._describe(link)
        used, live, parent = link.used, self.live, self.checkpoint
        if used is None:
            return
        if self._is_current(link):
            link.trouble = ""
            return
        adds = self._before.tensors.keys() <= live.tensors.keys()  # an update takes no tensors away
        if used.weights_hash == self._before.hash and adds:
            parent = self._before.changed({}, used.weights_version)
        pushed = live.changed({}, max(live.version, used.weights_version + 1))
        header, parts = await asyncio.to_thread(pack_update, self._head, parent, pushed)
        if not self._may_push():
            return
        try:
            failpoints.hit("adapter.push")
            synced = await link.push(header, parts)
            failpoints.hit("adapter.acknowledge")
        except CoppiceError as error:
            self._note(link, f"refused version {pushed.version}: {error}")
            return
        log.info("pushed", replica=link.address, version=synced.version, bytes=header.size)
        await self._describe(link)

    def _note(self, link: DrafterLink, trouble: str) -> None:
        """Log a trouble once, not with every look."""
        if trouble != link.trouble:
            log.warning("a replica is in trouble", replica=link.address, why=trouble)
        link.trouble = trouble
