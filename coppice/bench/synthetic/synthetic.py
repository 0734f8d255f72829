"""`coppice bench synthetic`: what a target and heads of some shape would cost and gain, without trained weights.

Times are measured on random weights, in bare loops and through the services. What a draft tree gains is not: it is
drawn from a profile of acceptance by depth. Random heads guess nothing, so a step of the real pipeline commits one
token, and the pipeline tells only what a step costs there beside the bare loops: its efficiency.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from coppice.bench.report import Check, make_row
from coppice.bench.run.bare import Bare, BareDraft
from coppice.bench.run.report import parts_of
from coppice.bench.steps import costs
from coppice.bench.synthetic.profiles import drawn_taus, expected_tau
from coppice.bench.synthetic.report import SyntheticReport, SyntheticRow
from coppice.client.client import Client
from coppice.limits import MAX_TREE_NODES
from coppice.speculation.sampling import SamplingParams
from coppice.stack.launch import Stack
from coppice.stack.spec import StackSpec

PLAIN = "plain"
DRAWN = 200  # answers
ANSWER = 48  # tokens that bare drafts are timed along


@dataclass(frozen=True)
class SyntheticPlan:
    """What is measured, and what is assumed."""

    rows: tuple[int, ...]
    """of a forward, a session"""
    sessions: tuple[int, ...]
    budget: int
    context: int
    """tokens before the timed rows"""
    new_tokens: int
    profile: Mapping[str, tuple[float, ...]]
    """alpha by depth, of each head"""
    vocab_size: int
    seed: int

    def ids(self, count: int, salt: int = 0) -> list[int]:
        """Random ids."""
        return random.Random(self.seed + salt).choices(range(self.vocab_size), k=count)  # noqa: S311


@dataclass(frozen=True)
class BareTimes:
    """Milliseconds: of a forward by (sessions, rows a session), of a draft by (sessions, head)."""

    forwards: dict[tuple[int, int], float]
    drafts: dict[tuple[int, str], BareDraft]

    def by_sessions(self) -> dict[str, dict[str, float]]:
        """The forwards' times as JSON holds them."""
        found: dict[str, dict[str, float]] = {}
        for (sessions, rows), took in self.forwards.items():
            found.setdefault(str(sessions), {})[str(rows)] = took
        return found


def room(plan: SyntheticPlan) -> dict[str, dict[str, int]]:
    """KV capacity that is enough for one session of the pipeline, for a large model's would be large."""
    tokens = 4 * (plan.context + plan.new_tokens + 2 * MAX_TREE_NODES)
    return {"verifier": {"verifier.kv_tokens": tokens}, "drafter": {"drafter.kv_tokens": tokens}}


def measure_bare(spec: StackSpec, plan: SyntheticPlan, say: Callable[[str], None]) -> BareTimes:
    """Bare loops in this process, on the device of the spec."""
    settings = spec.settings()
    rows = sorted({1, plan.budget + 1, *plan.rows})
    prompt, answer = plan.ids(plan.context), plan.ids(ANSWER)
    bare = Bare(spec, settings, max(plan.sessions), plan.context + len(answer) + max(rows))
    forwards, drafts = {}, {}
    for sessions in plan.sessions:
        for count in rows:
            say(f"a forward of {sessions} x {count} rows")
            forwards[sessions, count] = bare.forward_ms(count, plan.context, sessions)
        for head in spec.heads:
            say(f"{sessions} drafts of {head.name}")
            drafts[sessions, head.name] = bare.draft(head.name, prompt, answer, SamplingParams(), plan.budget, sessions)
    return BareTimes(forwards, drafts)


def expected_rows(spec: StackSpec, plan: SyntheticPlan, times: BareTimes) -> list[SyntheticRow]:
    """For plain decoding and each head what the profile and the bare times give: tau / (T_M + T_D)."""
    found = []
    for sessions in plan.sessions:
        plain = _row(PLAIN, (), plan, sessions, times.forwards[sessions, 1], BareDraft(), ())
        found.append(replace(plain, speedup=1.0))
        for head in spec.heads:
            forward = times.forwards[sessions, plan.budget + 1]
            draft = times.drafts[sessions, head.name]
            row = _row(f"single:{head.name}", (head.name,), plan, sessions, forward, draft, plan.profile[head.name])
            found.append(replace(row, speedup=row.tokens_per_s / plain.tokens_per_s))
    return found


def _row(
    method: str,
    heads: tuple[str, ...],
    plan: SyntheticPlan,
    sessions: int,
    t_m_ms: float,
    draft: BareDraft,
    alphas: Sequence[float],
) -> SyntheticRow:
    tau, step_ms = expected_tau(alphas), t_m_ms + draft.forward_ms
    taus = drawn_taus(alphas, DRAWN, plan.new_tokens, plan.seed)
    return SyntheticRow(
        method=method,
        policy=method,
        heads=heads,
        budget=plan.budget if heads else 0,
        sessions=sessions,
        prompts=0,
        tokens=0,
        tau=tau,
        tokens_per_s=sessions * tau / step_ms * 1e3,
        draft_share=draft.forward_ms / step_ms,
        verified_nodes=float(plan.budget if heads else 0),
        t_m_ms=t_m_ms,
        t_d_ms=draft.forward_ms,
        t_d_total_ms=draft.total_ms,
        drawn_tau=tuple(np.quantile(taus, (0.05, 0.5, 0.95)).tolist()),
    )


def measure_pipeline(
    spec: StackSpec,
    plan: SyntheticPlan,
    times: BareTimes,
    report: SyntheticReport,
    answers: int,
    say: Callable[[str], None],
) -> None:
    """Answers of the real services, one session: fills in each row's step, its parts and its efficiency."""
    prompts = [plan.ids(plan.context, salt=number) for number in range(answers)]
    with Stack(replace(spec, budget=plan.budget)) as stack, Client(stack.address) as client:
        for number, row in enumerate(report.synthetic_rows()):
            if row.sessions == 1:
                say(f"the pipeline: {row.method}")
                report.rows[number] = _through(client, row, prompts, plan, times)
    report.checks.append(Check("processes not stopped cleanly", len(stack.unclean), "0", not stack.unclean))


def _through(
    client: Client, row: SyntheticRow, prompts: Sequence[Sequence[int]], plan: SyntheticPlan, times: BareTimes
) -> SyntheticRow:
    told = {"policy": row.policy, "max_new_tokens": plan.new_tokens, "ignore_eos": True}
    client.generate(prompts[0], **told)  # type: ignore[arg-type]
    answered = [client.generate(prompt, **told) for prompt in prompts]  # type: ignore[arg-type]
    step, measured = costs(row.method, answered), make_row(row.method, answered, [], row.budget)
    counts, forwards_ms = zip(
        *((rows, ms) for (at_once, rows), ms in times.forwards.items() if at_once == 1), strict=True
    )
    t_m_ms = float(np.interp(measured.verified_nodes + 1, counts, forwards_ms))
    return replace(
        row,
        pipeline_step_ms=step.step,
        pipeline_tau=measured.tau,
        efficiency=(t_m_ms + row.t_d_ms) / step.step,
        verified_nodes=measured.verified_nodes,
        late_drafts=measured.late_drafts,
        parts_ms=parts_of(step),
    )
