"""The step loop of one request: draft, choose, verify, commit, learn. Each step is a record that is handed on.

Around it: who decides in a step, what the request has answered so far, and its sums for client and operators.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import structlog

from coppice.config.token_bytes import TokenBytes
from coppice.errors import InvalidField
from coppice.rpc.tracing import Facts, current
from coppice.speculation.policy import NO_HEAD, UNION, Choice, Policy
from coppice.speculation.sampling import draw
from coppice.speculation.tree import DraftTree, IntArray, graft, paths, prune
from coppice.wire.common import Features, Fence, TopLogProbs, committed_hash
from coppice.wire.generation import Chunk, Finished, FinishReason, GenerationRequest, Origin, StepTree
from coppice.wire.verifier import NextRoot, SessionOpened, Verdict, VerifyStep

from .heads import NO_DRAFT, Draft, HeadSession, accepted
from .metrics import OrchestratorMetrics
from .targets import LOST, TargetSession
from .text import TextStream

log = structlog.get_logger()

NOTHING = Choice(DraftTree.empty(), NO_HEAD)


@dataclass(slots=True)
class Step:
    """A step from its question to its verdict. Heads are numbers into the request's list of heads.

    The instants, of `perf_counter_ns`, say when its parts ended; each part begins where the one before it ends.
    """

    number: int  # 1 for the first step of a request
    hint: int | None  # how many nodes the last verdict said to draft; None: any number
    drafts: list[Draft]  # one a head, NO_DRAFT where it was not asked or sat the step out
    root: int = -1
    forced: tuple[int, ...] = ()  # ids that the grammar forces behind the root: drafts that no head makes
    budget: int = 0  # nodes to draft at most
    asked: tuple[int, ...] = ()  # heads that the policy asks
    opening: bool = False  # whether an asked head had to prefill in this step
    choice: Choice = NOTHING
    verdict: Verdict = field(init=False)
    offered: tuple[int, ...] = ()
    """the target's tokens behind the root: the accepted drafts, and the next root unless the text has ended"""
    num_tokens: int = 0  # tokens that the text took; it may have ended before the last ones
    began_at: int = field(default_factory=time.perf_counter_ns)
    asked_at: int = 0  # the questions for drafts are encoded
    drafted_at: int = 0  # the drafts are here, or the wait for them is over
    chosen_at: int = 0
    sent_at: int = 0  # the verifier's question is encoded
    answered_at: int = 0
    committed_at: int = 0

    @property
    def num_accepted(self) -> int:
        """Accepted drafts that the text took."""
        return min(self.num_tokens, len(self.verdict.accepted))

    @property
    def verified(self) -> IntArray:
        """The numbers of the chosen tree's nodes that were verified, ascending."""
        verdict = self.verdict
        return np.array(verdict.verified if verdict.pruned else range(1, len(self.choice.tree) + 1), np.int64)

    @property
    def draft_ns(self) -> int:
        """How long drafting took, from the step's beginning; 0 when nobody was asked."""
        return self.drafted_at - self.began_at if self.asked else 0

    @property
    def transport_ns(self) -> int:
        """Time of the verifier's question and answer, beside the verifier's own."""
        return self.answered_at - self.chosen_at - self.verdict.timings.total_ns

    @property
    def took_ns(self) -> int:
        """Time from the commit before to this step's."""
        return self.committed_at - self.began_at


