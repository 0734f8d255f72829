"""Heads that are silently wrong are named by an alarm within fifty steps of drafting.

The honest head is a tiny EAGLE-3 head whose weights are written down: texts repeat a block of seven tokens, its
attention looks five rows back, and what the features there say is the next token. It reads no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from torch import Tensor

from coppice.config.sections import DrafterSettings
from coppice.heads.base import DraftJob, build_head
from coppice.heads.block_head import Eagle3Head
from coppice.heads.checkpoints import save_head
from coppice.heads.models import Eagle3Config, Eagle3Model
from coppice.rpc.channels import Dialer
from coppice.speculation.sampling import SamplingParams
from coppice.training.losses import expectation
from coppice.wire.common import Features
from coppice.wire.drafter import Advance, OpenDraft
from orchestrator.heads import AcceptanceWatch, HeadPool, best_path, offers
from orchestrator.metrics import OrchestratorMetrics
from tests.pushes import swap
from tests.tiny import make_target

VOCAB, WORDS, WIDE, HIDDEN, DIM = 96, 24, 32, 64, 16
PERIOD, BACK = 7, 5  # row p predicts token p + 2, which is token p - 5
PROMPT, LENGTH = 21, 84
LAYERS = (2, 4, 5)
KEY = 1

Rows = Callable[[Tensor], Tensor]  # (T,) ids -> (T, F) the features that a head is given, or other ids
Spoil = Callable[[dict[str, Any], dict[str, Tensor]], object]
"""changes what a head's folder holds: its configuration and its tensors"""
Draws = Iterator[tuple[list[bool], int]]  # of each step: the draft's best path and the version of the weights


