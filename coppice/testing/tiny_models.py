"""Tiny random models of every causal LM class that the installed transformers knows, to try the engine on."""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from coppice.engine.attention import one_line

VOCAB = 150
MOST_PARAMETERS = 20_000_000
_HEADS, _WINDOW = 4, 7
# By the names of configurations; each class takes those that it has. Weights are larger than a fresh model's, so that
# attention matters to the logits; keys are wider than values where a class can have it so.
_SIZES: dict[str, Any] = {
    "initializer_range": 0.2,
    "is_decoder": True,
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "rotary_dim"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **{"num_attention_heads": _HEADS, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "v_head_dim": 10},
    # Behind num_attention_heads, of which a class may have it as another name.
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "moe_k", "eos_token_id"), 2),
    **dict.fromkeys(("bos_token_id", "n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("pad_token_id", "num_kv_shared_layers"), 0),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank"), 16),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "hidden_size_per_layer_input"), 8),
    **{"max_position_embeddings": 256, "sliding_window": 512},
    # Encoders of pictures and sounds, which a text leaves alone.
    **dict.fromkeys(("embed_dim", "out_hidden_size", "d_model"), 32),
    **{"image_size": 16, "patch_size": 8, "depth": 2, "num_heads": _HEADS, "encoder_layers": 2},
}
# Of layers that keep a state; chunks are short, so that texts cross their borders.
_SIZES |= {
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("linear_num_key_heads", "n_groups", "mamba_n_groups", "attn_layer_period"), 2),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_chunk_size", "chunk_size"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 8),
    **{"mamba_d_ssm": 64, "attn_layer_offset": 1},
    **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16},
    **{"indexer_compress_ratio": 4},
}
_ALTERNATING = {"layer_types": ["linear_attention", "full_attention"] * 2}
_CONVOLVING = {"layer_types": ["conv", "full_attention"] * 2}
_OF_TYPE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "mamba2": {"expand": 1},
    "zamba": {"layers_block_type": ["linear_attention"] * 2 + ["hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "linear_attention", "moe"]},
    "zaya": {"num_experts_per_tok": 1},
    "bailing_hybrid": _ALTERNATING,
    "granitemoehybrid": _ALTERNATING,
    "kimi_linear": _ALTERNATING,
    "olmo_hybrid": _ALTERNATING,
    "lfm2": _CONVOLVING,
    "lfm2_moe": _CONVOLVING,
    "lfm3": _CONVOLVING,
}
"""what types of models need beside"""
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "window": {"sliding_window": _WINDOW, "use_sliding_window": True, "max_window_layers": 2},
    "one key head": {"num_key_value_heads": 1},
}
"""what sets a model apart from its class's first; those that a class has no names for are not made"""


class NotTiny(Exception):
    """Transformers cannot make the class in these sizes."""


def model_types() -> dict[str, str]:
    """The name of the causal LM class of each type of model."""
    return {
        kind: name if isinstance(name, str) else name[0] for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    }


def variants(kind: str) -> list[str]:
    """The variants that a type of model has, "" first."""
    try:
        text = CONFIG_MAPPING[kind]().get_text_config()
    except Exception:
        return [""]  # which then says why
    latent = _has(text, "kv_lora_rank")
    return [
        name
        for name, sizes in VARIANTS.items()
        if not sizes or (_has(text, next(iter(sizes))) and not (latent and "num_key_value_heads" in sizes))
    ]


def save_tiny(kind: str, variant: str, folder: Path) -> str:
    """Write a random model into a folder and return its class's name. Raises NotTiny."""
    try:
        default = CONFIG_MAPPING[kind]()
        config = CONFIG_MAPPING[kind](**_small(default, VARIANTS[variant]) | _OF_TYPE.get(kind, {}))
        build: Any = AutoModelForCausalLM.from_config
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in build(config).parameters())
        if parameters <= MOST_PARAMETERS:
            torch.manual_seed(0)
            model = build(config)
            model.generation_config.eos_token_id = None
            model.save_pretrained(folder)
            return type(model).__name__
    except Exception as error:
        raise NotTiny(one_line(error)) from error
    raise NotTiny(f"{parameters / 1e6:.0f}M parameters")


def _has(config: PreTrainedConfig, name: str) -> bool:
    """Whether a configuration has a name that can be set; one whose layers differ may refuse to say."""
    computed = getattr(type(config), name, None)
    if isinstance(computed, property) and computed.fset is None:
        return False
    try:
        return hasattr(config, name)
    except Exception:
        return True


def _small(config: PreTrainedConfig, variant: dict[str, Any]) -> dict[str, Any]:
    """The arguments that make a configuration of this class small."""
    sizes = {name: size for name, size in (_SIZES | variant).items() if _has(config, name)}
    if _has(config, "kv_lora_rank") and "num_key_value_heads" in sizes:
        sizes["num_key_value_heads"] = _HEADS  # latent keys are expanded to all heads
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            sizes[name] = {"model_type": part.model_type, **_small(part, variant)}
    return sizes
