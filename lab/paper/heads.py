"""The heads that the SpecBlock paper compares with (SpecBlock, appendix A.4), which a drafter and `coppice train head`
find as entry points.

`medusa` has K independent heads on the target's features, `parallelspec` reads K mask tokens behind the prefix: both
predict all of a draft's tokens in one forward, no slot knowing of another. Medusa reads the target's last hidden state;
ours reads the features of the layers that it names, which are fused first, as EAGLE-3 does it.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor, nn

from coppice.config.sections import DrafterSettings
from coppice.engine.rows import Tail
from coppice.heads.feature_head import FeatureHead, FeatureSession, Inputs, Rows
from coppice.heads.layers import Attend, DraftModel, HeadConfig, Layer, Rope, norm_of
from coppice.heads.tree import BlockTree
from coppice.training.answers import Answer
from coppice.training.heads import FeatureHeadInTraining
from coppice.training.losses import DECAY, Targets, anchored_visible, attend_by


class MedusaConfig(HeadConfig):
    """Sizes of a Medusa head: it has no attention and no KV."""

    kind: ClassVar[str] = "medusa"
    num_hidden_layers: NonNegativeInt = 0
    slots: PositiveInt = 5  # K, how many offsets there is a head for


class _Offset(nn.Module):
    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.residual = nn.Linear(config.hidden_size, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        nn.init.zeros_(self.residual.bias)

    def forward(self, fused: Tensor) -> Tensor:
        return fused + F.silu(self.residual(fused))


class MedusaModel(DraftModel):
    """The features fused, and K heads on them. Head k predicts the token k + 2 places behind the features' own."""

    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(config.feature_width, config.hidden_size, bias=False)
        self.norm = norm_of(config)
        self.heads = nn.ModuleList(_Offset(config) for _ in range(config.slots))
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    def forward(self, features: Tensor) -> Tensor:
        """(..., feature width) features -> (..., K, hidden) states, one for each offset."""
        fused = self.norm(self.fc(features))
        return torch.stack([head(fused) for head in self.heads], dim=-2)

    def read(self, states: Tensor, slot: int = 0) -> tuple[Tensor, Tensor]:
        """(..., hidden) states of one offset -> (..., draft vocabulary) logits, and the states."""
        offset: Any = self.heads[slot]
        return offset.lm_head(states), states


class ParallelSpecConfig(HeadConfig):
    kind: ClassVar[str] = "parallelspec"
    num_hidden_layers: PositiveInt = 1
    slots: PositiveInt = 5  # K, how many mask tokens follow the prefix


