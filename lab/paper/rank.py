"""How well a SpecBlock head knows where it will be right, and what trees gain from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coppice.config.sections import DrafterSettings
from coppice.engine.loading import load_engine
from coppice.heads.base import DraftJob, Head
from coppice.heads.block_head import BLOCKS, BlockHead, SpecBlockHead
from coppice.heads.checkpoints import TargetParts, load_head
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree, extend, paths, prune
from coppice.stack.spec import StackSpec
from coppice.training.answers import Answer, stacked, write_answers
from coppice.training.losses import HeadLoss, Student, Teacher, accepted_length, alphas, bucket_of
from coppice.training.progress import Progress
from coppice.wire.common import Features
from coppice.wire.drafter import Advance, OpenDraft
from lab.report import Report

KEY = 0


def wire_features(rows: Tensor, start: int, end: int) -> Features:
    """Positions start..end-1 of (N, F) features of a text as they go over the wire."""
    part = rows[start:end].cpu().contiguous()
    dtype = str(part.dtype).removeprefix("torch.")
    return Features(start, len(part), dtype, part.view(torch.uint8).numpy().tobytes())


def replay(head: Head, texts: Sequence[tuple[Answer, int]], budget: int) -> tuple[float, float, int]:
    """Draft with at most `budget` nodes a step along (T,) texts, of each of which so many tokens are the prompt.

    Returns the tokens of a mean step, the nodes of a mean step, and how many steps there were.
    """
    steps = tokens = nodes = 0
    for text, prompt in texts:
        ids: list[int] = text.ids.tolist()
        features = text.features.float()
        opening = OpenDraft("", ids[:prompt], SamplingParams(), features=wire_features(features, 0, prompt))
        for _ in head.open(KEY, opening):
            pass
        root = prompt
        while root + 1 < len(ids):
            tree = DraftTree.empty()
            for growths in head.draft([DraftJob(KEY, ids[root], root, budget, SamplingParams())]):
                for growth in growths:
                    tree = extend(tree, growth.nodes.tokens, growth.nodes.parents, growth.nodes.log_probs)
            tree, _ = prune(tree, budget)
            spelled, end = set(paths(tree)), root + 1
            while end + 1 < len(ids) and tuple(ids[root + 1 : end + 1]) in spelled:
                end += 1
            head.advance(KEY, Advance(ids[root:end], wire_features(features, root, end)))
            steps, tokens, nodes = steps + 1, tokens + end - root, nodes + len(tree)
            root = end
        head.close(KEY)
    return tokens / max(1, steps), nodes / max(1, steps), steps


BUCKETS = ("rank 1", "rank 2-4", "rank 5-10", "beyond 10")
TREES: dict[str, tuple[tuple[int, int, int, int], bool]] = {
    "rank-guided 2,4,10,0 (paper)": ((2, 4, 10, 0), True),
    "rank-guided 2,4,6,4 (released)": ((2, 4, 6, 4), True),
    "rank-guided 2,4,6,10": ((2, 4, 6, 10), True),
    "uniform 4": ((4, 4, 4, 4), False),
    "cumulative score alone, 10 a slot": ((10, 10, 10, 10), False),
}
"""widths, and whether the rank head is asked; every tree is pruned to the same number of nodes"""


class BranchingHead(SpecBlockHead):
    """A SpecBlock head whose slots branch into other widths, with its rank head or without."""

    def __init__(self, settings: DrafterSettings, widths: Sequence[int], rank_guided: bool = True) -> None:
        """Unless `rank_guided`, every slot branches into widths[1] tokens."""
        self._rank_guided = rank_guided
        BlockHead.__init__(self, settings, widths if rank_guided else (widths[1],) * len(widths))

    def buckets(self, logits: Tensor, normed: Tensor) -> Tensor | None:
        """Return the rank head's answers, or bucket 1 everywhere."""
        return super().buckets(logits, normed) if self._rank_guided else BlockHead.buckets(self, logits, normed)


