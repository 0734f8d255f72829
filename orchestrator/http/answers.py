"""OpenAI's answers, whole or in parts, made of a request's events."""

from __future__ import annotations

import itertools
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from coppice.client.completion import Accumulator, Completion, StreamEvent
from coppice.messages.generation import Chunk, Finished, FinishReason, Started
from coppice.messages.steps import TopLogProbs

from .bodies import ChatBody, CompletionBody

Json = dict[str, Any]
TextOf = Callable[[int], str]
"""The text of an id by itself"""

REASONS: dict[FinishReason, str] = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "stop"}
LEAST_LOG_PROB = -9999.0
"""as OpenAI has it: JSON has no infinity"""
_BROKEN = "\ufffd"  # stands for bytes that are no character yet


class Told(NamedTuple):
    """A token as clients are told of it: its text, its log-probability (None at the prompt's begin), the best ones."""

    text: str
    log_prob: float | None
    top: list[tuple[str, float]]


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
            "top_logprobs": [dict(reversed(one.top)) if one.top else None for one in tokens],
            "text_offset": list(offsets) if tokens else [],
        }


def _entry(text: str, log_prob: float | None) -> Json:
    return {"token": text, "logprob": log_prob, "bytes": None if _BROKEN in text else list(text.encode())}


class Choice:
    """One answer as its events come in."""

    def __init__(self, echo: str, text_of: TextOf) -> None:
        """echo: the text of the prompt, if the answer begins with it."""
        self.folded = Accumulator()
        self.echo, self._text_of = echo, text_of
        self.prompt: list[Told] = []
        self.tokens: list[Told] = []
        self.chars = 0
        """of the texts of all tokens whose log-probabilities were told, the prompt's too"""

    def add(self, event: StreamEvent) -> list[Told]:
        """Take in an event; returns what its tokens' log-probabilities are, when they are wanted."""
        self.folded.add(event)
        if isinstance(event, Started) and event.prompt_ids:
            top = (None, *event.prompt_top) if event.prompt_top else ()
            new = self.prompt = self._told(event.prompt_ids, (None, *event.prompt_log_probs), top)
        elif isinstance(event, Chunk) and event.log_probs:
            new = self._told(event.ids, event.log_probs, event.top)
            self.tokens += new
        else:
            return []
        self.chars += sum(len(one.text) for one in new)
        return new

    def _told(
        self, ids: Sequence[int], log_probs: Sequence[float | None], top: Sequence[TopLogProbs | None]
    ) -> list[Told]:
        return [
            Told(self._text_of(token), None if value is None else _finite(value), self._best(row))
            for token, value, row in zip(ids, log_probs, top or itertools.repeat(None, len(ids)), strict=True)
        ]

    def _best(self, row: TopLogProbs | None) -> list[tuple[str, float]]:
        if row is None:
            return []
        return list(zip(map(self._text_of, row.ids.tolist()), map(_finite, row.log_probs.tolist()), strict=True))


def _finite(log_prob: float) -> float:
    return max(LEAST_LOG_PROB, log_prob)


class Answer:
    """An HTTP request's answer: its choices in one body, or as parts of a stream."""

    def __init__(self, model: str, body: CompletionBody | ChatBody, echoes: Sequence[str], text_of: TextOf) -> None:
        """echoes: what each choice's text begins with."""
        self.shape, self._body = Shape(isinstance(body, ChatBody)), body
        self._only_prompt = body.echoes and body.max_tokens == 0
        self.choices = [Choice(echo, text_of) for echo in echoes]
        self._head: Json = {"id": self.shape.prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model}

    def add(self, index: int, event: StreamEvent) -> list[Told]:
        """Take in an event of a choice."""
        return self.choices[index].add(event)

    def whole(self) -> Json:
        """The body of a request that is not streamed."""
        answers = [choice.folded.completion() for choice in self.choices]
        choices = []
        for index, (choice, answer) in enumerate(zip(self.choices, answers, strict=True)):
            text, tokens, reason = answer.text, choice.tokens, REASONS[answer.finish_reason]
            if self._only_prompt:
                text, tokens, reason = "", [], "length"
            log_probs = self.shape.log_probs([*choice.prompt, *tokens], 0) if self._body.scored else None
            choices.append(self.shape.choice(index, choice.echo + text, log_probs, reason, part=False))
        head = {"object": self.shape.kind(part=False), **self._head, "choices": choices}
        return {**head, "usage": self._usage(answers), **self._ours(answers)}

    def parts(self, index: int, event: StreamEvent) -> Iterator[Json]:
        """Take in an event of a choice, and make the parts of the stream that it is."""
        choice, before = self.choices[index], self.choices[index].chars
        new = self.add(index, event)
        null: Json = {"usage": None} if self._body.usage_in_stream else {}  # in every part but the last one
        if isinstance(event, Started) and self.shape.chat:
            opened = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            yield {**self._part([{**opened, "finish_reason": None}]), **null}
        elif isinstance(event, Finished):
            reason = "length" if self._only_prompt else REASONS[event.finish_reason]
            ended = self.shape.choice(index, "", None, reason, part=True)
            if self.shape.chat:
                ended["delta"] = {}
            yield {**self._part([ended]), **self._ours([choice.folded.completion()]), **null}
        elif isinstance(event, Started) or not self._only_prompt:
            text = choice.echo if isinstance(event, Started) else event.text
            log_probs = self.shape.log_probs(new, before) if self._body.scored else None
            if text or new:
                yield {**self._part([self.shape.choice(index, text, log_probs, None, part=True)]), **null}

    def last_parts(self) -> Iterator[Json]:
        """What comes behind all choices: of a stream that was asked for it the usage, with no choice."""
        if self._body.usage_in_stream:
            yield {**self._part([]), "usage": self._usage([choice.folded.completion() for choice in self.choices])}

    def _part(self, choices: Sequence[Json]) -> Json:
        return {"object": self.shape.kind(part=True), **self._head, "choices": list(choices)}

    def _usage(self, answers: Sequence[Completion]) -> Json:
        """OpenAI's count of tokens, in which a prompt counts once for all of its choices."""
        prompt = sum(answer.prompt_tokens for answer in answers[:: self._body.n])
        new = 0 if self._only_prompt else sum(answer.new_tokens for answer in answers)
        details = {
            "accepted_prediction_tokens": sum(answer.accepted_prediction_tokens for answer in answers),
            "rejected_prediction_tokens": sum(answer.rejected_prediction_tokens for answer in answers),
        }
        counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        cached = {"cached_tokens": sum(answer.cached_tokens for answer in answers[:: self._body.n])}
        return {**counts, "prompt_tokens_details": cached, "completion_tokens_details": details}

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
        if self._body.include_metrics:
            ours["metrics"] = {"speculative_decoding": speculative_decoding(answers)}
        return ours


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
