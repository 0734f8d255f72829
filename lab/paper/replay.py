"""Drafting along texts that are known already: what a head would gain, without a target, a pipeline or a clock.

A text that the target wrote greedily, or with keyed noise, is what it would write again, so a draft tree's accepted
path is the part of the tree that the text follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from coppice.heads.base import DraftJob, Head, Miss
from coppice.messages.steps import Advance, OpenDraft, Rejection
from coppice.speculation.routing import first_miss
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree, dedup, extend, prune
from coppice.training.data.answerer import Answer
from lab.bare import wire_features

KEY = 0
TOP_N = 32
"""likeliest ids that the target tells of a miss, as the orchestrator asks for"""

Missed = tuple[Rejection, Miss]


@dataclass(frozen=True)
class Replay:
    """Steps, tokens they committed, nodes they would have verified, and what was missed if that is wanted."""

    steps: int = 0
    tokens: int = 0
    nodes: int = 0
    misses: tuple[Missed, ...] = ()

    @property
    def tau(self) -> float:
        """Tokens a step."""
        return self.tokens / max(1, self.steps)

    def __add__(self, other: Replay) -> Replay:
        return Replay(
            self.steps + other.steps, self.tokens + other.tokens, self.nodes + other.nodes, self.misses + other.misses
        )


@dataclass(frozen=True)
class Step:
    """One step along a text: what was drafted behind its root, and the positions of this root and of the next one."""

    trees: tuple[DraftTree, ...]
    """one for each budget; the first is verified"""
    root: int
    end: int
    missed: tuple[Missed, ...]


def replay_all(head: Head, texts: Sequence[tuple[Answer, int]], budget: int) -> Replay:
    """Every (text, tokens of its prompt), one after the other."""
    return sum((replay(head, text, prompt, budget) for text, prompt in texts), Replay())


def replay(head: Head, text: Answer, prompt: int, budget: int, output: Tensor | None = None) -> Replay:
    """Draft with at most `budget` nodes a step along a (T,) text whose first `prompt` tokens are given.

    With the (V, hidden) weights of the target's output layer also note what the head missed.
    """
    taken = steps(head, text, prompt, [budget], output=output)
    return sum((Replay(1, one.end - one.root, len(one.trees[0]), one.missed) for one in taken), Replay())


def steps(
    head: Head,
    text: Answer,
    prompt: int,
    budgets: Sequence[int],
    sampling: SamplingParams | None = None,
    output: Tensor | None = None,
) -> Iterator[Step]:
    """Draft with at most so many nodes a step along a (T,) text, whose end is the last root; see `replay`."""
    ids: list[int] = text.ids.tolist()
    features, sampling = text.features.float(), sampling or SamplingParams()
    read = wire_features(features, 0, prompt)
    opening = OpenDraft("", ids[:prompt], sampling, features=read, want_misses=output is not None)
    try:
        for _ in head.open(KEY, opening):
            pass
        known = prompt
        while known + 1 < len(ids):
            trees = tuple(_drafted(head, DraftJob(KEY, ids[known], known, budget, sampling)) for budget in budgets)
            accepted = _followed(trees[0], ids[known + 1 :])
            end = min(known + 1 + accepted, len(ids) - 1)  # the next root
            rejection = None if output is None else _rejected(trees[0], text, known + 1, end, output)
            miss = head.advance(KEY, Advance(ids[known:end], wire_features(features, known, end), rejection))
            missed = () if rejection is None or miss is None else ((rejection, miss),)
            yield Step(trees, known, end, missed)
            known = end
    finally:
        head.close(KEY)


def _rejected(tree: DraftTree, text: Answer, start: int, end: int, output: Tensor) -> Rejection | None:
    """What the target said where the tree left the tokens start..end of a text; None when it held all of them."""
    missed = first_miss(tree, text.ids[start : end + 1].tolist())
    if missed is None:
        return None
    depth, node = missed
    position = start + depth
    logits = text.final[position - 1].float() @ output.T
    log_probs, top = logits.log_softmax(-1).topk(min(TOP_N, len(output)))
    tail = max(0.0, 1.0 - float(log_probs.exp().sum()))
    return Rejection(position, node, int(text.ids[position]), top.numpy(), log_probs.numpy(), tail)


def _drafted(head: Head, job: DraftJob) -> DraftTree:
    """The tree as the orchestrator would send it."""
    tree = DraftTree.empty()
    for growths in head.draft([job]):
        for growth in growths:
            tree = extend(tree, growth.nodes.tokens, growth.nodes.parents, growth.nodes.log_probs)
    merged, _, _ = dedup(tree, np.zeros(len(tree), np.uint64))
    return prune(merged, job.budget)[0]


def _followed(tree: DraftTree, following: Sequence[int]) -> int:
    """How many tokens of `following` the tree holds as a path from its root."""
    edges = zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
    children = {edge: node for node, edge in enumerate(edges, start=1)}
    node = depth = 0
    for token in following:
        node = children.get((node, token), 0)
        if not node:
            break
        depth += 1
    return depth
