"""Parts of the adapter that need no process: updates change what their arm may change, no more, and the same again;
versions on disk are whole or refused; texts wait for their query; arms are chosen by what they save.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from coppice.adaptation.signals import QueryRecord, Sample
from coppice.adaptation.weights import Routes, Weights, variant_name
from coppice.errors import InvalidField
from coppice.heads.checkpoints import load_head, save_head
from coppice.limits import MAX_KINDS, MAX_VARIANTS, SKETCH
from coppice.training.losses import Targets
from services.adapter.decide import (
    GROUPS,
    PROVEN_SHARE,
    WARMUP,
    YOUNG_SHARE,
    Arm,
    Bandit,
    BanditState,
    Paper,
    PaperState,
    Trained,
    passes_over,
)
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


@pytest.mark.parametrize(("kind", "arm"), [*((kind, Arm.HEAD) for kind in KINDS), ("specblock", Arm.FULL)])
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
    for penalty in (0.0, 30.0):
        _, tensors = learner.learn(Arm.HEAD, {}, circles(learner), [], penalty)
        deployed = learner.deployed
        moved.append(sum(float((tensor - deployed[name]).norm()) for name, tensor in tensors.items()))
    assert moved[0] > moved[1] > 0


def test_an_update_that_is_not_finite_or_stopped_is_given_up_without_a_trace(learners: dict[str, Learner]) -> None:
    learner, arm = learners["specblock"], Arm.FULL
    texts = circles(learner)
    expected = learner.learn(arm, {}, texts, [])[1]
    bad = [replace(text, features=np.full_like(text.feature_rows(), 3e38).tobytes()) for text in texts]
    with pytest.raises(FloatingPointError):
        learner.learn(arm, {}, bad, [])
    learner.stopped.set()
    with pytest.raises(InterruptedError):
        learner.learn(arm, {}, texts, [])
    learner.stopped.clear()
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
    for number in range(1, 8 + VERSIONS):
        versions.save(version_of(number), good=2)
    reopened = Versions(tmp_path, DEPLOYED)
    assert reopened.numbers() == [2, *range(9, 8 + VERSIONS)]
    weights = reopened.load(9)
    assert (weights.version, weights.hash) == (9, version_of(9).hash)
    assert torch.equal(weights.tensors[CHANGED], torch.full((2, 3), 9.0))
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
    assert groups.counts() == {}


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


# --- decision rules: kinds of text differ, and what does not pay is taken back ---


BETTER, WORSE = Trained(60, 2.0, 2.4, 5.0), Trained(60, 2.0, 2.0, 5.0)
N = 4


def sketches(count: int, spread: float, seed: int) -> list[tuple[float, ...]]:
    """Sketches of one kind of text: unit vectors around a direction of its own."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal(SKETCH) + spread * rng.standard_normal((count, SKETCH))
    return [tuple((row / np.linalg.norm(row)).tolist()) for row in rows]


def query(
    sketch: tuple[float, ...] = (),
    tokens_per_s: float = 50.0,
    kind: int = 0,
    variant: int = 0,
    version: int = 0,
    s: float = 0.0,
    tau: float = 2.0,
) -> QueryRecord:
    return QueryRecord("s", s, tau, 40, 20, tokens_per_s, (version, version), kind, variant, sketch)


# --- the bandit ---


def with_a_kind(queries: int = 120) -> Bandit:
    """A bandit that knows one kind of text, kind 1."""
    bandit = Bandit()
    assert {bandit.take(query(sketch), True, False)[0] for sketch in sketches(queries, 0.3, 1)} == {1}
    return bandit


def young(bandit: Bandit, version: int, arm: Arm = Arm.FULL) -> None:
    """Put an update of kind 1 to use."""
    assert bandit.trained(1, arm, BETTER, bandit.variants(1)[1], version)


