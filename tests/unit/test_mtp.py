"""MTP heads in their targets' checkpoints, layout by layout, against transformers' modules and a plain forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import typer
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from coppice.commands.options import stack_spec
from coppice.config.model import MTP_LAYOUTS, find_mtp, shared_shards
from coppice.config.sections import DrafterSettings
from coppice.engine.loading import load_engine
from coppice.engine.rows import Piece, pack
from coppice.errors import InvalidField
from coppice.heads.base import build_head
from coppice.heads.checkpoints import load_head
from coppice.stack.spec import COUNTED_HEADS, HeadSpec
from coppice.testing.tiny_models import VOCAB, save_tiny
from tests.tiny import add_mtp, make_target
from tests.unit.test_feature_heads import Dense

QWEN, DEEPSEEK, MIMO, ERNIE = MTP_LAYOUTS
IDS = torch.randint(VOCAB, (19,), generator=torch.Generator().manual_seed(1))
CASES = [
    ("qwen3", QWEN, -1),
    ("qwen3_5_text", QWEN, -1),  # the only layer that attends
    ("qwen3_next", QWEN, -1),
    ("deepseek_v3", DEEPSEEK, -1),
    ("glm4_moe", DEEPSEEK, -1),
    ("qwen2", MIMO, -1),
    ("ernie4_5_moe", ERNIE, 0),  # as published a layer without experts, as the target's first one
]


def by_hand(target: Any, tensors: dict[str, Tensor], layout: str, like: int, hidden: Tensor) -> Tensor:
    """(1, T, vocabulary) logits of a head of this layout, written out."""
    names, layers, model = MTP_LAYOUTS[layout], target.model.layers, target.model
    root = names.root or f"model.layers.{len(layers)}."
    enorm, hnorm, projection, norm = ({"weight": tensors[f"{root}{part}weight"]} for part in names.parts[:-1])
    embedding = functional_call(model.norm, enorm, model.embed_tokens(IDS[None, 1:]))
    parts = embedding, functional_call(model.norm, hnorm, hidden)
    rows = F.linear(torch.cat(parts[::-1] if layout == MIMO else parts, -1), **projection)
    places = torch.arange(rows.shape[1])
    mask = torch.full((len(places), len(places)), -torch.inf).triu(1)[None, None]
    out = layers[like](rows, attention_mask=mask, position_embeddings=model.rotary_emb(rows, places[None]))
    logits: Tensor = target.lm_head(functional_call(model.norm, norm, out))
    return logits


@pytest.mark.parametrize(("kind", "layout", "like"), CASES)
@torch.no_grad()
def test_the_verifiers_states_and_the_heads_logits_are_those_of_the_layout(
    kind: str, layout: str, like: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(kind, "", tmp_path)
    loaded, engine = load_head("mtp", "", add_mtp(tmp_path, layout, like)), load_engine(tmp_path, kv_tokens=256)
    with engine.pool.borrow("text", len(IDS)) as table:
        batch = pack([Piece.chain(table, 0, IDS.tolist())], (2, *loaded.config.feature_layers))
        features = engine.forward(batch).features
    assert features is not None
    target: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    number, states = target.config.num_hidden_layers, list[Tensor]()
    target.model.norm.register_forward_hook(lambda _, args, out: states.extend((args[0], out)))
    target(IDS[None])
    hidden = states[MTP_LAYOUTS[layout].reads_normed][:, :-1]
    torch.testing.assert_close(features.chunk(2, dim=-1)[1][None, :-1], hidden, rtol=1e-4, atol=1e-4)
    model, rows = loaded.model.eval(), len(IDS) - 1
    attends = model.attends(Dense(torch.ones(rows, rows, dtype=torch.bool).tril()))
    rope = model.rope(torch.arange(rows)[None], torch.float32)
    logits = model.read(model(model.condition(hidden), F.embedding(IDS[None, 1:], loaded.embedding), rope, attends))[0]
    expected = by_hand(target, load_file(tmp_path / "model.safetensors"), layout, like, hidden)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    if layout == DEEPSEEK:  # transformers has a module for it
        monkeypatch.setattr(target, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{number}\..*"])
        theirs, cache = MtpModel.from_pretrained(target), MtpCache(config=target.config.get_mtp_config())
        out = theirs.forward_layer(0, hidden, torch.arange(1, rows + 1)[None], cache, input_ids=IDS[None, 1:])
        torch.testing.assert_close(logits, theirs.shared_head(out), rtol=1e-5, atol=1e-5)


def test_it_is_used_where_it_ships_and_refused_where_it_does_not(tmp_path: Path) -> None:
    target = make_target(tmp_path / "plain", 96, tokenizer=False)
    assert stack_spec(target, None).heads == COUNTED_HEADS
    with pytest.raises(InvalidField, match=r"drafter.target: .*plain ships no MTP head of a known layout"):
        build_head(DrafterSettings(kind="mtp", target=str(target)))
    with pytest.raises(typer.BadParameter, match=r"own: .*plain ships no MTP head of a known layout"):
        stack_spec(target, ["own=mtp"])
    add_mtp(target)
    assert stack_spec(target, None).heads == (HeadSpec("mtp", "mtp"), HeadSpec("lookup", "lookup"))
    assert stack_spec(target, ["none"]).heads == ()
    with pytest.raises(typer.BadParameter, match="own: is in the target's checkpoint: write own=mtp"):
        stack_spec(target, [f"own=mtp:{target}"])
    config = (target / "config.json").read_text()
    (target / "config.json").write_text(config.replace("{", '{"quantization_config": {"quant_method": "fp8"},', 1))
    assert find_mtp(target) is None


def test_heads_of_other_pods_fetch_the_files_of_an_mtp_head(tmp_path: Path) -> None:
    names = {"model.embed_tokens.weight": "1", "model.layers.0.mlp.weight": "2", "model.norm.weight": "3"}
    for more, files in ({}, {"1"}), ({"mtp.fc.weight": "4"}, {"1", "3", "4"}):
        (tmp_path / "model.safetensors.index.json").write_text(str({"weight_map": names | more}).replace("'", '"'))
        assert set(shared_shards(tmp_path)) == files


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("mtp.layers.0.self_attn.o_proj.weight", None, "lacks mtp_block.self_attn.o_proj.weight"),
        ("mtp.layers.0.self_attn.sinks", torch.ones(4), "has no place for mtp_block.self_attn.sinks"),
        ("mtp.layers.0.mlp.experts.0.up_proj.weight", torch.ones(4), "no layer of the target is like the MTP head's"),
        ("mtp.fc.weight", torch.ones(32, 32), "has another shape in eh_proj.weight"),
        ("mtp.norm.weight", torch.full((32,), torch.nan), "norm.weight is not finite"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, tensor: Tensor | None, reason: str, tmp_path: Path) -> None:
    folder = add_mtp(make_target(tmp_path, 96, tokenizer=False))
    tensors = load_file(folder / "model.safetensors") | {name: tensor}
    save_file({key: t for key, t in tensors.items() if t is not None}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidField, match=f"drafter.target: .*{reason}"):
        load_head("mtp", "", folder)
