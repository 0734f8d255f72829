"""The alarm about heads that draft far below what they were trained to: how seldom it is false, how soon it comes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from coppice.config.model import Expectation, read_expectation
from coppice.errors import InvalidField
from coppice.speculation.tree import DraftTree
from coppice.training.losses import LEAST_TRIALS, expectation
from orchestrator.heads import AcceptanceWatch, best_path, first_miss, offers
from tests.reference import make_tree


def test_the_best_path_ends_at_its_first_miss_and_at_its_leaf() -> None:
    tree = DraftTree(np.array([5, 6, 7, 8]), np.array([0, 0, 2, 3]), np.array([-2.0, -0.1, -0.3, -0.9]))
    assert best_path(offers(tree, [5, 7])) == [False]  # accepted, but not the best
    assert best_path(offers(tree, [6, 9])) == [True, False]
    assert best_path(offers(tree, [6, 7, 8, 1])) == [True, True, True]
    assert best_path(offers(tree, [6])) == [True]
    assert best_path(offers(tree, [])) == best_path(offers(DraftTree.empty(), [1])) == []


@pytest.mark.parametrize(
    ("text", "miss"),
    [
        ([9], (0, 0)),
        ([1, 9], (1, 1)),
        ([1, 3, 9, 8], (2, 3)),
        ([1, 3, 4, 9], None),  # all of it was accepted
        ([2, 9], None),  # as far as this branch goes
        ([1, 3], None),  # the text ended inside the tree
        ([], None),
    ],
)
def test_a_head_misses_first_where_it_has_children_and_none_is_the_targets(
    text: list[int], miss: tuple[int, int] | None
) -> None:
    tree = make_tree([(1, 0, -0.1), (2, 0, -0.2), (3, 1, -0.3), (4, 3, -0.4)])  # 1 -> 3 -> 4, and 2
    assert first_miss(tree, text) == miss
    assert first_miss(DraftTree.empty(), text) is None


def steps(watch: AcceptanceWatch, chances: list[float], most: int, rng: np.random.Generator) -> int:
    """How many drafts were seen until the alarm; `most` if it did not come."""
    for step in range(1, most + 1):
        path = []
        for chance in chances:
            path.append(bool(rng.random() < chance))
            if not path[-1]:
                break
        if watch.observe(path):
            return step
    return most


def test_a_head_that_is_just_as_expected_is_never_suspected() -> None:
    """With a thousandfold higher rate of false alarms, so that a test which promises too much would be seen."""
    rng = np.random.default_rng(1)
    expected = [0.6, 0.5, 0.7]
    alarms = [steps(AcceptanceWatch(expected, 1e-3), expected, 400, rng) < 400 for _ in range(300)]
    assert sum(alarms) <= 3  # the chance of more is below 1e-3
    assert steps(AcceptanceWatch(expected), expected, 5_000, rng) == 5_000


def test_a_bet_is_worth_no_more_than_it_costs() -> None:
    """The mean of the evidence over all outcomes of six trials is at most 1: what Ville's inequality asks for."""
    total = 0.0
    for outcome in range(64):
        watch = AcceptanceWatch([0.4])
        hits = [bool(outcome >> at & 1) for at in range(6)]
        for right in hits:
            watch.observe([right])
        total += np.prod([0.4 if right else 0.6 for right in hits]) * np.exp(watch.evidence)
    assert total <= 1.0


@pytest.mark.parametrize(
    ("expected", "real", "median"),
    [([0.8], [0.2], 25), ([0.6], [0.1], 45), ([0.5], [0.02], 40), ([0.4], [0.0], 50), ([0.8, 0.8], [0.8, 0.1], 45)],
)
def test_a_head_that_collapses_is_found_within_fifty_steps(
    expected: list[float], real: list[float], median: float
) -> None:
    rng = np.random.default_rng(2)
    assert np.median([steps(AcceptanceWatch(expected), real, 500, rng) for _ in range(200)]) <= median


def test_a_push_begins_anew_and_earlier_drafts_do_not_count() -> None:
    watch = AcceptanceWatch([0.9])
    for _ in range(2000):
        watch.observe([True], 1)
    late = next(step for step in range(1, 100) if watch.observe([False], 2))
    assert late < 12
    assert not watch.observe([False], 2)  # once
    assert not watch.observe([False], 1)
    assert not watch.observe([True], 3)
    assert not watch.suspect


def test_what_is_expected_is_the_least_of_all_kinds_of_text(tmp_path: Path) -> None:
    code = [[(400, 500), (150, 200), (20, 29)], [(400, 500), (150, 200), (0, 0)]]
    story = [[(500, 900), (199, 220), (90, 100)], [(30, 100), (1, 29), (0, 0)]]
    found = expectation({"code": torch.tensor(code), "story": torch.tensor(story)})
    assert len(found.by_depth) == 2  # the third was tried fewer times than LEAST_TRIALS on code
    assert found.by_depth[0] == 0.3  # a text
    assert 0.69 < found.by_depth[1] < 0.75
    assert found.texts == {"code": (0.8, 0.75, 0.6897), "story": (0.53, 0.8032, 0.9)}
    few = torch.tensor([[(LEAST_TRIALS - 2, LEAST_TRIALS - 1)]])
    assert expectation({"code": few}) == Expectation(texts={"code": (0.9655,)})
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    assert read_expectation(tmp_path).by_depth == ()
    (tmp_path / "config.json").write_text(json.dumps({"acceptance": found.model_dump()}))
    assert read_expectation(tmp_path) == found
    (tmp_path / "config.json").write_text('{"acceptance": {"by_depth": [2]}}')
    with pytest.raises(InvalidField, match="acceptance"):
        read_expectation(tmp_path)
