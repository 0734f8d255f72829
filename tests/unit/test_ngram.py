"""The heads without weights: valid trees, states that depend on the text alone, smoothed and coupled scores."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.config.sections import DrafterSettings
from coppice.errors import InvalidField
from coppice.heads.base import DraftJob, Head
from coppice.heads.ngram import EXP_EULER_GAMMA, FOLLOWERS, INDEXED, OCCURRENCES, ORDERS, Bigram, Lookup, draft_scores
from coppice.heads.registry import build_head
from coppice.speculation.sampling import SamplingParams, noise
from coppice.speculation.tree import DraftTree, validate
from coppice.wire.drafter import OpenDraft
from tests.reference import EFFORT

VOCAB = 12
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8, seed=5)
KINDS = ("bigram", "lookup")

texts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60)


def make_head(kind: str, **settings: object) -> Head:
    return build_head(DrafterSettings.model_validate({"kind": kind, **settings}))


def open_session(head: Head, key: int, ids: list[int], **options: object) -> None:
    for _ in head.open(key, OpenDraft("s", ids, GREEDY, **options)):  # type: ignore[arg-type]
        pass


def draft(head: Head, key: int, root: int, at: int, budget: int, params: SamplingParams = GREEDY) -> DraftTree:
    (growths,) = head.draft([DraftJob(key, root, at, budget, params)])
    (growth,) = growths
    assert growth.last
    return growth.nodes


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60 * EFFORT, deadline=None)
@given(
    ids=texts,
    root=st.integers(0, VOCAB - 1),
    budget=st.integers(0, 64),
    temperature=st.sampled_from([0.0, 1e-9, 0.3, 1.0, 10.0]),
    coupled=st.booleans(),
    chain=st.booleans(),
)
def test_every_tree_is_valid_and_its_scores_fall_along_each_path(
    kind: str, ids: list[int], root: int, budget: int, temperature: float, coupled: bool, chain: bool
) -> None:
    head = make_head(kind, depth=5, top_k=1 if chain else 4)
    open_session(head, 1, ids)
    params = SamplingParams(temperature=temperature, seed=3)
    (growths,) = head.draft([DraftJob(1, root, len(ids), budget, params, coupled)])
    tree = growths[0].nodes
    validate(tree, VOCAB, max_nodes=budget, max_depth=5)
    scores = np.append(np.float32(0), tree.log_probs)
    assert (tree.log_probs <= scores[tree.parents]).all()
    assert (tree.log_probs < 0).all()
    edges = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    assert len(set(edges)) == len(edges)
    assert max(Counter(tree.parents.tolist()).values(), default=0) <= (1 if chain else 4)


def witten_bell(ids: list[int], previous: int, token: int) -> float:
    """The formula, counted from scratch."""
    pairs = Counter(pairwise(ids))
    after = {b: n for (a, b), n in pairs.items() if a == previous}
    kinds = len(set(ids))
    unigram = (ids.count(token) + kinds / VOCAB) / (len(ids) + kinds)
    if not after:
        return unigram
    return (after.get(token, 0) + len(after) * unigram) / (sum(after.values()) + len(after))


@settings(max_examples=40 * EFFORT, deadline=None)
@given(ids=texts)
def test_bigram_probabilities_are_witten_bells_and_sum_to_one(ids: list[int]) -> None:
    model = Bigram(VOCAB)
    model.extend(ids)
    for previous in range(VOCAB):
        expected = [witten_bell(ids, previous, token) for token in range(VOCAB)]
        np.testing.assert_allclose(model.row(previous), expected, rtol=1e-12)
        np.testing.assert_allclose(model.row(previous).sum(), 1)
        candidates = model.followers(previous)
        np.testing.assert_allclose(list(candidates.values()), [expected[token] for token in candidates])
        seen = {b for a, b in pairwise(ids) if a == previous}
        assert len(seen & candidates.keys()) == min(len(seen), FOLLOWERS) or len(seen) > FOLLOWERS


@pytest.mark.parametrize("kind", KINDS)
def test_a_path_is_refused_by_name(kind: str) -> None:
    with pytest.raises(InvalidField, match=r"drafter\.path.*base\.json"):
        make_head(kind, path="base.json")


def suffix_matches(text: list[int]) -> dict[int, int]:
    """Every earlier place where the text's last token stands: how many tokens match, at most the last of ORDERS."""
    found = {}
    for at in range(len(text) - 1):
        length = 0
        while length < min(ORDERS[-1], at + 1) and text[at - length] == text[-1 - length]:
            length += 1
        if length:
            found[at] = length
    return found


