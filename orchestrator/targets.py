"""Replicas of a service and their pool; the verifiers' pool, and one request's place on one verifier after another.

A verifier's session is a cache of prompt and committed tokens. When it is lost, whatever way, another verifier prefills
what is committed, and the step that failed is asked again: keyed noise makes its answer the same.
"""

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from hashlib import sha256
from operator import attrgetter
from types import ModuleType
from typing import Any

import grpc
import numpy as np
import structlog

from coppice.errors import (
    Backoff,
    Cancelled,
    CoppiceError,
    DeadlineExceeded,
    InternalError,
    InvalidField,
    NotFound,
    Overloaded,
    StaleFence,
    Unavailable,
    from_rpc_error,
)
from coppice.limits import MAX_TOKEN_ID
from coppice.rpc.channels import Dialer, Stub
from coppice.rpc.directory import Directory
from coppice.rpc.link import LinkedCall
from coppice.v1 import verifier_pb2
from coppice.wire import verifier
from coppice.wire.common import TopLogProbs, committed_hash
from coppice.wire.verifier import NextRoot, OpenSession, SessionOpened, TargetDescription, Verdict, VerifyStep

log = structlog.get_logger()

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 10.0
_SILENCES_TO_LOSE = 2
PROBE_S = 1.0  # time between two looks at a replica, and how long it may take to answer one


class Replica:
    """One process: its channel, which lives until the last session ends, its sessions from here, and a breaker."""

    def __init__(self, address: str, dialer: Dialer, service: ModuleType) -> None:
        self.address, self.sessions = address, 0
        self.channel = dialer.open(address)
        self.stub = Stub(self.channel, service)
        self.cooling_until = 0.0
        self.silent = False  # it left the latest looks unanswered
        self.unfit = ""  # why it serves something else than the others, if it does
        self.target: TargetDescription | None = None  # what a verifier said of itself at the latest look
        self.verify_s = 0.0  # moving average of a verify round trip
        self.backoff = Backoff(_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S)
        self._silences = 0

    @property
    def fit(self) -> bool:
        """Whether a new session may go there."""
        return not (self.silent or self.unfit) and self.cooling_until <= time.monotonic()

    def cool_down(self) -> bool:
        """Ask nothing of it for a while, longer than lately; returns False when it is cooling down already."""
        now = time.monotonic()
        if self.cooling_until > now:
            return False
        if now - self.cooling_until > _LONGEST_BACKOFF_S:
            self.backoff.succeed()
        self.cooling_until = now + self.backoff.fail()
        return True

    def answered(self, error: CoppiceError | None) -> None:
        """Take in how a look at it ended."""
        if error is None:
            self._silences, self.silent = 0, False
            return
        self._silences += 1
        lost = isinstance(error, Unavailable) or self._silences >= _SILENCES_TO_LOSE
        if lost and not self.silent:
            self.silent = True
            log.warning("a replica does not answer", replica=self.address, why=str(error)[:200])


class Pool:
    """Replicas that serve the same. `describe` asks one what it serves; returns why it cannot be used, or nothing."""

    service: ModuleType  # the messages of the proto that declares it

    def __init__(self, name: str, addresses: Sequence[str], dialer: Dialer) -> None:
        self.name, self._dialer = name, dialer
        self._by_address: dict[str, Replica] = {}
        self.update(addresses)

    async def describe(self, replica: Replica) -> str:
        raise NotImplementedError

    @property
    def replicas(self) -> list[Replica]:
        """Those of the directory, fit or not."""
        return list(self._by_address.values())

    def num_fit(self) -> int:
        """How many may get a session."""
        return sum(replica.fit for replica in self.replicas)

    def update(self, addresses: Sequence[str]) -> None:
        """Take in which replicas there are now."""
        for address in self._by_address.keys() - set(addresses):
            del self._by_address[address]
            log.info("a replica left", pool=self.name, replica=address)
        for address in addresses:
            if address not in self._by_address:
                self._by_address[address] = Replica(address, self._dialer, self.service)
                log.info("a replica came", pool=self.name, replica=address)

    def pick(self, avoid: Collection[Replica] = ()) -> Replica | None:
        """The least loaded fit replica."""
        fit = [replica for replica in self._by_address.values() if replica.fit and replica not in avoid]
        return min(fit, key=lambda replica: replica.sessions, default=None)

    async def look(self, replica: Replica) -> None:
        """Ask a replica what it serves; note how that ended, and whether it can be used."""
        try:
            misfit = await self.describe(replica)
        except (grpc.RpcError, CoppiceError) as error:
            replica.answered(error if isinstance(error, CoppiceError) else from_rpc_error(error))
        else:
            replica.answered(None)
            if misfit and misfit != replica.unfit:
                log.error("a replica cannot be used", pool=self.name, replica=replica.address, why=misfit)
            replica.unfit = misfit

    async def look_at_all(self) -> None:
        """Look at every replica once."""
        await asyncio.gather(*map(self.look, self.replicas))

    async def watch(self) -> None:
        """Look at every replica, for ever."""
        while True:
            await asyncio.gather(asyncio.sleep(PROBE_S), self.look_at_all())

    async def follow(self, where: Directory) -> None:
        """Have the replicas that the directory names, and look at them, for ever."""
        async with asyncio.TaskGroup() as group:

            def changed(addresses: Sequence[str]) -> None:
                self.update(addresses)
                group.create_task(self.look_at_all())  # until then nobody knows which features a head reads

            group.create_task(where.run(changed))
            group.create_task(self.watch())


