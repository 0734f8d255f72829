"""Heads that read features against slow, obvious references: loops, one dense forward for each node, no cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from coppice.config.model import MTP_LAYOUTS
from coppice.config.sections import TRAINED_KINDS, DrafterSettings
from coppice.engine.attention import Layer
from coppice.errors import InvalidField
from coppice.heads.base import DraftJob, Head, build_head, served_head, with_tree_shape
from coppice.heads.block_head import BEST_CHILD, BLOCKS, PARENTS, WIDTHS
from coppice.heads.checkpoints import load_head, save_head, shape_of
from coppice.heads.feature_head import FeatureHead
from coppice.heads.layers import Rotary, largest
from coppice.heads.models import Eagle3Config, Eagle3Model
from coppice.speculation.sampling import SamplingParams, noise
from coppice.speculation.tree import DraftTree, paths
from coppice.testing import HeadContract
from coppice.wire.common import Features
from coppice.wire.drafter import Advance, OpenDraft
from tests.reference import check_pool
from tests.tiny import add_mtp, make_target

VOCAB, DRAFT_VOCAB, HIDDEN = 96, 48, 32
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
}
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8, seed=7)
Tokens = tuple[int, ...]
"""a path of a tree"""


def save_random(folder: Path, kind: str, seed: int = 0, **more: object) -> Path:
    """A head of random weights, large enough that slots and nodes differ clearly."""
    if kind == "mtp":
        return add_mtp(make_target(folder, VOCAB, layers=3, tokenizer=False), **more)
    torch.manual_seed(seed)
    shape, architecture = shape_of(kind)
    config = shape.model_validate(SIZES | {"feature_layers": (2, 4, 5)} | more)
    model = architecture(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=2.0 / parameter.shape[1] ** 0.5)
    chosen = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
    model.get_buffer("d2t").copy_(chosen - torch.arange(config.draft_vocab_size))
    save_head(folder, model, config)
    return folder


@dataclass
class Text:
    """A session's text and the features of its positions."""

    ids: list[int]
    features: Tensor

    @classmethod
    def random(cls, length: int, seed: int, layers: int = 3) -> Text:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(VOCAB, (length,), generator=generator).tolist()
        return cls(ids, torch.randn(length, layers * HIDDEN, generator=generator))

    def inline(self, start: int, end: int) -> Features:
        rows = self.features[start:end]
        return Features(start, len(rows), "float32", rows.numpy().tobytes())


def opened(head: FeatureHead, key: int, text: Text, length: int, start: int = 0, misses: bool = False) -> None:
    features = text.inline(start, length)
    opening = OpenDraft(f"s{key}", text.ids[:length], GREEDY, features=features, want_misses=misses)
    for _ in head.open(key, opening):
        pass


def drafted(head: Head, jobs: Sequence[DraftJob]) -> list[dict[Tokens, float]]:
    """Each job's tree as {path of tokens: score}, from what was streamed; every job ends exactly once."""
    return [spelled(tree) for tree in HeadContract()._trees(head, jobs)]


def spelled(tree: DraftTree) -> dict[Tokens, float]:
    return dict(zip(paths(tree), tree.log_probs.tolist(), strict=True))


def best(tree: dict[Tokens, float], budget: int) -> dict[Tokens, float]:
    return dict(sorted(tree.items(), key=lambda item: -item[1])[:budget])


def assert_same(served: dict[Tokens, float], slow: dict[Tokens, float], budget: int) -> None:
    """The `budget` likeliest nodes agree (the receiver prunes; equal scores do not occur with random weights)."""
    assert best(served, budget) == pytest.approx(best(slow, budget), abs=2e-3)


