"""The drafters as the orchestrator sees them: the replicas of each head, and what is known of them."""

from __future__ import annotations

import asyncio
import statistics
from collections import deque
from collections.abc import Sequence

from coppice.errors import InvalidField
from coppice.rpc.channels import Dialer
from coppice.speculation.calibration import Calibration
from coppice.telemetry import OrchestratorMetrics
from coppice.v1 import drafter_pb2
from coppice.v1.drafter_pb2_grpc import DrafterServiceStub
from coppice.wire import drafter
from orchestrator.replicas import Pool, Replica

_LEAST_DEADLINE_S, _MOST_DEADLINE_S = 0.020, 1.0
_FIRST_DEADLINE_S = 0.250
_MOST_MOVING = 4  # sessions of a pool at a time: a replica that is no good gets no more


class DrafterReplica(Replica):
    """One drafter process."""

    def __init__(self, address: str, dialer: Dialer) -> None:
        super().__init__(address, dialer)
        self.stub = DrafterServiceStub(self.channel)


class HeadPool(Pool[DrafterReplica]):
    """The replicas of one head, what its confidences are worth, and how long it takes to draft."""

    def __init__(
        self, name: str, addresses: Sequence[str], dialer: Dialer, metrics: OrchestratorMetrics, layers: int
    ) -> None:
        """layers: of the target."""
        self.metrics, self._layers = metrics, layers
        self.calibration = Calibration()
        self.feature_layers: tuple[int, ...] | None = None
        """target layers whose features the head reads; None until a replica has said so"""
        self.moving: set[object] = set()
        """sessions on their way to a replica that has fewer, until it drafts for them"""
        self._draft_s: deque[float] = deque(maxlen=64)
        super().__init__(name, addresses, dialer)

    def make(self, address: str) -> DrafterReplica:
        """A replica at an address."""
        return DrafterReplica(address, self._dialer)

    async def describe(self, replica: DrafterReplica, timeout_s: float) -> None:
        """The first that answers says which features the head reads; one that reads others is never used, nor one that
        reads what the target does not have.
        """
        told = await replica.stub.DescribeHead(drafter_pb2.DescribeHeadRequest(), timeout=timeout_s)
        layers = drafter.read_head(told).feature_layers
        if max(layers, default=0) >= self._layers:
            replica.unfit = f"it reads features of {layers}, of a target of {self._layers} layers"
            return
        self.feature_layers = layers if self.feature_layers is None else self.feature_layers
        replica.unfit = "" if layers == self.feature_layers else f"it reads features of {layers}"

    def cool_down(self, replica: DrafterReplica) -> None:
        """Ask nothing of a replica for a while."""
        if replica.cool_down():
            self.metrics.benched.labels(self.name).inc()

    def has_better(self, replica: DrafterReplica) -> bool:
        """Whether a session of `replica` should go on at the least loaded one: that evens out how many they have."""
        best = self.pick()
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
    """The layers whose features these heads read, none when no head reads any.

    Raises InvalidField naming `field` when two heads want different ones: a session has features of one kind.
    """
    await asyncio.gather(*(pool.learn() for pool in pools))
    wanted = {layers: pool.name for pool in pools if (layers := pool.feature_layers)}
    if len(wanted) > 1:
        named = ", ".join(f"{name} {layers}" for layers, name in wanted.items())
        raise InvalidField(field, f"heads read features of different layers: {named}")
    return next(iter(wanted), ())
