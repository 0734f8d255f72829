"""Drafts from a prediction: it is followed, found again behind edits, believed as far as it fits, and one session's."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.config.sections import DrafterSettings
from coppice.heads.base import DraftJob, Growth, Head
from coppice.heads.registry import build_head
from coppice.limits import MAX_HEAD_NODES, MAX_TREE_DEPTH
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import paths, validate
from coppice.wire.drafter import Advance, OpenDraft
from tests.reference import EDITS, EFFORT, SHARE, edited

VOCAB = 400
GREEDY = SamplingParams()
PROMPT = [1, 2, 3, 4, 5]


def words(seed: int, count: int = 400, many: int = VOCAB) -> list[int]:
    """A text in which some ids are much more frequent than others."""
    rng = random.Random(seed)
    return [min(rng.randrange(many), rng.randrange(many)) for _ in range(count)]


def lookup() -> Head:
    return build_head(DrafterSettings.model_validate({"kind": "lookup"}))


def begin(head: Head, key: int, prediction: Iterable[int], ids: list[int] = PROMPT) -> None:
    for _ in head.open(key, OpenDraft("s", ids, GREEDY, prediction=tuple(prediction))):
        pass


def grown(head: Head, key: int, root: int, at: int, budget: int = 31, params: SamplingParams = GREEDY) -> Growth:
    ((growth,),) = head.draft([DraftJob(key, root, at, budget, params)])
    assert growth.last
    return growth


class Decoded:
    """A text decoded step by step as the orchestrator does it, the target saying just this answer."""

    def __init__(self, head: Head, key: int, answer: list[int], budget: int = 31) -> None:
        self.steps, self.accepted, self.nodes = 0, 0, list[int]()
        self.places = list[int]()
        at = 0  # of the root
        while at < len(answer) - 1:
            growth = grown(head, key, answer[at], len(PROMPT) + at, budget)
            known = dict(zip(paths(growth.nodes), growth.predicted or [0] * len(growth.nodes), strict=True))
            took = 0
            while (path := tuple(answer[at + 1 : at + 2 + took])) in known and at + 1 + took < len(answer):
                self.places.append(known[path])
                took += 1
            head.advance(key, Advance(answer[at : at + 1 + took]))
            self.nodes.append(len(growth.nodes))
            self.steps, self.accepted, at = self.steps + 1, self.accepted + took, at + 1 + took

    @property
    def tau(self) -> float:
        return 1 + self.accepted / self.steps


def test_a_prediction_that_fits_is_drafted_as_deep_as_the_budget() -> None:
    head, answer = lookup(), words(1)
    begin(head, 1, answer)
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
        head, answer = lookup(), words(seed)
        begin(head, 1, edited(tuple(answer), kind, random.Random(seed)))
        taus.append(Decoded(head, 1, answer).tau)
    assert sum(taus) / len(taus) > 1 / SHARE / 2


def test_of_equal_matches_the_next_one_is_followed() -> None:
    head = lookup()
    #                    0  1   2   3   4   5   6   7   8   9  10  11  12  13
    begin(head, 1, [7, 20, 21, 9, 30, 31, 32, 33, 34, 9, 40, 41, 42, 43])
    head.advance(1, Advance([7, 20, 21, 9, 30, 31, 99]))  # the text has left the prediction behind place 6
    growth = grown(head, 1, 9, len(PROMPT) + 7)
    places = {place for place, parent in zip(growth.predicted, growth.nodes.parents, strict=True) if parent == 0}
    assert 11 in places  # behind the 9 that comes next
    assert 5 not in places  # behind the first one


def test_a_useless_prediction_soon_promises_little() -> None:
    head, other, answer = lookup(), words(1), words(2)
    begin(head, 1, other)
    decoded = Decoded(head, 1, answer)
    begin(head, 2, ())
    without = Decoded(head, 2, answer)
    assert sum(decoded.nodes[-50:]) < sum(without.nodes[-50:]) + 50 * 3
    assert decoded.steps <= without.steps


def test_a_prediction_is_one_sessions() -> None:
    head, answer = lookup(), words(5)
    begin(head, 1, answer)
    begin(head, 2, ())
    begin(head, 3, words(6))
    fresh = lookup()
    begin(fresh, 2, ())
    for at, token in enumerate(answer[:100]):
        position = len(PROMPT) + at
        assert grown(head, 2, token, position).nodes == grown(fresh, 2, token, position).nodes
        assert not grown(head, 2, token, position).predicted
        for each, key in ((head, 1), (head, 2), (head, 3), (fresh, 2)):
            each.advance(key, Advance([token]))


@settings(max_examples=60 * EFFORT, deadline=None)
@given(
    prediction=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    text=st.lists(st.integers(0, 5), max_size=40),
    root=st.integers(0, 5),
    budget=st.integers(0, MAX_HEAD_NODES),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
)
def test_every_tree_is_valid_and_its_places_are_of_the_prediction(
    prediction: list[int], text: list[int], root: int, budget: int, temperature: float
) -> None:
    head = lookup()
    begin(head, 1, prediction)
    head.advance(1, Advance(text))
    params = SamplingParams(temperature=temperature, seed=3)
    growth = grown(head, 1, root, len(PROMPT) + len(text), budget, params)
    validate(growth.nodes, 6, budget, MAX_TREE_DEPTH)
    assert growth.predicted == grown(head, 1, root, len(PROMPT) + len(text), budget, params).predicted
    assert len(growth.predicted) == len(growth.nodes)
    places = (0, *growth.predicted)
    for parent, token, place in zip(growth.nodes.parents, growth.nodes.tokens, growth.predicted, strict=True):
        if place:
            assert prediction[place - 1] == token
            assert parent == 0 or places[parent] == place - 1
