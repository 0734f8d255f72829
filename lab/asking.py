"""How everything here asks: ways to answer the same prompts, in turns, and a verdict on every answer."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from coppice.client.client import Client
from coppice.client.completion import Completion
from coppice.speculation.sampling import SamplingParams
from coppice.training.progress import Progress

if TYPE_CHECKING:
    from coppice.testing.reference import Verdict

K = TypeVar("K")
Ids = tuple[int, ...]
Prompt = str | Ids
Asked = Sequence[tuple[Ids, SamplingParams]]
Ask = Callable[[Sequence[Ids], SamplingParams], list[Completion]]
"""one way to answer prompts that are asked together"""
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


def in_turn(
    ways: Mapping[K, Ask], prompts: Sequence[Ids], sampling: SamplingParams, number: int, progress: Progress
) -> dict[K, list[Completion]]:
    """Every way's answers to prompts that are asked together; for groups of odd numbers the last way is the first."""
    answers = {}
    for way in list(ways)[:: -1 if number % 2 else 1]:
        answers[way] = ways[way](prompts, sampling)
        progress.add(len(prompts))
    return {way: answers[way] for way in ways}


def timed(ways: Mapping[K, Ask], prompts: Sequence[Ids], progress: Progress) -> dict[K, list[Completion]]:
    """Every way's greedy answers, one prompt at a time, in turns; the first prompt is asked before, uncounted."""
    in_turn(ways, prompts[:1], GREEDY, 1, progress)
    groups = [in_turn(ways, [prompt], GREEDY, number, progress) for number, prompt in enumerate(prompts)]
    return {way: [answer for group in groups for answer in group[way]] for way in ways}


def judged(
    reference: Any,
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
            reference.judge(prompt, answer.ids, sampling, None if own is None and way == first else ids)
            for (prompt, sampling), answer, ids in zip(asked, its, expected, strict=True)
        ]
        if way not in free
        else []
        for way, its in answers.items()
    }
