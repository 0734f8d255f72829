"""Heads that keep a session waiting are left alone, though never twice in a row; those that refuse a text are not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from coppice.client.client import AsyncClient
from coppice.errors import CoppiceError, InvalidField, Overloaded
from coppice.heads.base import DraftJob, Growth
from coppice.telemetry import metric
from coppice.wire.drafter import OpenDraft
from tests.processes import Service
from tests.recorder import Recorder, drafter_of
from tests.services.test_features import IDS, model, start_verifier, target, truth, verifier

__all__ = ["model", "start_verifier", "target", "truth", "verifier"]  # fixtures

NEW = 40


class Erratic(Recorder):
    """Late at every fourth step."""

    LATE_S = 0.14
    steps = 0

    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        self.steps += 1
        if self.steps % 4 == 0:
            time.sleep(self.LATE_S)
        yield from super().draft(jobs)


async def test_a_drafter_that_is_late_now_and_then_is_left_alone(
    start_service: Callable[..., Service], verifier: Service, truth: list[int]
) -> None:
    head = Erratic(layers=(), truth=truth)
    async with drafter_of(head) as drafter:
        flags = ["--orchestrator.verifiers", verifier.address, "--orchestrator.draft_deadline_ms", "100"]
        service = await asyncio.to_thread(
            start_service, "orchestrator", *flags, "--orchestrator.heads", f"erratic={drafter.address}"
        )
        async with AsyncClient(service.address) as client:
            answer = await client.generate(IDS, policy="single:erratic", max_new_tokens=NEW, ignore_eos=True)
        assert list(answer.ids) == truth[len(IDS) :][:NEW]
        assert 2 <= answer.late_drafts <= 4
        assert await asyncio.to_thread(metric, service.metrics, "coppice_heads_benched_total") == 1
        await asyncio.to_thread(service.stop)


class Picky(Recorder):
    """Has no room for long texts."""

    def __init__(self, refusal: CoppiceError, truth: list[int]) -> None:
        super().__init__(layers=(), truth=truth)
        self.refusal, self.refused = refusal, 0

    def open(self, key: int, opening: OpenDraft) -> Iterator[None]:
        if len(opening.ids) > len(IDS):
            self.refused += 1
            raise self.refusal
        yield from super().open(key, opening)


@pytest.mark.parametrize("refusal", [InvalidField("open.ids", "are too many"), Overloaded("no room for the text")])
async def test_a_text_that_a_drafter_refuses_costs_no_other_text_its_drafts(
    start_service: Callable[..., Service], verifier: Service, truth: list[int], refusal: CoppiceError
) -> None:
    head, long = Picky(refusal, truth), truth[: len(IDS) + 20]
    async with drafter_of(head) as drafter:
        flags = ["--orchestrator.verifiers", verifier.address, "--orchestrator.heads", f"picky={drafter.address}"]
        service = await asyncio.to_thread(start_service, "orchestrator", *flags)
        async with AsyncClient(service.address) as client:

            async def tau(prompt: list[int]) -> float:
                answer = await client.generate(prompt, policy="single:picky", max_new_tokens=NEW, ignore_eos=True)
                assert list(answer.ids) == truth[len(prompt) :][:NEW]
                return answer.tau

            alone = await tau(IDS)
            assert alone > 2
            for _ in range(3):
                assert await tau(long) == 1
                assert await tau(IDS) == alone
        assert head.refused >= 3
        assert await asyncio.to_thread(metric, service.metrics, "coppice_heads_benched_total") == 0
        await asyncio.to_thread(service.stop)