class ParallelSpecModel(DraftModel):
    """The layers over prefix rows and mask tokens.

    A row of the prefix is the features of a position beside the token behind it. Mask k of the group behind a row
    predicts the token k + 1 places behind the row's token; it stands k + 1 places behind the row.
    """

    config: ParallelSpecConfig

    def __init__(self, config: ParallelSpecConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.condition_proj = nn.Linear(config.feature_width, hidden, bias=False)
        self.condition_norm, self.token_norm = norm_of(config), norm_of(config)
        self.fuse = nn.Linear(2 * hidden, hidden, bias=False)
        self.mask_tokens = nn.Embedding(config.slots, hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.add_output()

    def prefix(self, features: Tensor, token: Tensor) -> Tensor:
        """(..., feature width) features and (..., hidden) token embeddings -> (..., hidden) rows of the prefix."""
        condition = self.condition_norm(self.condition_proj(features))
        out: Tensor = self.fuse(torch.cat((condition, self.token_norm(token)), dim=-1))
        return out

    def forward(self, rows: Tensor, rope: Rope, attends: Sequence[Attend]) -> Tensor:
        """(B, T, hidden) rows of prefixes and mask tokens -> (B, T, hidden) un-normed states."""
        for layer, attend in zip(self.layers, attends, strict=True):
            rows = layer(rows, rope, attend)
        return rows


class AtOnceHead(FeatureHead):
    """Predicts all of a draft's tokens in one forward: the tree is every combination of the slots' `top_k` tokens."""

    def __init__(self, settings: DrafterSettings) -> None:
        super().__init__(settings)
        self.deepest = min(self.config.slots, self.settings.depth)

    def grow(self, trees: Sequence[BlockTree]) -> Iterator[Sequence[BlockTree]]:
        logits = self.predict(trees).float()
        for tree in trees:
            self._sessions[tree.job.key].finish(tree.job.committed_len)
        self.ranking.couple(trees, self.deepest)
        self.ranking.cross(trees, logits, self.settings.top_k)
        yield trees

    @abstractmethod
    def predict(self, trees: Sequence[BlockTree]) -> Tensor:
        """Return (J, deepest, draft vocabulary) logits of each slot behind each job's root; rows end up in KV."""


class MedusaHead(AtOnceHead):
    """A trained set of Medusa heads: they read the last committed position's features alone, and not the root."""

    kind = "medusa"
    shape = MedusaConfig, MedusaModel

    def prefill(self, session: FeatureSession, upto: int) -> None:
        session.finish(upto)

    def predict(self, trees: Sequence[BlockTree]) -> Tensor:
        rows = self.root_rows(trees)
        assert rows.features is not None
        states = self.timed(self.model, rows.features[list(rows.outputs)].to(self.device))
        slots = range(self.deepest)
        return self.timed(lambda: torch.stack([self.model.read(states[:, slot], slot)[0] for slot in slots], dim=1))


class ParallelSpecHead(AtOnceHead):
    """A trained ParallelSpec drafter. A draft's masks lie behind the rows in KV until later rows take their place."""

    kind = "parallelspec"
    shape = ParallelSpecConfig, ParallelSpecModel

    def scratch(self, tree: BlockTree) -> int:
        return self.deepest

    def committed_rows(self, session: FeatureSession, upto: int, root: int | None) -> Rows:
        """Add a group of masks behind the root; what a mask reads beside its position is of no account."""
        rows = super().committed_rows(session, upto, root)
        if root is None or rows.features is None:
            return rows
        (tail,), masks = rows.tails, self.deepest
        visible = self.visible(len(rows.tokens) + masks)
        return Rows(
            [*rows.tokens, *[0] * masks],
            np.append(rows.positions, np.arange(masks) + upto),
            (Tail(tail.table, tail.prefix, visible),),
            torch.cat((rows.features, rows.features.new_zeros(masks, rows.features.shape[1]))),
        )

    def predict(self, trees: Sequence[BlockTree]) -> Tensor:
        inputs = self.inputs(self.root_rows(trees))  # of each job the last mask's row is kept
        masks = inputs.outputs[:, None] + torch.arange(1 - self.deepest, 1, device=self.device)
        logits: Tensor = self.timed(lambda: self.model.read(self.run(inputs, masks)[masks])[0])
        return logits

    def run(self, inputs: Inputs, masks: Tensor | None = None) -> Tensor:
        """Return (N, hidden) un-normed states of rows of target features, but that those at (J, masks) are masks."""
        rows = self.model.prefix(inputs.features, inputs.embeddings[0])
        if masks is not None:
            rows[masks] = self.model.mask_tokens.weight[: self.deepest]
        rope = self.model.rope(inputs.positions, self.dtype)
        states: Tensor = self.model(rows[None], rope, inputs.attends)
        return states[0]


def slot_states(student: Any, answer: Answer, targets: Targets, later: Tensor, cuts: Sequence[int]) -> Iterator[Tensor]:
    """Yield the (B, N, K, hidden) states of all slots behind every row of the answers, of a head that drafts at once.

    The masks of all of ParallelSpec's rows share one forward, and see one another as SpecBlock's appendix A.4 has it.
    """
    model: MedusaModel | ParallelSpecModel = student.model
    features = answer.features[:, : len(targets.rows)]
    if isinstance(model, MedusaModel):
        yield model(features)
        return
    rows, slots = targets.rows, model.config.slots
    prefix = model.prefix(features, student.embedding[targets.token(0)])  # (B, N, hidden)
    texts, count, hidden = prefix.shape
    masks = model.mask_tokens.weight.repeat(texts, count, 1)
    positions = torch.cat((rows, (rows[:, None] + 1 + torch.arange(slots, device=rows.device)).flatten()))
    causal = torch.ones(count, count, dtype=torch.bool, device=rows.device).tril()
    seen = torch.cat((F.pad(causal, (0, count * slots)), anchored_visible(rows, count, slots, causal=True)))
    rope = model.rope(positions[None], prefix.dtype)
    states = model(torch.cat((prefix, masks), dim=1), rope, [partial(attend_by, seen)] * model.config.num_hidden_layers)
    yield states[:, count:].view(texts, count, slots, hidden)


LOSS: dict[str, Any] = {"decay": DECAY, "states": slot_states}  # what both kinds of head learn by
paper_head = partial(FeatureHeadInTraining, learns_by=LOSS)  # makes a head of one of these kinds to be trained
