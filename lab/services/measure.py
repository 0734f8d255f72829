"""Steps of the services on a target and a head that sleep: what is added to T_M and T_D, and each process's CPU."""

import random
import statistics
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from coppice.limits import TREE_ROOM
from coppice.speculation.sampling import SamplingParams
from coppice.stack.launch import MODULES, Stack
from coppice.stack.spec import HeadSpec, StackSpec
from coppice.training.progress import Progress
from lab.measuring import Bench, asking
from lab.report import Check, costs, make_row
from lab.services import Asleep

HEAD = "asleep"
ASLEEP = {**MODULES, "verifier": "lab.services.verifier", "drafter": "lab.services.drafter"}
"""what is run for each role"""
METHODS = ("plain", f"single:{HEAD}")
PROMPT = 32  # ids


def spec_of(asleep: Asleep, folder: Path, sessions: Sequence[int], new_tokens: int) -> StackSpec:
    """A stack whose target and head sleep, with KV for so many sessions; what they agree on is put into `folder`."""
    asleep.write(folder)
    return StackSpec(
        target=folder,
        name=HEAD,
        heads=(HeadSpec(HEAD, "eagle3", folder),),  # a kind that is given features; the sleeping head is built for any
        dtype="bfloat16",
        verifier_threads=1,
        drafter_threads=1,
        extra={"verifier": {"verifier.kv_tokens": max(sessions) * (PROMPT + new_tokens + 2 * TREE_ROOM)}},
    )


def run_services(bench: Bench, asleep: Asleep, sessions: Sequence[int], temperatures: Sequence[float]) -> None:
    """Add a line for each temperature, number of sessions and method to the report."""
    report, lines, wrong = bench.report, list[dict[str, Any]](), 0
    cells = list(product(temperatures, sessions, METHODS))
    with Progress("cells", len(cells)) as progress:
        for temperature, count, method in cells:
            progress.say(f"{method}, T={temperature:g}, {count} sessions")
            line, mistaken = measured(bench, asleep, method, count, SamplingParams(temperature=temperature))
            lines.append({"method": method, "T": temperature, "sessions": count, **line})
            wrong += mistaken
            progress.add()
    title = f"""T_M {asleep.t_m_ms:g} ms, T_D {asleep.t_d_ms:g} ms: medians of steps, ms; beside: without T_M and T_D
client, verifier, drafter, orchestrator: CPU of a step of one session, ms"""
    report.add_figures("services", title, lines, {"T": "g", "steps/s": ".0f", "sessions/core": ".0f"})
    report.checks.append(Check("wrong answers", wrong, "0", not wrong))


def measured(
    bench: Bench, asleep: Asleep, method: str, sessions: int, sampling: SamplingParams
) -> tuple[dict[str, Any], int]:
    """A line of the table, and how many answers were wrong: one answer a session, at least --n of them.

    Trees are verified whole, as who names a budget has them: what a sleeping forward's rows cost is noise.
    """
    options, ids = bench.options, range(asleep.vocab_size)
    seeds = range(max(options.n, sessions))
    prompts = [tuple(random.Random(seed).choices(ids, k=PROMPT)) for seed in seeds]  # noqa: S311
    ask = asking(bench.client, options.max_new_tokens, sessions, policy=method, budget=options.budget)
    ask(prompts[:1], sampling)
    before, began = _cpu_ns(bench.stack), time.perf_counter()
    answers = ask(prompts, sampling)
    wall_s, after = time.perf_counter() - began, _cpu_ns(bench.stack)
    texts = [asleep.text(prompt, options.max_new_tokens) for prompt in prompts]
    wrong = sum(answer.ids != text for answer, text in zip(answers, texts, strict=True))
    row, (_, split, parts) = make_row(method, answers, [], options.budget), costs(answers)
    timings, steps = [answer.timings for answer in answers], sum(answer.steps for answer in answers)
    beside = np.array([each for timing in timings for each in timing.split_ns]) / 1e6
    used = {name: (after[name] - before[name]) / steps / 1e6 for name in before}
    return {
        "tau": row["tau"],
        "nodes": row["verified_nodes"],
        "step": statistics.median(step for timing in timings for step in timing.step_ns) / 1e6,
        "T_M": parts["target forward"],
        "T_D": parts["head forward"],
        "beside": split,
        "p99": float(np.percentile(beside, 99)),
        "steps/s": steps / wall_s,
        **used,
        "sessions/core": (asleep.t_m_ms + asleep.t_d_ms * (parts["head forward"] > 0)) / used["orchestrator"],
    }, wrong


def _cpu_ns(stack: Stack) -> dict[str, int]:
    """CPU time that each role's process, and this one, has used, in all threads. Linux has a clock for each process."""
    used = {ready.role: time.clock_gettime_ns(~ready.pid << 3 | 2) for ready in stack.services.values()}
    return {**used, "client": time.process_time_ns()}
