"""The losses of heads, over the slots of every block or step that they draft, and how often their drafts are right."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, repeat
from operator import mul
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coppice.config.model import Expectation
from coppice.heads.checkpoints import MASKED_KINDS
from coppice.heads.models import MaskedBlockModel
from coppice.machine import this_machine
from coppice.training.answers import Answer

_BFLOAT16 = {"avx512_bf16", "amx_bf16"}
"""features of processors that multiply in bfloat16; on others it is many times slower than float32"""


@cache
def fast_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 where there are units for it, else float32."""
    has_units = device.type == "cuda" or (device.type == "cpu" and not _BFLOAT16.isdisjoint(this_machine().features))
    return torch.bfloat16 if has_units else torch.float32


def autocast(device: torch.device) -> torch.autocast:
    """Return a context of mixed precision in `fast_dtype`, which does nothing where that is float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=fast_dtype(device) is torch.bfloat16)


class Teacher:
    """The draft vocabulary that answers are taught in."""

    draft_number: Tensor  # (V,) draft id of each target id, -1 outside the draft vocabulary

    def __init__(self, output: Tensor, draft_ids: Tensor, dtype: torch.dtype = torch.float32) -> None:
        """`output`: the target's (V, hidden) layer. `draft_ids`: the (D,) ascending ids of the draft vocabulary."""
        self.draft_ids = draft_ids.to(output.device)
        self.draft_output = output[self.draft_ids].to(dtype)
        self.draft_number = torch.full((len(output),), -1, device=output.device)
        self.draft_number[self.draft_ids] = torch.arange(len(draft_ids), device=output.device)

    @torch.no_grad()
    def draft_probs(self, final: Tensor) -> Tensor:
        """Return (..., D) probabilities, renormalised over the draft vocabulary, from an answer's `final`."""
        return F.linear(final.to(self.draft_output.dtype), self.draft_output).softmax(-1, torch.float32)


Distance = Callable[[Tensor, Tensor], Tensor]
RANK_BOUNDS = (1, 4, 10)  # the highest rank of buckets 0, 1 and 2; what lies behind is bucket 3
DECAY = 0.8  # weight of an EAGLE-3 step, or of a slot of a head that drafts at once, over the one before
RANK_AFTER = 0.1  # share of the run after which the rank head learns
MASK_AFTER = 0.5
"""share of the run after which SpecBlock's valid-prefix mask holds: the later slots of a head that is often wrong would
see too few rows; without it they never learn what follows the block's own tokens"""
STEPS = 7  # of drafting that an EAGLE-3 head learns
LATER_ROWS = 3  # later blocks learn from one row in so many
ANCHOR_ROWS = 4  # blocks of masks learn from one row in so many


