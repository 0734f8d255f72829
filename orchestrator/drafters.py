"""The drafters as the orchestrator sees them: the replicas of each head, and what is known of them."""

from __future__ import annotations

import asyncio
import statistics
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace

import structlog

from coppice.errors import InvalidField
from coppice.limits import MAX_FEATURE_LAYERS
from coppice.rpc.channels import Dialer
from coppice.speculation.policy import Calibration
from coppice.telemetry import OrchestratorMetrics
from coppice.v1 import drafter_pb2
from coppice.v1.drafter_pb2_grpc import DrafterServiceStub
from coppice.wire import drafter
from coppice.wire.drafter import HeadDescription

from .replicas import PROBE_S, Pool, Replica
from .watch import USELESS, AcceptanceWatch

log = structlog.get_logger()

_LEAST_DEADLINE_S, _MOST_DEADLINE_S = 0.020, 1.0
_FIRST_DEADLINE_S = 0.250
_MOST_MOVING = 4  # sessions of a pool at a time: a replica that is no good gets no more


class DrafterReplica(Replica):
    """One drafter process."""

    def __init__(self, address: str, dialer: Dialer) -> None:
        super().__init__(address, dialer)
        self.stub = DrafterServiceStub(self.channel)
        self.watch = AcceptanceWatch(())
        """whether it drafts as it was trained to, or of one that nobody measured whether it is of any use"""
        self.weights_version = 0
        """in use when it was last looked at"""

    def told(self, head: HeadDescription) -> None:
        """Take in what is expected of the head. A replica that has older weights than before was started anew."""
        self.weights_version = head.weights_version
        expected = head.expected_acceptance or ((USELESS,) if head.vocab_size else ())
        if expected != self.watch.expected or head.weights_version < self.watch.version:
            self.watch = AcceptanceWatch(expected)


class HeadPool(Pool[DrafterReplica]):
    """The replicas of one head, what its confidences are worth, and how long it takes to draft."""

    def __init__(
        self,
        name: str,
        addresses: Sequence[str],
        dialer: Dialer,
        metrics: OrchestratorMetrics,
        layers: int,
        vocab_size: int = 0,
        vocabulary: bytes = b"",
    ) -> None:
        """layers, vocab_size and the hash of its tokenizer: of the target; 0, or without a hash: any will do."""
        self.metrics, self._layers, self._vocab_size, self._vocabulary = metrics, layers, vocab_size, vocabulary
        self.calibration = Calibration()
        self.feature_layers: tuple[int, ...] | None = None
        """target layers whose features the head reads; None until a replica has said so"""
        self.kind = ""
        """of head; empty until a replica has said so"""
        self.moving: set[object] = set()
        """sessions on their way to a replica that has fewer, until it drafts for them"""
        self._draft_s: deque[float] = deque(maxlen=64)
        super().__init__(name, addresses, replace(dialer, head=name))
        suspects = metrics.suspect.labels(name)
        suspects.set_function(lambda: sum(replica.watch.suspect for replica in self.replicas))

    def make(self, address: str) -> DrafterReplica:
        """A replica at an address."""
        return DrafterReplica(address, self._dialer)

    async def describe(self, replica: DrafterReplica) -> None:
        """The first that answers says which features the head reads; one that reads others is never used, nor one that
        reads what the target does not have, or has another vocabulary.
        """
        told = await replica.stub.DescribeHead(drafter_pb2.DescribeHeadRequest(), timeout=PROBE_S)
        head = drafter.read_head(told)
        why = self._why_not(head)
        if why and why != replica.unfit:
            log.warning("a head that cannot be used", pool=self.name, replica=replica.address, why=why)
            self.metrics.unfit.labels(self.name).inc()
        replica.unfit = why
        self.kind = self.kind or head.kind
        replica.told(head)

    def _why_not(self, head: HeadDescription) -> str:
        """Why a head cannot be used with the target or beside the others of its pool; empty when it can."""
        layers = head.feature_layers
        if max(layers, default=0) >= self._layers:
            return f"it reads features of {layers}, of a target of {self._layers} layers"
        if head.vocab_size and self._vocab_size and head.vocab_size != self._vocab_size:
            return f"it has a vocabulary of {head.vocab_size} ids, the target one of {self._vocab_size}"
        if head.tokenizer_hash and self._vocabulary and head.tokenizer_hash != self._vocabulary:
            return "its tokenizer is not the target's"
        self.feature_layers = layers if self.feature_layers is None else self.feature_layers
        return "" if layers == self.feature_layers else f"it reads features of {layers}"

    def judge(self, replica: DrafterReplica, path: Sequence[bool], version: int) -> None:
        """Learn from a draft whether a replica drafts as it was trained to, and say so once when it does not.

        path: of the draft, see `best_path`. version: of the weights that made it.
        """
        watch = replica.watch
        if not watch.observe(path, version):
            return
        log.error(
            "head drafts far below what is expected of it",
            head=self.name,
            replica=replica.address,
            expected=[round(share, 3) for share in watch.expected],
            measured=[f"{hits}/{trials}" for hits, trials in zip(watch.hits, watch.trials, strict=True)],
            weights_version=version,
        )

    def cool_down(self, replica: DrafterReplica) -> None:
        """Ask nothing of a replica for a while."""
        if replica.cool_down():
            self.metrics.benched.labels(self.name).inc()

    def has_better(self, replica: DrafterReplica, avoid: Collection[DrafterReplica]) -> bool:
        """Whether a session of `replica` should go on at the least loaded one: that evens out how many they have."""
        best = self.pick(avoid)
        return best is not None and best.sessions + 1 < replica.sessions and len(self.moving) < _MOST_MOVING

    async def learn(self) -> None:
        """Find out `feature_layers` unless they are known, from the replicas that are not known to be silent."""
        while self.feature_layers is None and (replica := self.pick()) is not None:
            await self.look(replica)
            if self.feature_layers is None:
                self.cool_down(replica)

    def drafted(self, seconds: float) -> None:
        """Remember how long a draft took, so that the deadline fits."""
        self._draft_s.append(seconds)

    @property
    def deadline_s(self) -> float:
        """How long to wait for a draft: max(20 ms, 4 x the median draft time), at most a second; 250 ms at first."""
        usual = self.usual_s
        return _FIRST_DEADLINE_S if usual is None else min(_MOST_DEADLINE_S, max(_LEAST_DEADLINE_S, 4 * usual))

    @property
    def usual_s(self) -> float | None:
        """The median of how long drafts lately took; None before the first one."""
        return statistics.median(self._draft_s) if self._draft_s else None


async def feature_layers(pools: Sequence[HeadPool], field: str) -> tuple[int, ...]:
    """The layers whose features these heads read together, none when no head reads any.

    Raises InvalidField naming `field` when they are more than a session may ask for.
    """
    await asyncio.gather(*(pool.learn() for pool in pools))
    layers = tuple(dict.fromkeys(layer for pool in pools for layer in pool.feature_layers or ()))
    if len(layers) > MAX_FEATURE_LAYERS:
        named = ", ".join(f"{pool.name} {pool.feature_layers}" for pool in pools if pool.feature_layers)
        raise InvalidField(field, f"heads read features of more than {MAX_FEATURE_LAYERS} layers: {named}")
    return layers
