"""What people see of a deployment: how far each service is, what runs where, and what it does now, from its metrics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from coppice.config.model import ends_line, text_ends
from coppice.errors import Unavailable
from coppice.machine import INVARIANT, PROMISES
from coppice.rpc.access import is_loopback
from coppice.speculation.policy import Policy
from coppice.stack.launch import Stack
from coppice.stack.spec import DEFAULT_PORT, HeadSpec
from coppice.telemetry import scrape

LOOK_S, WINDOW_S, ANSWER_S = 1.0, 10.0, 1.0
"""time between two looks, time that rates are of, and how long a page may take"""

Page = dict[tuple[str, str], float]
"""the values of one page by metric and head (or pool), each the sum over all other labels"""

ALARMS: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("coppice_head_suspect", lambda value: value > 0, "{} drafts far below what is expected of it"),
    ("coppice_replicas_fit", lambda value: value == 0, "no replica of {} can be used"),
    ("coppice_adapter_replicas_stale", lambda value: value > 0, "a drafter of {} does not take its new weights"),
    ("vllm:kv_cache_usage_perc", lambda value: value > 0.9, "KV is nearly full: sessions will wait"),
)
"""metric, when its value calls for a line, and the line; docs/operations.md says what to do"""


def show(addresses: Sequence[str]) -> None:
    """Show the panel until Ctrl-C; once where there is no terminal. Raises Unavailable if no page answers at first."""
    console, monitor = Console(), Monitor(addresses)
    monitor.look()
    if len(monitor.silent) == len(addresses):
        raise Unavailable(f"no metrics at {', '.join(addresses)}")
    try:
        if not console.is_terminal:
            time.sleep(LOOK_S)
            monitor.look()
            console.print(monitor.panel())
            return
        with Live(monitor.panel(), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(LOOK_S)
                monitor.look()
                live.update(monitor.panel(), refresh=True)
    except KeyboardInterrupt:
        return


class Monitor:
    """What a deployment's pages say, now and some seconds ago."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """`addresses`: HOST:PORT of each page, of orchestrators and adapters."""
        self._addresses = addresses
        self._looks: deque[tuple[float, dict[str, Page]]] = deque()
        self.silent: list[str] = []
        """addresses that left the latest look unanswered"""

    def look(self) -> None:
        """Read every page, unless the latest look was a moment ago."""
        now = time.monotonic()
        if self._looks and now - self._looks[-1][0] < 0.9 * LOOK_S:
            return
        pages, self.silent = {}, []
        for address in self._addresses:
            try:
                pages[address] = read(address)
            except OSError:
                self.silent.append(address)
        self._looks.append((now, pages))
        while now - self._looks[0][0] > WINDOW_S:
            self._looks.popleft()

    def panel(self) -> Panel:
        """The latest figures. Those of steps are of the last seconds, or of all time when there was no step in them."""
        steps = self._steps("vllm:inter_token_latency_seconds_count")
        tau = 1 + self._steps("vllm:spec_decode_num_accepted_tokens_total") / steps if steps else 0.0
        figures = {
            "tokens/s": f"{self._rate('vllm:generation_tokens_total'):.1f}",
            "running": f"{sum(self._values('vllm:num_requests_running')):.0f}",
            "waiting": f"{sum(self._values('vllm:num_requests_waiting')):.0f}",
            "tau": f"{tau:.2f}" if steps else "-",
            "KV": f"{max(self._values('vllm:kv_cache_usage_perc'), default=0):.0%}",
        }
        line = Text("   ").join(Text.assemble(f"{name} ", (value, "bold")) for name, value in figures.items())
        alarms = [Text(f"! {alarm}", style="red") for alarm in self._alarms()]
        title = ", ".join(self._labels("coppice_model_info"))
        return Panel(Group(line, Text(), self._table(steps), *alarms), title=title or None, expand=False)

    def _table(self, steps: float) -> Table:
        """What each head does, and how many replicas of each pool can be used."""
        table = Table("", "share of steps", "tau", "replicas", "version", box=None, pad_edge=False)
        pools, left = self._labels("coppice_replicas_fit"), steps
        for pool in pools:
            routed = self._steps("coppice_routed_total", pool)
            left -= routed
            tau = f"{1 + self._steps('coppice_routed_accepted_tokens_total', pool) / routed:.2f}" if routed else "-"
            fit = max(self._values("coppice_replicas_fit", pool))
            versions = [f"{version:.0f}" for version in self._values("coppice_adapter_version", pool)]
            share = f"{routed / steps:.0%}" if routed else "-"
            table.add_row(pool, share, tau, f"{fit:.0f}", ", ".join(versions) or "-")
        if steps and left > 0:
            table.add_row("plain or merged", f"{left / steps:.0%}", "-", "-", "-")
        return table

    def _alarms(self) -> Iterator[str]:
        for address in self.silent:
            yield f"no answer from {address}"
        for metric, wrong, line in ALARMS:
            for label in self._labels(metric):
                if wrong(max(self._values(metric, label))):
                    yield line.format(label)

    def _labels(self, metric: str) -> list[str]:
        """The heads (or pools) that a metric has values of now, in the order of the pages."""
        pages = self._looks[-1][1].values()
        return list(dict.fromkeys(label for page in pages for name, label in page if name == metric))

    def _values(self, metric: str, label: str = "") -> list[float]:
        """What each page says now."""
        return [page[metric, label] for page in self._looks[-1][1].values() if (metric, label) in page]

    def _grown(self, metric: str, label: str = "") -> float:
        """By how much a counter grew on the pages that answer; one that began anew in the window counts from 0."""
        (_, first), (_, last) = self._looks[0], self._looks[-1]
        growth = 0.0
        for address, page in last.items():
            before, now = (each.get((metric, label), 0.0) for each in (first.get(address, page), page))
            growth += now - before if now >= before else now
        return growth

    def _rate(self, metric: str) -> float:
        seconds = self._looks[-1][0] - self._looks[0][0]
        return self._grown(metric) / seconds if seconds else 0.0

    def _steps(self, metric: str, label: str = "") -> float:
        """A count of steps, or of what they accepted: in the window, or of all time when it has no steps."""
        recent = self._grown("vllm:inter_token_latency_seconds_count")
        return self._grown(metric, label) if recent else sum(self._values(metric, label))


