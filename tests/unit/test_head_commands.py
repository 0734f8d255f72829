"""The commands that train feature heads and measure them without a stack, on a tiny random target."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from coppice.errors import InvalidField
from coppice.heads.checkpoints import load_head
from coppice.training import heads, progress
from coppice.training.answers import record_answers
from coppice.training.cli import app as train
from coppice.training.heads import Recipe, Trainer, TrainingConfig
from tests.tiny import make_target

SMALL: dict[str, Any] = {"tokens": 256, "length": 64}
TOLD = ("--adamw", "--layers", "1,0,0,1")
WORDS = ["the cat saw one red bird", "a dog ran", "two birds sang to the cat and the dog all day long"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a corpus and (after the first command) recorded answers."""
    folder = tmp_path_factory.mktemp("heads")
    make_target(folder / "target", layers=5)
    text = "<|endoftext|>".join(f"{word} {n}" for n in range(200) for word in WORDS)
    (folder / "words.txt").write_text(text, encoding="utf-8")
    return folder


def run(app: Any, place: Path, *flags: str, ends: Sequence[int] = (0, 1)) -> str:
    told = CliRunner().invoke(app, [*flags, "--target", str(place / "target"), "--data", f"words={place}/words.txt"])
    assert told.exit_code in ends, told.output
    return told.output


def learn(config: TrainingConfig, tokens: int) -> None:
    """Train a head of a configuration to the end."""
    recipe = Recipe(tokens, length=32, long_length=32, small_batch=64)
    config = replace(config, shape={"draft_vocab_size": 40, **config.shape})
    assert Trainer(heads.FeatureHeadInTraining(config), config, recipe).train()


def head(place: Path, kind: str, *flags: str) -> Path:
    out = place / f"{kind}{''.join(flags)}"
    if out.exists():
        return out
    folders = ("--out", str(out), "--lessons", str(place / "lessons"))
    run(train, place, "head", "--kind", kind, "--tokens", "1024", *folders, *flags)
    return out


def test_a_specblock_head_is_trained_written_and_drafts(place: Path) -> None:
    folder = head(place, "specblock", *TOLD)
    loaded = load_head("specblock", folder, place / "target")
    assert (loaded.config.slots, loaded.config.block_rope_advance, loaded.config.rank_norm_topk) == (4, True, None)
    assert loaded.config.feature_layers == (1, 0, 0, 1)
    assert next(loaded.model.parameters()).dtype == torch.float32  # loaded as such; bfloat16 on disk
    card = (folder / "README.md").read_text()
    assert "--kind specblock" in card
    assert "--layers 1,0,0,1" in card
    assert str(place) not in card + (folder / "config.json").read_text()
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    assert weights < 2.2 * parameters + 8 * loaded.config.vocab_size + 20_000  # no embedding in it


def test_a_new_head_turns_all_of_a_state() -> None:
    half = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    linear = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    for rope, turns in (
        (half, {"rope_theta": 5e5}),
        ({"sliding_attention": half}, {"rope_theta": 1e4}),
        (linear, linear),
        (None, {"rope_theta": 1e4}),
    ):
        assert heads.head_rope(SimpleNamespace(rope_parameters=rope)) == turns


