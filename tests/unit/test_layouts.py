"""Checkpoint layouts: loaded as their authors write them, written in our own; what is refused; EAGLE-3 by its rule."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from coppice.config.sections import DrafterSettings
from coppice.errors import InvalidField
from coppice.heads.base import DraftJob
from coppice.heads.block_head import Eagle3Head
from coppice.heads.checkpoints import SHAPES, kind_in, load_head, public_state, read_head, save_head
from services.adapter.learn import Learner
from tests.tiny import make_target
from tests.unit.test_feature_heads import GREEDY, Slow, Text, Tokens, drafted, opened, save_random

H, HEADS, KV, DIM, FF, VOCAB, DRAFT, K = 32, 4, 2, 8, 48, 96, 40, 4

Tensors = dict[str, Tensor]
Made = tuple[dict[str, Any], Tensors]
SIZES = {
    "hidden_size": H,
    "intermediate_size": FF,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}
LLAMA = SIZES | {"draft_vocab_size": DRAFT, "rope_theta": 5e5, "model_type": "llama"}


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


def eagle3() -> Made:
    tensors = layer("midlayer.", 2) | {"midlayer.hidden_norm.weight": torch.ones(H), "fc.weight": random(H, 3 * H)}
    return LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}, tensors | vocabulary()


def eagle3_of_speculators() -> Made:
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


def specblock() -> Made:
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
    return LLAMA | {"num_hidden_layers": 2, "diffspec_draft_token_num": K, "rank_classes": 4}, tensors


LAYERS, DEPTH, BLOCK, MASK, RANK, IDS = 8, 2, 6, 90, 16, [-1, 2, 4, 5]
QWEN3: dict[str, Any] = SIZES | {
    **{"model_type": "qwen3", "attention_bias": False, "head_dim": DIM, "hidden_act": "silu", "use_cache": True},
    **{"layer_types": ["full_attention"] * DEPTH, "num_hidden_layers": DEPTH, "tie_word_embeddings": False},
    **{"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "sliding_window": None},
}
MARKOV = {
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
BESIDE = ("d2t", "t2d", "embed_tokens.weight", "lm_head.weight", "input_layer.embed_tokens.weight")
"""tensors of a file that the model's state does not hold, or not always"""


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
    fields = {"mask_token_id": MASK, "target_layer_ids": IDS} | inner
    named = {"architectures": ["DFlashDraftModel"], "num_target_layers": LAYERS, "block_size": BLOCK}
    return QWEN3 | named | {"dflash_config": fields}, backbone()


def jetspec() -> Made:
    return zlab(causal_head=True)


def specforge() -> Made:
    """A DSpark head in z-lab's dflash_config."""
    config, tensors = zlab(projector_type="dspark", **MARKOV)
    return config | {"architectures": ["DSparkDraftModel"]}, tensors | tables()


def deepspec(**more: Any) -> Made:
    fields = {"target_layer_ids": IDS, "mask_token_id": MASK, "block_size": BLOCK, **(more or MARKOV)}
    named = {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512, "num_target_layers": LAYERS}
    own = {"embed_tokens.weight": random(VOCAB, H), "lm_head.weight": random(VOCAB, H)}
    return QWEN3 | fields | named, backbone() | own | (tables() if fields["markov_rank"] else {})


def plain() -> Made:
    """DeepSpec's own DFlash."""
    return deepspec(markov_rank=0, enable_confidence_head=False)


def masks_of_speculators(kind: str = "dflash", **more: Any) -> Made:
    config = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"": "config.DFlashSpeculatorConfig"},
        "aux_hidden_state_layer_ids": [layer + 1 for layer in IDS],
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
    config, tensors = masks_of_speculators("dspark", draft_vocab_size=DRAFT, sample_from_anchor=True, **MARKOV)
    return config, tensors | tables(DRAFT) | vocabulary()


