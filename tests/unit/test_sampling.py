"""G and keyed noise: exact in law, the same in numpy and torch, the same as transformers' warpers; bias and penalties
as transformers and OpenAI have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from pydantic import ValidationError
from scipy import stats
from transformers.generation import logits_process
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from coppice.heads.tree import torch_gumbel, torch_hashes, torch_noise
from coppice.speculation import sampling
from coppice.speculation.sampling import (
    ACCEPT_STREAM,
    GAMMA,
    Penalties,
    SamplingParams,
    decode_row,
    draw,
    draw_logits,
    hash_u64,
    mix,
    noise,
    uniform,
)
from tests.reference import EFFORT, dense

PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7, top_k=7),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.8, top_p=0.5, top_k=20),
    SamplingParams(temperature=2.0, top_k=10_000, top_p=0.99),
    SamplingParams(temperature=1.2, min_p=0.05),
    SamplingParams(temperature=0.7, top_k=30, top_p=0.9, min_p=0.2),
    SamplingParams(temperature=1.0, min_p=1.0),
]


def random_logits(rng: np.random.Generator, size: int) -> NDArray[np.float32]:
    return (3 * rng.standard_normal(size)).astype(np.float32)


# The hash.


def test_the_finaliser_is_splitmix64() -> None:
    # The first outputs of the published generator with state 0.
    assert [mix(GAMMA), mix(2 * GAMMA % 2**64)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@settings(max_examples=60 * EFFORT, deadline=None)
@given(
    st.integers(0, 2**64 - 1), st.integers(0, 2**31), st.lists(st.integers(0, 2**31 - 1), max_size=8), st.integers(0, 3)
)
def test_the_hash_is_four_chained_finalisers(seed: int, position: int, ids: list[int], stream: int) -> None:
    key = mix((mix((mix((seed + GAMMA) % 2**64) + stream * GAMMA) % 2**64) + position * GAMMA) % 2**64)
    expected = [mix((key + token * GAMMA) % 2**64) for token in ids]
    assert hash_u64(seed, position, np.array(ids, np.int64), stream).tolist() == expected


def test_numpy_and_torch_agree_on_every_hash_and_on_noise() -> None:
    rng = np.random.default_rng(1)
    ids = np.sort(rng.integers(0, 2**18, 1_000 * EFFORT))
    seeds = np.repeat(np.array([0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1], np.uint64), 20)
    positions = rng.integers(0, 2**20, len(seeds))
    keys = sampling.position_keys(seeds.tolist(), [1] * len(seeds), positions)
    twins = torch_hashes(torch.from_numpy(keys.view(np.int64)), torch.from_numpy(ids)).numpy().view(np.uint64)
    places = (torch.from_numpy(array) for array in (seeds.view(np.int64), positions, ids))
    noises = torch_noise(*places).numpy()
    for twin, other, seed, position in zip(twins, noises, seeds.tolist(), positions.tolist(), strict=True):
        assert np.array_equal(twin, hash_u64(seed, position, ids))
        np.testing.assert_allclose(other, noise(seed, position, ids), rtol=1e-12, atol=1e-14)


def test_the_extreme_hashes_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = np.array([0, 2**64 - 1], np.uint64)
    assert torch_gumbel(torch.from_numpy(extremes.view(np.int64))).isfinite().all()
    monkeypatch.setattr(sampling, "hash_u64", lambda *_: extremes)
    assert np.isfinite(noise(0, 0, np.arange(2))).all()
    for value in extremes.tolist():
        monkeypatch.setattr(sampling, "mix", lambda _, value=value: value)
        assert 0 < uniform(0, 0, ACCEPT_STREAM) < 1


@pytest.mark.parametrize("axis", ["seed", "position", "token", "stream"])
def test_noise_is_gumbel_and_independent_along_every_axis(axis: str) -> None:
    count = 10_000 * EFFORT
    if axis == "token":
        values = noise(3, 11, np.arange(count))
    else:
        places = {
            "seed": [(i, 11, 5, 0) for i in range(count)],
            "position": [(3, i, 5, 0) for i in range(count)],
            "stream": [(3, 11, 5, i) for i in range(count)],
        }[axis]
        values = np.concatenate([noise(seed, pos, np.array([token]), stream) for seed, pos, token, stream in places])
    uniforms = np.exp(-np.exp(-values))
    assert stats.kstest(uniforms, "uniform").pvalue > 1e-3
    for lag in (1, 2, 7, 64):
        cells = np.histogram2d(uniforms[:-lag], uniforms[lag:], bins=16, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(cells.ravel()).pvalue > 1e-3


# Drawing.


def large_logits(rng: np.random.Generator, case: int) -> NDArray[np.float32]:
    """A row of a large vocabulary: flat, usual, peaked, with ties, with ids that cannot be."""
    logits = random_logits(rng, int(rng.integers(5_000, 20_000))) * np.float32((0.01, 1, 1, 1, 2)[case % 5])
    match case % 5:
        case 2:
            logits[rng.integers(0, logits.size)] += 30
        case 3:
            logits = np.round(logits)
        case 4:
            logits[rng.random(logits.size) < 0.9] = -np.inf
    return logits


@pytest.mark.parametrize("close", [sampling._CLOSE, 3.0], ids=["clear", "close"])
def test_a_draw_from_a_large_vocabulary_looks_at_all_ids(close: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_CLOSE", close)
    rng = np.random.default_rng(9)
    for case in range(40 * EFFORT):
        logits = large_logits(rng, case)
        params = SamplingParams(temperature=float(rng.choice([0.2, 1.0, 3.0])), seed=int(rng.integers(0, 2**63)))
        ids, log_probs = decode_row(logits, params)
        for position in range(10):
            expected = int(ids[np.argmax(log_probs + noise(params.seed, position, ids))])
            assert draw(ids, log_probs, params.seed, position) == draw_logits(logits, params, position) == expected


# The decoding operator.


def warped(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float32]:
    """(V,) probabilities by transformers' own chain."""
    scores = torch.from_numpy(logits)[None]
    for warper, value in (
        (logits_process.TemperatureLogitsWarper, params.temperature),
        (logits_process.TopKLogitsWarper, params.top_k),
        (logits_process.TopPLogitsWarper, params.top_p if params.top_p < 1 else 0),
        (logits_process.MinPLogitsWarper, params.min_p),
    ):
        scores = warper(value)(None, scores) if value else scores
    probs: NDArray[np.float32] = scores.softmax(-1)[0].numpy()
    return probs


