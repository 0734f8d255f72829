"""A cascade over real drafters and a real verifier: it asks its second head in some steps only, the text is plain's."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from coppice.client.client import Client
from coppice.config.settings import Settings
from coppice.rpc.channels import Dialer
from coppice.speculation.sampling import SamplingParams
from coppice.stack.launch import Stack
from coppice.telemetry import OrchestratorMetrics
from coppice.v1 import generation_pb2
from coppice.wire import generation
from coppice.wire.generation import Finished, GenerationRequest
from orchestrator.auto.arms import CASCADE, Arm
from orchestrator.auto.chooser import Chooser, StepSeen
from orchestrator.auto.text_estimates import TextEstimates, Turn
from orchestrator.drafters import HeadPool
from orchestrator.service import GenerationServicer
from orchestrator.verifiers import TargetPool
from tests.pipeline.conftest import VOCAB

LITTLE = 0.5  # promised drafts
PROMPT = tuple(random.Random(5).randrange(VOCAB) for _ in range(12))
NEW = 120


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_both_heads_are_asked_where_the_first_one_promises_little(
    stack: Stack, client: Client, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    steps: list[StepSeen] = []

    class AlwaysCascade(Chooser):
        def decide(self, text: TextEstimates, hint: int | None) -> Arm:
            super().decide(text, hint)
            monkeypatch.setattr(text, "goes_on", lambda promised: promised < LITTLE)
            text.turn = Turn(CASCADE, hint, False)
            return replace(text.arms[CASCADE], heads=(1, 0))

        def observe(self, text: TextEstimates, step: StepSeen) -> None:
            steps.append(step)
            super().observe(text, step)

    monkeypatch.setattr("orchestrator.service.Chooser", AlwaysCascade)
    sampling = SamplingParams(temperature=temperature, seed=9)
    request = GenerationRequest(ids=PROMPT, policy="auto", max_new_tokens=NEW, sampling=sampling, ignore_eos=True)
    ids, finished = await generated(stack, request)
    plain = client.generate(PROMPT, policy="plain", max_new_tokens=NEW, sampling=sampling, ignore_eos=True)
    assert ids == list(plain.ids)
    asked = [step.asked for step in steps]
    assert asked.count((1,)) > 0
    assert asked.count((1, 0)) > 3
    assert len(asked) == len(finished.accept_lengths) < NEW  # the target drafts for itself
    assert sum(step.accepted for step in steps if step.asked == (1, 0)) > 0


async def generated(stack: Stack, request: GenerationRequest) -> tuple[list[int], Finished]:
    """An answer of an orchestrator in this process over the stack's verifier and drafters."""
    dialer, metrics = Dialer(), OrchestratorMetrics()
    verifiers = TargetPool([stack.services["verifier"].address], dialer)
    heads = {
        name: HeadPool(name, [stack.services[f"drafter-{name}"].address], dialer, metrics, 6)
        for name in ("self", "lookup")
    }
    try:
        target = await verifiers.first_target()
        servicer = GenerationServicer(Settings(), target, verifiers, heads, None, metrics)
        ids: list[int] = []
        async for message in servicer.Generate(generation.request_to_wire(request), None):  # type: ignore[arg-type]
            event = generation.read_response(generation_pb2.GenerateResponse.FromString(message))
            ids += getattr(event, "ids", ())
        assert isinstance(event, Finished)
        return ids, event
    finally:
        for pool in (verifiers, *heads.values()):
            for replica in pool.replicas:
                await replica.channel.close()