def soft_loss(logits: Tensor, taught: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats of (n, D) logits to (n, D) probabilities (SpecBlock, equation 6)."""
    return F.cross_entropy(logits.float(), taught)


def l1_loss(logits: Tensor, taught: Tensor) -> Tensor:
    """Return 0.1 of that cross-entropy and 0.9 of the L1 distance, 2 TV (DSpark, arXiv 2607.05147, section 5)."""
    distance = (logits.float().softmax(-1) - taught).abs().sum(-1)
    return 0.1 * soft_loss(logits, taught) + 0.9 * distance.mean()


def overlap(logits: Tensor, taught: Tensor) -> Tensor:
    """Return the (n,) shares 1 - TV of p and q: how often a token drawn from q is accepted (arXiv 2607.05147, s. 3)."""
    return torch.minimum(logits.float().softmax(-1), taught).sum(-1)


LOSSES: Mapping[str, dict[str, Any]] = {
    "specblock": {"blocks": 3, "valid_prefix": True, "every": LATER_ROWS},
    "eagle3": {"blocks": STEPS, "decay": DECAY, "every": LATER_ROWS},
    # A slot weighs exp(-1 / 4) as much as the one before (DSpark, arXiv 2607.05147, section 5).
    **{kind: {"distance": l1_loss, "decay": math.exp(-1 / 4), "every": ANCHOR_ROWS} for kind in MASKED_KINDS},
}
"""the fields of HeadLoss that a kind of head learns by"""


def visible(rows: int, slots: int, cuts: Sequence[int], chosen: Tensor) -> Tensor:
    """Return (n * K, N * K + b * n * K) bool: which slots of blocks 1..b + 1 each slot of b + 1 sees, b = len(cuts).

    `chosen` are the (n,) ascending rows that later blocks start from.
    """
    last = len(cuts)
    starts = [torch.arange(rows), *[chosen] * last]
    key_row = torch.cat([of.repeat_interleave(slots) for of in starts])
    key_slot = torch.cat([torch.arange(slots).repeat(len(of)) for of in starts])
    key_block = torch.cat([torch.full((len(of) * slots,), block) for block, of in enumerate(starts)])
    row, slot = key_row[key_block == last, None], key_slot[key_block == last, None]
    on_path = (row == key_row) & (key_slot < torch.tensor([*cuts, slots])[key_block])
    on_path &= (key_block < last) | (key_slot <= slot)
    return on_path | ((key_block == 0) & (key_row < row))


def anchored_visible(rows: Tensor, count: int, size: int, causal: bool) -> Tensor:
    """Return (n * size, count + n * size) bool: what the blocks of masks behind (n,) of `count` rows see.

    They see the committed rows up to their own and their own block, or up to themselves in it, never another one
    (DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147, section 5).
    """
    row = rows.repeat_interleave(size)
    own = row[:, None] == row
    if causal:
        slot = torch.arange(size, device=rows.device).repeat(len(rows))
        own &= slot[:, None] >= slot
    return torch.cat((row[:, None] >= torch.arange(count, device=rows.device), own), dim=1)


def attend_by(mask: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the attention of (B, H, T, D) queries under a (T, L) bool mask as (B, T, H, D)."""
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)
    return out.transpose(1, 2)


