"""OpenAI's answers, whole or in parts, made of a request's events."""

from __future__ import annotations

import itertools
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from coppice.client.completion import Accumulator, Completion
from coppice.messages.generation import Chunk, Finished, FinishReason, Started

Event = Started | Chunk | Finished
Json = dict[str, Any]

REASONS: dict[FinishReason, str] = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "stop"}


@dataclass(frozen=True, slots=True)
class Shape:
    """What completions and chat completions call things."""

    chat: bool

    @property
    def prefix(self) -> str:
        """What ids begin with."""
        return "chatcmpl-" if self.chat else "cmpl-"

    def kind(self, part: bool) -> str:
        """The `object` of an answer, or of a part of one."""
        if not self.chat:
            return "text_completion"
        return "chat.completion.chunk" if part else "chat.completion"

    def choice(self, index: int, text: str, log_probs: Json | None, reason: str | None, part: bool) -> Json:
        """A choice, whole or a part of it."""
        said: Json = {"text": text}
        if self.chat:
            said = {"delta": {"content": text}} if part else {"message": {"role": "assistant", "content": text}}
        return {"index": index, **said, "logprobs": log_probs, "finish_reason": reason}

    def log_probs(self, pieces: Sequence[str], values: Sequence[float], offset: int) -> Json | None:
        """The log-probabilities of tokens, of which the first one's text begins at `offset`; None without any."""
        if not values:
            return None
        if self.chat:
            tokens = [
                {"token": piece, "logprob": value, "bytes": list(piece.encode()), "top_logprobs": []}
                for piece, value in zip(pieces, values, strict=True)
            ]
            return {"content": tokens, "refusal": None}
        offsets = itertools.accumulate(map(len, pieces[:-1]), initial=offset)
        return {
            "tokens": list(pieces),
            "token_logprobs": list(values),
            "top_logprobs": None,
            "text_offset": list(offsets),
        }


@dataclass(slots=True)
class Choice:
    """One answer as its events come in."""

    index: int
    seed: int
    folded: Accumulator = field(init=False)
    pieces: list[str] = field(default_factory=list)
    chars: int = 0

    def __post_init__(self) -> None:
        self.folded = Accumulator(self.seed)

    def add(self, event: Event) -> None:
        """Take in an event."""
        self.folded.add(event)
        if isinstance(event, Chunk):
            self.pieces += event.pieces
            self.chars += len(event.text)


class Answer:
    """An HTTP request's answer: its choices in one body, or as parts of a stream."""

    def __init__(self, model: str, shape: Shape, seeds: Sequence[int], metrics: bool) -> None:
        """metrics: also tell vLLM's of speculative decoding."""
        self.shape, self._metrics = shape, metrics
        self.choices = [Choice(index, seed) for index, seed in enumerate(seeds)]
        self._head: Json = {"id": shape.prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model}

    def add(self, index: int, event: Event) -> None:
        """Take in an event of a choice."""
        self.choices[index].add(event)

    def whole(self) -> Json:
        """The body of a request that is not streamed."""
        answers = [choice.folded.completion() for choice in self.choices]
        choices = [
            self.shape.choice(
                choice.index,
                answer.text,
                self.shape.log_probs(choice.pieces, answer.log_probs, 0),
                REASONS[answer.finish_reason],
                part=False,
            )
            for choice, answer in zip(self.choices, answers, strict=True)
        ]
        head = {"object": self.shape.kind(part=False), **self._head, "choices": choices}
        return {**head, "usage": usage(answers), **self._ours(answers)}

    def parts(self, index: int, event: Event, usage_too: bool) -> Iterator[Json]:
        """What an event of a choice adds to the stream. usage_too: OpenAI then sends `usage: null` in every part."""
        choice = self.choices[index]
        null: Json = {"usage": None} if usage_too else {}
        if isinstance(event, Started):
            if self.shape.chat:
                opened = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
                yield {**self._part([{**opened, "finish_reason": None}]), **null}
        elif isinstance(event, Chunk):
            log_probs = self.shape.log_probs(event.pieces, event.log_probs, choice.chars - len(event.text))
            if event.text or log_probs:
                yield {**self._part([self.shape.choice(index, event.text, log_probs, None, part=True)]), **null}
        else:
            ended = self.shape.choice(index, "", None, REASONS[event.finish_reason], part=True)
            if self.shape.chat:
                ended["delta"] = {}
            yield {**self._part([ended]), **self._ours([choice.folded.completion()]), **null}

    def usage_part(self) -> Json:
        """The last part of a stream that was asked for usage: no choice, all tokens."""
        return {**self._part([]), "usage": usage([choice.folded.completion() for choice in self.choices])}

    def _part(self, choices: Sequence[Json]) -> Json:
        return {"object": self.shape.kind(part=True), **self._head, "choices": list(choices)}

    def _ours(self, answers: Sequence[Completion]) -> Json:
        """What Coppice says of its steps; of several choices a list."""
        told = [
            {
                "tau": answer.tau,
                "policy": answer.policy,
                "heads": list(answer.heads),
                "accept_lengths": list(answer.accept_lengths),
                "seed": answer.seed,
            }
            for answer in answers
        ]
        ours: Json = {"coppice": told[0] if len(told) == 1 else told}
        if self._metrics:
            ours["metrics"] = {"speculative_decoding": speculative_decoding(answers)}
        return ours


def usage(answers: Sequence[Completion]) -> Json:
    """OpenAI's count of tokens: choices of one prompt count it once each, as every one of them prefills it."""
    prompt, new = sum(answer.prompt_tokens for answer in answers), sum(answer.new_tokens for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def speculative_decoding(answers: Sequence[Completion]) -> Json:
    """vLLM's metrics of a request: steps that verified drafts, and how many drafts they accepted."""
    steps = [
        (length - 1, nodes)
        for answer in answers
        for length, nodes in zip(answer.accept_lengths, answer.verified_nodes, strict=True)
        if nodes
    ]
    accepted, drafted = sum(length for length, _ in steps), sum(nodes for _, nodes in steps)
    counts = Counter(length for length, _ in steps)
    return {
        "mean_acceptance_length": 1 + accepted / len(steps) if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": [counts[length] for length in range(max(counts, default=-1) + 1)],
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
    }
