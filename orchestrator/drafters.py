"""A head as the orchestrator sees it: its pool of drafters, and one session's stream to one of them.

Drafts are advice. Whatever goes wrong here ends in an empty tree, never in an error.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import numpy as np
import structlog
from numpy.typing import NDArray

from coppice.errors import CoppiceError, InvalidField
from coppice.limits import MAX_HEAD_NODES, MAX_TREE_NODES
from coppice.messages.steps import Advance, DraftStep, Features, Fence, OpenDraft, Rejection, TreeDelta
from coppice.rpc.channels import Dialer
from coppice.speculation.calibration import Calibration
from coppice.speculation.tree import DraftTree, TreeError, extend, prune, validate
from coppice.telemetry import OrchestratorMetrics
from coppice.v1 import drafter_pb2
from coppice.v1.drafter_pb2_grpc import DrafterServiceStub
from coppice.wire import drafter
from orchestrator.replicas import Pool, Replica

log = structlog.get_logger()

_MISSES_TO_BENCH = 2.0
_FORGIVEN = 0.125  # of a miss, by a draft in time: more than one miss in nine steps adds up
_LEAST_DEADLINE_S, _MOST_DEADLINE_S = 0.020, 1.0
_FIRST_DEADLINE_S = 0.250
_MOST_UNTOLD_BYTES = 16 << 20
_MOST_MOVING = 4  # sessions of a pool at a time: a replica that is no good gets no more


class DrafterReplica(Replica):
    """One drafter process."""

    def __init__(self, address: str, dialer: Dialer) -> None:
        super().__init__(address, dialer)
        self.stub = DrafterServiceStub(self.channel)


class HeadPool(Pool[DrafterReplica]):
    """The replicas of one head, what its confidences are worth, and how long it takes to draft."""

    def __init__(self, name: str, addresses: Sequence[str], dialer: Dialer, metrics: OrchestratorMetrics) -> None:
        self.metrics = metrics
        self.calibration = Calibration()
        self.feature_layers: tuple[int, ...] | None = None
        """target layers whose features the head reads; None until a replica has said so"""
        self.moving: set[HeadSession] = set()
        """sessions on their way to a replica that has fewer, until it drafts for them"""
        self._draft_s: deque[float] = deque(maxlen=64)
        super().__init__(name, addresses, dialer)

    def make(self, address: str) -> DrafterReplica:
        """A replica at an address."""
        return DrafterReplica(address, self._dialer)

    async def describe(self, replica: DrafterReplica, timeout_s: float) -> None:
        """The first that answers says which features the head reads; one that reads others is never used."""
        told = await replica.stub.DescribeHead(drafter_pb2.DescribeHeadRequest(), timeout=timeout_s)
        layers = drafter.read_head(told).feature_layers
        self.feature_layers = layers if self.feature_layers is None else self.feature_layers
        replica.unfit = "" if layers == self.feature_layers else f"it reads features of {layers}"

    def bench(self, replica: DrafterReplica) -> None:
        """Leave a replica alone for a while."""
        if replica.bench():
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
                self.bench(replica)

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


@dataclass(slots=True)
class Draft:
    """What one head said in one step."""

    tree: DraftTree = field(default_factory=DraftTree.empty)
    q_rows: list[NDArray[np.float32]] = field(default_factory=list)
    deltas: list[int] = field(default_factory=list)
    """nodes of each delta that arrived"""
    kept: NDArray[np.int64] | None = None
    """numbers that the tree's nodes had in what arrived, when it was pruned"""
    forward_ns: int = 0
    weights_version: int = 0
    scored: DraftTree | None = None
    """the tree with calibrated log-probs, once somebody asked for it"""
    late: bool = False
    bad: bool = False


@dataclass(slots=True)
class Signal:
    """What a head said of its misses in one request, and the versions of its weights that were seen."""

    s: float = 0.0
    rejections: int = 0
    first_version: int = 0
    last_version: int = 0
    seen: bool = False

    def missed(self, miss: float) -> None:
        """Add 1 - r of a rejection."""
        self.s += miss
        self.rejections += 1

    def drafted_by(self, version: int) -> None:
        """Note the weights that drafted, or will."""
        self.first_version = self.first_version if self.seen else version
        self.last_version, self.seen = version, True


