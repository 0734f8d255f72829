"""Layouts of heads that fill a block of masks: loaded as their authors write them; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from coppice.errors import InvalidField
from coppice.heads.checkpoints import kind_in, load_head, public_state, read_head
from tests.tiny import make_target
from tests.unit.test_layouts import (
    DIM,
    DRAFT,
    FF,
    HEADS,
    KV,
    VOCAB,
    H,
    Tensors,
    dropped,
    layer,
    put,
    random,
    vocabulary,
    written,
)

LAYERS, DEPTH, BLOCK, MASK, RANK, IDS = 8, 2, 6, 90, 16, [-1, 2, 4, 5]
Made = tuple[dict[str, Any], Tensors]
QWEN3 = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": DIM,
    "hidden_act": "silu",
    "hidden_size": H,
    "intermediate_size": FF,
    "layer_types": ["full_attention"] * DEPTH,
    "max_position_embeddings": 512,
    "num_attention_heads": HEADS,
    "num_hidden_layers": DEPTH,
    "num_key_value_heads": KV,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB,
}
MARKOV = {
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), VOCAB, layers=LAYERS, hidden=H, tokenizer=False)


def backbone(features: int = len(IDS), depth: int = DEPTH) -> Tensors:
    tensors = {"fc.weight": random(H, features * H), "hidden_norm.weight": torch.ones(H), "norm.weight": torch.ones(H)}
    for number in range(depth):
        prefix = f"layers.{number}."
        tensors |= layer(prefix, 1)
        tensors |= {f"{prefix}self_attn.{name}_norm.weight": torch.rand(DIM) for name in ("q", "k")}
    return tensors


def tables(draft: int = VOCAB) -> Tensors:
    return {
        "markov_head.markov_w1.weight": random(VOCAB, RANK),
        "markov_head.markov_w2.weight": random(draft, RANK),
        "confidence_head.proj.weight": random(1, H + RANK),
        "confidence_head.proj.bias": random(1),
    }


def zlab(**inner: Any) -> Made:
    told = {"mask_token_id": MASK, "target_layer_ids": IDS} | inner
    named = {"architectures": ["DFlashDraftModel"], "num_target_layers": LAYERS, "block_size": BLOCK}
    return QWEN3 | named | {"dflash_config": told}, backbone()


def jetspec() -> Made:
    return zlab(causal_head=True)


def specforge() -> Made:
    """A DSpark head in z-lab's dflash_config."""
    config, tensors = zlab(projector_type="dspark", **MARKOV)
    return config | {"architectures": ["DSparkDraftModel"]}, tensors | tables()


def deepspec(**more: Any) -> Made:
    told = {"target_layer_ids": IDS, "mask_token_id": MASK, "num_anchors": 512, "block_size": BLOCK} | (more or MARKOV)
    config = QWEN3 | told | {"architectures": ["Qwen3DSparkModel"], "num_target_layers": LAYERS}
    own = {"embed_tokens.weight": random(VOCAB, H), "lm_head.weight": random(VOCAB, H)}
    return config, backbone() | own | (tables() if told["markov_rank"] else {})


def plain() -> Made:
    """DeepSpec's own DFlash."""
    return deepspec(markov_rank=0, enable_confidence_head=False)


def speculators(kind: str = "dflash", **more: Any) -> Made:
    config = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"": "config.DFlashSpeculatorConfig"},
        "aux_hidden_state_layer_ids": [one + 1 for one in IDS],
        "block_size": BLOCK,
        "draft_vocab_size": VOCAB,
        "mask_token_id": MASK,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "x", "architectures": []}},
        "speculators_model_type": kind,
        "speculators_version": "0.6.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": QWEN3,
    }
    own = {"embed_tokens.weight": random(VOCAB, H), "lm_head.weight": random(VOCAB, H)}
    return config | more, backbone() | own


def reduced() -> Made:
    """A DSpark head of speculators with a draft vocabulary."""
    config, tensors = speculators("dspark", draft_vocab_size=DRAFT, sample_from_anchor=True, **MARKOV)
    return config, tensors | tables(DRAFT) | vocabulary()


FLASH = {"causal": False, "sample_from_anchor": False, "markov_rank": 0, "confidence": False}
SPARK = {"causal": False, "sample_from_anchor": True, "markov_rank": RANK, "confidence": True}
PUBLIC: dict[str, tuple[Callable[[], Made], str, dict[str, Any]]] = {
    "z-lab": (zlab, "dflash", FLASH),
    "JetSpec": (jetspec, "jetspec", FLASH | {"causal": True}),
    "DeepSpec": (deepspec, "dspark", SPARK),
    "DeepSpec's DFlash": (plain, "dflash", FLASH | {"sample_from_anchor": True}),
    "SpecForge": (specforge, "dspark", SPARK),
    "speculators": (speculators, "dflash", FLASH),
    "speculators' DSpark": (reduced, "dspark", SPARK),
}
"""the maker, the kind, and what the fields are then"""


