"""The trees that heads grow from logits: how candidates are scored, which of them stay, and where the next ones start.

A tree is in lists: for some dozens of nodes a loop costs less than numpy's calls.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coppice.heads.base import DraftJob, Growth
from coppice.heads.layers import largest
from coppice.limits import MAX_TREE_NODES
from coppice.speculation import sampling
from coppice.speculation.sampling import GAMMA, MULTIPLIER_1, MULTIPLIER_2, TOKEN_STREAM
from coppice.speculation.tree import DraftTree

CONFIDENT = 0  # the bucket of a slot whose best token is expected to be the target's


class Start(NamedTuple):
    """A node that a block of the next forward starts from: slot k of the block predicts depth + k + 1."""

    node: int  # 0: the root
    depth: int
    row: int  # of the forward before, whose state at the slot is the condition
    slot: int
    sees: int  # bit e: whether entry e of the KV of this tree's earlier blocks lies on its path


class Blocks(NamedTuple):
    """What a forward predicts behind each of S starts, in K slots each."""

    tokens: list[list[list[int]]]  # (S, K, W) the slot's likeliest ids, best first
    scores: list[list[list[float]]]  # (S, K, W) their log-scores, at most 0
    spine: list[list[int]]  # (S, K) which of them is the slot's greedy token, from which the block itself goes on
    buckets: list[list[int]]  # (S, K) how sure the slot is: which of the widths is its own


@dataclass(eq=False)
class BlockTree:
    """One job's tree over its blocks: the candidates, and which of them were sent. Candidate i is node i + 1.

    What is not among the `budget` best when it comes is no candidate, unless a block goes on behind it.
    """

    job: DraftJob
    number: int  # of the job in its call
    most_starts: int  # starts of a forward, the likeliest ones
    best_child: float = 0.0
    """log-score of a node's best child: there is no start where such a child is not among the `budget` best"""
    noise: Tensor | None = None  # (depths, draft vocabulary) of positions below the root, if candidates have any
    first_row: int = 0  # of its last block, among the rows of all trees
    starts: list[Start] = field(default_factory=lambda: [Start(0, 0, 0, 0, 0)])
    entries: list[int] = field(default_factory=list)  # (E,) depths of its earlier blocks' KV entries
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)  # cumulative
    edge: float = -math.inf  # score at or below which a node to come is not among the `budget` best
    sent: list[int] = field(default_factory=list)  # a candidate's number in what was sent, 0: not sent
    block: list[int] = field(default_factory=list)
    """of the last forward (S * K,) the node whose children each slot's tokens are, -1 where they are not in the tree"""
    predictions: dict[int | None, Tensor] = field(default_factory=dict)
    """the (hidden,) un-normed state that predicted a node's children, where misses are wanted"""

    @property
    def grows(self) -> bool:
        """Whether another forward adds to it."""
        return bool(self.starts)

    def visible(self, own: Sequence[int] = ()) -> NDArray[np.bool_]:
        """Return (S * K, E + S * K): what the rows of the next blocks see, `own` (K,) of their own block as bits.

        Without `own` (S, E): which earlier entries lie on the starts' paths.
        """
        sees, earlier = [start.sees for start in self.starts], len(self.entries)
        width = earlier + len(sees) * len(own)
        if own:
            firsts = range(earlier, width, len(own))
            sees = [seen | its << first for seen, first in zip(sees, firsts, strict=True) for its in own]
        size = -(-width // 8)
        packed = np.frombuffer(b"".join([seen.to_bytes(size, "little") for seen in sees]), np.uint8)
        return np.unpackbits(packed.reshape(-1, size), axis=1, count=width, bitorder="little").view(np.bool_)

    def grow(self, blocks: Blocks, widths: Sequence[int], deeper: bool) -> None:
        """Add what a forward predicts behind the starts, and choose the next starts if there is another forward.

        `widths` says how many tokens each bucket branches into; 0 ends the block there. The greedy token is a branch of
        a slot whatever the noise of a coupled draft prefers, but for one of width 1: where its token is not the greedy
        one, the next block starts behind it.
        """
        self.block = []
        places: list[Start] = []
        slots = len(blocks.tokens[0])
        for row, (start, tokens, scores, spines, buckets) in enumerate(zip(self.starts, *blocks, strict=True)):
            node = start.node
            score = self.scores[node - 1] if node else 0.0
            alive = _alive(spines, [widths[bucket] for bucket in buckets])
            first_entry = len(self.entries) + row * slots
            for slot in range(alive):
                self.block.append(node)
                spine, bucket, ends = spines[slot], buckets[slot], slot == alive - 1
                width = min(widths[bucket], len(tokens[slot]))
                parent, above = node, score
                sees = start.sees | ((2 << slot) - 1) << first_entry
                for place in range(width) if spine < width or width == 1 else (*range(width), spine):
                    its_score = above + scores[slot][place]
                    inner = place == spine and not ends  # the block predicts on from it itself
                    if its_score <= self.edge and not inner:
                        continue
                    self.tokens.append(tokens[slot][place])
                    self.parents.append(parent)
                    self.scores.append(its_score)
                    if inner:
                        node, score = len(self.tokens), its_score
                    elif place <= spine or bucket != CONFIDENT:
                        places.append(Start(len(self.tokens), start.depth + slot + 1, row, slot, sees))
            self.block += [-1] * (slots - alive)
        self.entries += [start.depth for start in self.starts for _ in range(slots)]
        self.starts = self._best(places) if deeper else []

    def _best(self, places: list[Start]) -> list[Start]:
        """Return the `most_starts` likeliest places where a node may still be among the best; of equals the first."""
        budget = self.job.budget
        if places and len(self.scores) >= budget:
            self.edge = sorted(self.scores)[-budget]
        places.sort(key=lambda place: self.scores[place.node - 1], reverse=True)
        likeliest = places[: self.most_starts]
        return [place for place in likeliest if self.scores[place.node - 1] + self.best_child > self.edge]

    def state_behind(self, path: Sequence[int]) -> Tensor | None:
        """Return the (hidden,) state that predicted the token behind a path of tokens; None when no forward did."""
        pairs = zip(self.parents, self.tokens, strict=True)
        nodes: dict[tuple[int | None, int], int] = {pair: number for number, pair in enumerate(pairs, start=1)}
        node: int | None = 0
        for token in path:
            node = nodes.get((node, token))
        return self.predictions.get(node)

    def send(self) -> Growth:
        """Return what is new among the `budget` best candidates; a receiver prunes earlier ones that fell out."""
        sent = self.sent = self.sent + [0] * (len(self.tokens) - len(self.sent))
        count = max(sent, default=0)
        best = sorted(range(len(sent)), key=self.scores.__getitem__, reverse=True)[: self.job.budget]
        new = sorted([at for at in best if not sent[at]][: MAX_TREE_NODES - count])
        for number, at in enumerate(new, start=count + 1):
            sent[at] = number
        nodes = DraftTree(
            np.array([self.tokens[at] for at in new], np.int64),
            np.array([sent[parent - 1] if (parent := self.parents[at]) else 0 for at in new], np.int64),
            np.array([self.scores[at] for at in new], np.float32),
        )
        return Growth(self.number, nodes, last=not self.grows)


def _alive(spines: list[int], widths: list[int]) -> int:
    """Return how many slots of a block are in the tree."""
    for slot, width in enumerate(widths):
        if not width or (slot and widths[slot - 1] == 1 and spines[slot - 1]):
            return slot
    return len(widths)


def row_slices(trees: Iterable[BlockTree]) -> list[slice]:
    """Return where the rows of each tree's starts lie in a forward over those of all trees."""
    return [slice(*ends) for ends in pairwise(accumulate((len(tree.starts) for tree in trees), initial=0))]


NOISE_VALUES = 1 << 23  # of rows of noise that are kept: most positions of a draft were drafted at before


class Ranking:
    """Scores candidates of a draft vocabulary by a head's logits and the target's own noise, and grows trees of them.

    A child of a node has the score log_softmax(logits / T + noise) above its node's.
    """

    def __init__(self, target_ids: Tensor) -> None:
        """`target_ids` are the (draft vocabulary,) target ids, on the device that drafts."""
        ids = self.ids = target_ids.cpu().numpy()
        self.target_ids = target_ids

        @lru_cache(max(32, NOISE_VALUES // len(ids)))
        def noise(seed: int, position: int) -> Tensor:
            return torch.from_numpy(sampling.noise(seed, position, ids).astype(np.float32))

        self.noise = noise
        """(seed, position) -> (V,) float32. On a CPU numpy makes it in half of torch's time."""

    def couple(self, trees: Sequence[BlockTree], depths: int) -> None:
        """Give the trees of coupled jobs the noise of `depths` positions below their roots."""
        noisy = [tree for tree in trees if tree.job.noisy]
        if noisy and self.target_ids.is_cuda:
            places = np.array([(tree.job.sampling.seed, tree.job.committed_len + 1) for tree in noisy], np.uint64)
            seeds, firsts = torch.from_numpy(places.view(np.int64).T[..., None]).to(self.target_ids.device)
            at = (firsts + torch.arange(depths, device=firsts.device)).flatten()
            noise = torch_noise(seeds.expand(-1, depths).flatten(), at, self.target_ids).float()
            for tree, rows in zip(noisy, noise.view(len(noisy), depths, -1), strict=True):
                tree.noise = rows
            return
        for tree in noisy:
            first, seed = tree.job.committed_len + 1, tree.job.sampling.seed
            tree.noise = torch.stack([self.noise(seed, first + depth) for depth in range(depths)])

    def grow(
        self,
        trees: Sequence[BlockTree],
        logits: Tensor,
        widths: Sequence[int],
        deeper: bool,
        buckets: Tensor | None = None,
    ) -> None:
        """Add to the trees what (S, K, V) float32 logits, which change, predict behind the starts of them all.

        A slot branches into widths[its bucket] tokens; without (S, K) `buckets` all are of bucket 1.
        """
        # A block goes on from the greedy tokens of its slots, but for the last one.
        slots = logits.shape[1]
        coupled = slots > 1 and any(tree.noise is not None for tree in trees)
        greedy = None
        if coupled:  # on a CPU numpy's: torch's takes three to seven times as long there
            greedy = logits.argmax(-1) if logits.is_cuda else torch.from_numpy(logits.numpy().argmax(-1))
            greedy = greedy[..., None]
        slices = row_slices(trees)
        for tree, rows in zip(trees, slices, strict=True):
            first = tree.first_row = rows.start
            # Slot k's token stands k + 1 positions behind its start.
            for depth, alike in groupby(start.depth for start in tree.starts):
                end = first + len(list(alike))
                noise = None if tree.noise is None else tree.noise[depth : depth + slots]
                _score(logits[first:end], tree.job, noise)
                first = end
        width = max(1, *widths) + coupled  # room for a greedy token that the noise puts behind the others
        ranked = self.likeliest(logits, width, greedy, None if buckets is None else buckets[..., None])
        for tree, rows in zip(trees, slices, strict=True):
            tree.grow(Blocks._make(part[rows] for part in ranked), widths, deeper)

    def cross(self, trees: Sequence[BlockTree], logits: Tensor, width: int) -> None:
        """Add all paths over slots that know nothing of one another: (J, K, V) float32 logits, which change."""
        slots = logits.shape[1]
        for tree, rows in zip(trees, logits, strict=True):
            _score(rows, tree.job, None if tree.noise is None else tree.noise[:slots])
        blocks = self.likeliest(logits, width)
        for tree, of_slots, values in zip(trees, blocks.tokens, blocks.scores, strict=True):
            for slot in range(slots):
                count = len(tree.starts)
                alike = Blocks([[of_slots[slot]]] * count, [[values[slot]]] * count, [[0]] * count, [[1]] * count)
                tree.grow(alike, (0, width), slot + 1 < slots)
                if not tree.grows:
                    break

    def likeliest(
        self, scores: Tensor, width: int, greedy: Tensor | None = None, buckets: Tensor | None = None
    ) -> Blocks:
        """Return the `width` best of (S, K, V) scores in each slot, as log-scores.

        (S, K, 1) `greedy` draft ids are the last ones where they are not among the best. `buckets` are (S, K, 1).
        """
        scores = scores.log_softmax(-1)
        values, indices = largest(scores, min(width, scores.shape[-1]))
        more = () if greedy is None else (greedy, scores.gather(-1, greedy))
        best, log_scores, *others = _on_host(indices, values, *more, *(() if buckets is None else (buckets,)))
        spine: NDArray[Any] = np.zeros(best.shape[:-1], np.int64)
        if greedy is not None:
            ids, theirs = others[:2]
            is_greedy = best == ids
            spine, absent = is_greedy.argmax(-1), ~is_greedy.any(-1)
            if absent.any():
                best[absent, -1], log_scores[absent, -1] = ids[absent, 0], theirs[absent, 0]
                spine[absent] = best.shape[-1] - 1
        bucket: NDArray[Any] = np.ones_like(spine) if buckets is None else others[-1][..., 0]
        return Blocks(self.ids[best].tolist(), log_scores.tolist(), spine.tolist(), bucket.tolist())


def _score(logits: Tensor, job: DraftJob, noise: Tensor | None) -> None:
    """Turn (..., K, V) float32 logits, in place, into scores of a job's candidates with (K, V) noise."""
    if job.sampling.temperature:
        logits *= 1.0 / job.sampling.temperature
    if noise is not None:
        logits += noise


def _on_host(*parts: Tensor) -> list[NDArray[Any]]:
    """Return (..., N) tensors of integers and float32 as arrays, after one transfer from the device."""
    if not parts[0].is_cuda:
        return [part.numpy() for part in parts]
    packed = torch.cat([part if part.is_floating_point() else part.int().view(torch.float32) for part in parts], dim=-1)
    arrays = np.split(packed.cpu().numpy(), np.cumsum([part.shape[-1] for part in parts])[:-1], axis=-1)
    pairs = zip(parts, arrays, strict=True)
    return [array if part.is_floating_point() else array.view(np.int32) for part, array in pairs]


# torch has no unsigned 64-bit arithmetic. Products and sums of int64 wrap to the same bits as `sampling`'s; right
# shifts copy the sign bit and are masked.
_GAMMA, _FIRST, _SECOND = np.array((GAMMA, MULTIPLIER_1, MULTIPLIER_2), np.uint64).view(np.int64).tolist()


def torch_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Return (P, K) float64 standard Gumbel noise of (K,) token ids at (P,) absolute positions of texts.

    The hashes are those of `sampling.noise` bit for bit. seeds: (P,) int64, the bits of each text's seed.
    """
    keys = _mix(_mix(seeds + _GAMMA) + TOKEN_STREAM * _GAMMA)
    return torch_gumbel(torch_hashes(_mix(keys + positions * _GAMMA), token_ids))


def torch_hashes(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return (P, K) hashes of (K,) token ids behind (P,) keys, as int64 with the bits of the unsigned ones."""
    return _mix(keys[:, None] + token_ids[None, :] * _GAMMA)


def torch_gumbel(hashes: Tensor) -> Tensor:
    """Return float64 noise of hashes."""
    u = _shift(hashes, 12).double().add_(0.5).mul_(2.0**-52)
    return u.log_().neg_().log_().neg_()


def _mix(value: Tensor) -> Tensor:
    """Apply splitmix64's finaliser elementwise."""
    value = (value ^ _shift(value, 30)) * _FIRST
    value = (value ^ _shift(value, 27)) * _SECOND
    return value ^ _shift(value, 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    return (value >> bits) & ((1 << 64 - bits) - 1)
