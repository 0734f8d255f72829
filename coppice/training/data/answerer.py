"""A target that goes on with prompts, and what it wrote: ids, with the hidden states that heads learn from."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from coppice.engine.engine import Engine
from coppice.engine.kv_cache import BlockTable
from coppice.engine.rows import Piece, pack
from coppice.speculation.sampling_torch import draw

LONGEST_CHUNK = 128
"""ids of a text in a forward: the logits of all of them are computed"""
COLDEST = 1e-3
"""temperature of the draws of greedy texts, which nobody looks at"""


@dataclass(frozen=True)
class Answer:
    """Texts with the target's features and final hidden states at each token."""

    ids: Tensor  # (..., T)
    features: Tensor  # (..., T, F)
    final: Tensor  # (..., T, hidden), what the target's output layer reads


def as_positions(texts: Sequence[Answer]) -> tuple[Callable[[Tensor], Answer], list[Tensor]]:
    """Return a reader of (B, T) positions in (T, ...) texts held in memory, and each text's own (T,) positions."""
    ids, features, final = (torch.cat([getattr(text, name) for text in texts]) for name in ("ids", "features", "final"))

    def read(positions: Tensor) -> Answer:
        return Answer(ids[positions], features[positions].float(), final[positions].float())

    return read, list(torch.split(torch.arange(len(ids)), [len(text.ids) for text in texts]))


@dataclass
class _Text:
    """One text while the target writes it: `waiting` ids are fed before anything is drawn."""

    table: BlockTable
    waiting: deque[int]
    length: int
    temperature: float
    seed: int
    ids: list[int] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    final: list[Tensor] = field(default_factory=list)

    def chunk(self) -> list[int]:
        """Take the ids to feed next."""
        room = min(self.length - len(self.ids), LONGEST_CHUNK)
        return [self.waiting.popleft() for _ in range(min(room, len(self.waiting)))]

    def answer(self) -> Answer:
        """Return the whole text, (T, ...) each."""
        return Answer(torch.tensor(self.ids), torch.cat(self.features), torch.cat(self.final))


class Answerer:
    """Lets a target go on with prompts, many at once, and keeps its hidden states."""

    def __init__(
        self, engine: Engine, fed: Callable[[list[list[int]]], None] = lambda ids: None, layers: tuple[int, ...] = ()
    ) -> None:
        """fed: called after each forward with the ids of all texts so far.

        layers: those whose features are kept; empty: the engine's own.
        """
        self.engine, self._fed, self._layers = engine, fed, layers or engine.info.feature_layers
        self._final: list[Tensor] = []
        output: Any = engine.model.get_output_embeddings()
        output.register_forward_pre_hook(lambda _, args: self._final.append(args[0][0]))

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        lengths: Sequence[int],
        temperature: float | Sequence[float] = 0.0,
        seed: int = 0,
        following: Callable[[], Sequence[int]] | None = None,
        keyed: bool = False,
    ) -> list[Answer]:
        """Write a text of lengths[n] tokens from each prompt n; end-of-text ids are tokens like any other.

        `temperature` is that of all texts, or of each. `following` gives the prompt behind an end of text. `keyed`:
        text n is drawn with the noise of requests whose seed is `seed` + n. Raises OutOfBlocks when the pool is too
        small for all.
        """
        temperatures = [temperature] * len(prompts) if isinstance(temperature, int | float) else temperature
        noise = None if keyed else torch.Generator(self.engine.model.device).manual_seed(seed)
        pool, texts = self.engine.pool, list[_Text]()
        try:
            for number, (prompt, length, heat) in enumerate(zip(prompts, lengths, temperatures, strict=True)):
                texts.append(_Text(pool.allocate(str(number), length), deque(prompt), length, heat, seed + number))
            while live := [text for text in texts if len(text.ids) < text.length]:
                self._forward(live, noise, following)
                self._fed([text.ids for text in texts])
        finally:
            for text in texts:
                pool.free(text.table)
        return [text.answer() for text in texts]

    @torch.inference_mode()
    def _forward(
        self,
        live: list[_Text],
        noise: torch.Generator | None,
        following: Callable[[], Sequence[int]] | None,
    ) -> None:
        """Feed every text its waiting ids, and let the token that the target draws next wait."""
        chunks = [text.chunk() for text in live]
        pieces = [
            Piece.chain(text.table, len(text.ids), chunk, range(len(chunk)))
            for text, chunk in zip(live, chunks, strict=True)
        ]
        self._final.clear()
        out = self.engine.forward(pack(pieces, self._layers))
        (final,) = self._final
        features = final[:, :0] if out.features is None else out.features
        lengths = [len(chunk) for chunk in chunks]
        logits = out.logits[torch.tensor(lengths).cumsum(0) - 1].float()
        tokens = logits.argmax(-1)
        heat = torch.tensor([text.temperature for text in live], dtype=torch.float64, device=logits.device)[:, None]
        if bool(heat.any()):
            divisor = heat.clamp_min(COLDEST)
            if noise is None:
                places = [(text.seed, len(text.ids) + len(chunk)) for text, chunk in zip(live, chunks, strict=True)]
                seeds, positions = torch.tensor(places, device=logits.device).unbind(1)
                ids = torch.arange(logits.shape[1], device=logits.device)
                drawn = draw(ids, logits.double() / divisor, seeds, positions)
            else:
                drawn = torch.multinomial((logits / divisor.float()).softmax(-1), 1, generator=noise)[:, 0]
            tokens = torch.where(heat[:, 0] > 0, drawn, tokens)
        parts = zip(torch.split(features, lengths), torch.split(final, lengths), strict=True)
        for text, chunk, token, (features, final) in zip(live, chunks, tokens.tolist(), parts, strict=True):
            text.features.append(features)
            text.final.append(final)
            text.ids += chunk
            if text.waiting:
                continue
            text.waiting.append(token)
            if following is not None and token in self.engine.info.eos_ids:
                text.waiting += following()
