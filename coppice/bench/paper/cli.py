"""`coppice bench paper`: each command is one of the papers' tables."""

from __future__ import annotations

from dataclasses import replace

import typer

from coppice.bench.measuring import measuring, reporting
from coppice.bench.options import ASKED, REQUIRED, TRAINED, Options, command, with_heads
from coppice.errors import InvalidField

paper = typer.Typer(help="One of the papers' tables, measured on these models.", no_args_is_help=True)


@command(paper, *ASKED, "goals", "plots", n=16, max_new_tokens=128, temperatures="0.5,0.7,1", budgets="31")
def coupling(options: Options) -> None:
    """tau with coupled drafting and without, by budget, for the heads that can use the target's noise."""
    from coppice.bench.paper.decoded import COUPLED_KINDS, coupled, coupling_goals, decode, draw_coupling
    from coppice.bench.questions import prompt_ids

    spec = with_heads(options, COUPLED_KINDS, (*TRAINED, "lm"))
    temperatures, asked = options.temperatures_asked(), prompt_ids(options, spec)
    with measuring("bench paper coupling", spec, options) as bench:
        measured = decode(bench, coupled(spec.heads, options.budgets_asked()), asked, temperatures)
        bench.report.goals += coupling_goals(measured, {head.name: head.kind for head in spec.heads})
        if options.plots:
            draw_coupling(measured, options.plots / "coupling.png")


@command(paper, *ASKED, n=8, max_new_tokens=128, temperatures="0,1")
def chains(options: Options) -> None:
    """A tree, a chain, and a sampled chain that p/q rejection judges (nanoGPT, speculative sampling)."""
    from coppice.bench.paper.decoded import SAMPLING_KINDS, chained, decode, with_chains
    from coppice.bench.questions import prompt_ids

    spec = with_heads(options, SAMPLING_KINDS, ("bigram=bigram", "lm"))
    temperatures, asked = options.temperatures_asked(), prompt_ids(options, spec)
    with measuring("bench paper chains", replace(spec, heads=with_chains(spec.heads, spec.target)), options) as bench:
        decode(bench, chained(spec.heads), asked, temperatures)


@command(paper, "target", "heads", "dtype", "temperatures", "goals", n=60, budgets="8,31")
def drafting(options: Options) -> None:
    """A draft of each head that reads features over its own forwards, with one thread; --n drafts are timed."""
    from coppice.bench.paper.drafting import run_drafting
    from coppice.config.sections import FEATURE_KINDS

    spec = replace(with_heads(options, FEATURE_KINDS, TRAINED), drafter_threads=1)
    budgets, temperatures = options.budgets_asked(), options.temperatures_asked()
    with reporting("bench paper drafting", spec, options) as report:
        run_drafting(spec, report, options.n, budgets, temperatures)


@command(paper, "target", "heads", "prompts", "category", "chat", "skip_long", "budget", n=12, max_new_tokens=96)
def rank(options: Options) -> None:
    """The rank head of a SpecBlock head along the target's answers, and what its trees gain (table 3)."""
    from coppice.bench.paper.rank import run_rank
    from coppice.bench.questions import prompt_ids

    spec = with_heads(replace(options, dtype="float32"), ("specblock",))
    asked = prompt_ids(options, spec)
    with reporting("bench paper rank", spec, options) as report:
        run_rank(spec, report, asked, options.max_new_tokens, options.budget)


@command(paper, "target", "tokens", "only", "budget", "goals", data=REQUIRED, cache=REQUIRED, n=8)
def ablate(options: Options) -> None:
    """SpecBlock heads that lack one part each, trained alike, and what each part is worth (table 2)."""
    from coppice.bench.paper.trained import HeadCache, run_ablate, variants_of

    spec, variants = replace(options, dtype="float32").spec(), variants_of(options.only)
    with reporting("bench paper ablate", spec, options) as report:
        run_ablate(HeadCache.of(spec.target, options), report, variants, options.n, options.budget)


@command(paper, "target", "only", "data", "device", cache=REQUIRED, tokens=REQUIRED)
def baselines(options: Options) -> None:
    """Heads that are trained alike, on the same data and steps; by default of the kinds that none is shipped of."""
    from coppice.bench.paper.trained import BASELINES, HeadCache, run_baselines
    from coppice.config.sections import FEATURE_KINDS

    if unknown := [kind for kind in options.only or () if kind not in FEATURE_KINDS]:
        raise InvalidField("only", f"{unknown[0]!r} is none of {', '.join(FEATURE_KINDS)}")
    spec = replace(options, dtype="float32").spec()
    with reporting("bench paper baselines", spec, options) as report:
        run_baselines(HeadCache.of(spec.target, options), report, options.only or BASELINES)
