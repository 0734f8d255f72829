"""What a request has answered so far: chunks for the client, the answer's summary, and its trace for operators."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import structlog

from coppice.errors import InvalidField
from coppice.rpc.tracing import Facts, current
from coppice.speculation.tree import DraftTree, paths
from coppice.wire.common import TopLogProbs
from coppice.wire.generation import Chunk, Finished, FinishReason, GenerationRequest, Origin, StepTree
from coppice.wire.verifier import SessionOpened

from .metrics import OrchestratorMetrics
from .outcomes import outcomes
from .step import Step
from .text import TextStream

log = structlog.get_logger()

Scored = tuple[int, float]
"""a token and its raw log-probability"""


class Output:
    """Turns committed tokens into chunks. A chunk is sent by `flush`, as soon as the step's questions are out."""

    def __init__(
        self,
        request: GenerationRequest,
        prompt_tokens: int,
        text: TextStream,
        stop_ids: frozenset[int],
        emit: Callable[[Chunk], None],
    ) -> None:
        """`emit` takes every chunk. Raises InvalidField when the request resumes behind an end."""
        self._request, self._text, self._stop_ids, self._emit = request, text, stop_ids, emit
        self._left = request.max_new_tokens
        self._chunk: Chunk | None = None  # certain and not sent yet
        self.finish: FinishReason | None = None
        self.result = Finished("length", prompt_tokens, 0, [], [], [])
        self._resume(request.resume_ids)

    def _resume(self, ids: Sequence[int]) -> None:
        """Take in the tokens that the client holds as if they had been made here; their text is known to it."""
        for token in ids:
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
        new = [(*token, Origin.DRAFT) for token in accepted]
        if root is not None:
            new.append((*root, Origin.ROOT))
        pieces: list[str] = []
        for token, _, _ in new:
            pieces.append(self._push(token))
            if self.finish is not None:
                break
        taken = new[: len(pieces)]
        self._chunk = Chunk(
            text="".join(pieces),
            ids=tuple([token for token, _, _ in taken]),
            origins=tuple([origin for _, _, origin in taken]),
            pieces=tuple(pieces),
            log_probs=tuple([log_prob for _, log_prob, _ in taken]) if self._request.want_log_probs else (),
            top=top[: len(taken)],
        )
        self.result.new_tokens += len(taken)
        return len(taken)

    def flush(self, step: Step | None) -> None:
        """Send the chunk that waits, if there is one. step: the one that made it; None for the first token."""
        chunk, self._chunk = self._chunk, None
        if chunk is None:
            return
        if step is not None and self._request.want_trees:
            tree, *others = step_trees(step, self._piece)
            chunk = replace(chunk, tree=tree, others=tuple(others))
        self._emit(chunk)

    def _piece(self, token: int) -> str:
        """The text of a token by itself."""
        return self._text.tokens.of(token, True).decode(errors="replace")

    def account(self, step: Step) -> None:
        """Add where the step's time went and what it verified."""
        timings, times = self.result.timings, step.verdict.timings
        head_ns = max([draft.forward_ns for draft in step.drafts], default=0)
        timings.draft_ns += step.draft_ns
        timings.transport_ns += step.transport_ns
        timings.verify_ns += times.total_ns - times.accept_ns
        timings.accept_ns += times.accept_ns
        timings.target_forward_ns += times.forward_ns
        timings.head_forward_ns += head_ns
        timings.step_ns.append(took_ns := step.took_ns)
        timings.split_ns.append(took_ns - times.forward_ns - head_ns)
        self.result.routed.append(step.choice.routed)
        self.result.verified_nodes.append(step.num_verified)
        for draft in step.drafts:
            self.result.late_drafts += draft.late
            self.result.bad_drafts += draft.bad

    def end(self, prefill_ns: int, decode_ns: int) -> Finished:
        """The summary of an answer that has ended."""
        timings = self.result.timings
        timings.prefill_ns, timings.decode_ns = prefill_ns, decode_ns
        elsewhere = timings.draft_ns + timings.transport_ns + timings.verify_ns + timings.accept_ns
        timings.commit_ns = max(0, decode_ns - elsewhere)
        assert self.finish
        self.result.finish_reason = self.finish
        return self.result


