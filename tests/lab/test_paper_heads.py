"""The heads that the SpecBlock paper compares with: found as entry points, trained and served, and what they draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typer.testing import CliRunner

from coppice.config.sections import DrafterSettings
from coppice.errors import InvalidField
from coppice.heads.base import DraftJob, Head, build_head, with_tree_shape
from coppice.speculation.sampling import SamplingParams
from coppice.testing.head_contract import HeadContract
from coppice.training.losses import Targets
from lab.cli import app as bench
from lab.paper.heads import LOSS, slot_states
from tests.tiny import make_target
from tests.unit.test_feature_heads import (
    GREEDY,
    HIDDEN,
    SAMPLED,
    VOCAB,
    Dense,
    Slow,
    Text,
    Tokens,
    check_steps,
    save_random,
)
from tests.unit.test_head_commands import head as trained
from tests.unit.test_head_commands import place
from tests.unit.test_training import check_learning, trained_states

__all__ = ["place"]

KINDS = ("medusa", "parallelspec")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), VOCAB, layers=8, hidden=HIDDEN, tokenizer=False)


def settings_of(kind: str, folder: Path, target: Path, **more: object) -> DrafterSettings:
    given = {"kind": kind, "path": str(folder), "target": str(target), "kv_tokens": 2048, "threads": 1}
    return with_tree_shape(DrafterSettings.model_validate(given | more))


class SlowMedusa(Slow):
    """Medusa by the book: its heads know nothing of one another."""

    def __init__(self, folder: Path, target: Path, settings: DrafterSettings) -> None:
        super().__init__(folder, target, settings)
        self.depth = min(self.slots, settings.depth)

    def most(self, job: DraftJob) -> int:
        return job.budget

    def logits(self, text: Text, start: int, job: DraftJob, path: Tokens) -> Tensor:
        self.in_slots = self.in_slots if path else self.slots_say(text, start, job)
        return self.in_slots[len(path)]

    def slots_say(self, text: Text, start: int, job: DraftJob) -> list[Tensor]:
        """(draft vocabulary,) logits of each slot."""
        fused = self.model.norm(self.model.fc(text.features[job.committed_len - 1]))
        return [head.lm_head(fused + F.silu(head.residual(fused))) for head in self.model.heads]


class SlowParallelSpec(SlowMedusa):
    """ParallelSpec by the book: all committed rows and the masks behind them in one dense forward."""

    def states(self, text: Text, start: int, job: DraftJob) -> Tensor:
        """(K, hidden) of the masks."""
        length, masks = job.committed_len, self.model.mask_tokens.weight
        tokens = torch.tensor([*text.ids[start + 1 : length], job.root])
        rows = torch.cat((self.model.prefix(text.features[start:length], self.embedding[tokens]), masks))
        mask = torch.ones(len(rows), len(rows), dtype=torch.bool).tril()
        rope = self.model.rope(torch.arange(start, start + len(rows))[None], torch.float32)
        out: Tensor = self.model(rows[None], rope, self.model.attends(Dense(mask)))
        return out[0, -len(masks) :]

    def slots_say(self, text: Text, start: int, job: DraftJob) -> list[Tensor]:
        return list(self.model.read(self.states(text, start, job))[0])


SLOW: dict[str, Any] = {"medusa": SlowMedusa, "parallelspec": SlowParallelSpec}


@pytest.mark.parametrize(
    ("kind", "shape", "told", "sampling"),
    [
        ("medusa", {}, {"top_k": 4}, SAMPLED),
        ("medusa", {"slots": 3, "feature_layers": (7,)}, {"top_k": 10}, GREEDY),
        ("parallelspec", {}, {"top_k": 4}, SAMPLED),
        ("parallelspec", {"slots": 8, "feature_layers": (6, 0, 3, 1, 4)}, {"top_k": 6, "depth": 3}, GREEDY),
    ],
)
def test_a_session_of_many_steps_drafts_what_the_slow_reference_drafts(
    kind: str, shape: dict[str, Any], told: dict[str, Any], sampling: SamplingParams, target: Path, tmp_path: Path
) -> None:
    folder = save_random(tmp_path, kind, **shape)
    settings = settings_of(kind, folder, target, **told)
    check_steps(build_head(settings), SLOW[kind](folder, target, settings), sampling)  # type: ignore[arg-type]


class TestTheirKinds(HeadContract):
    """The contract of heads, kept by a kind of the paper."""

    vocab_size = VOCAB

    @pytest.fixture(autouse=True)
    def of_a_kind(self, target: Path, tmp_path: Path) -> None:
        self.settings = settings_of("parallelspec", save_random(tmp_path, "parallelspec"), target)

    def make_head(self) -> Head:
        return build_head(self.settings)


@pytest.mark.parametrize("kind", KINDS)
def test_training_computes_the_states_that_serving_does(kind: str, target: Path, tmp_path: Path) -> None:
    folder = save_random(tmp_path, kind)
    slow = SLOW[kind](folder, target, settings_of(kind, folder, target))
    _, student, teacher, read = trained_states(slow, target, LOSS)
    text, targets = Text(read.ids[0].tolist(), read.features[0]), Targets.of(read, teacher)
    for row in (0, 3, 6):
        job = DraftJob(0, text.ids[row + 1], row + 1, 8, SamplingParams())
        (at_once,) = slot_states(student, read, targets, targets.rows, ())
        logits = torch.stack([slow.model.read(state, slot)[0] for slot, state in enumerate(at_once[0, row])])
        assert torch.allclose(logits, torch.stack(slow.slots_say(text, 0, job)), atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_learns_a_text_that_repeats(kind: str, target: Path) -> None:
    check_learning(kind, target, LOSS)


def test_one_command_trains_one(place: Path) -> None:
    folder = trained(place, "parallelspec")
    assert "--kind parallelspec" in (folder / "README.md").read_text()
    assert build_head(settings_of("parallelspec", folder, place / "target")).description.kind == "parallelspec"


def test_rank_reports_what_the_rank_head_knows(place: Path, tmp_path: Path) -> None:
    shape = {"vocab_size": 300, "draft_vocab_size": 200, "feature_layers": (1, 2, 3)}
    head = f"sb=specblock:{save_random(tmp_path / 'head', 'specblock', **shape)}"
    flags = ["paper", "rank", "--target", str(place / "target"), "--head", head, "--n", "2", "--max-new-tokens", "16"]
    ended = CliRunner().invoke(bench, [*flags, "--json", str(tmp_path / "rank.json")])
    assert ended.exit_code == 0, ended.output
    figures = json.loads((tmp_path / "rank.json").read_text())["figures"]
    assert sum(line["frequency"] for line in figures["rank_head"]) == pytest.approx(1)
    assert figures["alpha"][0]["chain"] >= 1
    none = CliRunner().invoke(bench, ["paper", "rank", "--target", str(place / "target"), "--head", "l=lookup"])
    assert isinstance(none.exception, InvalidField)
