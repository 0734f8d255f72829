"""Bias and penalties: transformers' processors row by row, OpenAI's formula, and no row that sees another's path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from coppice.engine.kv_cache import BlockTable
from coppice.speculation.sampling import Penalties, SamplingParams, decode_row, draw
from coppice.speculation.tree import DraftTree
from coppice.wire.verifier import NextRoot, OpenSession, VerifyStep
from services.verifier.prefix import Prefix
from services.verifier.session import Job, Session

VOCAB = 24
ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20)
rows = hnp.arrays(np.float32, VOCAB, elements=st.floats(-30, 30, width=32) | st.just(-np.inf))
biases = st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=4)
penalty = st.floats(-2, 2)


def adjusted(
    params: SamplingParams, prompt: Sequence[int], answer: Sequence[int], row: NDArray[np.float32], path: Sequence[int]
) -> NDArray[np.float32]:
    """The row behind prompt, answer and path; unchanged where no parameter is set."""
    penalties = Penalties(params, len(prompt), VOCAB)
    if not penalties.change_rows:
        return row
    text = [*prompt, *answer]
    for start in range(0, len(text), 3):  # as prompts arrive: in parts
        penalties.append(text[start : start + 3])
    return penalties.adjusted(row, path)


@settings(max_examples=100, deadline=None)
@given(ids, ids, rows, biases, st.floats(0.5, 3))
def test_bias_and_repetition_are_those_of_transformers(
    prompt: list[int], answer: list[int], row: NDArray[np.float32], bias: dict[int, float], repetition: float
) -> None:
    text, scores = torch.tensor([[*prompt, *answer]]), torch.from_numpy(row.copy())[None]
    if bias:
        scores = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})(text, scores)
    if repetition != 1:
        scores = RepetitionPenaltyLogitsProcessor(repetition)(text, scores)
    params = SamplingParams(logit_bias=bias, repetition_penalty=repetition)
    ours = adjusted(params, prompt, answer[:1], row, answer[1:])
    assert np.array_equal(ours, scores[0].numpy())


@settings(max_examples=100, deadline=None)
@given(ids, ids, rows, penalty, penalty)
def test_frequency_and_presence_are_those_of_openai(
    prompt: list[int], answer: list[int], row: NDArray[np.float32], frequency: float, presence: float
) -> None:
    """mu[j] - c[j] * alpha_frequency - (c[j] > 0) * alpha_presence, c counting the answer."""
    counts = Counter(answer)
    expected = [mu - counts[j] * frequency - (counts[j] > 0) * presence for j, mu in enumerate(row.tolist())]
    params = SamplingParams(frequency_penalty=frequency, presence_penalty=presence)
    ours = adjusted(params, prompt, answer, row, ())
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-4)


@settings(max_examples=100, deadline=None)
@given(ids, ids, rows, biases, st.none() | st.floats(0.5, 3), penalty, penalty)
def test_a_row_is_the_same_bits_however_much_of_the_text_is_a_path(
    prompt: list[int],
    answer: list[int],
    row: NDArray[np.float32],
    bias: dict[int, float],
    repetition: float | None,
    frequency: float,
    presence: float,
) -> None:
    params = SamplingParams(
        logit_bias=bias, repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence
    )
    given_row = row.copy()
    expected = adjusted(params, prompt, answer, row, ())
    for split in range(len(answer)):
        assert np.array_equal(adjusted(params, prompt, answer[:split], row, answer[split:]), expected)
    assert np.array_equal(row, given_row)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(repetition_penalty=1.0, min_p=0.5, top_k=3)])
def test_nothing_is_counted_without_need(params: SamplingParams) -> None:
    assert not Penalties(params, 3, VOCAB).change_rows


# Sessions of a verifier over a target that is a table: any trees, unions with the same text twice too.


def logits_after(text: Sequence[int]) -> NDArray[np.float32]:
    """(V,) float32 that the last two ids decide."""
    rng = np.random.default_rng(tuple(text[-2:]))
    return 3 * rng.standard_normal(VOCAB).astype(np.float32)


def decoded(
    sampling: SamplingParams,
    prompt: list[int],
    held: list[int],
    length: int,
    rng: Random,
    stop_ids: frozenset[int] = frozenset(),
    min_len: int = 0,
) -> list[int]:
    """The text of a session opened on prompt and held ids, with a random tree in every step."""
    text = [*prompt, *held]
    opening = OpenSession("s", list(text), sampling, stop_ids, length, prompt_tokens=len(prompt), min_len=min_len)
    table = BlockTable("s", 32, np.empty(0, np.int64), 0, True)
    session = Session(1, opening, Prefix(table, [], "", ()), VOCAB)
    job = Job(session, None, 0)  # type: ignore[arg-type]
    job.lay(len(text))
    job.read(0, torch.from_numpy(logits_after(text))[None], ())
    answer: Any = job.prefilled("", "float32")
    said: NextRoot | None = answer.next
    while said is not None and len(text) < length:
        assert said.row is not None
        root = draw(said.row.ids, said.row.log_probs, sampling.seed, len(text))
        if root in stop_ids:
            return [*text, root]
        tree, texts = random_tree([*text, root], rng)
        logits = torch.from_numpy(np.stack([logits_after(one) for one in texts]))
        fence = replace(session.fence, step=session.step + 1)
        step = VerifyStep(fence, root, tree)
        job = Job(session, None, 0, step, tree)  # type: ignore[arg-type]
        job.lay(0)
        job.read(0, logits, ())
        verdict, _ = job.judge(step)
        text, said = texts[job.text[-1]], verdict.next
        assert verdict.fence == session.fence
    return text


def random_tree(text: list[int], rng: Random) -> tuple[DraftTree, list[list[int]]]:
    """A tree below the root that ends a text, and the text of every node; some are the target's favourites."""
    texts, parents = [text], []
    for node in range(rng.randrange(12) if rng.random() < 0.9 else 0):
        parent = rng.randrange(node + 1)
        favourites = np.argsort(-logits_after(texts[parent]))[:4].tolist()
        texts.append([*texts[parent], rng.choice(favourites)])
        parents.append(parent)
    tokens = [one[-1] for one in texts[1:]]
    return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64), np.zeros(len(tokens), np.float32)), texts


