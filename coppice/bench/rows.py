"""`coppice bench rows`: what more rows cost a forward, and what is lost between bare forwards and plain decoding."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from coppice.bench.exact import answers_to
from coppice.bench.reference import Reference
from coppice.bench.report import Check
from coppice.client.client import Client
from coppice.client.completion import Completion

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 160  # tokens before the timed rows: about the middle of the answers that are compared
MANY = 8


def forward_ms(target: Path, device: str, dtype: str, threads: int) -> tuple[dict[int, float], float]:
    """Milliseconds of a bare forward by rows at one session, and of one row for each of eight sessions."""
    import torch

    from coppice.engine.loading import load_engine

    torch.set_num_threads(threads)
    engine = load_engine(target, device=device, dtype=dtype, kv_tokens=MANY * (CONTEXT + max(ROWS)) * 2)
    engine.timings((1, 32), context=CONTEXT, repeats=3)
    alone = engine.timings(ROWS, context=CONTEXT)
    many = engine.timings((1,), sessions=MANY, context=CONTEXT)
    return {rows: took / 1e6 for rows, took in alone.items()}, many[1] / 1e6


def rows_check(by_rows: dict[int, float], dtype: str, matrix_units: bool) -> Check:
    """32 rows cost at most 1.5 times one: a promise for bfloat16 on hardware that has units for matrices."""
    ratio = by_rows[32] / by_rows[1]
    if dtype != "bfloat16" or not matrix_units:
        return Check("32 rows over 1 row", round(ratio, 3), "not applicable", True, "no AMX or GPU, or not bfloat16")
    return Check.at_most("32 rows over 1 row", ratio, 1.5)


def plain_over_generate(
    client: Client, reference: Reference, prompts: Sequence[tuple[int, ...]], new_tokens: int, rounds: int
) -> Check:
    """Plain decoding at one session over transformers' `generate`, alternating; the median of the rounds' ratios."""
    ratios = []
    for _ in range(rounds):
        ours = _tokens_per_s(answers_to(client, prompts, policy="plain", max_new_tokens=new_tokens))
        ratios.append(ours / _tokens_per_s([reference.greedy(ids, new_tokens) for ids in prompts]))
    return Check.at_least("plain over generate, one session", statistics.median(ratios), 0.95)


def plain_over_bare(
    client: Client, bare_ms: Callable[[], float], prompts: Sequence[tuple[int, ...]], new_tokens: int, rounds: int
) -> Check:
    """Plain decoding of eight sessions over the tokens that the same packed forwards give in a bare loop."""
    eight = [prompts[number % len(prompts)] for number in range(MANY)]
    ratios = []
    for _ in range(rounds):
        answers = answers_to(client, eight, MANY, policy="plain", max_new_tokens=new_tokens)
        ratios.append(_tokens_per_s(answers) * bare_ms() / 1e3)
    return Check.at_least("plain over bare forwards, eight sessions", statistics.median(ratios), 0.75)


def _tokens_per_s(answers: Sequence[Completion]) -> float:
    """Tokens a second of one session, prefill left out."""
    return sum(answer.new_tokens - 1 for answer in answers) / sum(answer.decode_s for answer in answers)
