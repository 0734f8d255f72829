"""Streams of queries whose kind changes, of our own making: nobody's prompts, and none that a head was trained on."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product

STORIES = "stories"
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


@dataclass(frozen=True, slots=True)
class StreamQuery:
    """One query of a stream."""

    part: str
    """which part of the stream it belongs to"""
    prompt: str


def stories(seed: int = 0) -> list[str]:
    """Openings of children's stories, all different, in an order that the seed gives."""
    return _shuffled([opening.format(who, what) for who, what, opening in product(WHO, WHAT, OPENINGS)], seed)


def programs(seed: int = 0) -> list[str]:
    """Beginnings of Python files, all different, in an order that the seed gives."""
    made = [
        signature.format(verb, noun, verb.capitalize(), noun.capitalize(), verb.capitalize() + "er")
        for verb, noun, signature in product(VERBS, NOUNS, SIGNATURES)
    ]
    return _shuffled(made, seed)


def shifted(count: int, seed: int = 0) -> list[StreamQuery]:
    """Four fifths stories, which a head of code does not know, then code again."""
    first = 4 * count // 5
    told = [StreamQuery(STORIES, prompt) for prompt in stories(seed)[:first]]
    return told + [StreamQuery("code again", prompt) for prompt in programs(seed)[: count - first]]


def mixed(count: int, passes: int, seed: int = 0) -> list[StreamQuery]:
    """Stories and code in turn, `count` of them, the same ones in every pass (SpecBlock, section D.2)."""
    pairs = zip(stories(seed), programs(seed), strict=False)
    once = [prompt for pair in pairs for prompt in pair][:count]
    return [StreamQuery(f"pass {number + 1}", prompt) for number in range(passes) for prompt in once]


def _shuffled(prompts: list[str], seed: int) -> list[str]:
    random.Random(seed).shuffle(prompts)  # noqa: S311
    return prompts
