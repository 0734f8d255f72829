"""`bench paper coupling`: the same prompts and seeds, drafted with the target's own noise and without it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from coppice.bench.asking import Ids, asking, judged
from coppice.bench.measuring import Bench
from coppice.bench.report import Check, Row, make_row, method_table, with_speedups
from coppice.bench.turns import compare
from coppice.config.sections import FEATURE_KINDS
from coppice.pictures.style import looks
from coppice.speculation.sampling import SamplingParams
from coppice.stack.spec import HeadSpec
from coppice.training.progress import Progress

COUPLED_KINDS = ("lm", *FEATURE_KINDS)
GAINS = {"lm": 1.15, "specblock": 1.15}
"""what coupling is to multiply tau by at T=1, at least, by kind of head"""
SEED = 1
COUPLED, UNCOUPLED = "coupled", "uncoupled"

Way = tuple[str, str]
"""a head, and how it drafts"""
Requests = dict[Way, dict[str, Any]]
"""what requests say, by way"""


def coupled(heads: Sequence[HeadSpec], budgets: Sequence[int]) -> Requests:
    """Every head with the target's own noise in drafting and without it (docs/architecture.md), by budget."""
    requests: Requests = {}
    for head, budget in product(heads, budgets):
        asked = {"policy": f"single:{head.name}", "budget": budget}
        requests[head.name, f"{COUPLED} B={budget}"] = asked
        requests[head.name, f"{UNCOUPLED} B={budget}"] = {**asked, "coupled": False}
    return requests


def decode(
    bench: Bench, requests: Requests, prompts: Sequence[Ids], temperatures: Sequence[float]
) -> dict[tuple[float, Way], Row]:
    """Answer every prompt in every way, in turns; the report gets rows, tables and a check. Returns the rows.

    At temperature 0 there is no noise to draft without, and such ways are left out.
    """
    report, plain = bench.report, ("", "plain")
    every = {plain: {"policy": "plain", "budget": 0}, **requests}
    rows: dict[tuple[float, Way], Row] = {}
    with Progress("answers", len(every) * (1 + len(prompts)) * len(temperatures)) as progress:
        for temperature in temperatures:
            progress.say(f"T={temperature:g}")
            ways = {
                way: asking(bench.client, bench.options.max_new_tokens, **options)
                for way, options in every.items()
                if temperature or options.get("coupled", True)
            }
            asked = [(ids, SamplingParams(temperature=temperature, seed=SEED + at)) for at, ids in enumerate(prompts)]
            answers = compare(ways, [([ids], sampling) for ids, sampling in asked], progress, report.calm)
            verdicts = judged(bench.reference, asked, answers)
            measured = with_speedups(
                [
                    make_row(" ".join(way).strip(), its, verdicts[way], every[way]["budget"])
                    for way, its in answers.items()
                ]
            )
            report.tables.append(method_table(f"{report.command}, T={temperature:g}, {report.dtype}", measured))
            for way, row in zip(ways, measured, strict=True):
                rows[temperature, way] = row
                if way != plain:
                    report.rows.append(row.to_json() | {"temperature": temperature, "way": way[1]})
    wrong = sum(row.verdicts.wrong for row in rows.values())
    report.checks.append(Check("wrong answers", wrong, "0", wrong == 0))
    return rows


def coupling_goals(rows: Mapping[tuple[float, Way], Row], kinds: Mapping[str, str]) -> Iterator[Check]:
    """What coupling is to gain at T = 1, for the kinds that promise something."""
    for (temperature, (head, way)), row in rows.items():
        if temperature == 1 and way.startswith(COUPLED) and kinds[head] in GAINS:
            gain = row.tau / rows[1.0, (head, way.replace(COUPLED, UNCOUPLED))].tau
            yield Check.at_least(f"tau of {head} {way} over {UNCOUPLED}, T=1", gain, GAINS[kinds[head]])


def draw_coupling(rows: Mapping[tuple[float, Way], Row], file: Path) -> None:
    """Draw tau and tokens/s over the budget of every head, a column a temperature; broken lines are uncoupled."""
    from matplotlib.figure import Figure

    temperatures = sorted({temperature for temperature, _ in rows})
    styles = looks(dict.fromkeys(head for _, (head, _) in rows if head))
    figure = Figure(figsize=(1.6 + 3.0 * len(temperatures), 6.0), layout="constrained")
    panels = figure.subplots(2, len(temperatures), sharex=True, sharey="row", squeeze=False)
    for column, temperature in enumerate(temperatures):
        for line, (name, label) in enumerate((("tau", "tau"), ("tokens_per_s", "tokens/s"))):
            panel = panels[line][column]
            for head, way in product(styles, (COUPLED, UNCOUPLED)):
                own = sorted(
                    (row.budget, getattr(row, name))
                    for (at, (whose, how)), row in rows.items()
                    if (at, whose) == (temperature, head) and how.startswith(way)
                )
                look, named = styles[head], head if way == COUPLED else None
                drawn = look.drawn | {"linestyle": "-" if way == COUPLED else ":"}
                panel.plot([at for at, _ in own], [value for _, value in own], **drawn, label=named)
            if name == "tokens_per_s":
                panel.axhline(rows[temperature, ("", "plain")].tokens_per_s, color="0.5", linewidth=0.8)
                panel.set_xlabel("budget")
            else:
                panel.set_title(f"T = {temperature:g}")
            panel.set_ylabel(label if column == 0 else "")
            panel.spines[["top", "right"]].set_visible(False)
    panels[0][-1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
