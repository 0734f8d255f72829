"""The heads without weights: valid trees, states that depend on the text alone, smoothed and coupled scores; a memory
that is bounded, forgets by age and is apart for each salt; and predictions that are followed, also behind edits.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.config.sections import DrafterSettings
from coppice.errors import InvalidField
from coppice.heads import ngram
from coppice.heads.base import DraftJob, Growth, Head, build_head
from coppice.limits import MAX_HEAD_NODES, MAX_TREE_DEPTH
from coppice.speculation.sampling import SamplingParams, noise
from coppice.speculation.tree import DraftTree, paths, validate
from coppice.wire.drafter import Advance, OpenDraft
from tests.reference import EDITS, EFFORT, SHARE, edited

VOCAB = 12
GREEDY = SamplingParams()

texts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60)


def make_head(kind: str = "lookup", **settings: object) -> Head:
    return build_head(DrafterSettings.model_validate({"kind": kind, **settings}))


def begin(head: Head, key: int, ids: list[int], prediction: Iterable[int] = (), **options: object) -> int:
    """Open a session; returns in how many chunks."""
    opening = OpenDraft("s", ids, GREEDY, prediction=tuple(prediction), **options)  # type: ignore[arg-type]
    return sum(1 for _ in head.open(key, opening))


def grown(head: Head, key: int, root: int, at: int, budget: int = 31, params: SamplingParams = GREEDY) -> Growth:
    ((growth,),) = head.draft([DraftJob(key, root, at, budget, params)])
    assert growth.last
    return growth


@settings(max_examples=60 * EFFORT, deadline=None)
@given(texts, texts, st.integers(0, VOCAB - 1), st.integers(0, MAX_HEAD_NODES), st.sampled_from([0.0, 1e-9, 1.0, 10.0]))
def test_every_predicted_tree_is_valid_its_scores_fall_and_its_places_are_of_the_prediction(
    ids: list[int], prediction: list[int], root: int, budget: int, temperature: float
) -> None:
    head = make_head(depth=5, top_k=4)
    begin(head, 1, ids[:5], prediction)
    head.advance(1, Advance(ids[5:]))
    job = DraftJob(1, root, len(ids), budget, SamplingParams(temperature=temperature, seed=3))
    ((growth,),) = head.draft([job])
    tree = growth.nodes
    validate(tree, VOCAB, budget, MAX_TREE_DEPTH)
    scores = np.append(np.float32(0), tree.log_probs)
    assert (tree.log_probs <= scores[tree.parents]).all()
    edges = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    assert len(set(edges)) == len(edges)
    assert max(Counter(tree.parents.tolist()).values(), default=0) <= 4
    places = (0, *growth.predicted)
    for (parent, token), place in zip(edges, growth.predicted, strict=True):
        assert not place or prediction[place - 1] == token
        assert not place or parent == 0 or places[parent] == place - 1


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
    model = ngram.Bigram(VOCAB)
    model.extend(ids)
    for previous in range(VOCAB):
        expected = [witten_bell(ids, previous, token) for token in range(VOCAB)]
        np.testing.assert_allclose(sum(expected), 1)
        candidates = model.followers(previous)
        np.testing.assert_allclose(list(candidates.values()), [expected[token] for token in candidates])
        seen = {b for a, b in pairwise(ids) if a == previous}
        assert len(seen & candidates.keys()) == min(len(seen), ngram.FOLLOWERS) or len(seen) > ngram.FOLLOWERS


@pytest.mark.parametrize("kind", ["bigram", "lookup"])
def test_weights_and_q_rows_that_cannot_be_made_are_refused_by_name(kind: str) -> None:
    with pytest.raises(InvalidField, match=r"drafter\.path.*base\.json"):
        make_head(kind, path="base.json")
    with pytest.raises(InvalidField, match=r"open\.want_q_rows"):
        begin(make_head(kind), 1, [1, 2, 3], want_q_rows=True)


def suffix_matches(text: list[int]) -> dict[int, int]:
    """Every earlier place where the text's last token stands: how many tokens match, at most the last of ORDERS."""
    lengths = {}
    for at in range(len(text) - 1):
        length = 0
        while length < min(ngram.ORDERS[-1], at + 1) and text[at - length] == text[-1 - length]:
            length += 1
        if length:
            lengths[at] = length
    return lengths


