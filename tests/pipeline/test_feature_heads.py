"""Heads that read features in a stack of real processes: whatever they draft and suffer, the text is the target's.

The heads are random; a vocabulary of 32 makes them right now and then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from coppice.client.client import AsyncClient, Client
from coppice.commands.up import facts
from coppice.errors import InvalidField
from coppice.heads.checkpoints import load_head
from coppice.speculation.sampling import SamplingParams
from coppice.stack.launch import Stack
from coppice.stack.spec import HeadSpec, default_heads
from coppice.testing.reference import Reference
from coppice.testing.tiny_models import save_tiny
from coppice.training.cli import app as train
from tests.stacks import serving
from tests.tiny import add_mtp, make_target
from tests.unit.test_feature_heads import save_random
from tests.unit.test_mtp import CASES

VOCAB, DRAFT_VOCAB, WINDOW = 32, 24, 24
PROMPTS = [
    tuple((7 * at + at * at * number) % VOCAB for at in range(length)) for number, length in enumerate((1, 9, 70))
]
NEW = 24
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1.0, seed=4)
POLICIES = ("single:block", "single:eagle", "route", "merge")
BUDGETS = (0, 1, 8, 31, 60)
KINDS = {"block": "specblock", "eagle": "eagle3"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return make_target(folder, VOCAB, layers=6, max_len=2048, tokenizer=False)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    sizes = {"vocab_size": VOCAB, "draft_vocab_size": DRAFT_VOCAB}
    return {name: save_random(tmp_path_factory.mktemp(name), kind, **sizes) for name, kind in KINDS.items()}


@pytest.fixture(scope="module")
def stack(target: Path, heads: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Both heads, look-up and a head that drafts a block with a Markov table."""
    sizes = {"vocab_size": VOCAB, "draft_vocab_size": DRAFT_VOCAB}
    dspark = HeadSpec("dspark", "dspark", save_random(tmp_path_factory.mktemp("dspark"), "dspark", **sizes))
    block, eagle = HeadSpec("block", "specblock", heads["block"]), HeadSpec("eagle", "eagle3", heads["eagle"])
    logs, lookup = tmp_path_factory.mktemp("logs"), HeadSpec("lookup", "lookup")
    with serving(logs, target, block, eagle, lookup, dspark, draft_deadline_ms=500) as running:
        yield running


async def test_many_sessions_are_plain_under_every_policy(stack: Stack, client: Client, reference: Reference) -> None:
    """Greedy and sampled, coupled or not; the prompts in turn."""
    told: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True}
    policies = (*POLICIES, "single:dspark")
    modes = ((GREEDY, True), (GREEDY, True), (SAMPLED, True), (SAMPLED, False))
    cases = [
        {"policy": policy, "budget": BUDGETS[(at + turn) % len(BUDGETS)], "sampling": sampling, "coupled": coupled}
        for at, policy in enumerate(policies)
        for turn, (sampling, coupled) in enumerate(modes)
    ]
    plain = {prompt: client.generate(prompt, policy="plain", sampling=SAMPLED, **told).ids for prompt in PROMPTS}
    texts = {GREEDY.seed: {prompt: reference.greedy(prompt, NEW).ids for prompt in PROMPTS}, SAMPLED.seed: plain}
    seats = asyncio.Semaphore(6)
    async with AsyncClient(stack.address) as many:

        async def ask(number: int, case: dict[str, Any]) -> set[int]:
            prompt = PROMPTS[number % len(PROMPTS)]
            async with seats:
                answer = await many.generate(prompt, **case, **told)
            assert answer.ids == texts[case["sampling"].seed][prompt], case
            assert answer.bad_drafts == 0
            assert max(answer.verified_nodes) <= case["budget"]
            return set(answer.accept_lengths)

        lengths = await asyncio.gather(*(ask(number, case) for number, case in enumerate(cases)))
    for policy in policies:  # steps that accepted nothing, and several tokens
        seen = set().union(*(each for each, case in zip(lengths, cases, strict=True) if case["policy"] == policy))
        assert {1, 2} <= seen, policy


WIDE, NARROW = 4096, 512
"""ids of a target, of which its tokenizer knows the lowest ones alone, and of a draft vocabulary"""


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma with a large vocabulary, and a head that learnt a few steps of its answers."""
    place = tmp_path_factory.mktemp("learnt")
    make_target(place / "target", WIDE, layers=6, gemma=True)
    words = (f"the cat saw one red bird {n}\nand a dog ran {n * n}" for n in range(200))
    (place / "words.txt").write_text("<|endoftext|>".join(words), encoding="utf-8")
    common = ["--target", str(place / "target"), "--data", f"words={place}/words.txt", "--tokens", "1024"]
    flags = ["--kind", "dspark", "--lessons", str(place / "lessons"), "--shape", f"draft_vocab_size={NARROW}"]
    ended = CliRunner().invoke(train, ["head", *common, *flags, "--out", str(place / "dspark")])
    assert ended.exit_code == 0, ended.output
    return place


def test_a_trained_head_drafts_from_the_targets_own_rows_of_a_part_of_its_vocabulary(learnt: Path) -> None:
    rows = load_file(learnt / "target" / "model.safetensors")["lm_head.weight"]
    file = learnt / "dspark" / "model.safetensors"
    tensors, head = load_file(file), load_head("dspark", learnt / "dspark", learnt / "target").model
    assert not {"lm_head.weight", "embed_tokens.weight"} & tensors.keys()
    assert max(len(tensor) for tensor in tensors.values() if tensor.is_floating_point()) <= NARROW + 1
    assert torch.equal(head.lm_head.weight, rows[head.target_ids])
    assert not torch.equal(head.feature_scale, torch.ones_like(head.feature_scale))
    table, ids = head.markov_head["markov_w1"].weight, head.target_ids  # the table is found by the ids
    outside = torch.isin(torch.arange(WIDE), ids, invert=True).nonzero()[-1]
    assert torch.equal(head.bias(ids), head.markov_head["markov_w2"](table[:-1]))
    assert torch.equal(head.bias(outside), head.markov_head["markov_w2"](table[-1:]))
    save_file(tensors | {"d2t": ids.flip(0) - torch.arange(NARROW)}, file)
    with pytest.raises(InvalidField, match="d2t does not name its ids in order"):
        load_head("dspark", learnt / "dspark", learnt / "target")


@pytest.mark.parametrize(("kind", "layout", "like"), CASES[:2], ids=lambda part: str(part)[:12])
def test_a_target_drafts_with_the_mtp_head_in_its_checkpoint(kind: str, layout: str, like: int, tmp_path: Path) -> None:
    """Greedy and sampled, the text is plain decoding's, and every step's tree is the head's; a hybrid target's, too."""
    save_tiny(kind, "", tmp_path)
    heads = default_heads(add_mtp(tmp_path, layout, like))
    told: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True, "trees": True}
    options = {"one_process": kind == "qwen3", "extra": {"verifier": {"verifier.prune": False}}}
    with serving(None, tmp_path, *heads, **options) as stack, Client(stack.address) as client:
        assert any("read from the target's own checkpoint" in line for line in facts(stack, logs_stay=False))
        for prompt, sampling in product(PROMPTS, (GREEDY, SAMPLED)):
            plain = client.generate(prompt, policy="plain", sampling=sampling, **told)
            drafted = client.generate(prompt, policy="single:mtp", sampling=sampling, **told)
            assert drafted.ids == plain.ids
            assert sum(len(tree.tokens) for tree in drafted.trees) > 8 * len(drafted.trees)
