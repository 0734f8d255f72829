"""What speculators' config.json says beside a head's sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