LOST = (Unavailable, DeadlineExceeded, Cancelled, NotFound, StaleFence, InternalError)
"""what another replica may do better"""
_LEAST_DEADLINE_S = 1.0
_LAST_RESORT_S = 60.0
_PREFILL_S = 60.0
_RETRY_S = 0.05
_FAILOVER_LOADS = 3  # that `coppice up` lets a request wait for: one that was lost is back in a third of that
_FIRST_TARGET_S = 30.0
_REOPENS = 4  # requests that prefill again at once
_MOST_LOSSES = 8  # of one request, without a verdict between them
_PREFIX_TOKENS = 128  # of a text that say where texts go that begin like it
_MOST_MORE = 2  # sessions that a verifier may have more than the least loaded one, to get a text for its beginning
_IDENTITY = attrgetter(
    *("name", "weights_hash", "bits_hash", "repetition_penalty"),
    *("vocab_size", "layers", "hidden_size", "eos_ids", "dtype"),
)
"""of a target: what all replicas say alike"""


class TargetPool(Pool):
    """The replicas that serve one target. The first that answers says what it is; one that serves another is unfit."""

    service = verifier_pb2

    def __init__(
        self, addresses: Sequence[str], dialer: Dialer, failover_s: float = 60.0, call_s: float = 600.0
    ) -> None:
        """`failover_s`: how long a request waits for a verifier; `call_s`: how long for the only one's prefill."""
        self.target: TargetDescription | None = None
        self.failover_s, self.call_s = failover_s, call_s
        self.reopening = asyncio.Semaphore(_REOPENS)
        super().__init__("verifier", addresses, dialer)

    async def describe(self, replica: Replica) -> str:
        request = verifier_pb2.DescribeTargetRequest()
        target = verifier.read_target(await replica.stub.DescribeTarget(request, timeout=PROBE_S))
        self.target, replica.target = self.target or target, target
        if _IDENTITY(target) == _IDENTITY(self.target):
            return ""
        bits = target.bits_hash.hex()[:12] or "not promised"
        return f"it serves {target.name}, weights {target.weights_hash.hex()[:12]}, bits {bits}"

    async def first_target(self) -> TargetDescription:
        """What the first replica that answers serves. Raises Unavailable."""
        until = time.monotonic() + _FIRST_TARGET_S
        await self.look_at_all()
        while self.target is None:
            if time.monotonic() > until:
                raise Unavailable(f"no verifier answers at {', '.join(self._by_address) or 'any address'}")
            await asyncio.sleep(_RETRY_S)
            await self.look_at_all()
        return self.target

    def pick_for(self, prefix: bytes, avoid: Collection[Replica] = ()) -> tuple[Replica | None, bool]:
        """A fit replica for a text that begins with `prefix`, and whether it is the one that texts like it go to, on
        which all orchestrators agree (rendezvous hashing). The next one stands in where that has too many sessions.
        """
        least = self.pick(avoid)
        if least is None:
            return None, False
        caching = [each for each in self.replicas if each.fit and each.target and each.target.prefix_cache_tokens]
        ranked = sorted(caching, key=lambda each: sha256(prefix + each.address.encode()).digest())
        most = least.sessions + _MOST_MORE
        chosen = next((each for each in ranked if each.sessions <= most and each not in avoid), least)
        return chosen, chosen in ranked[:1]

    @property
    def kv_usage(self) -> float:
        """Share of the KV that is in use, over the verifiers that answered the latest look; 1 is all."""
        targets = [replica.target for replica in self.replicas if replica.target and not replica.silent]
        return sum(target.kv_tokens_used for target in targets) / max(1, sum(target.kv_tokens for target in targets))

    @property
    def alone(self) -> bool:
        """Whether there is one replica, which is waited for longer: giving it up would gain nothing."""
        return len(self._by_address) == 1


