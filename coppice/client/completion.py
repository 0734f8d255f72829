"""A stream's events folded into one answer; the sync and the async client share it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

from coppice.wire.generation import Chunk, Finished, Origin, Started, StepTree

StreamEvent = Started | Chunk | Finished

# What `generate --json` shows of an answer, and the sums of its Timings.
_JSON = (
    *("text", "ids", "finish_reason", "prompt_tokens", "cached_tokens", "new_tokens", "steps", "tau", "tokens_per_s"),
    *("ttft_s", "accept_lengths", "policy", "heads", "seed"),
    *("accepted_prediction_tokens", "rejected_prediction_tokens"),
)
_JSON_TIMINGS = ("queue", "prefill", "draft", "transport", "verify", "accept", "commit")


@dataclass(kw_only=True)
class Completion(Finished):
    """One answer and its last event, else "cancelled" without figures. `ids` and the like have an entry a new token."""

    ids: tuple[int, ...]
    text: str = ""
    log_probs: tuple[float, ...] = ()
    """raw log-probabilities of the target; empty unless asked for"""
    origins: tuple[Origin, ...]
    policy: str = ""
    heads: tuple[str, ...] = ()
    seed: int
    ttft_s: float
    """from the call to the first token, as the client saw it"""
    decode_s: float
    """from the first token to the last, prefill left out"""
    trees: tuple[StepTree, ...] = ()
    """what each step verified; empty unless asked for"""
    pieces: tuple[str, ...] = ()
    """the text of each id's contribution"""

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second after the first one; 0 for an answer too short to time."""
        return (self.new_tokens - 1) / self.decode_s if self.new_tokens > 1 and self.decode_s > 0 else 0.0

    @property
    def summary(self) -> str:
        """Its speed, and how much of it was drafted, as one line."""
        drafted = self.origins.count(Origin.DRAFT) / max(1, self.new_tokens)
        speed = f"{self.new_tokens} tokens, tau {self.tau:.2f}, {self.tokens_per_s:.1f} tokens/s"
        return f"{speed}, {self.policy}, {drafted:.0%} drafted"

    def to_json(self) -> dict[str, Any]:
        """What `coppice generate --json` prints."""
        timings = {name: getattr(self.timings, f"{name}_ns") for name in _JSON_TIMINGS}
        shown = {name: getattr(self, name) for name in _JSON}
        lists = {name: list(value) for name, value in shown.items() if isinstance(value, tuple)}
        return {**shown, **lists, "timings_ns": timings}


class Accumulator:
    """Folds the events of one stream, in order, into a Completion; asked before the last event, into a partial one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._called = clock, clock()
        self._first = self._last = self._called  # when the first and the last token came
        self.started = Started(0, "", (), 0)
        self._finished: Finished | None = None
        self._chunks: list[Chunk] = []

    def add(self, event: StreamEvent) -> None:
        """Take in the next event."""
        if isinstance(event, Started):
            self.started = event
        elif isinstance(event, Finished):
            self._finished = event
        else:
            self._last = self._clock()
            if not self._chunks:
                self._first = self._last
            self._chunks.append(event)

    def completion(self) -> Completion:
        """The answer so far."""
        started, chunks = self.started, self._chunks
        joined: dict[str, Any] = {
            name: tuple(chain.from_iterable(getattr(chunk, name) for chunk in chunks))
            for name in ("ids", "log_probs", "origins", "pieces")
        }
        end = self._finished or Finished("cancelled", started.prompt_tokens, len(joined["ids"]), [], [], [])
        return Completion(
            **{field.name: getattr(end, field.name) for field in fields(end)},
            **{name: getattr(started, name) for name in ("policy", "heads", "seed")},
            **joined,
            text="".join(chunk.text for chunk in chunks),
            ttft_s=self._first - self._called,
            # The server's clock is not blurred by chunks that arrive together.
            decode_s=(not end.resumed and end.timings.decode_ns / 1e9) or self._last - self._first,
            trees=tuple(chunk.tree for chunk in chunks if chunk.tree is not None),
        )
