"""Updates do what they say, no more, and the same again; versions on disk are whole or refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from coppice.adaptation.records import Kind, Sample
from coppice.config.adaptation import AdapterSettings, LearnerSettings
from coppice.config.settings import Settings
from coppice.heads.checkpoints import load_head, save_head
from coppice.training.losses import Anchor, Targets, divergence
from coppice.weights.versions import Weights
from services.adapter.atomic import BadFile
from services.adapter.buffers import Buffers
from services.adapter.learner import Learner, Recipe
from services.adapter.training_copy import TrainingCopy, Versions
from services.adapter.windows import Windows
from tests.tiny import make_target
from tests.unit.test_feature_heads import HIDDEN, VOCAB, save_random

DEMO = Path(__file__).parents[2] / "models" / "demo"
KINDS = ("specblock", "eagle3", "dspark")
BOTH: tuple[Kind, ...] = ("head", "full")
HEADS_OWN = {
    "specblock": {"lm_head.weight", "rank_head.0.weight", "rank_head.2.weight"},
    "eagle3": {"lm_head.weight"},
    "dspark": {
        *(f"markov_head.markov_w{number}.weight" for number in (1, 2)),
        *(f"confidence_head.proj.{name}" for name in ("weight", "bias")),
    },
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), VOCAB, layers=8, hidden=HIDDEN, tokenizer=False)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: save_random(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


RATES = LearnerSettings(head_rate=1e-2, full_rate=3e-3)


def learner(heads: dict[str, Path], kind: str, target: Path, **more: Any) -> Learner:
    return Learner(heads[kind], target, RATES, Recipe(blocks=2, steps=3, **more))


def missed(rng: np.random.Generator, token: int) -> dict[str, Any]:
    """The token with most of the probability, five others with less, a tail."""
    others = rng.choice([other for other in range(VOCAB) if other != token], 5, replace=False)
    return {
        "version": 0,
        "target_id": token,
        "top_ids": np.array([token, *others], np.int64),
        "top_log_probs": np.log(np.array([0.6, 0.1, 0.1, 0.05, 0.05, 0.05], np.float32)),
        "tail": 0.05,
    }


def head_sample(hidden: NDArray[np.float32], **told: Any) -> Sample:
    empty = np.empty(0, np.int64)
    return Sample(kind="head", session="s", position=9, miss=0.5, hidden=hidden, tokens=empty, **told)


def full_sample(tokens: NDArray[np.int64], features: NDArray[np.float32], **told: Any) -> Sample:
    rows, hidden = features.astype("<f4").tobytes(), np.zeros(1, np.float32)
    return Sample(kind="full", session="s", position=99, miss=0.5, hidden=hidden, tokens=tokens, features=rows, **told)


def head_samples(made: Learner, count: int = 24) -> list[Sample]:
    rng = np.random.default_rng(1)
    known = [token for token in range(VOCAB) if made.vocabulary.number_of(token) >= 0]
    return [
        head_sample(
            rng.standard_normal(HIDDEN).astype(np.float32),
            previous_id=int(rng.choice(VOCAB)),
            **missed(rng, int(rng.choice(known))),
        )
        for _ in range(count)
    ]


def full_samples(made: Learner, count: int = 6) -> list[Sample]:
    """Windows of several lengths over texts that go round in circles, so that there is something to learn."""
    rng = np.random.default_rng(2)
    known = [token for token in range(VOCAB) if made.vocabulary.number_of(token) >= 0]
    circle, found = rng.permutation(known)[:12], list[Sample]()
    features = rng.standard_normal((12, 3 * HIDDEN)).astype(np.float32)
    for number in range(count):
        rows = 20 - 3 * (number % 3)
        tokens = circle[(np.arange(rows + 1) + number) % 12].astype(np.int64)
        read = features[(np.arange(rows) + number) % 12]
        found.append(full_sample(tokens, read, **missed(rng, int(tokens[-1]))))
    return found


def samples_for(made: Learner, learns: Kind) -> list[Sample]:
    return head_samples(made) if learns == "head" else full_samples(made)


def said(model: Any, samples: list[Sample]) -> Tensor:
    """(n, draft vocabulary) logits behind the samples' normed states and the tokens before."""
    logits: Tensor = model.lm_head(torch.stack([torch.from_numpy(one.hidden) for one in samples]))
    if model.own_output:
        return logits
    table = model.markov_head
    return logits + table.markov_w1.weight[[one.previous_id for one in samples]] @ table.markov_w2.weight.T


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    return {name for name in one if not torch.equal(one[name], other[name])}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- updates ---


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_only_update_raises_missed_tokens_and_changes_nothing_below(
    kind: str, heads: dict[str, Path], target: Path
) -> None:
    made = learner(heads, kind, target)
    samples, was = head_samples(made), copies(made.tensors())
    gold = torch.tensor([made.vocabulary.number_of(one.target_id) for one in samples])

    def likely() -> Tensor:
        logits = said(made.student.model, samples).detach()
        return logits.log_softmax(-1).gather(-1, gold[:, None])[:, 0]

    before = likely()
    update = made.step("head", samples)
    assert likely().mean() > before.mean() + 0.1
    assert update.loss_after < update.loss_before
    assert differing(made.tensors(), was) == HEADS_OWN[kind]
    assert set(made.changed()) == differing(made.tensors(), was)
    assert all(tensor.dtype == torch.float32 for tensor in made.changed().values())


