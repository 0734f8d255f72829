"""How long a text a model can hold, read from its configuration alone: known before any weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coppice.engine.kv_cache import BLOCK_SIZE
from coppice.limits import MAX_CONTEXT

# These rotate by the longest text *in the batch*: beyond their first length, sessions would change each other.
BATCH_DEPENDENT = ("dynamic", "longrope")


def rope_kinds(config: Any) -> list[dict[str, Any]]:
    """The rotary parameters of a text model, those of each kind of layer where they differ."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [kind for kind in rope.values() if kind]


@dataclass(frozen=True, slots=True)
class Context:
    """A number of positions, and what it was cut by where the configuration promises more."""

    tokens: int
    cut_by: str = ""

    @classmethod
    def of(cls, config: Any, otherwise: int) -> Context:
        """What a text model's configuration allows; `otherwise` where it names no limit."""
        promised = longest = int(getattr(config, "max_position_embeddings", None) or otherwise)
        cut_by = ""
        for kind in rope_kinds(config):
            first = int(kind.get("original_max_position_embeddings") or longest)
            if kind.get("rope_type") in BATCH_DEPENDENT and first < longest:
                longest = first
                cut_by = f"rope kind {kind['rope_type']} would let longer texts change each other; {promised} promised"
        return cls(longest, cut_by)

    def served(self, kv_tokens: int) -> Context:
        """What a verifier with so many KV tokens serves of it."""
        room = kv_tokens // BLOCK_SIZE * BLOCK_SIZE
        if min(room, MAX_CONTEXT) >= self.tokens:
            return self
        return Context(room, f"verifier.kv_tokens is {kv_tokens}") if room < MAX_CONTEXT else Context(MAX_CONTEXT)

    def __str__(self) -> str:
        return f"{self.tokens} tokens ({self.cut_by})" if self.cut_by else f"{self.tokens} tokens"