class StepPolicy:
    """The decisions of a request, here equal in every step, in the order `heads`, `choose`, `observe`, `learn`."""

    def __init__(self, policy: Policy, heads: Sequence[int], whole_tree: bool = False, predicted: bool = False) -> None:
        """whole_tree: verify every node that is drafted, whether or not it pays. predicted: a head drafts from a
        prediction, of which the verifier's hint, made of all texts, says nothing.
        """
        self.policy, self.whole_tree = policy, whole_tree
        self._asks, self._keeps_budget = heads, whole_tree or predicted

    @property
    def soon(self) -> Sequence[int]:
        """Heads that the request will probably ask soon: their streams are opened before they are asked."""
        return ()

    def heads(self, step: Step) -> Sequence[int]:
        """Pick the heads that the step asks for drafts."""
        return self._asks

    def budget(self, most: int, hint: int | None) -> int:
        """How many nodes a step drafts: at a hint of 0 still one, to see what it gains."""
        return most if hint is None or self._keeps_budget else min(most, max(1, hint))

    def choose(self, step: Step) -> Choice:
        """Make the tree to verify of the drafts. The only tree that was asked for is taken as it is."""
        if not step.asked:
            return NOTHING
        if len(step.asked) == 1 and len(tree := step.drafts[step.asked[0]].scored):
            return Choice(prune(tree, step.budget)[0], step.asked[0])
        return self.policy.choose([draft.scored for draft in step.drafts], step.budget)

    def observe(self, step: Step) -> None:
        """Take in what the step took and gained, before the next one is decided."""

    def learn(self, step: Step) -> None:
        """Learn from the step what no other step waits for."""

    def close(self) -> None:
        """End the request, which may have failed or never begun."""


class Output:
    """Turns committed tokens into chunks. They are sent by `flush`, as soon as the step's questions are out."""

    def __init__(
        self,
        request: GenerationRequest,
        tokens: TokenBytes,
        stop_ids: frozenset[int],
        emit: Callable[[Chunk], None],
        interval: int = 1,
    ) -> None:
        """`emit` takes a chunk every `interval` steps. Raises InvalidField when the request resumes behind an end."""
        self._request, self._stop_ids, self._emit = request, stop_ids, emit
        special = request.keep_special_tokens
        self._text = TextStream(tokens, request.stop, request.min_tokens, request.include_stop, special)
        self._left, self._interval = request.max_new_tokens, 1 if request.want_trees else interval
        self._chunks: list[Chunk] = []  # certain and not sent yet, one a step
        self.finish: FinishReason | None = None
        for token in request.resume_ids:  # as if they had been made here; their text is known to the client
            if self.finish is not None:
                raise InvalidField("resume_ids", f"go on behind the answer's end ({self.finish})")
            self._push(token)

    def _push(self, token: int) -> str:
        """Take one token; returns the text that became certain."""
        self._left -= 1
        # An id that ends the text is no part of it, whatever the tokenizer calls it, unless the request wants it.
        is_text = token not in self._stop_ids or self._request.include_stop
        text, stopped = self._text.push(token) if is_text else ("", False)
        if token in self._stop_ids or (self._left <= 0 and not stopped):
            self.finish = "eos" if token in self._stop_ids else "length"
            rest, stopped = self._text.flush()
            text += rest
        if stopped:
            self.finish = "stop"
        return text

    def commit(
        self, tokens: Sequence[int], num_accepted: int, log_probs: Sequence[float], top: tuple[TopLogProbs, ...]
    ) -> int:
        """Take accepted drafts, then the next root unless the text has ended, up to the text's end; returns how many.

        log_probs: raw ones of the tokens. top: the best ids in their places, if they are wanted.
        """
        pieces: list[str] = []
        for token in tokens:
            pieces.append(self._push(token))
            if self.finish is not None:
                break
        count = len(pieces)
        origins = ((Origin.DRAFT,) * num_accepted + (Origin.ROOT,))[:count]
        scored = tuple(log_probs[:count]) if self._request.want_log_probs else ()
        text = "".join(pieces)
        self._chunks.append(Chunk(text, tuple(tokens[:count]), origins, tuple(pieces), scored, None, top[:count]))
        return count

    def flush(self, step: Step | None) -> None:
        """Send what waits, if it is enough. step: the last one that made some; None: whatever there is."""
        count = len(self._chunks)
        if not count or (step is not None and count < self._interval and self.finish is None):
            return
        chunk = Chunk.joined(self._chunks) if count > 1 else self._chunks[0]
        self._chunks = []
        if step is not None and self._request.want_trees:
            tree, *others = step_trees(step, lambda token: self._text.tokens.of(token, True).decode(errors="replace"))
            chunk = replace(chunk, tree=tree, others=tuple(others))
        self._emit(chunk)