def test_a_head_that_brings_its_output_layer_is_taught_by_its_markov_table(
    heads: dict[str, Path], target: Path, tmp_path: Path
) -> None:
    loaded = load_head("dspark", heads["dspark"], target)
    loaded.model.own_output = True  # as DeepSpec's files have it
    save_head(tmp_path / "own", loaded.model, loaded.config)
    made = learner({"dspark": tmp_path / "own"}, "dspark", target)
    was, update = copies(made.tensors()), made.step("head", head_samples(made))
    assert update.loss_after < update.loss_before
    assert differing(made.tensors(), was) == HEADS_OWN["dspark"]


def test_the_rank_head_learns_the_buckets_of_the_new_output_layer(heads: dict[str, Path], target: Path) -> None:
    made = learner(heads, "specblock", target, head_passes=200)
    samples, model = head_samples(made, 8), made.student.model
    made.step("head", samples)
    hidden = torch.stack([torch.from_numpy(one.hidden) for one in samples])
    with torch.no_grad():
        logits = model.lm_head(hidden)
        buckets = model.rank(hidden, logits).argmax(-1)
    gold = [made.vocabulary.number_of(one.target_id) for one in samples]
    ranks = [1 + int((row > row[own]).sum()) for row, own in zip(logits, gold, strict=True)]
    assert buckets.tolist() == [0 if r == 1 else 1 if r <= 4 else 2 if r <= 10 else 3 for r in ranks]


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_update_lowers_the_loss_on_its_windows(kind: str, heads: dict[str, Path], target: Path) -> None:
    made = learner(heads, kind, target)
    embedding, d2t = made.student.embedding.clone(), made.student.model.d2t.clone()
    updates = [made.step("full", full_samples(made)) for _ in range(4)]
    assert updates[-1].loss_after < updates[0].loss_before - 0.3
    assert all(update.loss_after < update.loss_before for update in updates)
    assert set(made.changed()) >= set(made.tensors()) - HEADS_OWN[kind]
    assert torch.equal(made.student.embedding, embedding)
    assert torch.equal(made.student.model.d2t, d2t)
    assert same(made.deployed(), learner(heads, kind, target).tensors())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("learns", BOTH)
def test_the_penalty_keeps_a_head_near_the_deployed_one(
    learns: Kind, kind: str, heads: dict[str, Path], target: Path
) -> None:
    def distance(penalty: float, anchored: bool = True) -> float:
        made = learner(heads, kind, target, penalty=penalty)
        samples = samples_for(made, learns)
        for _ in range(4):
            made.step(learns, samples, anchored=anchored)
        if learns == "head":
            with torch.no_grad():
                return divergence(*(said(each.model, samples) for each in (made.student, made.frozen))).item()
        windows = Windows(samples, made.vocabulary)
        loss = made.loss_on(windows)
        with torch.no_grad():
            plain, pulled = (
                each(made.student, windows.positions, windows.positions).item()
                for each in (loss, replace(loss, anchor=Anchor(made.frozen, 1.0)))
            )
        return float(pulled - plain)

    free, light, heavy = distance(0.0), distance(0.3), distance(3.0)
    assert free > light > heavy > 0
    assert distance(3.0, anchored=False) == pytest.approx(free)


