"""The draft heads as torch modules, for training and serving.

SpecBlock (sections 3.1 and 3.2, appendix B) has K slots a row, each with condition, token and a position query. EAGLE-3
is one layer over the token embedding beside the fused features. An MTP head is one over the embedding beside the
target's last hidden state.

DFlash, JetSpec and DSpark are one module: a block of mask tokens that reads the committed features. A committed
position gives each layer a key and a value made of its features alone, so it is computed once and needs no root. The
block is the root's embedding followed by those of a mask token, at positions p, p + 1, ... of a root at p. Slot k of
what is drafted predicts the token at p + k + 1. (DFlash, arXiv 2602.06036; JetSpec, arXiv 2606.18394; DSpark, arXiv
2607.05147, section 3.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator
from torch import Tensor, nn

from coppice.engine import attention as packed
from coppice.engine.kv_cache import KVShape
from coppice.heads.layers import MLP, Attend, Attention, DraftModel, HeadConfig, Layer, Rope, Rotary, largest, norm_of
from coppice.limits import MAX_TREE_DEPTH


class SpecBlockConfig(HeadConfig):
    kind: ClassVar[str] = "specblock"
    num_hidden_layers: PositiveInt = 2
    slots: PositiveInt = Field(4, alias="diffspec_draft_token_num", description="K, positions a block predicts")
    rank_norm_topk: PositiveInt | None = 20
    """the rank features are normalised over the so many most probable ids, None: over all; as released: 20"""
    block_rope_advance: bool = False
    """whether a later block's rotary positions move on by the depth it starts at; the released weights' do not"""
    prefix_broadcast: bool = True  # whether every slot reads condition and token, not the first alone (ablation)
    layer_shift: bool = True  # whether slot k - 1 is mixed into slot k between layers (ablation)


class BlockInput(nn.Module):
    """Condition, token and position query of each slot, normalised and fused (SpecBlock, equation 2)."""

    frozen: Tensor | None = None

    def __init__(self, config: SpecBlockConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.condition_proj = nn.Linear(config.feature_width, hidden, bias=False)
        self.condition_norm, self.token_norm, self.query_norm = (norm_of(config) for _ in range(3))
        self.position_queries = nn.Embedding(config.slots, hidden)
        self.fuse = nn.Linear(3 * hidden, hidden, bias=False)
        nn.init.normal_(self.position_queries.weight, std=0.02)

    def forward(self, condition: Tensor, token: Tensor, broadcast: bool = True) -> Tensor:
        """(B, N, hidden) conditions and token embeddings -> (B, N, K, hidden); broadcast: into every slot."""
        shared = self.condition_norm(condition), self.token_norm(token), torch.zeros_like(condition)
        # fuse [c, t, q] = fuse [c, t, 0] + fuse [0, 0, q]: the first term is the same in every slot.
        of_prefix: Tensor = self.fuse(torch.cat(shared, dim=-1))
        of_query = self.constant() if self.frozen is None else self.frozen
        slots = of_prefix[..., None, :]
        if not broadcast:
            slots = F.pad(slots, (0, 0, 0, len(of_query) - 1))
        return slots + of_query

    def constant(self) -> Tensor:
        """Make the (K, hidden) terms of the position queries."""
        query = self.query_norm(self.position_queries.weight)
        of_query: Tensor = self.fuse(F.pad(query, (2 * query.shape[-1], 0)))
        return of_query


RANK_FEATURES, RANK_HIDDEN = 15, 256
BUCKETS, _TOP = 4, 10


class SpecBlockModel(DraftModel):
    """Layers with the shift between them, and the rank head.

    A row is a block of K slots, and slot k predicts the token k + 1 places behind the row's token.
    """

    config: SpecBlockConfig

    def __init__(self, config: SpecBlockConfig) -> None:
        super().__init__(config)
        hidden, layers = config.hidden_size, config.num_hidden_layers
        self.input_layer = BlockInput(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(layers))
        self.shift_proj = nn.ModuleList(
            nn.Linear(2 * hidden, hidden, bias=False) for _ in range(layers - 1 if config.layer_shift else 0)
        )
        self.add_output()
        self.rank_head = nn.Sequential(
            nn.Linear(hidden + RANK_FEATURES, RANK_HIDDEN, bias=False),
            nn.SiLU(),
            nn.Linear(RANK_HIDDEN, BUCKETS, bias=False),
        )

    def condition(self, features: Tensor) -> Tensor:
        """Turn (..., feature width) features into (..., hidden) conditions of first blocks (equation 1)."""
        out: Tensor = self.input_layer.condition_proj(self.scaled(features))
        return out

    def rope(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        """Return the (B, N * K, D) rotary factors of rows at (B, N) positions: slot k stands k + 1 further."""
        slots = positions[..., None] + torch.arange(1, self.config.slots + 1, device=positions.device)
        return self.rotary(slots.flatten(1), dtype)

    def forward(self, condition: Tensor, token: Tensor, rope: Rope, attends: Sequence[Attend]) -> Tensor:
        """(B, N, hidden) conditions and token embeddings -> (B, N, K, hidden) un-normed states.

        `rope` and each layer's attention are of the N * K slots in row-major order.
        """
        states: Tensor = self.input_layer(condition, token, self.config.prefix_broadcast)
        shape = states.shape
        for number, (layer, attend) in enumerate(zip(self.layers, attends, strict=True)):
            if number and self.config.layer_shift:
                before = torch.cat((states[..., :1, :], states[..., :-1, :]), dim=-2)
                states = self.shift_proj[number - 1](torch.cat((states, before), dim=-1))  # equation 3
            states = layer(states.reshape(shape[0], -1, shape[-1]), rope, attend).view(shape)
        return states

    def rank(self, normed: Tensor, logits: Tensor) -> Tensor:
        """(..., 4) bucket logits; no gradient reaches the trunk (equation 4).

        A draft distribution is 15 numbers (appendix B): log-probabilities of the ten most probable ids, logit gaps 1-2,
        1-3 and 1-5, p(top-1), entropy in nats.
        """
        wide, most = logits.detach().float(), self.config.rank_norm_topk
        top, _ = largest(wide, max(_TOP, most or 0))
        log_probs = (wide if most is None else top[..., :most]).log_softmax(-1)
        below = top[..., :1] - top
        best = log_probs.amax(-1, keepdim=True) - below[..., :_TOP]
        entropy = -log_probs.exp().mul_(log_probs).sum(-1, keepdim=True)
        features = torch.cat((best, below[..., 1:3], below[..., 4:5], best[..., :1].exp(), entropy), dim=-1)
        out: Tensor = self.rank_head(torch.cat((normed.detach(), features.to(normed.dtype)), dim=-1))
        return out


class Eagle3Config(HeadConfig):
    """Sizes of an EAGLE-3 head: it drafts as a head of blocks with one slot each would."""

    kind: ClassVar[str] = "eagle3"
    slots: ClassVar[int] = 1
    block_rope_advance: ClassVar[bool] = True
    num_hidden_layers: PositiveInt = 1
    norm_before_residual: bool = False  # the residual is the normed hidden state (speculators)
    norm_before_fc: bool = False  # features are normed before they are fused (speculators)
    norm_output: bool = False  # the next level reads the normed state (EAGLE 3.1, speculators)


class _MidLayer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.hidden_norm, self.input_layernorm = norm_of(config), norm_of(config)
        self.post_attention_layernorm = norm_of(config)
        self.self_attn, self.mlp = Attention(config, inputs=2), MLP(config)
        self.normed_residual = config.norm_before_residual

    def forward(self, embedding: Tensor, hidden: Tensor, rope: Rope, attend: Attend) -> Tensor:
        normed = self.hidden_norm(hidden)
        states = torch.cat((self.input_layernorm(embedding), normed), dim=-1)
        hidden = (normed if self.normed_residual else hidden) + self.self_attn(states, rope, attend)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3Model(DraftModel):
    """The layer behind the fused features."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        wide = config.feature_width
        self.fc: nn.Module = nn.Linear(wide, config.hidden_size, bias=False)
        self.input_norm = norm_of(config, wide) if config.norm_before_fc else None
        self.midlayer = _MidLayer(config)
        self.add_output()

    def condition(self, features: Tensor) -> Tensor:
        """Turn (..., feature width) features into (..., hidden) fused ones."""
        features = self.scaled(features)
        out: Tensor = self.fc(features if self.input_norm is None else self.input_norm(features))
        return out

    def forward(self, hidden: Tensor, embedding: Tensor, rope: Rope, attends: Sequence[Attend]) -> Tensor:
        """(B, N, hidden) fused features or states, and embeddings -> (B, N, hidden) states, normed if `norm_output`."""
        out: Tensor = self.midlayer(embedding, hidden, rope, *attends)
        return self.norm(out) if self.config.norm_output else out

    def read(self, states: Tensor, slot: int = 0) -> tuple[Tensor, Tensor]:
        """(..., hidden) states -> (..., draft vocabulary) logits, and (..., hidden) normed states."""
        if not self.config.norm_output:
            return super().read(states, slot)
        logits: Tensor = self.lm_head(states)
        return logits, states