@pytest.mark.parametrize("name", PUBLIC)
def test_a_checkpoint_as_its_authors_write_it_is_loaded(name: str, target: Path, tmp_path: Path) -> None:
    make, kind, fields = PUBLIC[name]
    config, tensors = make()
    folder = written(tmp_path, (config, tensors))
    assert kind_in(folder) == kind
    loaded = load_head(kind, folder, target)
    public = public_state(loaded.model, loaded.config)
    assert public.keys() - {"d2t"} == tensors.keys() - {"d2t", "t2d", "embed_tokens.weight", "lm_head.weight"}
    assert all(torch.equal(public[key], tensors[key]) for key in public.keys() & tensors.keys())
    assert {key: getattr(loaded.config, key) for key in fields} == fields
    assert (loaded.config.block_size, loaded.config.mask_token_id, loaded.config.qk_norm) == (BLOCK, MASK, True)
    assert loaded.config.feature_layers == (0, 3, 5, 6)
    assert loaded.config.slots == BLOCK - (not fields["sample_from_anchor"])
    assert loaded.config.rope == QWEN3["rope_parameters"]
    theirs = load_file(target / "model.safetensors")
    assert torch.equal(loaded.embedding, tensors.get("embed_tokens.weight", theirs["model.embed_tokens.weight"]))
    assert torch.equal(loaded.model.lm_head.weight, tensors.get("lm_head.weight", theirs["lm_head.weight"]))
    ids = torch.arange(len(loaded.model.d2t)) + loaded.model.d2t
    assert torch.equal(ids, tensors["t2d"].nonzero().flatten() if "t2d" in tensors else torch.arange(VOCAB))


def said(**fields: Any) -> Callable[[dict[str, Any], Tensors], None]:
    """Say more in dflash_config."""
    return lambda config, tensors: config["dflash_config"].update(fields)


def unsaid(name: str) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda config, tensors: config["dflash_config"].pop(name)


SLIDING = ["sliding_attention"] * (DEPTH - 1) + ["full_attention"]


@pytest.mark.parametrize(
    ("name", "spoil", "why"),
    [
        ("JetSpec", said(causal=False), "contradicts itself: causal_head is True, causal is False"),
        ("JetSpec", put("is_causal", False), "contradicts itself: is_causal is False, causal_head is True"),
        ("z-lab", lambda c, t: (c.update(causal=True), said(causal=False)(c, t)), "causal is True, causal is False"),
        ("z-lab", said(block_size=BLOCK + 1), "contradicts itself: block_size is 6, block_size is 7"),
        ("z-lab", put("dflash_config", [1]), "no JSON object dflash_config"),
        ("z-lab", unsaid("mask_token_id"), "mask_token_id is missing"),
        ("z-lab", dropped("block_size"), "block_size is missing"),
        ("z-lab", put("layer_types", SLIDING), "layer_types .*sliding_attention.*: only full_attention is served"),
        ("z-lab", said(use_swa=True), "use_swa is true"),
        ("z-lab", said(input_embedding_scale=2.0), "input_embedding_scale 2.0 is not served"),
        ("z-lab", put("final_logit_softcapping", 30.0), "final_logit_softcapping 30.0 is not served"),
        (
            "z-lab",
            put("candidate_selector.hidden_projection.weight", torch.ones(4, H)),
            "candidate_selector.* is unknown",
        ),
        ("JetSpec", put("hidden_dim_adapter.proj.weight", torch.ones(H, H)), "hidden_dim_adapter.* is unknown"),
        ("JetSpec", said(target_hidden_size=2 * H), "fc.weight has shape"),
        ("DeepSpec", put("markov_head_type", "gated"), "markov_head_type 'gated' is not served"),
        ("DeepSpec", put("markov_head.gate_proj.weight", torch.ones(RANK, H + RANK)), "gate_proj.weight is unknown"),
        ("DeepSpec", dropped("confidence_head.proj.bias"), "confidence_head.proj.bias is missing"),
        ("DeepSpec", put("confidence_head_with_markov", False), "confidence_head.proj.weight has shape"),
        ("DeepSpec", put("lm_head.weight", torch.ones(VOCAB - 1, H)), "lm_head.weight has shape"),
        ("z-lab", dropped("hidden_norm.weight"), "hidden_norm.weight is missing"),
        ("z-lab", put("fc.weight", torch.ones(H, 3 * H)), r"fc.weight has shape \[32, 96\], expected \[32, 128\]"),
        ("z-lab", said(target_layer_ids=[-1, 2, 4, LAYERS - 1]), "feature_layers: 8 is not among 0..7"),
        ("z-lab", said(target_layer_ids=[]), "does not name the layers"),
        ("speculators", put("aux_hidden_state_layer_ids", [1, 3, 5, LAYERS]), "feature_layers: 8 is not among 0..7"),
        ("speculators", put("aux_hidden_state_layer_ids", None), "does not name the layers"),
        ("speculators", put("speculators_model_type", "peagle"), "speculators_model_type is 'peagle'"),
        ("speculators", dropped("transformer_layer_config"), "no JSON object transformer_layer_config"),
        ("speculators", put("draft_vocab_size", DRAFT), "no d2t, which a reduced vocabulary needs"),
        (
            "speculators' DSpark",
            lambda c, t: t.update(d2t=torch.arange(DRAFT), t2d=torch.arange(VOCAB) < DRAFT),
            "the offsets d2t do not name the ids that t2d does",
        ),
    ],
)
def test_what_no_loader_would_notice_is_refused(
    name: str, spoil: Callable[[dict[str, Any], Tensors], Any], why: str, target: Path, tmp_path: Path
) -> None:
    make, kind, _ = PUBLIC[name]
    config, tensors = make()
    spoil(config, tensors)
    with pytest.raises(InvalidField, match=why):
        load_head(kind, written(tmp_path, (config, tensors)), target)


