"""What `coppice bench run` asks: known, and checked against the target's context, before anything is started."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from coppice.bench.options import file_prompts
from coppice.bench.target_text import TargetText
from coppice.engine.context import Context
from coppice.errors import InvalidField
from coppice.prompts.files import FilePrompt


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt as ids; the benchmark is its file where there are several files, else its category."""

    ids: tuple[int, ...]
    benchmark: str = ""
    source: FilePrompt | None = None
    later: tuple[tuple[int, ...], ...] = ()
    """of a conversation: what stands between this answer and the next, and so on"""
    turn: int = 0

    def longest(self, new_tokens: int) -> int:
        """Tokens of the whole conversation, at most."""
        return len(self.ids) + new_tokens + sum(len(between) + new_tokens for between in self.later)

    def next(self, answer: Sequence[int]) -> Question:
        """The conversation's next question, behind the answer to this one."""
        between, *later = self.later
        return replace(self, ids=(*self.ids, *answer, *between), later=tuple(later), turn=self.turn + 1)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which questions are asked, and how."""

    files: Sequence[Path] = ()
    """none: Coppice's own prompts"""
    count: int
    """the first ones of every file"""
    warm_up: int = 0
    """those after them"""
    category: str | None = None
    chat: bool = False
    """whether a text is sent as a user's message"""
    new_tokens: int = 0
    context: Context
    skip_long: bool = False


def read_questions(wanted: Wanted, text: TargetText) -> tuple[list[Question], list[Question], list[str]]:
    """Those that are asked, those to warm up with, and what is said of those that are too long and left out.

    Raises InvalidField: for a target without a chat template, too few questions, and, unless they are to be left out,
    those that do not fit into the context with all their answers, which it names.
    """
    if wanted.chat and not text.has_chat_template:
        raise InvalidField("chat", "this target has no chat template")
    asked: list[Question] = []
    warming: list[Question] = []
    long: list[str] = []
    names = benchmark_names(wanted.files) if wanted.files else ["prompts"]
    number = wanted.count + wanted.warm_up
    for file, name in zip(wanted.files or (None,), names, strict=True):
        fit: list[Question] = []
        known = len(long)
        for question in _questions(file, name, wanted, text):
            if len(fit) + (0 if wanted.skip_long else len(long) - known) == number:
                break
            tokens = question.longest(wanted.new_tokens)
            if tokens <= wanted.context.tokens:
                fit.append(question)
            else:
                long.append(f"{question.source.name if question.source else name}: {tokens} tokens")
        if wanted.warm_up and len(fit) < number and (wanted.skip_long or not long):
            why = f"there are {len(fit)} prompts in {name}, too few for {wanted.count} and {wanted.warm_up} to warm up"
            raise InvalidField("warm_up", f"{why} with")
        asked += fit[: wanted.count]
        warming += fit[wanted.count :]
    if long and not (asked and wanted.skip_long):
        many = f"{len(long)} prompts do" if len(long) > 1 else "a prompt does"
        why = f"{many} not fit, with {wanted.new_tokens} new tokens an answer, into a context of {wanted.context}"
        raise InvalidField("prompts", f"{why}; --skip-long goes on without: {'; '.join(long)}")
    return asked, warming, long


def _questions(file: Path | None, name: str, wanted: Wanted, text: TargetText) -> Iterator[Question]:
    """A file's questions in order, or of Coppice's own as many as are wanted."""
    most = None if file else wanted.count + wanted.warm_up
    for one in file_prompts(file, most, text, wanted.category):
        benchmark = name if len(wanted.files) > 1 else one.category or name
        if isinstance(one.prompt, tuple):
            yield Question(one.prompt, benchmark, one)
            continue
        turns = (one.prompt, *one.later)
        between = [
            text.encode_between(before, after, wanted.chat) for before, after in zip(turns, one.later, strict=False)
        ]
        yield Question(text.encode(one.prompt, wanted.chat), benchmark, one, tuple(between))


def benchmark_names(files: Sequence[Path]) -> list[str]:
    """A name for each file: its own, or its folder's where several are called alike (gsm8k/question.jsonl), or all."""
    full = [file.resolve() for file in files]
    ways = [file.stem for file in full], [file.parent.name for file in full], list(map(str, full))
    return next(names for names in ways if len(set(names)) == len(set(full)))
