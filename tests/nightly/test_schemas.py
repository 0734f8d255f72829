"""Structured output with 200 schemas on the demo's target and on two tiny ones, which takes less than an hour."""

from __future__ import annotations

from pathlib import Path

import pytest

from coppice.client.client import Client
from coppice.stack.spec import HeadSpec
from tests.pipeline.test_structured import NEW, PROMPT, check_schemas
from tests.schemas import schemas
from tests.stacks import serving
from tests.tiny import make_target

COUNT = 200
pytestmark = pytest.mark.timeout(0)


@pytest.mark.parametrize("seed", [None, 0, 1], ids=["the demo's target", "a tiny one", "another"])
def test_every_schema_is_kept(seed: int | None, tmp_path: Path) -> None:
    target = None if seed is None else make_target(tmp_path / "target", 300, seed=seed)
    head = HeadSpec("self", "lm", target) if target else HeadSpec.parse("specblock-code")
    with serving(tmp_path, target, head, HeadSpec("lookup", "lookup")) as stack, Client(stack.address) as client:
        assert check_schemas(client, COUNT, f"single:{head.name}", "merge", "auto", every_budget=True) > COUNT


def test_forced_text_drafts_for_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a grammar a step commits at least what it does where the verifier does not say what that forces."""
    target = make_target(tmp_path / "target", 300)
    heads = HeadSpec("self", "lm", target), HeadSpec("lookup", "lookup")
    with serving(tmp_path / "with", target, *heads) as stack, Client(stack.address) as client:
        monkeypatch.setenv("TEST_CONSTANTS", "services.verifier.session.MAX_TREE_DEPTH=0")
        with serving(tmp_path / "without", target, *heads) as other, Client(other.address) as without:
            for head in heads:
                steps = [0, 0]
                options = {"policy": f"single:{head.name}", "budget": 8, "max_new_tokens": NEW}
                for schema in schemas(8):
                    options["structured_outputs"] = {"json": schema}
                    free, same = (each.generate(PROMPT, **options) for each in (client, without))
                    assert free.ids == same.ids
                    assert free.tau >= same.tau, schema
                    steps = [steps[0] + free.steps, steps[1] + same.steps]
                assert steps[0] < 0.8 * steps[1]
