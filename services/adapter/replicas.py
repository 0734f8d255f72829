"""The drafters of one pool: which weights each is to use, and what is done until it does."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence

import structlog

from coppice import failpoints
from coppice.errors import CoppiceError
from coppice.messages.adapter import ReplicaStatus
from coppice.messages.steps import HeadDescription
from coppice.rpc.channels import Dialer
from coppice.rpc.directory import Directory
from coppice.telemetry import AdapterMetrics
from coppice.weights.push import DrafterLink
from coppice.weights.versions import Weights, pack_update

log = structlog.get_logger()

_KNOWN = 4  # versions an update may start from, besides the checkpoint


class _Replica:
    def __init__(self, address: str, dialer: Dialer, wanted: Weights) -> None:
        self.link = DrafterLink(address, dialer)
        self.address, self.wanted = address, wanted
        self.told: HeadDescription | None = None  # None: it did not answer last
        self.trouble = ""

    @property
    def current(self) -> bool:
        return self.told is not None and self.told.weights_hash == self.wanted.hash


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
        self._head, self._where, self._dialer, self._metrics = head, where, dialer, metrics
        self._checkpoint = self._wanted = checkpoint
        self._may_push = may_push
        self._replicas: list[_Replica] = []
        self._gone: list[_Replica] = []  # whose channels a call may use yet
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
            known.get(address) or _Replica(address, self._dialer, self._wanted) for address in sorted(addresses)
        ]

    async def _forget(self) -> None:
        """Of replicas that are gone, while no call runs."""
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
        """What replicas are to use; `first_only`: the first one that answered last, which is the canary."""
        self._known[weights.hash] = weights
        self._known.move_to_end(weights.hash)
        while len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        if not first_only:
            self._wanted = weights
        chosen = [replica for replica in self._replicas if replica.told] if first_only else self._replicas
        for replica in chosen[:1] if first_only else chosen:
            replica.wanted = weights

    async def bring(self) -> None:
        """Give every replica what it is to use and does not."""
        async with self._busy:
            await self._forget()
            await asyncio.gather(*map(self._bring, self._replicas))
        self._metrics.stale.labels(self._head).set(sum(not replica.current for replica in self._replicas))

    @property
    def newest(self) -> int:
        """Highest version that a replica uses; 0: none answers."""
        return max((replica.told.weights_version for replica in self._replicas if replica.told), default=0)

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
        await asyncio.gather(*(replica.link.close() for replica in (*self._replicas, *self._gone)))

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

    def _note(self, replica: _Replica, trouble: str) -> None:
        """Log a trouble once, not with every look."""
        if trouble != replica.trouble:
            log.warning("a replica is in trouble", replica=replica.address, why=trouble)
        replica.trouble = trouble