def drafted(bandit: Bandit, version: int, rate: float, other: float, count: int = 80) -> list[str]:
    """Measure queries of kind 1, the variant's and the other one's in turn; returns the verdicts."""
    noise, verdicts = random.Random(version), []
    for number in range(count):
        kind = bandit[1]
        variant, mean = ((kind.variant, rate), (kind.other, other))[number % 2]
        record = query(tokens_per_s=noise.gauss(mean, 8.0), kind=1, variant=variant, version=version)
        bandit.take(record, True, False)
        if verdict := bandit.settle(record, version, version):
            verdicts.append(verdict.what)
            break
    return verdicts


def drafts(bandit: Bandit) -> tuple[int, int, float]:
    return bandit[1].variant, bandit[1].other, bandit[1].share


def test_kinds_are_told_apart_and_a_place_is_found_for_every_one() -> None:
    bandit, groups = Bandit(), [sketches(40, 0.35, seed) for seed in range(4)]
    kinds = [[bandit.take(query(group[number]), True, False) for group in groups] for number in range(40)]
    assert kinds == [[(kind, number == 0) for kind in (1, 2, 3, 4)] for number in range(40)]
    for seed in range(10, 10 + 3 * MAX_KINDS):
        _, begins = bandit.take(query(sketches(1, 0.35, seed)[0]), True, False)
        assert begins
    assert len(bandit.state.kinds) == MAX_KINDS
    assert bandit.take(query(()), True, False) == (0, False)


def test_a_variant_drafts_for_nearly_all_texts_or_for_none_by_its_tokens_a_second() -> None:
    bandit = with_a_kind()
    young(bandit, 1)
    assert drafts(bandit) == (1, 0, YOUNG_SHARE)
    assert drafted(bandit, 1, 62.0, 50.0) == ["pays"]
    assert drafts(bandit) == (1, 0, PROVEN_SHARE)
    assert bandit[1].gain()[0] == pytest.approx(0.24, abs=0.15)
    bandit = with_a_kind()
    young(bandit, 1)
    assert drafted(bandit, 1, 38.0, 50.0) == ["loses"]
    assert drafts(bandit) == (0, 0, 0.0)
    assert [route and route.share for route in bandit.routes()] == [0.0]


def test_a_new_variant_is_compared_with_the_one_before_it_which_stays_if_it_is_better() -> None:
    bandit = with_a_kind()
    young(bandit, 1)
    drafted(bandit, 1, 65.0, 50.0)
    young(bandit, 3)
    assert drafts(bandit) == (2, 1, YOUNG_SHARE)
    assert drafted(bandit, 2, 25.0, 65.0) == []  # of weights before it
    assert drafted(bandit, 3, 50.0, 65.0) == ["loses"]
    assert drafts(bandit) == (1, 0, PROVEN_SHARE)


def test_the_arm_that_saves_most_beyond_its_cost_is_chosen_and_skip_where_none_does() -> None:
    assert with_a_kind(20).choose(1, 20) is Arm.SKIP  # too few texts
    bandit = with_a_kind(120)
    assert bandit.choose(1, 100) is Arm.HEAD
    bandit.state.text_s = {Arm.HEAD: 0.01, Arm.FULL: 0.01}
    assert bandit.choose(1, 100) is Arm.FULL
    bandit.state.text_s = {Arm.HEAD: 1.0, Arm.FULL: 1.0}
    assert bandit.choose(1, 100) is Arm.SKIP


def test_a_reward_is_what_a_variant_gains_less_what_its_training_cost() -> None:
    cheap, dear = with_a_kind(), with_a_kind()
    before = cheap.state.values[Arm.HEAD]
    for bandit, seconds in ((cheap, 1.0), (dear, 1000.0)):
        assert bandit.trained(1, Arm.HEAD, Trained(60, 2.0, 2.4, seconds), 1, 1)
        drafted(bandit, 1, 90.0, 50.0)
    assert cheap.state.values[Arm.HEAD] > before > dear.state.values[Arm.HEAD] > 0
    assert cheap.state.values[Arm.FULL] == dear.state.values[Arm.FULL]
    assert cheap.state.updates == {Arm.HEAD: 1}


