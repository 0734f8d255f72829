"""Checkpoints of draft heads. Heads are read in the layouts that others publish (SpecBlock's, EAGLE's, z-lab's,
JetSpec's, DeepSpec's, speculators') and written in EAGLE's, which other engines read, or for other kinds in our own.

A folder holds config.json and model.safetensors. Every key and shape must be the layout's, and no flag may be true that
is not known here; nothing is unpickled. A head without a token embedding of its own uses the target's.

Layouts of a block of masks name the same tensors and differ in what config.json says of them, which a loader can get
wrong without any error: how layers are counted, whether the block is causal, and whether the root's own row predicts.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpLayer
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from coppice.config.model import EMBEDDINGS, NO_MTP, OUTPUT, check_model, find_mtp, mtp_prefixes, tensors_in
from coppice.config.sections import HEADS
from coppice.engine.engine import default_feature_layers, read_layout
from coppice.engine.modules import SIBLINGS
from coppice.engine.steps import decoder_layers
from coppice.errors import InvalidField
from coppice.heads.layers import HeadConfig
from coppice.heads.models import (
    DFlashConfig,
    DSparkConfig,
    Eagle3Config,
    Eagle3Model,
    JetSpecConfig,
    MaskedBlockModel,
    MtpConfig,
    MtpModel,
    SpecBlockConfig,
    SpecBlockModel,
)
from coppice.machine import extension, extensions

Shape = tuple[type[HeadConfig], Callable[[Any], nn.Module]]  # configuration and model of a kind of head
SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "specblock": (SpecBlockConfig, SpecBlockModel),
        "eagle3": (Eagle3Config, Eagle3Model),
        "dflash": (DFlashConfig, MaskedBlockModel),
        "jetspec": (JetSpecConfig, MaskedBlockModel),
        "dspark": (DSparkConfig, MaskedBlockModel),
    }
)
MASKED_KINDS = ("dflash", "jetspec", "dspark")  # heads that fill a block of masks

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_PATH, _TARGET = "drafter.path", "drafter.target"
_KIND = "coppice_head"  # in config.json of our own layout: the kind
_NULLABLE = {"rank_norm_topk"}  # null says something else than nothing
_SPELLINGS = {
    "eagle_aux_hidden_state_layer_ids": "feature_layers",
    "enable_confidence_head": "confidence",
    "confidence_head_with_markov": "confidence_with_markov",
}
_CAUSAL = {"is_causal": "causal", "causal_head": "causal"}
"""what layouts call our fields; the second table those of vLLM and of JetSpec for a block of masks"""
_NEVER_FALSE = ("is_causal", "use_aux_hidden_state")
_HARMLESS = {"use_cache", "return_dict", "tie_word_embeddings", "embed_requires_grad", *_NEVER_FALSE}
"""flags that say nothing of what a head computes; lm_head.weight is in the file also where a target ties it"""
_SERVED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "markov_head_type": ("vanilla",),
        "projector_type": ("dflash", "dspark"),
        "input_embedding_scale": (1,),
        "output_multiplier": (1,),
        "final_logit_softcapping": (),
    }
)
"""the values that are served of fields that most files of a block of masks leave out"""

_EMBEDDING, _LM_HEAD = "embed_tokens.weight", OUTPUT
_NAMES = {"eagle3": ("layers.0.", "midlayer."), "specblock": ("input_layer.embed_tokens.", "embed_tokens.")}
"""how tensors' names begin in a file, and in the model: speculators' EAGLE-3 heads, and SpecBlock's embedding"""
_OPTIONAL = {"verifier_norm.weight", "verifier_lm_head.weight"}
_TO_SAFETENSORS = (
    "convert it where you trust it: python -c \"import torch, safetensors.torch as s; s.save_file(torch.load('{0}', "
    "weights_only=True), '{1}')\""
)


@dataclass(frozen=True)
class Loaded:
    """A head in float32 on the CPU, and what it takes from its target."""

    model: Any
    config: Any
    embedding: Tensor  # (vocabulary, hidden), the head's own, else the target's


