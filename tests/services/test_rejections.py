"""What the orchestrator tells a head of its own misses, and that it does so only where adaptation is on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import pytest
from redis import Redis

from coppice.client.client import AsyncClient
from coppice.heads.base import DraftJob, Growth
from coppice.signals.records import demand_key
from coppice.speculation.tree import DraftTree
from coppice.stack.redis_server import LocalRedis
from orchestrator.heads import own_rejection
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
                client.set(demand_key(name), "misses")
            on = await asyncio.to_thread(start_service, "orchestrator", *flags, "--adaptation.redis", redis.url)
            await asyncio.sleep(0.5)  # it has heard what is wanted
            assert list(await generate(on, "single:reader")) == truth[len(IDS) :][:NEW]
            assert await asyncio.to_thread(eventually, lambda: len(queries(client, "reader")) == 1)
            (record,) = queries(client, "reader")
            assert (record.s, record.new_tokens) == (0.0, NEW)  # this head knows no misses
            assert list(await generate(on, "single:other")) == truth[len(IDS) :][:NEW]
            await asyncio.to_thread(off.stop)
            await asyncio.to_thread(on.stop)
    seen = head.seen[1]
    assert seen.wants_misses
    # A step commits the root and one accepted token: a rejection at every second position, told with the next step.
    wanted = list(range(len(IDS) + 2, len(IDS) + NEW - 1, 2))
    assert [one.position for one in seen.rejections] == wanted
    assert all((each.parent, each.target_id) == (1, truth[each.position]) for each in seen.rejections)
    assert [(one.wants_misses, one.rejections) for one in reads_nothing.seen] == [(False, [])]


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
    found = own_rejection(TREE, 10, offered)
    assert (found and (found.position, found.parent, found.target_id)) == expected


def test_an_empty_tree_misses_nothing() -> None:
    assert own_rejection(DraftTree.empty(), 10, [1, 2]) is None