@dataclass(frozen=True)
class Dense:
    """Attention under a (T, T) mask."""

    mask: Tensor

    def attend(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As Attention.attend."""
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, scale=layer.scaling, enable_gqa=True)
        return out.transpose(1, 2)


def log_scores(logits: Tensor, job: DraftJob, depth: int, ids: Tensor) -> Tensor:
    scores = (logits / (job.sampling.temperature or 1.0)).log_softmax(-1)
    if job.coupled and job.sampling.temperature:
        known = torch.from_numpy(noise(job.sampling.seed, job.committed_len + depth, ids.numpy())).float()
        scores = (scores + known).log_softmax(-1)
    return scores


class Slow:
    """A head by the book: what it says behind a path is computed anew, over all rows and without a cache.

    The best nodes of a level are expanded, and the best of all are kept.
    """

    child = 0.0
    """log-score of a node's best child: a node is expanded where such a one would be in the tree"""

    def __init__(self, folder: Path, target: Path, settings: DrafterSettings) -> None:
        loaded = load_head(settings.kind, folder, target)
        self.model, self.config, self.embedding = loaded.model, loaded.config, loaded.embedding
        self.settings, self.ids, self.depth = settings, loaded.model.target_ids, settings.depth
        self.slots: int = loaded.config.slots
        self.said: dict[Tokens, Tensor] = {}
        """of the last tree: the (draft vocabulary,) logits behind each node"""

    def logits(self, text: Text, start: int, job: DraftJob, path: Tokens) -> Tensor:
        """(draft vocabulary,) behind a path; that of its parent was asked before."""
        raise NotImplementedError

    def most(self, job: DraftJob) -> int:
        """How many nodes of a level are expanded."""
        return self.settings.top_k

    def tree(self, text: Text, start: int, job: DraftJob) -> dict[Tokens, float]:
        nodes: dict[Tokens, float] = {}
        self.said.clear()
        frontier: list[Tokens] = [()]
        for depth in range(1, self.depth + 1):
            new = []
            for path in frontier:
                with torch.inference_mode():
                    self.said[path] = self.logits(text, start, job, path)
                scores = log_scores(self.said[path], job, depth, self.ids)
                for at in scores.argsort(descending=True)[: self.settings.top_k].tolist():
                    new.append((*path, int(self.ids[at])))
                    nodes[new[-1]] = nodes.get(path, 0.0) + float(scores[at])
            new.sort(key=lambda path: -nodes[path])
            edge = edge_of(nodes, job.budget)
            frontier = [path for path in new[: self.most(job)] if nodes[path] + self.child > edge]
        return best(nodes, job.budget)


def edge_of(nodes: dict[Tokens, float], budget: int) -> float:
    """What a node must exceed to be one of the `budget` best."""
    return sorted(nodes.values(), reverse=True)[budget - 1] if len(nodes) >= budget else -np.inf


class SlowSpecBlock(Slow):
    """SpecBlock by the book: every start recomputes all committed blocks and those on its path."""

    def widths(self, logits: Tensor, normed: Tensor) -> tuple[list[int], list[int]]:
        """What the rank head says of each slot, and into how many tokens the slot branches."""
        buckets = self.model.rank(normed, logits).argmax(-1).tolist()
        return buckets, [WIDTHS[bucket] for bucket in buckets]

    def states(self, text: Text, start: int, job: DraftJob, path: list[tuple[Tensor, int, int, int]]) -> Tensor:
        """(K, hidden) of the last block of `path`: (condition, token, depth, slots seen of the block before)."""
        length, slots = job.committed_len, self.slots
        tokens = [*text.ids[start + 1 : length], job.root, *(token for _, token, _, _ in path)]
        conditions = torch.cat(
            [self.model.condition(text.features[start:length]), *(state[None] for state, _, _, _ in path)]
        )
        advance = self.model.config.block_rope_advance
        first = [*range(start, length), *(length - 1 + depth * advance for _, _, depth, _ in path)]
        rows = len(first)
        mask = torch.zeros(rows * slots, rows * slots, dtype=torch.bool)
        for row in range(rows):
            for slot in range(slots):
                for other in range(row + 1):
                    behind = other - (length - start - 1)  # 0: the block that reads the root
                    seen = slots
                    if behind >= 0 and other < row:
                        seen = path[behind][3]
                    if other == row:
                        seen = slot + 1
                    mask[row * slots + slot, other * slots : other * slots + seen] = True
        rope = self.model.rope(torch.tensor([first]), torch.float32)
        attends = self.model.attends(Dense(mask))
        with torch.inference_mode():
            out: Tensor = self.model(conditions[None], self.embedding[torch.tensor(tokens)][None], rope, attends)
        return out[0, -1]

    def tree(self, text: Text, start: int, job: DraftJob) -> dict[Tokens, float]:
        nodes: dict[Tokens, float] = {}
        self.said.clear()
        starts: list[tuple[Tokens, list[tuple[Tensor, int, int, int]]]] = [((), [])]
        for _ in range(BLOCKS):
            following = []
            for path, blocks in starts:
                states = self.states(text, start, job, blocks)
                with torch.inference_mode():
                    logits, normed = self.model.read(states)
                    buckets, widths = self.widths(logits, normed)
                chain, end = path, None
                for slot in range(self.slots):
                    width = widths[slot]
                    if not width:
                        break
                    self.said[chain] = logits[slot]
                    scores = log_scores(logits[slot], job, len(chain) + 1, self.ids)
                    greedy = int(logits[slot].argmax())  # what the block goes on from, whatever the noise prefers
                    order = scores.argsort(descending=True).tolist()
                    listed, spine = order[:width], order.index(greedy)
                    for place, at in enumerate(listed if greedy in listed else [*listed, greedy]):
                        child = (*chain, int(self.ids[at]))
                        nodes[child] = nodes.get(chain, 0.0) + float(scores[at])
                        begins = (child, [*blocks, (states[slot], child[-1], len(child), slot + 1)])
                        if at == greedy:
                            end = begins
                        elif buckets[slot] != 0 or place < spine:
                            following.append(begins)
                    assert end is not None
                    chain = end[0]
                if end is not None:
                    following.append(end)
            edge = edge_of(nodes, job.budget)
            following.sort(key=lambda begin: -nodes[begin[0]])
            most = min(12, max(1, job.budget // (4 if job.coupled and job.sampling.temperature else 8)))
            starts = [begin for begin in following[:most] if nodes[begin[0]] > edge]
        return nodes


class SlowEagle3(Slow):
    """EAGLE-3 by the book: every node recomputes all committed rows and its ancestors."""

    def logits(self, text: Text, start: int, job: DraftJob, path: Tokens) -> Tensor:
        self.states: dict[Tokens, Tensor] = self.states if path else {}
        ancestors = [(self.states[path[:at]], token) for at, token in enumerate(path)]
        self.states[path] = self.state(text, start, job, ancestors)
        logits: Tensor = self.model.read(self.states[path])[0]
        return logits

    def state(self, text: Text, start: int, job: DraftJob, path: list[tuple[Tensor, int]]) -> Tensor:
        """(hidden,) of the last of `path`: the state before and the token of each node."""
        length = job.committed_len
        tokens = [*text.ids[start + 1 : length], job.root, *(token for _, token in path)]
        with torch.inference_mode():
            hidden = torch.cat([self.model.condition(text.features[start:length]), *(state[None] for state, _ in path)])
            mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
            rope = self.model.rope(torch.arange(start, start + len(tokens))[None], torch.float32)
            embedded = self.embedding[torch.tensor(tokens)]
            out: Tensor = self.model(hidden[None], embedded[None], rope, self.model.attends(Dense(mask)))
        return out[0, -1]


class SlowMaskedBlock(Slow):
    """A block of masks by the book: one dense forward over all committed rows and the block."""

    def __init__(self, folder: Path, target: Path, settings: DrafterSettings) -> None:
        super().__init__(folder, target, settings)
        self.depth = min(self.slots, settings.depth)
        self.markov = self.model.markov_head
        self.child = BEST_CHILD if self.markov else 0.0

    def most(self, job: DraftJob) -> int:
        return min(job.budget, self.settings.top_k, PARENTS) if self.markov else job.budget

    def logits(self, text: Text, start: int, job: DraftJob, path: Tokens) -> Tensor:
        self.in_slots = self.in_slots if path else self.states(text, start, job)
        logits: Tensor = self.in_slots[len(path)] @ self.model.lm_head.weight.T
        if self.markov:
            logits = (
                logits + self.markov.markov_w2.weight @ self.markov.markov_w1.weight[path[-1] if path else job.root]
            )
        return logits

    def states(self, text: Text, start: int, job: DraftJob) -> Tensor:
        """(K, hidden) of the slots that predict, normed."""
        model, config, length = self.model, self.config, job.committed_len
        count, size = length - start, config.block_size
        block = self.embedding[torch.tensor([job.root, *[config.mask_token_id] * (size - 1)])]
        mask = torch.ones(size, count + size, dtype=torch.bool)
        if config.causal:
            mask[:, count:].tril_()
        rope = model.rope(torch.arange(start, length + size)[None], torch.float32)
        attends = self.model.attends(Dense(mask))
        out = model(model.condition(text.features[start:length])[None], block[None], rope, attends)
        states: Tensor = model.norm(out[0])[size - config.slots :]
        return states


SLOW: dict[str, type[Slow]] = {
    **dict.fromkeys(("dflash", "jetspec", "dspark"), SlowMaskedBlock),
    "specblock": SlowSpecBlock,
    **dict.fromkeys(("eagle3", "mtp"), SlowEagle3),
}


def build(kind: str, folder: Path, target: Path, **more: object) -> tuple[FeatureHead, Slow]:
    target = folder if kind == "mtp" else target
    given = {"kind": kind, "path": str(folder), "target": str(target), "kv_tokens": 2048, "threads": 1} | more
    settings = with_tree_shape(DrafterSettings.model_validate(given))
    return build_head(settings), SLOW[kind](folder, target, settings)  # type: ignore[return-value]


VARIANTS = [
    ("specblock", {}, {}),
    ("specblock", {"block_rope_advance": True, "rank_norm_topk": None, "slots": 3}, {}),
    ("specblock", {"prefix_broadcast": False, "layer_shift": False}, {}),
    ("eagle3", {}, {"top_k": 4, "depth": 5}),
    ("eagle3", {"norm_before_residual": True, "norm_before_fc": True}, {"top_k": 10, "depth": 7}),
    ("dflash", {"block_size": 5}, {}),
    ("dflash", {"sample_from_anchor": True, "num_hidden_layers": 3, "draft_vocab_size": VOCAB}, {"depth": 3}),
    ("jetspec", {"qk_norm": False}, {}),
    ("dspark", {}, {"top_k": DRAFT_VOCAB + 2, "depth": 2}),
    ("dspark", {"markov_rank": 8, "block_size": 4, "causal": True, "confidence": False}, {"top_k": 12}),
    ("dspark", {"sample_from_anchor": False, "confidence_with_markov": False}, {"top_k": 3, "depth": 4}),
    ("specblock", {"feature_layers": (6, 0, 3, 1, 4)}, {}),
    ("eagle3", {"norm_before_fc": True, "feature_layers": (7,)}, {"top_k": 1}),
    *(("mtp", {"layout": layout}, {"top_k": 5, "depth": 4}) for layout in MTP_LAYOUTS),
]


@pytest.mark.parametrize(("kind", "shape", "told"), VARIANTS)
def test_a_session_of_many_steps_drafts_what_the_slow_reference_drafts(
    kind: str, shape: dict[str, object], told: dict[str, object], target: Path, tmp_path: Path
) -> None:
    if kind == "specblock":
        shape = {("diffspec_draft_token_num" if name == "slots" else name): value for name, value in shape.items()}
    check_steps(*build(kind, save_random(tmp_path, kind, **shape), target, **told))


def check_steps(head: FeatureHead, slow: Any, sampling: SamplingParams = SAMPLED) -> None:
    """Three sessions draft over four steps what the slow reference drafts."""
    texts = [Text.random(40, seed, len(head.description.feature_layers)) for seed in range(3)]
    lengths, starts = [5, 9, 1], [0, 3, 0]
    for key, text in enumerate(texts):
        opened(head, key, text, lengths[key], starts[key])
    # Steps that accepted nothing, some and much; a draft that was ignored; a session that sits a step out.
    for step, accepted in enumerate([(0, 2, 5), (4, 0, 0), (8, 8, 1), (1, 1, 1)]):
        here = [key for key in range(3) if (step, key) != (1, 2)]
        jobs = [DraftJob(key, texts[key].ids[lengths[key]], lengths[key], 60, sampling) for key in here]
        for job, tree in zip(jobs, drafted(head, jobs), strict=True):
            assert_same(tree, slow.tree(texts[job.key], starts[job.key], job), 60)
        if step == 2:
            drafted(head, jobs[:1])  # the same once more
        for key, more in enumerate(accepted):
            old, new = lengths[key], lengths[key] + 1 + more
            head.advance(key, Advance(texts[key].ids[old:new], texts[key].inline(old, new)))
            lengths[key] = new
    for key in range(3):
        head.close(key)
    assert head.pool.free_tokens == head.pool.spare
    check_pool(head.pool)


@pytest.mark.parametrize("kind", TRAINED_KINDS)
def test_warming_up_leaves_nothing_behind(kind: str, target: Path, tmp_path: Path) -> None:
    folder = save_random(tmp_path, kind)
    for kv_tokens in (8, 4096):
        head = served_head(DrafterSettings(kind=kind, path=str(folder), target=str(target), kv_tokens=kv_tokens))
        assert isinstance(head, FeatureHead)
        assert head.forward_ns > 0 or kv_tokens == 8
        check_pool(head.pool)


@pytest.mark.parametrize("kind", TRAINED_KINDS)
def test_small_budgets_and_long_texts(kind: str, target: Path, tmp_path: Path) -> None:
    head, slow = build(kind, save_random(tmp_path, kind), target)
    head.max_context = 30
    text = Text.random(40, 1)
    opened(head, 0, text, 12)
    for budget in (0, 1, 2, 5, 60):
        job = DraftJob(0, text.ids[12], 12, budget, GREEDY)
        (tree,) = drafted(head, [job])
        assert_same(tree, slow.tree(text, 0, job) if budget else {}, budget)
    head.advance(0, Advance(text.ids[12:29], text.inline(12, 29)))
    assert drafted(head, [DraftJob(0, text.ids[29], 29, 31, GREEDY)]) == [{}]


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_features_that_do_not_fit_are_refused(kind: str, target: Path, tmp_path: Path) -> None:
    head, _ = build(kind, save_random(tmp_path, kind), target)
    text = Text.random(20, 1)
    short, wide = Features(0, 5, "float32", b"\0" * 12), Text.random(20, 1, layers=5).inline(0, 5)
    for features in (None, short, wide, text.inline(0, 4)):
        with pytest.raises(InvalidField, match=r"open\.features"):
            list(head.open(1, OpenDraft("s", text.ids[:5], GREEDY, features=features)))
        head.close(1)
    opened(head, 2, text, 5)
    with pytest.raises(InvalidField, match=r"step\.advance\.features"):
        head.advance(2, Advance(text.ids[5:7], text.inline(6, 8)))
    with pytest.raises(InvalidField, match=r"open\.want_q_rows"):
        list(head.open(3, OpenDraft("t", text.ids[:5], GREEDY, features=text.inline(0, 5), want_q_rows=True)))


@pytest.mark.parametrize("shape", [(1, 256), (3, 7, 640), (40, 100)])
def test_the_largest_of_many_rows_are_topks(shape: Tokens) -> None:
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values, places = largest(rows, 5)
    expected = rows.topk(5, dim=-1)
    assert torch.equal(values, expected.values)
    assert torch.equal(places, expected.indices)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("scaling", [YARN, LLAMA3], ids=["yarn", "llama3"])
def test_rotary_factors_are_transformers_own_whatever_the_weights_dtype(scaling: dict[str, object]) -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters={"rope_theta": 10000.0, **scaling})
    theirs, positions = LlamaRotaryEmbedding(config), torch.tensor([[0, 3, 700], [1, 2, 90]])
    for ours, expected in zip(Rotary(theirs)(positions, torch.float32), theirs(torch.empty(0), positions), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)
    model = Eagle3Model(Eagle3Config.model_validate(SIZES))
    before = model.rope(positions, torch.bfloat16)
    after = model.bfloat16().rope(positions, torch.bfloat16)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
