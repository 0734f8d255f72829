"""Several stacks on one machine, one of them running at a time: each sees the same stream as if it were alone.

The others are stopped (SIGSTOP) meanwhile, training included, so that no stack slows another one, and a machine whose
speed drifts over minutes is equally unkind to all. What is compared was measured in the same minutes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from coppice.client.adapter import AdapterClient
from coppice.client.client import Client
from coppice.client.completion import Completion
from coppice.limits import MAX_HISTORY
from coppice.stack.launch import Stack
from coppice.stack.spec import StackSpec
from coppice.training.progress import Progress
from coppice.wire.adapter import HeadStatus
from lab.adapt.shift import StreamQuery
from lab.asking import answers_to

NEW_TOKENS = 48  # of each answer
TURN = 10  # queries that a lane serves before the next one
WARM_PROMPT, WARM_TOKENS = "Once", 16
WAKE_S = 1.5  # from SIGCONT to the first query: timers fire, and the adapter's demand, which has run out, is told again


class Lane:
    """A stack that can be held still."""

    def __init__(self, name: str, spec: StackSpec) -> None:
        self.name, self.spec = name, spec
        self.answers: list[Completion] = []
        self.status: HeadStatus | None = None
        self._exit, self._stack = ExitStack(), Stack(spec)
        self._adapter: AdapterClient | None = None

    def start(self) -> None:
        """Start the stack, warm it up and hold it still."""
        stack = self._exit.enter_context(self._stack)
        self.client = self._exit.enter_context(Client(stack.address))
        if "adapter" in stack.services:
            self._adapter = self._exit.enter_context(AdapterClient(stack.services["adapter"].address))
        with self.running():  # a plain request: an adapter hears nothing of it
            self.client.generate(WARM_PROMPT, policy="plain", max_new_tokens=WARM_TOKENS)

    def stop(self) -> None:
        """Ask the adapter what it did, and stop everything. Raises what the stack's end raises."""
        self.send(signal.SIGCONT)
        try:
            if self._adapter is not None:
                time.sleep(WAKE_S)
                self.status = self._adapter.status(history=MAX_HISTORY)[0]
        finally:
            self._exit.close()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let it run meanwhile."""
        self.send(signal.SIGCONT)
        time.sleep(WAKE_S)
        try:
            yield
        finally:
            self.send(signal.SIGSTOP)

    def answer(self, prompts: Sequence[str]) -> None:
        """Run, and add the answers to some prompts.

        The budget is named, so that trees are verified whole: each verifier else cuts them by the costs that it
        measured when its stack started, and tau would differ where nothing was learnt.
        """
        with self.running():
            self.answers += answers_to(self.client, prompts, budget=self.spec.budget, max_new_tokens=NEW_TOKENS)

    def send(self, number: signal.Signals) -> None:
        """Send it to every process: SIGSTOP holds them still, SIGCONT lets them go on."""
        for pid in self._stack.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def run_lanes(lanes: Sequence[Lane], stream: Sequence[StreamQuery]) -> None:
    """Serve the stream with every lane, some queries at a time, in alternating order."""
    started: list[Lane] = []
    with Progress("answers", len(lanes) * len(stream)) as progress:
        try:
            for lane in lanes:
                progress.say(f"starting {lane.name}")
                started.append(lane)
                lane.start()
            for number, at in enumerate(range(0, len(stream), TURN)):
                for lane in lanes if number % 2 == 0 else reversed(lanes):
                    progress.say(lane.name)
                    prompts = [query.prompt for query in stream[at : at + TURN]]
                    lane.answer(prompts)
                    progress.add(len(prompts))
        finally:
            for lane in reversed(started):
                lane.stop()
