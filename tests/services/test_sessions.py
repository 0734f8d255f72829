"""What a verifier's sessions hold, and give back."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
from transformers import AutoModelForCausalLM

from coppice.config.sections import VerifierSettings
from coppice.engine.engine import Engine
from coppice.speculation.sampling import SamplingParams
from coppice.telemetry import SessionMetrics
from coppice.wire.verifier import OpenSession
from services.verifier import sessions
from services.verifier.sessions import Sessions
from tests.tiny import make_target


def test_a_session_that_cannot_be_made_gives_its_kv_back(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", 64, layers=1, tokenizer=False)
    engine = Engine(AutoModelForCausalLM.from_pretrained(target), kv_tokens=1024)
    settings = VerifierSettings(target=str(target), kv_tokens=1024)
    held = Sessions(engine, settings, SessionMetrics("verifier"), 1.0)
    opening = OpenSession("name", [1, 2, 3], SamplingParams(), frozenset(), 40, ())
    with patch.object(sessions, "Session", side_effect=MemoryError), pytest.raises(MemoryError):
        held.open(1, opening)
    assert engine.pool.used_tokens == 0
    held.open(1, opening)
    assert engine.pool.used_tokens > 0
    held.close(1)
    assert engine.pool.used_tokens == 0
