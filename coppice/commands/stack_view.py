"""What people see of a stack on one machine: how far each service is while it starts or stops, and what runs where."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event, Thread
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from coppice.config.model_folder import ends_line, text_ends
from coppice.machine import INVARIANT, PROMISES
from coppice.rpc.certificates import is_loopback
from coppice.speculation.policy import Policy
from coppice.stack.launch import Stack
from coppice.stack.spec import DEFAULT_PORT, HeadSpec

POLL_S = 0.2


class ServiceLines:
    """A line for each service that runs, while a block starts or stops a stack: live on a terminal, elsewhere one is
    printed for each thing that a service begins to do.
    """

    def __init__(self, console: Console, stack: Stack) -> None:
        self._console, self._stack, self._ended = console, stack, Event()
        self._live = Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else None
        self._said = self._states()
        self._thread = Thread(target=self._show, name="service lines", daemon=True)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        if self._live:
            self._live.stop()

    def _states(self) -> dict[str, tuple[str, float]]:
        """What each service does, and the seconds that it took so far."""
        return {name: state for name, process in self._stack.processes.items() if (state := process.state)}

    def _show(self) -> None:
        while True:
            last = self._ended.wait(POLL_S)
            states = self._states()
            if self._live:
                table = Table.grid(padding=(0, 2))
                for name, (doing, seconds) in states.items():
                    table.add_row(name, doing, f"{seconds:.1f} s")
                self._live.update(table, refresh=True)
            else:
                for name, (doing, seconds) in states.items():
                    if self._said.get(name, ("", 0))[0] != doing:
                        self._console.print(f"{name}: {doing}, {seconds:.1f} s", highlight=False, soft_wrap=True)
            self._said = states
            if last:
                return


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
