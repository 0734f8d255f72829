"""A verifier whose text is known, for tests of drafters that follow its sessions: fixtures and references."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from coppice.wire.common import FeatureRef, Features
from tests.processes import Service
from tests.sessions import continuation
from tests.tiny import make_target
from tests.unit.test_feature_heads import VOCAB

WINDOW = 24
IDS = list(range(7, 47))
StartService = Callable[..., Service]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), VOCAB, layers=6, tokenizer=False)


@pytest.fixture(scope="module")
def model(target: Path) -> Any:
    """The reference: plain transformers."""
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def truth(model: Any) -> list[int]:
    """The prompt and what plain decoding says behind it."""
    return [*IDS, *continuation(model, IDS, 460)]


@pytest.fixture(scope="module")
def start_verifier(start_service: StartService, target: Path) -> StartService:
    flags = ["--verifier.target", str(target), "--verifier.threads", "1"]
    window = {"TEST_CONSTANTS": f"services.verifier.features.FEATURE_WINDOW={WINDOW}"}
    return lambda *more: start_service("services.verifier", *flags, *more, variables=window)


@pytest.fixture(scope="module")
def verifier(start_verifier: StartService) -> Service:
    return start_verifier()


def fetched(verifier: str, session: str, start: int = 0, end: int = len(IDS)) -> Features:
    """Features of the positions start..end-1 by reference."""
    count = end - start
    return Features(start, count, "float32", None, FeatureRef(verifier, session, start, count))
