"""How a target on two ranks ends, each time with a service of its own; and a model that cannot be shared."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import OPTConfig, OPTForCausalLM

from tests.processes import Service, StartService
from tests.services.test_ranks import TINY_TARGET, VOCAB, flags, other_ranks

__all__ = ["TINY_TARGET"]


@pytest.fixture
def two(start_service: StartService, target: Path) -> Service:
    return start_service("services.verifier", *flags(target, 2), ready_s=150.0)


def test_sigterm_ends_both(two: Service) -> None:
    (rank,) = other_ranks(two)
    assert two.stop() == 0
    assert not rank.is_running()


def test_a_verifier_that_is_killed_takes_its_ranks_along(two: Service) -> None:
    (rank,) = other_ranks(two)
    two.kill()
    assert rank.wait(60.0) is None  # not our child: it is gone, nobody knows how


def test_a_model_that_transformers_cannot_share_is_refused(start_service: StartService, tmp_path: Path) -> None:
    """What a rank finds while it loads is said, and ends all."""
    heads = {"num_attention_heads": 2, "num_hidden_layers": 1}
    config = OPTConfig(vocab_size=VOCAB, hidden_size=16, ffn_dim=32, word_embed_proj_dim=16, **heads)
    OPTForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"cannot be loaded: ValueError(.|\n)*OPTForCausalLM` has no `tp_plan`"):
        start_service("services.verifier", *flags(tmp_path, 2), ready_s=150.0)
