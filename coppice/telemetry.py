"""Logs (structlog) and metrics (Prometheus).

What vLLM measures too has vLLM's name (`vllm:...`) and labels (`model_name`, `engine`), so vLLM's dashboard of
speculative decoding shows an orchestrator as it is. Everything else begins with `coppice_`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import urllib.request
from functools import partial
from http.client import HTTPException
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, make_wsgi_app
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

import coppice
from coppice.errors import InvalidField

WARMING_UP = "warming up"
"""what a service logs when its model is loaded and not warm yet; `coppice up` shows it"""
SCRAPE_S = 5.0
MOST_SCRAPES = 8  # at once
ENGINE = "0"  # vLLM numbers its engines; an orchestrator is one, told from others by the label `instance`
_REQUEST_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


def configure_logging(as_json: bool) -> None:
    """Send structured lines to standard error, as text or as JSON."""
    renderer = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=False)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> int:
    """Serve `registry` over HTTP and return the port. Port 0 takes a free one; -1 serves nothing and returns 0.

    Raises InvalidField when the port is taken.
    """
    if port < 0:
        return 0
    try:
        server = make_server(host, port, make_wsgi_app(registry), _MetricsServer, _MetricsHandler)
    except OSError as error:
        raise InvalidField("server.metrics_port", f"cannot listen on {host}:{port}: {error.strerror}") from error
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server.server_port


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """A thread for each of a few connections; further ones are closed."""

    daemon_threads = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._free = threading.BoundedSemaphore(MOST_SCRAPES)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Take a connection, if there is room."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one, in a thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


class _MetricsHandler(WSGIRequestHandler):
    """Answers a scrape, and waits for a request no longer than a scrape may take."""

    timeout = SCRAPE_S

    def handle(self) -> None:
        """Answer one; a caller that sends nothing or leaves is no error of the server's."""
        with contextlib.suppress(OSError):
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not logged."""


def scrape(address: str, timeout_s: float = SCRAPE_S) -> list[Sample]:
    """Every sample of the metrics page at HOST:PORT. Raises OSError, also where something else answers there."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=timeout_s) as page:
            families = text_string_to_metric_families(page.read().decode())
            return [sample for family in families for sample in family.samples]
    except (HTTPException, ValueError) as error:
        raise OSError(f"no metrics page: {error}") from None


def head_of(sample: Sample) -> str:
    """The head, or the pool, that a sample is about; empty: none."""
    return sample.labels.get("head") or sample.labels.get("pool") or ""


def metric(address: str, name: str) -> float:
    """The sum over all labels of a metric at HOST:PORT; 0 when there is none of that name. Raises OSError."""
    return sum(sample.value for sample in scrape(address) if sample.name == name)


