"""transformers' own ways to decode faster, each at the best of a few settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coppice.bench.reference import Reference
from coppice.bench.report import HF_GENERATE
from coppice.client.completion import Completion
from coppice.speculation.sampling import SamplingParams

HF_ASSISTED, HF_LOOKUP = "hf-assisted", "hf-lookup"
PEERS = (HF_GENERATE, HF_ASSISTED, HF_LOOKUP)
DRAFT_TOKENS = (2, 4, 8)
CONFIDENCES = (0.0, 0.4)  # below which the assistant stops; 0: never


Settings = dict[str, float]
"""How much a peer drafts, in transformers' own words."""
CHOICES: dict[str, tuple[Settings, ...]] = {
    HF_ASSISTED: tuple(
        {"num_assistant_tokens": tokens, "assistant_confidence_threshold": confidence}
        for tokens in DRAFT_TOKENS
        for confidence in CONFIDENCES
    ),
    HF_LOOKUP: tuple({"prompt_lookup_num_tokens": tokens} for tokens in DRAFT_TOKENS),
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
        """One answer of `new_tokens`."""
        return self._reference.generate(ids, new_tokens, sampling, **self._options(name))

    def told(self, name: str) -> str:
        """The settings of a peer for people; empty for one that has none."""
        return ", ".join(f"{setting} {value:g}" for setting, value in self.settings.get(name, {}).items())

    def _options(self, name: str) -> dict[str, Any]:
        if name != HF_ASSISTED:
            return dict(self.settings.get(name, {}))
        assert self._assistant is not None
        # transformers looks for them there
        self._assistant.generation_config.update(**self.settings[name], num_assistant_tokens_schedule="constant")
        return {"assistant_model": self._assistant}