def blended(votes: list[tuple[int, int]], token: int, order: int = len(ngram.ORDERS) - 1) -> float:
    """The formula of coppice/heads/ngram.py, from the longest of ORDERS down."""
    if order < 0:
        return 0.0
    below = blended(votes, token, order - 1)
    followers = [follower for length, follower in votes if length >= ngram.ORDERS[order]]
    if not followers:
        return below
    escapes = len(set(followers)) + 1
    return (followers.count(token) + escapes * below) / (len(followers) + escapes)


@settings(max_examples=150 * EFFORT, deadline=None)
@given(ids=st.lists(st.integers(0, 3), min_size=1, max_size=40), root=st.integers(0, 3))
def test_lookup_finds_the_longest_and_latest_matches(ids: list[int], root: int) -> None:
    model = ngram.Lookup()
    model.extend(ids)
    found, expected = {at: length for _, at, length in model.start(root)}, suffix_matches([*ids, root])
    assert found.items() <= expected.items()
    assert len(found) == min(len(expected), ngram.OCCURRENCES)
    for least in ngram.INDEXED:  # of each indexed order the latest were taken before any shorter match
        reach = [at for at, length in expected.items() if length >= least]
        kept = [at for at in reach if at in found]
        assert len(kept) == min(len(reach), ngram.OCCURRENCES)
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
def test_sampled_scores_are_log_softmax_with_noise(ids: list[int], root: int, seed: int, coupled: bool) -> None:
    model, temperature, position = ngram.Bigram(VOCAB), 0.7, 33
    model.extend(ids)
    candidates = model.followers(root)
    job = DraftJob(1, root, position - 1, 8, SamplingParams(temperature=temperature, seed=seed), coupled)
    got = {token: score for score, token in ngram.draft_scores(candidates, job, position, VOCAB)}
    tokens = np.array(list(candidates))
    mass = sum(candidates.values())
    rest = np.log(max(1 - mass, 1e-6))
    scores = np.log(list(candidates.values())) / temperature
    scores += np.log(mass) - np.logaddexp.reduce(scores)
    if coupled:
        scores, rest = scores + noise(seed, position, tokens), rest + np.log(ngram.EXP_EULER_GAMMA)
    scores -= np.logaddexp.reduce([*scores, rest])
    np.testing.assert_allclose([got[token] for token in tokens.tolist()], np.minimum(scores, -1e-6), atol=1e-9)


# --- the memory of a look-up head ---

MANY = 1000


def say(head: Head, text: list[int], salt: str) -> None:
    """A session whose answer is all of a text but its beginning."""
    begin(head, 1, text[:3], salt=salt)
    head.advance(1, Advance(text[3:]))
    head.close(1)


def drafted(head: Head, salt: str, prompt: list[int]) -> DraftTree:
    """What a new session drafts behind a prompt."""
    begin(head, 2, prompt[:-1], salt=salt)
    tree = grown(head, 2, prompt[-1], len(prompt) - 1).nodes
    validate(tree, MANY)
    return tree


def text(number: int) -> list[int]:
    """One of texts that share no token."""
    return list(range(number * 20, (number + 1) * 20))


def test_a_text_is_drafted_again_to_its_end_but_for_nobody_else() -> None:
    head, said = make_head(memory_tokens=1000), text(0)
    say(head, said, "a")
    tree = drafted(head, "a", said[:5])
    assert tree.tokens.tolist() == said[5 : 5 + len(tree)]
    assert len(tree) > 6
    head.close(2)
    for salt in ("b", ""):
        assert len(drafted(head, salt, said[:5])) == 0


@pytest.mark.parametrize(("tokens", "kind", "salt"), [(0, "lookup", "a"), (1000, "lookup", ""), (1000, "bigram", "a")])
def test_nothing_is_remembered_unless_it_is_wanted(tokens: int, kind: str, salt: str) -> None:
    head = make_head(kind, memory_tokens=tokens)
    say(head, text(0), salt)
    assert head.remembered == 0
    assert not set(text(0)[6:]) & set(drafted(head, salt, text(0)[:6]).tokens.tolist())


