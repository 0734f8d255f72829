"""Checkpoints of draft heads in the layouts that others publish: SpecBlock's own, EAGLE-3's, speculators' (vLLM) and
those of blocks of masks; for the kinds that nobody else has in our shape (`OWN`) in one of ours.

A folder holds config.json and model.safetensors. Every key and shape must be the layout's, and no flag may be true that
is not known here; nothing is unpickled. A head without a token embedding of its own uses the target's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig

from coppice.config.model_folder import check_model
from coppice.engine.engine import default_feature_layers
from coppice.errors import InvalidField
from coppice.heads import masked_block_layouts as masked_blocks
from coppice.heads import masked_block_layouts as speculators
from coppice.heads.models.eagle3 import Eagle3Config, Eagle3Model
from coppice.heads.models.falcon import FalconConfig, FalconModel
from coppice.heads.models.layers import HeadConfig
from coppice.heads.models.masked_block import DFlashConfig, DSparkConfig, JetSpecConfig, MaskedBlockModel
from coppice.heads.models.medusa import MedusaConfig, MedusaModel
from coppice.heads.models.parallelspec import ParallelSpecConfig, ParallelSpecModel
from coppice.heads.models.specblock import SpecBlockConfig, SpecBlockModel
from coppice.heads.public_state import fused_tensor, public_state

OWN = ("medusa", "parallelspec", "falcon")
SHAPES: Mapping[str, tuple[type[HeadConfig], Callable[[Any], nn.Module]]] = MappingProxyType(
    {
        "specblock": (SpecBlockConfig, SpecBlockModel),
        "eagle3": (Eagle3Config, Eagle3Model),
        "medusa": (MedusaConfig, MedusaModel),
        "parallelspec": (ParallelSpecConfig, ParallelSpecModel),
        "falcon": (FalconConfig, FalconModel),
        "dflash": (DFlashConfig, MaskedBlockModel),
        "jetspec": (JetSpecConfig, MaskedBlockModel),
        "dspark": (DSparkConfig, MaskedBlockModel),
    }
)
"""Configuration and model of each kind of head."""

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_PATH = "drafter.path"
_KIND = "coppice_head"  # in config.json of a layout of our own: which one
_NULLABLE = {"rank_norm_topk"}  # null says something else than nothing
_OPTIONAL = {"verifier_norm.weight", "verifier_lm_head.weight"}
_NESTED = {"speculators": "transformer_layer_config", "eagle3": "eagle_config"}
"""what more of a layout's config.json says of the head; the names beside it come first"""
_FEATURES = "eagle_aux_hidden_state_layer_ids"
_WANTED = ("is_causal", "use_aux_hidden_state")
"""flags that may not be false"""
_HARMLESS = {"use_cache", "return_dict", "tie_word_embeddings", "embed_requires_grad", *_WANTED}
"""flags that say nothing of what a head computes; lm_head.weight is in the file also where a target ties it"""
_TITLES = {"specblock": "SpecBlock", "eagle3": "EAGLE-3", "dflash": "DFlash", "jetspec": "JetSpec", "dspark": "DSpark"}
_MORE_LAYOUTS = {"eagle3": ("speculators",)} | dict.fromkeys(masked_blocks.KINDS, (*masked_blocks.KINDS, "speculators"))
_ARCHITECTURES = {"specblock": "SpecBlock", "eagle3": "LlamaForCausalLMEagle3"}
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
_OWN_EMBEDDING = {"specblock": "input_layer.embed_tokens.weight"}  # what a layout calls it, if not as below
_EMBEDDING, _LM_HEAD = "embed_tokens.weight", "lm_head.weight"
_MIDLAYER, _SPECULATORS_LAYER = "midlayer.", "layers.0."
_TO_SAFETENSORS = (
    "convert it where you trust it: python -c \"import torch, safetensors.torch as s; s.save_file(torch.load('{0}', "
    "weights_only=True), '{1}')\""
)


@dataclass(frozen=True)
class Loaded:
    """A head in float32 on the CPU, and what it takes from its target."""

    model: Any
    config: Any
    embedding: Tensor
    """(vocabulary, hidden), the head's own, else the target's"""


