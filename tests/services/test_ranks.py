"""A target on two ranks: it says what one rank says, and it ends as one process."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from coppice.config.sections import VerifierSettings
from coppice.config.settings import load_settings
from coppice.engine.kv_cache import KVPool, KVShape
from coppice.engine.rows import Earlier, Piece, pack
from coppice.errors import InvalidField
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree
from services.verifier import ranks
from services.verifier.ranks import AT_ONCE, check_devices, decode, encode
from tests.processes import Service
from tests.services.test_verifier import Client, connected, described
from tests.tiny import make_target

VOCAB = 300  # a row of all ids can be sent
IDS = [random.Random(0).randrange(VOCAB) for _ in range(21)]
SAMPLED = SamplingParams(temperature=1.0, seed=3)
StartService = Callable[..., Service]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), VOCAB, max_len=1024, tokenizer=False)


def flags(target: Path, ranks: int) -> tuple[str, ...]:
    told = {"target": target, "ranks": ranks, "threads": ranks, "kv_tokens": 4096, "prune": "false"}
    return tuple(text for name, value in told.items() for text in (f"--verifier.{name}", str(value)))


@pytest.fixture(scope="module")
def one(start_service: StartService, target: Path) -> Service:
    return start_service("services.verifier", *flags(target, 1))


@pytest.fixture(scope="module")
def start_two(start_service: StartService, target: Path) -> Callable[[], Service]:
    """Ranks on the CPU wait for each other hundreds of times while they warm up, which takes long beside other work."""
    return lambda: start_service("services.verifier", *flags(target, 2), ready_s=150.0)


@pytest.fixture(scope="module")
def two(start_two: Callable[[], Service]) -> Service:
    return start_two()


def other_ranks(service: Service) -> list[psutil.Process]:
    return psutil.Process(service.process.pid).children(recursive=True)


def some_tree(rng: random.Random, good: Sequence[int], nodes: int) -> DraftTree:
    """A random tree into which ids of the text are woven."""
    tokens, parents, spine, depth = [], [], 0, 0
    for node in range(1, nodes + 1):
        if depth < len(good) and rng.random() < 0.3:
            tokens.append(good[depth])
            parents.append(spine)
            spine, depth = node, depth + 1
        else:
            tokens.append(rng.randrange(VOCAB))
            parents.append(rng.randrange(max(0, node - 6), node))
    return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64), -np.arange(nodes, dtype=np.float32))


async def text_of(service: Service, sampling: SamplingParams, ids: Sequence[int], count: int) -> list[int]:
    """A session without trees."""
    async with connected(service) as stub:
        client = Client(stub, "plain", ids, sampling=sampling, max_len=len(ids) + count + 1)
        await client.open()
        while len(client.committed) < len(ids) + count:
            await client.verify()
        return client.committed[len(ids) :]


async def test_rows_and_features_equal_one_ranks(one: Service, two: Service) -> None:
    """Also behind a prompt whose forward is more than one broadcast says."""
    rng = random.Random(1)
    hashes = []
    for service in (one, two):
        async with connected(service) as stub:
            hashes.append((await described(stub)).weights_hash)
    assert hashes[0] == hashes[1]  # replicas of either kind serve one pool
    for length in (1, 21, 700):
        ids = [rng.randrange(VOCAB) for _ in range(length)]
        rows = []
        for service in (one, two):
            async with connected(service) as stub:
                opened = await Client(stub, "rows", ids, sampling=SAMPLED, want_prompt_log_probs=True).open()
            assert opened.next.row is not None
            assert len(opened.next.row.ids) == VOCAB
            rows.append((opened.next.row.log_probs, np.array(opened.prompt_log_probs)))
        for single, shared in zip(*rows, strict=True):
            assert shared == pytest.approx(single, rel=1e-5, abs=1e-5)


async def test_sampled_sessions_with_trees_say_what_one_ranks_plain_ones_do(one: Service, two: Service) -> None:
    """Four at once, so that their blocks interleave, rejected branches move the KV, and sessions come and go."""
    prompts = [IDS[: 5 + 4 * number] for number in range(4)]
    expected = [await text_of(one, SAMPLED, prompt, 40) for prompt in prompts]

    async def decode(stub: Any, number: int) -> tuple[list[int], int]:
        rng, prompt, good = random.Random(number), prompts[number], expected[number]
        client = Client(stub, f"trees-{number}", prompt, sampling=SAMPLED, max_len=len(prompt) + 60)
        await client.open()
        accepted = 0
        while (made := len(client.committed) - len(prompt)) < 36:
            verdict = await client.verify(some_tree(rng, good[made + 1 :], rng.choice([0, 3, 12, 30])))
            accepted += len(verdict.accepted)
        await client.call.done_writing()
        return client.committed[len(prompt) :][:40], accepted

    for _ in range(2):
        async with connected(two) as stub:
            said = await asyncio.gather(*(decode(stub, number) for number in range(4)))
        assert [text for text, _ in said] == [good[: len(text)] for good, (text, _) in zip(expected, said, strict=True)]
        assert sum(accepted for _, accepted in said) > 20


def test_sigterm_ends_both(one: Service, two: Service) -> None:
    """The last test of these two services."""
    assert other_ranks(one) == []
    (rank,) = other_ranks(two)
    assert "services.verifier.rank" in " ".join(rank.cmdline())
    assert two.stop() == 0
    assert not rank.is_running()


def test_a_rank_that_ends_ends_the_verifier_within_seconds(start_two: Callable[[], Service]) -> None:
    service = start_two()
    (rank,) = other_ranks(service)
    rank.kill()
    assert service.process.wait(5.0) == 1
    service.exit_code = 0  # as was wanted
    assert "rank 1 ended with signal 9" in service.log


def test_a_verifier_that_is_killed_takes_its_ranks_along(start_two: Callable[[], Service]) -> None:
    service = start_two()
    (rank,) = other_ranks(service)
    service.kill()
    assert rank.wait(10.0) is None  # not our child: it is gone, nobody knows how


def refusal(target: Path, tmp_path: Path, *more: str) -> str:
    """The last line of a verifier that does not start."""
    with pytest.raises(RuntimeError, match=r"exit code 2") as ended:
        Service("services.verifier", *flags(target, 2), *more, folder=tmp_path / "refused")
    return str(ended.value).rstrip().rpartition("\n")[2]


def test_ranks_that_cannot_share_the_key_heads_are_refused_in_a_line(target: Path, tmp_path: Path) -> None:
    said = refusal(target, tmp_path, "--verifier.ranks", "3")
    assert said == "verifier.ranks: 3 ranks cannot share the model's 2 KV heads evenly"


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are two devices")
def test_more_ranks_than_cuda_devices_are_refused_in_a_line(target: Path, tmp_path: Path) -> None:
    said = refusal(target, tmp_path, "--verifier.device", "cuda")
    assert said == f"verifier.ranks: 2 ranks take a CUDA device each, and torch finds {torch.cuda.device_count()}"


def test_a_model_that_transformers_cannot_share_is_refused_in_a_line(target: Path, tmp_path: Path) -> None:
    """What a rank finds while it loads is said, and ends all."""
    folder = tmp_path / "unplanned"
    folder.mkdir()
    save_opt(folder)
    said = refusal(folder, tmp_path)
    assert f"{folder} cannot be loaded: ValueError" in said
    assert "OPTForCausalLM` has no `tp_plan`" in said


def save_opt(folder: Path) -> None:
    from transformers import OPTConfig, OPTForCausalLM

    OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            ffn_dim=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            word_embed_proj_dim=16,
        )
    ).save_pretrained(folder)


def settings(target: Path, **more: Any) -> VerifierSettings:
    return VerifierSettings(**{"target": str(target), "ranks": 2, "kv_tokens": 4096, **more})


def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "find_spec", lambda name: None)
    with pytest.raises(
        InvalidField, match=r"verifier.ranks: 2 ranks need the package accelerate.*pip install '\.\[ranks\]'"
    ):
        check_devices(settings(target))
    check_devices(settings(target, ranks=1))


def test_a_single_device_cannot_be_named_for_several_ranks() -> None:
    with pytest.raises(InvalidField, match=r"verifier.ranks: .*must be cuda or cpu, not cuda:1"):
        load_settings(["--verifier.device", "cuda:1", "--verifier.ranks", "2"])


class Cuda:
    """Devices that are not here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *free_gib: float) -> None:
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
    Cuda(monkeypatch, *free)
    told = settings(llama_8b(tmp_path), device="cuda", dtype="bfloat16", ranks=ranks, kv_tokens=kv_tokens)
    if not said:
        for rank in range(ranks):
            check_devices(told, rank)
        return
    with pytest.raises(InvalidField, match=said):
        check_devices(told, ranks - 1)


