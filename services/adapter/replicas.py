"""The drafters of one pool: which weights each is to use, and what is done until it does."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

import structlog

from coppice import failpoints
from coppice.adaptation.push import Replica
from coppice.adaptation.status import ReplicaStatus
from coppice.adaptation.weights import Weights, pack_update
from coppice.errors import CoppiceError
from coppice.messages import HeadDescription
from coppice.rpc.channels import Dialer
from coppice.telemetry import AdapterMetrics

log = structlog.get_logger()

_KNOWN = 4  # versions an update may start from, besides the checkpoint


class _Replica:
    def __init__(self, address: str, dialer: Dialer, wanted: Weights) -> None:
        self.link = Replica(address, dialer)
        self.address, self.wanted = address, wanted
        self.told: HeadDescription | None = None  # None: it did not answer last
        self.trouble = ""

    @property
    def current(self) -> bool:
        return self.told is not None and self.told.weights_hash == self.wanted.hash


class Replicas:
    """Pushes what a replica lacks: the tensors that differ from what it uses, or from the checkpoint."""

    def __init__(
        self, head: str, addresses: Sequence[str], checkpoint: Weights, dialer: Dialer, metrics: AdapterMetrics
    ) -> None:
        """`checkpoint`: version 0."""
        self._head, self._checkpoint, self._metrics = head, checkpoint, metrics
        self._replicas = [_Replica(address, dialer, checkpoint) for address in addresses]
        self._known: OrderedDict[bytes, Weights] = OrderedDict()
        self._busy = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._replicas)

    async def look(self) -> int:
        """Ask every replica what it uses; returns the highest version that was seen, 0 when none answers."""
        async with self._busy:
            await asyncio.gather(*map(self._describe, self._replicas))
        return max((replica.told.weights_version for replica in self._replicas if replica.told), default=0)

    def want(self, weights: Weights, first_only: bool = False) -> None:
        """What replicas are to use; `first_only`: the first one that answered last, which is the canary."""
        self._known[weights.hash] = weights
        self._known.move_to_end(weights.hash)
        while len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        chosen = [replica for replica in self._replicas if replica.told] if first_only else self._replicas
        for replica in chosen[:1] if first_only else chosen:
            replica.wanted = weights

    async def bring(self) -> None:
        """Give every replica what it is to use and does not."""
        async with self._busy:
            await asyncio.gather(*map(self._bring, self._replicas))
        self._metrics.stale.labels(self._head).set(sum(not replica.current for replica in self._replicas))

    @property
    def ahead(self) -> int:
        """Highest version among replicas that use other weights than they are to; 0: none does."""
        told = [replica.told for replica in self._replicas if replica.told and not replica.current]
        return max((one.weights_version for one in told), default=0)

    def numbers(self) -> set[int]:
        """Version numbers under which replicas use the weights they are to use."""
        return {replica.told.weights_version for replica in self._replicas if replica.told and replica.current}

    def status(self) -> list[ReplicaStatus]:
        """Each replica as it answered last."""
        return [
            ReplicaStatus(one.address, one.told is not None, one.told.weights_version if one.told else 0, one.current)
            for one in self._replicas
        ]

    async def close(self) -> None:
        """End the channels."""
        await asyncio.gather(*(replica.link.close() for replica in self._replicas))

    async def _describe(self, replica: _Replica) -> None:
        try:
            replica.told = await replica.link.describe()
        except CoppiceError as error:
            replica.told = None
            self._note(replica, f"does not answer: {error}")
            return
        self._metrics.live.labels(self._head, replica.address).set(replica.told.weights_version)

    async def _bring(self, replica: _Replica) -> None:
        """One push, made for what this replica uses now. What fails is tried again with the next look."""
        await self._describe(replica)
        told, wanted = replica.told, replica.wanted
        if told is None or replica.current:
            replica.trouble = "" if told else replica.trouble
            return
        known = self._known.get(told.weights_hash)
        parent = known if known is not None and known.version == told.weights_version else self._checkpoint
        try:
            header, parts = await asyncio.to_thread(pack_update, self._head, parent, wanted)
            failpoints.hit("adapter.push")
            synced = await replica.link.push(header, parts)
            failpoints.hit("adapter.acknowledge")
        except CoppiceError as error:
            self._note(replica, f"refused version {wanted.version}: {error}")
            return
        replica.trouble = ""
        log.info("pushed", replica=replica.address, version=synced.version, bytes=header.size)
        await self._describe(replica)

    def _note(self, replica: _Replica, trouble: str) -> None:
        """Log a trouble once, not with every look."""
        if trouble != replica.trouble:
            log.warning("a replica is in trouble", replica=replica.address, why=trouble)
        replica.trouble = trouble