@dataclass(frozen=True)
class TargetParts:
    """The parts of a target that a head must know."""

    hidden_size: int
    vocab_size: int
    layers: int
    embedding: Tensor
    scale: float
    """what the target's embedding module multiplies a row by"""

    def embedding_of(self, kind: str) -> Tensor:
        """Return what a head of a kind reads: a block of masks what the target's module gives, others the rows as they
        are stored, as the published loaders do.
        """
        if self.scale == 1 or kind not in masked_blocks.KINDS:
            return self.embedding
        return self.embedding * torch.tensor(self.scale, dtype=self.embedding.dtype)


def read_target(folder: str | Path) -> TargetParts:
    """Read the sizes and the token embedding of a target's folder. Raises InvalidField."""
    path = Path(folder)
    check_model("drafter.target", str(folder))
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False).get_text_config()
    embedding = _find_tensor(path, _EMBEDDINGS)
    if embedding is None:
        raise InvalidField("drafter.target", f"{folder} holds no token embedding in safetensors")
    scale = config.hidden_size**0.5 if "gemma" in config.model_type else 1.0  # others scale behind their module
    return TargetParts(config.hidden_size, len(embedding), config.num_hidden_layers, embedding, scale)


def read_output(folder: str | Path) -> Tensor:
    """Read the (V, hidden) weights of a target's output layer, which may be its embedding. Raises InvalidField."""
    own = _find_tensor(Path(folder), (_LM_HEAD,))
    return read_target(folder).embedding if own is None else own


def _find_tensor(folder: Path, names: tuple[str, ...]) -> Tensor | None:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118
                if key.endswith(names):
                    tensor: Tensor = tensors.get_tensor(key)
                    return tensor
    return None


def layout_of(folder: str | Path) -> str:
    """Return the layout that a folder's config.json announces. Raises InvalidField."""
    config = _read_config(Path(folder))
    if _KIND in config:
        kind: str = config[_KIND]
        if kind in OWN:
            return kind
        raise InvalidField(_PATH, f"{folder} holds a {kind!r} head; there are {', '.join(OWN)}")
    if "speculators_model_type" in config or "Eagle3Speculator" in config.get("architectures", ()):
        return "speculators"
    if blocks := masked_blocks.layout_of(config):
        return blocks
    return "specblock" if "diffspec_draft_token_num" in config else "eagle3"


def _announced(folder: Path) -> tuple[str, str, dict[str, Any]]:
    """Return the layout and the kind of head that a folder's config.json announces, and what it says of the head."""
    layout, config = layout_of(folder), _read_config(folder)
    inner = config.get(_NESTED.get(layout, "")) or {}
    once = {**inner, "feature_layers": config.get(_FEATURES)} if isinstance(inner, dict) else {}
    for name in sorted(once.keys() & config.keys() & HeadConfig.model_fields.keys()):
        if None not in (config[name], once[name]) and config[name] != once[name]:
            raise InvalidField(
                _PATH, f"{folder / CONFIG} contradicts itself: {name} is {config[name]} and {once[name]}"
            )
    if layout in masked_blocks.KINDS or config.get("speculators_model_type", "eagle3") != "eagle3":
        given = masked_blocks.read(layout, config)
        return layout, masked_blocks.kind_of(given), given
    nested = config.get(_NESTED.get(layout, ""), {} if layout != "speculators" else None)
    if not isinstance(nested, dict):
        raise InvalidField(_PATH, f"config.json has no {_NESTED[layout]}")
    said = (*nested.items(), *config.items())
    given = {name: value for name, value in said if value is not None or name in _NULLABLE}
    if layout == "speculators":
        given["num_hidden_layers"] = 1
    if _FEATURES in given:
        given["feature_layers"] = given[_FEATURES]
    return layout, "eagle3" if layout == "speculators" else layout, given


def kind_in(folder: str | Path) -> str:
    """Return the kind of head that a folder's config.json announces. Raises InvalidField."""
    return _announced(Path(folder))[1]


def load_head(kind: str, folder: str | Path, target: str | Path) -> Loaded:
    """Load a head of a kind for its target. Raises InvalidField naming the first thing that does not fit."""
    path = Path(folder)
    model = read_head(path)
    if (has := kind_of(model.config)) != kind:
        raise InvalidField(
            _PATH, f"{folder} is a {_TITLES.get(has, has)} checkpoint, not one of {_TITLES.get(kind, kind)}"
        )
    loaded = _for_target(path, model, read_target(target))
    if not model.own_output:
        draft_ids = torch.arange(model.config.draft_vocab_size) + model.d2t
        model.lm_head.weight = read_output(target)[draft_ids].float()
    return loaded


