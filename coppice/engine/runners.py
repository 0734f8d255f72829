"""Who runs static steps: the host, operator by operator or compiled; CUDA's graphs are in `graphs`."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any, Protocol

import torch

from coppice.engine.attention import tracing
from coppice.engine.ragged import Bucket, StepInputs
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
