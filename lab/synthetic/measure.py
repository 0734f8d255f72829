"""What a target and heads of some shape would cost and gain, without trained weights.

Times are measured on random weights, in bare loops and through the services. What a draft tree gains is not: it comes
from a profile of acceptance by depth. Random heads guess nothing, so a step of the real pipeline commits one token, and
the pipeline tells only what a step costs there beside the bare loops: its efficiency.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coppice.client.client import Client
from coppice.limits import MAX_TREE_NODES
from coppice.stack.spec import StackSpec
from coppice.training.progress import Progress
from lab.asking import GREEDY, asking, timed
from lab.bare import NO_DRAFT, Bare, BareDraft
from lab.measuring import running
from lab.options import Options
from lab.report import Report, make_row
from lab.steps import costs, parts_of
from lab.synthetic.profiles import expected_tau

PLAIN = "plain"
ROWS = (1, 16, 32, 60, 90)  # of a forward, a session
CONTEXT = 300  # tokens before the timed rows
NEW_TOKENS = 48  # of an answer of the pipeline; bare drafts are timed along as many
ANSWERS = 3  # through the services, of each method
NOTE = "synthetic: random weights, acceptance from a profile"

Line = dict[str, Any]


@dataclass(frozen=True)
class SyntheticPlan:
    """What is measured, and what is assumed."""

    sessions: tuple[int, ...]
    budget: int
    profile: Mapping[str, tuple[float, ...]]
    """alpha by depth, of each head"""
    vocab_size: int

    def ids(self, count: int, seed: int) -> list[int]:
        """Random ids."""
        return random.Random(seed).choices(range(self.vocab_size), k=count)  # noqa: S311


@dataclass(frozen=True)
class BareTimes:
    """Milliseconds: of a forward by (sessions, rows a session), of a draft by (sessions, head)."""

    forwards: dict[tuple[int, int], float]
    drafts: dict[tuple[int, str], BareDraft]

    def lines(self) -> list[Line]:
        """The forwards' times, a line for each number of sessions."""
        counts = sorted({sessions for sessions, _ in self.forwards})
        return [
            {"sessions": str(count)} | {str(rows): took for (at, rows), took in self.forwards.items() if at == count}
            for count in counts
        ]

    def forward_ms(self, rows: float) -> float:
        """A forward of one session over so many rows, between the measured ones in proportion."""
        alone = {count: took for (sessions, count), took in self.forwards.items() if sessions == 1}
        return float(np.interp(rows, list(alone), list(alone.values())))


def room() -> dict[str, dict[str, int]]:
    """KV capacity that is enough for one session of the pipeline, for a large model's would be large."""
    tokens = 4 * (CONTEXT + NEW_TOKENS + 2 * MAX_TREE_NODES)
    return {"verifier": {"verifier.kv_tokens": tokens}, "drafter": {"drafter.kv_tokens": tokens}}


def run_synthetic(spec: StackSpec, plan: SyntheticPlan, report: Report, options: Options) -> None:
    """Add bare times, what is expected, and steps of the services to the report."""
    assumed = {"shape": options.shape, "profile_name": options.profile, "profile": plan.profile, "budget": plan.budget}
    report.figures |= {"synthetic": NOTE, **assumed, "context": CONTEXT}
    on, pipeline = f"{NOTE}\n{options.shape}, {report.dtype}, {report.device}", options.pipeline and 1 in plan.sessions
    rows = sorted({1, plan.budget + 1, *ROWS})
    with Progress(
        "cells", len(plan.sessions) * (len(rows) + len(spec.heads)) + pipeline * (1 + len(spec.heads)) * (1 + ANSWERS)
    ) as progress:
        times = measure_bare(spec, plan, rows, progress)
        report.add_figures("forward_ms", f"{on}: milliseconds of a forward by rows a session", times.lines())
        report.rows = expected_lines(spec, plan, times)
        title = f"{on}: expected with profile {options.profile}, budget {plan.budget}"
        report.add_figures("expected", title, report.rows, {"draft_share": ".0%"})
        if pipeline:
            steps = measure_pipeline(spec, plan, times, report, progress)
            report.add_figures("pipeline", f"{on}: milliseconds a step of the services, one session", steps)


def measure_bare(spec: StackSpec, plan: SyntheticPlan, rows: Sequence[int], progress: Progress) -> BareTimes:
    """Run bare loops in this process, on the device of the spec."""
    prompt, answer = plan.ids(CONTEXT, 0), plan.ids(NEW_TOKENS, 1)
    bare = Bare(spec, spec.settings(), max(plan.sessions), CONTEXT + NEW_TOKENS + max(rows))
    forwards, drafts = {}, {}
    for sessions in plan.sessions:
        for count in rows:
            progress.say(f"a forward of {sessions} x {count} rows")
            forwards[sessions, count] = bare.forward_ms(count, CONTEXT, sessions)
            progress.add()
        for head in spec.heads:
            progress.say(f"{sessions} drafts of {head.name}")
            drafts[sessions, head.name] = bare.draft(head.name, prompt, answer, GREEDY, plan.budget, sessions)
            progress.add()
    return BareTimes(forwards, drafts)


def expected_lines(spec: StackSpec, plan: SyntheticPlan, times: BareTimes) -> list[Line]:
    """For plain decoding and each head what the profile and the bare times give: tau / (T_M + T_D)."""
    lines: list[Line] = []
    for sessions in plan.sessions:
        plain_ms = times.forwards[sessions, 1]
        ways = [(PLAIN, plain_ms, NO_DRAFT, 1.0)]
        for head in spec.heads:
            forward_ms, draft = times.forwards[sessions, plan.budget + 1], times.drafts[sessions, head.name]
            ways.append((f"single:{head.name}", forward_ms, draft, expected_tau(plan.profile[head.name])))
        for method, forward_ms, draft, tau in ways:
            step_ms = forward_ms + draft.forward_ms
            lines.append(
                {
                    "method": method,
                    "sessions": sessions,
                    "t_m_ms": forward_ms,
                    "t_d_ms": draft.forward_ms,
                    "t_d_total_ms": draft.total_ms,
                    "tau": tau,
                    "tokens_per_s": sessions * tau / step_ms * 1e3,
                    "draft_share": draft.forward_ms / step_ms,
                    "speedup": tau / step_ms * plain_ms,
                }
            )
    return lines


def measure_pipeline(
    spec: StackSpec, plan: SyntheticPlan, times: BareTimes, report: Report, progress: Progress
) -> list[Line]:
    """Answers of the real services, one session: each method's step, its parts and its efficiency."""
    prompts = [tuple(plan.ids(CONTEXT, seed)) for seed in range(ANSWERS)]
    lines = []
    with running(replace(spec, budget=plan.budget), report) as stack, Client(stack.address) as client:
        progress.say("the services")
        methods = (PLAIN, *(f"single:{head.name}" for head in spec.heads))
        ways = {method: asking(client, NEW_TOKENS, policy=method) for method in methods}
        for method, answers in timed(ways, prompts, progress).items():
            step, row = costs(method, answers), make_row(method, answers, [], plan.budget)
            draft = times.drafts.get((1, method.removeprefix("single:")), NO_DRAFT)
            bare_ms = times.forward_ms(row.verified_nodes + 1) + draft.forward_ms
            line = {"method": method, "step_ms": step["step"], "efficiency": bare_ms / step["step"], "tau": row.tau}
            lines.append(line | parts_of(step))
    return lines