def test_what_training_costs_is_learnt_from_the_steps_beside_it() -> None:
    bandit = with_a_kind()
    before = bandit.costs(1, Arm.FULL, 60)
    for _ in range(100):
        bandit.take(query(), True, True)  # steps as long as without
    assert bandit.costs(1, Arm.FULL, 60) < 0.1 * before


def test_a_variant_is_taken_from_the_kind_that_was_not_met_for_longest() -> None:
    bandit = Bandit()
    for seed in range(1, MAX_VARIANTS + 2):
        for sketch in sketches(30, 0.3, seed):
            number, _ = bandit.take(query(sketch), True, False)
        bandit.trained(number, Arm.FULL, BETTER, bandit.variants(number)[1], seed)
    assert [kind.share for kind in bandit.state.kinds] == [0.0] + [YOUNG_SHARE] * MAX_VARIANTS
    assert {kind.variant for kind in bandit.state.kinds[1:]} == set(range(1, MAX_VARIANTS + 1))


def test_earlier_weights_bring_their_routes_back_and_a_restart_changes_nothing() -> None:
    bandit = with_a_kind()
    earlier = Routes.of({"routes": bandit.routes().tensor()})
    young(bandit, 1)
    again = Bandit(BanditState.model_validate_json(bandit.state.model_dump_json()))
    assert again.state == bandit.state
    again.follow(earlier, 2)
    assert drafts(again) == (0, 0, 0.0)
    routes = bandit.routes().tensor()
    again.follow(Routes.of({"routes": routes, variant_name(1, "a"): routes}), 3)
    assert drafts(again) == (1, 0, YOUNG_SHARE)


