"""What tests of replicas that come, go and die have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from coppice.client.client import Client
from coppice.stack.launch import Stack
from coppice.stack.redis_server import LocalRedis
from coppice.telemetry import scrape
from coppice.wire.generation import Chunk

BLOW_AT = 20
"""tokens of an answer behind which it is interrupted"""


@pytest.fixture(scope="module")
def registry() -> Iterator[LocalRedis]:
    """Where replicas register."""
    with LocalRedis() as redis:
        yield redis


def fit(stack: Stack) -> dict[str, int]:
    """Replicas of each pool that the first orchestrator would use."""
    samples = scrape(stack.orchestrator.metrics)
    return {each.labels["pool"]: int(each.value) for each in samples if each.name == "coppice_replicas_fit"}


def interrupted(client: Client, prompt: Sequence[int], blow: Callable[[], object], **options: Any) -> tuple[int, ...]:
    """An answer in whose middle something happens."""
    ids: list[int] = []
    for event in client.stream(prompt, ignore_eos=True, **options):
        if isinstance(event, Chunk):
            before = len(ids)
            ids += event.ids
            if before < BLOW_AT <= len(ids):
                blow()
    return tuple(ids)
