"""Streams of queries whose kind changes, of our own making: nobody's prompts, and none that a head was trained on."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product

TURN = 40
"""queries before a stream that turns goes on with another kind of text"""
WHO = (
    "a little dog named Rex", "a small girl named Lily", "an old man called Mr. Green", "a happy frog",
    "a tiny bird named Kiki", "two brothers, Tim and Joe", "a brave knight", "a shy cat", "a boy named Oscar",
    "a big elephant", "a young pig named Pinky", "a kind queen", "a red fox", "a clever mouse named Pip",
    "a girl with a blue hat", "a farmer and his horse", "a sleepy bear", "a rabbit named Snow",
)  # fmt: skip
WHAT = (
    "who loved to jump in puddles", "who wanted to find a new friend", "who lost something very important",
    "who lived by the sea", "who could not sleep at night", "who found a shiny key", "who was afraid of the dark",
    "who wanted to learn to swim", "who had a secret garden",
)  # fmt: skip
OPENINGS = ("Once upon a time, there was {} {}.", "One day, there was {} {}.", "Long ago there lived {} {}.")
VERBS = (
    "read", "write", "count", "merge", "find", "remove", "sort", "check", "parse", "join", "split", "update",
)  # fmt: skip
NOUNS = (
    "lines", "values", "names", "items", "words", "files", "keys", "records", "numbers", "nodes", "paths", "options",
)  # fmt: skip
SIGNATURES = (
    'def {0}_{1}({1}, default=None):\n    """{2} the {1} and return the result."""\n',
    'class {3}{4}:\n    """{2} {1}."""\n\n    def __init__(self, {1}):\n',
    'import os\nimport sys\n\n\ndef {0}_all_{1}(path, {1}):\n    """{2} all {1} of a file."""\n',
)

SUMS = (
    "Question: {0} has {1} {2} and buys {3} more. Then {0} gives away {4}. How many {2} does {0} have now?\nAnswer:",
    "Question: A box holds {1} {2}. {0} has {3} such boxes and loses {4} {2}. How many {2} are left?\nAnswer:",
    "Question: {0} sells {1} {2} on Monday and {3} on Tuesday, each for {4} dollars. What does {0} earn?\nAnswer:",
)
PEOPLE = ("Anna", "Ben", "Carla", "David", "Emma", "Frank", "Grace", "Henry", "Irene", "Jack", "Karen", "Leo")
GOODS = ("apples", "books", "coins", "eggs", "flowers", "marbles", "pencils", "stamps", "tickets", "cards")


@dataclass(frozen=True, slots=True)
class StreamQuery:
    """One query of a stream."""

    part: str
    """which part of the stream it belongs to"""
    prompt: str


def stories() -> list[str]:
    """Openings of children's stories, all different, shuffled."""
    return _shuffled([opening.format(who, what) for who, what, opening in product(WHO, WHAT, OPENINGS)])


def programs() -> list[str]:
    """Beginnings of Python files, all different, shuffled."""
    made = [
        signature.format(verb, noun, verb.capitalize(), noun.capitalize(), verb.capitalize() + "er")
        for verb, noun, signature in product(VERBS, NOUNS, SIGNATURES)
    ]
    return _shuffled(made)


def sums() -> list[str]:
    """Word problems, all different, shuffled."""
    numbers = random.Random(0)  # noqa: S311
    made = [
        text.format(person, numbers.randint(6, 40), goods, numbers.randint(2, 9), numbers.randint(2, 6))
        for person, goods, text in product(PEOPLE, GOODS, SUMS)
    ]
    return _shuffled(made)


def turning(count: int) -> list[StreamQuery]:
    """Code, stories and maths in turn, TURN queries of each before the next; what comes again has other prompts."""
    sources = {"code": programs(), "stories": stories(), "maths": sums()}
    names, stream = list(sources), list[StreamQuery]()
    for at in range(0, count, TURN):
        turn, which = divmod(at // TURN, len(names))
        prompts = sources[names[which]][turn * TURN : (turn + 1) * TURN]
        stream += [StreamQuery(names[which], prompt) for prompt in prompts]
    return stream[:count]


def shifted(count: int) -> list[StreamQuery]:
    """Four fifths stories, which a head of code does not know, then code again."""
    first = 4 * count // 5
    unknown = [StreamQuery("stories", prompt) for prompt in stories()[:first]]
    return unknown + [StreamQuery("code again", prompt) for prompt in programs()[: count - first]]


def _shuffled(prompts: list[str]) -> list[str]:
    random.Random(0).shuffle(prompts)  # noqa: S311
    return prompts
