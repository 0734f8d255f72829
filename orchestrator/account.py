"""One request as operators see it: its counts, its line in the log and its spans. None of them holds text."""

from __future__ import annotations

import secrets
import time

import structlog

from coppice.rpc.tracing import Facts, current
from coppice.telemetry import OrchestratorMetrics
from coppice.wire.generation import Finished
from coppice.wire.verifier import SessionOpened

from .step import Step

log = structlog.get_logger()


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
            self._trace_step(step, head, accepted)

    def _trace_step(self, step: Step, head: str, accepted: int) -> None:
        assert self.trace
        at = step.at
        parts = {"ask": at.asked - at.began, "draft": at.drafted - at.asked} if step.asked else {}
        before = at.drafted if step.asked else at.began
        parts |= {"choose": at.chosen - before, "send": at.sent - at.chosen}
        parts |= {"verify": at.answered - at.sent, "commit": at.committed - at.answered}
        facts: Facts = {"step": step.number, "head": head, "verified": step.num_verified, "accepted": accepted}
        self.trace.add("step", at.began, at.committed, parts, **facts)

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
