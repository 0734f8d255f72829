"""A stream's events folded into one answer; the sync and the async client share it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from coppice.messages.generation import Chunk, Finished, FinishReason, Origin, Started, StepTree, Timings

StreamEvent = Started | Chunk | Finished

# The sums of Timings that `generate --json` shows.
_JSON_TIMINGS = ("queue", "prefill", "draft", "transport", "verify", "accept", "commit")


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What an answer's last event says. The tuples have one entry a step.

    Without that event `finish_reason` is "cancelled" and the rest is empty.
    """

    finish_reason: FinishReason
    prompt_tokens: int
    new_tokens: int
    accept_lengths: tuple[int, ...]
    routed: tuple[int, ...]
    """index into `heads` of the verified tree, -1 none, -2 a union"""
    verified_nodes: tuple[int, ...]
    late_drafts: int = 0
    bad_drafts: int = 0
    timings: Timings = field(default_factory=Timings)
    resumed: int = 0
    """times that another server went on with it; what is told by step, and timings, are then of the last one alone"""
    accepted_prediction_tokens: int = 0
    """tokens of the prediction that were accepted as drafts, each counted once"""
    rejected_prediction_tokens: int = 0
    """those that were verified and never accepted"""
    cached_tokens: int = 0
    """of the prompt, that were not prefilled, as an earlier request of the same client began with them"""

    @property
    def steps(self) -> int:
        """Target forwards after the prefill."""
        return len(self.accept_lengths)

    @property
    def tau(self) -> float:
        """Committed tokens per target forward, root included; the first token costs no step. 1 without a step."""
        return sum(self.accept_lengths) / self.steps if self.steps else 1.0


@dataclass(frozen=True, kw_only=True)
class Completion(Ending):
    """One answer. `ids`, and what is parallel to it, has one entry a new token."""

    text: str
    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    """raw log-probabilities of the target; empty unless asked for"""
    origins: tuple[Origin, ...]
    policy: str
    heads: tuple[str, ...]
    seed: int
    ttft_s: float
    """from the call to the first token, as the client saw it"""
    decode_s: float
    """from the first token to the last, prefill left out"""
    trees: tuple[StepTree, ...] = ()
    """what each step verified; empty unless asked for"""

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second after the first one; 0 for an answer too short to time."""
        return (self.new_tokens - 1) / self.decode_s if self.new_tokens > 1 and self.decode_s > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """What `coppice generate --json` prints."""
        return {
            "text": self.text,
            "ids": list(self.ids),
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "new_tokens": self.new_tokens,
            "steps": self.steps,
            "tau": self.tau,
            "tokens_per_s": self.tokens_per_s,
            "ttft_s": self.ttft_s,
            "accept_lengths": list(self.accept_lengths),
            "policy": self.policy,
            "heads": list(self.heads),
            "seed": self.seed,
            "accepted_prediction_tokens": self.accepted_prediction_tokens,
            "rejected_prediction_tokens": self.rejected_prediction_tokens,
            "timings_ns": {name: getattr(self.timings, f"{name}_ns") for name in _JSON_TIMINGS},
        }


class Accumulator:
    """Folds the events of one stream, in order, into a Completion; asked before the last event, into a partial one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._called = clock()
        self._first = self._last = self._called  # when the first and the last token came
        self._started = Started(0, "", (), 0)
        self._finished: Finished | None = None
        self._text: list[str] = []
        self._ids: list[int] = []
        self._origins: list[Origin] = []
        self._log_probs: list[float] = []
        self._trees: list[StepTree] = []

    def add(self, event: StreamEvent) -> None:
        """Take in the next event."""
        if isinstance(event, Started):
            self._started = event
        elif isinstance(event, Finished):
            self._finished = event
        else:
            self._last = self._clock()
            if not self._ids:
                self._first = self._last
            self._text.append(event.text)
            self._ids += event.ids
            self._origins += event.origins
            self._log_probs += event.log_probs
            if event.tree is not None:
                self._trees.append(event.tree)

    def completion(self) -> Completion:
        """The answer so far."""
        started, prompt_tokens, new_tokens = self._started, self._started.prompt_tokens, len(self._ids)
        end = self._finished or Finished("cancelled", prompt_tokens, new_tokens, [], [], [])
        return Completion(
            text="".join(self._text),
            ids=tuple(self._ids),
            log_probs=tuple(self._log_probs),
            origins=tuple(self._origins),
            finish_reason=end.finish_reason,
            prompt_tokens=end.prompt_tokens,
            new_tokens=end.new_tokens,
            accept_lengths=tuple(end.accept_lengths),
            routed=tuple(end.routed),
            verified_nodes=tuple(end.verified_nodes),
            policy=started.policy,
            heads=started.heads,
            seed=started.seed,
            ttft_s=self._first - self._called,
            # The server's clock is not blurred by chunks that arrive together.
            decode_s=(not end.resumed and end.timings.decode_ns / 1e9) or self._last - self._first,
            late_drafts=end.late_drafts,
            bad_drafts=end.bad_drafts,
            timings=end.timings,
            trees=tuple(self._trees),
            resumed=end.resumed,
            accepted_prediction_tokens=end.accepted_prediction_tokens,
            rejected_prediction_tokens=end.rejected_prediction_tokens,
            cached_tokens=end.cached_tokens,
        )