class MtpConfig(Eagle3Config):
    kind: ClassVar[str] = "mtp"


class MtpModel(Eagle3Model):
    """The MTP head in a target's checkpoint: EAGLE-3's over the target's last hidden state as it is, with transformers'
    MtpLayer (DeepSeek-V3, arXiv 2412.19437, section 2.2).
    """

    def __init__(self, config: MtpConfig, layer: Any, rotary: Any, shape: KVShape) -> None:
        """layer: with its weights; its attention is Coppice's and keeps `shape` of a row. rotary: the target's."""
        DraftModel.__init__(self, config)
        self.add_output()
        self.fc, self.input_norm = nn.Identity(), None
        self.midlayer, self.norm, self.rotary, self.kv_shapes = layer, layer.post_norm, Rotary(rotary), [shape]
        layer.post_norm, layer.use_post_norm = None, False

    def attends(self, attention: packed.Attention) -> list[Any]:
        """Return the mask, positions and cache that the layer takes."""
        layer: Any = self.midlayer
        window = getattr(layer.mtp_block.self_attn, "sliding_window", None)
        return [packed.LayerMask(attention, window), None, None]


class MaskedBlockConfig(HeadConfig):
    """Sizes of a head that drafts one block of mask tokens in one forward."""

    num_hidden_layers: PositiveInt = 2
    shared_output: bool = True
    qk_norm: bool = True
    block_size: int = Field(8, ge=2, le=MAX_TREE_DEPTH)  # rows of a block, the root's included
    num_target_layers: NonNegativeInt = 0  # layers of the target, which the public loaders want to know; 0: not said
    mask_token_id: NonNegativeInt = 0  # the row of the target's token embedding that stands for a token to be predicted
    causal: bool = False  # whether a row of the block sees only the block's earlier ones
    sample_from_anchor: bool = False  # whether the root's own row predicts a token: the one behind it
    markov_rank: NonNegativeInt = 0
    """rank of the table that a token adds to the logits of the next slot; 0: slots know nothing of one another"""
    markov_drafts: bool = False
    """whether the table has a row for each draft id, in order of the target's, and one for all other tokens"""
    confidence: bool = False  # whether the head says how likely each slot is accepted
    confidence_with_markov: bool = True  # whether the confidence reads the token before the slot

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
    kind: ClassVar[str] = "dflash"


