"""What a request has answered so far: chunks for the client; sums, counts and a trace for client and operators."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from coppice.errors import InvalidField
from coppice.rpc.tracing import Facts, current
from coppice.speculation.tree import DraftTree, paths
from coppice.wire.common import TopLogProbs
from coppice.wire.generation import Chunk, Finished, FinishReason, GenerationRequest, Origin, StepTree
from coppice.wire.verifier import SessionOpened

from .metrics import OrchestratorMetrics
from .outcomes import accepted
from .step import Step
from .text import TextStream

log = structlog.get_logger()

Scored = tuple[int, float]
"""a token and its raw log-probability"""


class Output:
    """Turns committed tokens into chunks. They are sent by `flush`, as soon as the step's questions are out."""

    def __init__(
        self,
        request: GenerationRequest,
        text: TextStream,
        stop_ids: frozenset[int],
        emit: Callable[[Chunk], None],
        interval: int = 1,
    ) -> None:
        """`emit` takes a chunk every `interval` steps. Raises InvalidField when the request resumes behind an end."""
        self._request, self._text, self._stop_ids, self._emit = request, text, stop_ids, emit
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
        # An id that ends the text is no part of it, whatever the tokenizer calls it.
        text, stopped = self._text.push(token) if token not in self._stop_ids else ("", False)
        if token in self._stop_ids or (self._left <= 0 and not stopped):
            self.finish = "eos" if token in self._stop_ids else "length"
            rest, stopped = self._text.flush()
            text += rest
        if stopped:
            self.finish = "stop"
        return text

    def commit(self, accepted: Sequence[Scored], root: Scored | None, top: tuple[TopLogProbs, ...]) -> int:
        """Take the accepted drafts and the next root, up to where the text ends; returns how many were taken.

        top: the best ids in the place of each, or nothing.
        """
        new = [*accepted, root] if root is not None else accepted
        pieces: list[str] = []
        for token, _ in new:
            pieces.append(self._push(token))
            if self.finish is not None:
                break
        count = len(pieces)
        log_probs = tuple([log_prob for _, log_prob in new[:count]]) if self._request.want_log_probs else ()
        ids, origins = tuple([token for token, _ in new[:count]]), (*(Origin.DRAFT,) * len(accepted), Origin.ROOT)
        self._chunks.append(Chunk("".join(pieces), ids, origins[:count], tuple(pieces), log_probs, None, top[:count]))
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
    """The tree that a step verified, for people to look at, then those that lost the routing to it.

    piece: the text of a token by itself.
    """
    chosen, verdict, routed = step.choice.tree, step.verdict, step.choice.routed
    makers: dict[tuple[int, ...], tuple[int, int]] = {}  # of a path: the first forward that made it, its heads
    for head, draft in enumerate(step.drafts):
        for path, forward in zip(paths(draft.tree), made_by(draft.tree, draft.deltas), strict=True):
            first, owners = makers.get(path, (forward, 0))
            makers[path] = first, owners | 1 << head

    def picture(tree: DraftTree, head: int, right: Sequence[int]) -> StepTree:
        own = [makers[path] for path in paths(tree)]
        return StepTree(
            root=step.root,
            tokens=tuple(tree.tokens.tolist()),
            parents=tuple(tree.parents.tolist()),
            log_probs=tuple(tree.log_probs.tolist()),
            forwards=tuple(forward for forward, _ in own),
            pieces=tuple(piece(token) for token in tree.tokens.tolist()),
            accepted=tuple(right),
            root_piece=piece(step.root),
            owners=tuple(owners for _, owners in own),
            routed=head,
        )

    cut = sorted(set(range(1, len(chosen) + 1)).difference(step.verified.tolist()))
    verify_ns = step.transport_ns + verdict.timings.total_ns
    best = picture(chosen, routed, verdict.accepted)
    trees = [replace(best, cut=tuple(cut), draft_ns=step.draft_ns, verify_ns=verify_ns)]
    for at, draft in enumerate(step.drafts):
        if len(draft.scored) and 0 <= routed != at:
            trees.append(picture(draft.scored, at, accepted(draft.scored, step.offered)))
    return trees


def made_by(tree: DraftTree, deltas: Sequence[int]) -> list[int]:
    """Which forward of its drafter made each of the n nodes, from 1; `deltas` are the sizes of what was sent, in order.

    A head that streams sends a delta a forward; one that sends its tree at once made a level a forward.
    """
    if len(deltas) < 2:
        return tree.depths()[1:].tolist()  # type: ignore[no-any-return]
    return [forward for forward, size in enumerate(deltas, 1) for _ in range(size)]


class Account:
    """Sums and counts of a request from its arrival to its end."""

    def __init__(self, metrics: OrchestratorMetrics) -> None:
        self.id = secrets.token_hex(12)
        """names the request in logs; its sessions are named after it"""
        self.metrics, self.trace = metrics, current()
        self.result = Finished("length", 0, 0, [], [], [])
        """the answer's summary so far"""
        self.policy = ""
        self._arrived = time.perf_counter_ns()

    def admitted(self) -> None:
        """The request has a seat."""
        now = time.perf_counter_ns()
        self.result.timings.queue_ns = now - self._arrived
        if self.trace is not None:
            self.trace.add("queue", self._arrived, now)

    def prefilled(self, opened: SessionOpened, preferred: bool, began: int, now: int) -> None:
        """The prompt was prefilled, which began at `began`, and the first token is there.

        preferred: by the verifier that prompts which begin like it go to.
        """
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
        result.verified_nodes.append(verified := step.num_verified)
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
        accepted = step.num_accepted
        self.metrics.step(self.policy, verified, accepted, step.num_tokens, took_ns / 1e9)
        if head:
            self.metrics.routed.labels(head).inc()
            self.metrics.routed_accepted.labels(head).inc(accepted)
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
        self.metrics.requests.labels(outcome).inc()
        if outcome == result.finish_reason:
            self.metrics.request_seconds.observe(seconds)
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
