"""What keeps a stack whole and what operators see of it and of a request, against real services and tiny models."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from jsonschema import validate
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.samples import Sample
from rich.console import Console

import coppice
from coppice.cli import main
from coppice.client.client import Client
from coppice.commands.up import Monitor, metrics_pages
from coppice.stack.launch import MODULES, Stack
from coppice.stack.spec import HeadSpec
from coppice.telemetry import scrape
from coppice.wire.generation import Origin
from tests.pipeline.conftest import NAMES
from tests.signals import eventually
from tests.stacks import interrupted, serving

PROMPT = tuple(range(7, 40))
NEW = 200
SCHEMA = {"type": "string", "pattern": "^[a-f]{60,80} at the end$"}
GUIDED = {"structured_outputs": {"json": SCHEMA}, "seed": 7, "ignore_eos": False}
KILLED = [("orchestrator", {}), ("verifier", GUIDED | {"temperature": 1.0})]


def test_services_are_processes_of_their_own_as_ps_shows_them(stack: Stack) -> None:
    server = {psutil.Process(ready.pid).ppid() for ready in stack.services.values()}
    assert len(server) == 1
    for ready in stack.services.values():
        command = psutil.Process(ready.pid).cmdline()
        assert command[1:4] == ["-m", "coppice.stack.child", MODULES[ready.role]]
        assert os.getpgid(ready.pid) == ready.pid
        assert Path(f"/proc/{ready.pid}/fd/1").resolve().suffix == ".log"


@pytest.mark.parametrize(("name", "options"), KILLED)
def test_what_is_killed_under_a_request_is_waited_for_and_the_text_is_plains(
    stack: Stack, client: Client, name: str, options: dict[str, Any]
) -> None:
    """The only one of its role, which a supervisor would start again."""
    told = {"max_new_tokens": NEW, "ignore_eos": True, **options}
    plain = client.generate(PROMPT, policy="plain", **told)
    if options:
        validate(json.loads(plain.text), SCHEMA)

    def strike() -> None:
        os.kill(stack.services[name].pid, signal.SIGKILL)
        stack.restart(name)

    assert interrupted(client, PROMPT, strike, policy="route", **told) == plain.ids


def shown(monitor: Monitor) -> str:
    """The panel as text."""
    console = Console(file=io.StringIO(), width=120)
    console.print(monitor.panel())
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_panel_shows_what_requests_did_and_what_cannot_be_used(stack: Stack, client: Client) -> None:
    monitor = Monitor(metrics_pages(stack))
    monitor.look()
    answer = client.generate(PROMPT, policy="single:self", max_new_tokens=NEW, ignore_eos=True)
    assert eventually(lambda: not monitor.look() and "100%" in shown(monitor), 10), shown(monitor)
    rows = {line.split()[1]: line.split()[2:-1] for line in shown(monitor).splitlines() if len(line.split()) > 5}
    share, tau, replicas, version = rows["self"]
    assert (share, replicas, version) == ("100%", "1", "-")
    assert float(tau) == pytest.approx(answer.tau, abs=0.1)  # the last step may accept more than it may say
    assert rows["lookup"] == ["-", "-", "1", "-"]
    assert rows["tokens/s"][0] != "0.0"
    assert "!" not in shown(monitor)
    monitor = Monitor([*metrics_pages(stack), "127.0.0.1:1"])
    os.kill(stack.services["drafter-lookup"].pid, signal.SIGKILL)
    try:
        assert eventually(lambda: not monitor.look() and "! no replica of lookup can be used" in shown(monitor), 20)
        assert "! no answer from 127.0.0.1:1" in shown(monitor)
    finally:
        stack.restart("drafter-lookup")


def test_top_shows_a_running_deployment_or_says_where_there_are_no_metrics(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ready = stack.orchestrator
    for address, code, told in (
        (ready.metrics, 0, "lookup"),
        (ready.http, 0, "tokens/s"),
        (ready.address, 3, f"coppice: no metrics at {ready.address}; "),
    ):
        monkeypatch.setattr(sys, "argv", ["coppice", "top", "--address", address])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        assert (ended.value.code or 0, told in output.out + output.err) == (code, True)


# What operators see of a request: metrics under vLLM's names, a line in the log, and one trace.

ROOT = Path(__file__).parents[2]
REPEATING = (5, 6, 7, 8, 5, 6, 7)
NEW_TOKENS = 24

# What two dashboards of vllm-project/vllm ask for: examples/observability/prometheus_grafana/grafana.json and
# examples/observability/dashboards/grafana/vllm_speculative_decoding.json.
SERIES = (
    *(f"spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")),
    *("spec_decode_num_accepted_tokens_per_pos_total", "generation_tokens_total", "prompt_tokens_total"),
    *(f"inter_token_latency_seconds_{name}" for name in ("bucket", "sum", "count")),
    *(f"{name}_seconds_bucket" for name in ("time_to_first_token", "e2e_request_latency")),
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "request_success_total"),
    *(f"request_{name}_tokens_bucket" for name in ("prompt", "generation")),
    *(f"request_{name}_time_seconds_sum" for name in ("queue", "prefill", "decode")),
    "request_max_num_generation_tokens_sum",
)


def scraped(stack: Stack) -> dict[str, list[Sample]]:
    """What the orchestrator exposes, by name."""
    samples: dict[str, list[Sample]] = {}
    for sample in scrape(stack.orchestrator.metrics):
        samples.setdefault(sample.name, []).append(sample)
    return samples


def total(samples: dict[str, list[Sample]], name: str) -> float:
    return sum(sample.value for sample in samples.get(name, []))


@pytest.mark.parametrize("ended_by", ["length", "stop"])
def test_vllms_dashboard_finds_every_series(stack: Stack, client: Client, ended_by: str) -> None:
    """And no draft that was accepted behind the text's end, as in the middle of a block, is counted."""
    told: dict[str, Any] = {"policy": "single:self", "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    text = client.generate(REPEATING, **told).text  # of a drafter that just started the first drafts may be late
    if ended_by == "stop":
        told["stop"] = text[3:6]
    before = scraped(stack)
    answer = client.generate(REPEATING, **told)
    after = scraped(stack)
    assert answer.finish_reason == ended_by
    for name in SERIES:
        assert after[f"vllm:{name}"], name
        for sample in after[f"vllm:{name}"]:
            assert (sample.labels["model_name"], sample.labels["engine"]) == (NAMES[0], "0")
    positions = [sample.labels["position"] for sample in after["vllm:spec_decode_num_accepted_tokens_per_pos_total"]]
    assert all(map(str.isdigit, positions))

    def grew(name: str) -> float:
        return total(after, f"vllm:{name}") - total(before, f"vllm:{name}")

    steps, accepted = len(answer.accept_lengths), answer.origins.count(Origin.DRAFT)
    assert grew("generation_tokens_total") == answer.new_tokens <= NEW_TOKENS
    assert grew("prompt_tokens_total") == len(REPEATING)
    assert grew("inter_token_latency_seconds_count") == steps
    assert grew("spec_decode_num_drafts_total") == sum(nodes > 0 for nodes in answer.verified_nodes)
    assert grew("spec_decode_num_draft_tokens_total") == sum(answer.verified_nodes)
    assert grew("spec_decode_num_accepted_tokens_total") == accepted
    assert grew("spec_decode_num_accepted_tokens_per_pos_total") == accepted
    routed = "coppice_routed_accepted_tokens_total"
    assert total(after, routed) - total(before, routed) == accepted
    assert grew("time_to_first_token_seconds_count") == grew("e2e_request_latency_seconds_count") == 1
    assert ended_by in {each.labels["finished_reason"] for each in after["vllm:request_success_total"]}
    assert grew("request_success_total") == 1
    assert grew("request_prompt_tokens_sum") == len(REPEATING)
    assert grew("request_generation_tokens_sum") == grew("request_max_num_generation_tokens_sum") == answer.new_tokens
    parts = [grew(f"request_{name}_time_seconds_sum") for name in ("queue", "prefill", "decode")]
    assert 0 < sum(parts) <= grew("e2e_request_latency_seconds_sum") + 1e-6
    assert min(parts) >= 0
    assert grew("time_to_first_token_seconds_sum") <= grew("e2e_request_latency_seconds_sum")
    assert after["process_start_time_seconds"]
    (info,) = after["coppice_model_info"]
    assert info.labels == {"model_name": NAMES[0], "dtype": "float32", "version": coppice.__version__}


def test_a_request_without_any_verifier_is_seen_and_waits_for_one(stack: Stack, client: Client) -> None:
    """Which is how a deployment that was scaled to none learns that somebody asks."""
    stack.processes["verifier"].stop(10)
    with ThreadPoolExecutor() as threads:
        try:
            answer = threads.submit(client.generate, REPEATING, policy="plain", max_new_tokens=4, ignore_eos=True)
            assert eventually(lambda: total(scraped(stack), "vllm:num_requests_running") == 1)
        finally:
            stack.restart("verifier")
        assert answer.result().new_tokens == 4


# --- traces ---

APPLICATION = """
import sys
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import get_tracer, set_tracer_provider
from coppice import Client

address, collector = sys.argv[1:]
provider = TracerProvider(resource=Resource.create({"service.name": "application"}))
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(collector)))
set_tracer_provider(provider)
with get_tracer("application").start_as_current_span("question"), Client(address) as client:
    client.generate("a b a b", policy="merge", max_new_tokens=64, ignore_eos=True)
"""


VERIFYING = ("queue", "pack", "forward", "accept", "wake", "encode")


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans that it is sent, by service."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            facts = {fact.key: fact.value.string_value for fact in resource.resource.attributes}
            found = [span for scope in resource.scope_spans for span in scope.spans]
            self.spans += [(facts["service.name"], span) for span in found]
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    """A collector and its endpoint."""
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(0)


def facts_of(span: Span) -> dict[str, str]:
    """A span's attributes."""
    return {fact.key: str(getattr(fact.value, fact.value.WhichOneof("value"))) for fact in span.attributes}


def test_a_request_is_one_trace_everywhere(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    with collecting() as (collector, endpoint):
        extra = {role: {"telemetry.otlp_endpoint": endpoint} for role in ("verifier", "drafter", "orchestrator")}
        heads = HeadSpec("self", "lm", target), HeadSpec("lookup", "lookup")
        with serving(tmp_path / "logs", target, *heads, extra=extra) as stack:
            monkeypatch.delenv("OTEL_TRACES_SAMPLER")
            with Client(stack.address) as client:
                client.generate(REPEATING, max_new_tokens=4, ignore_eos=True)  # its caller does not trace: sampled away
            command = [sys.executable, "-c", APPLICATION, stack.address, endpoint]
            subprocess.run(command, cwd=ROOT, check=True, timeout=60)
        spans = list(collector.spans)  # services have sent all they had when they ended
    by_id = {span.span_id: (service, span) for service, span in spans}
    assert len({span.trace_id for _, span in spans}) == 1
    found = {
        (service, span.name, by_id[span.parent_span_id][1].name if span.parent_span_id else "")
        for service, span in spans
    }
    orchestrator, verifier = "coppice-orchestrator", "coppice-verifier"
    assert found == {
        ("application", "question", ""),
        (orchestrator, "GenerationService/Generate", "question"),
        *((orchestrator, name, "GenerationService/Generate") for name in ("queue", "prefill", "step")),
        *((orchestrator, name, "step") for name in ("ask", "draft", "choose", "send", "verify", "commit")),
        (verifier, "VerifierService/Verify", "GenerationService/Generate"),
        *((verifier, name, "VerifierService/Verify") for name in ("prefill", "step")),
        (verifier, "VerifierService/FetchFeatures", "DrafterService/Draft"),  # the session is followed
        *((verifier, part, name) for name in ("prefill", "step") for part in VERIFYING),
        *(
            (f"coppice-drafter-{head}", *edge)
            for head in ("self", "lookup")
            for edge in (
                ("DrafterService/Draft", "GenerationService/Generate"),
                ("open", "DrafterService/Draft"),
                ("draft", "DrafterService/Draft"),
                *((part, "draft") for part in ("queue", "forward", "tree", "wake", "encode")),
            )
        ),
    }
    for service in (orchestrator, verifier, "coppice-drafter-self"):
        steps = [step for name, span in spans if name == service and (step := facts_of(span).get("step"))]
        assert steps == [str(step) for step in range(1, 8 * len(steps), 8)], service
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for _, span in spans)
    (request,) = [span for _, span in spans if span.name == "GenerationService/Generate"]
    assert facts_of(request)["new_tokens"] == "64"
    assert {key for _, span in spans for key in facts_of(span)} == {
        *("id", "policy", "prompt_tokens", "new_tokens", "tau", "seconds", "finish_reason"),
        *("step", "head", "verified", "accepted", "tokens", "rows", "sessions"),
    }