def step_trees(step: Step, piece: Callable[[int], str]) -> list[StepTree]:
    """The tree that a step verified, then those that lost to it, for people. piece: a token's text by itself."""
    chosen, verdict, routed = step.choice.tree, step.verdict, step.choice.routed
    makers: dict[tuple[int, ...], tuple[int, int]] = {}  # of a path: the first forward that made it, its heads
    for head, draft in enumerate(step.drafts):
        forwards = [forward for forward, size in enumerate(draft.deltas, 1) for _ in range(size)]
        if len(draft.deltas) < 2:  # of a tree that was sent at once one made a level
            forwards = draft.tree.depths()[1:].tolist()
        for path, forward in zip(paths(draft.tree), forwards, strict=True):
            first, owners = makers.get(path, (forward, 0))
            makers[path] = first, owners | 1 << head

    def picture(tree: DraftTree, head: int, right: Sequence[int]) -> StepTree:
        own = [makers.get(path, (1, 0)) for path in paths(tree)]  # no head made what a grammar forces
        forwards, owners = (tuple(each) for each in zip(*own, strict=True)) if own else ((), ())
        tokens, parents, log_probs = (tuple(each.tolist()) for each in (tree.tokens, tree.parents, tree.log_probs))
        drafted = tokens, parents, log_probs, forwards, tuple(map(piece, tokens))
        return StepTree(step.root, *drafted, tuple(right), piece(step.root), owners, routed=head)

    cut = sorted(set(range(1, len(chosen) + 1)).difference(step.verified.tolist()))
    verify_ns = step.transport_ns + verdict.timings.total_ns
    best = picture(chosen, routed, verdict.accepted)
    trees = [replace(best, cut=tuple(cut), draft_ns=step.draft_ns, verify_ns=verify_ns)]
    for at, draft in enumerate(step.drafts):
        if len(draft.scored) and 0 <= routed != at:
            trees.append(picture(draft.scored, at, accepted(draft.scored, step.offered)))
    return trees