class TargetParts:
    """What a head takes from its target."""

    def __init__(self, folder: str | Path) -> None:
        """Read configuration and token embedding of a target's folder. Raises InvalidField."""
        self._folder = Path(folder)
        check_model(_TARGET, str(folder))
        config = AutoConfig.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)
        self.config = config.get_text_config()
        embedding = _find_tensor(self._folder, EMBEDDINGS)
        if embedding is None:
            raise InvalidField(_TARGET, f"{folder} holds no token embedding in safetensors")
        self.embedding, self.vocab_size = embedding, len(embedding)

    def scale_of(self, kind: str) -> float:
        """Return the factor on the embedding's rows that a head of a kind reads: a block of masks what the target's
        module gives, others the rows as they are stored, as the published loaders do.
        """
        scaled = kind in MASKED_KINDS and "gemma" in self.config.model_type  # others scale behind their module
        return float(torch.tensor(self.config.hidden_size**0.5, dtype=self.embedding.dtype)) if scaled else 1.0

    @cached_property
    def output(self) -> Tensor:
        """The (V, hidden) weights of the output layer, which may be the embedding."""
        own = _find_tensor(self._folder, (_LM_HEAD,))
        return self.embedding if own is None else own


def _find_tensor(folder: Path, ends: tuple[str, ...]) -> Tensor | None:
    """Return the tensor whose name ends so, but for those of a head that ships beside the target's."""
    shipped = mtp_prefixes(name for name, _ in tensors_in(folder))
    named = ((name, file) for name, file in tensors_in(folder, "pt") if name.endswith(ends))
    return next((file.get_tensor(name) for name, file in named if not name.startswith(shipped)), None)


def shape_of(kind: str) -> Shape:
    """Return configuration and model of a kind, ours or a package's (the `shape` of its head). Raises InvalidField."""
    if kind in SHAPES:
        return SHAPES[kind]
    if kind not in extensions(HEADS):
        known = ", ".join((*SHAPES, *extensions(HEADS)))
        raise InvalidField(_PATH, f"{kind!r} is no kind of head with weights that is installed; there are {known}")
    shape: Shape = extension(HEADS, kind, _PATH).shape
    return shape


def kind_in(folder: str | Path) -> str:
    """Return the kind of head that a folder's config.json announces. Raises InvalidField."""
    return _announced(Path(folder))[0]


