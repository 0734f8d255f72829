"""Replicas that come, go and fail under a stack whose parts find each other in a registry; texts never notice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coppice.client.client import Client
from coppice.stack.launch import Stack
from coppice.stack.redis_server import LocalRedis
from coppice.stack.spec import HeadSpec
from coppice.testing.reference import Reference
from tests.processes import Service
from tests.replicas import fit, interrupted, registry
from tests.signals import eventually
from tests.tiny_stack import serving

__all__ = ["registry"]  # a fixture

PROMPT = tuple(range(7, 40))
NEW = 200


@pytest.fixture(scope="module")
def found(target: Path, registry: LocalRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two verifiers, two drafters and two orchestrators that know a registry and no address."""
    at = {"directory.redis": registry.url}
    found_there = {"orchestrator.verifiers": "redis", "orchestrator.heads": "self=redis"}
    extra = {"verifier": at, "drafter": at, "orchestrator": {**at, **found_there}}
    options = {"verifiers": 2, "replicas": 2, "orchestrators": 2, "extra": extra, "draft_deadline_ms": 0}
    with serving(tmp_path_factory.mktemp("found"), target, HeadSpec("self", "lm", target), **options) as running:
        yield running


def answer(stack: Stack, blow: Callable[[], None], **options: Any) -> tuple[int, ...]:
    with Client(stack.address) as client:
        return interrupted(client, PROMPT, blow, max_new_tokens=NEW, **options)


def test_replicas_are_noticed_when_they_come_and_when_they_leave(
    found: Stack, registry: LocalRedis, target: Path, start_service: Callable[..., Service]
) -> None:
    assert eventually(lambda: fit(found) == {"verifier": 2, "self": 2}, 5)
    flags = ("--verifier.target", str(target), "--directory.redis", registry.url, "--server.host", "127.0.0.1")
    third = start_service("services.verifier", *flags)
    assert eventually(lambda: fit(found)["verifier"] == 3, 5)
    third.stop()
    assert eventually(lambda: fit(found)["verifier"] == 2, 5)


def test_a_drained_verifier_hands_its_sessions_over(found: Stack) -> None:
    assert eventually(lambda: fit(found)["verifier"] == 2, 10)
    with Client(found.address) as client:
        told = {"temperature": 1.0, "seed": 4}
        plain = client.generate(PROMPT, policy="plain", max_new_tokens=NEW, ignore_eos=True, **told)
    for name in ("verifier-0", "verifier-1"):  # one of them has the session
        said = answer(found, partial(os.kill, found.services[name].pid, signal.SIGTERM), **told)
        assert said == plain.ids
        assert found.restart(name)
        assert eventually(lambda: fit(found)["verifier"] == 2, 10)


def test_a_request_waits_for_the_only_verifiers_to_come_back(found: Stack, reference: Reference) -> None:
    def restart() -> None:
        for name in ("verifier-0", "verifier-1"):
            os.kill(found.services[name].pid, signal.SIGKILL)
        for name in ("verifier-0", "verifier-1"):
            found.restart(name)

    assert answer(found, restart) == reference.greedy(PROMPT, NEW).ids


def test_the_list_holds_while_the_registry_is_away(found: Stack, registry: LocalRedis, reference: Reference) -> None:
    assert eventually(lambda: fit(found)["verifier"] == 2, 10)
    os.kill(registry.pid, signal.SIGSTOP)
    try:
        assert answer(found, lambda: time.sleep(4)) == reference.greedy(PROMPT, NEW).ids
        assert fit(found) == {"verifier": 2, "self": 2}
    finally:
        os.kill(registry.pid, signal.SIGCONT)