def run_rank(spec: StackSpec, report: Report, prompts: Sequence[Sequence[int]], new_tokens: int, budget: int) -> None:
    """Measure the rank head of each SpecBlock head along the target's greedy answers, and its trees."""
    ranks, chains, trees = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
    read: dict[tuple[int, ...], list[tuple[Answer, int]]] = {}
    with Progress("heads", len(spec.heads)) as progress:
        for head in spec.heads:
            assert head.path is not None
            layers = load_head("specblock", head.path, spec.target).config.feature_layers
            if layers not in read:
                progress.say("the target answers")
                lengths = [len(prompt) + new_tokens for prompt in prompts]
                engine = load_engine(spec.target, kv_tokens=sum(lengths) + 32 * len(lengths))
                texts = write_answers(engine, prompts, lengths, layers=layers)
                read[layers] = list(zip(texts, map(len, prompts), strict=True))
            answers, name = read[layers], {"head": head.name}
            progress.say(f"{head.name} drafts along the answers")
            accepted, confusion = accepted_along(head.path, spec.target, [text for text, _ in answers])
            ranks += [name | {"bucket": at, **row} for at, row in zip(BUCKETS, rank_rows(confusion), strict=True)]
            shares = alphas(accepted)
            slots = len(shares) // BLOCKS
            places = {f"{at // slots + 1}.{at % slots + 1}": share for at, share in enumerate(shares)}
            chains.append(name | places | {"chain": accepted_length(accepted)})
            settings = DrafterSettings(kind="specblock", path=str(head.path), target=str(spec.target))
            for tree, (widths, guided) in TREES.items():
                tau, nodes, steps = replay(BranchingHead(settings, widths, guided), answers, budget)
                trees.append(name | {"tree": tree, "tau": tau, "nodes": nodes, "steps": steps})
            progress.add()
    percent = dict.fromkeys(("frequency", "precision", "recall", "f1"), ".1%")
    report.add_figures("rank_head", "does the rank head know where it is right?", ranks, percent)
    title = "alpha by block and slot along a greedy chain, and what it would commit"
    report.add_figures("alpha", title, chains, dict.fromkeys(chains[0].keys() - {"head", "chain"}, ".3f"))
    title = f"trees of at most {budget} nodes along the target's greedy answers"
    report.add_figures("trees", title, trees, {"tau": ".3f", "nodes": ".1f"})


@torch.no_grad()
def accepted_along(folder: Path, target: Path, texts: Sequence[Answer]) -> tuple[Tensor, Tensor]:
    """(B, places, 2) counts of how often a SpecBlock head is right along whole texts, prompts included, and (4, 4)
    counts of its drafts by the bucket of the gold token and the one that the rank head predicts.
    """
    loaded = load_head("specblock", folder, target)
    loss = HeadLoss(Teacher(TargetParts(target).output.float(), loaded.model.target_ids))
    confusion, counts = torch.zeros(len(BUCKETS), len(BUCKETS), dtype=torch.int64), list[list[tuple[int, int]]]()
    for text in texts:
        counts.append([])
        for slot in loss.chain(Student(loaded.model, loaded.embedding), stacked([text])):
            counts[-1].append(slot.counts)
            if len(slot.gold):
                places = bucket_of(slot.logits, slot.gold), loaded.model.rank(slot.normed, slot.logits).argmax(-1)
                confusion.index_put_(places, torch.ones((), dtype=torch.int64), accumulate=True)
    return torch.tensor(counts), confusion


def rank_rows(confusion: Tensor) -> list[dict[str, float]]:
    """Return frequency, precision, recall and F1 of each bucket (SpecBlock, table 3)."""
    counts = confusion.double()
    right, gold, predicted = counts.diag(), counts.sum(1), counts.sum(0)
    precision, recall = right / predicted.clamp_min(1), right / gold.clamp_min(1)
    columns = {
        "frequency": gold / gold.sum().clamp_min(1),
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / (precision + recall).clamp_min(1e-9),
    }
    return [{name: float(column[bucket]) for name, column in columns.items()} for bucket in range(len(BUCKETS))]