def text(seed: int) -> Tensor:
    """(LENGTH,) ids, a block of PERIOD random words again and again."""
    block = torch.randint(1, WORDS + 1, (PERIOD,), generator=torch.Generator().manual_seed(seed))
    return block.repeat(LENGTH // PERIOD)


def features(ids: Tensor, layers: tuple[int, ...] = LAYERS, target: int = 0) -> Tensor:
    """(T,) ids -> (T, F) the hidden states of a made-up target: each layer has a code of its own for every token."""
    codes = [torch.randn(VOCAB, WIDE, generator=torch.Generator().manual_seed(100 * target + at)) for at in layers]
    return torch.cat([code[ids] for code in codes], dim=-1)


def honest() -> Eagle3Model:
    """fc says of which token a row's features are, the attention fetches that of five rows back, lm_head reads it."""
    config = Eagle3Config(
        hidden_size=HIDDEN,
        intermediate_size=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=DIM,
        vocab_size=VOCAB,
        draft_vocab_size=WORDS,
        target_hidden_size=WIDE,
        attention_bias=True,
        norm_before_residual=True,
        feature_layers=LAYERS,
    )
    model: Any = Eagle3Model(config)
    for parameter in model.parameters():
        if parameter.ndim == 2 or parameter is model.midlayer.self_attn.qkv_proj.bias:
            torch.nn.init.zeros_(parameter)
    torch.nn.init.zeros_(model.midlayer.self_attn.o_proj.bias)
    model.d2t.fill_(1)
    model.own_embedding = torch.zeros(VOCAB, HIDDEN)
    codes = features(torch.arange(1, WORDS + 1))
    attention = model.midlayer.self_attn
    heads = attention.qkv_proj.bias.view(-1, DIM)
    query, key = heads[:4], heads[4:6]
    turns = 1e4 ** -(torch.arange(DIM // 2) * 2 / DIM) * BACK
    with torch.no_grad():
        model.fc.weight[:WORDS] = torch.linalg.pinv(codes).T
        query.copy_(12 * torch.cat((turns.cos(), -turns.sin())))  # at its peak where the key is BACK rows earlier
        key.copy_(torch.cat((torch.ones(DIM // 2), torch.zeros(DIM // 2))))
        # From the hidden state, which lies behind the embedding, through a value to the logit.
        for word in range(WORDS):
            attention.qkv_proj.weight[6 * DIM + word, HIDDEN + word] = 1
            head, place = 2 * (word // DIM), word % DIM
            attention.o_proj.weight[WORDS + word, head * DIM + place] = 50  # outweighs the residual
            model.lm_head.weight[word, WORDS + word] = 1
    return model.requires_grad_(False)


def wire_features(rows: Tensor, start: int, end: int) -> Features:
    """Positions start..end-1 of (N, F) features of a text as they go over the wire."""
    return Features(start, end - start, "float32", rows[start:end].float().numpy().tobytes())


def draw(head: Eagle3Head, rows: Rows = features, seen: Rows = Tensor.clone, first: int = 0) -> Draws:
    """Draft along texts one after the other, as the orchestrator has a head do it. `seen`: the ids that it hears of."""
    for seed in range(first, first + 100):
        states, ids = rows(text(seed)), seen(text(seed)).tolist()
        for _ in head.open(
            KEY, OpenDraft("", ids[:PROMPT], SamplingParams(), features=wire_features(states, 0, PROMPT))
        ):
            pass
        known = PROMPT
        while known + 9 < LENGTH:
            ((growth,),) = head.draft([DraftJob(KEY, ids[known], known, 12, SamplingParams())])
            path = best_path(offers(growth.nodes, ids[known + 1 :]))
            yield path, head.description.weights_version
            end = known + 1 + sum(path)
            head.advance(KEY, Advance(ids[known:end], wire_features(states, known, end)))
            known = end
        head.close(KEY)


def load(folder: Path, target: Path) -> Eagle3Head:
    made = build_head(
        DrafterSettings(kind="eagle3", path=str(folder), target=str(target), kv_tokens=512, threads=1, top_k=3, depth=4)
    )
    assert isinstance(made, Eagle3Head)
    return made


def alarms(head: Eagle3Head, draws: Draws, most: int) -> tuple[int, list[Any], float]:
    """Have an orchestrator's pool judge so many steps: (the step of the alarm or 0, log lines, the metric)."""
    metrics = OrchestratorMetrics()
    pool = HeadPool("tiny", ["127.0.0.1:1"], Dialer(), metrics, 8, VOCAB)
    (replica,) = pool.replicas
    watch = pool.watches[replica] = AcceptanceWatch(head.description.expected_acceptance)
    at = 0
    with capture_logs() as logs:
        for step, (path, version) in zip(range(1, most + 1), draws, strict=False):
            pool.judge(replica, path, version)
            at = at or step * watch.suspect
    lines = [line for line in logs if line["event"] == "head drafts far below what is expected of it"]
    return at, lines, metrics.registry.get_sample_value("coppice_head_suspect", {"head": "tiny"}) or 0.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two targets, and the honest head with what it reaches on held-out texts."""
    folder = tmp_path_factory.mktemp("faults")
    make_target(folder / "target", VOCAB, layers=8, hidden=WIDE, tokenizer=False)
    model = honest()
    save_head(folder / "head", model, model.config)
    found = [[0, 0] for _ in range(3)]
    for path, _ in islice(draw(load(folder / "head", folder / "target"), first=200), 400):
        for depth, right in enumerate(path[:3]):
            found[depth][0] += right
            found[depth][1] += 1
    measured = expectation({"blocks": torch.tensor([found])})
    save_head(folder / "head", model, model.config.model_copy(update={"acceptance": measured}))
    return folder


def spoiled(place: Path, out: Path, spoil: Spoil) -> Path:
    """A copy of the honest head's folder after `spoil` changed its configuration or its tensors."""
    out.mkdir()
    config = json.loads((place / "head" / "config.json").read_text())
    tensors = load_file(place / "head" / "model.safetensors")
    spoil(config, tensors)
    (out / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors")
    return out


def as_ids(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = torch.arange(WORDS) + tensors["d2t"]
    del tensors["t2d"]  # by which the loader would see it


def misread(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """bfloat16 taken for float16."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = tensor.bfloat16().view(torch.float16)


def shuffled(ids: Tensor) -> Tensor:
    """The same texts in the words of another tokenizer."""
    return torch.cat((torch.zeros(1, dtype=torch.int64), torch.arange(WORDS, 0, -1)))[ids]


NAMED: dict[str, tuple[Spoil | None, dict[str, Any]]] = {
    "wrong feature layers": (None, {"rows": lambda ids: features(ids, (1, 3, 6))}),
    "features one position off": (None, {"rows": lambda ids: features(ids).roll(1, 0)}),
    "d2t taken as ids": (as_ids, {}),
    "wrong RoPE base": (lambda config, tensors: config.update(rope_theta=100.0), {}),
    "half-precision cast": (misread, {}),
    "other tokenizer": (None, {"seen": shuffled}),
    "other target": (None, {"rows": lambda ids: features(ids, target=1)}),
    "no features": (None, {"rows": lambda ids: torch.zeros_like(features(ids))}),
}


@pytest.mark.parametrize("fault", NAMED)
async def test_a_fault_that_drafts_alone_show_is_named_in_fifty_steps(fault: str, place: Path, tmp_path: Path) -> None:
    spoil, drafted = NAMED[fault]
    head = load(spoiled(place, tmp_path / "head", spoil) if spoil else place / "head", place / "target")
    step, lines, suspects = alarms(head, draw(head, **drafted), 50)
    assert 0 < step <= 50
    assert suspects == 1
    (line,) = lines
    assert (line["head"], line["replica"], line["log_level"]) == ("tiny", "127.0.0.1:1", "error")


async def test_rows_that_outlive_a_push_are_named(place: Path) -> None:
    """The pushed head does what the old one did, by keys of other sizes: old rows that stay in KV outweigh the new."""
    head = load(place / "head", place / "target")

    def draws() -> Draws:
        old = head.weights
        for step, drafted in enumerate(draw(head)):
            yield drafted
            if step == 3:  # in the middle of a text, which goes on with the rows of before
                prefix = "midlayer.self_attn."
                sizes = {f"{prefix}q_proj.bias": 8.0, f"{prefix}k_proj.bias": 1 / 8}
                new = old.changed({name: old.tensors[name] * by for name, by in sizes.items()}, old.version + 1)
                swap(head, new)

    step, lines, suspects = alarms(head, draws(), 54)
    assert 4 < step <= 4 + 50
    assert (suspects, lines[0]["weights_version"]) == (1, 1)


async def test_an_honest_head_is_never_named(place: Path) -> None:
    head = load(place / "head", place / "target")
    assert len(head.description.expected_acceptance) == 3
    assert min(head.description.expected_acceptance) > 0.9
    assert alarms(head, draw(head), 1000) == (0, [], 0.0)