@pytest.mark.parametrize(
    ("queries", "gains", "least", "arms"),
    [
        (360, {Arm.HEAD: 0.20, Arm.FULL: 0.27}, 1.07, {Arm.SKIP, Arm.HEAD, Arm.FULL}),
        (300, {}, 0.97, {Arm.SKIP, Arm.HEAD}),
        (80, {}, 1.0, {Arm.SKIP}),
    ],
)
def test_a_stream_that_can_be_learnt_is_faster_and_one_that_cannot_is_hardly_slower(
    queries: int, gains: dict[Arm, float], least: float, arms: set[Arm]
) -> None:
    """Texts of one kind are served: training slows the queries beside it, and an update gains so much, if anything."""
    chance, noise, bandit, chosen, version = random.Random(5), random.Random(6), Bandit(), set[Arm](), 0
    seconds = without = left_s = 0.0
    gain_of, training = {0: 0.0}, (Arm.SKIP, 0, Trained(1, 1.0, 1.0, 0.0))
    for number, sketch in enumerate(sketches(queries, 0.3, 1)):
        kind = bandit[1] if number else None
        variant = 0 if kind is None else kind.variant if chance.random() < kind.share else kind.other
        usual = 73.0 * noise.gauss(1.0, 0.12)
        rate = usual * (1 + gain_of[variant]) * (0.75 if left_s > 0 else 1.0)
        seconds, without, was_training = seconds + 40 / rate, without + 40 / usual, left_s > 0
        record = query(sketch, rate, 1 if number else 0, variant, version)
        bandit.take(record, True, was_training)
        version += bool(bandit.settle(record, version, version))
        left_s -= 40 / rate
        if was_training and left_s <= 0:
            arm, made, result = training
            version += bandit.trained(1, arm, result, made, version + 1)
        texts = min(128, bandit[1].queries * 5 // 6)
        arm = bandit.choose(1, texts) if left_s <= 0 else Arm.SKIP
        chosen.add(arm)
        if arm is not Arm.SKIP:
            begin, made = bandit.variants(1)
            gain_of[made] = max(gain_of[begin], gains.get(arm, 0.0))
            left_s = {Arm.HEAD: 0.06, Arm.FULL: 0.13}[arm] * texts * passes_over(texts)
            training = arm, made, Trained(texts, 1 + gain_of[begin], 1 + gain_of[made], left_s)
    assert without / seconds >= least
    assert chosen == arms


# --- the paper's rule ---


def asked(rule: Paper, count: int, rate: float = 50.0, tau: float = 2.0, s: float = 9.0) -> list[int]:
    groups = []
    for _ in range(count):
        record = query(tokens_per_s=rate, s=s, tau=tau)
        groups.append(rule.take(record, True, False)[0])
        rule.settle(record, 1, 1)
    return groups


def updated(rule: Paper, arm: Arm, version: int) -> None:
    assert rule.choose(GROUPS[arm], N) is arm
    assert rule.trained(GROUPS[arm], arm, WORSE, rule.variants(GROUPS[arm])[1], version)  # every update is put to use


def test_the_paper_warms_up_then_tries_both_arms_and_blocks_queries_behind_an_event() -> None:
    rule = Paper("paper", 20)
    assert asked(rule, WARMUP) == [0] * WARMUP
    assert set(asked(rule, 5)) <= {1, 2}
    assert rule.choose(1, 19) is Arm.SKIP
    rule = Paper("paper", N)
    asked(rule, 3 * N)
    updated(rule, Arm.HEAD, 1)
    assert asked(rule, 2) == [0, 0]
    assert rule.choose(1, N) is Arm.SKIP  # an event is measured
    assert asked(rule, 1, s=0.0) == [0]


def test_equations_9_and_10_and_skip_where_no_arm_gains() -> None:
    rule = Paper("paper", N)
    asked(rule, 3 * N, rate=50.0)
    updated(rule, Arm.FULL, 1)
    asked(rule, N, rate=68.0)
    assert rule.state.values == {Arm.FULL: pytest.approx(2.0)}
    updated(rule, Arm.FULL, 2)
    asked(rule, N, rate=59.0)
    assert rule.state.values[Arm.FULL] == pytest.approx(0.9 * 2.0 - 0.1)
    rule.state.updates = {Arm.HEAD: 4, Arm.FULL: 4}  # behind the cold start
    rule.state.values = {Arm.HEAD: -1.0, Arm.FULL: 0.5}
    assert asked(rule, 1) == [GROUPS[Arm.FULL]]
    rule.state.values[Arm.FULL] = -0.5
    assert asked(rule, 1) == [0]


@pytest.mark.parametrize(("taus", "reverts"), [((2.4, 2.2, 2.0), True), ((2.4, 2.0, 2.2), False)])
def test_three_falling_windows_bring_the_first_ones_weights_back(taus: tuple[float, ...], reverts: bool) -> None:
    rule, verdicts = Paper("paper", N), []
    for version, tau in enumerate(taus):
        for _ in range(N):
            record = query(tau=tau, version=version, s=9.0)
            rule.take(record, True, False)
            if verdict := rule.settle(record, version, version):
                verdicts.append((verdict.what, verdict.version))
    assert verdicts == [("good", 0), ("good", 1), ("revert", 0) if reverts else ("good", 2)]
    rule.state.values = {Arm.FULL: 1.0}
    rule.follow(Routes(), 7)
    assert (rule.state.values, rule.state.windows) == ({}, [])


def test_other_policies_are_the_papers_with_fewer_arms() -> None:
    for policy, arm in (("head-only", Arm.HEAD), ("full-only", Arm.FULL)):
        rule = Paper(policy, N)
        assert set(asked(rule, 40)) == {0, GROUPS[arm]}
        updated(rule, arm, 1)
        assert PaperState.model_validate_json(rule.state.model_dump_json()) == rule.state
    always = Paper("always", N)
    assert set(asked(always, 2 * N)) == {GROUPS[Arm.FULL]}
    assert always.choose(GROUPS[Arm.FULL], 1) is Arm.FULL
    asked(always, 1)
    assert always.choose(GROUPS[Arm.FULL], 50) is Arm.SKIP