def read_head(folder: Path) -> Any:
    """Read a checkpoint by itself, in whichever layout, in float32. Raises InvalidField."""
    layout, kind, given = _announced(folder)
    shape, build = SHAPES[kind]
    _check_flags(folder / CONFIG, given, shape)
    tensors = _public_tensors(folder, layout, kind)
    given.setdefault("qk_norm", any(name.endswith(".q_norm.weight") for name in tensors))
    config = shape.checked(given, _PATH, f"{folder / CONFIG}: ")
    try:
        model: Any = build(config)
    except KeyError as error:
        raise InvalidField(_PATH, f"{folder / CONFIG}: {error.args[0]}") from None
    embedding, known = tensors.pop(_EMBEDDING, None), tensors.pop("t2d", None)
    output = None if model.own_output else tensors.pop(_LM_HEAD, None)
    _add_d2t(tensors, folder, config)
    wanted = public_state(model, config)
    _check(tensors, wanted, folder / WEIGHTS)
    if output is not None:
        _check({_LM_HEAD: output}, {_LM_HEAD: model.lm_head.weight}, folder / WEIGHTS)
        model.lm_head.weight, model.own_output = output.float(), True
    model.load_state_dict({name: fused_tensor(tensors, name) for name in model.state_dict()})
    _check_ids(tensors["d2t"], known, config, folder / WEIGHTS)
    if embedding is not None:
        like = torch.empty(config.vocab_size, config.hidden_size, device="meta")
        _check({_EMBEDDING: embedding}, {_EMBEDDING: like}, folder / WEIGHTS)
        model.own_embedding = embedding.float()
    return model.float()


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidField(_PATH, f"{folder / CONFIG}: {error}") from None
    if not isinstance(config, dict):
        raise InvalidField(_PATH, f"{folder / CONFIG} is no JSON object")
    return config


def _check_flags(file: Path, given: Mapping[str, Any], shape: type[HeadConfig]) -> None:
    """Refuse what config.json switches on or off and nobody here knows how to."""
    known = {*shape.model_fields, *(field.alias for field in shape.model_fields.values()), *_HARMLESS}
    for name, value in given.items():
        if value is True and name not in known:
            raise InvalidField(_PATH, f"{file}: {name} is true, and heads of this kind cannot do that here")
        if value is False and name in _WANTED:
            raise InvalidField(_PATH, f"{file}: {name} is false, and heads of this kind cannot do that here")


def _for_target(folder: Path, model: Any, target: TargetParts) -> Loaded:
    """Join a head and what it takes from its target, which it must fit."""
    config: HeadConfig = model.config
    embedding = target.embedding_of(kind_of(config)) if model.own_embedding is None else model.own_embedding
    for name, has, wants in (
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("target_hidden_size", config.target_hidden_size, target.hidden_size),
        ("hidden_size", config.hidden_size, embedding.shape[1]),
    ):
        if has != wants:
            raise InvalidField(_PATH, f"{folder / CONFIG}: {name} is {has}, the target's is {wants}")
    layers = config.feature_layers or default_feature_layers(target.layers)
    if max(layers) >= target.layers:
        why = f"{max(layers)} is not among 0..{target.layers - 1} of the target, whose last hidden state is normed"
        raise InvalidField(_PATH, f"{folder / CONFIG}: feature_layers: {why}")
    return Loaded(model, config.model_copy(update={"feature_layers": layers}), embedding.float())


def _public_tensors(folder: Path, layout: str, kind: str) -> dict[str, Tensor]:
    """Return the file's tensors by the names of the kind's own layout; a token embedding is `_EMBEDDING` in all."""
    file = folder / WEIGHTS
    if not file.is_file():
        pickled = folder / "pytorch_model.bin"
        hint = f": {pickled.name} is a pickle, {_TO_SAFETENSORS.format(pickled, file)}" if pickled.exists() else ""
        raise InvalidField(_PATH, f"no {file}{hint}")
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise InvalidField(_PATH, f"{file}: {error}") from None
    layer = _SPECULATORS_LAYER if (layout, kind) == ("speculators", "eagle3") else _MIDLAYER
    own = {_OWN_EMBEDDING.get(layout, _EMBEDDING): _EMBEDDING}
    return {
        _MIDLAYER + name.removeprefix(layer) if name.startswith(layer) else own.get(name, name): tensor
        for name, tensor in tensors.items()
        if name not in _OPTIONAL
    }


