"""The step loop of one request: draft, choose, verify, commit, learn. Each step is a record that is handed on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from coppice.speculation.policy import UNION
from coppice.speculation.sampling import draw
from coppice.speculation.tree import paths
from coppice.wire.common import Features, Fence, committed_hash
from coppice.wire.generation import GenerationRequest
from coppice.wire.verifier import NextRoot, SessionOpened, VerifyStep

from .answer import Account, Output
from .heads import NO_DRAFT, Draft, HeadSession
from .step import Step, StepPolicy
from .targets import LOST, TargetSession


class Decoding:
    """One request from its prompt to its end."""

    def __init__(
        self,
        request: GenerationRequest,
        ids: list[int],
        verifier: TargetSession,
        heads: Sequence[HeadSession],
        policy: StepPolicy,
        draft_deadline_s: float,
        output: Output,
        account: Account,
    ) -> None:
        """`request` holds the values it is decoded with and no defaults. `ids`: the prompt and what was resumed.

        draft_deadline_s: how long a step waits for drafts; 0: as long as the slowest asked head's usually take.
        """
        self.request, self.verifier, self.heads, self.policy = request, verifier, heads, policy
        self.output, self.account = output, account
        self._ids, self._hash = ids, committed_hash(ids)  # committed: all but the root
        self._draft_deadline_s = draft_deadline_s
        self._behind: Step | None = None  # a step that was not learnt from yet
        # Places of the prediction, from 1, that were verified and that the text took: each counts once.
        self._tried, self._came_true = set[int](), set[int]()

    async def run(self, start: Callable[[SessionOpened | None], None]) -> None:
        """Decode to the end. `start` is called once a verifier has admitted the session.

        Raises what the last verifier raised when no other took over.
        """
        if self.output.finish is not None:  # the client holds all of it, and missed only this
            start(None)
            return
        began = time.perf_counter_ns()
        step = self._begin()
        self._open(step.asked)
        opened = await self.verifier.open(self._ids)
        start(opened)
        self._follow(opened.features)
        self._open(self.policy.soon)
        step.root, log_prob = self._next_root(opened.next)
        self.output.commit([], (step.root, log_prob), opened.top)
        step.began_at = first = time.perf_counter_ns()
        self.account.prefilled(opened, self.verifier.preferred, began, first)
        try:
            while self.output.finish is None:
                await self._draft(step)
                step.choice = self.policy.choose(step)
                step.chosen_at = time.perf_counter_ns()
                await self._verify(step)
                root = self._commit(step)
                step.committed_at = time.perf_counter_ns()
                self.policy.observe(step)
                self._behind = step
                step = self._begin(step, root)
        finally:
            self._catch_up()
            self.output.flush(None)
        result = self.account.result
        result.accepted_prediction_tokens = len(self._came_true)
        result.rejected_prediction_tokens = len(self._tried - self._came_true)
        self.account.decoded(step.began_at - first)

    def _begin(self, before: Step | None = None, root: int = -1) -> Step:
        """The next step, with the heads that it asks."""
        hint = before.verdict.budget_hint if before else None
        step = Step(before.number + 1 if before else 1, hint, [NO_DRAFT] * len(self.heads), root=root)
        if before is not None:
            step.began_at = before.committed_at
        step.asked = tuple(self.policy.heads(step))
        step.budget = self.policy.budget(self.request.budget or 0, hint)
        return step

    def _fence(self, step: Step, deadline_s: float, weights_version: int = 0) -> Fence:
        """What a message of a step says about the text that it continues."""
        return Fence(step.number, len(self._ids), self._hash, weights_version, int(deadline_s * 1e9))

    # --- draft ---

    def _open(self, heads: Iterable[int]) -> None:
        """Start the streams of some heads."""
        for at in heads:
            self.heads[at].open(self._ids)

    def _follow(self, features: Features | None) -> None:
        """Take the verifier's session that drafters can follow from now on."""
        for head in self.heads:
            head.window = features or head.window

    async def _draft(self, step: Step) -> None:
        """Fill in the step's drafts; learn from the step before while nobody waits for this process's next message."""
        loop = asyncio.get_running_loop()
        if not step.asked:
            loop.call_soon(self._catch_up)  # behind the verifier's question
            return
        asked = [(at, self.heads[at]) for at in step.asked]
        step.opening = any(head.still_opening for _, head in asked)
        deadline_s = self._draft_deadline_s or max([head.pool.deadline_s for _, head in asked])
        fence = self._fence(step, deadline_s)
        drafts = [(at, it) for at, head in asked if (it := head.ask(fence, step.root, self._ids, step.budget))]
        step.asked_at = time.perf_counter_ns()
        loop.call_soon(self._catch_up)  # behind the questions, which the step waits for
        timers = [loop.call_later(deadline_s, draft.give_up) for _, draft in drafts]
        try:
            for _, draft in drafts:
                if draft.answer is not None:
                    await draft.answer
        finally:
            for timer in timers:
                timer.cancel()
        for at, _ in drafts:
            step.drafts[at] = self.heads[at].collect()
        step.drafted_at = time.perf_counter_ns()

    # --- verify ---

    async def _verify(self, step: Step) -> None:
        """Have the chosen tree verified, by another verifier when this one is lost: it prefills what is committed."""
        routed = step.choice.routed
        draft, tree = step.drafts[routed] if routed >= 0 else NO_DRAFT, step.choice.tree
        q_rows = np.concatenate(draft.q_rows)[: len(tree)] if self.request.pq and draft.q_rows else None
        while True:
            fence = self._fence(step, self.verifier.deadline_s, draft.weights_version)
            question = VerifyStep(fence, step.root, tree, q_rows, self.policy.whole_tree)
            try:
                step.verdict = await self.verifier.verify(question)
                break
            except LOST as error:
                opened = await self.verifier.reopen(self._ids, step.number - 1, error)  # the root is drawn already
                self.account.metrics.reopened.inc()
                self._follow(opened.features)
        step.sent_at, step.answered_at = self.verifier.exchanged

    # --- commit ---

    def _commit(self, step: Step) -> int:
        """Commit the root and the accepted path, and draw the next root; returns it, -1 when the text has ended."""
        verdict, tree = step.verdict, step.choice.tree
        accepted: list[int] = tree.tokens[np.array(verdict.accepted, np.int64) - 1].tolist()
        self._ids += [step.root, *accepted]
        self._hash = verdict.fence.committed_hash
        root = None if verdict.next is None else self._next_root(verdict.next)
        step.offered = tuple(accepted) if root is None else (*accepted, root[0])
        for at, (head, draft) in enumerate(zip(self.heads, step.drafts, strict=True)):
            if head.opening.want_misses and step.choice.routed in (at, UNION):
                head.reject(draft, verdict.fence.committed_len - len(accepted), step.offered)
        log_probs = verdict.log_probs or (0.0,) * len(accepted)
        step.num_tokens = self.output.commit(list(zip(accepted, log_probs, strict=True)), root, verdict.top)
        return -1 if root is None else root[0]

    def _next_root(self, source: NextRoot) -> tuple[int, float]:
        """The next root and its raw log-probability: drawn here from the row, or by the verifier."""
        row = source.row
        if row is None:
            assert source.drawn_id is not None  # wire.verifier.read_verify_response says so
            return source.drawn_id, source.drawn_log_prob
        token = draw(row.ids, row.log_probs, self.request.sampling.seed, len(self._ids))
        at = int(np.searchsorted(row.ids, token))
        return token, 0.0 if row.raw_log_probs is None else float(row.raw_log_probs[at])

    # --- learn ---

    def _catch_up(self) -> None:
        """Pass on to the client what the last commit made, and learn from it: work that no step waits for."""
        step, self._behind = self._behind, None
        self.output.flush(step)
        if step is None:
            return
        routed = step.choice.routed
        self.account.step(step, self.heads[routed].pool.name if routed >= 0 else "")
        for at, (head, draft) in enumerate(zip(self.heads, step.drafts, strict=True)):
            if head.opening.prediction:  # it is worth what it says, and belongs to this request alone
                if routed in (at, UNION):
                    self._count_predicted(step, draft)
            elif len(draft.tree):
                head.learn(draft, step.offered)
        self.policy.learn(step)

    def _count_predicted(self, step: Step, draft: Draft) -> None:
        """Take in what the step verified, and its text took, of a draft that was chosen or is part of what was."""
        drafted = dict(zip(paths(draft.tree), draft.predicted, strict=False))
        places = [drafted.get(path, 0) for path in paths(step.choice.tree)]
        self._tried |= {places[node - 1] for node in step.verified.tolist()} - {0}
        self._came_true |= {places[node - 1] for node in step.verdict.accepted[: step.num_accepted]} - {0}
