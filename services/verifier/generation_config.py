"""What a target's generation_config.json asks of greedy decoding beyond the argmax: served, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from coppice.errors import InvalidField
from coppice.limits import LEAST_REPETITION_PENALTY, MAX_REPETITION_PENALTY

OTHERS = frozenset(
    {
        # What a request says: how long it may become, and how it is sampled.
        *("max_length", "max_new_tokens", "do_sample", "num_return_sequences"),
        *("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
        # Served: as the default of requests, and as the ids that end a text.
        *("repetition_penalty", "eos_token_id"),
        # Nothing without beams, for a model of decoders alone, or when rows are finite.
        *("early_stopping", "length_penalty", "diversity_penalty", "decoder_start_token_id"),
        *("renormalize_logits", "remove_invalid_values"),
        # How `generate` computes and what else it returns.
        *("pad_token_id", "bos_token_id", "use_cache", "cache_implementation", "cache_config", "max_cache_len"),
        *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
        *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind"),
        *("target_lookbehind", "use_mtp", "compile_config", "disable_compile", "continuous_batching_config"),
        *("low_memory", "prefill_chunk_size", "transformers_version"),
    }
)
"""Fields of GenerationConfig that do not change the text of `generate(do_sample=False)`, or are served."""
NEUTRAL = {
    "min_length": 0,
    "min_new_tokens": 0,
    "num_beams": 1,
    "num_beam_groups": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "guidance_scale": 1,
    "token_healing": False,
}
"""Values beside None and empty lists with which the other fields change nothing."""


def repetition_penalty(folder: str | Path, mode: str) -> float:
    """The repetition penalty that a folder's generation_config.json sets, 1 under the mode "ignore".

    Raises InvalidField under any other mode when the file sets what changes greedy decoding and is not served.
    """
    if mode == "ignore":
        return 1.0
    config = _read(folder)
    fields: Any = vars(GenerationConfig())  # type: ignore[no-untyped-call]
    unserved = sorted(
        name
        for name in fields
        if not (name.startswith("_") or name in OTHERS)
        and getattr(config, name, None) not in (None, [], {}, NEUTRAL.get(name))
    )
    if unserved:
        raise InvalidField(
            "verifier.generation_config",
            f"the target's generation_config.json sets {', '.join(unserved)}, which is not served; 'ignore' ignores it",
        )
    penalty = 1.0 if config.repetition_penalty is None else float(config.repetition_penalty)
    if not LEAST_REPETITION_PENALTY <= penalty <= MAX_REPETITION_PENALTY:
        bounds = f"{LEAST_REPETITION_PENALTY}..{MAX_REPETITION_PENALTY}"
        raise InvalidField(
            "verifier.generation_config", f"the target's repetition_penalty {penalty} is not in {bounds}"
        )
    return penalty


def _read(folder: str | Path) -> Any:
    """The folder's GenerationConfig as a model loaded from there has it."""
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:  # older folders have such fields in their config.json
        return GenerationConfig.from_pretrained(
            folder, config_file_name="config.json", local_files_only=True, _from_model_config=True
        )
