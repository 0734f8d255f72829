"""Every event that every client received, and the rules that they are checked by afterwards.

As in etcd's robustness tests, what clients saw is recorded while faults happen and judged when all is over.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from coppice.client.client import Attempts
from coppice.client.completion import StreamEvent
from coppice.errors import CoppiceError
from coppice.wire.generation import Chunk, Finished

_requests = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Event:
    """What came from a server, before the client made one answer of several attempts.

    `kind` is started, chunk or finished; `ids` are a chunk's. `held` is how many tokens the attempt was told to go on
    behind, `new_tokens` how many it made as its end says.
    """

    attempt: int
    kind: str
    ids: tuple[int, ...] = ()
    held: int = 0
    new_tokens: int = 0


@dataclass(slots=True)
class History:
    """One request's events, in the order in which they came."""

    request: int = field(default_factory=lambda: next(_requests))
    attempt: int = 1
    events: list[Event] = field(default_factory=list)

    def note(self, event: StreamEvent, held: int = 0) -> None:
        """Add what just came."""
        ids = event.ids if isinstance(event, Chunk) else ()
        new_tokens = event.new_tokens if isinstance(event, Finished) else 0
        self.events.append(Event(self.attempt, type(event).__name__.lower(), ids, held, new_tokens))

    def follow(self, call: Attempts) -> None:
        """Note from now on what a call hears, and when it is tried again."""
        hear, delay_after = call.hear, call.delay_after

        def noted(event: StreamEvent) -> StreamEvent | None:
            self.note(event, len(call.message.resume_ids))
            return hear(event)

        def tried_again(failure: CoppiceError, final: bool = False) -> float:
            delay = delay_after(failure, final)
            self.attempt += 1
            return delay

        call.hear, call.delay_after = noted, tried_again  # type: ignore[method-assign]

    def violations(self, plain: Sequence[int], complete: bool) -> list[str]:
        """What breaks a rule. `complete`: the client was told the whole answer, as far as it knows."""
        broken = [*_order(self.events), *_tokens(self.events, plain)]
        ends = sum(event.kind == "finished" for event in self.events)
        got = sum(len(event.ids) for event in self.events)
        if ends > 1 or (complete and not ends):
            broken.append(f"{ends} ends")
        if complete and got < len(plain):
            broken.append(f"{len(plain) - got} tokens are missing at the end")
        return [f"request {self.request}: {what}" for what in broken]


def _order(events: Sequence[Event]) -> Iterator[str]:
    """Each attempt begins once, before its chunks, goes on behind what was received, and nothing follows an end."""
    received, begun, latest, ended = 0, set[int](), 0, False
    for event in events:
        where = f"attempt {event.attempt}"
        if ended:
            yield f"{where}: {event.kind} after the end"
        if event.attempt < latest:
            yield f"{where}: {event.kind} after attempt {latest} began"
        if event.kind == "started":
            if event.attempt in begun:
                yield f"{where}: started twice"
            if event.held != received:
                yield f"{where}: went on behind {event.held} tokens, {received} were received"
            begun.add(event.attempt)
        elif event.attempt not in begun:
            yield f"{where}: {event.kind} before it started"
        received += len(event.ids)
        if event.kind == "finished" and event.held + event.new_tokens != received:
            yield f"{where}: the end says {event.new_tokens} tokens, {received - event.held} were received"
        latest, ended = max(latest, event.attempt), ended or event.kind == "finished"


def _tokens(events: Sequence[Event], plain: Sequence[int]) -> Iterator[str]:
    """Behind one another the chunks are plain decoding's tokens: the first that is not is told, as twice or lost."""
    ids = [(token, event.attempt) for event in events for token in event.ids]
    for at, (token, attempt) in enumerate(ids):
        if at >= len(plain):
            yield f"attempt {attempt}: {len(ids) - len(plain)} tokens too many"
            return
        if token != plain[at]:
            rest = [other for other, _ in ids[at:]]
            twice = at > 0 and rest[: len(plain) - at + 1] == list(plain[at - 1 : at - 1 + len(rest)])
            lost = rest == list(plain[at + 1 : at + 1 + len(rest)])
            how = "the one before it came twice" if twice else "it was lost" if lost else f"{token} came"
            yield f"attempt {attempt}: token {at} of plain's is {plain[at]}, {how}"
            return
