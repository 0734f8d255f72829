"""The step loop of one request: draft, choose, verify, commit, learn. Each step is a record that is handed on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from coppice.errors import CoppiceError
from coppice.speculation.policy import UNION
from coppice.speculation.sampling import draw
from coppice.speculation.tree import paths
from coppice.wire.common import Features
from coppice.wire.generation import Finished, GenerationRequest
from coppice.wire.verifier import NextRoot, SessionOpened, VerifyStep

from .answer import Account, Output
from .heads import NO_DRAFT, Draft, HeadSession
from .outcomes import best_path, outcomes, step_log_probs
from .step import Committed, Step, StepPolicy
from .targets import LOST, TargetSession


class Decoding:
    """One request from its prompt to its end."""

    def __init__(
        self,
        request: GenerationRequest,
        text: Committed,
        verifier: TargetSession,
        drafting: Drafting,
        policy: StepPolicy,
        output: Output,
        account: Account,
    ) -> None:
        """`request` holds the values it is decoded with, such as its budget, and no defaults."""
        self.request, self.text = request, text
        self.verifier, self.drafting, self.policy = verifier, drafting, policy
        self.output, self.account = output, account
        self._behind: Step | None = None  # a step that was not learnt from yet

    async def run(self, started: Callable[[SessionOpened | None], None]) -> Finished:
        """Decode to the end and return the summary. `started` is called once a verifier has admitted the session.

        Raises what the last verifier raised when no other took over.
        """
        if self.output.finish is not None:  # the client holds all of it, and missed only this
            started(None)
            return self.output.end(0, 0)
        began = time.perf_counter_ns()
        step = self._begin()
        self.drafting.open(step.asked, self.text)
        opened = await self.verifier.open(self.text.ids)
        self.account.opened(opened, self.verifier.preferred)
        started(opened)
        self.drafting.follow(opened.features)
        self.drafting.open(self.policy.soon, self.text)
        step.root, log_prob = self._next_root(opened.next)
        self.output.commit([], (step.root, log_prob), opened.top)
        step.began_at = first = time.perf_counter_ns()
        self.account.first_token(began, first)
        try:
            while self.output.finish is None:
                await self.drafting.draft(step, self.text, self._catch_up)
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
        self.drafting.count(self.output.result)
        return self.output.end(first - began, step.began_at - first)

    def _begin(self, before: Step | None = None, root: int = -1) -> Step:
        """The next step, with the heads that it asks."""
        hint = before.verdict.budget_hint if before else None
        step = Step(before.number + 1 if before else 1, hint, [NO_DRAFT] * len(self.drafting.heads), root=root)
        if before is not None:
            step.began_at = before.committed_at
        step.asked = tuple(self.policy.heads(step))
        step.budget = self.policy.budget(self.request.budget or 0, hint)
        return step

    # --- verify ---

    async def _verify(self, step: Step) -> None:
        """Have the chosen tree verified, by another verifier when this one is lost."""
        routed = step.choice.routed
        draft, tree = step.drafts[routed] if routed >= 0 else NO_DRAFT, step.choice.tree
        q_rows = np.concatenate(draft.q_rows)[: len(tree)] if self.request.pq and draft.q_rows else None
        while True:
            fence = self.text.fence(step.number, self.verifier.deadline_s, draft.weights_version)
            question = VerifyStep(fence, step.root, tree, q_rows, self.policy.whole_tree)
            try:
                step.verdict = await self.verifier.verify(question)
                break
            except LOST as error:
                await self._reopen(step, error)
        step.sent_at, step.answered_at = self.verifier.exchanged

    async def _reopen(self, step: Step, reason: CoppiceError) -> None:
        """Go on with another verifier, which prefills what is committed; the root is drawn already."""
        opened = await self.verifier.reopen(self.text.ids, step.number - 1, reason)
        self.account.metrics.reopened.inc()
        self.drafting.follow(opened.features)

    # --- commit ---

    def _commit(self, step: Step) -> int:
        """Commit the root and the accepted path, and draw the next root; returns it, -1 when the text has ended."""
        verdict, tree = step.verdict, step.choice.tree
        accepted: list[int] = tree.tokens[np.array(verdict.accepted, np.int64) - 1].tolist()
        self.text.append([step.root, *accepted], verdict.fence)
        root = None if verdict.next is None else self._next_root(verdict.next)
        step.offered = tuple(accepted) if root is None else (*accepted, root[0])
        self.drafting.settle(step)
        log_probs = verdict.log_probs or (0.0,) * len(accepted)
        taken = self.output.commit(list(zip(accepted, log_probs, strict=True)), root, verdict.top)
        step.num_accepted = min(taken, len(accepted))
        self.output.result.accept_lengths.append(taken)
        return -1 if root is None else root[0]

    def _next_root(self, source: NextRoot) -> tuple[int, float]:
        """The next root and its raw log-probability: drawn here from the row, or by the verifier."""
        row = source.row
        if row is None:
            assert source.drawn_id is not None  # wire.verifier.read_verify_response says so
            return source.drawn_id, source.drawn_log_prob
        token = draw(row.ids, row.log_probs, self.request.sampling.seed, len(self.text.ids))
        at = int(np.searchsorted(row.ids, token))
        return token, 0.0 if row.raw_log_probs is None else float(row.raw_log_probs[at])

    # --- learn ---

    def _catch_up(self) -> None:
        """Pass on to the client what the last commit made, and learn from it: work that no step waits for."""
        step, self._behind = self._behind, None
        self.output.flush(step)
        if step is not None:
            self.output.account(step)
            self.account.step(step, self.drafting.name(step.choice.routed), self.output.result.accept_lengths[-1])
            self.drafting.calibrate(step)
            self.policy.learn(step)


class Drafting:
    """The heads of one request: asks those that a policy picks, and waits for their trees until the deadline."""

    def __init__(self, heads: Sequence[HeadSession], deadline_s: float) -> None:
        """deadline_s: how long a step waits for drafts; 0: as long as the slowest asked head's drafts usually take."""
        self.heads, self._deadline_s = heads, deadline_s
        self._tried, self._came_true = set[int](), set[int]()  # places of the prediction, from 1: each counts once

    def name(self, number: int) -> str:
        """The name of a head; empty for none of them."""
        return self.heads[number].pool.name if number >= 0 else ""

    def open(self, numbers: Iterable[int], text: Committed) -> None:
        """Start the streams of some heads."""
        for at in numbers:
            self.heads[at].open(text.ids)

    def follow(self, features: Features | None) -> None:
        """Take the verifier's session that drafters can follow from now on."""
        for head in self.heads:
            head.window = features or head.window

    async def draft(self, step: Step, text: Committed, meanwhile: Callable[[], None]) -> None:
        """Fill in the step's drafts. `meanwhile` is called as soon as nobody waits for this process's next message."""
        if not step.asked:
            asyncio.get_running_loop().call_soon(meanwhile)  # behind the verifier's question
            return
        asked = [(at, self.heads[at]) for at in step.asked]
        step.opening = any(head.still_opening for _, head in asked)
        deadline_s = self._deadline_s or max([head.pool.deadline_s for _, head in asked])
        fence = text.fence(step.number, deadline_s)
        answers = [(at, head.ask(fence, step.root, text.ids, step.budget)) for at, head in asked]
        step.asked_at = time.perf_counter_ns()
        asyncio.get_running_loop().call_soon(meanwhile)  # behind the questions, which the step waits for
        if waited := [answer for _, answer in answers if answer is not None]:
            await asyncio.wait(waited, timeout=deadline_s)
        for at, answer in answers:
            if answer is not None:
                step.drafts[at] = self.heads[at].collect()
        step.drafted_at = time.perf_counter_ns()

    def settle(self, step: Step) -> None:
        """Tell the heads what the step committed and what they missed."""
        for at, (head, draft) in enumerate(zip(self.heads, step.drafts, strict=True)):
            if head.opening.want_misses and step.choice.routed in (at, UNION):
                start = step.verdict.fence.committed_len - len(step.verdict.accepted)
                head.reject(draft, start, step.offered)

    def calibrate(self, step: Step) -> None:
        """Learn what the heads' confidences are worth, from every node that the text says something about.

        Those of a prediction are worth what they say, and belong to this request alone.
        """
        for at, (head, draft) in enumerate(zip(self.heads, step.drafts, strict=True)):
            if head.opening.prediction:
                if step.choice.routed in (at, UNION):
                    self._count_predicted(step, draft)
            elif len(draft.tree):
                head.pool.calibration.observe(step_log_probs(draft.tree), *outcomes(draft.tree, step.offered))
                if draft.replica is not None and draft.replica.watch.expected and head.is_measured:
                    head.pool.judge(draft.replica, best_path(draft.tree, step.offered), draft.weights_version)

    def _count_predicted(self, step: Step, draft: Draft) -> None:
        """Take in what the step verified, and its text took, of a draft that was chosen or is part of what was."""
        drafted = dict(zip(paths(draft.tree), draft.predicted, strict=False))
        places = [drafted.get(path, 0) for path in paths(step.choice.tree)]
        self._tried |= {places[node - 1] for node in step.verified.tolist()} - {0}
        self._came_true |= {places[node - 1] for node in step.verdict.accepted[: step.num_accepted]} - {0}

    def count(self, result: Finished) -> None:
        """Add to an answer's summary what came of its prediction."""
        result.accepted_prediction_tokens = len(self._came_true)
        result.rejected_prediction_tokens = len(self._tried - self._came_true)
