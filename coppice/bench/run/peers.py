"""transformers' own ways to decode faster, each at the best of a few settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coppice.bench.reference import Reference
from coppice.bench.report import HF_GENERATE
from coppice.client.completion import Completion
from coppice.speculation.sampling import SamplingParams

HF_ASSISTED, HF_LOOKUP = "hf-assisted", "hf-lookup"
PEERS = (HF_GENERATE, HF_ASSISTED, HF_LOOKUP)
DRAFT_TOKENS = (2, 4, 8)
CONFIDENCES = (0.0, 0.4)


@dataclass(frozen=True, slots=True)
class Settings:
    """How much a peer drafts: tokens at most, and the assistant's probability below which it stops (0: never)."""

    tokens: int
    confidence: float | None = None

    def __str__(self) -> str:
        return f"{self.tokens} tokens" + (f", confidence {self.confidence:g}" if self.confidence is not None else "")


CHOICES: dict[str, tuple[Settings, ...]] = {
    HF_ASSISTED: tuple(Settings(tokens, confidence) for tokens in DRAFT_TOKENS for confidence in CONFIDENCES),
    HF_LOOKUP: tuple(Settings(tokens) for tokens in DRAFT_TOKENS),
}


class Peers:
    """Peers of one target; `tune` comes before `answer`."""

    def __init__(self, reference: Reference, assistant: Path | None) -> None:
        """`assistant`: the folder of the small model that hf-assisted drafts with."""
        self._reference = reference
        self._assistant = reference.load(assistant) if assistant else None
        self.settings: dict[str, Settings] = {}
        """the best of each peer that has any"""

    def tune(self, name: str, prompts: Sequence[Sequence[int]], new_tokens: int, sampling: SamplingParams) -> None:
        """Take the settings that answer the prompts fastest."""

        def tokens_per_s(settings: Settings) -> float:
            self.settings[name] = settings
            answers = [self.answer(name, ids, new_tokens, sampling) for ids in prompts]
            return sum(sum(answer.accept_lengths) for answer in answers) / sum(answer.decode_s for answer in answers)

        if name in CHOICES:
            self.settings[name] = max(CHOICES[name], key=tokens_per_s)

    def answer(self, name: str, ids: Sequence[int], new_tokens: int, sampling: SamplingParams) -> Completion:
        """One answer of `new_tokens`; what the prefill's forward made is not counted as decoded."""
        return self._reference.generate(ids, new_tokens, sampling, **self._options(name)).as_completion(len(ids))

    def _options(self, name: str) -> dict[str, Any]:
        if name == HF_GENERATE:
            return {}
        settings = self.settings[name]
        if name == HF_LOOKUP:
            return {"prompt_lookup_num_tokens": settings.tokens}
        assert self._assistant is not None
        self._assistant.generation_config.update(  # where transformers looks for them
            num_assistant_tokens=settings.tokens,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=settings.confidence,
        )
        return {"assistant_model": self._assistant}