@pytest.mark.parametrize("params", PARAMS)
def test_decode_row_keeps_what_transformers_keeps_with_the_same_probabilities(params: SamplingParams) -> None:
    rng = np.random.default_rng(6)
    for case in range(50 * EFFORT):
        logits = random_logits(rng, int(rng.integers(1, 400)))
        if case % 2 and params.top_k and params.top_p == 1:
            logits = np.round(logits)  # ids that tie with the k-th are kept
        if case % 4 == 0:
            logits[1:][rng.random(logits.size - 1) < 0.3] = -np.inf
        theirs, (ids, log_probs) = warped(logits, params), decode_row(logits, params)
        assert ids.tolist() == np.flatnonzero(theirs).tolist()
        np.testing.assert_allclose(np.exp(log_probs), theirs[ids], rtol=2e-5)


@pytest.mark.parametrize(
    ("logits", "params", "expected"),
    [
        # The lowest ids up to the nucleus mass.
        *(([0] * 10, {"temperature": 1, "top_p": p}, [1 / n] * n) for p, n in ((0.9, 9), (0.55, 6), (1e-12, 1))),
        ([0, 2, 1, 2], {}, [0, 1]),
        ([1, 5, 5, 2], {"temperature": 1e-300}, [0, 0.5, 0.5]),
        ([1, 5, 5, 2], {"temperature": 1e-40}, [0, 0.5, 0.5]),
        ([1, 5, 5, 2], {"temperature": 1e300}, [0.25] * 4),
    ],
)
def test_the_rows_of_ties_and_extremes(logits: list[float], params: dict[str, float], expected: list[float]) -> None:
    row = decode_row(np.array(logits, np.float32), SamplingParams(**params))  # type: ignore[arg-type]
    np.testing.assert_allclose(dense(row, len(logits)), expected + [0] * (len(logits) - len(expected)))


@pytest.mark.parametrize("bad", [[1.0, np.nan], [np.inf, 0.0], [-np.inf, -np.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_highest_finite_logit_is_refused(bad: list[float], temperature: float) -> None:
    logits, params = np.array(bad, np.float32), SamplingParams(temperature=temperature)
    with pytest.raises(ValueError, match="logit"):
        decode_row(logits, params)
    with pytest.raises(ValueError, match="logit"):
        draw_logits(logits, params, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, float("nan"), float("inf"))),
        *(("top_p", value) for value in (0.0, 1.1, float("nan"))),
        *(("top_k", -1), ("min_p", 1.1), ("frequency_penalty", 2.1), ("presence_penalty", -2.1)),
        *(("repetition_penalty", value) for value in (0.0, float("nan"))),
        *(("logit_bias", bias) for bias in (dict.fromkeys(range(1025), 1.0), {-1: 1.0}, {1: 101.0}, {1: float("nan")})),
        *(("seed", -1), ("seed", 2**64), ("top_q", 1)),
    ],
)
def test_unusable_params_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**{field: value})
    assert {error["loc"][0] for error in caught.value.errors()} == {field}


def test_a_seed_is_drawn_once_unless_one_was_set() -> None:
    drawn = [SamplingParams(top_k=3).with_seed() for _ in range(9)]
    assert len({params.seed for params in drawn}) == 9
    assert all(params.seed < 2**53 and params.top_k == 3 and params.with_seed() == params for params in drawn)
    assert SamplingParams(seed=0).with_seed().seed == 0
    assert SamplingParams(repetition_penalty=1).with_defaults(1.3).repetition_penalty == 1


# --- bias and penalties ---


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
@given(ids, ids, rows, biases, st.none() | st.floats(0.5, 3), st.just(0.0) | penalty, st.just(0.0) | penalty)
def test_bias_and_penalties_are_those_of_transformers_and_openai_however_much_of_the_text_is_a_path(
    prompt: list[int],
    answer: list[int],
    row: NDArray[np.float32],
    bias: dict[int, float],
    repetition: float | None,
    frequency: float,
    presence: float,
) -> None:
    """Behind transformers' processors mu[j] - c[j] * alpha_frequency - (c[j] > 0) * alpha_presence, c of the answer."""
    text, scores = torch.tensor([[*prompt, *answer]]), torch.from_numpy(row.copy())[None]
    if bias:
        scores = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})(text, scores)
    if repetition not in (None, 1):
        scores = RepetitionPenaltyLogitsProcessor(repetition)(text, scores)
    counts = np.bincount(answer, minlength=VOCAB)
    params = SamplingParams(
        logit_bias=bias, repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence
    )
    given_row, ours = row.copy(), adjusted(params, prompt, answer, row, ())
    expected = scores[0].numpy() - frequency * counts - presence * (counts > 0)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=0 if frequency == presence == 0 else 1e-4)
    for split in range(len(answer)):
        assert np.array_equal(adjusted(params, prompt, answer[:split], row, answer[split:]), ours)
    assert np.array_equal(row, given_row)
