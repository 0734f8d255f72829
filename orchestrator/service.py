"""GenerationService: checks a request, admits it, runs its step loop and streams what it emits."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial

import grpc

import coppice
from coppice.adaptation.signals import Producer
from coppice.client.completion import StreamEvent
from coppice.config.settings import Settings
from coppice.config.token_bytes import TokenBytes
from coppice.errors import CoppiceError, InvalidField, Overloaded, Unavailable
from coppice.limits import NEW_TOKENS
from coppice.rpc.admission import Admission
from coppice.speculation.policy import Policy, policy_names
from coppice.v1 import generation_pb2
from coppice.wire import generation
from coppice.wire.drafter import OpenDraft
from coppice.wire.generation import ChatMessage, Chunk, GenerationRequest, ModelDescription, Started
from coppice.wire.verifier import OpenSession, SessionOpened, TargetDescription

from .auto import AutoPolicy, Rates
from .heads import HeadPool, HeadSession, feature_layers
from .loop import Account, Decoding, Output, StepPolicy
from .metrics import OrchestratorMetrics
from .targets import TargetPool, TargetSession
from .text import Encoder, TextCodec
from .tokens import client_salt

_MOST_UNREAD_BYTES = 1 << 20  # of one answer, before it is ended
_EVENT_BYTES, _TOKEN_BYTES, _NODE_BYTES = 256, 32, 128  # of an event that waits to be read, about
_PREDICTING = "lookup"  # kind of heads that draft from a prediction, and from a client's earlier texts


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
        signals: Producer | None = None,
    ) -> None:
        """`signals`: where the adapter is told of what heads miss; None while adaptation is off."""
        self.settings, self.target, self.verifiers = settings, target, verifiers
        self.signals = signals
        self.heads, self.codec, self.metrics = heads, codec, metrics
        self.encoder = Encoder(codec, target.max_len, settings.limits) if codec else None
        self.token_bytes = TokenBytes(codec.tokenizer if codec else None)
        policy, names = settings.orchestrator.policy, list(heads)
        self.default_policy = Policy.parse(policy, names) if policy else Policy.default(names)
        self.policies = ("plain", *(f"single:{name}" for name in names), *(policy_names()[1:] if names else ()))
        for policy in self.policies:  # those of other packages are imported here, or refused
            Policy.parse(policy, names)
        self._rates: dict[frozenset[str], Rates] = {}  # of `auto`, by the heads it may ask
        bounds = settings.limits
        self.seats = Admission("sessions", bounds.sessions, bounds.queued, bounds.queue_s)

    def check_seats(self) -> None:
        """Raise Overloaded, and count it as a request's end, while a request could neither be admitted nor wait."""
        try:
            self.seats.check()
        except Overloaded as error:
            self.metrics.requests.labels(error.status.lower()).inc()
            raise

    @property
    def ready(self) -> bool:
        """Whether a verifier can be asked."""
        return self.verifiers.num_fit() > 0

    async def encode(
        self, prompt: str | Sequence[ChatMessage], bare: bool = False, template_arguments: str = ""
    ) -> list[int]:
        """Ids of a text, without special tokens around it if `bare`, or of a conversation. Raises InvalidField."""
        if self.encoder is None:
            raise InvalidField("prompt", "this target has no tokenizer.json: send ids")
        return await self.encoder.encode(prompt, bare, template_arguments)

    async def Generate(
        self, message: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        async with contextlib.aclosing(self.answers([message], contextlib.nullcontext())) as events:
            async for _, event in events:
                yield generation.response_to_wire(event).SerializeToString()

    async def answers(
        self, messages: Sequence[generation_pb2.GenerateRequest], place: AbstractAsyncContextManager[None]
    ) -> AsyncGenerator[tuple[int, StreamEvent], None]:
        """The events of answers that are decoded side by side, each with its answer's number. Raises CoppiceError: when
        one fails, all end.

        place: held while they are decoded. They are made beside the sending: no step waits for the client, and one that
        reads slowly holds bytes, not a seat. Chunks that wait to be read become one.
        """
        waiting, news = deque[tuple[int, StreamEvent]](), asyncio.Event()
        unread = 0

        def send(number: int, event: StreamEvent) -> None:
            nonlocal unread
            if unread > _MOST_UNREAD_BYTES * len(messages):
                running.cancel()
            unread += _size(event)
            waiting.append((number, event))
            news.set()

        async def decode() -> None:
            async with place, asyncio.TaskGroup() as group:
                for number, message in enumerate(messages):
                    group.create_task(self._answer(message, partial(send, number)))

        running = asyncio.create_task(decode())
        running.add_done_callback(lambda _: news.set())
        try:
            while waiting or not running.done():
                if not waiting:
                    news.clear()
                    await news.wait()
                    continue
                number, event = waiting.popleft()
                taken = [event]
                while waiting and waiting[0][0] == number and _is_plain(event) and _is_plain(waiting[0][1]):
                    taken.append(waiting.popleft()[1])
                unread -= sum(map(_size, taken))  # what is being sent does not wait: it may be larger than the bound
                yield number, Chunk.joined(taken) if len(taken) > 1 else event  # type: ignore[arg-type]
            if running.cancelled():
                raise Unavailable(f"more than {_MOST_UNREAD_BYTES} bytes of the answer wait to be read")
            running.result()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _answer(self, message: generation_pb2.GenerateRequest, send: Callable[[StreamEvent], None]) -> None:
        """Admit a request, decode it and count how it ended."""
        account, outcome = Account(self.metrics), "failed"
        try:
            if message.max_new_tokens > (most := self.settings.limits.max_new_tokens):
                left = f"a context of {self.target.max_len} tokens leaves what the prompt does not take"
                raise InvalidField("max_new_tokens", f"{message.max_new_tokens} is outside 0..{most}; {left}")
            request = generation.read_request(message, self.target.vocab_size, self.settings.limits)
            request = replace(request, sampling=request.sampling.with_seed())
            async with self.seats.admit():
                account.admitted()
                ids, prediction = await self._encoded(request)
                request = replace(request, prediction_text=None, prediction_ids=prediction)
                await self._decode(request, ids, send, account)
            send(account.result)
            outcome = account.result.finish_reason
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except CoppiceError as error:
            outcome = error.status.lower()
            raise
        finally:
            account.ended(outcome)

    async def _decode(
        self, request: GenerationRequest, ids: list[int], send: Callable[[StreamEvent], None], account: Account
    ) -> None:
        """Run the step loop. The client is told that its answer starts when a verifier has admitted it."""
        result = account.result
        result.prompt_tokens = prompt_tokens = len(ids) - len(request.resume_ids)
        request, policy = self._settled(request, prompt_tokens)
        account.policy, prompt = policy.name, ids[:prompt_tokens]
        pools = [self.heads[name] for name in policy.heads]
        layers = feature_layers(pools if request.budget else [], "policy")
        kinds = {pool.kind for pool in pools}
        if request.prediction_ids and not {_PREDICTING, ""} & kinds:  # "": of one never reached
            names = ", ".join(sorted(kinds)) or "none"
            raise InvalidField("prediction", f"a {_PREDICTING} head drafts from it; heads asked are of kind: {names}")
        heads = [self._head_session(pool, account.id, request) for pool in pools]
        opening = OpenSession(
            session=account.id,
            ids=[],
            sampling=request.sampling,
            stop_ids=frozenset((*request.stop_token_ids, *(() if request.ignore_eos else self.target.eos_ids))),
            max_len=prompt_tokens + request.max_new_tokens,
            feature_layers=layers,
            want_log_probs=request.want_log_probs,
            prompt_tokens=prompt_tokens,
            top_log_probs=request.top_log_probs,
            want_prompt_log_probs=request.want_prompt_log_probs,
            min_len=prompt_tokens + min(request.min_tokens, request.max_new_tokens) if request.min_tokens else 0,
            salt=client_salt(),
            grammar=request.grammar,
        )
        verifier, steps = TargetSession(self.verifiers, opening), self._step_policy(request, policy)
        settings = self.settings.orchestrator
        output = Output(request, self.token_bytes, opening.stop_ids, send, settings.stream_interval)
        deadline_s = settings.draft_deadline_ms / 1e3
        decoding = Decoding(request, ids, verifier, heads, steps, deadline_s, output, account)
        try:
            await decoding.run(lambda opened: send(_started(request, policy, prompt, opened)))
            result.finish_reason = output.finish or result.finish_reason
            for head in heads:
                if self.signals is not None and head.learns:
                    self.signals.query(head.pool.name, head.record(account.id, result))
        finally:
            verifier.close()
            steps.close()
            for head in heads:
                head.close()

    def _step_policy(self, request: GenerationRequest, policy: Policy) -> StepPolicy:
        """Who decides in the steps of a request. Texts that may ask the same heads learn from each other."""
        names = policy.heads
        predicted = [name for name in names if request.prediction_ids and self.heads[name].kind == _PREDICTING]
        if policy.name == "auto" and request.budget:
            rates = self._rates.setdefault(frozenset(names), Rates())
            is_sampled = request.sampling.temperature > 0
            return AutoPolicy(rates, names, self.metrics.auto_choices, is_sampled, predicted)
        return StepPolicy(policy, range(len(names)) if request.budget else (), request.whole_tree, bool(predicted))

    def _head_session(self, pool: HeadPool, session: str, request: GenerationRequest) -> HeadSession:
        """One head of a request; it reports its misses when it is of a kind that an adapter trains on them."""
        learns = self.signals is not None and bool(pool.feature_layers) and bool(request.budget)
        misses = self.signals is not None and learns and self.signals.demand_for(pool.name) == "misses"
        opening = OpenDraft(session, [], request.sampling, request.coupled, None, request.pq, misses)
        if pool.kind == _PREDICTING:
            opening = replace(opening, prediction=request.prediction_ids or (), salt=client_salt())
        return HeadSession(pool, opening, self.target.vocab_size, learns)

    async def _encoded(self, request: GenerationRequest) -> tuple[list[int], tuple[int, ...]]:
        """Ids of the prompt and of what was resumed, and of the prediction; checks the grammar. Raises InvalidField."""
        if request.ids is not None:
            ids = list(request.ids)
        else:
            prompt = request.chat or () if request.text is None else request.text
            ids = await self.encode(prompt, template_arguments=request.template_arguments)
        if not ids:
            raise InvalidField("prompt", "holds no tokens")
        if request.stop and self.codec is None:
            raise InvalidField("stop", "this target has no tokenizer.json to find strings with")
        prediction = request.prediction_ids or ()
        try:
            if request.prediction_text:
                prediction = tuple(await self.encode(request.prediction_text, bare=True))
        except InvalidField as error:
            raise InvalidField("prediction", str(error).partition(": ")[2]) from None
        if request.grammar is not None:
            if self.encoder is None or not self.token_bytes.context_free:
                raise InvalidField("grammar", "this target has no tokenizer that says what each id adds to a text")
            if request.ignore_eos:
                raise InvalidField("ignore_eos", "a grammar says where the answer ends")
            await self.encoder.check(request.grammar)
        return [*ids, *request.resume_ids], prediction

    def _settled(self, request: GenerationRequest, prompt_tokens: int) -> tuple[GenerationRequest, Policy]:
        """The request with this deployment's values where it leaves them open, and its policy. Raises InvalidField."""
        settings = self.settings.orchestrator
        policy = Policy.parse(request.policy, list(self.heads)) if request.policy else self.default_policy
        if request.pq and not policy.name.startswith("single:"):
            raise InvalidField("accept_rule", "p/q rejection is exact under single:HEAD only")
        room = self.target.max_len - prompt_tokens
        new = min(request.max_new_tokens or min(NEW_TOKENS, self.settings.limits.max_new_tokens), room)
        if room <= 0:
            raise InvalidField("prompt", f"{prompt_tokens} tokens leave no room in a context of {self.target.max_len}")
        if len(request.resume_ids) > new:
            raise InvalidField("resume_ids", f"{len(request.resume_ids)} tokens are more than the limit of {new}")
        budget = settings.budget if request.budget is None else request.budget
        named = request.budget is not None and policy.name != "auto"
        whole = named or request.pq
        return replace(request, budget=budget, max_new_tokens=new, whole_tree=whole), policy

    async def DescribeModel(
        self, message: generation_pb2.DescribeModelRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.DescribeModelResponse:
        return generation.model_to_wire(self.describe())

    def describe(self) -> ModelDescription:
        """What is served and how, now."""
        return ModelDescription(
            name=self.target.names[0],
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


def _size(event: StreamEvent) -> int:
    """About as many bytes as an event's part of the answer has."""
    ids: Sequence[int] = getattr(event, "ids", ()) or getattr(event, "prompt_ids", ())
    tree = getattr(event, "tree", None)
    return _EVENT_BYTES + _TOKEN_BYTES * len(ids) + _NODE_BYTES * len(tree.tokens if tree else ())


def _is_plain(event: StreamEvent) -> bool:
    return isinstance(event, Chunk) and event.tree is None


def _started(request: GenerationRequest, policy: Policy, prompt: list[int], opened: SessionOpened | None) -> Started:
    """An answer's beginning, with its prompt and the log-probabilities of that if they are wanted."""
    started = Started(len(prompt), policy.name, policy.heads, request.budget or 0, request.sampling.seed)
    is_scored, behind = opened is not None and request.want_prompt_log_probs, slice(len(prompt) - 1)
    if request.want_prompt_ids or is_scored:
        started = replace(started, prompt_ids=tuple(prompt))
    if opened is None or not is_scored:
        return started
    return replace(started, prompt_log_probs=opened.prompt_log_probs[behind], prompt_top=opened.prompt_top[behind])
