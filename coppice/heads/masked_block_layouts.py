"""What config.json says of a head that fills a block of masks, in the layouts of z-lab (DFlash), JetSpec, DeepSpec
(DSpark) and speculators.

The files name the same tensors and differ in what is said of them, which a loader can get wrong without any error: how
layers are counted, whether the block is causal, and whether the root's own row predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from coppice.errors import InvalidField

KINDS = ("dflash", "jetspec", "dspark")
_PATH = "drafter.path"
_CAUSAL = ("is_causal", "causal", "causal_head")
"""the spellings of one flag: of vLLM and of z-lab, and JetSpec's"""
_DEEPSPEC = MappingProxyType(
    {"enable_confidence_head": "confidence", "confidence_head_with_markov": "confidence_with_markov"}
)
_SIZES = ("draft_vocab_size", "target_hidden_size")
_ANCHORS = 512  # of a sequence in training, which DeepSpec's loader wants to know

Values = Mapping[str, Any]


def layout_of(config: Values) -> str:
    """Return which of the layouts a config.json is of; empty: of none."""
    if "dflash_config" in config:
        return "jetspec" if _causal(_zlab(config)) else "dflash"
    return "dspark" if "markov_rank" in config and "target_layer_ids" in config else ""


def kind_of(layout: str, config: Values) -> str:
    """Return the kind of head in a config.json of a layout. Raises InvalidField."""
    if layout == "speculators":
        kind = config.get("speculators_model_type")
        if kind not in ("dflash", "dspark"):
            raise InvalidField(_PATH, f"speculators_model_type is {kind!r}; there are eagle3, dflash and dspark")
        return str(kind)
    if layout == "dspark":
        return "dspark" if config["markov_rank"] else "dflash"
    return layout


def read(layout: str, config: Values) -> dict[str, Any]:
    """Return the fields of a head's configuration, and whatever else is said. Raises InvalidField."""
    said = _READERS[layout](config)
    said["causal"] = _causal(said)
    for name in _CAUSAL:
        if name != "causal":
            said.pop(name, None)
    for theirs, ours in _DEEPSPEC.items():
        if theirs in said:
            said[ours] = said.pop(theirs)
    if said.get("mask_token_id") is None:
        raise InvalidField(_PATH, "config.json: mask_token_id is missing")
    if any(kind != "full_attention" for kind in said.get("layer_types") or ()):
        raise InvalidField(_PATH, f"config.json: layer_types: {said['layer_types']}: only full_attention is served")
    if said.get("markov_rank") and said.get("markov_head_type", "vanilla") != "vanilla":
        raise InvalidField(_PATH, f"config.json: markov_head_type {said['markov_head_type']!r}: only vanilla is served")
    return said


def _causal(said: Values) -> bool:
    """Return whether the block is causal. Raises InvalidField when two spellings say different things."""
    spelt = {name: bool(said[name]) for name in _CAUSAL if said.get(name) is not None}
    if len(set(spelt.values())) > 1:
        raise InvalidField(
            _PATH, f"config.json contradicts itself: {', '.join(f'{k} is {v}' for k, v in spelt.items())}"
        )
    return any(spelt.values())


def _zlab(config: Values) -> dict[str, Any]:
    inner = config["dflash_config"]
    if not isinstance(inner, Mapping):
        raise InvalidField(_PATH, "config.json: dflash_config is no JSON object")
    said = {**inner, **config}
    del said["dflash_config"]
    return said


def _from_zlab(config: Values) -> dict[str, Any]:
    said = _zlab(config)
    return said | {"feature_layers": _layers(said), "sample_from_anchor": False}


def _from_deepspec(config: Values) -> dict[str, Any]:
    return {"sample_from_anchor": True, **config, "feature_layers": _layers(config)}


def _from_speculators(config: Values) -> dict[str, Any]:
    nested = config.get("transformer_layer_config")
    if not isinstance(nested, Mapping):
        raise InvalidField(_PATH, "config.json has no transformer_layer_config")
    dspark = config["speculators_model_type"] == "dspark"
    defaults = {"markov_rank": 256, "enable_confidence_head": True} if dspark else {}
    said = {**defaults, "sample_from_anchor": dspark, **nested, **config}
    return said | {"feature_layers": config.get("aux_hidden_state_layer_ids") or ()}


_READERS: Mapping[str, Callable[[Values], dict[str, Any]]] = MappingProxyType(
    {"dflash": _from_zlab, "jetspec": _from_zlab, "dspark": _from_deepspec, "speculators": _from_speculators}
)


def _layers(said: Values) -> list[int]:
    """Return the hidden states that target_layer_ids name, which count layers where we count what lies before them."""
    ids = said.get("target_layer_ids")
    if ids is None:
        ids = _default_ids(said.get("num_target_layers"), said.get("num_hidden_layers"))
    return [int(one) + 1 for one in ids]


def _default_ids(layers: Any, count: Any) -> list[int]:
    """Return the ids of a config.json that names none, as z-lab's and JetSpec's loaders do."""
    if not isinstance(layers, int) or not isinstance(count, int):
        raise InvalidField(_PATH, "config.json has neither target_layer_ids nor num_target_layers to make them of")
    if count == 1:
        return [layers // 2]
    return [round(1 + one * (layers - 4) / (count - 1)) for one in range(count)]


def written(layout: str, kind: str, values: Values) -> dict[str, Any]:
    """Return the config.json in a layout of a head with the fields `values`. Raises InvalidField."""
    own = ("block_size", "mask_token_id", "causal", "sample_from_anchor", "markov_rank", *_DEEPSPEC.values())
    said = {name: value for name, value in values.items() if name not in (*own, "feature_layers")}
    theirs = {name: values[name] for name in ("block_size", "mask_token_id", "markov_rank")}
    theirs |= {name: values[field] for name, field in _DEEPSPEC.items()} | {"markov_head_type": "vanilla"}
    if layout == "speculators":
        if values["causal"]:
            raise InvalidField("layout", "speculators holds no causal block")
        nested = {name: value for name, value in said.items() if name not in (*_SIZES, "acceptance")}
        said = {name: said[name] for name in (*_SIZES, "acceptance")}
        return (
            said
            | theirs
            | {
                "architectures": [{"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}[kind]],
                "speculators_model_type": kind,
                "sample_from_anchor": values["sample_from_anchor"],
                "aux_hidden_state_layer_ids": list(values["feature_layers"]) or None,
                "transformer_layer_config": {"model_type": "qwen3", **nested},
            }
        )
    if not values["feature_layers"]:
        raise InvalidField("layout", f"{layout} names the layers that a head reads, and this head names none")
    ids = [layer - 1 for layer in values["feature_layers"]]
    if layout == "dspark":
        odd = {} if values["sample_from_anchor"] else {"sample_from_anchor": False}
        odd |= {"is_causal": True} if values["causal"] else {}
        more = odd | {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": ids, "num_anchors": _ANCHORS}
        return {"model_type": "qwen3", **said, **theirs, **more}
    if values["sample_from_anchor"] or values["markov_rank"] or values["confidence"]:
        raise InvalidField("layout", f"{layout} holds no block whose root predicts, no Markov table and no confidence")
    causal = {"causal": True, "causal_head": True} if values["causal"] else {"causal": False}
    inner = {"mask_token_id": values["mask_token_id"], "target_layer_ids": ids, **causal}
    return {
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        **said,
        "block_size": values["block_size"],
        "dflash_config": inner,
    }
