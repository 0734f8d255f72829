"""What the orchestrator counts: what vLLM measures too under vLLM's name (`vllm:...`) and labels (`model_name`,
`engine`), so that vLLM's dashboards show an orchestrator as it is, and all else under `coppice_`.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

import coppice
from coppice.telemetry import STEP_BUCKETS
from coppice.wire.generation import Finished

ENGINE = "0"  # vLLM numbers its engines; an orchestrator is one, told from others by the label `instance`
_REQUEST_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN_BUCKETS = tuple(first * 10**zeros for zeros in range(6) for first in (1, 2, 5))
_TAU_BUCKETS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0)
_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "abort"}  # vLLM's words for an end
_ANSWERS: dict[str, tuple[str, tuple[float, ...], Callable[[Finished], float]]] = {
    "prompt_tokens": ("prompt tokens of an answered request", _TOKEN_BUCKETS, lambda it: it.prompt_tokens),
    "generation_tokens": ("tokens of an answer", _TOKEN_BUCKETS, lambda it: it.new_tokens),
    "max_num_generation_tokens": ("the same: each is decoded by itself", _TOKEN_BUCKETS, lambda it: it.new_tokens),
    "queue_time_seconds": ("wait for a seat", _REQUEST_BUCKETS, lambda it: it.timings.queue_ns / 1e9),
    "prefill_time_seconds": ("from opening to first token", _REQUEST_BUCKETS, lambda it: it.timings.prefill_ns / 1e9),
    "decode_time_seconds": ("from first token to last", _REQUEST_BUCKETS, lambda it: it.timings.decode_ns / 1e9),
}
"""vLLM's histograms of answers: help, buckets, and what of an answer's summary is observed"""


class OrchestratorMetrics:
    """What the orchestrator counts."""

    def __init__(self, model: str = "", dtype: str = "") -> None:
        """The target's name and dtype."""
        self.registry = CollectorRegistry()
        info = Info("coppice_model", "what is served", registry=self.registry)
        info.info({"model_name": model, "dtype": dtype, "version": coppice.__version__})
        self.tau = Histogram("coppice_request_tau", "mean tokens a step", registry=self.registry, buckets=_TAU_BUCKETS)

        def make(kind: Any, name: str, text: str, labels: Iterable[str], **options: Any) -> Any:
            metric = kind(name, text, labels, registry=self.registry, **options)
            metric.labels = cache(metric.labels)  # without the library's checks: some are counted in every step
            return metric

        def ours(kind: Any, name: str, text: str, *labels: str) -> Any:
            return make(kind, f"coppice_{name}", text, labels)

        self.requests = ours(Counter, "requests", "requests by how they ended", "outcome")
        self.client_requests = ours(Counter, "client_requests", "calls by token and verdict", "client", "verdict")
        self.bad_drafts = ours(Counter, "bad_drafts", "drafts dropped as invalid", "head", "reason")
        self.late_drafts = ours(Counter, "late_drafts", "drafts that missed the deadline", "head")
        self.benched = ours(Counter, "heads_benched", "times that a head was left alone", "head")
        self.routed = ours(Counter, "routed", "steps that verified a head's tree", "head")
        self.routed_accepted = ours(Counter, "routed_accepted_tokens", "draft nodes accepted in these steps", "head")
        self.replicas_fit = ours(Gauge, "replicas_fit", "replicas that may get a session", "pool")
        self.unfit = ours(Counter, "heads_unfit", "replicas found to serve what the target cannot use", "head")
        self.suspect = ours(Gauge, "head_suspect", "replicas that draft far below what is expected of them", "head")
        self.auto_choices = ours(Counter, "auto_choices", "steps of the policy auto by what it chose", "choice")
        self.reopened = ours(Counter, "verifier_sessions_reopened", "sessions re-opened on a verifier")
        self.prefix_routed = ours(Counter, "prefix_routed", "requests that went to their prefix's verifier", "verifier")
        self.labels = model, ENGINE  # of those that vLLM has

        def vllms(kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
            """One of vLLM's. A label of ours, the policy, is added where it says something."""
            metric = make(kind, f"vllm:{name}", text, ("model_name", "engine", *labels), **options)
            return metric if labels else metric.labels(*self.labels)

        stem, spans = "spec_decode_num", partial(vllms, Histogram, buckets=_REQUEST_BUCKETS)
        self.drafts = vllms(Counter, f"{stem}_drafts", "steps that verified a draft", "policy")
        self.draft_tokens = vllms(Counter, f"{stem}_draft_tokens", "draft nodes verified", "policy")
        self.accepted_tokens = vllms(Counter, f"{stem}_accepted_tokens", "draft nodes accepted", "policy")
        self.accepted_per_pos = vllms(Counter, f"{stem}_accepted_tokens_per_pos", "the same by depth", "position")
        timed = "inter_token_latency_seconds", "time of a step", "policy"
        self.step_seconds = vllms(Histogram, *timed, buckets=STEP_BUCKETS)
        self.prompt_tokens = vllms(Counter, "prompt_tokens", "prompt tokens, cached ones too")
        self.cache_queries = vllms(Counter, "prefix_cache_queries", "prompt tokens that were looked up")
        self.cache_hits = vllms(Counter, "prefix_cache_hits", "prompt tokens that were not prefilled again")
        self.tokens = vllms(Counter, "generation_tokens", "tokens generated")
        self.first_token_seconds = spans("time_to_first_token_seconds", "from arrival to the first token")
        self.request_seconds = spans("e2e_request_latency_seconds", "from arrival to the last token")
        self.succeeded = vllms(Counter, "request_success", "requests by vLLM's reason of their end", "finished_reason")
        self.answers = [
            (vllms(Histogram, f"request_{name}", text, buckets=buckets), read)
            for name, (text, buckets, read) in _ANSWERS.items()
        ]
        self.running = vllms(Gauge, "num_requests_running", "requests that have a seat")
        self.waiting = vllms(Gauge, "num_requests_waiting", "requests that wait for a seat")
        self.kv_usage = vllms(Gauge, "kv_cache_usage_perc", "KV in use on the verifiers, 1 is all of it")

    def ended(self, outcome: str, result: Finished, seconds: float) -> None:
        """Count a request that took so long. outcome: why its text ended, else the status that it failed with."""
        self.requests.labels(outcome).inc()
        if outcome in _REASONS:
            self.succeeded.labels(*self.labels, _REASONS[outcome]).inc()
        if outcome != result.finish_reason:
            return
        for histogram, read in self.answers:
            histogram.observe(read(result))
        self.request_seconds.observe(seconds)
        self.tau.observe(result.tau)