class TargetSession:
    """One request: a stream to one verifier, and to another one when that is lost."""

    def __init__(self, pool: TargetPool, opening: OpenSession) -> None:
        self._pool, self._opening = pool, opening
        self._replica: Replica | None = None
        self._call: LinkedCall | None = None
        self._streams = 0
        self.exchanged = 0, 0  # when the last question was encoded and when its answer came, of `perf_counter_ns`
        self.preferred = False  # it is open on the verifier that texts which begin like it go to
        self._losses = 0
        self._steps_before = 0  # that other streams of this request answered

    @property
    def deadline_s(self) -> float:
        """How long a verify may take before the verifier counts as lost: max(1 s, 10 x the moving average)."""
        usual_s = self._replica.verify_s if self._replica else 0.0
        return _LAST_RESORT_S if self._pool.alone else max(_LEAST_DEADLINE_S, 10 * usual_s)

    async def open(self, ids: Sequence[int], patient: bool = False) -> SessionOpened:
        """Prefill `ids` on a verifier that may know their beginning and has few sessions, on another when that fails.

        `patient`: wait for full ones, too. Raises what the last one refused it with, Unavailable if there was none.
        """
        prefix = self._opening.salt.encode() + np.array(ids[:_PREFIX_TOKENS], "<u4").tobytes()
        until, refused = time.monotonic() + self._pool.failover_s, set[Replica]()
        load_s = self._pool.failover_s / _FAILOVER_LOADS
        absent = f"no verifier became available within {self._pool.failover_s:g} s; try again in about {load_s:.0f} s"
        last: CoppiceError = Unavailable(absent)
        while True:
            replica, self.preferred = self._pool.pick_for(prefix, refused)
            if replica is None:
                if time.monotonic() > until or (refused and not patient):
                    last.retry_after_s = load_s if isinstance(last, LOST) else last.retry_after_s
                    raise last
                refused.clear()
                await asyncio.sleep(_RETRY_S)
                continue
            try:
                return await self._open_on(replica, ids)
            except (Overloaded, InvalidField) as error:
                refused.add(replica)
                last = error
            except LOST as error:
                replica.cool_down()
                last = error

    async def _open_on(self, replica: Replica, ids: Sequence[int]) -> SessionOpened:
        self.close()
        self._streams += 1
        # A verifier may still hold the stream that was lost.
        opening = replace(self._opening, session=f"{self._opening.session}.{self._streams}", ids=list(ids))
        self._replica, self._call = replica, replica.stub.Verify()
        replica.sessions += 1
        opened: SessionOpened = await self._exchange(opening, self._pool.call_s if self._pool.alone else _PREFILL_S)
        self._opening = replace(self._opening, want_prompt_log_probs=False)  # they are needed once
        return opened

    async def reopen(self, ids: Sequence[int], steps: int, reason: CoppiceError) -> SessionOpened:
        """Prefill what is committed, after these steps, on another verifier. Raises `reason` at last, and as `open`."""
        self._losses += 1
        if self._losses > _MOST_LOSSES:
            raise reason
        if self._replica is not None:
            log.warning("session lost", verifier=self._replica.address, why=str(reason)[:200])
            self._replica.cool_down()
        self.close()
        async with self._pool.reopening:
            opened = await self.open(ids, patient=True)
        self._steps_before = steps
        return opened

    async def verify(self, step: VerifyStep) -> Verdict:
        """One tree. Raises one of LOST when the session is to be opened again."""
        began, replica = time.monotonic(), self._replica
        if self._steps_before:
            step = replace(step, fence=replace(step.fence, step=step.fence.step - self._steps_before))
        verdict: Verdict = await self._exchange(step, self.deadline_s)
        self._losses = 0
        if replica is not None:
            took = time.monotonic() - began
            replica.verify_s = 0.9 * (replica.verify_s or took) + 0.1 * took
            replica.backoff.succeed()
        return verdict

    def close(self) -> None:
        """End the stream; the verifier frees the session."""
        if self._call is not None and self._replica is not None:
            self._call.cancel()
            self._replica.sessions -= 1
        self._call = self._replica = None

    async def _exchange(self, question: OpenSession | VerifyStep, timeout_s: float) -> Any:
        """Ask and return an answer of the question's kind. One that does not fit the question is InternalError."""
        call, replica, target = self._call, self._replica, self._pool.target
        if call is None or replica is None:
            raise Unavailable("the session is not open")
        message = verifier.verify_request_to_wire(question)

        def give_up() -> None:
            call.inbox.end(DeadlineExceeded(f"the verifier at {replica.address} did not answer in {timeout_s:.1f} s"))

        timer = asyncio.get_running_loop().call_later(timeout_s, give_up)
        try:
            sent = time.perf_counter_ns()
            call.send(message)
            answer = await call.read()
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            timer.cancel()
        if answer is grpc.aio.EOF:
            raise Unavailable("the verifier ended the session")
        self.exchanged = sent, time.perf_counter_ns()
        vocab_size = target.vocab_size if target else MAX_TOKEN_ID + 1
        try:
            read = verifier.read_verify_response(answer)
            if isinstance(read, SessionOpened) and isinstance(question, OpenSession):
                _check_opened(read, question, vocab_size)
            elif isinstance(read, Verdict) and isinstance(question, VerifyStep):
                _check_verdict(read, question, self._opening, vocab_size)
            else:
                raise InvalidField("kind", "does not fit the question")
        except InvalidField as error:
            raise InternalError(f"the verifier at {replica.address} answered wrongly: {error}") from None
        return read


