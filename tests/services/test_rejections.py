"""What the orchestrator tells a head of its own misses, and that it does so only where adaptation is on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from redis import Redis

from coppice.adaptation.records import demand_key
from coppice.client.client import AsyncClient
from coppice.heads.base import DraftJob, Growth
from coppice.speculation.tree import DraftTree
from coppice.stack.redis_server import LocalRedis
from coppice.wire.common import Rejection
from orchestrator.head_session import own_rejection
from tests.processes import Service
from tests.recorder import Recorder, drafter_of
from tests.reference import make_tree
from tests.services.test_features import IDS, model, start_verifier, target, truth, verifier
from tests.signals import counts, eventually, queries

__all__ = ["model", "start_verifier", "target", "truth", "verifier"]  # fixtures

NEW = 30
StartService = Callable[..., Service]


class Wrong(Recorder):
    """Drafts one right token and behind it two wrong ones."""

    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        yield [Growth(at, self._tree(job), True) for at, job in enumerate(jobs)]

    def _tree(self, job: DraftJob) -> DraftTree:
        if not job.budget or job.committed_len + 3 > len(self.truth):
            return DraftTree.empty()
        right, second = self.truth[job.committed_len + 1 : job.committed_len + 3]
        return make_tree([(right, 0, -0.1), ((second + 1) % 96, 1, -0.2), ((second + 2) % 96, 1, -0.3)])


async def generate(service: Service, policy: str) -> tuple[int, ...]:
    async with AsyncClient(service.address) as client:
        answer = await client.generate(IDS, policy=policy, max_new_tokens=NEW, ignore_eos=True)
    return answer.ids


async def test_each_rejection_is_told_once_and_only_with_adaptation_on(
    start_service: StartService, verifier: Service, truth: list[int]
) -> None:
    head, reads_nothing = Wrong(truth=truth), Wrong(layers=(), truth=truth)
    with LocalRedis() as redis:
        async with drafter_of(head) as first, drafter_of(reads_nothing) as second:
            flags = ["--orchestrator.verifiers", verifier.address, "--orchestrator.draft_deadline_ms", "2000"]
            flags += ["--orchestrator.heads", f"reader={first.address}"]
            flags += ["--orchestrator.heads", f"other={second.address}"]
            off = await asyncio.to_thread(start_service, "orchestrator", *flags)
            assert list(await generate(off, "single:reader")) == truth[len(IDS) :][:NEW]
            assert (head.seen[0].wants_misses, head.seen[0].rejections) == (False, [])
            assert counts(off.metrics).produced == 0
            client = Redis.from_url(redis.url)
            for name in ("reader", "other"):
                client.set(demand_key("coppice", name), "misses")
            on = await asyncio.to_thread(start_service, "orchestrator", *flags, "--adaptation.redis", redis.url)
            await asyncio.sleep(0.5)  # it has heard what is wanted
            assert list(await generate(on, "single:reader")) == truth[len(IDS) :][:NEW]
            assert await asyncio.to_thread(eventually, lambda: len(queries(client, "reader")) == 1)
            (record,) = queries(client, "reader")
            assert (record.s, record.rejections, record.new_tokens) == (0.0, 0, NEW)  # this head knows no misses
            assert list(await generate(on, "single:other")) == truth[len(IDS) :][:NEW]
            await asyncio.to_thread(off.stop)
            await asyncio.to_thread(on.stop)
    seen = head.seen[1]
    assert seen.wants_misses
    # A step commits the root and one accepted token: a rejection at every second position, the last step's included.
    wanted = [position for position in range(len(IDS) + 2, len(IDS) + NEW + 2, 2) if position < len(IDS) + NEW]
    assert [one.position for one in seen.rejections] == wanted
    for one in seen.rejections:
        assert (one.parent, one.target_id, len(one.top_ids)) == (1, truth[one.position], 32)
        assert one.top_ids[0] == one.target_id
        assert (np.diff(one.top_log_probs) <= 0).all()
        assert one.tail == pytest.approx(1 - np.exp(one.top_log_probs.astype(np.float64)).sum(), abs=1e-5)
    assert [(one.wants_misses, one.rejections) for one in reads_nothing.seen] == [(False, [])]


def told_at(position: int) -> Rejection:
    return Rejection(position, 0, 5, np.array([5, 6]), np.array([-0.5, -1.5], np.float32), 0.2)


TREE = make_tree([(1, 0, -0.1), (2, 0, -0.2), (3, 1, -0.3), (4, 3, -0.4)])  # 1 -> 3 -> 4, and 2


@pytest.mark.parametrize(
    ("offered", "expected"),
    [
        ([9], (10, 0, 9)),
        ([1, 9], (11, 1, 9)),
        ([1, 3, 9, 8], (12, 3, 9)),
        ([1, 3, 4, 9], None),  # all of it was accepted
        ([2, 9], None),  # as far as this branch goes
        ([1, 3], None),  # the text ended inside the tree
        ([], None),
    ],
)
def test_a_head_misses_first_where_it_has_children_and_none_is_the_targets(
    offered: list[int], expected: tuple[int, int, int] | None
) -> None:
    found = own_rejection(TREE, 10, offered, None)
    assert (found and (found.position, found.parent, found.target_id)) == expected


def test_the_targets_likeliest_ids_go_along_only_where_its_walk_ended() -> None:
    for position, known in ((10, 0), (11, 2), (12, 0)):
        found = own_rejection(TREE, 10, [1, 5, 7], told_at(position))
        assert found is not None
        assert (found.position, len(found.top_ids), len(found.top_log_probs)) == (11, known, known)
        assert found.tail == (0.2 if known else 1.0)


def test_an_empty_tree_misses_nothing() -> None:
    assert own_rejection(DraftTree.empty(), 10, [1, 2], None) is None
