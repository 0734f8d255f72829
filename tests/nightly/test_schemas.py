"""Structured output with 200 schemas on the demo's target and on two tiny ones, which takes less than an hour."""

from __future__ import annotations

from pathlib import Path

import pytest

from coppice.client.client import Client
from coppice.stack.spec import HeadSpec
from tests.pipeline.test_structured import check_schemas
from tests.stacks import serving
from tests.tiny import make_target

COUNT = 200
pytestmark = pytest.mark.timeout(0)


@pytest.mark.parametrize("seed", [None, 0, 1], ids=["the demo's target", "a tiny one", "another"])
def test_every_schema_is_kept(seed: int | None, tmp_path: Path) -> None:
    target = None if seed is None else make_target(tmp_path / "target", 300, seed=seed)
    head = HeadSpec("self", "lm", target) if target else HeadSpec.parse("specblock-code")
    with serving(tmp_path, target, head, HeadSpec("lookup", "lookup")) as stack, Client(stack.address) as client:
        assert check_schemas(client, COUNT, f"single:{head.name}", "merge", "auto") > COUNT
