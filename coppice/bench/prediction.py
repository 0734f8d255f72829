"""`coppice bench prediction`: what a prediction of the answer gains where it fits, and costs where it is useless.

A task is an edit of code: the client holds another version of what the target is going to say, in which names, lines or
constants differ. That version is made of the target's own greedy answer, with edits in a tenth of its places. The
useless prediction is the answer to another prompt.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from coppice.bench.asking import GREEDY, Ask, Ids, answers_to, asking, judged
from coppice.bench.measuring import Bench
from coppice.bench.report import Check, exactness_checks, make_row, with_speedups
from coppice.bench.turns import compare
from coppice.client.client import Client
from coppice.client.completion import Completion
from coppice.speculation.sampling import SamplingParams
from coppice.training.progress import Progress

KINDS = ("rename", "insert", "constant")
SHARE = 0.1  # of an answer's places that are edited
LINE = 6  # ids of an inserted line
FITS, USELESS = "fits", "useless"
LEAST = {FITS: 3.0, USELESS: 0.97}
"""times the speed of plain decoding"""


def run_prediction(bench: Bench, prompts: Sequence[Ids], methods: Sequence[str]) -> None:
    """Add a row of plain decoding, and of each method without a prediction, with one that fits and a useless one."""
    client, new_tokens = bench.client, bench.options.max_new_tokens
    ways: dict[tuple[str, str], Ask] = {("plain", ""): asking(client, new_tokens, policy="plain")}
    with Progress("answers", len(prompts) + (1 + 3 * len(methods)) * (1 + len(prompts))) as progress:
        plain = []
        for ids in prompts:
            plain += ways["plain", ""]([ids], GREEDY)
            progress.add()
        known = [answer.ids for answer in plain]
        predictions = {
            FITS: [edited(ids, KINDS[at % len(KINDS)], random.Random(at)) for at, ids in enumerate(known)],  # noqa: S311
            USELESS: [*known[1:], known[0]],
        }
        for method in methods:
            ways[method, ""] = asking(client, new_tokens, policy=method)
            for what, its in predictions.items():
                ways[method, what] = predicting(client, dict(zip(prompts, its, strict=True)), new_tokens, method)
        answers = compare(ways, [([ids], GREEDY) for ids in prompts], progress, bench.report.calm)
        progress.say("judging")
        verdicts = judged(bench.reference, [(ids, GREEDY) for ids in prompts], answers)
    rows = [
        make_row(" ".join(filter(None, way)), its, verdicts[way], bench.stack.spec.settings().orchestrator.budget)
        for way, its in answers.items()
    ]
    bench.report.add_methods(rows)
    bench.report.add_figures(
        "predictions",
        "tokens of predictions, each counted once",
        [_counts(way, its, predictions[way[1]]) for way, its in answers.items() if way[1]],
    )
    bench.report.checks += exactness_checks(rows, bench.report.dtype, new_tokens)
    bench.report.goals += (
        Check.at_least(f"{row.method}, x plain", row.speedup, LEAST[what])
        for (_, what), row in zip(answers, with_speedups(rows), strict=True)
        if what
    )


def predicting(client: Client, predictions: Mapping[Ids, Ids], new_tokens: int, policy: str) -> Ask:
    """The way that asks with a prediction of each prompt's answer."""

    def ask(prompts: Sequence[Ids], sampling: SamplingParams) -> list[Completion]:
        options: dict[str, Any] = {"sampling": sampling, "max_new_tokens": new_tokens, "policy": policy}
        return [
            answer for ids in prompts for answer in answers_to(client, [ids], prediction=predictions[ids], **options)
        ]

    return ask


def edited(ids: Ids, kind: str, rng: random.Random) -> Ids:
    """A version of an answer with edits of a kind in SHARE of its places: ids replaced by others of the answer, some of
    them everywhere alike (rename) or each by itself (constant), or as many lines of LINE ids inserted.
    """
    count = round(SHARE * len(ids))
    if kind == "rename":
        often, renamed, left = Counter(ids), dict[int, int](), count
        for token in rng.sample(sorted(often), len(often)):
            if often[token] <= left:
                renamed[token] = rng.choice([other for other in ids if other != token] or ids)
                left -= often[token]
        return tuple(renamed.get(token, token) for token in ids)
    places = set(rng.sample(range(len(ids)), count))
    made: list[int] = []
    for at, token in enumerate(ids):
        if at not in places:
            made.append(token)
        elif kind == "insert":
            made += [*rng.choices(ids, k=LINE), token]
        else:
            made.append(rng.choice([other for other in ids if other != token] or ids))
    return tuple(made)


def _counts(way: tuple[str, str], answers: Sequence[Completion], predictions: Sequence[Ids]) -> dict[str, object]:
    return {
        "method": " ".join(way),
        "predicted": sum(map(len, predictions)),
        "accepted": sum(answer.accepted_prediction_tokens for answer in answers),
        "rejected": sum(answer.rejected_prediction_tokens for answer in answers),
    }