def _announced(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return the kind of head that a folder's config.json announces, and what it says of the head by our names."""
    file = folder / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidField(_PATH, f"{file}: {error}") from None
    if not isinstance(config, dict):
        raise InvalidField(_PATH, f"{file} is no JSON object")
    if kind := config.get(_KIND):
        return kind, _present(config)
    published = ""
    if "speculators_model_type" in config or "Eagle3Speculator" in config.get("architectures", ()):
        published, nested = config.get("speculators_model_type", "eagle3"), "transformer_layer_config"
        if published not in ("eagle3", "dflash", "dspark"):
            raise InvalidField(_PATH, f"speculators_model_type is {published!r}; there are eagle3, dflash and dspark")
    else:
        nested = "dflash_config" if "dflash_config" in config else "eagle_config"
    inner = config.get(nested) if published else config.get(nested) or {}
    if not isinstance(inner, Mapping):
        raise InvalidField(_PATH, f"{file} has no JSON object {nested}")
    zlab = nested == "dflash_config" or config.get("projector_type") == "dspark"
    masked = published != "eagle3" if published else zlab or config.get("markov_rank") is not None
    values = _merged(file, _SPELLINGS | _CAUSAL if masked else _SPELLINGS, config, inner)
    if masked:
        return _masked_fields(values, published, "dflash_config" in config)
    if published:
        values["num_hidden_layers"] = 1
    return "specblock" if "diffspec_draft_token_num" in config else "eagle3", values


def _present(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if value is not None or name in _NULLABLE}


def _merged(file: Path, spellings: Mapping[str, str], *parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a config.json's parts say, by our names. Raises InvalidField where they contradict each other."""
    fields = {name for config, _ in SHAPES.values() for name in config.model_fields}
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for part in parts:
        for name, value in _present(part).items():
            field = spellings.get(name, name)
            if field not in values:
                values[field], names[field] = value, name
            elif field in fields and values[field] != value:
                both = f"{names[field]} is {values[field]}, {name} is {value}"
                raise InvalidField(_PATH, f"{file} contradicts itself: {both}")
    return values


def _masked_fields(values: Mapping[str, Any], published: str, zlab: bool) -> tuple[str, dict[str, Any]]:
    """Return the kind and the fields of a head that fills a block of masks. Raises InvalidField.

    `published`: speculators' name of the kind, else "". In z-lab's dflash_config SpecForge's fields mean DeepSpec's.
    """
    for name in ("mask_token_id", "block_size"):
        if name not in values:
            raise InvalidField(_PATH, f"config.json: {name} is missing")
    for name, served in _SERVED.items():
        if name in values and values[name] not in served:
            raise InvalidField(_PATH, f"config.json: {name} {values[name]!r} is not served")
    dflash2 = "selector_rank", "selector_top_k", "conv_kernel_size"
    if second := [f"{name} {values[name]}" for name in dflash2 if values.get(name)]:
        raise InvalidField(
            _PATH, f"config.json: {', '.join(second)}: DFlash2's selector and convolutions are not served"
        )
    if any(layer != "full_attention" for layer in values.get("layer_types", ())):
        raise InvalidField(_PATH, f"config.json: layer_types {values['layer_types']}: only full_attention is served")
    markov, causal = bool(values.get("markov_rank")), bool(values.get("causal"))
    deepspec = markov or values.get("projector_type") == "dspark" or ("markov_rank" in values and not zlab)
    anchored = published == "dspark" if published else deepspec
    fields = {"qk_norm": True, "sample_from_anchor": anchored, **values, "causal": causal}
    fields["feature_layers"] = _feature_layers(values, bool(published))
    return "dspark" if markov else "jetspec" if causal else "dflash", fields


def _feature_layers(given: Mapping[str, Any], speculators: bool) -> list[int]:
    """Return the hidden states that a head reads: all but speculators count layers where we count what lies before."""
    ids = given.get("aux_hidden_state_layer_ids" if speculators else "target_layer_ids")
    layers, count = given.get("num_target_layers"), given.get("num_hidden_layers")
    if not speculators and ids is None and isinstance(layers, int) and isinstance(count, int):  # as their loaders do
        ids = [layers // 2] if count == 1 else [round(1 + at * (layers - 4) / (count - 1)) for at in range(count)]
    if not ids or not isinstance(ids, list) or not all(isinstance(layer, int) for layer in ids):
        raise InvalidField(_PATH, "config.json does not name the layers that the head reads")
    return [layer + (not speculators) for layer in ids]


def load_head(kind: str, folder: str | Path, target: str | Path) -> Loaded:
    """Load a head of a kind with what it takes from its target. Raises InvalidField naming the first misfit."""
    parts = TargetParts(target)
    model = read_mtp(Path(target), parts.config) if kind == MtpConfig.kind else read_head(Path(folder))
    config: HeadConfig = model.config
    if config.kind != kind:
        raise InvalidField(_PATH, f"{folder} is a checkpoint of kind {config.kind}, not {kind}")
    embedding = parts.embedding if model.own_embedding is None else model.own_embedding
    for name, has, needs in (
        ("vocab_size", config.vocab_size, parts.vocab_size),
        ("target_hidden_size", config.target_hidden_size, parts.config.hidden_size),
        ("hidden_size", config.hidden_size, embedding.shape[1]),
    ):
        if has != needs:
            raise InvalidField(_PATH, f"{Path(folder) / CONFIG}: {name} is {has}, the target's is {needs}")
    depth = parts.config.num_hidden_layers
    layers = config.feature_layers or default_feature_layers(depth)
    if max(layers) >= depth and kind != MtpConfig.kind:
        reason = f"{max(layers)} is not among 0..{depth - 1} of the target, whose last hidden state is normed"
        raise InvalidField(_PATH, f"{Path(folder) / CONFIG}: feature_layers: {reason}")
    if model.own_embedding is None:
        model.embedding_scale = parts.scale_of(kind)
    if not model.own_output:
        model.lm_head.weight = parts.output[model.target_ids].float()
    return Loaded(model, config.model_copy(update={"feature_layers": layers}), embedding.float())


def read_head(folder: Path) -> Any:
    """Read a checkpoint by itself, in whichever layout, in float32. Raises InvalidField."""
    kind, given = _announced(folder)
    shape, build = shape_of(kind)
    _check_flags(folder / CONFIG, given, shape)
    tensors = _tensors_in(folder, kind)
    given.setdefault("qk_norm", any(name.endswith(".q_norm.weight") for name in tensors))
    config = shape.checked(given, _PATH, f"{folder / CONFIG}: ")
    try:
        model: Any = build(config)
    except KeyError as error:
        raise InvalidField(_PATH, f"{folder / CONFIG}: {error.args[0]}") from None
    expected = public_state(model, config)
    if _EMBEDDING in tensors:
        expected[_EMBEDDING] = torch.empty(config.vocab_size, config.hidden_size, device="meta")
    if own_output := _LM_HEAD in tensors and not model.own_output:
        expected[_LM_HEAD] = model.lm_head.weight
    if "d2t" not in tensors:  # it drafts from the whole vocabulary
        if config.draft_vocab_size != config.vocab_size:
            mapping = folder / "vocab_mapping.pt"
            hint = f"; {mapping.name} is a pickle: put its d2t into {WEIGHTS} yourself" if mapping.exists() else ""
            raise InvalidField(_PATH, f"{folder / WEIGHTS}: no d2t, which a reduced vocabulary needs{hint}")
        tensors["d2t"] = torch.zeros(config.vocab_size, dtype=torch.int64)
    for fault in _faults(tensors, expected, config):
        raise InvalidField(_PATH, f"{folder / WEIGHTS}: {fault}")
    model.load_state_dict({name: fused_tensor(tensors, name) for name in model.state_dict()})
    if _EMBEDDING in tensors:
        model.own_embedding = tensors[_EMBEDDING].float()
    if own_output:
        model.lm_head.weight, model.own_output = tensors[_LM_HEAD].float(), True
    return model.float()


def read_mtp(folder: Path, text: Any) -> MtpModel:
    """Read the MTP head in the checkpoint of a target with this text configuration, in float32. Raises InvalidField.

    In a target without values it takes the place of the last layer like its own, so that its tensors are converted as
    the target's are: experts become one tensor.
    """
    if (found := find_mtp(folder)) is None:
        raise InvalidField(_TARGET, f"{folder} {NO_MTP}")
    layout, names = found
    build: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        target = build(text, dtype=torch.bfloat16, trust_remote_code=False)
    shapes, layers = read_layout(target.train(False)).layers, decoder_layers(target, text.num_hidden_layers)
    sparse, number = any(".experts." in name for name in names), len(layers) - 1
    while not shapes[number].kv_heads or sparse != any(".experts." in name for name in layers[number].state_dict()):
        if (number := number - 1) < 0:
            raise InvalidField(_TARGET, f"{folder}: no layer of the target is like the MTP head's")
    target.config.mtp_hidden_states_first = layout.hidden_first
    like: Any = layers[number]
    with torch.device("meta"):
        layer = layers[number] = MtpLayer(target.config, type(like), type(like.input_layernorm), number)
    tensors = {names[name]: file.get_tensor(name) for name, file in tensors_in(folder, "pt") if name in names}
    _load_layer(folder, target, layer, tensors)
    module: Any
    for module in layer.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = 0  # in the head's KV
    fields = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    values = {name: getattr(text, name, None) for name in (*fields, "max_position_embeddings")}
    values |= {"feature_layers": (text.num_hidden_layers + layout.reads_normed,), "shared_output": True}
    config = MtpConfig.checked(values | {"norm_output": layout.norm_output}, _TARGET, f"{folder / CONFIG}: ")
    model = MtpModel(config, layer, type(target.get_decoder().rotary_emb)(text), shapes[number])
    for fault in _faults(model.state_dict(), model.state_dict(), config):
        raise InvalidField(_TARGET, f"{folder}: the MTP head's {fault}")
    return model.float()


def _load_layer(folder: Path, target: Any, layer: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load tensors into a layer of a target as the target's own are loaded. Raises InvalidField."""
    prefix = next(name for name, module in target.named_modules() if module is layer) + "."
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # a log is no terminal
    conversions: Any = get_model_conversion_mapping(target)
    report, _ = convert_and_load_state_dict_in_model(
        target,
        {prefix + name: tensor for name, tensor in tensors.items()},
        LoadStateDictConfig(weight_mapping=conversions, dtype=torch.float32),
    )
    for fault, keys in (
        ("lacks", {key for key in report.missing_keys if key.startswith(prefix)}),
        ("has no place for", report.unexpected_keys),
        ("has another shape in", {key for key, *_ in report.mismatched_keys}),
    ):
        if keys:
            raise InvalidField(_TARGET, f"{folder}: the MTP head {fault} {min(keys).removeprefix(prefix)}")


def _check_flags(file: Path, given: Mapping[str, Any], shape: type[HeadConfig]) -> None:
    """Refuse what config.json switches on or off and nobody here knows how to."""
    known = {*shape.model_fields, *(field.alias for field in shape.model_fields.values()), *_HARMLESS}
    for name, value in given.items():
        if (value is True and name not in known) or (value is False and name in _NEVER_FALSE):
            reason = f"{name} is {json.dumps(value)}, and heads of this kind cannot do that here"
            raise InvalidField(_PATH, f"{file}: {reason}")


def _tensors_in(folder: Path, kind: str) -> dict[str, Tensor]:
    """Return the file's tensors by the model's names."""
    file = folder / WEIGHTS
    if not file.is_file():
        pickled = folder / "pytorch_model.bin"
        hint = f": {pickled.name} is a pickle, {_TO_SAFETENSORS.format(pickled, file)}" if pickled.exists() else ""
        raise InvalidField(_PATH, f"no {file}{hint}")
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise InvalidField(_PATH, f"{file}: {error}") from None
    theirs, ours = _NAMES.get(kind, ("", ""))
    return {
        ours + name.removeprefix(theirs) if name.startswith(theirs) else name: tensor
        for name, tensor in tensors.items()
        if name not in _OPTIONAL
    }


def _faults(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], config: HeadConfig) -> Iterator[str]:
    """What keeps a file's tensors from being those that a head of this configuration is expected to have."""
    t2d = tensors.get("t2d")
    yield from (f"{name} is missing" for name in sorted(expected.keys() - tensors.keys()))
    yield from (f"{name} is unknown" for name in sorted(tensors.keys() - expected.keys() - {"t2d"}))
    for name, needed in expected.items():
        tensor = tensors[name]
        if tensor.shape != needed.shape:
            yield f"{name} has shape {list(tensor.shape)}, expected {list(needed.shape)}"
        if tensor.is_floating_point() != needed.is_floating_point():
            yield f"{name} is {tensor.dtype}, expected {needed.dtype}"
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            yield f"{name} is not finite"
    ids = torch.arange(config.draft_vocab_size) + tensors["d2t"]
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(set(ids.tolist())) != len(ids):
        yield f"d2t does not name {config.draft_vocab_size} ids of {config.vocab_size}"
    if getattr(config, "markov_drafts", False) and bool((ids.diff() < 0).any()):
        yield "d2t does not name its ids in order, as markov_drafts has it"
    if t2d is not None and not torch.equal(t2d.nonzero().flatten(), ids.sort().values):
        yield "the offsets d2t do not name the ids that t2d does"


def save_head(folder: Path, model: Any, config: HeadConfig) -> None:
    """Write a head in the layout of its kind, with token embedding and output layer if it has its own."""
    kind = config.kind
    tensors = public_state(model, config)
    known = torch.zeros(config.vocab_size, dtype=torch.bool)
    known[torch.arange(config.draft_vocab_size) + tensors["d2t"]] = True
    tensors["t2d"] = known
    if model.own_embedding is not None:
        tensors[_EMBEDDING] = model.own_embedding
    if model.own_output and config.shared_output:  # one of its own that others of the kind borrow
        tensors[_LM_HEAD] = model.lm_head.weight
    values = config.model_dump(by_alias=True)
    # One kind is written in its authors' layout.
    values |= {"architectures": ["LlamaForCausalLMEagle3"]} if kind == "eagle3" else {_KIND: kind}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


_FUSED = MappingProxyType(dict(zip(("qkv_proj", "gate_up_proj"), SIBLINGS, strict=True)))


def public_names(name: str) -> tuple[str, ...]:
    """Return the public names of what one tensor of a model's state holds, in order along its first dimension."""
    module, _, kind = name.rpartition(".")
    owner, _, module = module.rpartition(".")
    if module not in _FUSED:
        return (name,)
    return tuple(f"{owner}.{part}.{kind}" for part in _FUSED[module])


def public_state(model: nn.Module, config: HeadConfig) -> dict[str, Tensor]:
    """Return views of the model's tensors by their public names."""
    query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    sizes = {3: (query, key, key), 2: (config.intermediate_size,) * 2}
    public: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        names = public_names(name)
        pieces = tensor.split(sizes[len(names)]) if len(names) > 1 else (tensor,)
        public |= zip(names, pieces, strict=True)
    return public


def fused_tensor(public: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the tensor `name` of a model's state, made of public ones."""
    pieces = [public[part] for part in public_names(name)]
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def public_weights(model: nn.Module, config: HeadConfig) -> dict[str, Tensor]:
    """Return the public tensors that may be trained and replaced: those that hold numbers, not ids, as float32."""
    return {name: tensor.float() for name, tensor in public_state(model, config).items() if tensor.is_floating_point()}
