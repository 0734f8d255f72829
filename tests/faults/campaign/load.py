"""Sessions that ask without a pause, and what became of every request, token by token."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from coppice.client.client import AsyncClient, Attempts, Client, Options, Prompt
from coppice.client.completion import Accumulator, StreamEvent
from coppice.errors import CoppiceError
from coppice.speculation.sampling import SamplingParams
from coppice.wire.generation import Chunk, Finished, Origin
from lab.questions import own_prompts
from tests.faults.campaign.history import History

PROMPT_LENGTH = 48  # characters or ids
REQUEST_S = 60.0  # after which a request has failed


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and how to draw: an answer is a function of these."""

    prompt: str | tuple[int, ...]
    sampling: SamplingParams


Answers = Mapping[Question, tuple[int, ...]]
"""What plain decoding said to each question before any fault."""


@dataclass(slots=True)
class Stream:
    """One request as its client saw it. Times are time.monotonic()."""

    expected: tuple[int, ...]
    began: float
    ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    """when tokens came"""
    drafted: int = 0
    """tokens of it that were accepted drafts"""
    ended: float | None = None
    failure: str = ""
    """why it failed"""
    left: bool = False
    """its client went away on purpose"""
    history: History = field(default_factory=History)
    """everything that came, whichever attempt it was of"""

    def hear(self, event: StreamEvent) -> None:
        """Note the tokens that came."""
        if isinstance(event, Chunk):
            self.ids += event.ids
            self.arrivals.append(time.monotonic())
            self.drafted += sum(origin is Origin.DRAFT for origin in event.origins)

    @property
    def wrong(self) -> int:
        """Tokens that are not plain's; of a complete answer also those that are missing."""
        differing = sum(token != wanted for token, wanted in zip(self.ids, self.expected, strict=False))
        surplus = max(0, len(self.ids) - len(self.expected))
        return differing + surplus + (max(0, len(self.expected) - len(self.ids)) if self.complete else 0)

    @property
    def complete(self) -> bool:
        """Whether its client was told the whole answer, as far as it knows."""
        return self.ended is not None and not self.failure and not self.left

    @property
    def violations(self) -> list[str]:
        """What in its history breaks a rule."""
        return self.history.violations(self.expected, self.complete)

    def silence(self, since: float, until: float) -> float:
        """The longest it went without a new token between two times, seconds; its end counts as one."""
        began, ended = max(since, self.began), min(until, self.ended if self.ended is not None else until)
        marks = [began, *(at for at in self.arrivals if began < at < ended), ended]
        return max((after - before for before, after in itertools.pairwise(marks)), default=0.0)


class HistoryClient(AsyncClient):
    """A client whose streams are recorded."""

    _into: History

    async def __aenter__(self) -> Self:
        return self

    def recorded(self, history: History, prompt: Prompt, options: Options) -> AsyncIterator[StreamEvent]:
        """As `stream`; every event is noted in the history."""
        self._into = history
        return self.stream(prompt, **options)

    def _call(self, caller: str, prompt: Prompt, options: Options) -> tuple[Attempts, Accumulator]:
        call, answer = super()._call(caller, prompt, options)
        self._into.follow(call)
        return call, answer


async def ask(
    client: HistoryClient,
    question: Question,
    stream: Stream,
    policy: str = "",
    pause_s: float = 0.0,
    leaves: Callable[[StreamEvent], bool] = lambda event: False,
) -> None:
    """One request, noted in `stream` while it runs, and whatever it fails with.

    `pause_s` is how long the client pauses behind each event, `leaves` says behind which one it goes away.
    """
    options: Options = {
        "policy": policy,
        "sampling": question.sampling,
        "max_new_tokens": len(stream.expected),
        "ignore_eos": True,
        "timeout": REQUEST_S,
    }
    try:
        finished = False
        events = client.recorded(stream.history, question.prompt, options)
        async with contextlib.aclosing(events) as answer:  # type: ignore[type-var]
            async for event in answer:
                finished = finished or isinstance(event, Finished)
                stream.hear(event)
                if leaves(event):
                    stream.left = True
                    break
                if pause_s:
                    await asyncio.sleep(pause_s)
        if not (finished or stream.left):
            stream.failure = "the stream ended without its last event"
    except CoppiceError as error:
        stream.failure = f"{error.status.name}: {error}"
    except asyncio.CancelledError:
        stream.left = True
        raise
    finally:
        stream.ended = time.monotonic()


def questions(address: str, prompts: int) -> list[Question]:
    """Short prompts, each to be answered greedily and by a seeded draw at T=1."""
    with Client(address) as client:
        texts = [one.prompt[:PROMPT_LENGTH] for one in own_prompts(client.describe(), prompts)]
    draws = (SamplingParams(), SamplingParams(temperature=1.0, seed=11))
    return [Question(text, sampling) for text in texts for sampling in draws]


async def plain_answers(address: str, asked: Iterable[Question], new_tokens: int) -> dict[Question, tuple[int, ...]]:
    """What plain decoding says to each question. Raises what a request is refused with."""
    gate = asyncio.Semaphore(8)
    async with AsyncClient(address) as client:

        async def one(question: Question) -> tuple[Question, tuple[int, ...]]:
            async with gate:
                answer = await client.generate(
                    question.prompt,
                    policy="plain",
                    sampling=question.sampling,
                    max_new_tokens=new_tokens,
                    ignore_eos=True,
                )
            return question, answer.ids

        return dict(await asyncio.gather(*map(one, asked)))


def rotated(address: str, by: int) -> str:
    """The same addresses in another order, so that sessions start on all orchestrators."""
    parts = address.split(",")
    by %= len(parts)
    return ",".join(parts[by:] + parts[:by])


class Load:
    """`sessions` clients, each with one request after another: an async context manager.

    Leaving it lets the requests that run come to their end.
    """

    def __init__(self, address: str, answers: Answers, sessions: int, policy: str = "") -> None:
        self.streams: list[Stream] = []
        self._address, self._answers, self._sessions, self._policy = address, answers, sessions, policy
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._session(number)) for number in range(self._sessions)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)

    @property
    def running(self) -> list[Stream]:
        """Requests that have not ended."""
        return [stream for stream in self.streams if stream.ended is None]

    @property
    def answering(self) -> list[Stream]:
        """Those of them with a first token."""
        return [stream for stream in self.running if stream.ids]

    @property
    def tokens(self) -> int:
        """Received so far."""
        return sum(len(stream.ids) for stream in self.streams)

    async def _session(self, number: int) -> None:
        asked = list(self._answers.items())
        async with HistoryClient(rotated(self._address, number)) as client:
            while not self._stopping:
                question, expected = asked[number % len(asked)]
                stream = Stream(expected, time.monotonic())
                self.streams.append(stream)
                await ask(client, question, stream, self._policy)
                number += self._sessions + 1  # the next one draws the other way
                if stream.failure:
                    await asyncio.sleep(0.1)  # what refuses at once is not to be asked ten thousand times
