"""Logit bias, penalties and a least length: how the text before a row changes it, ahead of G.

In the order of transformers' processors and of vLLM's sampler: bias, then the penalties for repetition, frequency and
presence, in float32. Repetition is counted over prompt and answer (Keskar et al., CTRL, arXiv 1909.05858, section 4.1),
frequency and presence over the answer alone, as OpenAI and vLLM define them. Below the least length no id that ends a
text can be drawn.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from coppice.speculation.sampling import SamplingParams


class Penalties:
    """How often each id occurs in one text, and what that and the bias do to the text's rows."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_tokens: int,
        vocab_size: int,
        stop_ids: Collection[int] = (),
        min_len: int = 0,
    ) -> None:
        """The first `prompt_tokens` ids of the text are the prompt, those behind them were generated. None of
        `stop_ids` is among its first `min_len`, prompt included.
        """
        ends = [token for token in stop_ids if token < vocab_size]  # others cannot be drawn
        self._ends, self._min_len, self._length = np.array(ends, np.int64), min_len, 0
        self._repetition = np.float32(params.repetition_penalty or 1)
        self._frequency, self._presence = np.float32(params.frequency_penalty), np.float32(params.presence_penalty)
        self._biased = np.array(list(params.logit_bias), np.int64)
        self._bias = np.array(list(params.logit_bias.values()), np.float32)
        self._prompt_left = prompt_tokens
        counted = bool(self._repetition != 1 or self._frequency or self._presence)
        self._occurs = np.zeros(vocab_size if counted else 0, np.bool_)
        self._generated = np.zeros(vocab_size if counted else 0, np.int32)  # how often
        self._ids = np.flatnonzero(self._occurs)

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        prompt_tokens: int,
        vocab_size: int,
        stop_ids: Collection[int] = (),
        min_len: int = 0,
    ) -> Penalties | None:
        """Those of a text; None when nothing changes a row."""
        made = cls(params, prompt_tokens, vocab_size, stop_ids, min_len)
        return made if made._occurs.size or params.logit_bias or min_len > prompt_tokens else None

    def append(self, ids: Sequence[int]) -> None:
        """Count the next ids of the text."""
        self._length += len(ids)
        if self._occurs.size:
            self._occurs[np.array(ids, np.int64)] = True
            self._ids = np.flatnonzero(self._occurs)
            np.add.at(self._generated, np.array(ids[self._prompt_left :], np.int64), 1)
        self._prompt_left = max(0, self._prompt_left - len(ids))

    def adjusted(self, row: NDArray[np.floating], path: Sequence[int] = ()) -> NDArray[np.float32]:
        """The (V,) logits behind the text and the generated ids of `path`, adjusted; `row` stays as it is."""
        adjusted: NDArray[np.float32] = row.astype(np.float32)
        adjusted[self._biased] += self._bias
        if self._length + len(path) < self._min_len:
            adjusted[self._ends] = -np.inf
        if not self._occurs.size:
            return adjusted
        behind = np.array(path, np.int64)
        ids = np.concatenate([self._ids, np.unique(behind[~self._occurs[behind]])])
        np.add.at(self._generated, behind, 1)
        generated = self._generated[ids].astype(np.float32)
        np.subtract.at(self._generated, behind, 1)
        logits = adjusted[ids]
        logits = np.where(logits < 0, logits * self._repetition, logits / self._repetition)
        adjusted[ids] = logits - self._frequency * generated - self._presence * (generated > 0)
        return adjusted