class OrchestratorMetrics:
    """What the orchestrator counts."""

    def __init__(self, model: str = "", dtype: str = "") -> None:
        """The target's name and dtype."""
        self.registry = CollectorRegistry()
        self._make_vllms(model)
        counter = partial(Counter, registry=self.registry, namespace="coppice")
        gauge = partial(Gauge, registry=self.registry, namespace="coppice")
        model_info = Info("coppice_model", "what is served", registry=self.registry)
        model_info.info({"model_name": model, "dtype": dtype, "version": coppice.__version__})
        self.requests = counter("requests", "requests by how they ended", ["outcome"])
        self.client_requests = counter(
            "client_requests", "calls by the name of their token and how it was met", ["client", "verdict"]
        )
        self.bad_drafts = counter("bad_drafts", "drafts dropped as invalid", ["head", "reason"])
        self.late_drafts = counter("late_drafts", "drafts that missed the deadline", ["head"])
        self.benched = counter("heads_benched", "times that a head was left alone", ["head"])
        self.routed = counter("routed", "steps that verified a head's tree", ["head"])
        self.routed_accepted = counter("routed_accepted_tokens", "draft nodes accepted in these steps", ["head"])
        self.replicas_fit = gauge("replicas_fit", "replicas that may get a session", ["pool"])
        self.unfit = counter("heads_unfit", "replicas found to serve what the target cannot use", ["head"])
        self.suspect = gauge("head_suspect", "replicas that draft far below what is expected of them", ["head"])
        self.auto_choices = counter("auto_choices", "steps of the policy auto by what it chose", ["choice"])
        self.reopened = counter("verifier_sessions_reopened", "sessions re-opened on a verifier")
        self.prefix_routed = counter(
            "prefix_routed", "requests by whether the verifier is the one for prompts that begin so", ["verifier"]
        )

    def _make_vllms(self, model: str) -> None:
        """Those that vLLM has, by its names. A label of ours, the policy, is added where it says something."""
        self._labels = model, ENGINE

        def make(kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
            named = ["model_name", "engine", *labels]
            made = kind(f"vllm:{name}", text, named, registry=self.registry, **options)
            return made if labels else made.labels(*self._labels)

        stem = "spec_decode_num"
        self.drafts = make(Counter, f"{stem}_drafts", "steps that verified a draft", "policy")
        self.draft_tokens = make(Counter, f"{stem}_draft_tokens", "draft nodes verified", "policy")
        self.accepted_tokens = make(Counter, f"{stem}_accepted_tokens", "draft nodes accepted", "policy")
        self.accepted_per_pos = make(
            Counter, f"{stem}_accepted_tokens_per_pos", "draft nodes accepted, by depth", "position"
        )
        self.step_seconds = make(
            Histogram, "inter_token_latency_seconds", "time of a step", "policy", buckets=_STEP_BUCKETS
        )
        self.prompt_tokens = make(Counter, "prompt_tokens", "prompt tokens, cached ones too")
        self.cache_queries = make(Counter, "prefix_cache_queries", "prompt tokens that were looked up")
        self.cache_hits = make(Counter, "prefix_cache_hits", "prompt tokens that were not prefilled again")
        self.tokens = make(Counter, "generation_tokens", "tokens generated")
        self.first_token_seconds = make(
            Histogram, "time_to_first_token_seconds", "from arrival to the first token", buckets=_REQUEST_BUCKETS
        )
        self.request_seconds = make(
            Histogram, "e2e_request_latency_seconds", "from arrival to the last token", buckets=_REQUEST_BUCKETS
        )
        self.running = make(Gauge, "num_requests_running", "requests that have a seat")
        self.waiting = make(Gauge, "num_requests_waiting", "requests that wait for a seat")
        self.kv_usage = make(Gauge, "kv_cache_usage_perc", "KV in use on the verifiers, 1 is all of it")

    def step(self, policy: str, verified: int, accepted: int, tokens: int, seconds: float) -> None:
        """Count one step, the draft nodes that it verified and accepted, and the tokens that it gave the client."""
        labels = *self._labels, policy
        self.drafts.labels(*labels).inc(verified > 0)
        self.draft_tokens.labels(*labels).inc(verified)
        self.accepted_tokens.labels(*labels).inc(accepted)
        for position in range(accepted):
            self.accepted_per_pos.labels(*self._labels, str(position)).inc()
        self.tokens.inc(tokens)
        self.step_seconds.labels(*labels).observe(seconds)


class SignalMetrics:
    """What a process counts about the records it sends to the adapter: produced = sent + dropped + waiting."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry, namespace="coppice")
        self.produced = counter("signals_produced", "records made for the adapter", ["stream"])
        self.sent = counter("signals_sent", "records that Redis took", ["stream"])
        self.dropped = counter("signals_dropped", "records that were dropped", ["stream", "reason"])


class AdapterMetrics:
    """What the adapter counts, by head."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        named: dict[str, Any] = {"registry": self.registry, "namespace": "coppice", "subsystem": "adapter"}
        counter: Any = partial(Counter, **named)
        gauge: Any = partial(Gauge, **named)
        histogram: Any = partial(Histogram, **named)
        self.read = counter("records_read", "records read from Redis", ["head", "stream"])
        self.malformed = counter("records_malformed", "records that are not what they should be", ["head", "stream"])
        self.lost = counter("records_lost", "records that were sent and never read: trimmed or flushed", ["stream"])
        self.dropped = counter("samples_dropped", "samples that taught nothing", ["head", "reason"])
        self.actions = counter("actions", "what queries were used for", ["head", "action"])
        self.updates = counter("updates", "updates trained", ["head", "action"])
        self.failed = counter("updates_failed", "updates that changed nothing or were not finite", ["head", "reason"])
        self.reverts = counter("reverts", "times the weights were taken back", ["head", "reason"])
        self.signal = histogram("signal", "s of a query", ["head"], buckets=(0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500))
        self.waiting = gauge("samples_waiting", "texts to learn from, by kind of text or by buffer", ["head", "group"])
        self.active = gauge("active", "1 while it is the active adapter, 0 while it stands by")
        self.version = gauge("version", "version that is to be in use", ["head"])
        self.live = gauge("replica_version", "version in use", ["head", "replica"])
        self.stale = gauge("replicas_stale", "replicas that do not use the weights they are to use", ["head"])
        self.paused = gauge("paused", "1 while paused", ["head"])
        seconds = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0)
        self.train_seconds = histogram("train_seconds", "time of an update", ["head", "action"], buckets=seconds)
        self.sync_seconds = histogram(
            "sync_seconds", "time of a weight sync to all replicas", ["head"], buckets=seconds
        )


class PrefixCacheMetrics:
    """What a verifier counts about the texts whose KV it keeps."""

    def __init__(self, registry: CollectorRegistry) -> None:
        named: dict[str, Any] = {"registry": registry, "namespace": "coppice", "subsystem": "verifier"}
        self.queries = Counter("prefix_cache_queries", "tokens of prompts that were looked up", **named)
        self.hits = Counter("prefix_cache_hits", "tokens of prompts that were not prefilled again", **named)
        self.evicted = Counter("prefix_cache_evictions", "tokens that were given up for others", **named)
        self.tokens = Gauge("prefix_cache_tokens", "tokens whose KV is kept, those of open sessions too", **named)


class SessionMetrics:
    """What a verifier or a drafter counts about its sessions."""

    def __init__(self, role: str, registry: CollectorRegistry | None = None) -> None:
        """registry: another one's, whose page shows these too."""
        self.registry = registry or CollectorRegistry()
        counter = partial(Counter, registry=self.registry, namespace="coppice", subsystem=role)
        histogram = partial(Histogram, registry=self.registry, namespace="coppice", subsystem=role)
        self.opened = counter("sessions_opened", "sessions opened")
        self.closed = counter("sessions_closed", "sessions closed")
        self.too_long = counter("sessions_too_long", "sessions whose text became longer than the head drafts for")
        self.forwards = counter("forwards", "packed forwards")
        self.rows = counter("rows", "rows of packed forwards")
        self.forward_seconds = histogram("forward_seconds", "time of a forward", buckets=_STEP_BUCKETS)
        self.kv_tokens = Gauge(
            f"{role}_kv_tokens_used", "KV in use, tokens", registry=self.registry, namespace="coppice"
        )
        self.remembered = Gauge(
            f"{role}_memory_tokens", "tokens of ended sessions' texts", registry=self.registry, namespace="coppice"
        )
