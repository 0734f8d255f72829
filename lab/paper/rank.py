"""How well a SpecBlock head knows where it will be right."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coppice.engine.loading import load_engine
from coppice.heads.block_head import BLOCKS
from coppice.heads.checkpoints import TargetParts, load_head
from coppice.stack.spec import StackSpec
from coppice.training.answers import Answer, write_answers
from coppice.training.losses import HeadLoss, Student, Teacher, accepted_length, alphas, bucket_of
from coppice.training.progress import Progress
from lab.measuring import Report

BUCKETS = ("rank 1", "rank 2-4", "rank 5-10", "beyond 10")


def run_rank(spec: StackSpec, report: Report, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
    ranks, chains = list[dict[str, Any]](), list[dict[str, Any]]()
    answers: dict[tuple[int, ...], list[Answer]] = {}
    with Progress("heads", len(spec.heads)) as progress:
        for head in spec.heads:
            assert head.path is not None
            layers = load_head("specblock", head.path, spec.target).config.feature_layers
            if layers not in answers:
                progress.say("the target answers")
                lengths = [len(prompt) + new_tokens for prompt in prompts]
                engine = load_engine(spec.target, kv_tokens=sum(lengths) + 32 * len(lengths))
                answers[layers] = write_answers(engine, prompts, lengths, layers=layers)
            name = {"head": head.name}
            progress.say(f"{head.name} drafts along the answers")
            accepted, confusion = accepted_along(head.path, spec.target, answers[layers])
            ranks += [name | {"bucket": at, **row} for at, row in zip(BUCKETS, rank_rows(confusion), strict=True)]
            shares = alphas(accepted)
            slots = len(shares) // BLOCKS
            places = {f"{at // slots + 1}.{at % slots + 1}": share for at, share in enumerate(shares)}
            chains.append(name | places | {"chain": accepted_length(accepted)})
            progress.add()
    percent = dict.fromkeys(("frequency", "precision", "recall", "f1"), ".1%")
    report.add_figures("rank_head", "does the rank head know where it is right?", ranks, percent)
    title = "alpha by block and slot along a greedy chain, and what it would commit"
    report.add_figures("alpha", title, chains, dict.fromkeys(chains[0].keys() - {"head", "chain"}, ".3f"))


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
        for slot in loss.chain(Student(loaded.model, loaded.embedding), Answer(*(part[None] for part in text))):
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