def _add_d2t(tensors: dict[str, Tensor], folder: Path, config: HeadConfig) -> None:
    """Add the map of a head that drafts from the whole vocabulary, if the file has none."""
    if "d2t" in tensors:
        return
    if config.draft_vocab_size != config.vocab_size:
        mapping = folder / "vocab_mapping.pt"
        hint = f"; {mapping.name} is a pickle: put its d2t into {WEIGHTS} yourself" if mapping.exists() else ""
        raise InvalidField(_PATH, f"{folder / WEIGHTS}: no d2t, which a reduced vocabulary needs{hint}")
    tensors["d2t"] = torch.zeros(config.vocab_size, dtype=torch.int64)


def _check(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], file: Path) -> None:
    for name in sorted(wanted.keys() - given.keys()):
        raise InvalidField(_PATH, f"{file}: {name} is missing")
    for name in sorted(given.keys() - wanted.keys()):
        raise InvalidField(_PATH, f"{file}: {name} is unknown")
    for name, tensor in given.items():
        if tensor.shape != wanted[name].shape:
            has, wants = list(tensor.shape), list(wanted[name].shape)
            raise InvalidField(_PATH, f"{file}: {name} has shape {has}, expected {wants}")
        if tensor.is_floating_point() != wanted[name].is_floating_point():
            raise InvalidField(_PATH, f"{file}: {name} is {tensor.dtype}, expected {wanted[name].dtype}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise InvalidField(_PATH, f"{file}: {name} is not finite")


def _check_ids(d2t: Tensor, t2d: Tensor | None, config: HeadConfig, file: Path) -> None:
    ids = torch.arange(config.draft_vocab_size) + d2t
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(set(ids.tolist())) != len(ids):
        raise InvalidField(_PATH, f"{file}: d2t does not name {config.draft_vocab_size} ids of {config.vocab_size}")
    if t2d is not None and not torch.equal(t2d.nonzero().flatten(), ids.sort().values):
        raise InvalidField(_PATH, f"{file}: the offsets d2t do not name the ids that t2d does")


def kind_of(config: HeadConfig) -> str:
    """Return the kind of head that a configuration is of."""
    return next(kind for kind, (shape, _) in SHAPES.items() if type(config) is shape)


def save_head(folder: Path, model: Any, config: HeadConfig, layout: str) -> None:
    """Write a head: in the layout of its kind or another that holds it, with token embedding and output if it has its
    own.

    Raises InvalidField when the layout cannot hold this kind of head.
    """
    kind = kind_of(config)
    if layout not in (kind, *_MORE_LAYOUTS.get(kind, ())):
        raise InvalidField("layout", f"{layout} does not hold a {_TITLES.get(kind, kind)} head")
    values = config.model_dump(by_alias=True)
    tensors = public_state(model, config)
    known = torch.zeros(config.vocab_size, dtype=torch.bool)
    known[torch.arange(config.draft_vocab_size) + tensors["d2t"]] = True
    tensors["t2d"] = known
    if model.own_embedding is not None:
        tensors[_OWN_EMBEDDING.get(layout, _EMBEDDING)] = model.own_embedding
    if kind in masked_blocks.KINDS:
        values = masked_blocks.written(layout, values)
        if model.own_output:
            tensors[_LM_HEAD] = model.lm_head.weight
        if config.draft_vocab_size == config.vocab_size:  # as their own files
            tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    elif layout == "speculators":
        tensors = {
            _SPECULATORS_LAYER + name.removeprefix(_MIDLAYER) if name.startswith(_MIDLAYER) else name: tensor
            for name, tensor in tensors.items()
        }
        values = speculators.eagle3_config(values)
    else:
        values |= {"architectures": [_ARCHITECTURES[kind]]} if kind in _ARCHITECTURES else {_KIND: kind}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def convert(source: Path, out: Path, layout: str) -> None:
    """Write the head of `source` in another layout. Raises InvalidField."""
    model = read_head(source)
    save_head(out, model, model.config, layout)