class Account:
    """Sums and counts of a request from its arrival to its end."""

    def __init__(self, metrics: OrchestratorMetrics) -> None:
        self.id = secrets.token_hex(12)  # names the request in logs; its sessions are named after it
        self.metrics, self.trace = metrics, current()
        self.result = Finished("length", 0, 0, [], [], [])  # the answer's summary so far
        self.policy = ""
        self._arrived = time.perf_counter_ns()

    def admitted(self) -> None:
        """The request has a seat."""
        now = time.perf_counter_ns()
        self.result.timings.queue_ns = now - self._arrived
        if self.trace is not None:
            self.trace.add("queue", self._arrived, now)

    def prefilled(self, opened: SessionOpened, preferred: bool, began: int, now: int) -> None:
        """The prompt was prefilled since `began`. preferred: where prompts go that begin like it."""
        result, metrics = self.result, self.metrics
        result.cached_tokens = min(opened.cached_tokens, result.prompt_tokens)
        result.timings.prefill_ns = now - began
        result.new_tokens = 1
        metrics.cache_queries.inc(result.prompt_tokens)
        metrics.cache_hits.inc(result.cached_tokens)
        metrics.prefix_routed.labels("preferred" if preferred else "other").inc()
        metrics.first_token_seconds.observe((now - self._arrived) / 1e9)
        metrics.prompt_tokens.inc(result.prompt_tokens)
        metrics.tokens.inc()
        if self.trace is not None:
            self.trace.add("prefill", began, now, prompt_tokens=result.prompt_tokens)

    def step(self, step: Step, head: str) -> None:
        """Count a step that has just ended. head: whose tree was verified, empty for none or several."""
        result, times, took_ns = self.result, step.verdict.timings, step.took_ns
        result.accept_lengths.append(step.num_tokens)
        result.new_tokens += step.num_tokens
        result.routed.append(step.choice.routed)
        verified = len(step.verdict.verified) if step.verdict.pruned else len(step.choice.tree)
        result.verified_nodes.append(verified)
        head_ns = 0
        for draft in step.drafts:
            head_ns = max(head_ns, draft.forward_ns)
            result.late_drafts += draft.late
            result.bad_drafts += draft.bad
        timings = result.timings
        timings.draft_ns += step.draft_ns
        timings.transport_ns += step.transport_ns
        timings.verify_ns += times.total_ns - times.accept_ns
        timings.accept_ns += times.accept_ns
        timings.target_forward_ns += times.forward_ns
        timings.head_forward_ns += head_ns
        timings.step_ns.append(took_ns)
        timings.split_ns.append(took_ns - times.forward_ns - head_ns)
        accepted, metrics, labels = step.num_accepted, self.metrics, (*self.metrics.labels, self.policy)
        metrics.drafts.labels(*labels).inc(verified > 0)
        metrics.draft_tokens.labels(*labels).inc(verified)
        metrics.accepted_tokens.labels(*labels).inc(accepted)
        for position in range(accepted):
            metrics.accepted_per_pos.labels(*metrics.labels, str(position)).inc()
        metrics.tokens.inc(step.num_tokens)
        metrics.step_seconds.labels(*labels).observe(took_ns / 1e9)
        if head:
            metrics.routed.labels(head).inc()
            metrics.routed_accepted.labels(head).inc(accepted)
        if self.trace is not None and self.trace.samples(step.number):
            drafted_at = step.drafted_at if step.asked else step.began_at
            parts = {"ask": step.asked_at - step.began_at, "draft": drafted_at - step.asked_at} if step.asked else {}
            parts |= {"choose": step.chosen_at - drafted_at, "send": step.sent_at - step.chosen_at}
            parts |= {"verify": step.answered_at - step.sent_at, "commit": step.committed_at - step.answered_at}
            facts: Facts = {"step": step.number, "head": head, "verified": verified, "accepted": accepted}
            self.trace.add("step", step.began_at, step.committed_at, parts, **facts)

    def decoded(self, decode_ns: int) -> None:
        """The last token came so long behind the first one."""
        timings = self.result.timings
        elsewhere = timings.draft_ns + timings.transport_ns + timings.verify_ns + timings.accept_ns
        timings.decode_ns, timings.commit_ns = decode_ns, max(0, decode_ns - elsewhere)

    def ended(self, outcome: str) -> None:
        """Count the request and log it. outcome: why its text ended, else the status that it failed with."""
        seconds, result = (time.perf_counter_ns() - self._arrived) / 1e9, self.result
        self.metrics.ended(outcome, result, seconds)
        facts: Facts = {
            "id": self.id,
            "policy": self.policy,
            "prompt_tokens": result.prompt_tokens,
            "new_tokens": result.new_tokens,
            "tau": round(result.tau, 2),
            "seconds": round(seconds, 4),
            "finish_reason": outcome,
        }
        log.info("request", **facts)
        if self.trace is not None:
            self.trace.describe(**facts)


