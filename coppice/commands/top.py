"""`coppice top`: what a deployment does now, from its pages of metrics."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from coppice.errors import Unavailable
from coppice.stack.spec import DEFAULT_HTTP_PORT
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
STEPS, ACCEPTED = "vllm:inter_token_latency_seconds_count", "vllm:spec_decode_num_accepted_tokens_total"
DRAFTS = "vllm:spec_decode_num_drafts_total"
DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_HTTP_PORT}"


def top(
    address: Annotated[
        str, typer.Option(help="HOST:PORT of HTTP or of metrics, as `coppice up` prints them, several with commas.")
    ] = DEFAULT_ADDRESS,
) -> None:
    """Show what a running deployment does, from its pages of metrics; once where there is no terminal."""
    addresses = address.split(",")
    console, monitor = Console(), Monitor(addresses)
    monitor.look()
    if len(monitor.silent) == len(addresses):
        hint = "start a server with `coppice up`, or name yours with --address: its HTTP or metrics port, not gRPC's"
        raise Unavailable(f"no metrics at {address}; {hint}")
    try:
        with Live(monitor.panel(), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(LOOK_S)
                monitor.look()
                live.update(monitor.panel(), refresh=console.is_terminal)
                if not console.is_terminal:
                    return
    except KeyboardInterrupt:
        return


class Monitor:
    """What a deployment's pages say, now and some seconds ago."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """`addresses`: HOST:PORT of each page, of orchestrators and adapters."""
        self._addresses = addresses
        self._looks: deque[tuple[float, dict[str, Page]]] = deque()
        self.silent: list[str] = []  # addresses that left the latest look unanswered

    def look(self) -> None:
        """Read every page."""
        now, pages, self.silent = time.monotonic(), {}, []
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
        steps = self._steps(STEPS)
        seconds = self._looks[-1][0] - self._looks[0][0]
        figures = {
            "tokens/s": f"{self._growth('vllm:generation_tokens_total') / seconds if seconds else 0:.1f}",
            "running": f"{sum(self._values('vllm:num_requests_running')):.0f}",
            "waiting": f"{sum(self._values('vllm:num_requests_waiting')):.0f}",
            "tau": f"{1 + self._steps(ACCEPTED) / steps:.2f}" if steps else "-",
            "KV": f"{max(self._values('vllm:kv_cache_usage_perc'), default=0):.0%}",
        }
        line = Text("   ").join(Text.assemble(f"{name} ", (value, "bold")) for name, value in figures.items())
        alarms = [Text(f"! {alarm}", style="red") for alarm in self._alarms()]
        title = ", ".join(self._labels("coppice_model_info"))
        return Panel(Group(line, Text(), self._table(steps), *alarms), title=title or None, expand=False)

    def _table(self, steps: float) -> Table:
        """What each head does, and how many replicas of each pool can be used."""
        table = Table("", "share of steps", "tau", "replicas", "version", box=None, pad_edge=False)
        merged = drafts = self._steps(DRAFTS)
        for pool in self._labels("coppice_replicas_fit"):
            routed = self._steps("coppice_routed_total", pool)
            merged -= routed
            tau = f"{1 + self._steps('coppice_routed_accepted_tokens_total', pool) / routed:.2f}" if routed else "-"
            fit = max(self._values("coppice_replicas_fit", pool))
            versions = [f"{version:.0f}" for version in self._values("coppice_adapter_version", pool)]
            share = f"{routed / steps:.0%}" if routed else "-"
            table.add_row(pool, share, tau, f"{fit:.0f}", ", ".join(versions) or "-")
        for name, count in {"merged": merged, "plain": steps - drafts}.items():
            if steps and count > 0:
                table.add_row(name, f"{count / steps:.0%}", "-", "-", "-")
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

    def _growth(self, metric: str, label: str = "") -> float:
        """By how much a counter grew on the pages that answer; one that began anew in the window counts from 0."""
        (_, first), (_, last) = self._looks[0], self._looks[-1]
        growth = 0.0
        for address, page in last.items():
            before, now = (each.get((metric, label), 0.0) for each in (first.get(address, page), page))
            growth += now - before if now >= before else now
        return growth

    def _steps(self, metric: str, label: str = "") -> float:
        """A count of steps, or of what they accepted: in the window, or of all time when it has no steps."""
        return self._growth(metric, label) if self._growth(STEPS) else sum(self._values(metric, label))


def read(address: str) -> Page:
    """The page at HOST:PORT. Raises OSError."""
    page: Page = {}
    for sample in scrape(address, ANSWER_S):
        label = sample.labels.get("head") or sample.labels.get("pool") or ""
        if sample.name == "coppice_model_info":
            label = f"{sample.labels['model_name']}, {sample.labels['dtype']}"
        page[sample.name, label] = page.get((sample.name, label), 0.0) + sample.value
    return page
