"""The drafters as the orchestrator sees them: replicas, a head's pool, and one request's session on one after another.

Drafts are advice. Whatever goes wrong with a session ends in an empty tree, never in an error.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import numpy as np
import structlog
from numpy.typing import NDArray

from coppice.errors import CoppiceError, InternalError, InvalidField, Overloaded, Unavailable, from_rpc_error
from coppice.limits import MAX_FEATURE_LAYERS, MAX_HEAD_NODES, MAX_TREE_DEPTH, MAX_TREE_NODES
from coppice.rpc.channels import Dialer
from coppice.speculation.policy import Calibration, first_miss
from coppice.speculation.tree import DraftTree, TreeError, extend, validate
from coppice.telemetry import OrchestratorMetrics
from coppice.v1 import drafter_pb2
from coppice.v1.drafter_pb2_grpc import DrafterServiceStub
from coppice.wire import drafter
from coppice.wire.common import Features, Fence, Rejection
from coppice.wire.drafter import Advance, DraftOpened, DraftStep, HeadDescription, OpenDraft, TreeDelta

from .targets import PROBE_S, Pool, Replica
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


@dataclass(slots=True)
class Draft:
    """What one head drafted in one step."""

    tree: DraftTree = field(default_factory=DraftTree.empty)
    """as the head sent it"""
    scored: DraftTree = field(default_factory=DraftTree.empty)
    """the same nodes with calibrated log-probs"""
    q_rows: list[NDArray[np.float32]] = field(default_factory=list)
    predicted: list[int] = field(default_factory=list)
    """of each node its place in the request's prediction, from 1, or 0; empty when the head drafts from none"""
    deltas: list[int] = field(default_factory=list)
    """nodes of each delta that arrived"""
    forward_ns: int = 0
    weights_version: int = 0
    late: bool = False
    bad: bool = False
    replica: DrafterReplica | None = None
    """which sent it"""


NO_DRAFT = Draft()
"""the draft of a head that was not asked; nobody changes it"""


class DraftStream:
    """A stream from its opening to its end. Nothing here raises: a stream that fails ends."""

    def __init__(
        self,
        head: str,
        replica: DrafterReplica,
        heard: Callable[[TreeDelta | DraftOpened], None],
        lost: Callable[[CoppiceError], None],
    ) -> None:
        """head: its name in logs. `heard` takes every answer, `lost` what ended the stream unless `close` did."""
        self.replica = replica
        self._head, self._heard, self._lost = head, heard, lost
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing: asyncio.Task[None] | None = None
        replica.taken()
        self._call: grpc.aio.StreamStreamCall = replica.stub.Draft()
        self._spawn(self._listen())

    @property
    def idle(self) -> bool:
        """Whether all that was written has gone out."""
        return self._writing is None or self._writing.done()

    def write(self, message: drafter_pb2.DraftRequest) -> None:
        """Send a message behind the earlier ones."""
        self._writing = self._spawn(self._send(self._writing, message))

    def close(self) -> None:
        """End the stream; the drafter frees the session."""
        self._closed = True
        self._call.cancel()
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()
        self.replica.released()

    async def _send(self, earlier: asyncio.Task[None] | None, message: drafter_pb2.DraftRequest) -> None:
        if earlier is not None and not earlier.done():
            await asyncio.wait([earlier])
        if not self._closed:
            try:
                await self._call.write(message)
            except (grpc.RpcError, asyncio.InvalidStateError):
                return  # the listener hears of it too and deals with it

    async def _listen(self) -> None:
        end: CoppiceError = Unavailable("the drafter ended the session")
        try:
            async for message in self._call:
                self._heard(drafter.read_draft_response(message))
        except grpc.RpcError as error:
            end = from_rpc_error(error)
        except CoppiceError as error:  # of an answer: no refusal of a text
            end = InternalError(f"the drafter answered wrongly: {error}")
        if not self._closed:
            log.warning("head lost", head=self._head, why=str(end)[:200])
            self._lost(end)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


_MISSES_TO_COOL_DOWN = 2.0
_FORGIVEN = 0.125  # of a miss, by a draft in time: more than one miss in nine steps adds up


@dataclass(slots=True)
class Signal:
    """What a head said of its misses in one request, and the versions of its weights that were seen."""

    learns: bool
    """whether an adapter is told"""
    s: float = 0.0
    first_version: int = 0
    last_version: int = 0
    choices: set[tuple[int, int]] = field(default_factory=set)
    """kind of text and variant of the weights; several after a move to another drafter"""
    sketch: tuple[float, ...] = ()
    seen: bool = False
    owed: int = 0
    """misses that the drafter may still say"""

    def missed(self, miss: float) -> None:
        """Add 1 - r of a rejection, if one is owed: also that of a step that went on without its tree."""
        if self.owed:
            self.owed -= 1
            self.s += miss

    def opened(self, answer: DraftOpened) -> None:
        """Note what will draft, and what the drafter takes the prompt for."""
        self.choices.add((answer.kind, answer.variant))
        self.sketch = answer.sketch
        self.drafted_by(answer.weights_version)

    def drafted_by(self, version: int) -> None:
        """Note the weights that drafted, or will."""
        self.first_version = self.first_version if self.seen else version
        self.last_version, self.seen = version, True


