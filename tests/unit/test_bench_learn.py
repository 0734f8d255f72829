"""`bench learn`: recipes learn what they say from what a drafter would send, and what the table says is in the JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from coppice.adaptation.records import Kind, Sample
from coppice.bench.adapt import learn
from coppice.bench.adapt.low_rank import RANK
from coppice.bench.adapt.recipes import RECIPES, Recipe, train
from coppice.bench.adapt.recorded import MISS_WINDOW, STRIDE, WINDOW, Recorded, miss_samples, text_sample
from coppice.bench.bare import wire_features
from coppice.bench.cli import app
from coppice.bench.paper.replay import Missed
from coppice.heads.feature_head import FeatureHead
from coppice.stack.spec import HeadSpec
from coppice.training.progress import Progress
from coppice.weights.versions import Weights
from services.drafter.samples import Samples, Window
from tests.tiny import make_target
from tests.unit.test_adaptation_training import HEADS_OWN
from tests.unit.test_feature_heads import HIDDEN, save_random
from tests.unit.test_samples import Taken

KINDS = ("specblock", "eagle3", "dspark")
VOCAB = 300
NEW, FAMILIAR = 8, 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), VOCAB, layers=8, hidden=HIDDEN)


@pytest.fixture(scope="module", params=KINDS)
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HeadSpec:
    kind = request.param
    folder = save_random(tmp_path_factory.mktemp(kind), kind, vocab_size=VOCAB, draft_vocab_size=VOCAB)
    return HeadSpec("a", kind, folder)


@pytest.fixture(scope="module")
def served(head: HeadSpec, target: Path) -> FeatureHead:
    return learn.head_of(head, target)


@pytest.fixture(scope="module")
def texts(served: FeatureHead, target: Path) -> learn.Texts:
    return learn.record(served, target, NEW, 3, 2)


def trained(recipe: Recipe, head: HeadSpec, target: Path, texts: learn.Texts) -> dict[str, torch.Tensor]:
    assert head.path is not None
    made = train(recipe, head.path, target, texts.new, texts.familiar)
    assert made.seconds > 0
    return made.tensors


def test_texts_are_recorded_once_and_those_held_out_are_others(texts: learn.Texts) -> None:
    held_out = [one for several in texts.held_out.values() for one in several]
    assert (len(texts.new), len(texts.familiar)) == (NEW, FAMILIAR)
    assert {kind: len(several) for kind, several in texts.held_out.items()} == {"stories": 3, "code": 2}
    every = [tuple(one.text.ids.tolist()) for one in [*texts.new, *texts.familiar, *held_out]]
    assert len(set(every)) == len(every)
    assert all(len(one.text.ids) == one.prompt + learn.NEW_TOKENS for one in texts.new)
    assert all(one.misses for one in texts.new)


def test_a_miss_is_where_the_draft_left_the_text(texts: learn.Texts) -> None:
    for one in texts.new:
        positions = [rejection.position for rejection, _ in one.misses]
        assert positions == sorted(set(positions))
        assert one.prompt < positions[0]
        for rejection, miss in one.misses:
            assert rejection.target_id == one.text.ids[rejection.position] == rejection.top_ids[0]
            assert miss.previous == one.text.ids[rejection.position - 1]
            assert 0 <= miss.value <= 1
            assert rejection.top_log_probs[0] == rejection.top_log_probs.max() < 0


def sent(demand: str, one: Recorded) -> list[Sample]:
    """What a drafter would send of a text and what was missed along it."""
    taken: Any = Taken(demand)
    samples = Samples(taken, "a", WINDOW if demand == "text" else MISS_WINDOW, STRIDE)
    window: Window = samples.window()
    ids, features = one.text.ids.tolist(), one.text.features.float()
    missed: dict[int, Missed] = {each[0].position: each for each in one.misses}

    def append(start: int, end: int) -> None:
        read = wire_features(features, start, end)
        assert read is not None
        window.append(ids[start:end], read)

    append(0, one.prompt)
    for position in range(one.prompt, len(ids)):
        if position in missed:
            samples.offer("recorded", window, 0, *missed[position])
        append(position, position + 1)
    samples.offer_text("recorded", window, 0, ended=True)
    return taken.samples  # type: ignore[no-any-return]


def shown(sample: Sample) -> dict[str, Any]:
    values = {name: getattr(sample, name) for name in (*Sample.__slots__, *Sample.__base__.__slots__)}  # type: ignore[union-attr]
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in values.items()}


@pytest.mark.parametrize("kind", ["head", "full"])
def test_samples_are_those_that_a_drafter_sends(kind: Kind, texts: learn.Texts) -> None:
    for one in texts.new:
        own = [shown(sample) for sample in miss_samples(kind, one)]
        assert own == [shown(sample) for sample in sent(kind, one)]
        assert len(own) > 1
        assert [shown(text_sample(one))] == [shown(sample) for sample in sent("text", one)]


def test_recipes_change_what_they_say(head: HeadSpec, served: FeatureHead, target: Path, texts: learn.Texts) -> None:
    def same(name: str, one: torch.Tensor) -> bool:
        return torch.equal(one, deployed[name])

    deployed = served.weights.tensors
    for name in ("head-misses", "head-texts"):
        changed = trained(RECIPES[name], head, target, texts)
        assert changed.keys() == HEADS_OWN[head.kind]
    for name in ("full-misses", "full-texts", "full-mixed", "full-large-steps"):
        changed = trained(RECIPES[name], head, target, texts)
        assert changed.keys() > HEADS_OWN[head.kind] - {"confidence_head.proj.bias"}
        assert not any(same(*each) for each in changed.items())
    changed = trained(RECIPES["low-rank"], head, target, texts)
    deltas = {name: tensor - deployed[name] for name, tensor in changed.items()}
    assert len(deltas) > 5
    assert {int(torch.linalg.matrix_rank(delta, rtol=1e-4)) for delta in deltas.values()} <= set(range(1, RANK + 1))


def test_texts_that_are_mixed_in_are_learnt_too(head: HeadSpec, target: Path, texts: learn.Texts) -> None:
    alone, mixed = (trained(Recipe("full", mixed=mixed), head, target, texts) for mixed in (False, True))
    assert any(not torch.equal(alone[name], mixed[name]) for name in alone)
    without = trained(Recipe("full", mixed=True), head, target, learn.Texts(texts.new, [], texts.held_out))
    assert Weights.of(without).hash == Weights.of(alone).hash


def test_tau_rises_where_there_is_something_to_learn(
    head: HeadSpec, served: FeatureHead, target: Path, texts: learn.Texts
) -> None:
    recipes = {
        "full": Recipe("full", rate=1e-2, batch=1),
        "nothing": Recipe("full", rate=0.0),
        "low-rank": Recipe("low-rank", rate=3e-2, batch=1),
    }
    with Progress("trainings") as progress:
        lines = learn.learn(served, head, target, texts, recipes, [2, NEW], progress)
    deployed, *others = lines
    named = {(line["recipe"], line["texts"]): line for line in others}
    assert list(named) == [(name, size) for name in recipes for size in (2, NEW)]
    assert (deployed["recipe"], deployed["texts"], deployed["seconds"]) == (learn.DEPLOYED, 0, 0)
    for name in ("full", "low-rank"):
        line = named[name, NEW]
        assert line["stories"] > deployed["stories"] + 0.05
        assert line["gain_per_s"] == pytest.approx((line["stories"] - deployed["stories"]) / line["seconds"])
    nothing = named["nothing", NEW]  # trained between the two others: weights are put back as they were deployed
    assert (nothing["stories"], nothing["code"]) == (deployed["stories"], deployed["code"])


def test_the_command_prints_writes_and_draws_the_same(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learn, "SIZES", (2,))
    monkeypatch.setattr(learn, "HELD_OUT_STORIES", 2)
    monkeypatch.setattr(learn, "HELD_OUT_PROGRAMS", 1)
    folder = save_random(tmp_path / "head", "eagle3", vocab_size=VOCAB, draft_vocab_size=VOCAB)
    file, picture = tmp_path / "out.json", tmp_path / "out.png"
    asked = ["learn", "--target", str(target), "--head", f"a=eagle3:{folder}", "--n", "3"]
    asked += ["--methods", "full-texts,head-misses", "--json", str(file), "--plot", str(picture)]
    ended = CliRunner().invoke(app, asked)
    assert ended.exit_code == 0, ended.output
    lines = json.loads(file.read_text())["figures"][learn.FIGURES]
    expected = [(learn.DEPLOYED, 0), *((name, size) for name in ("full-texts", "head-misses") for size in (2, 3))]
    assert [(line["recipe"], line["texts"]) for line in lines] == expected
    table = [row.split() for row in ended.output.splitlines()]
    assert list(lines[0]) in table
    for line in lines:
        seconds, gain = f"{line['seconds']:.1f}", line["gain_per_s"]
        taus = [f"{line[kind]:.2f}" for kind in ("stories", "code")]
        assert [line["recipe"], str(line["texts"]), seconds, *taus, "-" if gain is None else f"{gain:.3f}"] in table
    best = max(lines[1:], key=lambda line: line["gain_per_s"])
    assert f"most tau for a second: {best['recipe']}, {best['texts']} texts" in ended.output
    assert picture.read_bytes().startswith(b"\x89PNG")