FLASH = {"causal": False, "sample_from_anchor": False, "markov_rank": 0, "confidence": False}
SPARK = {"causal": False, "sample_from_anchor": True, "markov_rank": RANK, "confidence": True}
LAYOUTS: dict[str, tuple[Callable[[], Made], str, dict[str, Any]]] = {
    "EAGLE-3": (eagle3, "eagle3", {}),
    "speculators' EAGLE-3": (eagle3_of_speculators, "eagle3", {"norm_before_residual": True}),
    "SpecBlock": (specblock, "specblock", {"slots": K}),
    "z-lab": (zlab, "dflash", FLASH),
    "JetSpec": (jetspec, "jetspec", FLASH | {"causal": True}),
    "DeepSpec": (deepspec, "dspark", SPARK),
    "DeepSpec's DFlash": (plain, "dflash", FLASH | {"sample_from_anchor": True}),
    "SpecForge": (specforge, "dspark", SPARK),
    "speculators": (masks_of_speculators, "dflash", FLASH),
    "speculators' DSpark": (reduced, "dspark", SPARK),
}
"""the maker, the kind, and what the fields are then"""


def written(folder: Path, made: Made) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(made[0]))
    save_file(made[1], folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_as_its_authors_write_it_is_loaded(name: str, target: Path, tmp_path: Path) -> None:
    make, kind, fields = LAYOUTS[name]
    config, tensors = make()
    folder = written(tmp_path, (config, tensors))
    assert kind_in(folder) == kind
    loaded = load_head(kind, folder, target)
    expected = {name.replace("layers.0.", "midlayer.") if kind == "eagle3" else name: t for name, t in tensors.items()}
    public = public_state(loaded.model, loaded.config)
    assert {key for key in expected.keys() ^ public.keys() if "verifier_norm" not in key} <= {*BESIDE}
    assert all(torch.equal(public[key], expected[key]) for key in public.keys() & expected.keys())
    assert {key: getattr(loaded.config, key) for key in fields} == fields
    masks = "sample_from_anchor" in fields
    assert loaded.config.rope == {"rope_type": "default"} | (QWEN3["rope_parameters"] if masks else {})
    assert loaded.config.feature_layers == ((0, 3, 5, 6) if masks else (2, 4, 5))
    theirs = load_file(target / "model.safetensors")
    own = [name for name in tensors if name.endswith("embed_tokens.weight")]
    embedding = tensors[own[0]] if own else theirs["model.embed_tokens.weight"]
    assert torch.equal(loaded.embedding, embedding)
    assert torch.equal(loaded.model.lm_head.weight, tensors.get("lm_head.weight", theirs["lm_head.weight"]))
    assert torch.equal(
        loaded.model.target_ids, tensors["t2d"].nonzero().flatten() if "t2d" in tensors else torch.arange(VOCAB)
    )
    if masks:
        assert (loaded.config.block_size, loaded.config.mask_token_id, loaded.config.qk_norm) == (BLOCK, MASK, True)
        assert loaded.config.slots == BLOCK - (not fields["sample_from_anchor"])


LINEAR, FLATTER = {"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 2.0}
Spoil = Callable[[dict[str, Any], Tensors], Any]


def dropped(key: str) -> Spoil:
    return lambda config, tensors: (tensors if key in tensors else config).pop(key)


def put(key: str, value: Any) -> Spoil:
    return lambda config, tensors: (tensors if isinstance(value, Tensor) else config).update({key: value})


def inner(**fields: Any) -> Spoil:
    """Change dflash_config."""
    return lambda config, tensors: config["dflash_config"].update(fields)


def without(name: str) -> Spoil:
    return lambda config, tensors: config["dflash_config"].pop(name)


SLIDING = ["sliding_attention"] * (DEPTH - 1) + ["full_attention"]


@pytest.mark.parametrize(
    ("name", "spoil", "reason"),
    [
        ("EAGLE-3", dropped("fc.weight"), "fc.weight is missing"),
        ("EAGLE-3", put("norm.weight", torch.ones(H).char()), "norm.weight is torch.int8, expected torch.float32"),
        ("EAGLE-3", put("extra.weight", torch.ones(3)), "extra.weight is unknown"),
        ("EAGLE-3", put("norm.weight", torch.ones(H + 1)), r"norm.weight has shape \[33\], expected \[32\]"),
        ("EAGLE-3", put("norm.weight", torch.full((H,), torch.nan)), "norm.weight is not finite"),
        ("EAGLE-3", put("vocab_size", VOCAB + 1), "vocab_size is 97, the target's is 96"),
        ("EAGLE-3", dropped("hidden_size"), "hidden_size: Field required"),
        ("EAGLE-3", dropped("d2t"), "no d2t, which a reduced vocabulary needs"),
        ("EAGLE-3", put("d2t", torch.full((DRAFT,), VOCAB)), "d2t does not name 40 ids of 96"),
        ("EAGLE-3", put("rope_scaling", {**LINEAR, "rope_type": "yarn"}), "type 'linear' and rope_type 'yarn'"),
        ("EAGLE-3", put("rope_scaling", {"type": "su", "factor": 2.0}), "unknown type 'su'"),
        ("EAGLE-3", put("rope_parameters", {"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        ("EAGLE-3", put("rope_parameters", {"full_attention": LINEAR}), "rope_parameters of several kinds of layers"),
        ("EAGLE-3", lambda c, t: c.update(rope_scaling=LINEAR, rope_parameters=FLATTER), "contradict each other"),
        ("EAGLE-3", put("eagle_config", {"hidden_size": 8}), "contradicts itself: hidden_size is 32, hidden_size is 8"),
        ("EAGLE-3", put("fc_norm", True), "fc_norm is true"),
        ("EAGLE-3", put("is_causal", False), "is_causal is false"),
        ("EAGLE-3", put("eagle_config", {"use_aux_hidden_state": False}), "use_aux_hidden_state is false"),
        ("speculators' EAGLE-3", dropped("transformer_layer_config"), "no JSON object transformer_layer_config"),
        ("speculators' EAGLE-3", put("eagle_aux_hidden_state_layer_ids", [2, 4, 8]), "layers: 8 is not among 0..7"),
        ("JetSpec", inner(causal=False), "contradicts itself: causal_head is True, causal is False"),
        ("JetSpec", put("is_causal", False), "contradicts itself: is_causal is False, causal_head is True"),
        ("z-lab", inner(block_size=BLOCK + 1), "contradicts itself: block_size is 6, block_size is 7"),
        ("z-lab", put("dflash_config", [1]), "no JSON object dflash_config"),
        ("z-lab", without("mask_token_id"), "mask_token_id is missing"),
        ("z-lab", put("layer_types", SLIDING), "layer_types .*sliding_attention.*: only full_attention is served"),
        ("z-lab", inner(selector_rank=256), "selector_rank 256: DFlash2's selector and convolutions are not served"),
        ("z-lab", inner(use_swa=True), "use_swa is true"),
        ("z-lab", inner(input_embedding_scale=2.0), "input_embedding_scale 2.0 is not served"),
        ("z-lab", put("final_logit_softcapping", 30.0), "final_logit_softcapping 30.0 is not served"),
        ("DeepSpec", put("markov_head_type", "gated"), "markov_head_type 'gated' is not served"),
        ("DeepSpec", dropped("confidence_head.proj.bias"), "confidence_head.proj.bias is missing"),
        ("DeepSpec", put("confidence_head_with_markov", False), "confidence_head.proj.weight has shape"),
        ("z-lab", inner(target_layer_ids=[-1, 2, 4, LAYERS - 1]), "feature_layers: 8 is not among 0..7"),
        ("z-lab", inner(target_layer_ids=[]), "does not name the layers"),
        ("speculators", put("aux_hidden_state_layer_ids", [1, 3, 5, LAYERS]), "feature_layers: 8 is not among 0..7"),
        ("speculators", put("speculators_model_type", "peagle"), "speculators_model_type is 'peagle'"),
        ("speculators' DSpark", put("d2t", torch.arange(DRAFT)), "the offsets d2t do not name the ids that t2d does"),
    ],
)
def test_what_does_not_fit_is_named(name: str, spoil: Spoil, reason: str, target: Path, tmp_path: Path) -> None:
    make, kind, _ = LAYOUTS[name]
    config, tensors = make()
    spoil(config, tensors)
    with pytest.raises(InvalidField, match=reason) as refused:
        load_head(kind, written(tmp_path, (config, tensors)), target)
    assert "\n" not in str(refused.value)


def test_pickles_are_refused_with_the_way_to_convert_them(target: Path, tmp_path: Path) -> None:
    folder = written(tmp_path / "in", eagle3())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InvalidField, match=r"pytorch_model.bin is a pickle.*save_file"):
        load_head(kind_in(folder), folder, target)
    config, tensors = specblock()
    del tensors["d2t"]
    folder = written(tmp_path / "mapped", (config, tensors))
    (folder / "vocab_mapping.pt").write_bytes(b"x")
    with pytest.raises(InvalidField, match=r"vocab_mapping.pt is a pickle"):
        load_head(kind_in(folder), folder, target)


def test_a_full_vocabulary_needs_no_map_and_an_eagle_config_names_layers(target: Path, tmp_path: Path) -> None:
    config, tensors = eagle3()
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [2, 3, 6], "use_aux_hidden_state": True}
    config["draft_vocab_size"], tensors["lm_head.weight"] = None, random(VOCAB, H)
    del tensors["d2t"], tensors["t2d"]
    loaded = load_head("eagle3", written(tmp_path / "in", (config, tensors)), target)
    assert (loaded.config.draft_vocab_size, loaded.config.feature_layers) == (VOCAB, (2, 3, 6))
    assert not loaded.model.d2t.any()


@pytest.mark.parametrize("kind", SHAPES)
def test_a_head_comes_back_as_it_was_written(kind: Any, target: Path, tmp_path: Path) -> None:
    loaded = load_head(kind, save_random(tmp_path / "in", kind), target)
    save_head(tmp_path / "out", loaded.model, loaded.config)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert load_head(kind_in(tmp_path / "out"), tmp_path / "out", target).config == loaded.config


def test_what_does_not_fit_a_layout_of_our_own_is_named(target: Path, tmp_path: Path) -> None:
    folder = save_random(tmp_path / "in", "dflash")
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    other = written(tmp_path / "other", (config | {"coppice_head": "hydra"}, tensors))
    with pytest.raises(InvalidField, match="'hydra' is no kind of head with weights that is installed; there are spec"):
        load_head("dflash", other, target)
    with pytest.raises(InvalidField, match="is a dflash head; adapted are"):
        Learner(folder, target)
    for path, where, reason in (
        (tmp_path, target, r"drafter\.path"),
        (folder, tmp_path, r"drafter\.target"),
        (folder, target, "is a checkpoint of kind dflash, not specblock"),
    ):
        with pytest.raises(InvalidField, match=reason):
            load_head("specblock" if "kind" in reason else "dflash", path, where)


@pytest.mark.parametrize(
    ("made", "predicts"),
    [
        (zlab(), False),
        (zlab(projector_type="dspark"), True),
        (zlab(markov_rank=RANK), True),
        (deepspec(markov_rank=0), True),
        (masks_of_speculators("dspark", sample_from_anchor=None), True),
        (masks_of_speculators(sample_from_anchor=None), False),
    ],
)
def test_the_root_predicts_where_the_authors_root_does(made: Made, predicts: bool, tmp_path: Path) -> None:
    config, tensors = made
    ranks = config.get("markov_rank") or config.get("dflash_config", {}).get("markov_rank")
    tensors |= {name: tensor for name, tensor in tables().items() if ranks and name.startswith("markov")}
    read = read_head(written(tmp_path, (config | {"enable_confidence_head": False}, tensors))).config
    assert (read.sample_from_anchor, read.slots) == (predicts, BLOCK - (not predicts))


def test_layers_that_are_not_named_are_the_authors_default(tmp_path: Path) -> None:
    config, _ = zlab(target_layer_ids=None)
    for layers, count, ids in ((36, 5, (1, 9, 17, 25, 33)), (20, 2, (1, 17)), (20, 1, (10,))):
        config |= {"num_target_layers": layers, "num_hidden_layers": count, "layer_types": ["full_attention"] * count}
        read = read_head(written(tmp_path, (config, backbone(count, count))))
        assert read.config.feature_layers == tuple(layer + 1 for layer in ids)
    del config["num_target_layers"]
    with pytest.raises(InvalidField, match="does not name the layers"):
        read_head(written(tmp_path, (config, backbone(1, 1))))


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
    loaded = load_head("dflash", written(tmp_path / "zlab", zlab()), scaling)
    assert torch.allclose(loaded.embedding * loaded.model.embedding_scale, given)
    own = deepspec()
    loaded = load_head("dspark", written(tmp_path / "deepspec", own), scaling)
    assert torch.equal(loaded.embedding, own[1]["embed_tokens.weight"].float())


# --- EAGLE-3 heads as their trainers configure them, against layer and tree search by their definition ---


LENGTH = 12
EPS = 1e-5


def norm(states: Tensor, weight: Tensor) -> Tensor:
    return states * (states.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


class ByDefinition(Slow):
    """One EAGLE-3 layer over a whole text at once, in float64, from the tensors of a file and from switches.

    The tree is EAGLE-2's topK_genrate as EAGLE-3 calls it.
    """

    def __init__(
        self, tensors: dict[str, Tensor], embedding: Tensor, depth: int, width: int, scale: float = 1, **switches: bool
    ) -> None:
        self.tensors = {name.replace("layers.0.", "midlayer."): t.double() for name, t in tensors.items()}
        self.embedding, self.scale, self.switches = embedding.double(), scale, switches
        self.ids, self.depth, self.said = torch.arange(DRAFT) + tensors["d2t"], depth, {}
        self.settings = DrafterSettings(kind="eagle3", top_k=width)

    def linear(self, states: Tensor, name: str) -> Tensor:
        return F.linear(states, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def turned(self, states: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None] / self.scale * 5e5 ** -(torch.arange(0, DIM, 2).double() / DIM)
        cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((angles.sin(),) * 2, -1)
        return states * cos + torch.cat((-states[..., DIM // 2 :], states[..., : DIM // 2]), -1) * sin

    def logits(self, text: Text, start: int, job: DraftJob, path: Tokens) -> Tensor:
        self.behind: dict[Tokens, Tensor] = self.behind if path else {}
        fused = self.linear(text.features[:LENGTH].double(), "fc")
        hidden = torch.stack([*fused, *(self.behind[path[:at]] for at in range(len(path)))])
        state = self.behind[path] = self.state(hidden, torch.tensor([*text.ids[1:LENGTH], job.root, *path]))
        return self.linear(
            state if self.switches.get("norm_output") else norm(state, self.tensors["norm.weight"]), "lm_head"
        )

    def state(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """(H,) what the last of (N, H) rows in a row hands on."""
        own, layer = self.tensors, "midlayer."
        normed = norm(hidden, own[layer + "hidden_norm.weight"])
        embedded = norm(self.embedding[tokens], own[layer + "input_layernorm.weight"])
        inputs = torch.cat((embedded, normed), -1)
        query, key, value = (
            self.linear(inputs, f"{layer}self_attn.{name}_proj").view(len(hidden), -1, DIM).transpose(0, 1)
            for name in "qkv"
        )
        if self.switches.get("qk_norm"):
            query = norm(query, own[layer + "self_attn.q_norm.weight"])
            key = norm(key, own[layer + "self_attn.k_norm.weight"])
        positions = torch.arange(len(hidden)).double()
        query, key = self.turned(query, positions)[:, -1:], self.turned(key, positions)
        scores = query @ key.repeat_interleave(HEADS // KV, 0).transpose(1, 2) / DIM**0.5
        seen = scores.softmax(-1) @ value.repeat_interleave(HEADS // KV, 0)
        residual = normed if self.switches.get("norm_before_residual") else hidden
        state = residual[-1] + self.linear(seen.flatten(), layer + "self_attn.o_proj")
        inner = norm(state, own[layer + "post_attention_layernorm.weight"])
        gated = F.silu(self.linear(inner, layer + "mlp.gate_proj")) * self.linear(inner, layer + "mlp.up_proj")
        state = state + self.linear(gated, layer + "mlp.down_proj")
        return norm(state, own["norm.weight"]) if self.switches.get("norm_output") else state


TEXT = Text.random(40, 3)
JOB = DraftJob(1, TEXT.ids[LENGTH], LENGTH, 30, GREEDY)


def tree_of(folder: Path, target: Path) -> dict[Tokens, float]:
    """What the served head drafts."""
    shape = {"kv_tokens": 2048, "threads": 1, "depth": 3, "top_k": 4}
    head = Eagle3Head(DrafterSettings(kind="eagle3", path=str(folder), target=str(target), **shape))
    opened(head, 1, TEXT, LENGTH)
    return drafted(head, [JOB])[0]


CONFIGURED: dict[str, tuple[dict[str, Any], dict[str, bool]]] = {
    "as it is": ({}, {}),
    "legacy rope_scaling": ({"rope_scaling": LINEAR, "rope_parameters": LINEAR}, {}),
    "norm_output": ({"norm_output": True}, {"norm_output": True}),
    "Qwen3's layers": ({"model_type": "qwen3"}, {"qk_norm": True}),
    "attention_bias": ({"attention_bias": True}, {}),
    "an embedding of its own": ({}, {}),
}


@pytest.mark.parametrize(("name", "layout"), [*((name, "eagle3") for name in CONFIGURED), ("as it is", "speculators")])
def test_configured_heads_draft_by_their_definition(name: str, layout: str, target: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    config, tensors = eagle3() if layout == "eagle3" else eagle3_of_speculators()
    change, switches = CONFIGURED[name]
    prefix, own = ("midlayer.", config) if layout == "eagle3" else ("layers.0.", config["transformer_layer_config"])
    (config if "norm_output" in change else own).update(change)
    if layout == "speculators":
        switches = switches | {"norm_before_residual": True}
    for weight in [name for name in tensors if name.endswith("norm.weight")]:
        tensors[weight] = 1 + torch.rand(H) / 2
    if name == "Qwen3's layers":
        tensors |= {f"{prefix}self_attn.{part}_norm.weight": 1 + torch.rand(DIM) for part in "qk"}
    elif name == "attention_bias":
        rows = {"q": HEADS * DIM, "k": KV * DIM, "v": KV * DIM, "o": H}
        tensors |= {f"{prefix}self_attn.{part}_proj.bias": torch.randn(size) / 2 for part, size in rows.items()}
    tensors.pop("embed_tokens.weight", None)
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    if name == "an embedding of its own":
        tensors["embed_tokens.weight"] = embedding = random(VOCAB, H)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 4
    slow = ByDefinition(tensors, embedding, 3, 4, 4 if "rope_scaling" in change else 1, **switches)
    folder = written(tmp_path / "in", (config, tensors))
    expected = slow.tree(TEXT, 0, JOB)
    served = tree_of(folder, target)
    assert served == pytest.approx(expected, abs=2e-3)
    model = read_head(folder)
    save_head(tmp_path / "out", model, model.config)
    assert tree_of(tmp_path / "out", target) == pytest.approx(served, abs=1e-5)
