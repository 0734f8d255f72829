"""Public checkpoint layouts: loaded as their authors write them, written in our own; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from coppice.errors import InvalidField
from coppice.heads.checkpoints import (
    SHAPES,
    kind_in,
    load_head,
    public_state,
    save_head,
)
from services.adapter.learn import Learner
from tests.tiny import make_target
from tests.unit.test_feature_heads import save_random

H, HEADS, KV, DIM, FF, VOCAB, DRAFT, K = 32, 4, 2, 8, 48, 96, 40, 4

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), VOCAB, layers=8, hidden=H, tokenizer=False)


def sizes() -> dict[str, Any]:
    return {
        "hidden_size": H,
        "intermediate_size": FF,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_theta": 5e5,
        "model_type": "llama",
    }


def random(*shape: int) -> Tensor:
    return torch.randn(shape) / shape[-1] ** 0.5


def layer(prefix: str, inputs: int) -> Tensors:
    sized = {"q": HEADS * DIM, "k": KV * DIM, "v": KV * DIM}
    tensors = {f"{prefix}self_attn.{name}_proj.weight": random(rows, inputs * H) for name, rows in sized.items()}
    tensors[f"{prefix}self_attn.o_proj.weight"] = random(H, HEADS * DIM)
    tensors |= {f"{prefix}mlp.{name}_proj.weight": random(FF, H) for name in ("gate", "up")}
    tensors[f"{prefix}mlp.down_proj.weight"] = random(H, FF)
    return tensors | {
        f"{prefix}{name}.weight": torch.ones(H) for name in ("input_layernorm", "post_attention_layernorm")
    }


def vocabulary() -> Tensors:
    chosen = torch.randperm(VOCAB)[:DRAFT].sort().values
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[chosen] = True
    return {
        "d2t": chosen - torch.arange(DRAFT),
        "t2d": known,
        "norm.weight": torch.ones(H),
        "lm_head.weight": random(DRAFT, H),
    }


def eagle3() -> tuple[dict[str, Any], Tensors]:
    tensors = layer("midlayer.", 2) | {"midlayer.hidden_norm.weight": torch.ones(H), "fc.weight": random(H, 3 * H)}
    return sizes() | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}, tensors | vocabulary()


def speculators() -> tuple[dict[str, Any], Tensors]:
    shape, tensors = eagle3()
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x", "architectures": []}},
        "draft_vocab_size": DRAFT,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "transformer_layer_config": {
            name: shape[name] for name in shape if name not in ("draft_vocab_size", "architectures")
        },
    }
    return config, renamed | {"verifier_norm.weight": torch.ones(H), "embed_tokens.weight": random(VOCAB, H)}


def specblock() -> tuple[dict[str, Any], Tensors]:
    tensors = layer("layers.0.", 1) | layer("layers.1.", 1) | vocabulary()
    tensors |= {f"input_layer.{name}_norm.weight": torch.ones(H) for name in ("condition", "token", "query")}
    tensors |= {
        "input_layer.condition_proj.weight": random(H, 3 * H),
        "input_layer.embed_tokens.weight": random(VOCAB, H),
        "input_layer.position_queries.weight": random(K, H),
        "input_layer.fuse.weight": random(H, 3 * H),
        "shift_proj.0.weight": random(H, 2 * H),
        "rank_head.0.weight": random(256, H + 15),
        "rank_head.2.weight": random(4, 256),
    }
    return sizes() | {"num_hidden_layers": 2, "diffspec_draft_token_num": K, "rank_classes": 4}, tensors


Made = Callable[[], tuple[dict[str, Any], Tensors]]
LAYOUTS = {"eagle3": eagle3, "speculators": speculators, "specblock": specblock}


def written(folder: Path, made: tuple[dict[str, Any], Tensors]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(made[0]))
    save_file(made[1], folder / "model.safetensors")
    return folder


def load(folder: Path, target: Path) -> Any:
    return load_head(kind_in(folder), folder, target)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_as_its_authors_write_it_is_loaded(name: str, target: Path, tmp_path: Path) -> None:
    config, tensors = LAYOUTS[name]()
    folder = written(tmp_path / "in", (config, tensors))
    assert kind_in(folder) == ("specblock" if name == "specblock" else "eagle3")
    loaded = load(folder, target)
    public = public_state(loaded.model, loaded.config)
    for key, tensor in public.items():
        assert torch.equal(tensor, tensors[key.replace("midlayer.", "layers.0.") if name == "speculators" else key])
    assert loaded.config.rope_theta == 5e5
    assert loaded.config.feature_layers == (2, 4, 5)
    assert loaded.embedding.shape == (VOCAB, H)


def dropped(key: str) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda config, tensors: (tensors if key in tensors else config).pop(key)


def put(key: str, value: Any) -> Callable[[dict[str, Any], Tensors], None]:
    return lambda config, tensors: (tensors if isinstance(value, Tensor) else config).update({key: value})


@pytest.mark.parametrize(
    ("name", "spoil", "why"),
    [
        ("eagle3", dropped("fc.weight"), "fc.weight is missing"),
        (
            "eagle3",
            put("norm.weight", torch.ones(H).to(torch.int8)),
            "norm.weight is torch.int8, expected torch.float32",
        ),
        ("eagle3", put("extra.weight", torch.ones(3)), "extra.weight is unknown"),
        ("eagle3", put("norm.weight", torch.ones(H + 1)), r"norm.weight has shape \[33\], expected \[32\]"),
        ("eagle3", put("norm.weight", torch.full((H,), torch.nan)), "norm.weight is not finite"),
        ("eagle3", put("vocab_size", VOCAB + 1), "vocab_size is 97, the target's is 96"),
        ("eagle3", dropped("hidden_size"), "hidden_size: Field required"),
        ("eagle3", put("hidden_act", "gelu"), "hidden_act"),
        ("eagle3", dropped("d2t"), "no d2t, which a reduced vocabulary needs"),
        ("eagle3", put("d2t", torch.full((DRAFT,), VOCAB)), "d2t does not name 40 ids of 96"),
        ("specblock", put("diffspec_draft_token_num", 0), "diffspec_draft_token_num"),
        ("specblock", dropped("shift_proj.0.weight"), "shift_proj.0.weight is missing"),
        ("speculators", dropped("transformer_layer_config"), "no JSON object transformer_layer_config"),
        (
            "speculators",
            put("eagle_aux_hidden_state_layer_ids", [2, 4, 8]),
            "feature_layers: 8 is not among 0..7",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    name: str, spoil: Callable[[dict[str, Any], Tensors], None], why: str, target: Path, tmp_path: Path
) -> None:
    config, tensors = LAYOUTS[name]()
    spoil(config, tensors)
    with pytest.raises(InvalidField, match=why):
        load(written(tmp_path / "in", (config, tensors)), target)


def test_pickles_are_refused_with_the_way_to_convert_them(target: Path, tmp_path: Path) -> None:
    folder = written(tmp_path / "in", eagle3())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InvalidField, match=r"pytorch_model.bin is a pickle.*save_file"):
        load(folder, target)
    config, tensors = specblock()
    del tensors["d2t"]
    folder = written(tmp_path / "mapped", (config, tensors))
    (folder / "vocab_mapping.pt").write_bytes(b"x")
    with pytest.raises(InvalidField, match=r"vocab_mapping.pt is a pickle"):
        load(folder, target)


def test_a_full_vocabulary_needs_no_map(target: Path, tmp_path: Path) -> None:
    config, tensors = eagle3()
    config["draft_vocab_size"] = None
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    tensors["lm_head.weight"] = random(VOCAB, H)
    loaded = load(written(tmp_path / "in", (config, tensors)), target)
    assert loaded.config.draft_vocab_size == VOCAB
    assert not loaded.model.d2t.any()


def test_other_folders_are_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match=r"drafter\.path"):
        load_head("eagle3", tmp_path, target)
    folder = written(tmp_path / "in", eagle3())
    with pytest.raises(InvalidField, match=r"drafter\.target"):
        load_head("eagle3", folder, tmp_path)
    with pytest.raises(InvalidField, match="is a checkpoint of kind eagle3, not specblock"):
        load_head("specblock", folder, target)
    with pytest.raises(InvalidField, match="is a checkpoint of kind specblock"):
        load_head("eagle3", written(tmp_path / "other", specblock()), target)


@pytest.mark.parametrize("kind", SHAPES)
def test_a_head_comes_back_as_it_was_written(kind: Any, target: Path, tmp_path: Path) -> None:
    folder = save_random(tmp_path / "in", kind)
    assert kind_in(folder) == kind
    loaded = load_head(kind, folder, target)
    save_head(tmp_path / "out", loaded.model, loaded.config)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert load_head(kind, tmp_path / "out", target).config == loaded.config


def test_what_does_not_fit_a_layout_of_our_own_is_named(target: Path, tmp_path: Path) -> None:
    folder = save_random(tmp_path / "in", "dflash")
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    for at, (change, why) in enumerate(
        (
            ({"block_size": 0}, "block_size"),
            ({"coppice_head": "hydra"}, "'hydra' is no kind of head with weights that is installed; there are spec"),
        )
    ):
        with pytest.raises(InvalidField, match=why):
            load_head("dflash", written(tmp_path / str(at), (config | change, tensors)), target)
    with pytest.raises(InvalidField, match="not eagle3"):
        load_head("eagle3", folder, target)
    with pytest.raises(InvalidField, match="is a dflash head; adapted are"):
        Learner(folder, target)
