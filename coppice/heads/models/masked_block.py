"""DFlash, JetSpec and DSpark drafters as one torch module: a block of mask tokens that reads the committed features.

A committed position gives each layer a key and a value made of its features alone, so it is computed once and needs no
root. The block is the root's embedding followed by those of a mask token, at positions p, p + 1, ... of a root at p.
Slot k of what is drafted predicts the token at p + k + 1. (DFlash, arXiv 2602.06036; JetSpec, arXiv 2606.18394; DSpark,
arXiv 2607.05147, section 3.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator
from torch import Tensor, nn

from coppice.heads.models.layers import Attend, DraftModel, HeadConfig, Layer, Rope, borrow, norm_of
from coppice.limits import MAX_TREE_DEPTH


class MaskedBlockConfig(HeadConfig):
    """Sizes of a head that drafts one block of mask tokens in one forward."""

    num_hidden_layers: PositiveInt = 2
    qk_norm: bool = True
    block_size: int = Field(8, ge=2, le=MAX_TREE_DEPTH)
    """rows of a block, the root's included"""
    num_target_layers: NonNegativeInt = 0
    """layers of the target, which the public loaders want to know; 0: not said"""
    mask_token_id: NonNegativeInt = 0
    """the row of the target's token embedding that stands for a token to be predicted"""
    causal: bool = False
    """whether a row of the block sees only the block's earlier ones"""
    sample_from_anchor: bool = False
    """whether the root's own row predicts a token: the one behind it"""
    markov_rank: NonNegativeInt = 0
    """rank of the table that a token adds to the logits of the next slot; 0: slots know nothing of one another"""
    confidence: bool = False
    """whether the head says how likely each slot is accepted"""
    confidence_with_markov: bool = True
    """whether the confidence reads the token before the slot"""

    @model_validator(mode="after")
    def _parts_fit(self) -> MaskedBlockConfig:
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}")
        if self.confidence and self.confidence_with_markov and not self.markov_rank:
            raise ValueError("confidence_with_markov needs a markov_rank")
        return self

    @property
    def slots(self) -> int:
        """K, how many tokens a block predicts."""
        return self.block_size - (not self.sample_from_anchor)


class DFlashConfig(MaskedBlockConfig):
    """Sizes of a DFlash head."""

    kind: ClassVar[str] = "dflash"


class JetSpecConfig(MaskedBlockConfig):
    """Sizes of a JetSpec head."""

    kind: ClassVar[str] = "jetspec"
    causal: bool = True


class DSparkConfig(MaskedBlockConfig):
    """Sizes of a DSpark head."""

    kind: ClassVar[str] = "dspark"
    sample_from_anchor: bool = True
    markov_rank: NonNegativeInt = 64
    confidence: bool = True


class _Markov(nn.Module):
    """The vanilla Markov head: W2 W1[previous token] is added to a slot's logits."""

    def __init__(self, config: MaskedBlockConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)


class _Confidence(nn.Module):
    """The confidence head, in one projection."""

    def __init__(self, config: MaskedBlockConfig) -> None:
        super().__init__()
        width = config.hidden_size + (config.markov_rank if config.confidence_with_markov else 0)
        self.proj = nn.Linear(width, 1)


class MaskedBlockModel(DraftModel):
    """The layers over a block, and what is read off its slots. The output layer is the target's."""

    config: MaskedBlockConfig
    own_output = False

    def __init__(self, config: MaskedBlockConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(config.feature_width, config.hidden_size, bias=False)
        self.hidden_norm = norm_of(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.markov_head = _Markov(config) if config.markov_rank else None
        self.confidence_head = _Confidence(config) if config.confidence else None
        self.add_output()
        borrow(self.lm_head)

    def condition(self, features: Tensor) -> Tensor:
        """Turn (..., feature width) features of committed positions into the (..., hidden) rows that layers read."""
        out: Tensor = self.hidden_norm(self.fc(features))
        return out

    def forward(self, context: Tensor | None, block: Tensor, rope: Rope, attends: Sequence[Attend]) -> Tensor:
        """(B, C, hidden) conditions and (B, R, hidden) embeddings of blocks -> (B, R, hidden) un-normed states.

        `rope` is of the C + R rows. Each attention gets the queries of the R rows, the keys and values of all. Without
        `context` the attentions know its keys and values.
        """
        for layer, attend in zip(self.layers, attends, strict=True):
            block = layer(block, rope, attend, context)
        return block

    def context_kv(self, context: Tensor, rope: Rope) -> list[tuple[Tensor, Tensor]]:
        """Return each layer's keys and values, (B, KVH, C, D) each, of (B, C, hidden) conditions."""
        projected = [layer.self_attn.project(context, rope) for layer in self.layers]  # type: ignore[operator, union-attr]
        return [(key, value) for _, key, value in projected]

    def bias(self, previous: Tensor) -> Tensor | None:
        """Return the (..., draft vocabulary) logits that (...) target ids add to the slot behind them, if any."""
        if self.markov_head is None:
            return None
        out: Tensor = self.markov_head.markov_w2(self.markov_head.markov_w1(previous))
        return out

    def read_behind(self, states: Tensor, previous: Tensor, slot: int = 0) -> tuple[Tensor, Tensor]:
        """(..., hidden) states of any slot behind (...) target ids -> logits with the bias, and normed states."""
        logits, normed = self.read(states)
        bias = self.bias(previous)
        return logits if bias is None else logits + bias, normed

    def confidence(self, normed: Tensor, previous: Tensor) -> Tensor:
        """Return the (...) logits of being accepted of slots with (..., hidden) normed states behind (...) ids."""
        assert self.confidence_head is not None
        if self.config.confidence_with_markov and self.markov_head is not None:
            normed = torch.cat((normed, self.markov_head.markov_w1(previous)), dim=-1)
        out: Tensor = self.confidence_head.proj(normed)[..., 0]
        return out
