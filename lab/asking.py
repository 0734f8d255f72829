"""How everything here asks: ways to answer the same prompts, and a verdict on every answer."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from coppice.client.client import Client
from coppice.client.completion import Completion
from coppice.speculation.sampling import SamplingParams

if TYPE_CHECKING:
    from coppice.testing.reference import Reference, Verdict

K = TypeVar("K")
T = TypeVar("T")
Ids = tuple[int, ...]
Prompt = str | Ids
Asked = Sequence[tuple[Ids, SamplingParams]]
Group = tuple[Sequence[Ids], SamplingParams]
"""prompts that are asked together"""
Act = Callable[[Sequence[Ids], SamplingParams], T]
"""what is done with a group"""
Ask = Act[list[Completion]]
"""one way to answer a group"""
GREEDY = SamplingParams()


def answers_to(client: Client, prompts: Sequence[Prompt], sessions: int = 1, **options: Any) -> list[Completion]:
    """The answers to all prompts, so many at once, end-of-text ids included like any other."""
    with ThreadPoolExecutor(sessions) as pool:
        return list(pool.map(lambda prompt: client.generate(prompt, ignore_eos=True, **options), prompts))


def asking(client: Client, new_tokens: int, sessions: int = 1, **options: Any) -> Ask:
    """The way that asks a stack with these options of a request, so many prompts at once."""

    def ask(prompts: Sequence[Ids], sampling: SamplingParams) -> list[Completion]:
        return answers_to(client, prompts, sessions, sampling=sampling, max_new_tokens=new_tokens, **options)

    return ask


def judged(
    reference: Reference,
    asked: Asked,
    answers: Mapping[K, Sequence[Completion]],
    own: Sequence[Ids] | None = None,
    free: Container[K] = (),
) -> dict[K, list[Verdict]]:
    """A verdict on every answer of every way, but for ways in `free`, which need not say what the others say.

    Answers are compared with `own`, transformers' own; without these with the first way's, and those are re-scored.
    """
    first = next(iter(answers))
    expected = own or [answer.ids for answer in answers[first]]
    return {
        way: [
            reference.judge(prompt, answer.ids, sampling, None if own is None and way == first else wanted)
            for (prompt, sampling), answer, wanted in zip(asked, its, expected, strict=True)
        ]
        if way not in free
        else []
        for way, its in answers.items()
    }
