"""Traces (OpenTelemetry): one a request, with spans of the orchestrator, the drafters and the verifier.

The context travels as W3C `traceparent` in the metadata of the calls that open streams. A span below that of a call is
made when its end is known, from times that are measured anyway, so that a step that is not sampled costs nothing.
Nothing here loads OpenTelemetry but `start`; without it all of this does nothing.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import coppice
from coppice.config.sections import TelemetrySettings
from coppice.errors import InvalidField

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

GENERATE = "coppice.v1.GenerationService.Generate"
"""the only call that begins a trace when its caller has none"""
_EXPORT_S = 2  # longest time to send a batch, at the end of the process too
_SPANS, _LATE_S = 1 << 17, 86400  # of a process that writes its spans to a file
Facts = dict[str, str | int | float]
Metadata = Sequence[tuple[str, str]]
STEP_INTERVAL = 8
"""a traced request has spans of its first step and of every n-th behind it"""


def start(settings: TelemetrySettings, service: str) -> None:
    """Export the spans of this process, if the settings say where to. Raises InvalidField without the extra `otel`."""
    if not settings.otlp_endpoint:
        return
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
        from opentelemetry.trace import set_tracer_provider
    except ImportError:
        raise InvalidField("telemetry.otlp_endpoint", "needs the extra: in a checkout pip install '.[otel]'") from None
    resource = Resource.create({"service.name": f"coppice-{service}", "service.version": coppice.__version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # gRPC sends nothing that late
    folder = settings.otlp_endpoint.removeprefix("file:")
    if folder == settings.otlp_endpoint:
        exported = BatchSpanProcessor(OTLPSpanExporter(settings.otlp_endpoint, timeout=_EXPORT_S))
    else:  # at the end, so that writing them slows no step
        try:
            out = (Path(folder) / f"{service}-{os.getpid()}.jsonl").open("w")
        except OSError as error:
            raise InvalidField("telemetry.otlp_endpoint", f"cannot write to {folder}: {error.strerror}") from None
        lines = ConsoleSpanExporter(out=out, formatter=lambda span: span.to_json(None) + "\n")
        exported = BatchSpanProcessor(lines, _SPANS, 1e3 * _LATE_S, _SPANS)
    provider.add_span_processor(exported)
    set_tracer_provider(provider)


def stop() -> None:
    """Send the spans that wait."""
    if (api := _api()) and (flush := getattr(api.get_tracer_provider(), "force_flush", None)):
        flush()


class Trace:
    """The span of a call in this process, to which spans are added that have ended. Times are of `perf_counter_ns`."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._epoch = time.time_ns() - time.perf_counter_ns()

    def samples(self, step: int) -> bool:
        """Whether a step, counted from 1, gets spans: the first one and every n-th behind it."""
        return (step - 1) % STEP_INTERVAL == 0

    def describe(self, **facts: str | int | float) -> None:
        """Add facts to the call's span."""
        self._span.set_attributes(facts)

    def add(
        self, name: str, began: int, ended: int, parts: Mapping[str, int] | None = None, **facts: str | int | float
    ) -> None:
        """Add a span, and below it its parts, one behind the other, each so many nanoseconds long."""
        span = self._add(self._span, name, began, ended, facts)
        for part, length in (parts or {}).items():
            self._add(span, part, began, began + length)
            began += length

    def _add(self, above: Span, name: str, began: int, ended: int, facts: Facts | None = None) -> Span:
        span = _start(name, _api().set_span_in_context(above), start_time=self._epoch + began, attributes=facts)
        span.end(self._epoch + ended)
        return span


def current() -> Trace | None:
    """The trace of the call that this task serves; None unless it is recorded."""
    api = _api()
    span = api.get_current_span() if api else None
    return Trace(span) if span is not None and span.is_recording() else None


def metadata() -> Metadata:
    """Metadata that hands the trace of the call that this task serves on to a call that it makes."""
    carrier: dict[str, str] = {}
    if _api():
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())


@contextmanager
def serving(method: str, metadata: Sequence[tuple[str, str | bytes]]) -> Iterator[None]:
    """A span of a call that is served, below the one that its metadata names. method: its full name. It ends as failed
    when an error passes; the error's name says which, as its text may quote the request.
    """
    api = _api()
    carrier = {key: value for key, value in metadata or () if key in ("traceparent", "tracestate")} if api else {}
    if api is None or not (carrier or method == GENERATE):
        yield
        return
    from opentelemetry.context import Context
    from opentelemetry.trace import StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    above = TraceContextTextMapPropagator().extract(carrier, Context())
    span = _start("/".join(method.split(".")[-2:]), above, kind=api.SpanKind.SERVER)
    with api.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
        try:
            yield
        except Exception as error:  # not those by which a call is left early
            span.set_status(StatusCode.ERROR, type(error).__name__)
            raise


def _api() -> Any:
    """OpenTelemetry's tracing, if this process has loaded it: by `start`, or in an application that traces itself."""
    return sys.modules.get("opentelemetry.trace")


def _start(name: str, above: Context | None, **options: Any) -> Span:
    span: Span = _api().get_tracer("coppice", coppice.__version__).start_span(name, above, **options)
    return span
