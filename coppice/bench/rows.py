"""`coppice bench rows`: what more rows cost a forward, and what is lost between bare forwards and plain decoding."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from coppice.bench.asking import GREEDY, Ids, asking, in_turn
from coppice.bench.bare import Bare
from coppice.bench.measuring import Bench
from coppice.bench.progress import Progress
from coppice.bench.report import Check
from coppice.client.completion import Completion
from coppice.machine import this_machine

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
    eight, eight_at_once = (
        [prompts[number % len(prompts)] for number in range(MANY)],
        asking(bench.client, new_tokens, MANY, policy="plain"),
    )
    over_generate, over_bare = [], []
    with Progress("answers", ROUNDS * (2 * len(prompts) + MANY)) as progress:
        for number in range(ROUNDS):
            progress.say("plain decoding and generate")
            speeds = {
                way: _tokens_per_s(its) for way, its in in_turn(ways, (prompts, GREEDY), number, progress).items()
            }
            over_generate.append(speeds["plain"] / speeds["generate"])
            progress.say(f"{MANY} sessions and bare forwards")
            answers = in_turn({"plain": eight_at_once}, (eight, GREEDY), number, progress)["plain"]
            over_bare.append(_tokens_per_s(answers) * bare.forward_ms(1, CONTEXT, MANY) / 1e3)
    report.goals += [
        Check.at_least("plain over generate, one session", statistics.median(over_generate), 0.95),
        Check.at_least("plain over bare forwards, eight sessions", statistics.median(over_bare), 0.75),
    ]


def _tokens_per_s(answers: Sequence[Completion]) -> float:
    """Tokens a second of one session, prefill left out."""
    return sum(answer.new_tokens - 1 for answer in answers) / sum(answer.decode_s for answer in answers)