def test_an_anchor_that_says_the_same_adds_nothing(heads: dict[str, Path], target: Path) -> None:
    for kind in KINDS:
        made = learner(heads, kind, target)
        windows = Windows(full_samples(made), made.vocabulary)
        loss = made.loss_on(windows)
        plain = loss(made.student, windows.positions, windows.positions)
        pulled = replace(loss, anchor=Anchor(made.frozen, 5.0))(made.student, windows.positions, windows.positions)
        assert pulled.item() == pytest.approx(plain.item(), rel=1e-5)


@pytest.mark.parametrize("learns", BOTH)
def test_an_update_that_is_not_finite_leaves_the_weights_alone(
    learns: Kind, heads: dict[str, Path], target: Path
) -> None:
    made = learner(heads, "specblock", target)
    sample = samples_for(made, learns)[0]
    if sample.kind == "head":
        bad = replace(sample, hidden=np.full(HIDDEN, 3e38, np.float32))
    else:
        bad = replace(sample, features=np.full_like(sample.feature_rows(), 3e38).tobytes())
    was = copies(made.tensors())
    with pytest.raises(FloatingPointError):
        made.step(learns, [bad])
    assert same(made.tensors(), was)
    made.step(learns, samples_for(made, learns))
    assert not same(made.tensors(), was)


def test_windows_that_the_deployed_head_knows_better_are_learnt_from_there(
    heads: dict[str, Path], target: Path
) -> None:
    def moved(anchored: bool) -> tuple[Learner, float]:
        """One update after the training copy was spoilt."""
        made = learner(heads, "specblock", target, full_passes=1)
        spoilt = {name: 3 * tensor for name, tensor in made.deployed().items() if name == "lm_head.weight"}
        made.revert(spoilt)
        made.step("full", full_samples(made), anchored=anchored)
        far = made.tensors()["lm_head.weight"] - made.deployed()["lm_head.weight"]
        return made, far.norm().item()

    made, near = moved(anchored=True)
    _, far = moved(anchored=False)
    assert 0 < near < 0.1 * far
    was = copies(made.tensors())
    made.step("full", full_samples(made))  # what was learnt since is better than the deployed head: it is gone on from
    assert (made.tensors()["lm_head.weight"] - was["lm_head.weight"]).norm() < 2 * near


# --- what is taught ---


def test_windows_teach_their_tokens_and_the_targets_distribution_at_their_end(
    heads: dict[str, Path], target: Path
) -> None:
    made = learner(heads, "specblock", target)
    samples = full_samples(made)
    windows = Windows(samples, made.vocabulary)
    targets = Targets.of(windows.read(windows.positions), windows)
    for number, sample in enumerate(samples):
        numbers = [made.vocabulary.number_of(int(token)) for token in sample.top_ids]
        said = dict(zip(numbers, np.exp(sample.top_log_probs).tolist(), strict=True))
        inside = {number: p for number, p in said.items() if number >= 0}
        for offset in range(3):
            gold = targets.behind(offset)[number].tolist()
            wanted = [made.vocabulary.number_of(int(token)) for token in sample.tokens[2 + offset :]]
            assert gold == wanted + [-1] * (len(gold) - len(wanted))
            admitted = torch.zeros(len(samples), len(gold), dtype=torch.bool)
            admitted[number, : len(wanted)] = True
            taught = targets.taught(admitted, offset).exp()
            assert taught.argmax(-1).tolist() == wanted
            assert taught[:-1].amax(-1).tolist() == [1] * (len(wanted) - 1)
            assert taught[-1].sum().item() == pytest.approx(1)
            for known, p in inside.items():
                assert taught[-1, known].item() == pytest.approx(p / sum(inside.values()), rel=1e-4)


