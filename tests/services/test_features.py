"""The target's features on their way to draft heads: real servers, and a head that remembers what it is given.

Drafters run in this process, verifiers and orchestrators in their own.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import torch
from transformers import AutoModelForCausalLM

from coppice.client.client import AsyncClient
from coppice.errors import InvalidField
from coppice.rpc.channels import Dialer
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree
from coppice.telemetry import OrchestratorMetrics
from coppice.wire.common import FeatureRef, Features
from coppice.wire.drafter import OpenDraft, draft_request_to_wire
from coppice.wire.generation import Chunk
from orchestrator.heads import HeadPool, feature_layers
from services.drafter import following
from tests.feeds import Feeder, feeding
from tests.processes import Service
from tests.recorder import LAYERS, Recorder, drafter_of
from tests.services import test_drafter, test_verifier
from tests.services.test_drafter import status_of
from tests.services.test_verifier import continuation
from tests.tiny import make_target
from tests.unit.test_feature_heads import VOCAB

WINDOW = 24
MANY = tuple(range(20, 36))
IDS = list(range(7, 47))
StartService = Callable[..., Service]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), VOCAB, layers=6, tokenizer=False)


@pytest.fixture(scope="module")
def model(target: Path) -> Any:
    """The reference: plain transformers."""
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def truth(model: Any) -> list[int]:
    """The prompt and what plain decoding says behind it."""
    return [*IDS, *continuation(model, IDS, 460)]


@pytest.fixture(scope="module")
def start_verifier(start_service: StartService, target: Path) -> StartService:
    flags = ["--verifier.target", str(target), "--verifier.threads", "1"]
    window = {"TEST_CONSTANTS": f"services.verifier.worker.FEATURE_WINDOW={WINDOW}"}
    return lambda *more: start_service("services.verifier", *flags, *more, variables=window)


@pytest.fixture(scope="module")
def verifier(start_verifier: StartService) -> Service:
    return start_verifier()


def fetched(verifier: str, session: str, start: int = 0, end: int = len(IDS)) -> Features:
    """Features of the positions start..end-1 by reference."""
    count = end - start
    return Features(start, count, "float32", None, FeatureRef(verifier, session, start, count))


# A drafter and a verifier.


async def test_a_head_gets_the_targets_hidden_states_and_again_when_its_stream_is_opened_again(
    verifier: Service, model: Any, truth: list[int]
) -> None:
    head = Recorder()
    async with (
        drafter_of(head) as drafter,
        test_verifier.connected(verifier) as there,
        test_drafter.connected(drafter) as here,
    ):
        session = test_verifier.Client(there, "hidden", IDS, feature_layers=LAYERS)
        opened = await session.open()
        assert opened.features is not None
        assert opened.features.start == len(IDS) - WINDOW
        client = await test_drafter.Client(here, IDS, features=opened.features).open()
        for length in (0, 3, 1, 2, 5, 4, 5):
            at = len(session.committed)
            await session.verify(DraftTree.chain(truth[at + 1 : at + 1 + length], [-0.1] * length))
            await client.send(session.root, session.committed[at:])
            await client.tree()
        now = len(session.committed)
        assert now == len(IDS) + 27
        head.seen[0].check(model, len(IDS) - WINDOW)
        again = fetched(verifier.address, "hidden", opened.features.start, now)
        await test_drafter.Client(here, session.committed, features=again).open()
        head.seen[1].check(model, now - WINDOW)


async def test_features_that_cannot_be_fetched_are_unavailable_and_the_head_hears_of_nothing(
    verifier: Service,
) -> None:
    head = Recorder()
    async with drafter_of(head) as drafter, test_drafter.connected(drafter) as stub:
        async with test_verifier.connected(verifier) as there:
            await test_verifier.Client(there, "bare", IDS).open()
            for lost, why in [
                (fetched(verifier.address, "nobody"), "no session nobody"),
                (fetched(verifier.address, "bare"), "is not one of the session's layers ()"),
                (fetched("127.0.0.1:1", "s"), "no features from the verifier at 127.0.0.1:1"),
            ]:
                call = stub.Draft()
                await call.write(draft_request_to_wire(OpenDraft("s", IDS, SamplingParams(), features=lost)))
                code, details = await status_of(call)
                assert code is grpc.StatusCode.UNAVAILABLE
                assert why in details
        assert (head.seen, (await test_drafter.until_idle(stub)).sessions) == ([], 0)


@pytest.mark.parametrize(
    ("parts", "hangs"),
    [
        ([], False),
        ([(0, 10)], False),
        ([(0, 10), (12, 28)], False),
        ([(0, 10)], True),
    ],
    ids=["none", "too few", "a gap", "no end"],
)
async def test_rows_of_other_positions_than_asked_for_are_unavailable(
    monkeypatch: pytest.MonkeyPatch, parts: list[tuple[int, int]], hangs: bool
) -> None:
    monkeypatch.setattr(following, "OPEN_S", 0.3 if hangs else 20.0)
    feeder = Feeder([Features(start, count, "float32", b"\0" * 4 * count) for start, count in parts], hangs)
    feeder.go.set()
    async with feeding(feeder) as ref, drafter_of(Recorder()) as drafter, test_drafter.connected(drafter) as stub:
        call = stub.Draft()
        lost = fetched(ref.verifier, "s")
        await call.write(draft_request_to_wire(OpenDraft("s", IDS, SamplingParams(), features=lost)))
        assert (await status_of(call))[0] is grpc.StatusCode.UNAVAILABLE


async def test_missing_or_other_positions_features_are_refused_by_field() -> None:
    rows, ref = Features(0, len(IDS), "float32", b"\0" * 4 * len(IDS)), fetched("127.0.0.1:1", "s")
    assert ref.ref is not None
    openings = [
        (None, "open.features: a recorder head reads"),
        (rows, "open.features: holds rows; name the session"),
        (replace(rows, inline=None), "open.features: a recorder head reads"),
        (fetched("127.0.0.1:1", "s", 40, 41), "open.features: begin at position 40 of 40"),
        (ref, "open.features.ref.verifier: is not one"),
        (
            replace(ref, ref=replace(ref.ref, layers=(2, 1))),
            "open.features.ref.layers: are (2, 1), this head reads those of (2, 3, 1)",
        ),
    ]
    async with drafter_of(Recorder(), allowed=["elsewhere:1"]) as drafter, test_drafter.connected(drafter) as stub:
        for features, why in openings:
            call = stub.Draft()
            await call.write(draft_request_to_wire(OpenDraft("s", IDS, SamplingParams(), features=features)))
            code, details = await status_of(call)
            assert (code, details[: len(why)]) == (grpc.StatusCode.INVALID_ARGUMENT, why)


# The whole pipeline.


@asynccontextmanager
async def pipeline(
    start_service: StartService, verifier: str, *heads: str, deadline_ms: int = 2000
) -> AsyncIterator[AsyncClient]:
    """A client of an orchestrator process over NAME=ADDRESS heads; the test's loop runs while it starts."""
    flags = ["--orchestrator.verifiers", verifier, "--orchestrator.draft_deadline_ms", str(deadline_ms)]
    for head in heads:
        flags += ["--orchestrator.heads", head]
    service = await asyncio.to_thread(start_service, "orchestrator", *flags)
    async with AsyncClient(service.address) as client:
        yield client
    await asyncio.to_thread(service.stop)


