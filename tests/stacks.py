"""Stacks of real processes for tests, `coppice up` as a process, and answers that something happens to."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coppice.client.client import Client
from coppice.stack.launch import Stack
from coppice.stack.spec import HeadSpec, StackSpec
from coppice.telemetry import metric
from coppice.wire.generation import Chunk

BLOW_AT = 20  # tokens of an answer behind which it is interrupted


@contextlib.contextmanager
def serving(
    logs: Path | None = None,
    target: Path | None = None,
    *heads: HeadSpec,
    draft_deadline_ms: int = 2000,
    extra: Mapping[str, Mapping[str, Any]] = {},
    **options: Any,
) -> Iterator[Stack]:
    """Run a stack whose processes have a thread each, and check that what runs in the end stops by itself.

    The machine that runs tests may be busy: no head is to be benched for that. Without a target it is the demo's.
    `extra` and `options` are StackSpec's.
    """
    patient = {"orchestrator.draft_deadline_ms": draft_deadline_ms, **extra.get("orchestrator", {})}
    options |= {"heads": heads, "dtype": "float32", "verifier_threads": 1, "drafter_threads": 1}
    options["extra"] = {**extra, "orchestrator": patient}
    spec = StackSpec(target=target, **options) if target else StackSpec.demo(**options)
    with Stack(spec, log_dir=logs) as stack:
        yield stack
        running = {name for name, process in stack.processes.items() if not process.ended}
    assert not running.intersection(stack.unclean)


def serving_now(stack: Stack) -> list[str]:
    """Names of the verifiers that have a session."""
    running = [name for name, ready in stack.services.items() if ready.role == "verifier"]
    pages = {name: stack.services[name].metrics for name in running if stack.processes[name].exit_code is None}
    counts = {
        name: [metric(page, f"coppice_verifier_sessions_{what}_total") for what in ("opened", "closed")]
        for name, page in pages.items()
    }
    return [name for name, (opened, closed) in counts.items() if opened > closed]


def interrupted(client: Client, prompt: Sequence[int], blow: Callable[[], object], **options: Any) -> tuple[int, ...]:
    """An answer in whose middle something happens."""
    ids: list[int] = []
    for event in client.stream(prompt, **{"ignore_eos": True} | options):
        if isinstance(event, Chunk):
            before = len(ids)
            ids += event.ids
            if before < BLOW_AT <= len(ids):
                blow()
    return tuple(ids)


@contextlib.contextmanager
def up(
    command: Sequence[str],
    ready: Path,
    environment: Mapping[str, str] | None = None,
    http_port: int = 0,
    ready_s: float = 180,
) -> Iterator[subprocess.Popen[str]]:
    """Run a command that ends in `up ...`, on free ports, until the block ends; gives it once `ready` is written.

    http_port: 0 serves none.
    """
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    told = [*command, "--port", "0", "--http-port", str(http_port), "--ready-file", str(ready)]
    with subprocess.Popen(told, text=True, env=environment, **output) as process:  # type: ignore[call-overload]
        try:
            deadline = time.monotonic() + ready_s
            while not ready.exists():
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