def test_a_recording_that_is_stopped_says_how_to_go_on(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []

    class Stopper(progress.Progress):
        def reach(self, done: int, total: int) -> None:
            seen.append((done, total))
            if done >= 600 and len(seen) > 1 and seen[0][0] == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(progress, "Progress", Stopper)
    flags = ("head", "--kind", "dflash", "--tokens", "512", "--out", str(tmp_path / "head"), "--dtype", "bfloat16")
    output = run(train, place, *flags, ends=(0,))
    assert "recording 4096 tokens" in output
    assert f"recorded {seen[-1][0]} tokens, go on with the same command" in output
    assert not (tmp_path / "head").exists()
    assert seen[0] == (0, 4096)
    stopped, _ = seen[-1]
    seen.clear()
    assert "wrote" in run(train, place, *flags, ends=(0,))
    assert seen[0] == (stopped, 4096)
    assert not list((tmp_path / "head.work" / "lessons").glob(".*"))


def test_a_recording_that_is_killed_loses_no_token(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coppice.training.answers.SAVE_S", 0)
    lines, seen = [f"words={place}/words.txt"], list[tuple[int, int]]()

    def die(done: int, total: int) -> None:
        if done >= 450:
            os.kill(os.getpid(), signal.SIGKILL)

    child = get_context("fork").Process(
        target=record_answers, args=(lines, place / "target", tmp_path), kwargs={**SMALL, "progress": die}
    )
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    begun = json.loads((tmp_path / ".begun.json").read_text())
    assert sorted(begun) == ["words-held-out-00000.safetensors", "words-train-00000.safetensors"]
    answers = record_answers(lines, place / "target", tmp_path, **SMALL, progress=lambda *counts: seen.append(counts))
    assert 442 <= seen[0][0] < 450  # of the forward that was under way, a token of each of eight texts is missing
    assert seen[0][0] == sum(len(ids) for texts in begun.values() for ids, _ in texts)
    texts = answers.ids().view(4, 64)
    for text, (ids, _) in zip(texts.tolist(), begun["words-train-00000.safetensors"], strict=True):
        assert text[: len(ids)] == ids
    end = [*texts[0].tolist(), 0].index(0)
    model = AutoModelForCausalLM.from_pretrained(place / "target")
    final = answers.read(torch.from_numpy(answers.domains[0].train[:64])[None]).final
    assert torch.allclose(final[:, :end], model.model(texts[:1, :end]).last_hidden_state, rtol=0.02, atol=0.02)


def test_what_a_disk_has_no_room_for_is_refused(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**27))
    with pytest.raises(InvalidField, match=r"^--lessons: .* would take 0\.[2-9] GiB more, and its disk has 0\.1 free$"):
        record_answers([f"words={place}/words.txt"], place / "target", tmp_path, 1_200_000)


def test_a_finished_run_goes_on_when_more_tokens_are_asked_for(place: Path) -> None:
    folder = head(place, "specblock", *TOLD)
    before, work = (folder / "model.safetensors").read_bytes(), folder.with_name(folder.name + ".work")
    first = load_file(work / "checkpoint.safetensors")
    flags = ("head", "--kind", "specblock", "--tokens", "1536", *TOLD)
    folders = ("--out", str(folder), "--lessons", str(place / "lessons"))
    refused = run(train, place, *flags, *folders, ends=(2,))
    assert "--resume goes on with it" in " ".join(refused.replace("│", " ").split())
    assert (folder / "model.safetensors").read_bytes() == before
    for layers in ("a", "1,,2", "1,-2", ",".join(map(str, range(17)))):
        told = run(train, place, *flags[:-1], layers, *folders, "--resume", ends=(2,))
        assert "1 to 16 numbers" in " ".join(told.replace("│", " ").split())
    assert run(train, place, *flags[:-1], "1,0,1,1", *folders, "--resume", ends=(1,)) == ""
    assert "unknown kind 'oracle'" in run(train, place, *flags[:2], "oracle", *flags[3:], *folders, ends=(2,))
    run(train, place, *flags, *folders, "--resume")
    further = load_file(work / "checkpoint.safetensors")
    assert any(not torch.equal(further[name], weight) for name, weight in first.items())
    rows = [json.loads(line) for line in (work / "log.jsonl").read_text().splitlines()]
    assert [row["tokens"] for row in rows] == [1024, 1536]
    better = rows[1][heads.LENGTH] > rows[0][heads.LENGTH]  # else the weights at 1,024 stay the best
    assert ((folder / "model.safetensors").read_bytes() != before) is better


def test_the_draft_vocabulary_stays_when_a_resumed_run_has_more_answers(place: Path, tmp_path: Path) -> None:
    target, work, vocabularies = place / "target", tmp_path / "run", []
    for tokens in (256, 2048):
        answers = record_answers([f"words={place}/words.txt"], target, tmp_path / "lessons", tokens, length=64)
        learn(TrainingConfig("eagle3", target, answers, work, resume=True), tokens)
        vocabularies.append(json.loads((work / "head.json").read_text())["draft_ids"])
        fresh = torch.bincount(answers.ids(), minlength=300).argsort(descending=True, stable=True)[:40].sort().values
    assert vocabularies[0] == vocabularies[1] != fresh.tolist()
    with pytest.raises(InvalidField, match=r"--shape: head_dim is 4, and 8 of the head that .*head.json began"):
        learn(TrainingConfig("eagle3", target, answers, work, {"head_dim": 4}, resume=True), 256)
    other = record_answers([f"words={place}/words.txt"], target, tmp_path / "other", **SMALL, layers=(3,))
    with pytest.raises(InvalidField, match=r"--lessons: .*layers \(3,\), the head reads \(2, 3, 4\)"):
        learn(TrainingConfig("eagle3", target, other, work, resume=True), 256)


def test_a_shape_that_does_not_fit_is_refused_at_once(place: Path, tmp_path: Path) -> None:
    flags = ["head", "--kind", "dspark", "--target", str(place / "target"), "--data", f"words={place}/words.txt"]
    for shape, reason in {
        "block_size=1": "block_size: Input should be greater than or equal to 2",
        "markov=8": "markov is no field of a dspark head that training can choose",
    }.items():
        ended = CliRunner().invoke(train, [*flags, "--shape", shape, "--out", str(tmp_path / "head")])
        assert str(ended.exception) == f"--shape: {reason}"
    assert not list(tmp_path.iterdir())