async def test_heads_of_different_layers_draft_for_one_text_and_each_gets_its_own(
    start_service: StartService, verifier: Service, model: Any, truth: list[int]
) -> None:
    heads = Recorder(layers=(4,), truth=truth), Recorder(layers=(5, 0, 3, 1, 2), truth=truth), Recorder(truth=truth)
    other = Recorder(layers=(), truth=truth)
    options = {"max_new_tokens": 40, "ignore_eos": True}
    async with (
        drafter_of(heads[0]) as one,
        drafter_of(heads[1]) as five,
        drafter_of(heads[2]) as three,
        drafter_of(other) as none,
    ):
        named = f"one={one.address}", f"five={five.address}", f"three={three.address}", f"none={none.address}"
        async with pipeline(start_service, verifier.address, *named) as client:
            for policy in ("merge", "route", "route:five/one", "auto", "single:five", "single:none", "plain"):
                answer = await client.generate(IDS, policy=policy, **options)
                assert list(answer.ids) == truth[len(IDS) :][:40]
                assert policy == "auto" or (answer.tau > 2.5) == (policy != "plain"), policy
            sampled = {"temperature": 1.0, "seed": 5, **options}
            plain = await client.generate(IDS, policy="plain", **sampled)
            assert (await client.generate(IDS, policy="merge", **sampled)).ids == plain.ids
    for head, least in zip(heads, (3, 4, 2), strict=True):
        assert len(head.seen) >= least
        for seen in head.seen:
            assert seen.features[0] is not None
            seen.check(model, seen.features[0].start)
    assert {features for seen in other.seen for features in seen.features} == {None}


