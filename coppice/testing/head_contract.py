"""What every head has to do for a drafter, as tests of pytest."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from coppice.errors import InvalidField
from coppice.heads.base import DraftJob, Head
from coppice.limits import MAX_HEAD_NODES, MAX_TREE_NODES
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree, extend, paths, prune, validate
from coppice.wire.common import Features
from coppice.wire.drafter import Advance, OpenDraft

GREEDY = SamplingParams(seed=1)
SAMPLINGS = (GREEDY, SamplingParams(temperature=0.7, top_k=10, seed=4), SamplingParams(temperature=1.0, seed=9))
FEW = 6  # ids that texts repeat, so that heads that look for repetitions find some
TEXTS = [np.random.default_rng(length).integers(0, FEW, length).tolist() for length in (1, 2, 5, 9, 17, 40)]


class HeadContract:
    """Inherit it in a class whose name begins with Test, and make the head. Scores are compared within `tolerance`."""

    vocab_size = 64
    tolerance = 2e-3

    def make_head(self) -> Head:
        """A head without sessions, the same each time."""
        raise NotImplementedError

    def test_it_says_what_it_is(self) -> None:
        """The orchestrator knows a head by its name, and gives it features where it names layers."""
        head = self.make_head()
        assert head.description.name
        assert head.description.kind
        assert (head.blank_features(0, 1) is not None) == bool(head.description.feature_layers)

    def test_trees_are_valid(self) -> None:
        """At every budget, greedy and sampled, coupled and not."""
        head, drafted = self.make_head(), 0
        for key, text in enumerate(TEXTS):
            self._open(head, key, text)
        for budget in (0, 1, 2, 5, 31, MAX_HEAD_NODES):
            for sampling in SAMPLINGS:
                jobs = [self._job(key, text, sampling, budget) for key, text in enumerate(TEXTS)]
                for tree in self._trees(head, [*jobs[:3], *(replace(job, coupled=False) for job in jobs[3:])]):
                    validate(tree, self.vocab_size, MAX_TREE_NODES)
                    drafted += len(tree)
        assert drafted

    def test_drafting_leaves_no_trace(self) -> None:
        """The same job drafts the same tree again, and so does a head that has warmed up with other texts."""
        head, warm = self.make_head(), self.make_head()
        warm.warm_up()
        for key, text in enumerate(TEXTS):
            self._open(head, key, text)
            self._open(warm, key, text)
            for sampling in SAMPLINGS:
                job = self._job(key, text, sampling)
                first = self._tree(head, job)
                self._same(first, self._tree(head, job))
                self._same(first, self._tree(warm, job))

    def test_greedy_drafts_know_no_seed(self) -> None:
        """At temperature 0 nothing is drawn."""
        head = self.make_head()
        self._open(head, 0, TEXTS[-1])
        for seed in range(3):
            job = self._job(0, TEXTS[-1], SamplingParams(seed=seed))
            self._same(self._tree(head, job), self._tree(head, replace(job, sampling=GREEDY)))

    def test_a_session_that_advanced_drafts_as_a_fresh_one(self) -> None:
        """Steps that drafted and steps that did not, with any number of accepted tokens, leave the same state."""
        head, rng = self.make_head(), np.random.default_rng(2)
        for text in TEXTS:
            self._open(head, 0, text)
            for step in range(6):
                new = rng.integers(0, FEW, rng.integers(1, 5)).tolist()
                if step % 2:  # the root is the first of what is committed next
                    self._tree(head, replace(self._job(0, text, SAMPLINGS[step % 3]), root=new[0]))
                head.advance(0, Advance(new, self._features(head, len(text), len(new))))
                text = [*text, *new]
            self._open(head, 1, text)
            for sampling in SAMPLINGS:
                job = self._job(0, text, sampling)
                self._same(self._tree(head, job), self._tree(head, replace(job, key=1)))
            head.close(0)
            head.close(1)

    def test_sessions_know_nothing_of_each_other(self) -> None:
        """Drafted together, in any order, they get the trees that they get alone."""
        head = self.make_head()
        jobs = [self._job(key, text, SAMPLINGS[key % 3], 8 + 9 * key) for key, text in enumerate(TEXTS)]
        for job, text in zip(jobs, TEXTS, strict=True):
            self._open(head, job.key, text)
        together, backwards = self._trees(head, jobs), self._trees(head, jobs[::-1])[::-1]
        for job, text, *trees in zip(jobs, TEXTS, together, backwards, strict=True):
            alone = self.make_head()
            self._open(alone, job.key, text)
            for tree in trees:
                self._same(tree, self._tree(alone, job), job.budget)

    def test_a_closed_session_is_forgotten(self) -> None:
        """Its key may come again with another text; closing a key that is not open is no error."""
        head, fresh = self.make_head(), self.make_head()
        head.close(7)
        self._open(head, 7, TEXTS[3])
        self._tree(head, self._job(7, TEXTS[3], GREEDY))
        head.close(7)
        job = self._job(7, TEXTS[-1], GREEDY)
        for each in (head, fresh):
            self._open(each, 7, TEXTS[-1])
        self._same(self._tree(head, job), self._tree(fresh, job))

    def test_rows_of_a_sampled_chain(self) -> None:
        """A head samples a chain of one length and says from which rows, or refuses to open a session that asks."""
        head, lengths = self.make_head(), set()
        try:
            self._open(head, 0, TEXTS[-1], want_q_rows=True)
        except InvalidField:
            return
        for seed in range(5):
            job = self._job(0, TEXTS[-1], SamplingParams(temperature=1.0, seed=seed), 4)
            ((growth,),) = head.draft([replace(job, want_q_rows=True)])
            assert growth.q_rows is not None
            assert growth.q_rows.shape == (len(growth.nodes), self.vocab_size)
            np.testing.assert_allclose(growth.q_rows.sum(1), 1, atol=self.tolerance)
            assert growth.nodes.parents.tolist() == list(range(len(growth.nodes)))
            lengths.add(len(growth.nodes))
        assert len(lengths) == 1

    def _features(self, head: Head, start: int, count: int) -> Features | None:
        """Of positions, each its own, where the head reads any."""
        blank = head.blank_features(start, count)
        if blank is None or blank.inline is None:
            return None
        rows = [
            np.random.default_rng(start + at).standard_normal(len(blank.inline) // 4 // count) for at in range(count)
        ]
        return replace(blank, inline=np.array(rows, "<f4").tobytes())

    def _open(self, head: Head, key: int, text: list[int], want_q_rows: bool = False) -> None:
        for _ in head.open(key, OpenDraft("s", text, GREEDY, True, self._features(head, 0, len(text)), want_q_rows)):
            pass

    def _job(self, key: int, text: list[int], sampling: SamplingParams, budget: int = 31) -> DraftJob:
        return DraftJob(key, text[len(text) // 2], len(text), budget, sampling)

    def _tree(self, head: Head, job: DraftJob) -> DraftTree:
        return self._trees(head, [job])[0]

    def _trees(self, head: Head, jobs: Sequence[DraftJob]) -> list[DraftTree]:
        """What was streamed for each job, which ends exactly once."""
        trees, ended = [DraftTree.empty() for _ in jobs], [False] * len(jobs)
        for part in head.draft(jobs):
            for grown in part:
                assert not ended[grown.job]
                ended[grown.job] = grown.last
                trees[grown.job] = extend(trees[grown.job], grown.nodes)
        assert all(ended)
        return trees

    def _same(self, tree: DraftTree, other: DraftTree, budget: int = 31) -> None:
        """The `budget` likeliest nodes agree."""
        kept, wanted = (
            dict(zip(paths(cut), cut.log_probs.tolist(), strict=True))
            for cut, _ in (prune(each, budget) for each in (tree, other))
        )
        assert kept.keys() == wanted.keys()
        np.testing.assert_allclose([kept[path] for path in wanted], list(wanted.values()), atol=self.tolerance)
