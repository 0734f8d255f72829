"""What a target and heads of some shape would cost and gain, without trained weights.

Times are measured on random weights, in bare loops and through the services. What a draft tree gains is not: it comes
from a profile of acceptance by depth. Random heads guess nothing, so a step of the real pipeline commits one token, and
the pipeline tells only what a step costs there beside the bare loops: its efficiency.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coppice.bench.bare import NO_DRAFT, Bare, BareDraft
from coppice.bench.exact import answers_to
from coppice.bench.options import running
from coppice.bench.report import Report, make_row
from coppice.bench.steps import costs, parts_of
from coppice.bench.synthetic.profiles import expected_tau
from coppice.client.client import Client
from coppice.limits import MAX_TREE_NODES
from coppice.speculation.sampling import SamplingParams
from coppice.stack.spec import StackSpec

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


def measure_bare(spec: StackSpec, plan: SyntheticPlan, say: Callable[[str], None]) -> BareTimes:
    """Run bare loops in this process, on the device of the spec."""
    rows = sorted({1, plan.budget + 1, *ROWS})
    prompt, answer = plan.ids(CONTEXT, 0), plan.ids(NEW_TOKENS, 1)
    bare = Bare(spec, spec.settings(), max(plan.sessions), CONTEXT + NEW_TOKENS + max(rows))
    forwards, drafts = {}, {}
    for sessions in plan.sessions:
        for count in rows:
            say(f"a forward of {sessions} x {count} rows")
            forwards[sessions, count] = bare.forward_ms(count, CONTEXT, sessions)
        for head in spec.heads:
            say(f"{sessions} drafts of {head.name}")
            drafts[sessions, head.name] = bare.draft(head.name, prompt, answer, SamplingParams(), plan.budget, sessions)
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
    spec: StackSpec, plan: SyntheticPlan, times: BareTimes, report: Report, say: Callable[[str], None]
) -> list[Line]:
    """Answers of the real services, one session: each method's step, its parts and its efficiency."""
    prompts = [tuple(plan.ids(CONTEXT, seed)) for seed in range(ANSWERS + 1)]
    lines = []
    with running(replace(spec, budget=plan.budget), report) as stack, Client(stack.address) as client:
        for method in (PLAIN, *(f"single:{head.name}" for head in spec.heads)):
            say(f"the pipeline: {method}")
            _, *answers = answers_to(client, prompts, policy=method, max_new_tokens=NEW_TOKENS)
            step, row = costs(method, answers), make_row(method, answers, [], plan.budget)
            draft = times.drafts.get((1, method.removeprefix("single:")), BareDraft())
            bare_ms = times.forward_ms(row.verified_nodes + 1) + draft.forward_ms
            line = {"method": method, "step_ms": step["step"], "efficiency": bare_ms / step["step"], "tau": row.tau}
            lines.append(line | parts_of(step))
    return lines
