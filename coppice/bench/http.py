"""`coppice bench http`: how many tokens a second clients get by HTTP beside gRPC, from the same stack in turns."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from statistics import median
from typing import Any

from coppice.bench.asking import GREEDY, Act, Ids, asking
from coppice.bench.measuring import Bench
from coppice.bench.progress import Progress
from coppice.bench.report import Check
from coppice.bench.turns import timed_in_turns
from coppice.errors import Unavailable
from coppice.speculation.sampling import SamplingParams

LEAST = 0.95
"""of gRPC's tokens a second"""
DONE = b"[DONE]"


def run_http(bench: Bench, prompts: Sequence[Ids], methods: Sequence[str], sessions: Sequence[int]) -> None:
    """Add a row for each method and number of sessions: tokens/s by both ways, and the median of their ratios.

    The prompts are asked in groups of so many at once, each group by both ways, in turns. Both clients stream.
    """
    new_tokens, rows = bench.options.max_new_tokens, []
    with Progress("answers", 2 * len(methods) * sum(count + len(prompts) for count in sessions)) as progress:
        for count in sessions:
            groups = [(prompts[at : at + count], GREEDY) for at in range(0, len(prompts), count)]
            for method in methods:
                ways = {
                    "grpc": _speed(asking(bench.client, new_tokens, count, policy=method), new_tokens),
                    "http": _speed(_asking(bench.stack.orchestrator.http, new_tokens, count, method), new_tokens),
                }
                speeds = timed_in_turns(ways, groups, progress, bench.report.calm)
                ratio = median(each["http"] / each["grpc"] for each in speeds)
                said = {f"{way}_tokens_per_s": round(median(each[way] for each in speeds), 1) for way in ways}
                rows.append({"method": method, "sessions": count, **said, "http_over_grpc": round(ratio, 3)})
                name = f"HTTP over gRPC, {method}, {count} sessions"
                bench.report.goals.append(Check.at_least(name, ratio, LEAST))
    bench.report.add_figures("http", "prefill included; medians of groups", rows)


def _speed(ask: Act[object], new_tokens: int) -> Act[float]:
    """Tokens/s of a group that is asked, as its client sees it."""

    def speed(prompts: Sequence[Ids], sampling: SamplingParams) -> float:
        began = time.perf_counter()
        ask(prompts, sampling)
        return len(prompts) * new_tokens / (time.perf_counter() - began)

    return speed


def _asking(address: str, new_tokens: int, sessions: int, method: str) -> Act[object]:
    """The way that asks over HTTP, so many prompts at once."""
    told = {"max_tokens": new_tokens, "ignore_eos": True, "policy": method, "stream": True}

    def one(body: str) -> None:
        connection, answer = HTTPConnection(address), list[Any]()
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            for line in connection.getresponse():
                if line.startswith(b"data: "):
                    data = line.removeprefix(b"data: ").strip()
                    answer.append(data if data == DONE else json.loads(data))
        finally:
            connection.close()
        if answer[-1:] != [DONE]:
            raise Unavailable(f"an answer by HTTP ended with {answer[-1:]}")

    def ask(prompts: Sequence[Ids], sampling: SamplingParams) -> None:
        bodies = [json.dumps(told | {"prompt": ids, "temperature": sampling.temperature}) for ids in prompts]
        with ThreadPoolExecutor(sessions) as pool:
            list(pool.map(one, bodies))

    return ask
