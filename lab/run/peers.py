"""Methods of `coppice bench run`: policies, heads, and transformers' own ways, each at the best of a few settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from coppice.client.completion import Completion
from coppice.errors import InvalidField
from coppice.speculation.sampling import SamplingParams
from coppice.stack.spec import HeadSpec
from coppice.testing.reference import Reference
from lab.asking import Ids
from lab.options import read_methods
from lab.report import HF_GENERATE

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


def methods_of(wanted: Sequence[str] | None, heads: Sequence[HeadSpec], sessions: Sequence[int]) -> tuple[str, ...]:
    """The methods to run, plain first.

    Without any: all heads, route and merge if there are several, and transformers' `generate`. Raises InvalidField for
    what this stack cannot run.
    """
    names = [head.name for head in heads]
    default = [*names, *(["route", "merge"] if len(names) > 1 else []), *([HF_GENERATE] if 1 in sessions else [])]
    methods = read_methods(wanted or default, heads, PEERS)
    for method in methods:
        if method in PEERS and 1 not in sessions:
            raise InvalidField("methods", f"{method} answers one prompt at a time, not {sessions[0]} sessions")
        if method == HF_ASSISTED and not any(head.kind == "lm" for head in heads):
            raise InvalidField("methods", f"{HF_ASSISTED} needs a head of kind lm to draft with")
    return methods


class Peers:
    """Peers of one target; `tune` comes before `answer`."""

    def __init__(self, reference: Reference, assistant: Path | None) -> None:
        """`assistant`: the folder of the small model that hf-assisted drafts with."""
        self._reference, self._assistant = reference, assistant
        self.settings: dict[str, Settings] = {}
        """the best of each peer that has any"""

    def tune(self, name: str, prompts: Sequence[Ids], new_tokens: int, sampling: SamplingParams) -> None:
        """Take the settings that answer the prompts fastest."""

        def tokens_per_s(settings: Settings) -> float:
            self.settings[name] = settings
            answers = [self.answer(name, ids, new_tokens, sampling) for ids in prompts]
            return sum(sum(answer.accept_lengths) for answer in answers) / sum(answer.decode_s for answer in answers)

        if name in CHOICES:
            self.settings[name] = max(CHOICES[name], key=tokens_per_s)

    def answer(self, name: str, ids: Sequence[int], new_tokens: int, sampling: SamplingParams) -> Completion:
        """One answer of `new_tokens`."""
        assistant = self._assistant if name == HF_ASSISTED else None
        return self._reference.generate(ids, new_tokens, sampling, assistant, self.settings.get(name))

    def told(self, name: str) -> str:
        """The settings of a peer for people; empty for one that has none."""
        return ", ".join(f"{setting} {value:g}" for setting, value in self.settings.get(name, {}).items())
