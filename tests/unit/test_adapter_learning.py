"""Parts of the adapter that need no process: updates change what their arm may change, no more, and the same again;
versions on disk are whole or refused; texts wait for their query.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from coppice.adaptation.signals import Sample
from coppice.adaptation.weights import Weights, variant_name
from coppice.errors import InvalidField
from coppice.heads.checkpoints import load_head, save_head
from coppice.training.losses import Targets
from services.adapter.decide import UPDATES, Arm
from services.adapter.learn import SAMPLES, Groups, Learner, Pace
from services.adapter.loop import VERSIONS, Versions
from tests.services.test_signal_stream import sample
from tests.unit.test_feature_heads import VOCAB, save_random

KINDS = ("specblock", "eagle3", "dspark")
HEADS_OWN = {
    "specblock": {"lm_head.weight", "rank_head.0.weight", "rank_head.2.weight"},
    "eagle3": {"lm_head.weight"},
    "dspark": {
        *(f"markov_head.markov_w{number}.weight" for number in (1, 2)),
        *(f"confidence_head.proj.{name}" for name in ("weight", "bias")),
    },
}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: save_random(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture(scope="module")
def learners(heads: dict[str, Path], target: Path) -> dict[str, Learner]:
    return {kind: Learner(heads[kind], target) for kind in KINDS}


def draft_ids(learner: Learner) -> list[int]:
    return [token for token in range(VOCAB) if learner._draft_number[token] >= 0]


def circles(learner: Learner, count: int = 16) -> list[Sample]:
    """Texts of several lengths that go round in circles, so that there is something to learn."""
    rng = np.random.default_rng(2)
    circle = rng.permutation(draft_ids(learner))[:12]
    features = rng.standard_normal((12, learner.config.feature_width)).astype("<f4")
    samples = []
    for number in range(count):
        rows = 20 - 3 * (number % 3)
        tokens = circle[(np.arange(rows + 1) + number) % 12].astype(np.int64)
        read = features[(np.arange(rows) + number) % 12]
        samples.append(Sample("s", tokens, read.tobytes()))
    return samples


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("arm", UPDATES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_lengthens_drafts_by_what_its_arm_is(kind: str, arm: Arm, learners: dict[str, Learner]) -> None:
    learner = learners[kind]
    texts = circles(learner)
    result, tensors = learner.learn(arm, {}, texts[:12], texts[12:])
    assert result.after > result.before + 0.05
    assert result.gain == pytest.approx(result.after / result.before - 1)
    assert (set(tensors) == HEADS_OWN[kind]) if arm is Arm.HEAD else (set(tensors) > HEADS_OWN[kind])
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    further, _ = learner.learn(arm, tensors, texts[:1], texts[12:])
    assert further.before == result.after


def test_a_head_is_taught_by_its_markov_table_or_where_the_output_layer_is_the_targets_by_the_norm_before(
    heads: dict[str, Path], target: Path, tmp_path: Path
) -> None:
    loaded = load_head("dspark", heads["dspark"], target)
    loaded.model.own_output = True  # as DeepSpec's files have it
    save_head(tmp_path / "own", loaded.model, loaded.config)
    learner = Learner(tmp_path / "own", target)
    _, tensors = learner.learn(Arm.HEAD, {}, circles(learner), [])
    assert set(tensors) == HEADS_OWN["dspark"]
    borrowing = Learner(save_random(tmp_path / "shared", "eagle3", shared_output=True), target)
    assert set(borrowing.learn(Arm.HEAD, {}, circles(borrowing), [])[1]) == {"norm.weight"}


def test_the_penalty_holds_a_head_near_the_deployed_one(learners: dict[str, Learner]) -> None:
    learner, moved = learners["eagle3"], []
    for penalty in (0.0, 1.0, 30.0):
        _, tensors = learner.learn(Arm.HEAD, {}, circles(learner), [], penalty)
        deployed = learner.deployed
        moved.append(sum(float((tensor - deployed[name]).norm()) for name, tensor in tensors.items()))
    assert moved[0] > moved[1] > moved[2] > 0


def test_an_update_that_is_not_finite_is_refused_without_a_trace(learners: dict[str, Learner]) -> None:
    learner, arm = learners["specblock"], Arm.FULL
    texts = circles(learner)
    expected = learner.learn(arm, {}, texts, [])[1]
    bad = [replace(text, features=np.full_like(text.feature_rows(), 3e38).tobytes()) for text in texts]
    with pytest.raises(FloatingPointError):
        learner.learn(arm, {}, bad, [])
    assert same(learner.learn(arm, {}, texts, [])[1], expected)


def test_texts_teach_their_own_tokens_and_nothing_behind_their_end(learners: dict[str, Learner]) -> None:
    learner = learners["specblock"]
    samples = circles(learner, 3)
    numbers = {token: number for number, token in enumerate(sorted(draft_ids(learner)))}
    texts = learner.texts(samples)
    targets = Targets.of(texts.answer, texts)
    for offset in range(3):
        for row, each in zip(targets.behind(offset).tolist(), samples, strict=True):
            taught = [numbers[int(token)] for token in each.tokens[2 + offset :]]
            assert row == taught + [-1] * (len(row) - len(taught))


def test_a_learner_that_is_stopped_gives_its_update_up(heads: dict[str, Path], target: Path) -> None:
    learner = Learner(heads["eagle3"], target)
    learner.stopped.set()
    with pytest.raises(InterruptedError):
        learner.learn(Arm.FULL, {}, circles(learner), [])


def test_a_thread_computes_for_no_more_than_its_share_of_the_time() -> None:
    pace, began = Pace(0.2), time.thread_time()
    while time.thread_time() - began < 0.05:
        pass
    pace.rest()
    assert pace.seconds >= 0.25


# --- versions on disk ---

DEPLOYED = Weights.of({"lm_head.weight": torch.zeros(2, 3), "fc.weight": torch.ones(4)})
CHANGED = variant_name(1, "lm_head.weight")


def version_of(number: int) -> Weights:
    return DEPLOYED.changed({CHANGED: torch.full((2, 3), float(number))}, number)


def test_versions_come_back_as_they_were_and_old_ones_make_room(tmp_path: Path) -> None:
    versions = Versions(tmp_path, DEPLOYED)
    assert versions.numbers() == []
    for number in range(1, 8 + VERSIONS):
        versions.save(version_of(number), good=2)
    assert versions.numbers() == [2, *range(9, 8 + VERSIONS)]
    reopened = Versions(tmp_path, DEPLOYED)
    weights = reopened.load(9)
    assert (weights.version, weights.hash) == (9, version_of(9).hash)
    assert torch.equal(weights.tensors[CHANGED], torch.full((2, 3), 9.0))
    assert weights.tensors["fc.weight"] is DEPLOYED.tensors["fc.weight"]
    assert reopened.load(0) is DEPLOYED


def test_damaged_versions_and_those_of_another_head_are_refused(tmp_path: Path) -> None:
    versions = Versions(tmp_path, DEPLOYED)
    for number in (1, 2):
        versions.save(version_of(number), good=0)
    file = tmp_path / "version-00000002.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-7], b"", whole[:8] + b"[" + whole[9:], whole[:-1] + b"~"):
        file.write_bytes(damaged)
        with pytest.raises(InvalidField):
            versions.load(2)
    with pytest.raises(InvalidField):
        versions.load(3)
    assert versions.load(1).hash == version_of(1).hash
    other = Versions(tmp_path, Weights.of({"lm_head.weight": torch.ones(2, 3), "fc.weight": torch.zeros(4)}))
    with pytest.raises(InvalidField, match="another head"):
        other.load(1)


# --- texts until they are learnt from ---


def test_texts_join_the_group_that_their_query_is_of_and_some_are_held_out() -> None:
    dropped = Counter[str]()
    groups = Groups(lambda reason: dropped.update([reason]))
    for _ in range(7):
        groups.take(sample(session="one"))
    assert groups.of(1) == ([], [])
    groups.claim("one", 1)
    groups.take(sample(session="one"))  # late
    assert [len(texts) for texts in groups.of(1)] == [7, 1]
    groups.take(sample(session="two"))
    groups.claim("two", 0)
    assert dropped == {"skipped": 1}
    groups.forget(1)
    assert (groups.of(1), groups.counts()) == (([], []), {})


def test_texts_of_queries_that_never_end_are_bounded_and_so_is_a_group() -> None:
    dropped = Counter[str]()
    groups = Groups(lambda reason: dropped.update([reason]))
    for number in range(SAMPLES + 7):
        groups.take(sample(session="long" if number > 100 else f"s{number}"))
    assert dropped["unclaimed"] == 7
    groups.claim("long", 1)
    assert [len(texts) for texts in groups.of(1)] == [128, 8]
    groups.claim("s99", 1)
    assert groups.counts() == {1: 128}
