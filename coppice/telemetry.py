"""Logs (structlog), the page of metrics (Prometheus), and what verifiers and drafters count."""

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
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, make_wsgi_app
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from coppice.errors import InvalidField

SCRAPE_S = 5.0
MOST_SCRAPES = 8  # at once
GRAMMAR_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03)
STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


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
    """Serve `registry` over HTTP and return the port; 0 takes a free one, -1 serves nothing. Raises InvalidField."""
    if port < 0:
        return 0
    ProcessCollector(registry=registry)
    try:
        app = make_wsgi_app(registry)  # in text, whoever asks: OpenMetrics for Prometheus 2 has vllm_ for vllm:
        plain = {"HTTP_ACCEPT": ""}
        server = make_server(host, port, lambda env, start: app(env | plain, start), _MetricsServer, _MetricsHandler)
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

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self._free.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
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


def metric(address: str, name: str) -> float:
    """The sum over all labels of a metric at HOST:PORT; 0 when there is none of that name. Raises OSError."""
    return sum(sample.value for sample in scrape(address) if sample.name == name)


class SessionMetrics:
    """What a verifier or a drafter counts about its sessions."""

    def __init__(self, role: str, registry: CollectorRegistry | None = None) -> None:
        """registry: another one's, whose page shows these too."""
        self.registry = registry or CollectorRegistry()
        counter = partial(Counter, registry=self.registry, namespace="coppice", subsystem=role)
        gauge = partial(Gauge, registry=self.registry, namespace="coppice", subsystem=role)
        histogram = partial(Histogram, registry=self.registry, namespace="coppice", subsystem=role)
        self.opened = counter("sessions_opened", "sessions opened")
        self.closed = counter("sessions_closed", "sessions closed")
        self.too_long = counter("sessions_too_long", "sessions whose text became longer than the head drafts for")
        self.forwards = counter("forwards", "packed forwards")
        self.rows = counter("rows", "rows of packed forwards")
        self.forward_seconds = histogram("forward_seconds", "time of a forward", buckets=STEP_BUCKETS)
        self.grammar_seconds = histogram("grammar_seconds", "time of a step in its grammar", buckets=GRAMMAR_BUCKETS)
        self.links = gauge("links", "links from clients")
        self.kv_tokens = gauge("kv_tokens_used", "KV in use, tokens")
        self.remembered = gauge("memory_tokens", "tokens of ended sessions' texts")
