"""`coppice bench paper`: each command is one of the papers' tables."""

from __future__ import annotations

from dataclasses import replace

import typer

from coppice.bench.measuring import measuring, reporting
from coppice.bench.options import ASKED, TRAINED, Options, command, with_heads

paper = typer.Typer(help="One of the papers' tables, measured on these models.", no_args_is_help=True)


@command(paper, *ASKED, "goals", "plots", n=16, max_new_tokens=128, temperatures="0.5,0.7,1", budgets="31")
def coupling(options: Options) -> None:
    """tau with coupled drafting and without, by budget, for the heads that can use the target's noise."""
    from coppice.bench.paper.coupling import COUPLED_KINDS, coupled, coupling_goals, decode, draw_coupling
    from coppice.bench.questions import prompt_ids

    spec = with_heads(options, COUPLED_KINDS, (*TRAINED, "lm"))
    temperatures, asked = options.temperatures_asked(), prompt_ids(options, spec)
    with measuring("bench paper coupling", spec, options) as bench:
        measured = decode(bench, coupled(spec.heads, options.budgets_asked()), asked, temperatures)
        bench.report.goals += coupling_goals(measured, {head.name: head.kind for head in spec.heads})
        if options.plots:
            draw_coupling(measured, options.plots / "coupling.png")


@command(paper, "target", "heads", "prompts", "category", "chat", "skip_long", "budget", n=12, max_new_tokens=96)
def rank(options: Options) -> None:
    """The rank head of a SpecBlock head along the target's answers, and what its trees gain (table 3)."""
    from coppice.bench.paper.rank import run_rank
    from coppice.bench.questions import prompt_ids

    spec = with_heads(replace(options, dtype="float32"), ("specblock",))
    asked = prompt_ids(options, spec)
    with reporting("bench paper rank", spec, options) as report:
        run_rank(spec, report, asked, options.max_new_tokens, options.budget)
