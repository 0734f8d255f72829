"""A target on two ranks: it says what plain transformers say, and it ends as one process."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from coppice.config.sections import VerifierSettings
from coppice.config.settings import load_settings
from coppice.engine.loading import load_engine
from coppice.errors import InvalidField
from coppice.speculation.sampling import SamplingParams
from services.verifier import ranks
from services.verifier.ranks import check_devices
from tests.processes import Service, StartService
from tests.sessions import VerifierClient, continuation, described, junk_tree, verifying

VOCAB = 300  # a row of all ids can be sent
IDS = [random.Random(0).randrange(VOCAB) for _ in range(21)]
TINY_TARGET = {"vocab": VOCAB, "max_len": 1024, "tokenizer": False}
SAMPLED = SamplingParams(temperature=1.0, seed=3)


def flags(target: Path, ranks: int) -> tuple[str, ...]:
    told = {"target": target, "ranks": ranks, "threads": ranks, "kv_tokens": 4096, "prune": "false"}
    return tuple(text for name, value in told.items() for text in (f"--verifier.{name}", str(value)))


@pytest.fixture(scope="module")
def two(start_service: StartService, target: Path) -> Service:
    """Ranks on the CPU wait for each other hundreds of times while they warm up, which takes long beside other work."""
    return start_service("services.verifier", *flags(target, 2), ready_s=150.0)


def other_ranks(service: Service) -> list[psutil.Process]:
    return psutil.Process(service.process.pid).children(recursive=True)


async def test_rows_are_those_of_plain_transformers(two: Service, target: Path, model: Any) -> None:
    alone = load_engine(target, kv_tokens=256).info.weights_hash
    assert (await described(two)).weights_hash == alone  # replicas of either kind serve one pool
    for length in (1, 21, 700):
        ids = [random.Random(length).randrange(VOCAB) for _ in range(length)]
        async with verifying(two) as stub:
            client = VerifierClient(stub, "rows", ids, sampling=SAMPLED, want_prompt_log_probs=True)
            opened = (await client.open()).opened
        with torch.inference_mode():
            rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        assert opened.next.row is not None
        assert len(opened.next.row.ids) == VOCAB
        assert opened.next.row.log_probs == pytest.approx(rows[-1][torch.tensor(opened.next.row.ids)].numpy(), abs=1e-4)
        expected = rows[:-1].gather(1, torch.tensor(ids[1:], dtype=torch.int64)[:, None])[:, 0]
        assert list(opened.prompt_log_probs) == pytest.approx(expected.tolist(), abs=1e-4)


async def test_sampled_sessions_with_trees_say_what_plain_decoding_does(two: Service, model: Any) -> None:
    """Four at once, so that their blocks interleave, rejected branches move the KV, and sessions come and go."""
    prompts = [IDS[: 5 + 4 * number] for number in range(4)]
    expected = [continuation(model, prompt, 40, SAMPLED) for prompt in prompts]

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


def test_a_rank_that_ends_ends_the_verifier(two: Service) -> None:
    """The last test of this service; how it ends otherwise is tests/nightly/test_ranks_at_length.py's."""
    (rank,) = other_ranks(two)
    rank.kill()
    assert two.process.wait(60.0) == 1
    two.exit_code = 0  # as was wanted
    assert "rank 1 ended with signal 9" in two.log


def llama_8b(folder: Path) -> str:
    """Its shape, without weights: KV of 128 KiB a token in bfloat16."""
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    config = {"model_type": "llama", **heads, "hidden_size": 4096, "num_hidden_layers": 32}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def refusal(target: str, monkeypatch: pytest.MonkeyPatch, free_gib: tuple[float, ...] = (), **more: Any) -> str:
    """Why a target cannot be served on devices of which so much is free; empty when it can."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free_gib))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (int(free_gib[number] * 2**30), 80 * 2**30))
    told = VerifierSettings(**{"target": target, "ranks": 2, "kv_tokens": 4096, **more})
    try:
        for rank in range(told.ranks):
            check_devices(told, rank)
    except InvalidField as refused:
        return str(refused)
    return ""


def test_what_devices_cannot_hold_is_said_before_weights_are_read(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for more, said in (
        ({"ranks": 3}, "verifier.ranks: 3 ranks cannot share the model's 2 KV heads evenly"),
        ({"device": "cuda"}, "2 ranks take a CUDA device each, and torch finds 0"),
        ({"ranks": 1, "kv_tokens": 10**12}, "memory on cpu; a lower verifier.kv_t"),
    ):
        assert said in refusal(str(target), monkeypatch, **more)
    large = llama_8b(tmp_path)
    for free, kv_tokens, said in (
        ((79.0,), 458_752, ""),  # values-cluster.yaml
        ((79.0,), 700_000, "on cuda, of which 2 are kept for forwards; 2 ranks on as many such devices would hold"),
        ((79.0, 9.0), 262_144, "more than the 9.0 GiB of memory on 2 x cuda"),
        ((79.0, 40.0), 524_288, ""),
        ((1.0,), 4096, "forwards; a lower verifier.kv_tokens"),  # nothing is left for weights anywhere
    ):
        more = {"device": "cuda", "dtype": "bfloat16", "ranks": len(free), "kv_tokens": kv_tokens}
        found = refusal(large, monkeypatch, free, **more)
        assert bool(found) == bool(said)
        assert said in found
    monkeypatch.setattr(ranks, "find_spec", lambda name: None)
    assert "2 ranks need the package accelerate" in refusal(str(target), monkeypatch)
    with pytest.raises(InvalidField, match=r"verifier.ranks: .*must be cuda or cpu, not cuda:1"):
        load_settings(["--verifier.device", "cuda:1", "--verifier.ranks", "2"])
