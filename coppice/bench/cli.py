"""`coppice bench`: each command starts a stack of its own, prints tables and checks, and exits 1 if a check failed.

A command imports what measures when it is called: --help is to be quick.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from coppice.bench.measuring import Bench, measuring, reference_of, reporting, running
from coppice.bench.options import ASKED, TRAINED, Options, command, numbers, read_methods, with_heads
from coppice.bench.paper.cli import paper
from coppice.errors import InvalidField

if TYPE_CHECKING:
    from coppice.bench.report import Report
    from coppice.bench.synthetic.measure import SyntheticPlan
    from coppice.stack.spec import StackSpec

app = typer.Typer(
    help="Measure: speed, exactness, the cost of a step, rows of a forward, adaptation, the papers' tables.",
    no_args_is_help=True,
    add_completion=False,
)
app.add_typer(paper, name="paper")


@command(app, *ASKED, "methods", max_new_tokens=64, budgets="0,1,8,31,60", temperatures="0,0.7,1", dtype="float32", n=8)
def exact(options: Options) -> None:
    """Every policy, head and budget against `generate`, and at T>0 against plain decoding with the same seed."""
    from coppice.bench.exact import run_exact
    from coppice.bench.questions import prompt_ids

    spec = options.spec()
    methods, budgets = read_methods(options.methods, spec.heads), options.budgets_asked()
    temperatures, asked = options.temperatures_asked(), prompt_ids(options, spec)
    with measuring("bench exact", spec, options) as bench:
        run_exact(bench, asked, methods, budgets, temperatures)


@command(app, "target", "heads", "methods", "ids", "dtype", max_new_tokens=192)
def identity(options: Options) -> None:
    """One SHA-256 of ids for every policy, head, budget and batch mix, beside kills and weight syncs: all plain's."""
    from coppice.bench.identity import QUICK, SPARE, Identity, questions, two_of_each, ways_of
    from coppice.bench.questions import prompt_ids
    from coppice.config.sections import ADAPTED_KINDS
    from coppice.training.progress import Progress

    dtype = options.dtype or "float32"
    spec = two_of_each(replace(options, dtype=dtype).spec())
    ways, syncing = ways_of(read_methods(options.methods, spec.heads)[1:], dtype)
    syncing = syncing if any(head.kind in ADAPTED_KINDS for head in spec.heads) else []
    count, new_tokens = -(-options.ids // options.max_new_tokens), options.max_new_tokens
    asked = questions(prompt_ids(replace(options, n=60), spec), int(SPARE * count) + 1)
    with measuring("bench identity", spec, options) as bench:
        with Progress("ids", (1 + len(ways) + len(syncing)) * count * new_tokens) as progress:
            run = Identity(asked, new_tokens, progress.add, progress.print)
            run.begin(bench.stack, bench.reference, count, dtype)
            for way in ways:
                progress.say(str(way))
                run.run(bench.stack, way)
            if syncing:
                with running(
                    replace(spec, adapt=True, extra={**spec.extra, "adapter": QUICK}), bench.report
                ) as adapting:
                    for way in syncing:
                        progress.say(str(way))
                        run.run(adapting, way)
        run.report(bench.report, options.ids)


@command(app, *ASKED, "methods", "goals", "plot", "one_process", n=4, max_new_tokens=64)
def steps(options: Options) -> None:
    """The split's own cost a step at one session, and where each part of a step's time goes.

    With --one-process a second stack, whose heads have processes of their own, answers in turns with the first one.
    """
    from coppice.bench.questions import prompt_ids
    from coppice.bench.steps import account, run_steps, traced
    from coppice.client.client import Client

    spec = options.spec()
    methods, asked = read_methods(options.methods, spec.heads), prompt_ids(options, spec)
    with (
        reporting("bench steps", spec, options) as report,
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory() as beside,
    ):
        with ExitStack() as ended:
            apart = replace(spec, one_process=False)
            other = ended.enter_context(running(traced(apart, Path(beside)), report)) if options.one_process else None
            stack = ended.enter_context(running(traced(spec, Path(folder)), report))
            client, reference = ended.enter_context(Client(stack.address)), ended.enter_context(reference_of(spec))
            run_steps(Bench(stack, client, report, options, reference), asked, methods, other)
        account(report, Path(folder), methods, options.plot)


@command(app, "t_m", "t_d", "temperatures", "goals", n=4, max_new_tokens=256, sessions="1,8,32,64", budget=60)
def services(options: Options) -> None:
    """What the services alone cost: a step's time and each process's CPU, on a target and a head that sleep.

    The target's vocabulary and features are an 8B one's. One answer a session, and at least --n of them.
    """
    from coppice.bench.services.asleep import Asleep
    from coppice.bench.services.measure import ASLEEP, run_services, spec_of
    from coppice.limits import Limits

    sessions = numbers("sessions", options.sessions, int, 1, Limits().sessions)
    temperatures = options.temperatures_asked(most=1)
    with tempfile.TemporaryDirectory(prefix="coppice-") as folder:
        asleep = Asleep(options.t_m, options.t_d)
        spec = spec_of(asleep, Path(folder), sessions, options.max_new_tokens)
        with measuring("bench services", spec, options, ASLEEP) as bench:
            run_services(bench, asleep, sessions, temperatures)


@command(app, *ASKED, "methods", "goals", n=9, max_new_tokens=128, category=["code"])
def prediction(options: Options) -> None:
    """What a prediction of the answer gains where nine tenths of it fit, and costs where it is useless.

    Methods ask a look-up head; by default lookup and auto.
    """
    from coppice.bench.prediction import run_prediction
    from coppice.bench.questions import prompt_ids

    spec = options.spec()
    methods = read_methods(options.methods or ["lookup", "auto"], spec.heads)[1:]
    asked = prompt_ids(options, spec)
    with measuring("bench prediction", spec, options) as bench:
        run_prediction(bench, asked, methods)


@command(app, "target", "prompts", "category", "chat", "skip_long", "dtype", "goals", n=3, max_new_tokens=96)
def rows(options: Options) -> None:
    """A forward by its rows, and plain decoding over bare forwards and over `generate`."""
    from coppice.bench.questions import prompt_ids
    from coppice.bench.rows import run_rows

    spec = replace(options.spec(), heads=())
    asked = prompt_ids(options, spec)
    with measuring("bench rows", spec, options) as bench:
        run_rows(bench, asked)


@command(app, *ASKED, "temperatures", "write", "max_new_tokens", n=30)
def acceptance(options: Options) -> None:
    """How often each head's best token is right, by depth: the orchestrator raises an alarm about a head far below."""
    from coppice.bench.acceptance import run_acceptance
    from coppice.bench.questions import read_all

    spec, temperatures = options.spec(), options.temperatures_asked(most=1)
    questions, _, _ = read_all(options, spec)
    with measuring("bench acceptance", spec, options) as bench:
        run_acceptance(bench, questions, temperatures)


@command(app, *(name for name in ASKED if name != "dtype"), n=24, max_new_tokens=128, temperatures="1")
def calibrate(options: Options) -> None:
    """The drafter.alpha and drafter.beta that suit a head best at T > 0, along the target's own sampled answers."""
    from coppice.bench.paper.calibrate import run_calibrate
    from coppice.bench.questions import prompt_ids
    from coppice.config.sections import FEATURE_KINDS

    spec = with_heads(replace(options, dtype="float32"), FEATURE_KINDS, TRAINED)
    temperatures, asked = options.temperatures_asked(), prompt_ids(options, spec)
    if not all(temperatures):
        raise InvalidField("temperatures", "nothing is drawn at 0")
    with reporting("bench calibrate", spec, options) as report:
        run_calibrate(spec, report, asked, options.max_new_tokens, temperatures)


@command(app, *ASKED[:-1], "temperatures", "t_m", "t_d", "goals", n=24, max_new_tokens=128, budgets="12,31")
def runahead(options: Options) -> None:
    """How often one of 1, 2, 4, 8 outcomes that drafts are prepared for while a tree is verified is the real one."""
    from coppice.bench.paper.runahead import MOST_VERIFIED, run_runahead
    from coppice.bench.questions import prompt_ids

    spec = replace(options, dtype="float32").spec((*TRAINED, "lookup"))
    budgets = numbers("budgets", options.budgets, int, 1, MOST_VERIFIED)
    temperatures, asked = options.temperatures_asked(), prompt_ids(options, spec)
    with reporting("bench runahead", spec, options) as report:
        run_runahead(spec, report, asked, options, temperatures, budgets)


@command(
    app,
    *ASKED,
    "warm_up",
    "methods",
    "temperatures",
    "sessions",
    "budgets",
    "answers",
    "plots",
    "goals",
    "max_new_tokens",
    n=16,
)
def run(options: Options) -> None:
    """Speed of every method on the same prompts, in alternating order, against plain decoding and transformers.

    Methods are policies (route:A/B between the heads named), head names, hf-generate, hf-assisted and hf-lookup; by
    default plain, all heads, route, merge and hf-generate. Of a conversation all turns are asked.

    In the table `tau` is the mean of tokens that a step commits, its own root included: Spec-Bench's mean accepted
    tokens and SPEED-Bench's acceptance length. `drafts` is the mean of accepted draft tokens alone, tau - 1.
    """
    from coppice.bench.questions import read_all
    from coppice.bench.run.measure import RunPlan, run_methods
    from coppice.bench.run.peers import methods_of
    from coppice.bench.run.plots import draw_all

    spec = options.spec(options.shipped_heads())
    sessions = numbers("sessions", options.sessions, int, 1, spec.settings().limits.sessions)
    methods, temperatures = methods_of(options.methods, spec.heads, sessions), options.temperatures_asked()
    budgets = options.budgets_asked() if options.budgets else (spec.settings().orchestrator.budget,)
    asked, warm_up, left_out = read_all(options, spec)
    plan = RunPlan(
        methods, budgets, temperatures, sessions, options.max_new_tokens, tuple(asked), tuple(warm_up), options.answers
    )
    with measuring("bench run", spec, options) as bench:
        if left_out:
            bench.report.figures["left_out"] = left_out
        measured = run_methods(bench, plan)
        if options.plots:
            draw_all(measured, options.plots)


@command(app, "what", "target", "head", "methods", "dtype", "plot", "goals", n=300)
def adapt(options: Options) -> None:
    """What adaptation gains and costs on a stream that changes, every policy on the same stream in the same minutes.

    Methods are policies of adaptation: never, paper, always, full-only, head-only and bandit.
    """
    from coppice.bench.adapt.adapt import draw, lanes_of, report_lanes
    from coppice.bench.adapt.lanes import run_lanes

    base, lanes, stream = lanes_of(options)
    with reporting(f"bench adapt --what {options.what}", base, options) as report:
        run_lanes(lanes, stream, report.calm)
        measured = report_lanes(lanes, stream, base, report)
        if options.plot:
            draw(measured, stream, options.plot)


@command(app, "target", "head", "methods", "plot", n=120)
def learn(options: Options) -> None:
    """Ways to train a head on texts that are new to it: what raises tau most for a second of one core.

    Methods are recipes: head-misses and full-misses (the actions of policy paper), full-texts (policy bandit),
    full-mixed, full-large-steps, head-texts and low-rank; by default all.
    """
    from coppice.bench.adapt.learn import check_texts, draw, recipes_of, run_learn
    from coppice.config.sections import ADAPTED_KINDS

    spec = with_heads(replace(options, heads=[options.head], dtype="float32"), ADAPTED_KINDS)
    recipes = recipes_of(options.methods)
    check_texts(options.n)
    with reporting("bench learn", replace(spec, verifier_threads=1), options) as report:
        lines = run_learn(spec, report, recipes, options.n)
        if options.plot:
            draw(lines, options.plot)


SHAPED = ("shape", "kinds", "profile", "sessions", "device", "dtype", "cache")


@command(app, *SHAPED, "pipeline", budget=60)
def synthetic(options: Options) -> None:
    """Size a deployment without trained weights: times on random ones, gains from a profile of acceptance."""
    from coppice.bench.synthetic.measure import run_synthetic

    with shaped("bench synthetic", options) as (spec, plan, report):
        run_synthetic(spec, plan, report, options)


@command(app, *SHAPED, "goals", shape="qwen3-8b", profile="qwen3-8b", device="cuda", budget=60)
def gpu(options: Options) -> None:
    """What a device makes of a target: forwards beside its memory's speed, drafts, and steps of the services.

    Weights are random. transformers decodes in the same run, with a cache of fixed size.
    """
    from coppice.bench.synthetic.roofline import run_gpu

    with shaped("bench gpu", options) as (spec, plan, report):
        run_gpu(spec, plan, report)


@contextmanager
def shaped(name: str, options: Options) -> Iterator[tuple[StackSpec, SyntheticPlan, Report]]:
    """A target and heads of a shape with random weights, what is measured of them, and a report: see `reporting`."""
    from coppice.bench.synthetic.measure import SyntheticPlan, room
    from coppice.bench.synthetic.profiles import read_profile
    from coppice.bench.synthetic.shapes import make_weights, read_shape
    from coppice.machine import default_dtype
    from coppice.stack.spec import StackSpec
    from coppice.training.dtype import usable_device

    usable_device(options.device)
    config, kinds = read_shape(options.shape), options.kinds or ["eagle3", "specblock"]
    sessions, dtype = numbers("sessions", options.sessions, int, 1, 128), options.dtype or default_dtype(options.device)
    vocab_size, alphas = config.get_text_config().vocab_size, read_profile(options.profile, kinds)
    plan = SyntheticPlan(sessions, options.budget, alphas, vocab_size)
    with ExitStack() as ended:
        folder = options.cache or Path(ended.enter_context(tempfile.TemporaryDirectory(prefix="coppice-")))
        target, heads = make_weights(folder, config, kinds, dtype, options.device, 0)
        spec = StackSpec(target=target, heads=heads, device=options.device, dtype=dtype, extra=room())  # type: ignore[arg-type]
        yield spec, plan, ended.enter_context(reporting(name, spec, options))
