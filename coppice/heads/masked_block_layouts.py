"""What config.json says of a head that fills a block of masks, in the layouts of z-lab (DFlash), JetSpec, DeepSpec
(DSpark) and speculators.

The files name the same tensors and differ in what is said of them, which a loader can get wrong without any error: how
layers are counted, whether the block is causal, and whether the root's own row predicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from coppice.errors import InvalidField

_OWN = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "norm_output")


def proposal(algorithm: str, tokens: int) -> dict[str, Any]:
    """Return what is said of an algorithm that drafts so many tokens for a target without a name."""
    return {
        "speculators_model_type": algorithm,
        "speculators_version": "0.2.0",
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }


def eagle3_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of an EAGLE-3 head with the fields `values`."""
    own = {name: values[name] for name in _OWN}
    return own | {
        **proposal("eagle3", 5),
        "architectures": ["Eagle3Speculator"],
        "eagle_aux_hidden_state_layer_ids": values["feature_layers"] or None,
        "transformer_layer_config": {
            name: value for name, value in values.items() if name not in (*own, "feature_layers")
        },
    }


KINDS = ("dflash", "jetspec", "dspark")
_PATH = "drafter.path"
_CAUSAL = ("is_causal", "causal", "causal_head")
"""the spellings of one flag: of vLLM and of z-lab, and JetSpec's"""
_CONFIDENCE = MappingProxyType(
    {"enable_confidence_head": "confidence", "confidence_head_with_markov": "confidence_with_markov"}
)
_SERVED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "markov_head_type": ("vanilla",),
        "projector_type": ("dflash", "dspark"),
        "input_embedding_scale": (1,),
        "output_multiplier": (1,),
        "final_logit_softcapping": (),
    }
)
"""the values that are served of fields that most files leave out"""
_FIELDS = ("feature_layers", "causal", "sample_from_anchor", "markov_rank", *_CONFIDENCE.values())
"""what is not a size"""
_BESIDE = ("draft_vocab_size", "target_hidden_size", "acceptance")
"""sizes that speculators keeps beside transformer_layer_config"""
_ANCHORS = 512  # of a sequence in training, which DeepSpec's loader wants to know

Values = Mapping[str, Any]


def layout_of(config: Values) -> str:
    """Return which layout but speculators' a config.json is of; empty: none of them. Raises InvalidField.

    SpecForge puts a DSpark head's fields into z-lab's dflash_config. They mean there what they mean to DeepSpec.
    """
    said, zlab = _flat(config), "dflash_config" in config
    if said.get("markov_rank") or said.get("projector_type") == "dspark" or ("markov_rank" in said and not zlab):
        return "dspark"
    return ("jetspec" if _causal(said) else "dflash") if zlab else ""


def read(layout: str, config: Values) -> dict[str, Any]:
    """Return the fields of a head's configuration, and whatever else is said. Raises InvalidField."""
    said = _flat(config)
    if layout == "speculators":
        nested, kind = said.get("transformer_layer_config"), said.get("speculators_model_type")
        if kind not in ("dflash", "dspark"):
            raise InvalidField(_PATH, f"speculators_model_type is {kind!r}; there are eagle3, dflash and dspark")
        if not isinstance(nested, Mapping):
            raise InvalidField(_PATH, "config.json has no transformer_layer_config")
        said = {"sample_from_anchor": kind == "dspark"} | _given(nested) | said
    for name in ("mask_token_id", "block_size"):
        if name not in said:
            raise InvalidField(_PATH, f"config.json: {name} is missing")
    for name, served in _SERVED.items():
        if name in said and said[name] not in served:
            raise InvalidField(_PATH, f"config.json: {name} {said[name]!r} is not served")
    if any(kind != "full_attention" for kind in said.get("layer_types", ())):
        raise InvalidField(_PATH, f"config.json: layer_types {said['layer_types']}: only full_attention is served")
    fields = {"feature_layers": _feature_layers(layout, said), "causal": _causal(said)}
    fields |= {ours: said.pop(theirs) for theirs, ours in _CONFIDENCE.items() if theirs in said}
    said = {name: value for name, value in said.items() if name not in _CAUSAL}
    return {"qk_norm": True, "sample_from_anchor": layout == "dspark"} | said | fields


def kind_of(said: Values) -> str:
    """Return the kind of head whose fields `read` returned."""
    return "dspark" if said.get("markov_rank") else "jetspec" if said["causal"] else "dflash"


