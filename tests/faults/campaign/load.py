"""Sessions that ask without a pause, and what became of every request, token by token."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from coppice.client.client import AsyncClient, Client
from coppice.client.completion import StreamEvent
from coppice.errors import CoppiceError, Overloaded
from coppice.speculation.sampling import SamplingParams
from coppice.wire.generation import Chunk, Finished, Origin
from lab import identity
from lab.options import own_prompts

PROMPT_LENGTH = 48  # characters or ids
REQUEST_S = 60.0  # after which a request has failed


Question = tuple[str, SamplingParams]
"""A prompt and how to draw: an answer is a function of these."""
Answers = Mapping[Question, tuple[int, ...]]
"""What plain decoding said to each question before any fault."""


@dataclass(slots=True)
class Stream:
    """One request as its client saw it. Times are time.monotonic()."""

    expected: tuple[int, ...]
    began: float = field(default_factory=time.monotonic)
    ids: list[int] = field(default_factory=list)
    """what the client was handed"""
    arrivals: list[float] = field(default_factory=list)
    """when tokens came"""
    drafted: int = 0
    """tokens of it that were accepted drafts"""
    ended: float | None = None
    failure: str = ""
    """why it failed"""
    left: bool = False
    """its client went away on purpose"""
    retry_after_s: float = 0.0
    """of one that was refused because there are too many"""

    def hear(self, event: StreamEvent) -> None:
        """Note what came; the end is to count what came before it."""
        if isinstance(event, Chunk):
            self.ids += event.ids
            self.arrivals.append(time.monotonic())
            self.drafted += sum(origin is Origin.DRAFT for origin in event.origins)
        if isinstance(event, Finished) and event.new_tokens != len(self.ids):
            self.failure = f"the end says {event.new_tokens} tokens, {len(self.ids)} were received"

    @property
    def wrong(self) -> int:
        """Tokens that are not plain's; of a complete answer also those that are missing."""
        complete = self.ended is not None and not self.failure and not self.left
        differing = sum(token != right for token, right in zip(self.ids, self.expected, strict=False))
        missing = len(self.expected) - len(self.ids)
        return differing + max(0, -missing) + (max(0, missing) if complete else 0)

    def silence(self, since: float, until: float) -> float:
        """The longest it went without a new token between two times, seconds; its end counts as one."""
        began, ended = max(since, self.began), min(until, self.ended if self.ended is not None else until)
        marks = [began, *(at for at in self.arrivals if began < at < ended), ended]
        return max((after - before for before, after in itertools.pairwise(marks)), default=0.0)


async def ask(
    client: AsyncClient,
    question: Question,
    stream: Stream,
    policy: str = "",
    pause_s: float = 0.0,
    leaves: Callable[[StreamEvent], bool] = lambda event: False,
) -> None:
    """One request, noted in `stream` while it runs, and whatever it fails with.

    `pause_s` is how long the client pauses behind each event, `leaves` says behind which one it goes away.
    """
    prompt, sampling = question
    options: dict[str, Any] = {"policy": policy, "sampling": sampling, "ignore_eos": True, "timeout": REQUEST_S}
    try:
        answer: Any = client.stream(prompt, max_new_tokens=len(stream.expected), **options)
        async with contextlib.aclosing(answer):
            async for event in answer:
                stream.hear(event)
                if leaves(event):
                    stream.left = True
                    break
                if pause_s:
                    await asyncio.sleep(pause_s)
    except CoppiceError as error:
        stream.failure = f"{error.status}: {error}"
        stream.retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else 0.0
    except asyncio.CancelledError:
        stream.left = True
        raise
    finally:
        stream.ended = time.monotonic()


def questions(address: str, prompts: int) -> list[Question]:
    """Short prompts, each to be answered greedily and by a seeded draw at T=1."""
    with Client(address) as client:
        texts = [text.prompt[:PROMPT_LENGTH] for text in own_prompts(client.describe(), prompts)]
    draws = (SamplingParams(), SamplingParams(temperature=1.0, seed=11))
    return [(text, sampling) for text in texts for sampling in draws]


async def plain_answers(address: str, asked: Sequence[Question], new_tokens: int) -> dict[Question, tuple[int, ...]]:
    """What plain decoding says to each question."""
    answers: Any = await asyncio.to_thread(identity.ask, address, asked, identity.Way("plain", sessions=4), new_tokens)  # type: ignore[arg-type]
    assert not [failure for failure in answers if isinstance(failure, str)], answers
    return dict(zip(asked, answers, strict=True))


class Load:
    """`sessions` clients, each with one request after another: an async context manager.

    Leaving it lets the requests that run come to their end.
    """

    def __init__(
        self, address: str, answers: Answers, sessions: int, policy: str = "", *, most: float = float("inf")
    ) -> None:
        """`most`: requests in all."""
        self.streams: list[Stream] = []
        self.refusals: list[float] = []
        """how long each refusal of a request too many took, seconds; it is asked again when the server said so"""
        self._address, self._answers, self._sessions, self._policy = address, list(answers.items()), sessions, policy
        self._most, self._stopping = most, False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        clients = [AsyncClient(self._address) for _ in range(self._sessions)]
        await asyncio.gather(*(client.describe() for client in clients))  # connecting is no part of a request
        self._tasks = [asyncio.create_task(self._session(*each)) for each in enumerate(clients)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def done(self) -> None:
        """Wait until all `most` requests have ended."""
        await asyncio.gather(*self._tasks)

    @property
    def answering(self) -> list[Stream]:
        """Requests that have not ended and have a first token."""
        return [stream for stream in self.streams if stream.ended is None and stream.ids]

    @property
    def tokens(self) -> int:
        """Received so far."""
        return sum(len(stream.ids) for stream in self.streams)

    async def _session(self, number: int, client: AsyncClient) -> None:
        async with client:
            while not self._stopping and len(self.streams) < self._most:
                question, expected = self._answers[number % len(self._answers)]
                stream = Stream(expected)
                self.streams.append(stream)
                await ask(client, question, stream, self._policy)
                number += self._sessions + 1  # the next one draws the other way
                if stream.retry_after_s:
                    self.refusals.append((stream.ended or math.inf) - stream.began)
                    self.streams.remove(stream)
                    await asyncio.sleep(stream.retry_after_s)
                elif stream.failure:
                    await asyncio.sleep(0.1)  # what refuses at once is not to be asked ten thousand times
