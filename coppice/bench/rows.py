"""`coppice bench rows`: what more rows cost a forward, and what is lost between bare forwards and plain decoding."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from coppice.bench.asking import GREEDY, Act, Ids, asking
from coppice.bench.bare import Bare
from coppice.bench.measuring import Bench
from coppice.bench.report import Check
from coppice.bench.turns import compare, timed_in_turns
from coppice.client.completion import Completion
from coppice.machine import this_machine
from coppice.training.progress import Progress

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 160  # tokens before the timed rows: about the middle of the answers that are compared
MANY, ROUNDS = 8, 5


def run_rows(bench: Bench, prompts: Sequence[Ids]) -> None:
    """Add a forward's times by rows to the report, and goals: medians of rounds that alternate."""
    report, reference, new_tokens = bench.report, bench.reference, bench.options.max_new_tokens
    bare = Bare(bench.stack.spec, bench.stack.settings, MANY, CONTEXT + max(ROWS))
    by_rows = {count: bare.forward_ms(count, CONTEXT) for count in ROWS}
    lines = [{"rows": count, "ms": ms, "over 1 row": ms / by_rows[1]} for count, ms in by_rows.items()]
    report.add_figures("rows", "one forward, one session", lines)
    if report.dtype == "bfloat16" and (report.device.startswith("cuda") or "amx_bf16" in this_machine().features):
        report.goals.append(Check.at_most("32 rows over 1 row", by_rows[32] / by_rows[1], 1.5))
    ways = {
        "plain": asking(bench.client, new_tokens, policy="plain"),
        "generate": lambda prompts, _: [reference.greedy(ids, new_tokens) for ids in prompts],
    }
    eight = [prompts[number % len(prompts)] for number in range(MANY)]
    eight_at_once = asking(bench.client, new_tokens, MANY, policy="plain")
    speeds: dict[str, Act[float]] = {
        "plain": lambda several, sampling: _tokens_per_s(eight_at_once(several, sampling)),
        "bare": lambda *_: 1e3 / bare.forward_ms(1, CONTEXT, MANY),
    }
    with Progress("answers", 2 * (1 + ROUNDS * len(prompts) + (1 + ROUNDS) * MANY)) as progress:
        progress.say("plain decoding and generate")
        answers = compare(ways, ROUNDS * [([ids], GREEDY) for ids in prompts], progress, report.calm)
        progress.say(f"{MANY} sessions and bare forwards")
        many = timed_in_turns(speeds, ROUNDS * [(eight, GREEDY)], progress, report.calm)
    over_generate = [
        mine.tokens_per_s / theirs.tokens_per_s
        for mine, theirs in zip(answers["plain"], answers["generate"], strict=True)
    ]
    over_bare = [each["plain"] / each["bare"] for each in many]
    report.goals += [
        Check.at_least("plain over generate, one session", statistics.median(over_generate), 0.95),
        Check.at_least("plain over bare forwards, eight sessions", statistics.median(over_bare), 0.75),
    ]


def _tokens_per_s(answers: Sequence[Completion]) -> float:
    """Tokens a second of one session, prefill left out."""
    return sum(answer.new_tokens - 1 for answer in answers) / sum(answer.decode_s for answer in answers)
