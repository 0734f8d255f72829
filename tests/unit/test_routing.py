"""Routing: head scores, what the text says about a tree, calibration, the alarm about heads that draft badly; and what
policy auto chooses, on what it bases that, and what trying others costs.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import expit, logit

from coppice.config.model import read_expectation
from coppice.config.sections import DrafterSettings
from coppice.errors import InvalidField
from coppice.heads.ngram import NgramHead
from coppice.speculation.policy import UNION, Choice, route
from coppice.speculation.tree import DraftTree, prune, union
from coppice.training.losses import expectation
from coppice.wire.common import Fence
from coppice.wire.verifier import Verdict, VerifyTimings
from orchestrator.heads import (
    AcceptanceWatch,
    Calibration,
    Draft,
    accepted,
    best_path,
    first_miss,
    offers,
    step_log_probs,
)
from orchestrator.loop import Step, step_trees
from tests.reference import EFFORT, ancestors, make_tree, random_tree, text_at


def test_every_step_is_a_newton_step_of_the_logistic_loss_with_the_bounded_curvature() -> None:
    rng = np.random.default_rng(9)
    calibration, fitted = Calibration(), np.array([1.0, 0.0])
    prior = np.diag([64.0, 16.0])  # 64 nodes with logits of +-2: sum of x x' / 4
    precision = prior
    for _ in range(50):
        claimed, right = rng.uniform(0.05, 0.95, 4), rng.random(4) < 0.3
        calibration.observe(list(zip(np.log(claimed), right, strict=True)))
        features = np.stack((logit(claimed), np.ones(4)), axis=1)
        precision = precision + (prior - precision) / 512 + features.T @ features / 4
        fitted = fitted + np.linalg.solve(precision, features.T @ (right - expit(features @ fitted)))
        np.testing.assert_allclose([calibration.scale, calibration.shift], fitted, rtol=1e-9)
        chain = calibration.of(DraftTree.chain(np.arange(4), np.cumsum(np.log(claimed))))
        np.testing.assert_allclose(chain.log_probs, np.cumsum(np.log(expit(features @ fitted))), rtol=1e-5)
    before, after = np.abs(claimed - 0.3).mean(), np.abs(np.exp(step_log_probs(chain)) - 0.3).mean()
    assert after < before / 2


def test_calibration_is_finite_on_impossible_heads() -> None:
    calibration = Calibration()
    for step in range(3_000):
        calibration.observe([(0.0, False), (-200.0, step % 2 == 0)])
    assert np.isfinite(calibration.of(DraftTree.chain([1, 2, 3], [0.0, -1e-30, -300.0])).log_probs).all()


def test_the_tree_of_the_best_mean_of_confidences_is_routed_to_and_an_empty_one_never() -> None:
    empty, small = DraftTree.empty(), make_tree([(1, 0, np.log(0.9))])
    large = make_tree([(1, 0, np.log(0.9)), (2, 1, np.log(0.5)), (3, 1, np.log(0.25))])
    mean = (0.9 + 0.5 + 0.25) / 3
    assert [route([large, DraftTree.chain([1], [np.log(q)])]) for q in (mean - 0.01, mean + 0.01)] == [0, 1]
    assert route([large, small]) == 1
    assert route([empty, DraftTree.chain([1], [-20.0])]) == 1
    assert route([empty, small, small]) == 1  # the first of equals
    with pytest.raises(ValueError, match="empty"):
        route([])


def test_outcomes_are_those_of_the_nodes_whose_parents_spell_the_text() -> None:
    rng = np.random.default_rng(8)
    for _ in range(1_000 * EFFORT):
        tree = random_tree(rng, vocab_size=3)
        text = tuple(rng.integers(0, 3, int(rng.integers(0, 5))).tolist())
        given = step_log_probs(tree)
        found = {offer[0]: offer for offer in offers(tree, text)}
        for node in range(1, len(tree) + 1):
            spelled = text_at(tree, node)
            parent = ancestors(tree, node)[1]
            assert (node in found) == (text_at(tree, parent) == text[: len(spelled) - 1] and len(spelled) <= len(text))
            if node in found:
                *told, log_prob, score, right = found[node]
                assert told == [node, parent, len(spelled) - 1]
                assert (log_prob, score) == (pytest.approx(given[node - 1]), tree.log_probs[node - 1])
                assert right == (node in accepted(tree, text))
            assert (node in accepted(tree, text)) == (spelled == text[: len(spelled)])


def test_a_node_is_known_by_the_forward_and_the_heads_that_made_it() -> None:
    streamed = DraftTree(np.array([5, 6, 7, 8]), np.array([0, 1, 1, 2]), np.zeros(4, np.float32))
    at_once = DraftTree(np.array([5, 9, 4]), np.array([0, 1, 2]), np.zeros(3, np.float32))
    drafts = [Draft(tree=streamed, scored=streamed, deltas=[1, 3]), Draft(tree=at_once, scored=at_once, deltas=[3])]

    def made(tree: DraftTree, routed: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        step = Step(1, None, drafts, choice=Choice(tree, routed))
        step.verdict = Verdict(Fence(1, 1, 0), (), None, VerifyTimings())
        return [(one.forwards, one.owners) for one in step_trees(step, str)]

    lost = (1, 2, 3), (0b11, 0b10, 0b10)
    assert made(streamed, 0) == [((1, 2, 2, 2), (0b11, 0b01, 0b01, 0b01)), lost]
    assert made(prune(streamed, 2)[0], 0) == [((1, 2), (0b11, 0b01)), lost]
    ((_, owners),) = made(union([streamed, at_once]), UNION)
    assert owners == (0b11, 1, 1, 1, 0b11, 2, 2)


# --- the alarm about heads that draft far below what they were trained to ---


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
def test_a_head_misses_first_where_no_child_is_the_targets(text: list[int], miss: tuple[int, int] | None) -> None:
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
    alarms = [steps(AcceptanceWatch(expected, 1e-3), expected, 400, rng) < 400 for _ in range(200)]
    assert sum(alarms) <= 3  # the chance of more is below 1e-3
    assert steps(AcceptanceWatch(expected), expected, 2_000, rng) == 2_000


@pytest.mark.parametrize("kind", ["lookup", "bigram"])
def test_nothing_is_expected_of_a_head_without_weights(kind: str) -> None:
    """On some texts it is never right, and nothing is wrong with it."""
    watch = AcceptanceWatch(NgramHead(DrafterSettings(kind=kind)).description.expected_acceptance)
    assert steps(watch, [0.0], 2_000, np.random.default_rng(3)) == 2_000


@pytest.mark.parametrize(
    ("expected", "real", "median"),
    [([0.8], [0.2], 25), ([0.6], [0.1], 45), ([0.5], [0.02], 40), ([0.4], [0.0], 50), ([0.8, 0.8], [0.8, 0.1], 45)],
)
def test_a_head_that_collapses_is_found_in_time(expected: list[float], real: list[float], median: float) -> None:
    rng = np.random.default_rng(2)
    assert np.median([steps(AcceptanceWatch(expected), real, 500, rng) for _ in range(60)]) <= median


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
    (tmp_path / "config.json").write_text(json.dumps({"acceptance": found.model_dump()}))
    assert read_expectation(tmp_path) == found
    (tmp_path / "config.json").write_text('{"acceptance": {"by_depth": [2]}}')
    with pytest.raises(InvalidField, match="acceptance"):
        read_expectation(tmp_path)
