"""The step loop of one request: draft, choose, verify, commit, learn. Each step is a record that is handed on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from coppice.errors import CoppiceError
from coppice.speculation.policy import Policy, outcomes
from coppice.speculation.sampling import draw
from coppice.speculation.tree import DraftTree, made_by, makers
from coppice.wire.generation import Finished, GenerationRequest, StepTree
from coppice.wire.verifier import NextRoot, SessionOpened, VerifyStep

from .account import Account
from .drafting import Drafting
from .output import Output
from .policies import StepPolicy
from .step import NO_DRAFT, Committed, Step
from .verifiers import LOST, TargetSession


@dataclass(frozen=True, slots=True)
class Plan:
    """What was decided about a request before its first forward."""

    policy: Policy
    budget: int
    stop_ids: frozenset[int]
    max_new_tokens: int
    draft_deadline_s: float
    """0: each head's own"""
    whole_tree: bool = False
    """verify what is drafted, whether or not it pays"""


class Decoding:
    """One request from its prompt to its end."""

    def __init__(
        self,
        request: GenerationRequest,
        plan: Plan,
        text: Committed,
        verifier: TargetSession,
        drafting: Drafting,
        policy: StepPolicy,
        output: Output,
        account: Account,
    ) -> None:
        self.request, self.plan, self.text = request, plan, text
        self.verifier, self.drafting, self.policy = verifier, drafting, policy
        self.output, self.account = output, account
        self.steps = 0
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
        self.drafting.learn(opened.features)
        self.drafting.open(self.policy.soon, self.text)
        step.root, log_prob = self._next_root(opened.next)
        self.output.commit([], (step.root, log_prob), opened.top)
        step.at.began = first = time.perf_counter_ns()
        self.account.first_token(began, first)
        try:
            while self.output.finish is None:
                await self.drafting.draft(step, self.text, self._catch_up)
                step.choice = self.policy.choose(step)
                step.at.chosen = time.perf_counter_ns()
                await self._verify(step)
                root = self._commit(step)
                step.at.committed = time.perf_counter_ns()
                self.policy.observe(step)
                self._behind = step
                self.steps = step.number
                step = self._begin(step, root)
        finally:
            self._catch_up()
        self.drafting.count(self.output.result)
        return self.output.end(first - began, step.at.began - first)

    def _begin(self, before: Step | None = None, root: int = -1) -> Step:
        """The next step, with the heads that it asks."""
        hint = before.judged.budget_hint if before else None
        step = Step(before.number + 1 if before else 1, hint, self.drafting.no_drafts(), root=root)
        if before is not None:
            step.at.began = before.at.committed
        step.asked = tuple(self.policy.heads(step))
        step.budget = self.policy.budget(self.plan.budget, hint)
        return step

    # --- verify ---

    async def _verify(self, step: Step) -> None:
        """Have the chosen tree verified, by another verifier when this one is lost."""
        routed = step.choice.routed
        draft, tree = step.drafts[routed] if routed >= 0 else NO_DRAFT, step.choice.tree
        q_rows = np.concatenate(draft.q_rows)[: len(tree)] if self.request.pq and draft.q_rows else None
        while True:
            fence = self.text.fence(step.number, self.verifier.deadline_s, draft.weights_version)
            try:
                step.verdict = await self.verifier.verify(
                    VerifyStep(fence, step.root, tree, q_rows, self.plan.whole_tree)
                )
                break
            except LOST as error:
                await self._reopen(step, error)
        step.at.sent, step.at.answered = self.verifier.exchanged

    async def _reopen(self, step: Step, why: CoppiceError) -> None:
        """Go on with another verifier, which prefills what is committed; the root is drawn already."""
        opened = await self.verifier.reopen(self.text.ids, step.number - 1, why)
        self.account.metrics.reopened.inc()
        self.drafting.learn(opened.features)

    # --- commit ---

    def _commit(self, step: Step) -> int:
        """Commit the root and the accepted path, and draw the next root; returns it, -1 when the text has ended."""
        verdict, accepted = step.judged, step.accepted
        self.text.append([step.root, *accepted], verdict.fence)
        root = None if verdict.next is None else self._next_root(verdict.next)
        step.offered = tuple(accepted) if root is None else (*accepted, root[0])
        self.drafting.settle(step)
        log_probs = verdict.log_probs or (0.0,) * len(accepted)
        shown = self._shown(step) if self.request.want_trees else ()
        taken = self.output.commit(list(zip(accepted, log_probs, strict=True)), root, verdict.top, shown)
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

    def _shown(self, step: Step) -> list[StepTree]:
        """The chosen tree, and what became of it, for people to look at; then those that lost the routing to it."""
        tree, verdict, routed = step.choice.tree, step.judged, step.choice.routed
        chosen = replace(
            self._tree(step, tree, routed, verdict.accepted),
            cut=tuple(sorted(set(range(1, len(tree) + 1)).difference(step.verified.tolist()))),
            draft_ns=step.draft_ns,
            verify_ns=step.transport_ns + verdict.timings.total_ns,
        )
        shown = [chosen]
        for at, draft in enumerate(step.drafts):
            if len(draft.scored) and 0 <= routed != at:
                right = np.flatnonzero(outcomes(draft.scored, step.offered)[1]) + 1
                shown.append(self._tree(step, draft.scored, at, right.tolist()))
        return shown

    def _tree(self, step: Step, tree: DraftTree, routed: int, accepted: Sequence[int]) -> StepTree:
        """One tree of a step for people to look at."""
        forwards, owners = makers(tree, [(draft.tree, made_by(draft.tree, draft.deltas)) for draft in step.drafts])
        return StepTree(
            root=step.root,
            tokens=tuple(tree.tokens.tolist()),
            parents=tuple(tree.parents.tolist()),
            log_probs=tuple(tree.log_probs.tolist()),
            forwards=forwards,
            pieces=tuple(self.output.piece(token) for token in tree.tokens.tolist()),
            accepted=tuple(accepted),
            root_piece=self.output.piece(step.root),
            owners=owners,
            routed=routed,
        )

    # --- learn ---

    def _catch_up(self) -> None:
        """Pass on to the client what the last commit made, and learn from it: work that no step waits for."""
        self.output.flush()
        step, self._behind = self._behind, None
        if step is not None:
            self._account(step)
            self.drafting.calibrate(step)
            self.policy.learn(step)

    def _account(self, step: Step) -> None:
        """Where the step's time went, and what dashboards read."""
        self.output.account(step)
        routed = step.choice.routed
        head = self.plan.policy.heads[routed] if routed >= 0 else ""
        self.account.step(step, head, self.output.result.accept_lengths[-1])
