"""Routing: head scores, what the text says about a tree, and calibration of synthetic heads."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from coppice.speculation.policy import UNION, Choice, route
from coppice.speculation.tree import DraftTree, prune, union
from coppice.wire.common import Fence
from coppice.wire.verifier import Verdict, VerifyTimings
from orchestrator.heads import Calibration, Draft, accepted, offers, step_log_probs
from orchestrator.loop import Step, step_trees
from tests.reference import EFFORT, ancestors, make_tree, random_tree, text_at


def sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    probs: NDArray[np.float64] = 1 / (1 + np.exp(-logits))
    return probs


def logit(probs: NDArray[np.float64]) -> NDArray[np.float64]:
    logits: NDArray[np.float64] = np.log(probs / (1 - probs))
    return logits


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
        fitted = fitted + np.linalg.solve(precision, features.T @ (right - sigmoid(features @ fitted)))
        np.testing.assert_allclose([calibration.scale, calibration.shift], fitted, rtol=1e-9)
        chain = calibration.of(DraftTree.chain(np.arange(4), np.cumsum(np.log(claimed))))
        np.testing.assert_allclose(chain.log_probs, np.cumsum(np.log(sigmoid(features @ fitted))), rtol=1e-5)
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
    for _ in range(2_000 * EFFORT):
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