def read(address: str) -> Page:
    """The page at HOST:PORT. Raises OSError."""
    page: Page = {}
    for sample in scrape(address, ANSWER_S):
        label = sample.labels.get("head") or sample.labels.get("pool") or ""
        if sample.name == "coppice_model_info":
            label = f"{sample.labels['model_name']}, {sample.labels['dtype']}"
        page[sample.name, label] = page.get((sample.name, label), 0.0) + sample.value
    return page


POLL_S = 0.2


@contextmanager
def service_lines(console: Console, stack: Stack) -> Iterator[None]:
    """Print a line for each thing that a service begins to do, while a block starts or stops a stack."""
    ended = Event()
    latest = {name: state[0] for name, process in stack.processes.items() if (state := process.state)}

    def show() -> None:
        last = False
        while not last:
            last = ended.wait(POLL_S)
            for name, process in list(stack.processes.items()):
                if (state := process.state) and latest.get(name) != state[0]:
                    latest[name] = state[0]
                    console.print(f"{name}: {state[0]}, {state[1]:.1f} s", highlight=False, soft_wrap=True)

    thread = Thread(target=show, name="service lines", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def services_table(stack: Stack) -> Table:
    """What runs where; ports of health, metrics and HTTP are at the host of the address."""
    kinds = {head.name: head.kind for head in stack.spec.heads}
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))  # it fits 80 columns
    for column in ("service", "kind", "address", "health", "metrics", "http", "pid"):
        table.add_column(column, overflow="fold")
    for name, ready in stack.services.items():
        head = name.removeprefix("drafter-") if ready.role == "drafter" else ""
        kind = kinds.get(head) or kinds.get(head.rpartition("-")[0]) or ""  # a replica's name ends in its number
        ports = [address.rpartition(":")[2] or "-" for address in (ready.health, ready.metrics, ready.http)]
        table.add_row(name, kind, ready.address, *ports, str(ready.pid))
    return table


def facts(stack: Stack, logs_stay: bool) -> Iterator[str]:
    """A line for each thing that a person would ask about what runs."""
    settings, spec = stack.settings, stack.spec
    verifier, drafter = settings.verifier, settings.drafter
    name = f"{verifier.name} ({spec.target})" if verifier.name else str(spec.target)
    placed = _placed(verifier.dtype, verifier.device, verifier.threads)
    yield f"target   {name}, {placed}"
    yield f"memory   {next(ready.memory for ready in stack.services.values() if ready.role == 'verifier')}"
    yield ends_line(text_ends(spec.target))
    yield f"{verifier.dtype}: {INVARIANT if verifier.invariant else PROMISES[verifier.dtype]}"
    if heads := [_head(head) for head in spec.heads]:
        yield f"heads    {', '.join(heads)}; each {_placed(drafter.dtype, drafter.device, drafter.threads)}"
    policy = settings.orchestrator.policy or Policy.default([head.name for head in spec.heads]).name
    yield f"policy   {policy}, budget {settings.orchestrator.budget}"
    yield f"failover a request waits up to {stack.failover_s:.0f} s for a verifier that died and loads again"
    yield f"logs     {stack.log_dir}{'' if logs_stay else ', deleted at the end; --log-dir FOLDER keeps them'}"
    yield f"ready at {stack.address}; Ctrl-C stops it"
    usual = stack.address == f"127.0.0.1:{DEFAULT_PORT}"
    yield f'try      coppice generate "Once upon a time"{"" if usual else f" --address {stack.address}"}'
    if pages := metrics_pages(stack):
        yield f"         coppice top --address {','.join(pages)}"
    if http := stack.orchestrator.http:
        address = f"{'https' if settings.tls.on else 'http'}://{http}"
        yield f"OpenAI   {address}/v1 is the base URL for OpenAI's clients"
        if settings.orchestrator.page != "never" and is_loopback(settings.server.host):
            yield f"page     {address}/ shows answers, draft trees and this deployment"


def metrics_pages(stack: Stack) -> list[str]:
    """Addresses of the pages that say how a deployment does: those of orchestrators and of the adapter."""
    return [
        ready.metrics
        for ready in stack.services.values()
        if ready.role in ("orchestrator", "adapter") and ready.metrics
    ]


def _head(head: HeadSpec) -> str:
    return f"{head.name} ({head.kind})" if head.name != head.kind else head.name


def _placed(dtype: str, device: str, threads: int) -> str:
    cores = f" with {threads} {'thread' if threads == 1 else 'threads'}" if threads and device == "cpu" else ""
    return f"{dtype} on {device}{cores}"