def test_without_top_ids_the_missed_token_is_certain(heads: dict[str, Path], target: Path) -> None:
    made = learner(heads, "specblock", target)
    sample = head_samples(made)[0]
    bare = replace(sample, top_ids=np.zeros(0, np.int64), top_log_probs=np.zeros(0, np.float32), tail=1.0)
    row = made.vocabulary.log_probs(bare).exp()
    assert row.argmax() == made.vocabulary.number_of(sample.target_id)
    assert row.max() == 1 == row.sum()


# --- buffers ---


def test_a_buffer_never_holds_more_than_its_capacity(heads: dict[str, Path], target: Path) -> None:
    samples, dropped = head_samples(learner(heads, "specblock", target), 6), Counter[str]()
    buffers = Buffers({"head": 4}, (), lambda count, why: dropped.update({why: count}))
    for sample in samples:
        buffers.add(sample)
    assert dropped == {"overflow": 2}
    assert buffers.take("head") == samples[2:]
    assert buffers.size("head") == 0


def test_stale_head_samples_are_dropped_and_counted_and_full_ones_stay(heads: dict[str, Path], target: Path) -> None:
    made, dropped = learner(heads, "specblock", target), Counter[str]()
    buffers = Buffers({"head": 8, "full": 8}, (), lambda count, why: dropped.update({why: count}))
    for version, head, full in zip(range(4), head_samples(made), full_samples(made), strict=False):
        buffers.add(replace(head, version=version))
        buffers.add(replace(full, version=version))
    buffers.layers_changed(3)
    assert dropped == {"stale": 3}
    assert [sample.version for sample in buffers.take("head")] == [3]
    assert len(buffers.take("full")) == 4
    buffers.add(replace(head_samples(made)[0], version=2))
    buffers.add(replace(full_samples(made)[0], version=2))
    assert dropped == {"stale": 4}
    assert (buffers.size("head"), buffers.size("full")) == (0, 1)


# --- the same again ---


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_samples_make_the_same_weights(kind: str, heads: dict[str, Path], target: Path) -> None:
    one, other = learner(heads, kind, target), learner(heads, kind, target)
    for learns in ("full", "head", "full"):
        action_: Kind = "head" if learns == "head" else "full"
        one.step(action_, samples_for(one, action_))
        other.step(action_, samples_for(other, action_))
        assert same(one.tensors(), other.tensors())


@pytest.mark.parametrize("kind", KINDS)
def test_a_restarted_learner_goes_on_as_if_it_had_not_stopped(
    kind: str, heads: dict[str, Path], target: Path, tmp_path: Path
) -> None:
    whole, file = learner(heads, kind, target), tmp_path / "learner.safetensors"
    for learns in BOTH:
        whole.step(learns, samples_for(whole, learns))
    whole.save(file)
    again = learner(heads, kind, target)
    again.revert(whole.changed())
    again.load(file)
    for learns in BOTH:
        whole.step(learns, samples_for(whole, learns))
        again.step(learns, samples_for(again, learns))
        assert same(again.tensors(), whole.tensors())
    assert again.updates == {"head": 2, "full": 2}