@settings(max_examples=50, deadline=None)
@given(
    ids, st.sampled_from([0.0, 0.8]), biases, st.none() | st.floats(0.5, 3), penalty, penalty,
    st.none() | st.integers(1, 24), st.integers(0, 99),
)  # fmt: skip
def test_a_session_says_the_same_whatever_the_trees_are_and_wherever_it_is_opened_again(
    prompt: list[int],
    temperature: float,
    bias: dict[int, float],
    repetition: float | None,
    frequency: float,
    presence: float,
    least: int | None,
    seed: int,
) -> None:
    """Nor does its text end before its least length, if half of the ids may end it."""
    sampling = SamplingParams(
        temperature=temperature,
        logit_bias=bias,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        seed=seed,
    )
    ends: list[int] = [] if least is None else list(range(VOCAB // 2))
    shortest, length, expected = len(prompt) + (least or 0), len(prompt) + 24, list(prompt)
    while len(expected) < length and (len(expected) <= len(prompt) or expected[-1] not in ends):
        row = adjusted(sampling, prompt, expected[len(prompt) :], logits_after(expected), ())  # behind the whole text
        if len(expected) < shortest:
            row[ends] = -np.inf
        expected.append(draw(*decode_row(row, sampling), seed, len(expected)))
    assert len(expected) > shortest or length == shortest
    stops = frozenset({*ends, 2**32 - 1} if ends else ())
    for held in (0, min(9, least or 9)):
        start = expected[len(prompt) : len(prompt) + held]
        said = decoded(sampling, prompt, start, length, Random(seed), stops, shortest if ends else 0)
        assert said == expected[: len(said)]
        assert len(said) >= length - 1 or said == expected