def _check_opened(opened: SessionOpened, opening: OpenSession, vocab_size: int) -> None:
    """Raise InvalidField unless a target of this width may open a session so."""
    length, features = len(opening.ids), opened.features
    scored = (length - 1) * opening.want_prompt_log_probs
    _require(
        fence=opened.fence.committed_len == length,
        next=_is_next(opened.next, opening, vocab_size),
        features=features is None or features.start + features.count == length,
        top=_is_top(opened.top, 1, opening, vocab_size),
        prompt_log_probs=len(opened.prompt_log_probs) == scored,
        prompt_top=_is_top(opened.prompt_top, scored, opening, vocab_size),
    )


def _check_verdict(verdict: Verdict, step: VerifyStep, opening: OpenSession, vocab_size: int) -> None:
    """Raise InvalidField unless it accepts a path of the step's tree, and fence and next root are those behind it."""
    accepted, root, before, fence = verdict.accepted, verdict.next, step.fence, verdict.fence
    tokens, parents, nodes = step.tree.tokens, step.tree.parents, range(1, len(step.tree) + 1)
    is_path = all(node in nodes and parents[node - 1] == at for at, node in zip((0, *accepted), accepted, strict=False))
    ids = [step.root, *(int(tokens[node - 1]) for node in accepted if is_path)]
    committed = before.step, before.committed_len + len(ids), committed_hash(ids, before.committed_hash)
    ended = committed[1] >= opening.max_len or (len(ids) > 1 and ids[-1] in opening.stop_ids)
    _require(
        accepted=is_path,
        verified=not verdict.pruned or {*accepted} <= {*verdict.verified} <= {*nodes},
        fence=(fence.step, fence.committed_len, fence.committed_hash) == committed,
        next=_is_next(root, opening, vocab_size) if root else ended,
        log_probs=len(verdict.log_probs) == len(accepted) * opening.want_log_probs,
        top=_is_top(verdict.top, len(accepted) + (root is not None), opening, vocab_size),
    )


def _is_next(root: NextRoot, opening: OpenSession, vocab_size: int) -> bool:
    row = root.row
    if row is None:
        return root.drawn_id is not None and root.drawn_id < vocab_size
    scored = row.raw_log_probs is not None or not opening.want_log_probs
    return scored and bool(row.ids[-1] < vocab_size) and bool((np.diff(row.ids) > 0).all())


def _is_top(top: Sequence[TopLogProbs], count: int, opening: OpenSession, vocab_size: int) -> bool:
    most = opening.top_log_probs
    of_width = all(0 < len(best.ids) <= most and best.ids.max() < vocab_size for best in top)
    return of_width and len(top) == (count if most else 0)


def _require(**fields: bool) -> None:
    """Raise InvalidField naming the first field that is not as it must be."""
    for name, is_right in fields.items():
        if not is_right:
            raise InvalidField(name, "does not fit the question")