class JetSpecConfig(MaskedBlockConfig):
    kind: ClassVar[str] = "jetspec"
    causal: bool = True


class DSparkConfig(MaskedBlockConfig):
    kind: ClassVar[str] = "dspark"
    sample_from_anchor: bool = True
    markov_rank: NonNegativeInt = 64
    confidence: bool = True


class MaskedBlockModel(DraftModel):
    """The layers over a block, and what is read off its slots."""

    config: MaskedBlockConfig

    def __init__(self, config: MaskedBlockConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(config.feature_width, config.hidden_size, bias=False)
        self.hidden_norm = norm_of(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.markov_head = self.confidence_head = None
        if config.markov_rank:  # W2 W1[previous token] is added to a slot's logits
            count = config.draft_vocab_size + 1 if config.markov_drafts else config.vocab_size
            table = nn.Embedding(count, config.markov_rank)
            output = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)
            self.markov_head = nn.ModuleDict({"markov_w1": table, "markov_w2": output})
        if config.confidence:
            width = config.hidden_size + (config.markov_rank if config.confidence_with_markov else 0)
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(width, 1)})
        self.add_output()

    def condition(self, features: Tensor) -> Tensor:
        """Turn (..., feature width) features of committed positions into the (..., hidden) rows that layers read."""
        out: Tensor = self.hidden_norm(self.fc(self.scaled(features)))
        return out

    def forward(self, context: Tensor | None, block: Tensor, rope: Rope, attends: Sequence[Attend]) -> Tensor:
        """(B, C, hidden) conditions and (B, R, hidden) embeddings of blocks -> (B, R, hidden) un-normed states.

        `rope` is of the C + R rows. Each attention gets the queries of the R rows, the keys and values of all. Without
        `context` the attentions know its keys and values.
        """
        if self.embedding_scale != 1.0:
            block = block * self.embedding_scale
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
        out: Tensor = self.markov_head["markov_w2"](self._row_of(previous))
        return out

    def _row_of(self, previous: Tensor) -> Tensor:
        """Return the (..., rank) rows of (...) target ids in the Markov table."""
        assert self.markov_head is not None
        if self.config.markov_drafts:
            ids = self.get_buffer("d2t") + torch.arange(self.config.draft_vocab_size, device=previous.device)
            number = torch.searchsorted(ids, previous)
            is_draft = ids[number.clamp(max=len(ids) - 1)] == previous
            previous = number.where(is_draft, len(ids))
        row: Tensor = self.markov_head["markov_w1"](previous)
        return row

    def read_behind(self, states: Tensor, previous: Tensor, slot: int = 0) -> tuple[Tensor, Tensor]:
        """(..., hidden) states of any slot behind (...) target ids -> logits with the bias, and normed states."""
        logits, normed = self.read(states)
        bias = self.bias(previous)
        return logits if bias is None else logits + bias, normed

    def confidence(self, normed: Tensor, previous: Tensor) -> Tensor:
        """Return the (...) logits of being accepted of slots with (..., hidden) normed states behind (...) ids."""
        assert self.confidence_head is not None
        if self.config.confidence_with_markov and self.markov_head is not None:
            normed = torch.cat((normed, self._row_of(previous)), dim=-1)
        out: Tensor = self.confidence_head["proj"](normed)[..., 0]
        return out
