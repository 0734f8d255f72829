"""One request's session with a head, on one drafter after another.

Drafts are advice. Whatever goes wrong here ends in an empty tree, never in an error.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import numpy as np
import structlog

from coppice.errors import CoppiceError, InternalError, InvalidField, Overloaded, Unavailable, from_rpc_error
from coppice.limits import MAX_HEAD_NODES, MAX_TREE_DEPTH, MAX_TREE_NODES
from coppice.speculation.policy import first_miss
from coppice.speculation.tree import DraftTree, TreeError, extend, validate
from coppice.v1 import drafter_pb2
from coppice.wire import drafter
from coppice.wire.common import Features, Fence, Rejection
from coppice.wire.drafter import Advance, DraftOpened, DraftStep, OpenDraft, TreeDelta

from .drafters import DrafterReplica, HeadPool
from .prediction import PredictionUse
from .step import NO_DRAFT, Committed, Draft

log = structlog.get_logger()


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
    """What the drafter is to hear with the next step."""

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
        self.prediction = PredictionUse()
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

    async def last_miss(self, text: Committed, step: int, timeout_s: float) -> None:
        """Hear of the last tree's miss, if it had one, by a step that asks for no node. No other step may follow."""
        if self._unsent.rejection is None or self._stream is None:
            return
        answer = self.ask(text.fence(step, timeout_s), text.ids[-1], text.ids, 0)
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
    return Rejection(start + depth, node, offered[depth], np.empty(0, np.int64), np.empty(0, np.float32), 1.0)