def _given(config: Values) -> dict[str, Any]:
    return {name: value for name, value in config.items() if value is not None}


def _flat(config: Values) -> dict[str, Any]:
    """Return what is given, in dflash_config or beside it. Raises InvalidField when both say different things."""
    inner = config.get("dflash_config") or {}
    if not isinstance(inner, Mapping):
        raise InvalidField(_PATH, "config.json: dflash_config is no JSON object")
    said = _given(config)
    for name, value in _given(inner).items():
        if said.setdefault(name, value) != value:
            raise InvalidField(_PATH, f"config.json contradicts itself: {name} is {said[name]} and {value}")
    return said


def _causal(said: Values) -> bool:
    """Return whether the block is causal. Raises InvalidField when two spellings say different things."""
    spelt = {name: bool(said[name]) for name in _CAUSAL if name in said}
    if len(set(spelt.values())) > 1:
        both = ", ".join(f"{name} is {value}" for name, value in spelt.items())
        raise InvalidField(_PATH, f"config.json contradicts itself: {both}")
    return any(spelt.values())


def _feature_layers(layout: str, said: Values) -> list[int]:
    """Return the hidden states that a head reads: all but speculators count layers where we count what lies before."""
    shift = layout != "speculators"
    ids = said.get("target_layer_ids" if shift else "aux_hidden_state_layer_ids")
    layers, count = said.get("num_target_layers"), said.get("num_hidden_layers")
    if shift and ids is None and isinstance(layers, int) and isinstance(count, int):  # as their loaders do
        ids = [layers // 2] if count == 1 else [round(1 + one * (layers - 4) / (count - 1)) for one in range(count)]
    if not ids or not isinstance(ids, list) or not all(isinstance(one, int) for one in ids):
        raise InvalidField(_PATH, "config.json does not name the layers that the head reads")
    return [one + shift for one in ids]


def written(layout: str, values: Values) -> dict[str, Any]:
    """Return the config.json in a layout of a head with the fields `values`.

    Raises InvalidField, naming a field, when the layout holds no such head.
    """
    causal, anchored, layers = values["causal"], values["sample_from_anchor"], values["feature_layers"]
    zlab, dspark = layout in ("dflash", "jetspec"), bool(values["markov_rank"] or values["confidence"])
    plain = layout == "dspark" and not anchored and not values["markov_rank"]
    for name, lacking, what in (
        ("feature_layers", not layers, "head that names no layers"),
        ("causal", causal and layout in ("dflash", "speculators"), "causal block"),
        ("causal", not causal and layout == "jetspec", "block whose rows all see one another"),
        ("sample_from_anchor", zlab and anchored, "block whose root predicts"),
        ("markov_rank", zlab and values["markov_rank"], "Markov table"),
        ("confidence", zlab and values["confidence"], "confidence head"),
        ("sample_from_anchor", plain, "plain block whose root does not predict"),
    ):
        if lacking:
            raise InvalidField(name, f"{layout} holds no {what}")
    said = {"block_size": values["block_size"], "mask_token_id": values["mask_token_id"]}
    sizes = {"model_type": "qwen3"} | {name: value for name, value in values.items() if name not in (*said, *_FIELDS)}
    sizes["num_target_layers"] = sizes["num_target_layers"] or max(layers) + 1
    more = {name: values[name] for name in ("sample_from_anchor", "markov_rank")} | {"markov_head_type": "vanilla"}
    more |= {theirs: values[ours] for theirs, ours in _CONFIDENCE.items()}
    if layout == "speculators":
        said |= more | {name: sizes.pop(name) for name in _BESIDE}
        return said | {
            **proposal("dspark" if dspark else "dflash", values["block_size"] - (not anchored)),
            "architectures": ["DSparkSpeculator" if dspark else "DFlashSpeculator"],
            "aux_hidden_state_layer_ids": list(layers),
            "transformer_layer_config": sizes,
        }
    said["target_layer_ids"] = [layer - 1 for layer in layers]
    if layout == "dspark":
        own = {"architectures": ["Qwen3DSparkModel"], "is_causal": causal, "num_anchors": _ANCHORS}
        return sizes | said | more | own
    inner = said | {"causal": causal, "causal_head": causal}
    own = {"architectures": ["DFlashDraftModel"], "block_size": values["block_size"], "dflash_config": inner}
    return sizes | own
