"""What a head says it missed the target's token by, against a full forward along the text for each node."""

from __future__ import annotations

from pathlib import Path

import pytest

from coppice.heads.base import DraftJob
from coppice.heads.feature_head import FeatureHead
from coppice.speculation.sampling import SamplingParams
from coppice.wire.common import Rejection
from coppice.wire.drafter import Advance
from tests.unit.test_feature_heads import GREEDY, SAMPLED, VOCAB, Slow, Text, build, drafted, opened, save_random

KINDS = ("specblock", "eagle3", "dspark")
Head = FeatureHead


def rejection(position: int, token: int) -> Rejection:
    return Rejection(position, 0, token)


def slow_miss(slow: Slow, path: tuple[int, ...], token: int) -> float:
    """1 - r: softmax over the draft vocabulary at T=1, by the book; 1 for an id that is not in it."""
    chances = dict(zip(slow.ids.tolist(), slow.said[path].double().softmax(-1).tolist(), strict=True))
    return 1.0 - chances.get(token, 0.0)


def chosen(slow: Slow, path: tuple[int, ...], at: int) -> int:
    """A token that the target may have chosen: in turn a likely one, any one, and one outside the vocabulary."""
    if at % 3 == 2:
        return next(token for token in range(VOCAB) if token not in slow.ids.tolist())
    order = slow.said[path].argsort(descending=True)
    return int(slow.ids[order[at % 7 + 1]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("budget", [8, 60])
def test_misses_at_every_node_of_a_draft_are_those_of_a_full_forward(
    kind: str, sampling: SamplingParams, budget: int, target: Path, tmp_path: Path
) -> None:
    head, slow = build(kind, save_random(tmp_path, kind), target)
    text = Text.random(40, 3)
    job = DraftJob(0, text.ids[9], 9, budget, sampling)
    tree = slow.tree(text, 2, job)
    paths = sorted({path[:-1] for path in tree})  # nodes with children in the tree that is sent
    assert len(paths) > 1
    for at, path in enumerate(paths):
        token = chosen(slow, path, at)
        opened(head, 0, text, 9, 2, misses=True)
        opened(head, 1, text, 5, misses=True)  # another session in the same forwards
        drafted(head, [DraftJob(1, text.ids[5], 5, 31, GREEDY), job])
        end = 10 + len(path)
        miss = head.advance(0, Advance([text.ids[9], *path], text.inline(9, end), rejection(end, token)))
        assert miss is not None
        assert miss == pytest.approx(slow_miss(slow, path, token), abs=1e-4)
        assert miss == 1.0 or token in slow.ids.tolist()
        head.close(0)
        head.close(1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_miss_before_the_end_of_the_committed_path_is_found(kind: str, target: Path, tmp_path: Path) -> None:
    """Under merge another head's nodes may lead on behind this head's first miss."""
    head, slow = build(kind, save_random(tmp_path, kind), target)
    text = Text.random(40, 1)
    opened(head, 0, text, 9, misses=True)
    drafted(head, [DraftJob(0, text.ids[9], 9, 31, GREEDY)])
    slow.tree(text, 0, DraftJob(0, text.ids[9], 9, 31, GREEDY))
    miss = head.advance(0, Advance(text.ids[9:14], text.inline(9, 14), rejection(10, text.ids[10])))
    assert miss is not None
    assert miss == pytest.approx(slow_miss(slow, (), text.ids[10]), abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_no_longer_knows_says_nothing(kind: str, target: Path, tmp_path: Path) -> None:
    head, _ = build(kind, save_random(tmp_path, kind), target)
    text = Text.random(40, 1)
    job = DraftJob(0, text.ids[9], 9, 31, GREEDY)

    def after(*, draft: bool = True, misses: bool = True, start: int = 9, position: int = 10, root: int = -1) -> bool:
        opened(head, 0, text, start, misses=misses)
        if draft:
            drafted(head, [job])
        ids = [root if root >= 0 else text.ids[start], *text.ids[start + 1 : 12]]
        found = head.advance(0, Advance(ids, text.inline(start, 12), rejection(position, 1)))
        head.close(0)
        return found is not None

    assert after()
    assert not after(draft=False)
    assert not after(misses=False)
    assert not after(position=9)
    assert not after(position=13)
    assert not after(root=(text.ids[9] + 1) % VOCAB)
    opened(head, 0, text, 9, misses=True)
    drafted(head, [job])
    assert head.advance(0, Advance(text.ids[9:12], text.inline(9, 12))) is None  # no rejection
    assert head.advance(0, Advance(text.ids[12:14], text.inline(12, 14), rejection(13, 1))) is None  # no draft of it
    head.close(0)
    opened(head, 0, text, 9, misses=True)
    drafted(head, [job])
    head.exchange(head.weights, head.models, head.routes)  # swapped meanwhile
    assert head.advance(0, Advance(text.ids[9:12], text.inline(9, 12), rejection(10, 1))) is None
