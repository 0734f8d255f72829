"""What a loader of a block of masks can get wrong without an error costs accepted tokens, which a test can see."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from coppice.config.model import read_tokenizer
from coppice.engine.loading import load_engine
from coppice.heads.checkpoints import TargetParts, load_head
from coppice.training.answers import Answer, write_answers
from coppice.training.losses import HeadLoss, Student, Teacher, accepted_length, measure

DEMO = Path(__file__).parents[2] / "models" / "demo"
PROMPTS = (
    'def read_lines(path, encoding="utf-8"):\n    """Return the lines of a text file as a list."""',
    "Question: Rosa has 4 boxes with 6 pencils in each box. How many pencils does she have?\nAnswer:",
    "Question: Tom reads 12 pages a day for 5 days. How many pages does he read?\nAnswer:",
    "import os\nimport sys\n\n\ndef main(argv):\n",
    "    def test_empty(self):\n        self.assertEqual(",
)
LENGTH, TEMPERATURE, SEED = 128, 0.7, 4  # greedy answers of a small target loop, and any head follows


LAYERS = (2, 3, 10, 11, 17, 18)
"""those of the shipped head, and the ones behind them"""


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    """The target's answers with the features of LAYERS."""
    engine = load_engine(DEMO / "target", dtype="float32", kv_tokens=4096)
    prompts = [read_tokenizer(DEMO / "target").encode(prompt).ids for prompt in PROMPTS * 4]
    return write_answers(engine, prompts, [LENGTH] * len(prompts), TEMPERATURE, SEED, LAYERS)


def length(answers: list[Answer], folder: Path, *, blank: bool = False) -> float:
    """Tokens a step of greedy chains behind every token of the answers; `blank`: the head is given zeros."""
    loaded = load_head("dspark", folder, DEMO / "target")
    places = [LAYERS.index(layer) for layer in loaded.config.feature_layers]
    wide = loaded.config.hidden_size
    texts = Answer(*map(torch.stack, zip(*answers, strict=True)))
    seen = texts.features.unflatten(-1, (-1, wide))[:, :, places].flatten(2) * (not blank)
    teacher = Teacher(TargetParts(DEMO / "target").output, loaded.model.target_ids)
    student = Student(loaded.model, loaded.embedding)
    return accepted_length(measure(student, HeadLoss(teacher), texts._replace(features=seen)))


def told(folder: Path, changes: Mapping[str, Any]) -> Path:
    """The shipped head, of which something else is said."""
    shutil.copytree(DEMO / "dspark-code", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.fixture(scope="module")
def honest(answers: list[Answer]) -> float:
    return length(answers, DEMO / "dspark-code")


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({"target_layer_ids": [2, 10, 17]}, 0.995),  # one further each: few tokens are lost, as others found too
        ({"is_causal": True}, 0.995),
        ({"sample_from_anchor": False}, 0.93),
        ({"mask_token_id": 11}, 0.96),
    ],
    ids=str,
)
def test_a_head_of_which_something_wrong_is_said_drafts_worse(
    changes: Mapping[str, Any], share: float, answers: list[Answer], honest: float, tmp_path: Path
) -> None:
    assert length(answers, told(tmp_path / "head", changes)) < share * honest


def test_a_head_without_the_targets_features_drafts_worse(answers: list[Answer], honest: float) -> None:
    assert length(answers, DEMO / "dspark-code", blank=True) < 0.7 * honest
