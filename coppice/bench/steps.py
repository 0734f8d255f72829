"""`coppice bench steps`: what splitting decoding into services costs a step, and where a step's time goes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coppice.bench.report import Check
from coppice.client.client import Client
from coppice.client.completion import Completion

SPLIT_BOUND_MS = 1.2


@dataclass(frozen=True)
class StepCosts:
    """Means over the steps of some answers and the median split cost, milliseconds."""

    method: str
    steps: int
    step: float
    draft: float
    transport: float
    verify: float
    accept: float
    commit: float
    target_forward: float
    head_forward: float
    split_median: float


def measure(client: Client, prompts: Sequence[str | tuple[int, ...]], method: str, new_tokens: int) -> StepCosts:
    """Run the prompts one at a time; the first answer warms up and is not counted."""
    request: dict[str, Any] = {"policy": method, "max_new_tokens": new_tokens, "ignore_eos": True}
    client.generate(prompts[0], **request)
    return costs(method, [client.generate(prompt, **request) for prompt in prompts])


def costs(method: str, answers: Sequence[Completion]) -> StepCosts:
    """Fold the answers' timings."""
    timings = [answer.timings for answer in answers]
    steps = sum(answer.steps for answer in answers)

    def mean_ms(name: str) -> float:
        return float(sum(getattr(timing, name) for timing in timings)) / steps / 1e6

    return StepCosts(
        method=method,
        steps=steps,
        step=sum(sum(timing.step_ns) for timing in timings) / steps / 1e6,
        draft=mean_ms("draft_ns"),
        transport=mean_ms("transport_ns"),
        verify=mean_ms("verify_ns"),
        accept=mean_ms("accept_ns"),
        commit=mean_ms("commit_ns"),
        target_forward=mean_ms("target_forward_ns"),
        head_forward=mean_ms("head_forward_ns"),
        split_median=statistics.median(split for timing in timings for split in timing.split_ns) / 1e6,
    )


def line(measured: StepCosts) -> dict[str, Any]:
    """A line of the table of steps, in milliseconds."""
    return {
        "method": measured.method,
        "step": measured.step,
        "draft": measured.draft,
        "wire": measured.transport,
        "verify": measured.verify,
        "accept": measured.accept,
        "commit": measured.commit,
        "T_M": measured.target_forward,
        "T_D": measured.head_forward,
        "split": measured.split_median,
    }


def split_check(measured: StepCosts) -> Check:
    """The bound of the split cost at one session."""
    return Check.at_most(f"median split cost of {measured.method}, ms", measured.split_median, SPLIT_BOUND_MS)


def parts_of(step: StepCosts) -> dict[str, float]:
    """A mean step in milliseconds, cut into what the models compute and what is done around them."""
    head_forward = min(step.head_forward, step.draft)
    target_forward = min(step.target_forward, step.verify)
    return {
        "head forward": head_forward,
        "rest of drafting": step.draft - head_forward,
        "target forward": target_forward,
        "rest of verifying": step.verify - target_forward,
        "transport": step.transport,
        "accept": step.accept,
        "commit": step.commit,
    }
