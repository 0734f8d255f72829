"""Tables of whole answers: the same prompts and seeds, drafted in several ways by the same heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from coppice.bench.exact import answers_to, judged
from coppice.bench.options import numbers, prompt_ids, reference_of, running, vocab_size_of
from coppice.bench.paper.tables import Options, heads_of
from coppice.bench.reference import Reference
from coppice.bench.report import Check, Report, Row, make_row, method_table, with_speedups
from coppice.client.client import Client
from coppice.client.completion import Completion
from coppice.config.sections import FEATURE_KINDS
from coppice.speculation.sampling import SamplingParams
from coppice.stack.spec import HeadSpec, StackSpec

COUPLED_KINDS = ("lm", *FEATURE_KINDS)
SAMPLING_KINDS = ("bigram", "lm")
GAINS = {"lm": 1.15, "specblock": 1.15}
"""what coupling multiplies tau by at T=1, at least, by kind of head"""
SEED = 1

Requests = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""what requests say, by head and by way to draft"""


def coupling(spec: StackSpec, options: Options, report: Report, say: Callable[[str], None]) -> None:
    """tau with the target's own noise in drafting and without it (docs/architecture.md)."""
    kinds = {head.name: head.kind for head in heads_of(spec.heads, COUPLED_KINDS)}
    requests: Requests = {
        head: {"coupled": {"policy": f"single:{head}"}, "uncoupled": {"policy": f"single:{head}", "coupled": False}}
        for head in kinds
    }
    rows = _measured(spec, options, requests, report, say)
    report.checks += coupling_checks(rows, kinds)


def chains(spec: StackSpec, options: Options, report: Report, say: Callable[[str], None]) -> None:
    """Trees, chains, and chains that are sampled and judged by p/q rejection, whose texts are others at T > 0."""
    heads = heads_of(spec.heads, SAMPLING_KINDS)
    requests: Requests = {
        head.name: {
            "tree": {"policy": f"single:{head.name}"},
            "chain": {"policy": f"single:{head.name}-chain"},
            "p/q": {"policy": f"single:{head.name}", "pq": True},
        }
        for head in heads
    }
    _measured(replace(spec, heads=with_chains(heads, spec.target)), options, requests, report, say)


def with_chains(heads: Sequence[HeadSpec], target: Path) -> tuple[HeadSpec, ...]:
    """Each head, able to sample over the target's vocabulary, and beside it HEAD-chain, which drafts one branch."""
    vocabulary = ("drafter.vocab_size", vocab_size_of(target))
    several: list[HeadSpec] = []
    for head in heads:
        several.append(replace(head, flags=(*head.flags, vocabulary)))
        several.append(replace(head, name=f"{head.name}-chain", flags=(*head.flags, ("drafter.chain", True))))
    return tuple(several)


def _measured(
    spec: StackSpec, options: Options, requests: Requests, report: Report, say: Callable[[str], None]
) -> dict[tuple[float, str, str], Row]:
    """Decode with a stack of the spec; see `decode`."""
    temperatures = numbers("temperatures", options.temperatures, float)
    with running(spec, report) as stack, Client(stack.address) as client:
        reference = reference_of(spec)
        prompts = prompt_ids(options.prompts, options.n, client, reference, options.max_new_tokens)
        return decode(client, reference, requests, prompts, temperatures, options.max_new_tokens, report, say)


def decode(
    client: Client,
    reference: Reference,
    requests: Requests,
    prompts: Sequence[tuple[int, ...]],
    temperatures: Sequence[float],
    new_tokens: int,
    report: Report,
    say: Callable[[str], None],
) -> dict[tuple[float, str, str], Row]:
    """Answer every prompt in every way, in an order that turns around; the report gets rows, tables and a check.

    Returns the rows by temperature, head and way.
    """
    ways: dict[tuple[str, str], Mapping[str, Any]] = {("", "plain"): {"policy": "plain"}}
    ways |= {(head, way): asked for head, its in requests.items() for way, asked in its.items()}
    budget = client.describe().default_budget
    rows: dict[tuple[float, str, str], Row] = {}
    for temperature in temperatures:
        say(f"T={temperature:g}")
        asked = [(ids, SamplingParams(temperature=temperature, seed=SEED + at)) for at, ids in enumerate(prompts)]
        answers: dict[tuple[str, str], list[Completion]] = {key: [] for key in ways}
        for number, (ids, sampling) in enumerate([asked[0], *asked]):  # the first one warms up
            for key in list(ways)[:: -1 if number % 2 else 1]:
                answers[key] += answers_to(client, [ids], sampling=sampling, max_new_tokens=new_tokens, **ways[key])
        expected = [answer.ids for answer in answers["", "plain"][1:]]
        measured = []
        for (head, way), (_, *its) in answers.items():
            free = temperature > 0 and ways[head, way].get("pq")  # its law is the target's, its draws are others
            verdicts = judged(reference, asked, its, expected) if head and not free else []
            measured.append(make_row(f"{head} {way}".strip(), its, verdicts, budget if head else 0))
        measured = with_speedups(measured)
        report.tables.append(method_table(f"{report.command}, T={temperature:g}, {report.dtype}", measured))
        for (head, way), row in list(zip(ways, measured, strict=True))[1:]:
            rows[temperature, head, way] = row
            report.rows.append(row.to_json() | {"temperature": temperature, "way": way})
    wrong = sum(row.verdicts.wrong for row in rows.values())
    report.checks.append(Check("wrong answers", wrong, "0", wrong == 0))
    return rows


def coupling_checks(rows: Mapping[tuple[float, str, str], Row], kinds: Mapping[str, str]) -> list[Check]:
    """What coupling gains at T = 1, for the kinds that promise something."""
    return [
        Check.at_least(
            f"tau of {head} coupled over uncoupled, T=1", row.tau / rows[1.0, head, "uncoupled"].tau, GAINS[kinds[head]]
        )
        for (temperature, head, way), row in rows.items()
        if temperature == 1 and way == "coupled" and kinds[head] in GAINS
    ]
