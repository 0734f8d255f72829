"""Static steps that a CUDA device replays: one launch instead of a thousand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any, Protocol

import torch

from coppice.engine.attention import one_line, tracing
from coppice.engine.context import BATCH_DEPENDENT, rope_kinds
from coppice.engine.ragged import Bucket, StepInputs, padded
from coppice.engine.static import Output, StaticStep

_STEPS = 32  # that are kept for buckets without a graph, the latest ones

Make = Callable[[Bucket, tuple[int, ...]], StaticStep]


class Step(Protocol):
    """One forward of batches that its bucket holds, and with at most these feature layers."""

    @property
    def inputs(self) -> StepInputs:
        """Filled before the step is run."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Whose hidden states the output has, side by side."""

    def __call__(self) -> Output:
        """Run it; what it answers is overwritten by the next step."""


class Runner(Protocol):
    """Knows a step for every batch."""

    def step(self, bucket: Bucket, feature_layers: tuple[int, ...]) -> Step:
        """One whose bucket holds this one, and that leaves at least these hidden states."""


class Eager:
    """Steps that the host runs operator by operator, each in the least bucket that holds its batch."""

    def __init__(self, make: Make) -> None:
        self.step: Callable[[Bucket, tuple[int, ...]], Step] = lru_cache(_STEPS)(make)


class CompiledStep:
    """A static step whose forward is compiled when it first runs."""

    def __init__(self, step: StaticStep, backend: str) -> None:
        self.inputs, self.feature_layers, self._step = step.inputs, step.feature_layers, step
        # What is compiled is kept with the code, of which every step therefore has its own.
        stock = StaticStep.forward
        forward = FunctionType(stock.__code__.replace(), stock.__globals__)
        self._forward: Any = torch.compile(forward, fullgraph=True, dynamic=False, backend=backend)

    def __call__(self) -> Output:
        """Run it, and compile it first where that was not done."""
        self._step.tap()
        with torch.inference_mode(), tracing(self._step.plans):
            output: Output = self._forward(self._step)
        return output


GRAPH_ROWS, GRAPH_TAIL = 256, 64
"""rows, and tail entries of a row, up to which steps are captured: with more rows a GPU takes longer than the host"""


class Graphs:
    """Steps that the device replays, and another runner's for batches that none of these holds."""

    def __init__(self, otherwise: Runner, buckets: list[Bucket], feature_layers: tuple[int, ...]) -> None:
        """Capture the other runner's steps for these buckets, the largest first: the others fit in its memory."""
        self.otherwise = otherwise
        self._captured: list[Captured] = []
        for bucket in sorted(buckets, reverse=True):
            step = otherwise.step(bucket, feature_layers)
            pool = self._captured[0].graph.pool() if self._captured else None
            self._captured.insert(0, Captured(step, pool))

    def step(self, bucket: Bucket, feature_layers: tuple[int, ...]) -> Step:
        """The smallest graph that holds the bucket, or the other runner's step."""
        return smallest(self._captured, bucket, feature_layers) or self.otherwise.step(bucket, feature_layers)


class Captured:
    """A step that was recorded once, and is replayed in one launch."""

    def __init__(self, step: Step, pool: Any) -> None:
        """pool: memory of another graph, whose answers are read before this one runs; None for memory of its own."""
        self.inputs, self.feature_layers, self._step = step.inputs, step.feature_layers, step
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()  # libraries, Triton and torch.compile prepare themselves outside the graph
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        # Threads that serve may use the device meanwhile.
        with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._output = step()

    def __call__(self) -> Output:
        """Replay it."""
        self.graph.replay()
        return self._output


def best_runner(make: Make, buckets: list[Bucket], feature_layers: tuple[int, ...]) -> tuple[Runner, str]:
    """Graphs for these buckets where a model and its device allow them; else eager steps, and why."""
    step, eager = make(buckets[0], feature_layers), Eager(make)
    if (kind := step.inputs.tokens.device.type) != "cuda":
        return eager, f"a device of kind {kind} replays nothing"
    if why := why_no_graph(step):
        return eager, why
    try:
        return Graphs(eager, buckets, feature_layers), ""
    except Exception as error:  # of torch, Triton or the driver
        return eager, one_line(error)


def smallest(steps: Sequence[Step], bucket: Bucket, feature_layers: tuple[int, ...]) -> Step | None:
    """The first of some steps, the smallest first, that serves a batch; None where none does."""
    for step in steps:
        if step.inputs.bucket.holds(bucket) and set(feature_layers) <= set(step.feature_layers):
            return step
    return None


def graph_buckets(blocks: int) -> list[Bucket]:
    """What steps are captured for, where a session has so many blocks at most: plain steps and trees of up to
    GRAPH_ROWS rows, all with logits. Texts of every length share a bucket, since it costs them nothing but a copy.
    """
    buckets: list[Bucket] = []
    for rows in sorted({padded(count) for count in range(1, GRAPH_ROWS + 1)}):
        # A session has a row at least, and of two rows neither has a tail.
        tail = padded(min(rows, GRAPH_TAIL)) if rows > 2 else 0
        buckets.append(Bucket(rows, rows, tail, blocks, rows))
    return buckets


def why_no_graph(step: StaticStep) -> str:
    """Why a step cannot be replayed: it asks the host for something. "" where it can."""
    for kind in rope_kinds(step.model.config.get_text_config()):
        if kind.get("rope_type") in BATCH_DEPENDENT:
            return f"rope kind {kind['rope_type']} rotates by the longest text of a batch"
    try:
        CompiledStep(step, backend="eager")()
    except Exception as error:
        return f"{type(step.model).__name__} is not one graph: {one_line(error)}"
    return ""
