"""Heads in the verifier's process: the text is the target's, and a drafter's verbs work at the verifier's address."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coppice.client.client import Client
from coppice.config.sections import DrafterSettings
from coppice.errors import InvalidField, StaleFence
from coppice.heads.registry import build_head
from coppice.rpc.channels import Dialer
from coppice.speculation.sampling import SamplingParams
from coppice.stack.launch import SERVICES, Stack
from coppice.stack.spec import HeadSpec, StackSpec
from coppice.telemetry import metric
from coppice.testing.reference import Reference
from services.adapter.push import DrafterLink
from tests.pushes import Push, altered
from tests.tiny import make_target
from tests.unit.test_feature_heads import save_random

VOCAB, NEW = 32, 24
PROMPTS = [(3, 1, 4, 1, 5), tuple(number * number % VOCAB for number in range(70))]
SAMPLED = SamplingParams(temperature=1.0, seed=4)
HEADS = {"block": "specblock", "eagle": "eagle3"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), VOCAB, layers=6, tokenizer=False)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    sizes = {"vocab_size": VOCAB, "draft_vocab_size": 24}
    return {name: save_random(tmp_path_factory.mktemp(name), kind, **sizes) for name, kind in HEADS.items()}


@pytest.fixture(scope="module")
def stack(target: Path, heads: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two processes: one of the target and all heads, and an orchestrator."""
    spec = StackSpec(
        target=target,
        heads=(*(HeadSpec(name, kind, heads[name]) for name, kind in HEADS.items()), HeadSpec("lookup", "lookup")),
        one_process=True,
        dtype="float32",
        verifier_threads=1,
        extra={"orchestrator": {"orchestrator.draft_deadline_ms": 2000}},
    )
    with Stack(spec, log_dir=tmp_path_factory.mktemp("logs")) as running:
        assert set(running.processes) == {"verifier", "orchestrator"}
        yield running
    assert not running.unclean


def drafted(stack: Stack) -> float:
    """How many batches all heads have drafted."""
    return metric(stack.services["verifier"].metrics, "coppice_drafter_forwards_total")


@pytest.mark.parametrize("policy", ["single:block", "single:eagle", "single:lookup", "merge"])
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_texts_are_plain_decoding_s(stack: Stack, target: Path, policy: str, sampling: SamplingParams) -> None:
    reference = Reference(target, "float32", threads=1)
    with Client(stack.address) as client:
        for prompt in PROMPTS:
            told = {"max_new_tokens": NEW, "sampling": sampling, "ignore_eos": True}
            plain = client.generate(prompt, policy="plain", **told)
            before = drafted(stack)
            answer = client.generate(prompt, policy=policy, budget=16, **told)
            assert answer.ids == plain.ids
            assert drafted(stack) > before
            if sampling.temperature == 0:
                assert answer.ids == reference.greedy(prompt, NEW).ids


async def test_weights_are_replaced_while_it_serves(stack: Stack, target: Path, heads: dict[str, Path]) -> None:
    address = stack.services["verifier"].address
    settings = DrafterSettings(kind="specblock", path=str(heads["block"]), target=str(target))
    first = build_head(settings).weights  # type: ignore[attr-defined]
    push = Push.of("block", first, altered(first, 1))
    async with DrafterLink(address, Dialer(head="block")) as link, DrafterLink(address, Dialer(head="eagle")) as other:
        assert (await link.describe()).weights_hash == first.hash
        synced = await link.push(push.header, push.parts)
        assert (synced.version, (await link.describe()).weights_version) == (1, 1)
        assert (await other.describe()).weights_version == 0
        with pytest.raises(StaleFence, match="for the head block"):
            await other.push(push.header, push.parts)


async def test_a_call_names_a_head_that_is_there(stack: Stack) -> None:
    for dialer in (Dialer(), Dialer(head="elsewhere")):
        async with DrafterLink(stack.services["verifier"].address, dialer) as link:
            with pytest.raises(InvalidField, match="block, eagle, lookup"):
                await link.describe()


def test_health_is_told_of_both_services(stack: Stack) -> None:
    for port in (stack.services["verifier"].health, stack.services["verifier"].address):
        with grpc.insecure_channel(port) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for role in ("verifier", "drafter"):
                answer = stub.Check(health_pb2.HealthCheckRequest(service=SERVICES[role]), timeout=5)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_every_session_ends_with_its_stream(stack: Stack) -> None:
    page = stack.services["verifier"].metrics
    for role in ("verifier", "drafter"):
        opened = metric(page, f"coppice_{role}_sessions_opened_total")
        assert opened == metric(page, f"coppice_{role}_sessions_closed_total") > 0