def blended(votes: list[tuple[int, int]], token: int, order: int = len(ORDERS) - 1) -> float:
    """The formula of coppice/heads/ngram.py, from the longest of ORDERS down."""
    if order < 0:
        return 0.0
    below = blended(votes, token, order - 1)
    followers = [follower for length, follower in votes if length >= ORDERS[order]]
    if not followers:
        return below
    escapes = len(set(followers)) + 1
    return (followers.count(token) + escapes * below) / (len(followers) + escapes)


@settings(max_examples=150 * EFFORT, deadline=None)
@given(ids=st.lists(st.integers(0, 3), min_size=1, max_size=40), root=st.integers(0, 3))
def test_lookup_finds_the_longest_and_latest_matches(ids: list[int], root: int) -> None:
    model = Lookup()
    model.extend(ids)
    found, expected = {at: length for _, at, length in model.start(root)}, suffix_matches([*ids, root])
    assert found.items() <= expected.items()
    assert len(found) == min(len(expected), OCCURRENCES)
    for least in INDEXED:  # of each indexed order the latest were taken before any shorter match
        reach = [at for at, length in expected.items() if length >= least]
        kept = [at for at in reach if at in found]
        assert len(kept) == min(len(reach), OCCURRENCES)
    state = model.start(root)
    while followers := model.followers(state):  # along the most likely path
        votes = [(length, ids[at + 1]) for _, at, length in state if at + 1 < len(ids)]
        assert followers == pytest.approx({token: blended(votes, token) for _, token in votes})
        assert sum(followers.values()) < 1
        best = max(followers, key=lambda token: followers[token])
        onward = [(ids, at + 1, length + 1) for _, at, length in state if ids[at + 1 : at + 2] == [best]]
        state = model.follow(state, best)
        assert state == onward


@settings(max_examples=60 * EFFORT, deadline=None)
@given(ids=texts, root=st.integers(0, VOCAB - 1), seed=st.integers(0, 2**64 - 1), coupled=st.booleans())
def test_sampled_scores_are_log_softmax_with_the_targets_own_noise(
    ids: list[int], root: int, seed: int, coupled: bool
) -> None:
    model, temperature, position = Bigram(VOCAB), 0.7, 33
    model.extend(ids)
    candidates = model.followers(root)
    job = DraftJob(1, root, position - 1, 8, SamplingParams(temperature=temperature, seed=seed), coupled)
    got = {token: score for score, token in draft_scores(candidates, job, position, VOCAB)}
    tokens = np.array(list(candidates))
    mass = sum(candidates.values())
    rest = np.log(max(1 - mass, 1e-6))
    scores = np.log(list(candidates.values())) / temperature
    scores += np.log(mass) - np.logaddexp.reduce(scores)
    if coupled:
        scores, rest = scores + noise(seed, position, tokens), rest + np.log(EXP_EULER_GAMMA)
    scores -= np.logaddexp.reduce([*scores, rest])
    np.testing.assert_allclose([got[token] for token in tokens.tolist()], np.minimum(scores, -1e-6), atol=1e-9)


def test_q_rows_are_the_laws_of_a_chain_whose_length_is_fixed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCAB}))
    head = make_head("bigram", target=str(tmp_path), depth=5)
    ids = np.random.default_rng(0).integers(0, VOCAB, 50).tolist()
    open_session(head, 1, ids, want_q_rows=True)
    model = Bigram(VOCAB)
    model.extend(ids)
    counts = np.zeros(VOCAB)
    for seed in range(300):
        params = SamplingParams(temperature=1.0, seed=seed)
        (growths,) = head.draft([DraftJob(1, 3, 50, 64, params, want_q_rows=True)])
        tree, rows = growths[0].nodes, growths[0].q_rows
        assert rows is not None
        assert rows.shape == (5, VOCAB)
        assert tree.parents.tolist() == [0, 1, 2, 3, 4]
        validate(tree, VOCAB)
        for row, previous in zip(rows, [3, *tree.tokens[:-1].tolist()], strict=True):
            np.testing.assert_allclose(row, model.row(previous), rtol=1e-6)
        taken = rows[np.arange(5), tree.tokens].astype(np.float64)
        np.testing.assert_allclose(np.cumsum(np.log(taken)), tree.log_probs, rtol=1e-5)
        counts[tree.tokens[0]] += 1
    assert np.abs(counts / 300 - model.row(3)).max() < 0.1
    (growths,) = head.draft([DraftJob(1, 3, 50, 2, GREEDY, want_q_rows=True)])
    assert len(growths[0].nodes) == 2
    assert growths[0].q_rows is not None
    assert growths[0].q_rows.max(1).tolist() == [1, 1]  # greedy: all on one token


@pytest.mark.parametrize("kind", KINDS)
def test_q_rows_that_cannot_be_made_are_refused_by_name(kind: str) -> None:
    head = make_head(kind)
    with pytest.raises(InvalidField, match=r"open\.want_q_rows"):
        open_session(head, 1, [1, 2, 3], want_q_rows=True)
    head.close(1)