def free_port() -> int:
    """One that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


async def generate(client: AsyncClient, gate: threading.Event, policy: str = "single:reader") -> list[int]:
    """440 ids of a text drafted by `reader`; the gate opens when the text has gone on without it for a while."""
    ids: list[int] = []
    async for event in client.stream(IDS, policy=policy, max_new_tokens=440, ignore_eos=True):
        if isinstance(event, Chunk):
            ids += event.ids
        if len(ids) >= 30:
            gate.set()
    return ids


@pytest.mark.parametrize(("policy", "breaks_at"), [("single:reader", 9), ("merge", 0)], ids=["drafting", "opening"])
async def test_a_stream_opened_again_in_mid_text_goes_on_with_the_features_there_are(
    start_service: StartService, verifier: Service, model: Any, truth: list[int], breaks_at: int, policy: str
) -> None:
    breaking, whole = Recorder(truth=truth, breaks_at=breaks_at), Recorder(truth=truth)
    other = Recorder(layers=(5, 3), truth=truth)
    if breaks_at == 0:
        breaking.gate.clear()
    ports = sorted((free_port(), free_port()), key=str)  # the first session goes to the first address
    async with (
        drafter_of(breaking, port=ports[0]) as first,
        drafter_of(whole, port=ports[1]) as second,
        drafter_of(other) as third,
    ):
        heads = f"reader={first.address}", f"reader={second.address}", f"other={third.address}"
        async with pipeline(start_service, verifier.address, *heads, deadline_ms=200) as client:
            assert await generate(client, breaking.gate, policy) == truth[len(IDS) :][:440]
    seen = whole.seen[0]
    opened = seen.features[0]
    assert opened is not None
    assert len(IDS) < opened.start + opened.count < len(seen.ids)
    assert opened.count <= WINDOW
    for broken in breaking.seen[:1]:
        broken.check(model, len(IDS) - WINDOW)
    seen.check(model, opened.start)
    assert bool(other.seen) == (policy == "merge")  # once more where it was late
    for beside in other.seen:
        beside.check(model, len(IDS) - WINDOW)


async def test_a_head_learned_of_late_that_sat_steps_out_gets_their_features_at_once(
    start_service: StartService, verifier: Service, model: Any, truth: list[int]
) -> None:
    port = free_port()
    head = Recorder(truth=truth)
    async with (
        pipeline(start_service, verifier.address, f"reader=127.0.0.1:{port}", deadline_ms=200) as client,
        drafter_of(head, port=port),
    ):
        await asyncio.sleep(2.5)  # it was not there when the orchestrator first asked
        head.gate.clear()
        assert await generate(client, head.gate) == truth[len(IDS) :][:440]
    for seen in head.seen:
        assert seen.features[0] is not None
        seen.check(model, seen.features[0].start)
    assert head.seen[0].features[1].count > 4


async def test_a_verifier_that_drafters_cannot_reach_leaves_plain_decoding(
    start_service: StartService, start_verifier: StartService, truth: list[int]
) -> None:
    elsewhere = await asyncio.to_thread(start_verifier, "--server.advertise", "127.0.0.9")
    address = elsewhere.address.replace("127.0.0.9", "127.0.0.1")
    head = Recorder(truth=truth)
    async with drafter_of(head) as drafter, pipeline(start_service, address, f"reader={drafter.address}") as client:
        answer = await client.generate(IDS, policy="single:reader", max_new_tokens=60, ignore_eos=True)
    assert (list(answer.ids), answer.tau, head.seen) == (truth[len(IDS) :][:60], 1.0, [])


async def test_a_plan_asks_for_the_layers_of_all_its_heads_and_too_many_are_refused_where_that_is_known(
    start_service: StartService, tmp_path: Path
) -> None:
    heads = Recorder(layers=(1, 2, 5)), Recorder(layers=(3, 2, 1)), Recorder(layers=()), Recorder(layers=MANY)
    async with (
        drafter_of(heads[0]) as one,
        drafter_of(heads[1]) as two,
        drafter_of(heads[2]) as none,
        drafter_of(heads[3]) as many,
    ):
        metrics = OrchestratorMetrics()
        addresses = {"one": one.address, "two": two.address, "none": none.address, "gone": "127.0.0.1:1"}
        addresses["many"] = many.address
        pools = {name: HeadPool(name, [address], Dialer(), metrics, 40) for name, address in addresses.items()}
        assert await feature_layers([], "policy") == ()
        assert await feature_layers([pools["none"], pools["gone"]], "policy") == ()
        assert await feature_layers([pools["none"], pools["two"], pools["gone"]], "policy") == (3, 2, 1)
        assert (pools["gone"].feature_layers, pools["gone"].pick()) == (None, None)
        assert await feature_layers([pools["one"], pools["none"], pools["two"]], "policy") == (1, 2, 5, 3)
        assert await feature_layers([pools["many"]], "policy") == MANY
        with pytest.raises(InvalidField, match=r"policy: .* more than 16 layers: one \(1, 2, 5\), many \(20, 21, "):
            await feature_layers([pools["one"], pools["none"], pools["many"]], "policy")
        deep = make_target(tmp_path / "deep", VOCAB, layers=40, tokenizer=False)
        flags = ("--verifier.target", str(deep), "--verifier.threads", "1")
        verifier = await asyncio.to_thread(start_service, "services.verifier", *flags)
        named = f"one={one.address}", f"many={many.address}"
        with pytest.raises(RuntimeError, match=r"exit code 2\):\n(.|\n)*orchestrator\.heads: heads read features"):
            async with pipeline(start_service, verifier.address, *named):
                pass


async def test_a_head_of_another_vocabulary_is_left_alone_and_counted_once() -> None:
    head = Recorder()
    head.description = replace(head.description, vocab_size=96, tokenizer_hash=b"a" * 32)
    async with drafter_of(head) as one:
        metrics = OrchestratorMetrics()
        fits = HeadPool("fits", [one.address], Dialer(), metrics, 6, 96, b"a" * 32)
        other = HeadPool("other", [one.address], Dialer(), metrics, 6, 300)
        strange = HeadPool("strange", [one.address], Dialer(), metrics, 6, 96, b"b" * 32)
        for _ in range(3):
            for pool in (fits, other, strange):
                for replica in pool.replicas:
                    await pool.look(replica)
        assert fits.pick() is not None
        assert other.pick() is None
        assert [replica.unfit for replica in other.replicas] == ["it has a vocabulary of 96 ids, the target one of 300"]
        assert [replica.unfit for replica in strange.replicas] == ["its tokenizer is not the target's"]
        assert metrics.registry.get_sample_value("coppice_heads_unfit_total", {"head": "other"}) == 1
        assert not metrics.registry.get_sample_value("coppice_heads_unfit_total", {"head": "fits"})


async def test_a_head_far_below_what_it_promises_raises_the_alarm_and_an_honest_one_does_not(
    start_service: StartService, verifier: Service, truth: list[int]
) -> None:
    honest, wrong = Recorder(layers=(), truth=truth), Recorder(layers=(), truth=[0] * len(truth))
    for head in (honest, wrong):
        head.description = replace(head.description, expected_acceptance=(0.75, 0.5))
    useless = Recorder(layers=(), truth=[0] * len(truth))  # and nobody measured it
    useless.description = replace(useless.description, vocab_size=VOCAB)
    async with drafter_of(honest) as first, drafter_of(wrong) as second, drafter_of(useless) as third:
        flags = ["--orchestrator.verifiers", verifier.address]
        for head in (f"honest={first.address}", f"wrong={second.address}", f"useless={third.address}"):
            flags += ["--orchestrator.heads", head]
        service = await asyncio.to_thread(start_service, "orchestrator", *flags)
        async with AsyncClient(service.address) as client:
            for policy in ("single:honest", "single:wrong"):
                answer = await client.generate(IDS, policy=policy, max_new_tokens=60, ignore_eos=True)
                assert list(answer.ids) == truth[len(IDS) :][:60]
            await asyncio.gather(
                *(client.generate(IDS, policy="single:useless", max_new_tokens=250, ignore_eos=True) for _ in range(2))
            )
        url = f"http://{service.metrics}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read().decode())
        assert 'coppice_head_suspect{head="honest"} 0.0' in text
        assert 'coppice_head_suspect{head="wrong"} 1.0' in text
        assert 'coppice_head_suspect{head="useless"} 1.0' in text
        await asyncio.to_thread(service.stop)
