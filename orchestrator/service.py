"""GenerationService: checks a request, admits it, runs its step loop and streams what it emits."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import grpc

import coppice
from coppice.client.completion import StreamEvent
from coppice.config.settings import Settings
from coppice.errors import CoppiceError, InvalidField, Overloaded, Unavailable
from coppice.rpc.access import client_salt
from coppice.rpc.admission import Admission
from coppice.speculation.policy import Policy, outcomes, policy_names, sum_confidence
from coppice.speculation.tree import prune
from coppice.telemetry import OrchestratorMetrics
from coppice.v1 import generation_pb2
from coppice.wire import generation
from coppice.wire.drafter import OpenDraft
from coppice.wire.generation import ChatMessage, Chunk, Finished, GenerationRequest, ModelDescription, Started
from coppice.wire.verifier import OpenSession, SessionOpened, TargetDescription

from .account import Account
from .auto.arms import PLAIN, SINGLE, Arm
from .auto.chooser import Chooser, StepSeen
from .auto.text_estimates import TextEstimates
from .drafters import HeadPool, feature_layers
from .drafting import Drafting
from .encoder import Encoder
from .feedback import Signals
from .head_session import HeadSession
from .output import Output
from .policies import FixedPolicy, StepPolicy
from .prediction import KIND, check_usable
from .step import Committed, Step
from .step_loop import Decoding, Plan
from .text import TextStream, TokenBytes
from .tokenizer import TextCodec, no_room
from .verifiers import TargetPool, TargetSession


class Chunks:
    """Passes chunks on as they come, or `size` tokens at a time; the last one holds the rest."""

    def __init__(self, emit: Callable[[Chunk], None], size: int) -> None:
        """`size` 0 passes every commit on as it is."""
        self._emit, self._size = emit, size
        self._held: Chunk | None = None

    def add(self, chunk: Chunk) -> None:
        """Take in the tokens of a commit."""
        if not self._size:
            self._emit(chunk)
            return
        held = chunk if self._held is None else _joined(self._held, chunk)
        while len(held.ids) >= self._size:
            self._emit(_part(held, slice(None, self._size)))
            held = _part(held, slice(self._size, None))
        self._held = held if held.ids else None

    def flush(self) -> None:
        """Pass on what is left."""
        if self._held is not None:
            self._emit(self._held)
            self._held = None


def _joined(first: Chunk, second: Chunk) -> Chunk:
    return Chunk(
        text=first.text + second.text,
        ids=first.ids + second.ids,
        origins=first.origins + second.origins,
        pieces=first.pieces + second.pieces,
        log_probs=first.log_probs + second.log_probs,
        top=first.top + second.top,
    )


def _part(chunk: Chunk, part: slice) -> Chunk:
    pieces = chunk.pieces[part]
    return Chunk(
        "".join(pieces), chunk.ids[part], chunk.origins[part], pieces, chunk.log_probs[part], top=chunk.top[part]
    )


class AutoPolicy(StepPolicy):
    """Plays the arm that is chosen for all sessions, and tells what came of it."""

    def __init__(
        self, chooser: Chooser, text: TextEstimates, heads: Sequence[str], metrics: OrchestratorMetrics
    ) -> None:
        self._chooser, self._text, self._heads, self._metrics = chooser, text, heads, metrics
        self._arm = Arm(PLAIN, Policy(PLAIN, ()), ())
        self._learns = False  # whether the arm of the step that was observed last has several heads

    def heads(self, step: Step) -> Sequence[int]:
        """The heads of the arm; of a cascade the first one."""
        self._arm = self._chooser.decide(self._text, step.hint)
        self.policy = self._arm.policy
        return self._arm.first

    @property
    def soon(self) -> Sequence[int]:
        """The heads of what looks best for a text that begins."""
        return self._chooser.soon(self._text)

    def budget(self, most: int, hint: int | None) -> int:
        """As the verifier hints, by all texts; a prediction, and the rare tries at a hint of 0, draft all they may."""
        return min(most, hint) if hint and not self._text.is_predicted(self._arm) else most

    def more(self, step: Step) -> Sequence[int]:
        """The second head of a cascade, where the first one's tree promises too little."""
        rest = self._arm.heads[len(self._arm.first) :]
        return rest if rest and self._text.goes_on(sum_confidence(step.drafts[step.asked[0]].scored)) else ()

    def observe(self, step: Step) -> None:
        """Take in the step's seconds, and what it gained."""
        verdict = step.judged
        times = verdict.timings
        rows_ns = times.forward_ns - (times.plain_ns or times.forward_ns)
        seen = StepSeen(step.took_ns / 1e9, rows_ns / 1e9, len(verdict.accepted), step.asked, step.opening)
        self._chooser.observe(self._text, seen)
        self._learns = len(self._arm.heads) > 1
        self._metrics.auto_choices.labels(self._arm.name).inc()

    def learn(self, step: Step) -> None:
        """Take in what each head would have gained alone in a step of several."""
        verdict = step.judged
        nodes = len(verdict.verified) if verdict.pruned else step.budget
        if self._learns and nodes:  # where all of it was left out, the step says nothing of the heads
            for at in step.asked:
                tree, _ = prune(step.drafts[at].scored, nodes)
                self._text.gained(SINGLE + self._heads[at], int(outcomes(tree, step.offered)[1].sum()))

    def close(self) -> None:
        """End the text."""
        self._chooser.end(self._text)


