"""The step loop of one request: draft, verify, commit. Reads top to bottom; the parts are in the modules it names."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from coppice.errors import CoppiceError, InternalError, InvalidField
from coppice.limits import MAX_TREE_NODES
from coppice.messages.generation import Chunk, Finished, FinishReason, GenerationRequest, Origin, StepTree
from coppice.messages.steps import Fence, NextRoot, Rejection, Verdict, VerifyStep, committed_hash
from coppice.speculation.calibration import step_log_probs
from coppice.speculation.policy import UNION, Choice, Policy
from coppice.speculation.routing import first_miss, outcomes, sum_confidence
from coppice.speculation.sampling import draw
from coppice.speculation.tree import DraftTree, forwards_of, made_by, prune, select
from coppice.telemetry import OrchestratorMetrics
from orchestrator.auto.arms import Arm
from orchestrator.auto.chooser import Chooser, StepSeen
from orchestrator.drafters import Draft, HeadSession
from orchestrator.tokenizer import TextStream
from orchestrator.verifiers import LOST, TargetSession


@dataclass(frozen=True)
class Plan:
    """What was decided about a request before its first forward."""

    policy: Policy
    budget: int
    stop_ids: frozenset[int]
    max_new_tokens: int
    draft_deadline_s: float  # 0: each head's own
    whole_tree: bool = False  # verify what is drafted, whether or not it pays


class Decoding:
    """One request from its prompt to its end. `emit` takes every chunk as soon as it is certain."""

    def __init__(
        self,
        request: GenerationRequest,
        ids: list[int],
        plan: Plan,
        verifier: TargetSession,
        heads: list[HeadSession],
        text: TextStream,
        metrics: OrchestratorMetrics,
        emit: Callable[[Chunk], None],
        auto: Chooser | None = None,
    ) -> None:
        """`ids`: the prompt and what is resumed behind it; `auto` chooses among the heads, else the policy asks all.

        Raises InvalidField when `ids` go on behind an end.
        """
        self.request, self.plan, self.verifier, self.heads = request, plan, verifier, heads
        self.text, self.metrics, self.emit, self.auto = text, metrics, emit, auto
        self.arm = Arm(plan.policy.name, plan.policy, tuple(range(len(heads))))
        self.ids = ids  # committed: prompt, what was resumed, and new tokens but for the root
        self.hash = committed_hash(ids)
        self.prompt_tokens = len(ids) - len(request.resume_ids)
        self.left = plan.max_new_tokens
        self.chunk: Chunk | None = None  # certain and not sent yet
        self.step = 0
        self.hint: int | None = None  # of the last verdict: how many nodes to draft
        self.asked: list[int] = []  # of a step: the arm's heads, of a cascade those that were
        self.opening = False  # of a step: one of them had still to take in the text
        self.aside: dict[int, Draft] = {}  # of a step: what heads said that the arm does not ask
        self.later: list[Callable[[], None]] = []  # what is to be learnt from the last step
        self.finish: FinishReason | None = None
        self.result = Finished("length", self.prompt_tokens, 0, [], [], [])
        self.timings = self.result.timings
        self._resume()

    async def run(self) -> Finished:
        """Decode to the end; returns the summary. Raises what the last verifier raised when no other took over."""
        if self.finish is not None:  # the client holds all of it, and missed only this
            self.result.finish_reason = self.finish
            return self.result
        began = time.perf_counter_ns()
        self._choose()
        for at in self.arm.heads if self.plan.budget else ():
            self.heads[at].open(self.ids)
        opened = await self.verifier.open(self.ids)
        for head in self.heads:
            head.learn(opened.features)
        for at in self.auto.soon if self.auto else ():
            self.heads[at].prepare(self.ids)
        root = self._commit([], self._next_root(opened.next))
        first = last = time.perf_counter_ns()
        self.timings.prefill_ns = first - began
        try:
            while self.finish is None:
                self.step += 1
                drafts = await self._draft(root)
                choice = self._combine(drafts)
                verdict = await self._verify(root, choice, drafts)
                root = self._settle(root, drafts, choice, verdict)
                now = time.perf_counter_ns()
                self._account(now - last, drafts, choice, verdict)
                self._judge(now - last, drafts, verdict)
                last = now
        finally:
            self._catch_up()
        timings = self.timings
        timings.decode_ns = last - first
        elsewhere = timings.draft_ns + timings.transport_ns + timings.verify_ns + timings.accept_ns
        timings.commit_ns = max(0, timings.decode_ns - elsewhere)
        self.result.finish_reason = self.finish
        return self.result

    def _resume(self) -> None:
        """Take in the tokens that the client holds as if they had been made here; their text is known to it."""
        for token in self.request.resume_ids:
            if self.finish is not None:
                raise InvalidField("resume_ids", f"go on behind the answer's end ({self.finish})")
            _, stopped = self.text.push(token)
            self.left -= 1
            self.finish = self._finish_reason(token, stopped)

    # --- choose ---

    def _choose(self) -> None:
        """Whom the next step asks."""
        if self.auto is not None:
            self.arm = self.auto.decide(self.hint)

    def _judge(self, step_ns: int, drafts: list[Draft], verdict: Verdict) -> None:
        """Tell `auto` what the step came to, and choose the next one's arm."""
        if self.auto is None:
            return
        times, nodes = verdict.timings, self.result.verified_nodes[-1]
        rows_ns = times.forward_ns - (times.plain_ns or times.forward_ns)
        accepted, asked = len(verdict.accepted), tuple(self.asked)
        self.auto.observe(StepSeen(step_ns / 1e9, rows_ns / 1e9, accepted, asked, self.opening))
        self.metrics.auto_choices.labels(self.arm.name).inc()
        heard = {at: drafts[at] for at in self.asked} | self.aside
        trees = {at: draft.tree for at, draft in (heard if len(self.arm.heads) > 1 else self.aside).items()}
        if self.auto.quick in heard:
            alone = asked == (self.auto.quick,)
            self.later.append(partial(self._promised, self.auto.quick, heard[self.auto.quick], accepted, alone))
        self.aside = {}
        if nodes or not verdict.pruned:
            start = len(self.ids) - len(verdict.accepted)
            self.later.append(partial(self._compare, trees, start, nodes if verdict.pruned else MAX_TREE_NODES))
        self._choose()

    def _promised(self, at: int, draft: Draft, accepted: int, alone: bool) -> None:
        """Tell `auto` what a head's tree promised."""
        assert self.auto is not None
        self.auto.promised(sum_confidence(self._scored(at, draft)), 1 + accepted, alone)

    def _compare(self, trees: dict[int, DraftTree], start: int, nodes: int) -> None:
        """Tell `auto` what heads drafted for the tokens from `start` on, each as if it had been verified alone."""
        assert self.auto is not None
        for at, tree in trees.items():
            self.auto.drafted(self.plan.policy.heads[at], start, prune(tree, nodes)[0])
        self.auto.committed(self.ids)

    # --- draft ---

    @property
    def _budget(self) -> int:
        """How many nodes to draft; at a hint of 0 one to see what it gains, by `auto`'s rare tries as many as ever."""
        if self.hint is None or self.plan.whole_tree or (self.auto and not self.hint):
            return self.plan.budget
        return min(self.plan.budget, max(1, self.hint))

    async def _draft(self, root: int) -> list[Draft]:
        """The tree of every head of the arm, as far as it came within the deadline."""
        self.asked, self.opening = [], False
        drafts = [Draft() for _ in self.heads]
        if not self.arm.heads or not self.plan.budget:
            asyncio.get_running_loop().call_soon(self._catch_up)  # behind the verifier's question
            return drafts
        began = time.perf_counter_ns()
        await self._ask(self.arm.first, root, drafts)
        if (rest := self.arm.heads[len(self.arm.first) :]) and self._goes_on(drafts):
            await self._ask(rest, root, drafts)
        self.timings.draft_ns += time.perf_counter_ns() - began
        return drafts

    async def _ask(self, numbers: Sequence[int], root: int, drafts: list[Draft]) -> None:
        """Wait for the trees of some of the arm's heads."""
        asked = {at: self.heads[at] for at in numbers}
        self.asked += numbers
        self.opening |= any(head.still_opening for head in asked.values())
        deadline_s = self.plan.draft_deadline_s or max(head.pool.deadline_s for head in asked.values())
        fence = self._fence(deadline_s)
        answers = {at: head.ask(fence, root, self.ids, self._budget) for at, head in asked.items()}
        beside = [at for at in self._aside() if self.heads[at].ask(fence, root, self.ids, self._budget) is not None]
        asyncio.get_running_loop().call_soon(self._catch_up)  # behind the questions, which the step waits for
        if waited := [answer for answer in answers.values() if answer is not None]:
            await asyncio.wait(waited, timeout=deadline_s)
        for at, answer in answers.items():
            if answer is not None:
                drafts[at] = self.heads[at].collect()
        self.aside = {at: self.heads[at].collect() for at in beside}

    def _goes_on(self, drafts: list[Draft]) -> bool:
        """Whether a cascade asks its second head too."""
        assert self.auto is not None
        (first,) = self.asked
        return self.auto.goes_on(sum_confidence(self._scored(first, drafts[first])))

    def _scored(self, at: int, draft: Draft) -> DraftTree:
        """A head's tree with its calibrated log-probs."""
        if draft.scored is None:
            draft.scored = self.heads[at].pool.calibration.of(draft.tree)
        return draft.scored

    def _aside(self) -> list[int]:
        """Heads that draft while the step waits for the arm's anyway, so that the text may tell what they gain."""
        if self.auto is None or self.arm.first != self.arm.heads:  # a cascade does not wait for long
            return []
        usual = [head.pool.usual_s for head in self.heads]
        wait_s = max(usual[at] or 0.0 for at in self.arm.heads)
        known = [(at, took) for at, took in enumerate(usual) if took is not None and at not in self.arm.heads]
        return [at for at, took in known if took < wait_s / 2 and self.auto.hears(self.plan.policy.heads[at])]

    def _combine(self, drafts: list[Draft]) -> Choice:
        """The tree to verify: the policy's choice, the only head's when one was asked."""
        if len(self.asked) == 1 and len(tree := drafts[self.asked[0]].tree):
            return Choice(prune(tree, self._budget)[0], self.asked[0])
        trees, calibrations = [draft.tree for draft in drafts], [head.pool.calibration for head in self.heads]
        return self.arm.policy.choose(trees, calibrations, self._budget)

    # --- verify ---

    def _fence(self, deadline_s: float, weights_version: int = 0) -> Fence:
        return Fence(self.step, len(self.ids), self.hash, weights_version, int(deadline_s * 1e9))

    async def _verify(self, root: int, choice: Choice, drafts: list[Draft]) -> Verdict:
        began = time.perf_counter_ns()
        draft = drafts[choice.routed] if choice.routed >= 0 else Draft()
        q_rows = np.concatenate(draft.q_rows)[: len(choice.tree)] if self.request.pq and draft.q_rows else None
        tree, whole = choice.tree, self.plan.whole_tree
        if choice.routed >= 0 and not whole:  # a union is calibrated already
            calibration = self.heads[choice.routed].pool.calibration
            tree = self._scored(choice.routed, draft) if tree is draft.tree else calibration.of(tree)
        while True:
            fence = self._fence(self.verifier.deadline_s, draft.weights_version)
            try:
                verdict = await self.verifier.verify(VerifyStep(fence, root, tree, q_rows, whole))
                break
            except LOST as error:
                await self._reopen(error)
        times = verdict.timings
        self.timings.transport_ns += time.perf_counter_ns() - began - times.total_ns
        self.timings.verify_ns += times.total_ns - times.accept_ns
        self.timings.accept_ns += times.accept_ns
        self.timings.target_forward_ns += times.forward_ns
        self.hint = verdict.budget_hint
        return verdict

    async def _reopen(self, why: CoppiceError) -> None:
        """Go on with another verifier, which prefills what is committed; the root is drawn already."""
        opened = await self.verifier.reopen(self.ids, self.step - 1, why)
        self.metrics.reopened.inc()
        for head in self.heads:
            head.learn(opened.features)

    # --- commit ---

    def _settle(self, root: int, drafts: list[Draft], choice: Choice, verdict: Verdict) -> int:
        """Commit the root and the accepted path, draw the next root and learn from what was offered."""
        start = len(self.ids) + 1  # where the root's children stand
        accepted = [int(token) for token in choice.tree.tokens[np.array(verdict.accepted, np.int64) - 1]]
        self.ids += (root, *accepted)
        self.hash = committed_hash((root, *accepted), self.hash)
        if (verdict.fence.committed_len, verdict.fence.committed_hash) != (len(self.ids), self.hash):
            raise InternalError("the verifier committed other tokens than it accepted")
        following = None if verdict.next is None else self._next_root(verdict.next)
        offered = accepted if following is None else [*accepted, following[0]]
        for number, (head, draft) in enumerate(zip(self.heads, drafts, strict=True)):
            head.learn(verdict.features)
            if head.opening.want_misses and choice.routed in (number, UNION):
                rejection = _own_rejection(draft, start, offered, verdict.rejection)
                if rejection is not None:
                    head.reject(rejection)
        self.later.append(partial(self._calibrate, drafts, offered))
        log_probs = verdict.log_probs or (0.0,) * len(accepted)
        tree = self._shown(root, drafts, choice, verdict) if self.request.want_trees else None
        return self._commit(list(zip(accepted, log_probs, strict=True)), following, tree)

    def _calibrate(self, drafts: list[Draft], offered: list[int]) -> None:
        """Learn what the heads' confidences are worth."""
        for head, draft in zip(self.heads, drafts, strict=True):
            if len(draft.tree):
                head.pool.calibration.observe(step_log_probs(draft.tree), *outcomes(draft.tree, offered))

    def _next_root(self, source: NextRoot) -> tuple[int, float]:
        """The next root and its raw log-probability: drawn here from the row, or by the verifier."""
        row = source.row
        if row is None:
            return source.drawn_id, source.drawn_log_prob
        token = draw(row.ids, row.log_probs, self.request.sampling.seed, len(self.ids))
        at = int(np.searchsorted(row.ids, token))
        return token, 0.0 if row.raw_log_probs is None else float(row.raw_log_probs[at])

    def _shown(self, root: int, drafts: list[Draft], choice: Choice, verdict: Verdict) -> StepTree:
        verified = np.array(verdict.verified if verdict.pruned else range(1, len(choice.tree) + 1), np.int64)
        tree = select(choice.tree, verified)
        return StepTree(
            root=root,
            tokens=tuple(tree.tokens.tolist()),
            parents=tuple(tree.parents.tolist()),
            log_probs=tuple(tree.log_probs.tolist()),
            forwards=forwards_of(
                tree, [(draft.tree, made_by(draft.tree, draft.deltas, draft.kept)) for draft in drafts]
            ),
            pieces=tuple(self.text.alone(token) for token in tree.tokens.tolist()),
            accepted=tuple(int(at) + 1 for at in np.searchsorted(verified, verdict.accepted)),
        )

    def _commit(
        self, accepted: list[tuple[int, float]], root: tuple[int, float] | None, tree: StepTree | None = None
    ) -> int:
        """Take new tokens for the client up to where the text ends; returns the next root."""
        new = [(*token, Origin.DRAFT) for token in accepted]
        if root is not None:
            new.append((*root, Origin.ROOT))
        ids: list[int] = []
        pieces: list[str] = []
        for token, _, _ in new:
            piece, stopped = self.text.push(token)
            ids.append(token)
            pieces.append(piece)
            self.left -= 1
            self.finish = self._finish_reason(token, stopped)
            if self.finish is not None:
                break
        if self.finish in ("eos", "length"):
            pieces[-1] += self.text.flush()
        sent = new[: len(ids)]
        self.chunk = Chunk(
            text="".join(pieces),
            ids=tuple(ids),
            origins=tuple(origin for _, _, origin in sent),
            pieces=tuple(pieces),
            log_probs=tuple(log_prob for _, log_prob, _ in sent) if self.request.want_log_probs else (),
            tree=tree,
        )
        self.result.new_tokens += len(ids)
        if self.step:
            self.result.accept_lengths.append(len(ids))
        self.metrics.tokens.inc(len(ids))
        return root[0] if root is not None else -1

    def _catch_up(self) -> None:
        """Pass on to the client what the last commit made, and learn from it: work that no step waits for."""
        chunk, self.chunk = self.chunk, None
        if chunk is not None:
            self.emit(chunk)
        later, self.later = self.later, []
        for work in later:
            work()

    def _finish_reason(self, token: int, stopped: bool) -> FinishReason | None:
        if token in self.plan.stop_ids:
            return "eos"
        if stopped:
            return "stop"
        return "length" if self.left <= 0 else None

    def _account(self, step_ns: int, drafts: list[Draft], choice: Choice, verdict: Verdict) -> None:
        """Where the step's time went, and what dashboards read."""
        head_ns = max((draft.forward_ns for draft in drafts), default=0)
        self.timings.head_forward_ns += head_ns
        self.timings.step_ns.append(step_ns)
        self.timings.split_ns.append(step_ns - verdict.timings.forward_ns - head_ns)
        result, policy = self.result, self.plan.policy
        verified = len(verdict.verified) if verdict.pruned else len(choice.tree)
        result.routed.append(choice.routed)
        result.verified_nodes.append(verified)
        result.late_drafts += sum(draft.late for draft in drafts)
        result.bad_drafts += sum(draft.bad for draft in drafts)
        self.metrics.step(policy.name, verified, len(verdict.accepted), step_ns / 1e9)
        if choice.routed >= 0:
            self.metrics.routed.labels(policy.heads[choice.routed]).inc()


def _own_rejection(draft: Draft, start: int, offered: list[int], told: Rejection | None) -> Rejection | None:
    """Where a head's own tree left the text, whose first token stands at `start`; None when all of it was accepted.

    The target's likeliest ids are known only where the walk over the verified tree ended.
    """
    missed = first_miss(draft.tree, offered)
    if missed is None:
        return None
    depth, node = missed
    position, token = start + depth, offered[depth]
    if told is not None and told.position == position:
        return Rejection(position, node, token, told.top_ids, told.top_log_probs, told.tail)
    return Rejection(position, node, token, np.empty(0, np.int64), np.empty(0, np.float32), 1.0)