def test_kv_that_nobody_sizes_fits_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda(monkeypatch, 6.0)
    told = VerifierSettings(target=str(llama_8b(tmp_path)), device="cuda", dtype="bfloat16")
    assert check_devices(told).kv_tokens == 16_384  # half of what a forward leaves, and there are no weights
    assert check_devices(told.model_copy(update={"kv_tokens": 32_000})).kv_tokens == 32_000


def test_the_hosts_memory_is_asked_for_the_cpu(target: Path, tmp_path: Path) -> None:
    said = refusal(target, tmp_path, "--verifier.ranks", "1", "--verifier.kv_tokens", str(10**12))
    assert said.startswith("target: 1 x (0.0 GiB of weights + ")
    assert "of memory on cpu; a lower verifier.kv_tokens" in said


# What is said of a forward.


@pytest.mark.parametrize("rows", [1, 7, 512])
def test_a_forward_that_is_told_is_the_one_that_was_meant(rows: int) -> None:
    pool = KVPool(layers=[KVShape(1, 2, 2)], tokens=4096)
    rng = random.Random(rows)
    first, second = pool.allocate("first", 40), pool.allocate("second", 600)
    pool.extend(first, 700)  # around the second one
    parents = [-1, *(rng.randrange(row) for row in range(1, rows))]
    depths = [0] * rows
    for row in range(1, rows):
        depths[row] = depths[parents[row]] + 1
    grown = Earlier(np.array([[rng.random() < 0.5 for _ in range(5)] for _ in range(rows)]), np.arange(40, 45))
    pieces = [
        Piece(first, 40, list(range(rows)), parents, depths, range(0, rows, 2), grown),
        Piece.chain(second, 13, [5, 6, 7]),
    ]
    batch, moves = pack(pieces, (0, 3)), [np.array([[5, 6], [4, 5]]), np.array([[9], [1]])]
    words = encode(batch, moves)
    assert (len(words) > AT_ONCE) == (rows == 512)
    again, moved = decode(words, pool.block_size)
    assert moved.tolist() == [[5, 6, 9], [4, 5, 1]]
    for name in ("tokens", "positions", "logits_to_keep"):
        assert torch.equal(getattr(again, name), getattr(batch, name))
    assert again.feature_layers == (0, 3)
    for tail, meant in zip(again.tails, batch.tails, strict=True):
        assert (tail.prefix, tail.length, tail.table.consecutive) == (
            meant.prefix,
            meant.length,
            meant.table.consecutive,
        )
        assert np.array_equal(tail.visible, meant.visible)
        assert np.array_equal(tail.positions, meant.positions)
        slots = np.arange(meant.length)
        assert np.array_equal(tail.table.slots(slots), meant.table.slots(slots))