class HeadSession:
    """One request's stream to one replica of a head; re-opened after trouble.

    Two misses in a row bench the replica, and so do misses that keep coming back: each cost a whole deadline. Between
    two steps the stream moves to a replica with fewer sessions, such as one that has just come.
    """

    def __init__(self, pool: HeadPool, opening: OpenDraft, vocab_size: int) -> None:
        self.pool, self.opening, self.vocab_size = pool, opening, vocab_size
        self._layers = pool.feature_layers  # as they were known when the verifier was asked for them
        self._window: Features | None = None  # where features can be fetched from
        self._untold = bytearray()  # feature rows of the committed ids the drafter does not know of
        self._replica: DrafterReplica | None = None
        self._call: grpc.aio.StreamStreamCall | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing: asyncio.Task[None] | None = None
        self._opened = False
        self._waited_to_open = False
        self._told = 0  # committed ids the drafter knows of
        self._misses = 0.0
        self._step = 0
        self._budget = 0
        self._asked_at = 0.0
        self._draft = Draft()
        self._answer: asyncio.Future[None] | None = None
        self.signal = Signal()
        self._rejection: Rejection | None = None  # about the last tree, to go with the next step
        self._owed = 0  # misses that the drafter may still say

    def open(self, ids: list[int]) -> None:
        """Start a stream on the committed ids, unless every replica is benched or features are missing."""
        if self._layers is None or (self._layers and self._window is None):
            return
        self._replica = self.pool.pick()
        if self._replica is None:
            return
        self._replica.taken()
        self._opened, self._misses, self._told = False, 0.0, len(ids)
        self._untold.clear()
        self._rejection, self._owed = None, 0  # this drafter knows no earlier tree
        self._call = self._replica.stub.Draft()
        opening = replace(self.opening, ids=ids, features=self._features_of(ids))
        self._write(self._call, drafter.open_draft_to_wire(opening))
        self._spawn(self._listen(self._call))

    def prepare(self, ids: list[int]) -> None:
        """Start a stream unless there is one."""
        if self._call is None:
            self.open(ids)

    def _features_of(self, ids: list[int]) -> Features | None:
        """Where to fetch features up to the last id; the verifier raises the start to what it still holds."""
        window = self._window
        if window is None or window.ref is None:
            return None
        ref = replace(window.ref, count=len(ids) - window.ref.start)
        return Features(ref.start, ref.count, window.dtype, None, ref)

    def learn(self, features: Features | None) -> None:
        """Take the features of newly committed positions: of the prompt's a reference, of a step's the rows."""
        if not self._layers or features is None:
            return
        if features.ref is not None:
            self._window = features
        elif self._call is not None:
            self._untold += features.inline or b""
            if len(self._untold) > _MOST_UNTOLD_BYTES:  # a drafter that takes nothing
                self._bench()

    def ask(self, fence: Fence, root: int, ids: list[int], budget: int) -> asyncio.Future[None] | None:
        """Ask for a tree below `root`; the future is done when it is complete. None when the head sits this out."""
        # A step that asks for no node is to hear of the last tree's miss, which only this replica knows.
        if budget and self._opened and self._replica is not None and self.pool.has_better(self._replica):
            self.close()
            self.open(ids)
            self._waited_to_open = True  # it had drafts until now
            self.pool.moving.add(self)
        self.prepare(ids)
        if self._call is None or not self._may_wait():
            return None
        advance = self._advance(ids)
        self._step, self._budget, self._draft = fence.step, min(budget, MAX_HEAD_NODES), Draft()
        self._answer = asyncio.get_running_loop().create_future()
        self._asked_at = time.perf_counter()
        step = DraftStep(fence, root, self._budget, advance)
        self._write(self._call, drafter.draft_step_to_wire(step))
        return self._answer

    def _advance(self, ids: list[int]) -> Advance:
        """What the drafter does not know of; it does from now on."""
        new, start, self._told = ids[self._told :], self._told, len(ids)
        rejection, self._rejection = self._rejection, None
        self._owed += rejection is not None
        if self._window is None or not new:
            return Advance(new, None, rejection)
        features = Features(start, len(new), self._window.dtype, bytes(self._untold))
        self._untold.clear()
        return Advance(new, features, rejection)

    def reject(self, rejection: Rejection) -> None:
        """Tell the drafter with the next step where its last tree left the text."""
        if self._call is not None:
            self._rejection = rejection

    async def last_miss(self, fence: Fence, ids: list[int], timeout_s: float) -> None:
        """Hear of the last tree's miss, if it had one, by a step that asks for no node. No other step may follow."""
        if self._rejection is None or self._call is None:
            return
        answer = self.ask(fence, ids[-1], ids, 0)
        if answer is not None:
            await asyncio.wait([answer], timeout=timeout_s)

    @property
    def still_opening(self) -> bool:
        """Whether the next draft would be waited for while the drafter takes in the text."""
        return not self._opened and not self._waited_to_open

    def _may_wait(self) -> bool:
        """Whether a draft can be expected: a stream that is still opening is waited for once in a session."""
        if self._opened:
            return self._writing is None or self._writing.done()
        first, self._waited_to_open = not self._waited_to_open, True
        return first

    def collect(self) -> Draft:
        """What arrived of the tree asked for last, its likeliest nodes; an unusable tree is dropped and counted."""
        draft, answer, self._answer = self._draft, self._answer, None
        draft.late = answer is None or not answer.done()
        try:
            validate(draft.tree, self.vocab_size, MAX_TREE_NODES)
        except TreeError as error:
            self.pool.metrics.bad_drafts.labels(self.pool.name, error.reason).inc()
            draft.tree, draft.bad, draft.deltas = DraftTree.empty(), True, []
        if not draft.q_rows:  # these belong to the nodes of a chain, one by one
            draft.tree, draft.kept = prune(draft.tree, self._budget)
        if draft.late:
            self.pool.metrics.late_drafts.labels(self.pool.name).inc()
        self._judge(missed=draft.bad or (draft.late and self._opened))
        return draft

    def close(self) -> None:
        """End the stream; the drafter frees the session."""
        self.pool.moving.discard(self)
        if self._call is not None:
            self._call.cancel()
            self._call = None
        if self._replica is not None:
            self._replica.released()
            self._replica = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    def _judge(self, missed: bool) -> None:
        if not missed:
            self._misses = max(0.0, self._misses - _FORGIVEN)
            return
        self._misses += 1
        if self._misses >= _MISSES_TO_BENCH and self._replica is not None:
            self._bench()

    def _bench(self) -> None:
        assert self._replica is not None
        self.pool.bench(self._replica)
        self.close()

    def _write(self, call: grpc.aio.StreamStreamCall, message: object) -> None:
        self._writing = self._spawn(self._send(self._writing, call, message))

    async def _send(self, earlier: asyncio.Task[None] | None, call: grpc.aio.StreamStreamCall, message: object) -> None:
        if earlier is not None and not earlier.done():
            await asyncio.wait([earlier])
        current = self._call
        if current is not None and current is call:
            try:
                await current.write(message)
            except (grpc.RpcError, asyncio.InvalidStateError):
                return  # the listener hears of it too and deals with it

    async def _listen(self, call: grpc.aio.StreamStreamCall) -> None:
        try:
            async for message in call:
                self._heard(drafter.read_draft_response(message))
        except (grpc.RpcError, CoppiceError, asyncio.CancelledError) as error:
            if call is self._call:
                log.warning("head lost", head=self.pool.name, why=str(error)[:200])
        if call is self._call and self._replica is not None:
            self._bench()

    def _heard(self, said: TreeDelta | int) -> None:
        if isinstance(said, int):
            self._opened = True
            self.signal.drafted_by(said)
            return
        if said.miss is not None and self._owed:  # also of a step that went on without its tree
            self._owed -= 1
            self.signal.missed(said.miss)
        self.signal.drafted_by(said.fence.weights_version)
        if said.fence.step != self._step or self._answer is None or self._answer.done():
            return  # late: an answer to a step that went on without it
        draft = self._draft
        draft.forward_ns, draft.weights_version = said.forward_ns, said.fence.weights_version
        draft.tree = said.nodes if not len(draft.tree) else _append(draft.tree, said.nodes)
        draft.deltas.append(len(said.nodes))
        if said.q_rows is not None:
            draft.q_rows.append(said.q_rows)
        if said.last:
            self.pool.moving.discard(self)
            if self._budget:
                self.pool.drafted(time.perf_counter() - self._asked_at)
            self._answer.set_result(None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _append(tree: DraftTree, nodes: DraftTree) -> DraftTree:
    return extend(tree, nodes.tokens, nodes.parents, nodes.log_probs)