@pytest.mark.parametrize(
    ("told", "causal"),
    [
        ({}, False),
        ({"causal": True}, True),
        ({"causal_head": True}, True),
        ({"is_causal": True, "causal": True, "causal_head": True}, True),
    ],
)
def test_each_spelling_of_causality_is_read(told: dict[str, bool], causal: bool, target: Path, tmp_path: Path) -> None:
    folder = written(tmp_path, zlab(**told))
    assert kind_in(folder) == ("jetspec" if causal else "dflash")
    assert load_head(kind_in(folder), folder, target).config.causal == causal
    with pytest.raises(InvalidField, match="is a checkpoint of kind"):
        load_head("dflash" if causal else "jetspec", folder, target)


@pytest.mark.parametrize(
    ("made", "predicts"),
    [
        (zlab(), False),
        (zlab(projector_type="dspark"), True),
        (zlab(markov_rank=RANK), True),
        (deepspec(markov_rank=0), True),
        (speculators("dspark", sample_from_anchor=None), True),
        (speculators(sample_from_anchor=None), False),
    ],
)
def test_the_root_predicts_where_the_authors_root_does(made: Made, predicts: bool, tmp_path: Path) -> None:
    config, tensors = made
    ranks = config.get("markov_rank") or config.get("dflash_config", {}).get("markov_rank")
    tensors |= {name: tensor for name, tensor in tables().items() if ranks and name.startswith("markov")}
    read = read_head(written(tmp_path, (config | {"enable_confidence_head": False}, tensors))).config
    assert (read.sample_from_anchor, read.slots) == (predicts, BLOCK - (not predicts))


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (20, 2, (1, 17)),
        (20, 1, (10,)),
    ],
)
def test_layers_that_are_not_named_are_the_authors_default(
    layers: int, count: int, ids: tuple[int, ...], tmp_path: Path
) -> None:
    config, _ = zlab(target_layer_ids=None)
    config |= {"num_target_layers": layers, "num_hidden_layers": count, "layer_types": ["full_attention"] * count}
    tensors = backbone(count, count)
    assert read_head(written(tmp_path, (config, tensors))).config.feature_layers == tuple(one + 1 for one in ids)
    del config["num_target_layers"]
    with pytest.raises(InvalidField, match="does not name the layers"):
        read_head(written(tmp_path, (config, tensors)))


def test_a_head_without_an_output_layer_reads_the_targets_rows_of_its_vocabulary(target: Path, tmp_path: Path) -> None:
    config, tensors = reduced()
    for name in ("lm_head.weight", "embed_tokens.weight"):
        del tensors[name]
    folder, ids = written(tmp_path / "head", (config, tensors)), tensors["t2d"].nonzero().flatten()
    output = load_file(target / "model.safetensors")["lm_head.weight"]
    assert torch.equal(load_head("dspark", folder, target).model.lm_head.weight, output[ids])
    tied = make_target(tmp_path / "tied", VOCAB, layers=LAYERS, hidden=H, tokenizer=False)
    theirs = load_file(tied / "model.safetensors")
    del theirs["lm_head.weight"]
    save_file(theirs, tied / "model.safetensors", {"format": "pt"})
    loaded = load_head("dspark", folder, tied)
    assert torch.equal(loaded.model.lm_head.weight, theirs["model.embed_tokens.weight"][ids])


def test_a_block_reads_what_the_embedding_module_of_the_target_gives(target: Path, tmp_path: Path) -> None:
    scaling = make_target(tmp_path / "gemma", VOCAB, layers=LAYERS, hidden=H, tokenizer=False)
    config = json.loads((scaling / "config.json").read_text())
    config |= {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}
    (scaling / "config.json").write_text(json.dumps(config))
    module = AutoModelForCausalLM.from_pretrained(scaling).get_input_embeddings()
    given = module(torch.arange(VOCAB)).detach()
    assert not torch.equal(given, module.weight)
    assert torch.allclose(load_head("dflash", written(tmp_path / "zlab", zlab()), scaling).embedding, given)
    own = deepspec()
    loaded = load_head("dspark", written(tmp_path / "deepspec", own), scaling)
    assert torch.equal(loaded.embedding, own[1]["embed_tokens.weight"].float())