def attend_along(
    stored: list[tuple[Tensor, Tensor]], mask: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Return `attend_by` over the stored keys and values of earlier blocks and these, which are then stored, too."""
    stored.append((key, value))
    keys, values = (torch.cat(parts, dim=2) for parts in zip(*stored, strict=True))
    return attend_by(mask, query, keys, values)


@dataclass(frozen=True)
class Targets:
    """What some rows of answers are to predict, `offset` tokens further than the next one. Row i has token i + 1."""

    ids: Tensor  # (B, N + 1)
    gold: Tensor  # (B, N + 1) draft ids, -1 outside the draft vocabulary
    probs: Tensor  # (B, N + 1, D), of the token behind each position
    rows: Tensor  # (n,)

    @classmethod
    def of(cls, answer: Answer, teacher: Teacher) -> Self:
        """Take all rows of the answers, with their tokens and distributions in the draft vocabulary."""
        rows = torch.arange(answer.ids.shape[1] - 1, device=answer.ids.device)
        return cls(answer.ids, teacher.draft_number[answer.ids], teacher.draft_probs(answer.final), rows)

    def token(self, offset: int) -> Tensor:
        """Return the (B, n) ids offset + 1 behind each row; rows whose text has ended repeat its last one."""
        return self.ids[:, self._at(offset + 1)]

    def behind(self, offset: int) -> Tensor:
        """Return the (B, n) draft ids to predict `offset` places further than the next one; -1 where there is none."""
        return self.gold[:, self._at(offset + 2)].where(self.inside(offset), -1)

    def inside(self, offset: int) -> Tensor:
        """Return for (n,) rows whether their text has a token that many places further than the next one."""
        return self.rows + offset + 2 < self.ids.shape[1]

    def taught(self, admitted: Tensor, offset: int) -> Tensor:
        """Return the target's (m, D) probabilities for the m admitted rows of a (B, n) mask."""
        text, row = admitted.nonzero(as_tuple=True)
        return self.probs[text, self._at(offset + 1)[row]]

    def _at(self, offset: int) -> Tensor:
        return (self.rows + offset).clamp(max=self.ids.shape[1] - 1)


def walk(student: Any, answer: Answer, targets: Targets, later: Tensor, cuts: Sequence[int]) -> Iterator[Tensor]:
    """Yield the (B, n, K, hidden) states of a block behind every row, then of further blocks behind `later` rows."""
    model, rows = student.model, len(targets.rows)
    if isinstance(model, MaskedBlockModel):
        yield block_states(student, answer, targets)
        return
    config, stored = model.config, [list[tuple[Tensor, Tensor]]() for _ in range(model.config.num_hidden_layers)]
    condition, offset = model.condition(answer.features[:, :rows]), 0
    for block, cut in enumerate(cuts):
        mask = visible(rows, config.slots, cuts[:block], later.cpu()).to(condition.device)
        position = targets.rows[None] + (offset if config.block_rope_advance else 0)
        attends = [partial(attend_along, layer, mask) for layer in stored]
        token = student.embedding[targets.token(offset)]
        states = model(condition, token, model.rope(position, condition.dtype), attends)
        states = states.view(*condition.shape[:2], config.slots, -1)
        yield states
        condition, offset = states[:, :, cut - 1], offset + cut
        if block == 0:
            condition, targets = condition[:, later], replace(targets, rows=later)


def block_states(student: Any, answer: Answer, targets: Targets) -> Tensor:
    """Return the (B, n, K, hidden) states of the blocks of masks behind the answers' (n,) rows, all in one forward."""
    model: MaskedBlockModel = student.model
    config, rows, count = model.config, targets.rows, answer.ids.shape[1] - 1
    context = model.condition(answer.features[:, :count])
    blocks = student.embedding[config.mask_token_id].repeat(len(context), len(rows), config.block_size, 1)
    blocks[:, :, 0] = student.embedding[targets.token(0)]
    inside = torch.arange(config.block_size, device=rows.device)
    positions = torch.cat((torch.arange(count, device=rows.device), (rows[:, None] + 1 + inside).flatten()))
    seen = anchored_visible(rows, count, config.block_size, config.causal)
    attends = [partial(attend_by, seen)] * config.num_hidden_layers
    states: Tensor = model(context, blocks.flatten(1, 2), model.rope(positions[None], context.dtype), attends)
    return states.view(*blocks.shape)[:, :, config.block_size - config.slots :]


@dataclass(frozen=True)
class Slot:
    """What a head says in a slot on the n rows that the mask admits, and what it is to say."""

    logits: Tensor  # (n, D)
    normed: Tensor  # (n, hidden)
    previous: Tensor  # (n,) ids of the tokens before
    gold: Tensor  # (n,) draft ids
    taught: Tensor  # (n, D) the target's probabilities
    tried: int  # the n rows, and those whose token is outside the draft vocabulary

    @property
    def right(self) -> Tensor:
        """(n,) bool: where the best draft is the target's token."""
        return self.logits.detach().argmax(-1) == self.gold

    @property
    def counts(self) -> tuple[int, int]:
        """How many rows are right, of how many that were tried."""
        return int(self.right.sum()), self.tried


class Student(nn.Module):
    """A draft model in training, and the target's embedding, which is frozen."""

    def __init__(self, model: nn.Module, embedding: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("embedding", embedding, persistent=False)


def bucket_of(logits: Tensor, gold: Tensor) -> Tensor:
    """Return the (n,) buckets of the gold ids' ranks in (n, D) logits."""
    own = logits.gather(-1, gold[:, None])
    rank = 1 + (logits > own).sum(-1)
    return torch.bucketize(rank, torch.tensor(RANK_BOUNDS, device=rank.device))


@dataclass(frozen=True)
class HeadLoss:
    """Draft and rank losses over blocks (SpecBlock, section 3.3). A kind of head has its own number of them.

    A step of EAGLE-3 (training-time test) is a block of one slot. Heads that draft at once have a single block.
    """

    teacher: Teacher
    distance: Distance = soft_loss  # how far a slot's logits are from what the target finds likely
    blocks: int = 1
    decay: float | None = None  # weight of a slot over the one before, and the loss is their mean; None: their sum
    valid_prefix: bool = False  # whether only rows that were right so far count
    every: int = 1  # later blocks, and blocks of masks, start from every so many rows: block 1 is what most steps need
    anchor: Student | None = None
    """a frozen copy to stay near: the loss has `anchor_weight` times KL(student || copy), without a mask"""
    anchor_weight: float = 0.0
    states: Callable[[Any, Answer, Targets, Tensor, Sequence[int]], Iterator[Tensor]] = walk
    """what a kind's model computes in training"""

    def __call__(self, student: Any, answer: Answer, share: float = 1.0, cuts: Sequence[int] = ()) -> Tensor:
        """Return the loss in nats of (B, N + 1) answers after a `share` of the run; without `cuts` blocks draw them."""
        slots = self.slots(student, answer, cuts, masked=self.valid_prefix and share >= MASK_AFTER)
        anchored: Iterable[Slot | None] = self.slots(self.anchor, answer, cuts) if self.anchor else repeat(None)
        total: Any = 0.0
        weight, weights = 1.0, 0.0
        for slot, copy in zip(slots, anchored, strict=False):
            total = total + weight * self._of(slot, student.model, share >= RANK_AFTER)
            if copy is not None and len(slot.gold):
                own, its = (each.logits.float().log_softmax(-1) for each in (slot, copy))
                total = total + weight * self.anchor_weight * F.kl_div(its, own, reduction="batchmean", log_target=True)
            weights, weight = weights + weight, weight * (self.decay or 1.0)
        loss: Tensor = total if self.decay is None else total / weights
        return loss

    def held_out(self, student: Any, answer: Answer) -> Tensor:
        """Return the loss of the drafts alone, without a mask and with whole blocks: it compares over a run."""
        slots = student.model.config.slots
        return self(student, answer, share=0.0, cuts=[slots] * (STEPS if slots == 1 else 2))

    def chain(self, student: Any, answer: Answer) -> Iterator[Slot]:
        """Draft greedily behind every token while drafts are right: two blocks, 8 EAGLE-3 steps, or all slots."""
        slots = student.model.config.slots
        cuts = [slots] * (8 if slots == 1 else 2)
        return replace(self, every=1).slots(student, answer, cuts, masked=True, restart=False)

    def _of(self, slot: Slot, model: Any, ranking: bool) -> Tensor:
        """Return a slot's losses; a rank head or a confidence head, if there is one, learns if `ranking`."""
        if not len(slot.gold):
            return slot.logits.sum()
        loss = self.distance(slot.logits, slot.taught)
        if not ranking:
            return loss
        if getattr(model, "confidence_head", None) is not None:
            chance = overlap(slot.logits.detach(), slot.taught)
            confidence = model.confidence(slot.normed.detach(), slot.previous).float()
            loss = loss + F.binary_cross_entropy_with_logits(confidence, chance)
        if hasattr(model, "rank_head"):
            ranks = model.rank(slot.normed, slot.logits).float()
            loss = loss + F.cross_entropy(ranks, bucket_of(slot.logits.detach(), slot.gold))
        return loss

    def slots(
        self, student: Any, answer: Answer, cuts: Sequence[int] = (), masked: bool = False, restart: bool = True
    ) -> Iterator[Slot]:
        """Yield every block's slots; `masked`: of rows right so far (equation 5), anew in a block if `restart`."""
        model, targets = student.model, Targets.of(answer, self.teacher)
        number = int(answer.ids.sum())  # of the batch itself, so that a resumed run draws the same
        cuts = cuts or [1 + (number + 7919 * block) % model.config.slots for block in range(self.blocks)]
        later = targets.rows[number % self.every :: self.every]
        if isinstance(model, MaskedBlockModel):
            targets = replace(targets, rows=later)
        valid, offset = torch.ones_like(answer.ids[:, : len(targets.rows)], dtype=torch.bool), 0
        for cut, states in zip(cuts, self.states(student, answer, targets, later, cuts), strict=False):
            right = valid
            for at in range(states.shape[2]):
                # Only rows that the mask admits are read: the others' logits would be thrown away.
                gold = targets.behind(offset + at)
                admitted = right & (gold >= 0)
                previous = targets.token(offset + at)[admitted]
                logits, normed = model.read_behind(states[:, :, at][admitted], previous, at)
                tried = int((right & targets.inside(offset + at)).sum())
                slot = Slot(logits, normed, previous, gold[admitted], targets.taught(admitted, offset + at), tried)
                yield slot
                if masked:
                    right = admitted.clone()
                    right[admitted] = slot.right
            valid, offset = valid if restart else right, offset + cut
            if len(targets.rows) > len(later):
                valid, targets = valid[:, later], replace(targets, rows=later)


@torch.no_grad()
def measure(student: Any, loss: HeadLoss, answer: Answer) -> Tensor:
    """Draft greedily behind every token of each of the (B, N + 1) texts, and count the drafts that are right.

    Returns (B, places, 2) int64: how many are right, of how many that were tried because those before them were, at
    each place in drafting order.
    """
    texts = (Answer(*(part[at : at + 1] for part in answer)) for at in range(len(answer.ids)))
    return torch.tensor([[slot.counts for slot in loss.chain(student, text)] for text in texts])


def alphas(measured: Tensor) -> list[float]:
    """Return the share of right drafts at each place over the (B, places, 2) counts of some texts."""
    right, tried = measured.sum(0).unbind(-1)
    shares: list[float] = (right.double() / tried.clamp_min(1)).tolist()
    return shares


def accepted_length(measured: Tensor) -> float:
    """Return the tokens a step would commit with a greedy chain, the root included."""
    return 1.0 + math.fsum(accumulate(alphas(measured), mul))


LEAST_TRIALS = 30
"""of a depth on each kind of text: of deeper ones nothing is expected, and of a text with fewer its kind counts"""
_Z = 2.58


def expectation(measured: Mapping[str, Tensor]) -> Expectation:
    """Return what is expected of a head that was measured on some texts of each kind: (texts, places, 2) counts.

    Of each depth the least of all texts' shares (of those with LEAST_TRIALS) and of the lower ends of the kinds' 99%
    intervals (Wilson, 1927), as deep as every kind was tried so often: texts of one kind differ, and a request is one.
    """
    totals = {kind: counts.sum(0).tolist() for kind, counts in measured.items()}
    texts = torch.cat(list(measured.values())).tolist()
    by_depth = []
    for depth, kinds in enumerate(zip(*totals.values(), strict=True)):
        if min(tried for _, tried in kinds) < LEAST_TRIALS:
            break
        counts = [text[depth] for text in texts]
        shares = [right / tried for right, tried in counts if tried >= LEAST_TRIALS]
        for right, tried in kinds:
            share, z2 = right / tried, _Z * _Z / tried
            shares.append((share + z2 / 2 - math.sqrt(z2 * (share * (1 - share) + z2 / 4))) / (1 + z2))
        by_depth.append(round(min(max(0.0, min(shares)), 1.0), 4))
    of_kinds = {
        kind: tuple(round(right / tried, 4) for right, tried in total if tried) for kind, total in totals.items()
    }
    return Expectation(by_depth=tuple(by_depth), texts=of_kinds)
