"""A target on two ranks: it says what one rank says, and it ends as one process."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from coppice.config.sections import VerifierSettings
from coppice.config.settings import load_settings
from coppice.errors import InvalidField
from coppice.speculation.sampling import SamplingParams
from services.verifier import ranks
from services.verifier.ranks import check_devices
from tests.processes import Service, StartService
from tests.sessions import VerifierClient, described, junk_tree, verifying

VOCAB = 300  # a row of all ids can be sent
IDS = [random.Random(0).randrange(VOCAB) for _ in range(21)]
TINY_TARGET = {"vocab": VOCAB, "max_len": 1024, "tokenizer": False}
SAMPLED = SamplingParams(temperature=1.0, seed=3)


def flags(target: Path, ranks: int) -> tuple[str, ...]:
    told = {"target": target, "ranks": ranks, "threads": ranks, "kv_tokens": 4096, "prune": "false"}
    return tuple(text for name, value in told.items() for text in (f"--verifier.{name}", str(value)))


@pytest.fixture(scope="module")
def one(start_service: StartService, target: Path) -> Service:
    return start_service("services.verifier", *flags(target, 1))


@pytest.fixture(scope="module")
def two(start_service: StartService, target: Path) -> Service:
    """Ranks on the CPU wait for each other hundreds of times while they warm up, which takes long beside other work."""
    return start_service("services.verifier", *flags(target, 2), ready_s=150.0)


def other_ranks(service: Service) -> list[psutil.Process]:
    return psutil.Process(service.process.pid).children(recursive=True)


async def text_of(service: Service, sampling: SamplingParams, ids: Sequence[int], count: int) -> list[int]:
    """A session without trees."""
    async with verifying(service) as stub:
        client = await VerifierClient(stub, "plain", ids, sampling=sampling, max_len=len(ids) + count + 1).open()
        while len(client.committed) < len(ids) + count:
            await client.verify()
        return client.committed[len(ids) :]


async def test_rows_and_features_equal_one_ranks(one: Service, two: Service) -> None:
    rng = random.Random(1)
    single, shared = await described(one), await described(two)
    assert single.weights_hash == shared.weights_hash  # replicas of either kind serve one pool
    for length in (1, 21, 700):
        ids = [rng.randrange(VOCAB) for _ in range(length)]
        rows = []
        for service in (one, two):
            async with verifying(service) as stub:
                client = VerifierClient(stub, "rows", ids, sampling=SAMPLED, want_prompt_log_probs=True)
                opened = (await client.open()).opened
            assert opened.next.row is not None
            assert len(opened.next.row.ids) == VOCAB
            rows.append((opened.next.row.log_probs, np.array(opened.prompt_log_probs)))
        for ours, theirs in zip(*rows, strict=True):
            assert theirs == pytest.approx(ours, rel=1e-5, abs=1e-5)


async def test_sampled_sessions_with_trees_say_what_one_ranks_plain_ones_do(one: Service, two: Service) -> None:
    """Four at once, so that their blocks interleave, rejected branches move the KV, and sessions come and go."""
    prompts = [IDS[: 5 + 4 * number] for number in range(4)]
    expected = [await text_of(one, SAMPLED, prompt, 40) for prompt in prompts]

    async def decode(stub: Any, number: int) -> tuple[list[int], int]:
        rng, prompt, good = random.Random(number), prompts[number], expected[number]
        client = VerifierClient(stub, f"trees-{number}", prompt, sampling=SAMPLED, max_len=len(prompt) + 60)
        await client.open()
        accepted = 0
        while (made := len(client.committed) - len(prompt)) < 36:
            verdict = await client.verify(junk_tree(rng, good[made + 1 :], rng.choice([0, 3, 12, 30]), VOCAB))
            accepted += len(verdict.accepted)
        await client.call.done_writing()
        return client.committed[len(prompt) :][:40], accepted

    for _ in range(2):
        async with verifying(two) as stub:
            said = await asyncio.gather(*(decode(stub, number) for number in range(4)))
        assert [text for text, _ in said] == [good[: len(text)] for good, (text, _) in zip(expected, said, strict=True)]
        assert sum(accepted for _, accepted in said) > 20


def test_a_rank_that_ends_ends_the_verifier(one: Service, two: Service) -> None:
    """The last test of these two services; how they end otherwise is tests/nightly/test_ranks_at_length.py's."""
    assert other_ranks(one) == []
    (rank,) = other_ranks(two)
    assert "services.verifier.rank" in " ".join(rank.cmdline())
    rank.kill()
    assert two.process.wait(60.0) == 1
    two.exit_code = 0  # as was wanted
    assert "rank 1 ended with signal 9" in two.log


def settings(target: Path, **more: Any) -> VerifierSettings:
    return VerifierSettings(**{"target": str(target), "ranks": 2, "kv_tokens": 4096, **more})


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are two devices")
def test_what_this_machine_has_not_is_refused_in_a_line(target: Path) -> None:
    count = torch.cuda.device_count()
    for more, reason in (
        ({"ranks": 3}, "^verifier.ranks: 3 ranks cannot share the model's 2 KV heads evenly$"),
        ({"device": "cuda"}, f"2 ranks take a CUDA device each, and torch finds {count}$"),
        ({"ranks": 1, "kv_tokens": 10**12}, "^target: 1 x .0.0 GiB of weights .* memory on cpu; a lower verifier.kv_t"),
    ):
        with pytest.raises(InvalidField, match=reason):
            check_devices(settings(target, **more))


def test_a_missing_package_is_named_with_its_extra(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "find_spec", lambda name: None)
    with pytest.raises(
        InvalidField, match=r"verifier.ranks: 2 ranks need the package accelerate.*pip install '\.\[ranks\]'"
    ):
        check_devices(settings(target))
    check_devices(settings(target, ranks=1))


def test_a_single_device_cannot_be_named_for_several_ranks() -> None:
    with pytest.raises(InvalidField, match=r"verifier.ranks: .*must be cuda or cpu, not cuda:1"):
        load_settings(["--verifier.device", "cuda:1", "--verifier.ranks", "2"])


def devices(monkeypatch: pytest.MonkeyPatch, *free_gib: float) -> None:
    """Have devices that are not here."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free_gib))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (int(free_gib[number] * 2**30), 80 * 2**30))


def llama_8b(folder: Path) -> Path:
    """Its shape, without weights: KV of 128 KiB a token in bfloat16."""
    config = {
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("free", "ranks", "kv_tokens", "said"),
    [
        ((79.0,), 1, 458_752, ""),  # values-cluster.yaml
        ((79.0,), 1, 700_000, "on cuda, of which 2 are kept for forwards; 2 ranks on as many such devices would hold"),
        ((79.0, 9.0), 2, 262_144, "more than the 9.0 GiB of memory on 2 x cuda, .*; 8 ranks on as many"),
        ((79.0, 40.0), 2, 524_288, ""),
        ((1.0,), 1, 4096, r"forwards; a lower verifier.kv_tokens"),  # nothing is left for weights anywhere
    ],
)
def test_what_devices_cannot_hold_is_said_before_weights_are_read(
    free: tuple[float, ...], ranks: int, kv_tokens: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices(monkeypatch, *free)
    told = settings(llama_8b(tmp_path), device="cuda", dtype="bfloat16", ranks=ranks, kv_tokens=kv_tokens)
    if not said:
        for rank in range(ranks):
            check_devices(told, rank)
        return
    with pytest.raises(InvalidField, match=said):
        check_devices(told, ranks - 1)