def test_the_oldest_texts_are_forgotten_first() -> None:
    head = make_head(memory_tokens=400)
    for number in range(40):
        say(head, text(number), "a")
        assert head.remembered <= 400
    drafts = []
    for number in range(40):
        drafts.append(len(drafted(head, "a", text(number)[:5])) > 0)
        head.close(2)  # a prompt of five tokens in place of the oldest texts
    latest = drafts.index(True)
    assert all(drafts[latest:])
    assert 21 < latest < 40 - 10


def test_the_salt_that_was_used_longest_ago_is_forgotten() -> None:
    head = make_head(memory_tokens=100)
    for number in range(ngram.SALTS):
        say(head, text(0), str(number))
    full = head.remembered
    say(head, [1, 2, 3, 4], "0")
    say(head, text(0), "one more")
    assert head.remembered == full + 5
    assert len(drafted(head, "0", text(0)[:5])) > 0
    head.close(2)
    assert len(drafted(head, "1", text(0)[:5])) == 0


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@settings(max_examples=100 * EFFORT, deadline=None)
@given(texts=st.lists(tokens, max_size=5), ids=tokens, root=st.integers(0, 2))
def test_a_memory_is_looked_up_as_text_before_the_text(texts: list[list[int]], ids: list[int], root: int) -> None:
    memory, whole = ngram.Memory(1000), ngram.Lookup()
    for number, earlier in enumerate(texts):
        memory.add(earlier)
        whole.extend([*earlier, MANY + number])
    for _ in memory.count():
        pass
    model = ngram.Lookup(memory.blocks)
    model.extend(ids)
    whole.extend(ids)
    state, expected = model.start(root), whole.start(root)

    def following(occurrences: list[tuple[list[int], int, int]]) -> list[tuple[int, list[int]]]:
        return [(length, text[at - length + 1 : at + 1]) for text, at, length in occurrences]

    assert following(state) == following(expected)
    assert all(0 <= token < MANY for token in model.followers(state))


# --- predictions ---

PROMPT = [1, 2, 3, 4, 5]


def words(seed: int, count: int = 400, many: int = 400) -> list[int]:
    """A text in which some ids are much more frequent than others."""
    rng = random.Random(seed)
    return [min(rng.randrange(many), rng.randrange(many)) for _ in range(count)]


class Decoded:
    """A text decoded step by step as the orchestrator does it, the target saying just this answer."""

    def __init__(self, head: Head, key: int, answer: list[int], budget: int = 31) -> None:
        self.steps, self.accepted, self.nodes = 0, 0, list[int]()
        self.places = list[int]()
        at = 0  # of the root
        while at < len(answer) - 1:
            growth = grown(head, key, answer[at], len(PROMPT) + at, budget)
            places = dict(zip(paths(growth.nodes), growth.predicted or [0] * len(growth.nodes), strict=True))
            took = 0
            while (path := tuple(answer[at + 1 : at + 2 + took])) in places and at + 1 + took < len(answer):
                self.places.append(places[path])
                took += 1
            head.advance(key, Advance(answer[at : at + 1 + took]))
            self.nodes.append(len(growth.nodes))
            self.steps, self.accepted, at = self.steps + 1, self.accepted + took, at + 1 + took

    @property
    def tau(self) -> float:
        return 1 + self.accepted / self.steps


def test_a_prediction_that_fits_is_drafted_as_deep_as_the_budget() -> None:
    head, answer = make_head(), words(1)
    begin(head, 1, PROMPT, answer)
    for budget in (1, 8, 31, MAX_HEAD_NODES):
        growth = grown(head, 1, answer[0], len(PROMPT), budget)
        assert growth.nodes.depths().max() <= MAX_TREE_DEPTH
    decoded = Decoded(head, 1, answer)
    assert decoded.tau > 20
    assert [place for place in decoded.places if place] == sorted(set(decoded.places) - {0})
    assert len(decoded.places) - decoded.places.count(0) > 0.95 * decoded.accepted


@pytest.mark.parametrize("kind", EDITS)
def test_drafts_go_on_behind_edits(kind: str) -> None:
    taus = []
    for seed in range(6):
        head, answer = make_head(), words(seed)
        begin(head, 1, PROMPT, edited(tuple(answer), kind, random.Random(seed)))
        taus.append(Decoded(head, 1, answer).tau)
    assert sum(taus) / len(taus) > 1 / SHARE / 2
