"""Texts are like those of their own domain, whatever all have in common."""

from __future__ import annotations

import random

import numpy as np
import pytest

from orchestrator.auto.similarity import MOST, WIDTH, EndedText, EndedTexts, sketch

COMMON = list(range(50))


def prompt(domain: int, seed: int, length: int = 40) -> list[int]:
    """Half of its ids are of the domain, the others of a language all have in common."""
    rng = random.Random(f"{domain} {seed}")
    return [rng.choice(COMMON) if rng.random() < 0.5 else 100 + 60 * domain + rng.randrange(60) for _ in range(length)]


def remembered(ids: list[int], domain: int) -> EndedText:
    return EndedText(sketch(ids), False, {"domain": float(domain)}, {})


def share_of_own_domain(memory: EndedTexts, ids: list[int], domain: int) -> float:
    alike = memory.like(sketch(ids))
    own = sum(weight for weight, text in alike if text.total["domain"] == domain)
    return own / sum(weight for weight, _ in alike)


def test_a_sketch_has_length_1_and_knows_no_order() -> None:
    ids = [5, 7, 7, WIDTH + 5, 10**6]
    assert np.linalg.norm(sketch(ids)) == pytest.approx(1)
    assert (sketch(ids) == sketch(ids[::-1])).all()
    assert sketch([7, 7])[7] == 1
    assert not sketch([]).any()


@pytest.mark.parametrize("system_prompt", [0, 400], ids=["bare", "behind a long system prompt"])
def test_texts_are_like_those_of_their_own_domain(system_prompt: int) -> None:
    shared = [random.Random(1).randrange(10_000) for _ in range(system_prompt)]
    memory = EndedTexts()
    for number in range(30):
        memory.texts.append(remembered(shared + prompt(number % 3, number), number % 3))
    shares = [share_of_own_domain(memory, shared + prompt(each % 3, 100 + each), each % 3) for each in range(30)]
    assert min(shares) > 0.6
    assert sum(shares) / len(shares) > 0.9


def test_the_most_alike_has_weight_1() -> None:
    memory = EndedTexts()
    for number in range(9):
        memory.texts.append(remembered(prompt(number % 3, number), number % 3))
    alike = memory.like(memory.texts[4].sketch)
    assert max(alike, key=lambda each: each[0])[1] is memory.texts[4]
    assert max(weight for weight, _ in alike) == 1
    assert min(weight for weight, _ in alike) > 0


def test_the_first_text_is_like_none_and_one_that_points_the_other_way_is_not_counted() -> None:
    memory = EndedTexts()
    assert memory.like(sketch([1, 2, 3])) == []
    memory.texts.append(remembered([1, 2, 3], 0))
    assert memory.like(sketch([7, 8, 9])) == []
    memory.texts.append(remembered([7, 8, 10], 1))
    assert [text.total["domain"] for _, text in memory.like(sketch([7, 8, 9]))] == [1]


def test_only_the_latest_are_remembered() -> None:
    memory = EndedTexts()
    for number in range(MOST + 5):
        memory.texts.append(remembered([number], number))
    assert len(memory.texts) == MOST
    assert memory.texts[0].total["domain"] == 5