P = TypeVar("P")

_MOST_UNREAD_BYTES = 1 << 20  # of one answer, before it is ended


class GenerationServicer:
    """One deployment: a target, its heads, its tokenizer."""

    def __init__(
        self,
        settings: Settings,
        target: TargetDescription,
        verifiers: TargetPool,
        heads: dict[str, HeadPool],
        codec: TextCodec | None,
        metrics: OrchestratorMetrics,
        signals: Signals | None = None,
    ) -> None:
        """`signals`: where the adapter is told of what heads miss; None while adaptation is off."""
        self.settings, self.target, self.verifiers = settings, target, verifiers
        self.signals = signals
        self.heads, self.codec, self.metrics = heads, codec, metrics
        self.encoder = Encoder(codec, target.max_len, settings.limits) if codec else None
        self.token_bytes = TokenBytes(codec.tokenizer if codec else None)
        wanted = settings.orchestrator.policy
        self.default_policy = Policy.parse(wanted, list(heads)) if wanted else Policy.default(list(heads))
        names = list(heads)
        self.policies = ("plain", *(f"single:{name}" for name in names), *(policy_names()[1:] if names else ()))
        for policy in self.policies:  # those of other packages are imported here, or refused
            Policy.parse(policy, names)
        self._choosers: dict[frozenset[str], Chooser] = {}  # of `auto`, by the heads it may ask
        bounds = settings.limits
        self.seats = Admission("sessions", bounds.sessions, bounds.queued, bounds.queue_s)

    def check_seats(self) -> None:
        """Raise Overloaded, and count it as a request's end, while a request could neither be admitted nor wait."""
        try:
            self.seats.check()
        except Overloaded as error:
            self.metrics.requests.labels(error.status.name.lower()).inc()
            raise

    @property
    def ready(self) -> bool:
        """Whether a verifier can be asked."""
        return any(replica.fit for replica in self.verifiers.replicas)

    async def encode(self, prompt: str | Sequence[ChatMessage], bare: bool = False) -> list[int]:
        """Ids of a text, without special tokens around it if `bare`, or of a conversation. Raises InvalidField."""
        if self.encoder is None:
            raise InvalidField("prompt", "this target has no tokenizer.json: send ids")
        return await self.encoder.encode(prompt, bare)

    async def Generate(
        self, message: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        """One answer."""

        def pack(event: StreamEvent) -> bytes:
            return generation.response_to_wire(event).SerializeToString()

        async with contextlib.aclosing(self.answer(message, pack, len)) as parts:
            async for part in parts:
                yield part

    async def answer(
        self, message: generation_pb2.GenerateRequest, pack: Callable[[StreamEvent], P], size: Callable[[P], int]
    ) -> AsyncGenerator[P, None]:
        """The events of one answer, each as `pack` makes it of `size` bytes. Raises CoppiceError.

        They are made beside the sending: no step waits for the client, and one that reads slowly holds bytes, not a
        seat.
        """
        events: asyncio.Queue[P | None] = asyncio.Queue()
        unread = 0

        def send(event: StreamEvent) -> None:
            nonlocal unread
            if unread > _MOST_UNREAD_BYTES:
                running.cancel()
            part = pack(event)
            unread += size(part)
            events.put_nowait(part)

        running = asyncio.create_task(self._answer(message, send))
        running.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (part := await events.get()) is not None:
                yield part
                unread -= size(part)
            if running.cancelled():
                raise Unavailable(f"more than {_MOST_UNREAD_BYTES} bytes of the answer wait to be read")
            running.result()
        finally:
            running.cancel()

    async def _answer(self, message: generation_pb2.GenerateRequest, send: Callable[[StreamEvent], None]) -> None:
        """Admit a request, decode it and count how it ended."""
        account, outcome = Account(self.metrics), "failed"
        try:
            request = generation.read_request(message, self.target.vocab_size, self.settings.limits)
            request = replace(request, sampling=request.sampling.with_seed())
            async with self.seats.admit():
                account.admitted()
                ids = await self._prompt_ids(request)
                request = replace(request, prediction_text=None, prediction_ids=await self._prediction_ids(request))
                finished = await self._decode(request, ids, self._plan(request, len(ids)), send, account)
            finished.timings.queue_ns = account.queue_ns
            send(finished)
            outcome = finished.finish_reason
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except CoppiceError as error:
            outcome = error.status.name.lower()
            raise
        finally:
            account.ended(outcome)

    async def _decode(
        self,
        request: GenerationRequest,
        ids: list[int],
        plan: Plan,
        send: Callable[[StreamEvent], None],
        account: Account,
    ) -> Finished:
        """Run the step loop. The client is told that its answer starts when a verifier has admitted it."""
        session = account.id
        pools = [self.heads[name] for name in plan.policy.heads]
        layers = await feature_layers(pools if plan.budget else [], "policy")
        if request.prediction_ids:
            check_usable([pool.kind for pool in pools])
        heads = [self._head_session(pool, session, request, plan) for pool in pools]
        prompt_tokens = len(ids) - len(request.resume_ids)
        opening = OpenSession(
            session=session,
            ids=[],
            sampling=request.sampling,
            stop_ids=plan.stop_ids,
            max_len=prompt_tokens + plan.max_new_tokens,
            feature_layers=layers,
            want_log_probs=request.want_log_probs,
            prompt_tokens=prompt_tokens,
            top_log_probs=request.top_log_probs,
            want_prompt_log_probs=request.want_prompt_log_probs,
            min_len=prompt_tokens + min(request.min_tokens, plan.max_new_tokens) if request.min_tokens else 0,
            salt=client_salt(),
        )
        chunks = Chunks(send, 0 if request.want_trees else self.settings.orchestrator.chunk_tokens)
        started = Started(prompt_tokens, plan.policy.name, plan.policy.heads, plan.budget, request.sampling.seed)

        stream = TextStream(self.token_bytes, request.stop, request.min_tokens)
        output = Output(request, prompt_tokens, stream, plan.stop_ids, plan.max_new_tokens, chunks.add)
        verifier = TargetSession(self.verifiers, opening)
        policy = self._policy(request, plan, ids[:prompt_tokens])
        drafting = Drafting(heads, policy, plan.draft_deadline_s)
        decoding = Decoding(request, plan, Committed(ids), verifier, drafting, policy, output, account)
        account.result, account.policy = output.result, plan.policy.name
        finished = False
        try:
            result = await decoding.run(lambda opened: send(_scored(started, request, ids[:prompt_tokens], opened)))
            finished = True
            return result
        finally:
            chunks.flush()
            verifier.close()
            policy.close()
            if self.signals is not None and finished and any(head.signal.learns for head in heads):
                self.signals.ended(session, decoding, heads)
            else:
                for head in heads:
                    head.close()

    def _policy(self, request: GenerationRequest, plan: Plan, prompt: list[int]) -> StepPolicy:
        """Who decides in the steps of a request. Texts that may ask the same heads learn from each other."""
        names = plan.policy.heads
        predicted = [name for name in names if request.prediction_ids and self.heads[name].kind == KIND]
        if plan.policy.name != "auto" or not plan.budget:
            whole = plan.whole_tree or bool(predicted)
            return FixedPolicy(plan.policy, range(len(names)) if plan.budget else (), whole)
        chooser = self._choosers.setdefault(frozenset(names), Chooser())
        text = TextEstimates(chooser.statistics, names, request.sampling.temperature > 0, prompt, predicted)
        return AutoPolicy(chooser, text, names, self.metrics)

    def _head_session(self, pool: HeadPool, session: str, request: GenerationRequest, plan: Plan) -> HeadSession:
        """One head of a request; it says what it misses when someone learns from that and it is of a kind that can."""
        learns = self.signals is not None and bool(pool.feature_layers) and plan.budget > 0
        predicted = (request.prediction_ids or ()) if pool.kind == KIND else ()
        misses = self.signals is not None and learns and self.signals.of_misses(pool.name)
        salt = client_salt() if pool.kind == KIND else ""
        opening = OpenDraft(session, [], request.sampling, request.coupled, None, request.pq, misses, predicted, salt)
        return HeadSession(pool, opening, self.target.vocab_size, learns)

    async def _prompt_ids(self, request: GenerationRequest) -> list[int]:
        """The prompt's ids and what was resumed. Raises InvalidField."""
        if request.ids is not None:
            ids = list(request.ids)
        else:
            ids = await self.encode(request.chat or () if request.text is None else request.text)
        if not ids:
            raise InvalidField("prompt", "holds no tokens")
        if request.stop and self.codec is None:
            raise InvalidField("stop", "this target has no tokenizer.json to find strings with")
        return [*ids, *request.resume_ids]

    async def _prediction_ids(self, request: GenerationRequest) -> tuple[int, ...]:
        """The ids of what the client expects of the answer. Raises InvalidField."""
        if not request.prediction_text:
            return request.prediction_ids or ()
        try:
            return tuple(await self.encode(request.prediction_text, bare=True))
        except InvalidField as error:
            raise InvalidField("prediction", str(error).partition(": ")[2]) from None

    def _plan(self, request: GenerationRequest, length: int) -> Plan:
        settings = self.settings.orchestrator
        policy = Policy.parse(request.policy, list(self.heads)) if request.policy else self.default_policy
        if request.pq and not policy.name.startswith("single:"):
            raise InvalidField("accept_rule", "p/q rejection is exact under single:HEAD only")
        prompt_tokens = length - len(request.resume_ids)
        room = self.target.max_len - prompt_tokens
        new = min(request.max_new_tokens or settings.max_new_tokens, room)
        if room <= 0:
            raise no_room(prompt_tokens, self.target.max_len)
        if len(request.resume_ids) > new:
            raise InvalidField("resume_ids", f"{len(request.resume_ids)} tokens are more than the limit of {new}")
        return Plan(
            policy=policy,
            budget=settings.budget if request.budget is None else request.budget,
            stop_ids=frozenset() if request.ignore_eos else frozenset(self.target.eos_ids),
            max_new_tokens=new,
            draft_deadline_s=settings.draft_deadline_ms / 1e3,
            whole_tree=(request.budget is not None and policy.name != "auto")
            or policy.name == "merge-full"
            or request.pq,
        )

    async def DescribeModel(
        self, message: generation_pb2.DescribeModelRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.DescribeModelResponse:
        """What is served and how."""
        return generation.model_to_wire(self.describe())

    def describe(self) -> ModelDescription:
        """What is served and how, now."""
        return ModelDescription(
            name=self.target.name,
            vocab_size=self.target.vocab_size,
            max_len=self.target.max_len,
            heads=tuple(self.heads),
            policies=self.policies,
            default_policy=self.default_policy.name,
            default_budget=self.settings.orchestrator.budget,
            has_tokenizer=self.codec is not None,
            has_chat_template=self.codec is not None and self.codec.has_chat_template,
            running=self.seats.used,
            version=coppice.__version__,
            repetition_penalty=self.target.repetition_penalty,
        )


def _scored(started: Started, request: GenerationRequest, prompt: list[int], opened: SessionOpened | None) -> Started:
    """An answer's beginning with the log-probabilities of its prompt, if they are wanted."""
    if opened is None or not request.want_prompt_log_probs:
        return started
    behind = slice(len(prompt) - 1)  # of resumed ids nothing is told
    scored, top = opened.prompt_log_probs[behind], opened.prompt_top[behind]
    return replace(started, prompt_ids=tuple(prompt), prompt_log_probs=scored, prompt_top=top)