@dataclass
class Decoding:
    """One request from its prompt to its end."""

    request: GenerationRequest  # without defaults
    ids: list[int]  # committed, at first the prompt and what was resumed: all but the root
    verifier: TargetSession
    heads: Sequence[HeadSession]
    policy: StepPolicy
    draft_deadline_s: float  # 0: as long as drafts usually take
    output: Output
    account: Account

    def __post_init__(self) -> None:
        self._hash = committed_hash(self.ids)
        self._behind: Step | None = None  # a step that was not learnt from yet
        # Places of the prediction, from 1, that were verified and that the text took: each counts once.
        self._tried, self._came_true = set[int](), set[int]()

    async def run(self, start: Callable[[SessionOpened | None], None]) -> None:
        """Decode; `start` is called once a verifier admits the session. Raises what the last verifier raised."""
        if self.output.finish is not None:  # the client holds all of it, and missed only this
            start(None)
            return
        began = time.perf_counter_ns()
        step = self._begin()
        self._open(step.asked)
        opened = await self.verifier.open(self.ids)
        start(opened)
        self._follow(opened.features)
        self._open(self.policy.soon)
        step.forced = opened.forced
        step.root, log_prob = self._next_root(opened.next)
        self.output.commit((step.root,), 0, (log_prob,), opened.top)
        step.began_at = first = time.perf_counter_ns()
        self.account.prefilled(opened, self.verifier.preferred, began, first)
        try:
            while self.output.finish is None:
                await self._draft(step)
                step.choice = self._choose(step)
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
            step.began_at, step.forced = before.committed_at, before.verdict.forced
        step.asked = tuple(self.policy.heads(step))
        step.budget = self.policy.budget(self.request.budget or 0, hint)
        return step

    def _fence(self, step: Step, deadline_s: float, weights_version: int = 0) -> Fence:
        """What a message of a step says about the text that it continues."""
        return Fence(step.number, len(self.ids), self._hash, weights_version, int(deadline_s * 1e9))

    # --- draft ---

    def _open(self, heads: Iterable[int]) -> None:
        """Start the streams of some heads."""
        for at in heads:
            self.heads[at].open(self.ids)

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
        deadline_s = self.draft_deadline_s or max([head.pool.deadline_s for _, head in asked])
        fence = self._fence(step, deadline_s)
        drafts = [(at, it) for at, head in asked if (it := head.ask(fence, step.root, self.ids, step.budget))]
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

    def _choose(self, step: Step) -> Choice:
        """The policy's tree, with the branch that the grammar forces."""
        choice = self.policy.choose(step)
        if not (step.forced and self.heads and self.request.budget) or self.request.pq:
            return choice
        return replace(choice, tree=prune(graft(choice.tree, step.forced), self.request.budget)[0])

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
                opened = await self.verifier.reopen(self.ids, step.number - 1, error)  # the root is drawn already
                self.account.metrics.reopened.inc()
                self._follow(opened.features)
        step.sent_at, step.answered_at = self.verifier.exchanged

    # --- commit ---

    def _commit(self, step: Step) -> int:
        """Commit the root and the accepted path, and draw the next root; returns it, -1 when the text has ended."""
        verdict, tree = step.verdict, step.choice.tree
        accepted: list[int] = tree.tokens[np.array(verdict.accepted, np.int64) - 1].tolist()
        self.ids += [step.root, *accepted]
        self._hash = verdict.fence.committed_hash
        root, log_probs = -1, list(verdict.log_probs)
        if verdict.next is not None:
            root, log_prob = self._next_root(verdict.next)
            log_probs.append(log_prob)
        step.offered = tuple(accepted) if verdict.next is None else (*accepted, root)
        for at, (head, draft) in enumerate(zip(self.heads, step.drafts, strict=True)):
            if head.opening.want_misses and step.choice.routed in (at, UNION):
                head.reject(draft, verdict.fence.committed_len - len(accepted), step.offered)
        step.num_tokens = self.output.commit(step.offered, len(accepted), log_probs, verdict.top)
        return root

    def _next_root(self, source: NextRoot) -> tuple[int, float]:
        """The next root and its raw log-probability: drawn here from the row, or by the verifier."""
        row = source.row
        if row is None:
            assert source.drawn_id is not None  # wire.verifier.read_verify_response says so
            return source.drawn_id, source.drawn_log_prob
        token = draw(row.ids, row.log_probs, self.request.sampling.seed, len(self.ids))
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
            if not head.opening.prediction:
                if len(draft.tree):
                    head.learn(draft, step.offered)
            elif routed in (at, UNION):  # what it says belongs to this request alone: the places that the text took
                drafted = dict(zip(paths(draft.tree), draft.predicted, strict=False))
                places = [drafted.get(path, 0) for path in paths(step.choice.tree)]
                self._tried |= {places[node - 1] for node in step.verified.tolist()} - {0}
                self._came_true |= {places[node - 1] for node in step.verdict.accepted[: step.num_accepted]} - {0}
        self.policy.learn(step)
