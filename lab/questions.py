"""Prompts as a target's ids: known, and checked against its context, before anything is started."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from coppice.errors import InvalidField
from coppice.prompts import FilePrompt, demo_prompts, read_prompts
from coppice.stack.spec import StackSpec
from coppice.testing.reference import TargetText
from coppice.wire.generation import ModelDescription
from lab.options import Options


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt as ids; the benchmark is its file where there are several files, else its category."""

    ids: tuple[int, ...]
    benchmark: str = ""
    later: tuple[tuple[int, ...], ...] = ()
    """of a conversation: what stands between this answer and the next, and so on"""
    name: str = ""  # its place for people

    def longest(self, new_tokens: int) -> int:
        """Tokens of the whole conversation, at most."""
        return len(self.ids) + new_tokens + sum(len(between) + new_tokens for between in self.later)

    def next(self, answer: Sequence[int]) -> Question:
        """The conversation's next question, behind the answer to this one."""
        between, *later = self.later
        return replace(self, ids=(*self.ids, *answer, *between), later=tuple(later))


def prompt_ids(options: Options, spec: StackSpec) -> list[tuple[int, ...]]:
    """The ids of the prompts that are asked; of a conversation, of its first turn. Raises InvalidField."""
    return [question.ids for question in read_questions(options, spec)[0]]


def read_questions(options: Options, spec: StackSpec) -> tuple[list[Question], list[Question]]:
    """Those that are asked, and those to warm up with.

    Those that do not fit into the context with all their answers are left out, and named on stderr. Raises InvalidField
    for a target without a chat template, and for too few questions.
    """
    text = TargetText(spec.target)
    context = text.context(spec.settings().verifier.kv_tokens)
    if options.chat and not text.has_chat_template:
        raise InvalidField("chat", "this target has no chat template")
    asked, warming = list[Question](), list[Question]()
    names, count = benchmark_names(options.prompts) if options.prompts else ["prompts"], options.n + options.warm_up
    for file, name in zip(options.prompts or (None,), names, strict=True):
        fit: list[Question] = []
        for question in _questions(file, name, options, text):
            if len(fit) == count:
                break
            if (tokens := question.longest(options.max_new_tokens)) <= context.tokens:
                fit.append(question)
            else:
                print(f"coppice: left out, {question.name}: {tokens} tokens of {context}", file=sys.stderr)
        if len(fit) < (count if options.warm_up else 1):
            needed = f"{options.n} and {options.warm_up} to warm up with" if options.warm_up else "any"
            prompts = read_prompts(file) if file else demo_prompts()
            there = sorted({prompt.category for prompt in prompts if prompt.category})
            among = f"; categories there: {', '.join(there)}" if options.category else ""
            reason = f"{len(fit)} in {name} fit the category and the context, too few for {needed}{among}"
            raise InvalidField("prompts", reason)
        asked += fit[: options.n]
        warming += fit[options.n :]
    return asked, warming


def _questions(file: Path | None, name: str, options: Options, text: TargetText) -> Iterator[Question]:
    """A file's questions in order, or of Coppice's own as many as are wanted."""
    categories = options.category or ()
    for prompt in read_prompts(file) if file else own_prompts(text, options.n + options.warm_up, categories):
        if categories and prompt.category not in categories:
            continue
        benchmark = name if len(options.prompts or ()) > 1 else prompt.category or name
        if isinstance(prompt.prompt, tuple):
            yield Question(prompt.prompt, benchmark, name=prompt.name)
            continue
        turns = (prompt.prompt, *prompt.later)
        between = [
            text.encode_between(before, after, options.chat) for before, after in zip(turns, prompt.later, strict=False)
        ]
        yield Question(text.encode(prompt.prompt, options.chat), benchmark, tuple(between), prompt.name)


def own_prompts(text: TargetText | ModelDescription, count: int, categories: Sequence[str] = ()) -> list[FilePrompt]:
    """`count` of Coppice's own prompts, of all categories in turn; random ids for a target without a tokenizer."""
    if text.has_tokenizer:
        by_category: dict[str, list[FilePrompt]] = {}
        for prompt in demo_prompts():
            if not categories or prompt.category in categories:
                by_category.setdefault(prompt.category, []).append(prompt)
        return [prompt for turn in zip_longest(*by_category.values()) for prompt in turn if prompt is not None][:count]
    rng = random.Random(0)  # noqa: S311
    return [
        FilePrompt(tuple(rng.randrange(text.vocab_size) for _ in range(8 + 5 * number)), where=f"random {number + 1}")
        for number in range(count)
    ]


def benchmark_names(files: Sequence[Path]) -> list[str]:
    """A name for each file: its own, or its folder's where several are called alike (gsm8k/question.jsonl), or all."""
    full = [file.resolve() for file in files]
    ways = [file.stem for file in full], [file.parent.name for file in full], list(map(str, full))
    return next(names for names in ways if len(set(names)) == len(set(full)))
