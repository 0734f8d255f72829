"""Bias and penalties: transformers' processors row by row, OpenAI's formula, and no row that sees another's path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from coppice.speculation.sampling import Penalties, SamplingParams

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
