"""Drafts are advice: whatever happens to a drafter, every request gets the target's own text."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coppice.bench.reference import Reference
from coppice.client import Client
from coppice.generation import Chunk
from coppice.launch import Stack
from coppice.sampling import SamplingParams
from coppice.stack_spec import HeadSpec, StackSpec
from tests.pipeline.conftest import described

PROMPT = tuple(range(7, 40))
NEW = 160
SAMPLED = SamplingParams(temperature=1.0, seed=11)


@pytest.fixture
def faulty(target: Path, tmp_path: Path) -> Iterator[Stack]:
    """A stack of its own for every fault, with deadlines as deployed."""
    heads = (HeadSpec("self", "lm", target), HeadSpec("lookup", "lookup"))
    spec = StackSpec(
        target=target, heads=heads, dtype="float32", verifier_threads=1, drafter_threads=1, log_dir=tmp_path
    )
    with Stack(spec) as running:
        yield running


def _generate_through(
    stack: Stack, fault: Callable[[], None], sampling: SamplingParams
) -> tuple[tuple[int, ...], float]:
    """Ids of an answer in whose middle the fault happens, and the longest gap between two chunks, seconds."""
    ids: list[int] = []
    gap, last = 0.0, 0.0
    with Client(stack.address) as client:
        for event in client.stream(PROMPT, policy="merge", sampling=sampling, max_new_tokens=NEW, ignore_eos=True):
            if not isinstance(event, Chunk):
                continue
            now = time.monotonic()
            gap, last = max(gap, now - last if last else 0.0), now
            before = len(ids)
            ids += event.ids
            if before < 20 <= len(ids):
                fault()
    return tuple(ids), gap


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_losing_a_drafter_in_mid_generation_changes_nothing(
    faulty: Stack, reference: Reference, number: signal.Signals
) -> None:
    pid = faulty.services["drafter-self"].pid
    with Client(faulty.address) as client:
        sampled = client.generate(PROMPT, policy="plain", sampling=SAMPLED, max_new_tokens=NEW, ignore_eos=True)
    try:
        ids, gap = _generate_through(faulty, lambda: os.kill(pid, number), SamplingParams())
        assert ids == reference.greedy(PROMPT, NEW).ids
        assert gap < 5.0
        again, _ = _generate_through(faulty, lambda: None, SAMPLED)
        assert again == sampled.ids
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_all_drafters_gone_is_plain_decoding(faulty: Stack, reference: Reference) -> None:
    def lose_all() -> None:
        for name, ready in faulty.services.items():
            if name.startswith("drafter"):
                os.kill(ready.pid, signal.SIGKILL)

    ids, _ = _generate_through(faulty, lose_all, SamplingParams())
    assert ids == reference.greedy(PROMPT, NEW).ids
    with Client(faulty.address) as client:
        answer = client.generate(PROMPT, policy="route", max_new_tokens=16, ignore_eos=True)
    assert answer.tau == 1.0


def test_a_client_that_vanishes_frees_the_session(faulty: Stack) -> None:
    started = threading.Event()

    def vanish() -> None:
        client = Client(faulty.address)
        for event in client.stream(PROMPT, max_new_tokens=400, ignore_eos=True):
            if isinstance(event, Chunk):
                started.set()
                break

    thread = threading.Thread(target=vanish)
    thread.start()
    assert started.wait(30)
    thread.join()
    for _ in range(100):
        now = asyncio.run(described(faulty.services["verifier"].address))
        if now.sessions == 0:
            break
        time.sleep(0.05)
    assert (now.sessions, now.kv_tokens_used, now.sessions_opened) == (0, 0, 1)
