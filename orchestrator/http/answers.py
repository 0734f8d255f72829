"""OpenAI's answers, whole or in parts, made of a request's events."""

from __future__ import annotations

import itertools
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from coppice.client.completion import Accumulator, Completion
from coppice.messages.generation import Chunk, FinishReason, Started
from coppice.messages.steps import TopLogProbs

from ..service import Event
from .bodies import ChatBody, CompletionBody

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

    def log_probs(self, tokens: Sequence[Told], offset: int) -> Json | None:
        """The log-probabilities of tokens, of which the first one's text begins at `offset`."""
        if self.chat:
            content = [
                {**_entry(one.text, one.log_prob), "top_logprobs": [_entry(*best) for best in one.top]}
                for one in tokens
            ]
            return {"content": content, "refusal": None}
        offsets = itertools.accumulate((len(one.text) for one in tokens[:-1]), initial=offset)
        return {
            "tokens": [one.text for one in tokens],
            "token_logprobs": [one.log_prob for one in tokens],
            "top_logprobs": [dict(one.top) if one.top else None for one in tokens],
            "text_offset": list(offsets) if tokens else [],
        }


def _entry(text: str, log_prob: float | None) -> Json:
    return {"token": text, "logprob": log_prob, "bytes": list(text.encode())}


class Told(NamedTuple):
    """A token as clients are told of it: its text, its log-probability (None at the prompt's begin), the best ones."""

    text: str
    log_prob: float | None
    top: list[tuple[str, float]]


class Choice:
    """One answer as its events come in."""

    def __init__(self, seed: int, text_of: Callable[[int], str]) -> None:
        """text_of: the text of an id by itself."""
        self.folded = Accumulator(seed)
        self._text_of = text_of
        self.prompt: list[Told] = []
        self.tokens: list[Told] = []
        self.chars = 0
        """of the tokens' texts"""

    def add(self, event: Event) -> list[Told]:
        """Take in an event; returns what its tokens' log-probabilities are, when they are wanted."""
        self.folded.add(event)
        if isinstance(event, Started) and event.prompt_ids:
            scored = (None, *event.prompt_log_probs)
            self.prompt = self._told(event.prompt_ids, scored, [None, *event.prompt_top] if event.prompt_top else [])
        if not isinstance(event, Chunk):
            return []
        new = self._told(event.ids, event.log_probs, event.top) if event.log_probs else []
        self.tokens += new
        self.chars += sum(len(one.text) for one in new)
        return new

    def _told(
        self, ids: Sequence[int], log_probs: Sequence[float | None], top: Sequence[TopLogProbs | None]
    ) -> list[Told]:
        best = [
            [
                (self._text_of(token), value)
                for token, value in zip(row.ids.tolist(), row.log_probs.tolist(), strict=True)
            ]
            if row is not None
            else []
            for row in top or [None] * len(ids)
        ]
        return list(map(Told, map(self._text_of, ids), log_probs, best))


class Answer:
    """An HTTP request's answer: its choices in one body, or as parts of a stream."""

    def __init__(
        self, model: str, body: CompletionBody | ChatBody, seeds: Sequence[int], text_of: Callable[[int], str]
    ) -> None:
        """text_of: the text of an id by itself."""
        self.shape, self._metrics = Shape(isinstance(body, ChatBody)), body.include_metrics
        self._usage_too = body.stream_options.include_usage
        self._scored = body.logprobs is not None and body.logprobs is not False
        self._echo = isinstance(body, CompletionBody) and body.echo
        self._only_prompt = self._echo and not body.max_tokens
        self.choices = [Choice(seed, text_of) for seed in seeds]
        self._head: Json = {"id": self.shape.prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model}

    def add(self, index: int, event: Event) -> list[Told]:
        """Take in an event of a choice."""
        return self.choices[index].add(event)

    def whole(self) -> Json:
        """The body of a request that is not streamed."""
        answers = [choice.folded.completion() for choice in self.choices]
        choices = []
        for index, (choice, answer) in enumerate(zip(self.choices, answers, strict=True)):
            text, tokens = ("", []) if self._only_prompt else (answer.text, choice.tokens)
            if self._echo:
                text, tokens = "".join(one.text for one in choice.prompt) + text, [*choice.prompt, *tokens]
            log_probs = self.shape.log_probs(tokens, 0) if self._scored else None
            choices.append(self.shape.choice(index, text, log_probs, REASONS[answer.finish_reason], part=False))
        head = {"object": self.shape.kind(part=False), **self._head, "choices": choices}
        return {**head, "usage": usage(answers), **self._ours(answers)}

    def parts(self, index: int, event: Event) -> Iterator[Json]:
        """Take in an event of a choice, and make the parts of the stream that it is."""
        choice, before = self.choices[index], self.choices[index].chars
        new = self.add(index, event)
        null: Json = {"usage": None} if self._usage_too else {}  # as OpenAI sends it in every part but the last one
        if isinstance(event, Started):
            if self.shape.chat:
                opened = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
                yield {**self._part([{**opened, "finish_reason": None}]), **null}
        elif isinstance(event, Chunk):
            log_probs = self.shape.log_probs(new, before) if self._scored else None
            if event.text or log_probs:
                yield {**self._part([self.shape.choice(index, event.text, log_probs, None, part=True)]), **null}
        else:
            ended = self.shape.choice(index, "", None, REASONS[event.finish_reason], part=True)
            if self.shape.chat:
                ended["delta"] = {}
            yield {**self._part([ended]), **self._ours([choice.folded.completion()]), **null}

    def last_parts(self) -> Iterator[Json]:
        """What comes behind all choices: of a stream that was asked for it the usage, with no choice."""
        if self._usage_too:
            yield {**self._part([]), "usage": usage([choice.folded.completion() for choice in self.choices])}

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
    details = {
        "accepted_prediction_tokens": sum(answer.accepted_prediction_tokens for answer in answers),
        "rejected_prediction_tokens": sum(answer.rejected_prediction_tokens for answer in answers),
    }
    counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    return {**counts, "completion_tokens_details": details}


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