@dataclass(slots=True)
class _Question:
    """A step that the drafter was asked to draft, and what it answered so far."""

    step: int
    budget: int
    answer: asyncio.Future[None]
    asked_at: float = field(default_factory=time.perf_counter)
    draft: Draft = field(default_factory=Draft)

    def add(self, delta: TreeDelta) -> None:
        """Take in a part of the tree."""
        draft, nodes = self.draft, delta.nodes
        draft.forward_ns, draft.weights_version = delta.forward_ns, delta.fence.weights_version
        if len(draft.tree):
            draft.tree = extend(draft.tree, nodes.tokens, nodes.parents, nodes.log_probs)
        else:
            draft.tree = nodes
        draft.deltas += delta.made or (len(nodes),)
        draft.predicted += delta.predicted
        if delta.q_rows is not None:
            draft.q_rows.append(delta.q_rows)


@dataclass(slots=True)
class _Unsent:
    """What the next step sends to the drafter."""

    told: int
    """committed ids that it knows of"""
    rejection: Rejection | None = None
    """about the last tree"""


class HeadSession:
    """One request's stream to one replica of a head; re-opened after trouble.

    A replica that misses two deadlines in a row, or keeps missing more than one in nine, is asked nothing for a while:
    each miss costs a whole deadline. Between two steps the stream moves to a replica with fewer sessions, such as one
    that has just come.
    """

    def __init__(self, pool: HeadPool, opening: OpenDraft, vocab_size: int, learns: bool) -> None:
        """`learns`: whether an adapter hears of the request."""
        self.pool, self.opening, self.vocab_size = pool, opening, vocab_size
        self.signal = Signal(learns)
        # What is expected of a head is measured where the target draws what its rows say, or its noise is known.
        sampling = opening.sampling
        self.is_measured = not sampling.temperature or (sampling.temperature <= 1 and opening.coupled)
        self._layers = pool.feature_layers  # as they were known when the verifier was asked for them
        self._window: Features | None = None  # of the verifier's session
        self._followed = ""  # the verifier's session that the drafter follows
        self._stream: DraftStream | None = None
        self._unsent = _Unsent(0)
        self._question: _Question | None = None
        self._opened = False
        self._waited_to_open = False
        self._misses = 0.0
        self._refused: dict[DrafterReplica, float] = {}
        """by replicas that refused the text until when they are not asked again, of `monotonic`"""

    def open(self, ids: list[int]) -> None:
        """Start a stream on the committed ids unless there is one, every replica is cooling down or features are
        missing.
        """
        if self._stream is not None or self._layers is None or (self._layers and self._window is None):
            return
        replica = self.pool.pick(self._refusing())
        if replica is None:
            return
        self._opened, self._misses = False, 0.0
        self._unsent, self.signal.owed = _Unsent(len(ids)), 0  # this drafter knows no earlier tree
        self._stream = DraftStream(self.pool.name, replica, self._heard, self._ended)
        self._followed = ""
        opening = replace(self.opening, ids=ids, features=self._follow(len(ids)))
        self._stream.write(drafter.draft_request_to_wire(opening))

    def _follow(self, length: int) -> Features | None:
        """The verifier's session for the drafter to follow, unless it was told of it; a head that reads features needs
        those of the latest positions before `length`.
        """
        window = self._window
        if window is None or window.ref is None or window.ref.session == self._followed:
            return None
        self._followed = window.ref.session
        layers = self._layers or ()
        count = length - window.start if layers else 0
        return replace(window, count=count, ref=replace(window.ref, count=count, layers=layers))

    def learn(self, features: Features | None) -> None:
        """Take which session of a verifier the drafter can follow from now on."""
        if features is not None and features.ref is not None:
            self._window = features

    def ask(self, fence: Fence, root: int, ids: list[int], budget: int) -> asyncio.Future[None] | None:
        """Ask for a tree below `root`; the future is done when it is complete. None when the head sits this out."""
        # A step that asks for no node is to hear of the last tree's miss, which only this replica knows.
        stream = self._stream
        if budget and self._opened and stream and self.pool.has_better(stream.replica, self._refusing()):
            self.close()
            self._waited_to_open = True  # it had drafts until now
            self.pool.moving.add(self)
        self.open(ids)
        if self._stream is None or not self._may_wait():
            return None
        advance = self._advance(ids)
        answer = asyncio.get_running_loop().create_future()
        self._question = _Question(fence.step, min(budget, MAX_HEAD_NODES), answer)
        self._stream.write(drafter.draft_request_to_wire(DraftStep(fence, root, self._question.budget, advance)))
        return answer

    def _advance(self, ids: list[int]) -> Advance:
        """What the drafter does not know of; it does from now on."""
        unsent, self._unsent = self._unsent, _Unsent(len(ids))
        self.signal.owed += unsent.rejection is not None
        new = ids[unsent.told :]
        return Advance(new, self._follow(len(ids)), unsent.rejection)

    def reject(self, draft: Draft, start: int, offered: Sequence[int]) -> None:
        """Tell the drafter with the next step where its last tree left the text, unless all of it was accepted.

        start: position of the first token of `offered`.
        """
        rejection = own_rejection(draft.tree, start, offered)
        if rejection is not None and self._stream is not None:
            self._unsent.rejection = rejection

    async def last_miss(self, fence: Fence, ids: list[int], timeout_s: float) -> None:
        """Hear of the last tree's miss, if it had one, by a step that asks for no node. No other step may follow.

        fence: of that step. ids: committed.
        """
        if self._unsent.rejection is None or self._stream is None:
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
            return self._stream is not None and self._stream.idle
        first, self._waited_to_open = not self._waited_to_open, True
        return first

    def collect(self) -> Draft:
        """What arrived of the tree asked for last, with calibrated scores; a malformed tree is dropped and counted."""
        question, self._question = self._question, None
        if question is None:
            return NO_DRAFT
        draft = question.draft
        draft.replica = self._stream.replica if self._stream else None
        draft.late = not question.answer.done()
        try:
            validate(draft.tree, self.vocab_size, MAX_TREE_NODES, MAX_TREE_DEPTH)
        except TreeError as error:
            self.pool.metrics.bad_drafts.labels(self.pool.name, error.reason).inc()
            draft.tree, draft.bad, draft.deltas, draft.predicted = DraftTree.empty(), True, [], []
        if len(draft.tree):
            draft.scored = draft.tree if self.opening.prediction else self.pool.calibration.of(draft.tree)
        if draft.late:
            self.pool.metrics.late_drafts.labels(self.pool.name).inc()
        self._judge(missed=draft.bad or (draft.late and self._opened))
        return draft

    def close(self) -> None:
        """End the stream; the drafter frees the session."""
        self.pool.moving.discard(self)
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        if self._question is not None and not self._question.answer.done():
            self._question.answer.set_result(None)

    def _judge(self, missed: bool) -> None:
        self._misses = self._misses + 1 if missed else max(0.0, self._misses - _FORGIVEN)
        if missed and self._misses >= _MISSES_TO_COOL_DOWN:
            self._cool_down()

    def _ended(self, error: CoppiceError) -> None:
        """Leave this replica: for this session alone where it refuses the text or is full, else for all."""
        if self._stream is not None and isinstance(error, InvalidField | Overloaded):
            pause_s = error.retry_after_s if isinstance(error, Overloaded) else math.inf
            self._refused[self._stream.replica] = time.monotonic() + pause_s
            self.close()
        else:
            self._cool_down()

    def _refusing(self) -> list[DrafterReplica]:
        """Replicas that this session is not to ask now."""
        now = time.monotonic()
        return [replica for replica, until in self._refused.items() if until > now]

    def _cool_down(self) -> None:
        """Leave this replica, and have the pool ask it nothing for a while."""
        if self._stream is not None:
            self.pool.cool_down(self._stream.replica)
            self.close()

    def _heard(self, answer: TreeDelta | DraftOpened) -> None:
        """Take in a part of a tree, or the version of the weights of a session that is open now."""
        if isinstance(answer, DraftOpened):
            self._opened = True
            self.signal.opened(answer)
            return
        if answer.miss is not None:
            self.signal.missed(answer.miss)
        self.signal.drafted_by(answer.fence.weights_version)
        question = self._question
        if question is None or answer.fence.step != question.step or question.answer.done():
            return  # late: an answer to a step that went on without it
        question.add(answer)
        if answer.last:
            self.pool.moving.discard(self)
            if len(question.draft.tree):  # an empty answer says nothing of how long drafts take
                self.pool.drafted(time.perf_counter() - question.asked_at)
            question.answer.set_result(None)


def own_rejection(tree: DraftTree, start: int, offered: Sequence[int]) -> Rejection | None:
    """Where a head's own tree left the text, whose first token stands at `start`; None when all of it was accepted."""
    missed = first_miss(tree, offered)
    if missed is None:
        return None
    depth, node = missed
    return Rejection(start + depth, node, offered[depth])
