"""What a loader of a block of masks can get wrong without an error costs accepted tokens, which a test can see."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from coppice.bench.paper.replay import replay_all
from coppice.config.sections import DrafterSettings
from coppice.engine.engine import Engine
from coppice.engine.loading import load_engine
from coppice.heads.feature_head import FeatureHead
from coppice.heads.registry import build_head
from coppice.training.data.answerer import Answer, Answerer
from coppice.training.data.tokenizer import load_tokenizer

DEMO = Path(__file__).parents[2] / "models" / "demo"
PROMPTS = (
    'def read_lines(path, encoding="utf-8"):\n    """Return the lines of a text file as a list."""',
    "Question: Rosa has 4 boxes with 6 pencils in each box. How many pencils does she have?\nAnswer:",
    "Question: Tom reads 12 pages a day for 5 days. How many pages does he read?\nAnswer:",
    "import os\nimport sys\n\n\ndef main(argv):\n",
    "    def test_empty(self):\n        self.assertEqual(",
)
LENGTH, BUDGET, TEMPERATURE, SEED = 128, 12, 0.7, 3  # greedy answers of a small target loop, and any head follows


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine(DEMO / "target", dtype="float32", kv_tokens=2048)


def texts(engine: Engine, layers: tuple[int, ...]) -> list[tuple[Answer, int]]:
    """The target's answers with the features of these layers, and how many tokens of each are its prompt."""
    prompts = [load_tokenizer(DEMO / "target").encode(prompt).ids for prompt in PROMPTS]
    answers = Answerer(engine, layers=layers).answer(prompts, [LENGTH] * len(prompts), TEMPERATURE, SEED)
    return [(answer, len(prompt)) for answer, prompt in zip(answers, prompts, strict=True)]


def tau(engine: Engine, folder: Path, *, blank: bool = False) -> float:
    """Tokens a step that the head of a folder would commit along the answers; `blank`: it is given zeros."""
    settings = {"kind": "dspark", "path": str(folder), "target": str(DEMO / "target"), "kv_tokens": 1024, "threads": 1}
    head = build_head(DrafterSettings.model_validate(settings))
    assert isinstance(head, FeatureHead)
    asked = texts(engine, head.description.feature_layers)
    if blank:
        asked = [(Answer(text.ids, torch.zeros_like(text.features), text.final), length) for text, length in asked]
    return replay_all(head, asked, BUDGET).tau


def told(folder: Path, changes: Mapping[str, Any]) -> Path:
    """The shipped head, of which something else is said."""
    shutil.copytree(DEMO / "dspark-code", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.fixture(scope="module")
def honest(engine: Engine) -> float:
    return tau(engine, DEMO / "dspark-code")


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({"target_layer_ids": [2, 10, 17]}, 1.0),  # one further each: few tokens are lost, as others found too
        ({"target_layer_ids": [9, 1, 16]}, 1.0),
        ({"is_causal": True}, 1.0),
        ({"sample_from_anchor": False}, 0.93),
        ({"mask_token_id": 11}, 0.96),
    ],
    ids=str,
)
def test_a_head_of_which_something_wrong_is_said_drafts_worse(
    changes: Mapping[str, Any], share: float, engine: Engine, honest: float, tmp_path: Path
) -> None:
    assert tau(engine, told(tmp_path / "head", changes)) < share * honest


def test_a_head_without_the_targets_features_drafts_worse(engine: Engine, honest: float) -> None:
    assert tau(engine, DEMO / "dspark-code", blank=True) < 0.7 * honest
