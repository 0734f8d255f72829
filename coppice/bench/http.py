"""`coppice bench http`: how many tokens a second clients get by HTTP beside gRPC, from the same stack in turns."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from statistics import median
from typing import Any

from coppice.bench.asking import Ids
from coppice.bench.measuring import Bench
from coppice.bench.progress import Progress
from coppice.bench.report import Check
from coppice.client.client import Client
from coppice.errors import Unavailable

LEAST = 0.95
"""of gRPC's tokens a second"""
DONE = b"[DONE]"
WAYS = ("gRPC", "HTTP")


def run_http(bench: Bench, prompts: Sequence[Ids], methods: Sequence[str], sessions: Sequence[int]) -> None:
    """Add a row for each method and number of sessions: tokens/s by both ways, and the median of their ratios.

    The prompts are asked in groups of so many at once, each group by both ways, in turns. Both clients stream.
    """
    by = dict(zip(WAYS, (_by_grpc(bench.client), _by_http(bench.stack.orchestrator.http)), strict=True))
    new_tokens, rows = bench.options.max_new_tokens, []
    with Progress("answers", 2 * len(methods) * sum(count + len(prompts) for count in sessions)) as progress:
        for count in sessions:
            for method in methods:
                speeds: dict[str, list[float]] = {way: [] for way in WAYS}
                groups = [prompts[at : at + count] for at in range(0, len(prompts), count)]
                for number, group in enumerate((prompts[:count], *groups)):
                    for way in WAYS[:: -1 if number % 2 else 1]:
                        began = time.perf_counter()
                        with ThreadPoolExecutor(count) as pool:
                            list(pool.map(lambda ids: by[way](ids, new_tokens, method), group))  # noqa: B023
                        if number:  # the first group warms up
                            speeds[way].append(len(group) * new_tokens / (time.perf_counter() - began))
                        progress.add(len(group))
                ratio = median(http / grpc for grpc, http in zip(*speeds.values(), strict=True))
                said = {f"{way.lower()}_tokens_per_s": round(median(speeds[way]), 1) for way in WAYS}
                rows.append({"method": method, "sessions": count, **said, "http_over_grpc": round(ratio, 3)})
                name = f"HTTP over gRPC, {method}, {count} sessions"
                bench.report.goals.append(Check.at_least(name, ratio, LEAST))
    bench.report.add_figures("http", "prefill included; medians of groups", rows)


def _by_grpc(client: Client) -> Callable[[Ids, int, str], None]:
    def ask(ids: Ids, new_tokens: int, method: str) -> None:
        client.generate(ids, max_new_tokens=new_tokens, ignore_eos=True, policy=method)

    return ask


def _by_http(address: str) -> Callable[[Ids, int, str], None]:
    def ask(ids: Ids, new_tokens: int, method: str) -> None:
        asked = {"prompt": ids, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "policy": method}
        connection, answer = HTTPConnection(address), list[Any]()
        try:
            body = json.dumps(asked | {"stream": True})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            for line in connection.getresponse():
                if line.startswith(b"data: "):
                    last = line.removeprefix(b"data: ").strip()
                    answer.append(last if last == DONE else json.loads(last))
        finally:
            connection.close()
        if answer[-1:] != [DONE]:
            raise Unavailable(f"an answer by HTTP ended with {answer[-1:]}")

    return ask