def step_trees(step: Step, piece: Callable[[int], str]) -> list[StepTree]:
    """The tree that a step verified, for people to look at, then those that lost the routing to it."""
    tree, verdict, routed = step.choice.tree, step.verdict, step.choice.routed
    makers: dict[tuple[int, ...], tuple[int, int]] = {}
    for head, draft in enumerate(step.drafts):
        for path, forward in zip(paths(draft.tree), made_by(draft.tree, draft.deltas), strict=True):
            first, owners = makers.get(path, (forward, 0))
            makers[path] = first, owners | 1 << head

    def picture(tree: DraftTree, head: int, accepted: Sequence[int]) -> StepTree:
        own = [makers[path] for path in paths(tree)]
        return StepTree(
            root=step.root,
            tokens=tuple(tree.tokens.tolist()),
            parents=tuple(tree.parents.tolist()),
            log_probs=tuple(tree.log_probs.tolist()),
            forwards=tuple(forward for forward, _ in own),
            pieces=tuple(piece(token) for token in tree.tokens.tolist()),
            accepted=tuple(accepted),
            root_piece=piece(step.root),
            owners=tuple(owners for _, owners in own),
            routed=head,
        )

    cut = sorted(set(range(1, len(tree) + 1)).difference(step.verified.tolist()))
    verify_ns = step.transport_ns + verdict.timings.total_ns
    chosen = picture(tree, routed, verdict.accepted)
    trees = [replace(chosen, cut=tuple(cut), draft_ns=step.draft_ns, verify_ns=verify_ns)]
    for at, draft in enumerate(step.drafts):
        if len(draft.scored) and 0 <= routed != at:
            right = np.flatnonzero(outcomes(draft.scored, step.offered)[1]) + 1
            trees.append(picture(draft.scored, at, right.tolist()))
    return trees


def made_by(tree: DraftTree, deltas: Sequence[int]) -> list[int]:
    """Which forward of its drafter made each of the n nodes, from 1; `deltas` are the sizes of what was sent, in order.

    A head that streams sends a delta a forward; one that sends its tree at once made a level a forward.
    """
    if len(deltas) < 2:
        return tree.depths()[1:].tolist()  # type: ignore[no-any-return]
    return [forward for forward, size in enumerate(deltas, 1) for _ in range(size)]


class Account:
    """Kept from a request's arrival to its end."""

    def __init__(self, metrics: OrchestratorMetrics) -> None:
        self.id = secrets.token_hex(12)
        """names the request in logs; its sessions are named after it"""
        self.metrics, self.trace = metrics, current()
        self.result: Finished | None = None
        """what was answered so far; None until the request is decoded"""
        self.policy = ""
        self.queue_ns = 0
        self._arrived = time.perf_counter_ns()

    def admitted(self) -> None:
        """The request has a seat."""
        now = time.perf_counter_ns()
        self.queue_ns = now - self._arrived
        if self.trace is not None:
            self.trace.add("queue", self._arrived, now)

    def opened(self, opened: SessionOpened, preferred: bool) -> None:
        """A verifier has prefilled the prompt. preferred: it is the one that prompts which begin like it go to."""
        assert self.result
        self.result.cached_tokens = min(opened.cached_tokens, self.result.prompt_tokens)
        self.metrics.cache_queries.inc(self.result.prompt_tokens)
        self.metrics.cache_hits.inc(self.result.cached_tokens)
        self.metrics.prefix_routed.labels("preferred" if preferred else "other").inc()

    def first_token(self, began: int, now: int) -> None:
        """The prompt was prefilled, which began at `began`, and the first token is there."""
        assert self.result
        self.metrics.first_token_seconds.observe((now - self._arrived) / 1e9)
        self.metrics.prompt_tokens.inc(self.result.prompt_tokens)
        self.metrics.tokens.inc()
        if self.trace is not None:
            self.trace.add("prefill", began, now, prompt_tokens=self.result.prompt_tokens)

    def step(self, step: Step, head: str, tokens: int) -> None:
        """Count a step that has just ended. head: whose tree was verified, empty for none or several."""
        accepted = step.num_accepted
        self.metrics.step(self.policy, step.num_verified, accepted, tokens, step.took_ns / 1e9)
        if head:
            self.metrics.routed.labels(head).inc()
            self.metrics.routed_accepted.labels(head).inc(accepted)
        if self.trace is not None and self.trace.samples(step.number):
            self._trace_step(step, head)

    def _trace_step(self, step: Step, head: str) -> None:
        assert self.trace
        drafted_at = step.drafted_at if step.asked else step.began_at
        parts = {"ask": step.asked_at - step.began_at, "draft": drafted_at - step.asked_at} if step.asked else {}
        parts |= {"choose": step.chosen_at - drafted_at, "send": step.sent_at - step.chosen_at}
        parts |= {"verify": step.answered_at - step.sent_at, "commit": step.committed_at - step.answered_at}
        facts: Facts = {"step": step.number, "head": head, "verified": step.num_verified, "accepted": step.num_accepted}
        self.trace.add("step", step.began_at, step.committed_at, parts, **facts)

    def ended(self, outcome: str) -> None:
        """Count the request and log it. outcome: why its text ended, else the status that it failed with."""
        seconds, result = (time.perf_counter_ns() - self._arrived) / 1e9, self.result
        self.metrics.requests.labels(outcome).inc()
        if result is not None and outcome == result.finish_reason:
            self.metrics.request_seconds.observe(seconds)
        facts: Facts = {
            "id": self.id,
            "policy": self.policy,
            "prompt_tokens": result.prompt_tokens if result else 0,
            "new_tokens": result.new_tokens if result else 0,
            "tau": round(result.tau, 2) if result else 1.0,
            "seconds": round(seconds, 4),
            "finish_reason": outcome,
        }
        log.info("request", **facts)
        if self.trace is not None:
            self.trace.describe(**facts)