def test_a_damaged_state_or_one_of_other_weights_is_refused(
    heads: dict[str, Path], target: Path, tmp_path: Path
) -> None:
    made, file = learner(heads, "specblock", target), tmp_path / "learner.safetensors"
    made.step("full", full_samples(made))
    made.save(file)
    with pytest.raises(BadFile, match="other weights"):
        learner(heads, "specblock", target).load(file)
    whole, fresh = file.read_bytes(), learner(heads, "specblock", target)
    fresh.revert(made.changed())
    was = copies(fresh.tensors())
    for damaged in (whole[:-7], whole[: len(whole) // 2], b"", whole[:8] + b"[" + whole[9:], whole[:-1] + b"~"):
        file.write_bytes(damaged)
        with pytest.raises(BadFile):
            fresh.load(file)
    assert same(fresh.tensors(), was)


def test_reverting_brings_back_the_given_version(heads: dict[str, Path], target: Path) -> None:
    made = learner(heads, "specblock", target)
    made.step("head", head_samples(made))
    good, was = made.changed(), copies(made.tensors())
    made.step("full", full_samples(made))
    made.revert(good)
    assert same(made.tensors(), was)
    assert same(made.changed(), good)
    for wrong in ({"other.weight": torch.zeros(1)}, {"lm_head.weight": torch.zeros(1)}):
        with pytest.raises(ValueError):
            made.revert(wrong)
    made.revert()
    assert same(made.tensors(), made.deployed())
    assert made.changed() == {}


# --- versions on disk ---

DEPLOYED = Weights.of({"lm_head.weight": torch.zeros(2, 3), "fc.weight": torch.ones(4)})


def version_of(number: int) -> Weights:
    return DEPLOYED.changed({"lm_head.weight": torch.full((2, 3), float(number))}, number)


def test_versions_come_back_as_they_were_and_old_ones_make_room(tmp_path: Path) -> None:
    versions = Versions(tmp_path / "versions", DEPLOYED, keep=3)
    for number in range(1, 8):
        versions.save(version_of(number))
        versions.good = min(number, 2)
    assert versions.numbers() == [2, 6, 7]
    reopened = Versions(tmp_path / "versions", DEPLOYED, keep=3)
    weights = reopened.load(6)
    assert (weights.version, weights.hash) == (6, version_of(6).hash)
    assert torch.equal(weights.tensors["lm_head.weight"], torch.full((2, 3), 6.0))
    assert weights.tensors["fc.weight"] is DEPLOYED.tensors["fc.weight"]
    assert reopened.load(0) is DEPLOYED
    with pytest.raises(ValueError, match="there already"):
        reopened.save(version_of(7))
    assert not [path for path in (tmp_path / "versions").rglob("*") if "partial" in path.name]


def test_damaged_versions_and_those_of_another_head_are_refused(tmp_path: Path) -> None:
    versions = Versions(tmp_path, DEPLOYED)
    for number in (1, 2):
        versions.save(version_of(number))
    file = tmp_path / "version-00000002.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-7], b"", whole[:8] + b"[" + whole[9:], whole[:-1] + b"~"):
        file.write_bytes(damaged)
        with pytest.raises(BadFile):
            versions.load(2)
    with pytest.raises(BadFile):
        versions.load(3)
    assert versions.load(1).hash == version_of(1).hash
    other = Versions(tmp_path, Weights.of({"lm_head.weight": torch.ones(2, 3), "fc.weight": torch.zeros(4)}))
    with pytest.raises(BadFile, match="another head"):
        other.load(1)


def test_a_half_written_version_is_none(tmp_path: Path) -> None:
    partial = tmp_path / ".version-00000001.safetensors.partial"
    partial.write_bytes(b"half")
    assert Versions(tmp_path, DEPLOYED).numbers() == []
    assert not partial.exists()


def test_samples_are_as_wide_as_the_layers_that_the_head_reads(
    heads: dict[str, Path], target: Path, tmp_path: Path
) -> None:
    settings = Settings(adapter=AdapterSettings(target=str(target)))
    five = save_random(tmp_path / "five", "eagle3", feature_layers=(0, 1, 2, 3, 4))
    for layers, folder in ((3, heads["eagle3"]), (5, five)):
        assert TrainingCopy(str(folder), settings, tmp_path / "copy").widths.features == layers * HIDDEN


def test_a_damaged_version_is_passed_over_for_the_good_one_and_then_for_the_deployed_one(
    heads: dict[str, Path], target: Path, tmp_path: Path
) -> None:
    settings = Settings(adapter=AdapterSettings(target=str(target)), learner=LearnerSettings(full_rate=3e-3))

    def opened(live: int, good: int) -> TrainingCopy:
        copy = TrainingCopy(str(heads["specblock"]), settings, tmp_path)
        copy.open(live, good)
        return copy

    first = opened(0, 0)
    samples = full_samples(learner(heads, "specblock", target))
    made = [first.train("full", samples, number, True)[1] for number in (1, 2)]
    assert opened(2, 1).live.hash == made[1].hash
    (tmp_path / "version-00000002.safetensors").write_bytes(b"damaged")
    again = opened(2, 1)
    assert (again.live.version, again.live.hash) == (1, made[0].hash)
    assert again.restore(None, 3).hash == made[0].hash
    (tmp_path / "version-00000001.safetensors").unlink()
    assert opened(2, 1).live.hash == first.deployed.hash


# --- a real head ---
