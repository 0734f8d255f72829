"""Several stacks on one machine, one of them running at a time: each sees the same stream as if it were alone.

The others are stopped (SIGSTOP) meanwhile, training included, so that no stack slows another one, and a machine whose
speed drifts over minutes is equally unkind to all. What is compared was measured in the same minutes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from coppice.adaptation.client import AdapterClient
from coppice.bench.adapt.shift import StreamQuery
from coppice.client.client import Client
from coppice.client.completion import Completion
from coppice.limits import MAX_HISTORY
from coppice.messages.adapter import HeadStatus
from coppice.stack.launch import Stack
from coppice.stack.spec import StackSpec

WARM_TOKENS = 16
WAKE_S = 0.3  # from SIGCONT to the first query: timers that ran out fire now


@dataclass(slots=True)
class Served:
    """What one stack answered, query by query."""

    answers: list[Completion] = field(default_factory=list)
    status: HeadStatus | None = None


class Lane:
    """A stack that can be held still."""

    def __init__(self, name: str, spec: StackSpec, cores: Mapping[str, Sequence[int]] | None = None) -> None:
        """cores: by role, "" for all others; None leaves them where they are."""
        self.name, self.spec, self.served = name, spec, Served()
        self._cores, self._exit, self._stack = cores or {}, ExitStack(), Stack(spec)
        self._adapter: AdapterClient | None = None

    def start(self) -> None:
        """Start the stack, warm it up and hold it still."""
        stack = self._exit.enter_context(self._stack)
        self.client = self._exit.enter_context(Client(stack.address))
        if "adapter" in stack.services:
            self._adapter = self._exit.enter_context(AdapterClient(stack.services["adapter"].address))
        for ready in stack.services.values():
            chosen = self._cores.get(ready.role, self._cores.get(""))
            if chosen:
                pin(ready.pid, chosen)
        self.freeze()

    def warm(self, prompt: str) -> None:
        """Answer once, as a plain request: an adapter hears nothing of it."""
        with self.running():
            self.client.generate(prompt, policy="plain", max_new_tokens=WARM_TOKENS)

    def serve(self, query: StreamQuery, new_tokens: int) -> None:
        """Answer one query; the lane runs."""
        self.served.answers.append(self.client.generate(query.prompt, max_new_tokens=new_tokens, ignore_eos=True))

    def stop(self) -> None:
        """Ask the adapter what it did, and stop everything. Raises what the stack's end raises."""
        self.thaw()
        try:
            if self._adapter is not None:
                time.sleep(2 * WAKE_S)
                self.served.status = self._adapter.status(history=MAX_HISTORY)[0]
        finally:
            self._exit.close()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let it run meanwhile."""
        self.thaw()
        time.sleep(WAKE_S)
        try:
            yield
        finally:
            self.freeze()

    def freeze(self) -> None:
        """Hold every process still."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let every process go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._stack.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def pin(pid: int, cores: Sequence[int]) -> None:
    """Keep a process, with all threads that it has by now, on these cores."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


def run_lanes(
    lanes: Sequence[Lane],
    stream: Sequence[StreamQuery],
    new_tokens: int,
    turn: int,
    progress: Callable[[str], None] = lambda line: None,
) -> None:
    """Serve the stream with every lane, `turn` queries at a time, in alternating order."""
    started: list[Lane] = []
    try:
        for lane in lanes:
            progress(f"starting {lane.name}")
            started.append(lane)
            lane.start()
        for lane in lanes:
            lane.warm(stream[0].prompt)
        for number, at in enumerate(range(0, len(stream), turn)):
            for lane in lanes if number % 2 == 0 else reversed(lanes):
                progress(f"query {at + 1} of {len(stream)}: {lane.name}")
                with lane.running():
                    for query in stream[at : at + turn]:
                        lane.serve(query, new_tokens)
    finally:
        for lane in reversed(started):
            lane.stop()
