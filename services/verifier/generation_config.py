"""What a target's generation_config.json asks of greedy decoding beyond the argmax: served, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from coppice.errors import InvalidField
from coppice.limits import LEAST_REPETITION_PENALTY, MAX_REPETITION_PENALTY

NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("num_beams", "num_beam_groups", "encoder_repetition_penalty", "guidance_scale"), 1),
    "token_healing": False,
    **dict.fromkeys(("stop_strings", "max_time", "bad_words_ids", "force_words_ids", "constraints"), None),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "sequence_bias", "penalty_alpha"), None),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), None),
    **dict.fromkeys(("watermarking_config", "dola_layers"), None),
}
"""Fields that change the text of `generate(do_sample=False)` and are not served, and values that change nothing."""


def repetition_penalty(folder: str | Path, mode: str) -> float:
    """The repetition penalty that a folder's generation_config.json sets, 1 under the mode "ignore".

    Raises InvalidField under any other mode when the file sets what changes greedy decoding and is not served.
    """
    if mode == "ignore":
        return 1.0
    try:
        config: Any = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:  # older folders have such fields in their config.json
        config = GenerationConfig.from_pretrained(
            folder, config_file_name="config.json", local_files_only=True, _from_model_config=True
        )
    field = "verifier.generation_config"
    unserved = [name for name in NEUTRAL if getattr(config, name, None) not in (None, [], {}, NEUTRAL[name])]
    if unserved:
        reason = f"the target's generation_config.json sets {', '.join(unserved)}, which is not served"
        raise InvalidField(field, f"{reason}; 'ignore' ignores it")
    penalty = 1.0 if config.repetition_penalty is None else float(config.repetition_penalty)
    if not LEAST_REPETITION_PENALTY <= penalty <= MAX_REPETITION_PENALTY:
        bounds = f"{LEAST_REPETITION_PENALTY}..{MAX_REPETITION_PENALTY}"
        raise InvalidField(field, f"the target's repetition_penalty {penalty} is not in {bounds}")
    return penalty
