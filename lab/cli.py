"""`coppice bench` and `coppice demo`. A command starts a stack of its own and prints tables; a failed check exits 1.

What needs torch is imported by the command that needs it: --help is to be quick.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import product, starmap
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from coppice.client.adapter import AdapterClient
from coppice.client.client import Client
from coppice.client.completion import Accumulator, Completion
from coppice.commands.generate import print_tree
from coppice.commands.options import Heads, JsonFile, file, stack_spec
from coppice.config.sections import ADAPTED_KINDS
from coppice.errors import InvalidField
from coppice.limits import MAX_TREE_NODES
from coppice.machine import usable_cores
from coppice.prompts import FilePrompt, demo_prompts
from coppice.stack.launch import ADAPTER
from coppice.stack.process import find_redis
from coppice.stack.spec import StackSpec
from coppice.wire.generation import Chunk, Origin
from lab.adapt import lanes_of, report_lanes, run_lanes
from lab.identity import SPARE, questions, run_identity, two_of_each
from lab.measuring import measuring, reference_of, reporting
from lab.options import ASKED, Options, Question, command, prompt_ids, read_methods, read_questions
from lab.run import HF_GENERATE, Cell, methods_of, run_exact, run_methods

app = typer.Typer(
    help="Measure: speed, exactness, the cost of a step, adaptation, the papers' tables.",
    no_args_is_help=True,
    add_completion=False,
)
paper = typer.Typer(help="The papers' tables, measured on these models.", no_args_is_help=True)
app.add_typer(paper, name="paper")
demo_app = typer.Typer(add_completion=False)
EXACT_SESSIONS = 8


@app.command()
def architectures(table: Annotated[Path | None, file("--table", "Write the rows to this CSV file.")] = None) -> None:
    """Try a tiny random model of every causal LM class: which does the engine serve?"""
    from lab.architectures import architectures as try_all

    raise typer.Exit(0 if try_all(Console(), table) else 1)


@command(app, *ASKED, "methods", max_new_tokens=64, budgets="0,1,8,31,60", temperatures="0,0.7,1", dtype="float32", n=8)
def exact(options: Options) -> None:
    """Every policy, head and budget against `generate`, and at T>0 against plain decoding with the same seed."""
    spec = options.spec()
    methods, (asked, _) = read_methods(options.methods, spec.heads), read_questions(options, spec)
    cells = cells_of(options, spec, (min(EXACT_SESSIONS, len(asked)),))
    with measuring("bench exact", spec, options) as bench:
        run_exact(bench, asked, methods, cells)


@command(app, "target", "heads", "methods", "ids", "regex", "dtype", max_new_tokens=192)
def identity(options: Options) -> None:
    """One SHA-256 of ids for every policy, head, budget and batch mix, beside kills, cut links and weight syncs."""
    dtype = options.dtype or "float32"
    spec = two_of_each(replace(options, dtype=dtype).spec(), invariant=dtype != "float32" or bool(options.regex))
    methods, count = read_methods(options.methods, spec.heads)[1:], -(-options.ids // options.max_new_tokens)
    asked = questions(prompt_ids(replace(options, n=60), spec), int(SPARE * count) + 1)
    with measuring("bench identity", spec, options) as bench:
        run_identity(bench, asked, count, methods)


TIMED = (*ASKED, "methods", "temperatures", "budgets", "max_new_tokens")


@command(app, *TIMED, "warm_up", "sessions", n=16)
def run(options: Options) -> None:
    """Speed of every method on the same prompts, in alternating order, against plain decoding and transformers.

    Methods are policies (route:A/B between the heads named), head names and hf-generate; by default
    plain, all heads, route, merge and hf-generate.

    In the table `tau` is the mean of tokens that a step commits, its own root included: Spec-Bench's mean accepted
    tokens and SPEED-Bench's acceptance length.
    """
    spec = options.spec()
    sessions = options.numbers("sessions", int, 1, spec.settings().limits.sessions)
    methods, cells = methods_of(options.methods, spec.heads, sessions), cells_of(options, spec, sessions)
    asked, warm_up = read_questions(options, spec)
    with measuring("bench run", spec, options) as bench:
        run_methods(bench, methods, cells, asked, warm_up)


@command(app, *TIMED, "peers", "llama_cpp", n=6, warm_up=1)
def peers(options: Options) -> None:
    """Speed beside llama.cpp's server with the same weights, asked in turns by OpenAI's API, one prompt at a time.

    llama.cpp is built from source at the first run.
    """
    from lab.peers import build, check_peers, run_peers

    spec = replace(options.spec(), http_port=0, extra={"verifier": {"verifier.prefix_cache": 0.0}})
    methods, cells = read_methods(options.methods, spec.heads), cells_of(options, spec, (1,))
    modes, (asked, warm_up) = check_peers(options.peers or ()), read_questions(options, spec)
    built = build(options.llama_cpp)
    with measuring("bench peers", spec, options) as bench:
        run_peers(bench, methods, modes, cells, asked, warm_up, built)


def cells_of(options: Options, spec: StackSpec, sessions: Sequence[int]) -> list[Cell]:
    options = replace(options, budgets=options.budgets or str(spec.settings().orchestrator.budget))
    temperatures = options.numbers("temperatures", float, 0)
    budgets = options.numbers("budgets", int, 0, MAX_TREE_NODES)
    return list(starmap(Cell, product(temperatures, budgets, sessions)))


@command(app, "what", "target", "head", "prompts", "category", "methods", "dtype", n=300)
def adapt(options: Options) -> None:
    """What adaptation gains and costs on a stream that changes, every policy on the same stream in the same minutes.

    Methods are policies of adaptation: never, paper, always, full-only, head-only and bandit.
    """
    base, lanes, stream = lanes_of(options)
    with reporting(f"bench adapt --what {options.what}", base, options) as report:
        run_lanes(lanes, stream)
        report_lanes(lanes, stream, reference_of(base), report)


@command(paper, "target", "heads", "prompts", "category", "chat", n=12, max_new_tokens=96)
def rank(options: Options) -> None:
    """The rank head of a SpecBlock head along the target's answers (table 3)."""
    from lab.paper.rank import run_rank

    spec = replace(options, dtype="float32").spec(["specblock-code"])
    if not (heads := tuple(head for head in spec.heads if head.kind == "specblock")):
        raise InvalidField("head", "none is of kind specblock")
    spec = replace(spec, heads=heads)
    asked = prompt_ids(options, spec)
    with reporting("bench paper rank", spec, options) as report:
        run_rank(spec, report, asked, options.max_new_tokens)


SHAPED = ("shape", "kinds", "sessions", "device", "dtype")


@command(app, *SHAPED, budget=60)
def synthetic(options: Options) -> None:
    """Size a deployment without trained weights: times on random ones, and the tau from which a head pays.

    Forwards beside the speed of the device's memory, drafts, and steps of the services.
    """
    from lab.synthetic import run_synthetic

    run_synthetic(options)


@command(app, *SHAPED, shape="qwen3-8b", device="cuda", budget=60, sessions="1,8,32")
def gpu(options: Options) -> None:
    """The tests of a CUDA device, then `synthetic` on it for a target of Qwen3-8B's shape."""
    from lab.synthetic import run_synthetic

    run_synthetic(options, on_gpu=True)


NEW_TOKENS = 64
DEMO_BUDGET = 8  # in float32 on a CPU every row of a forward costs: a small tree gains more than the default one
PROMPTS = (10, 24, 41)  # shipped ones by number, one of each category, that are short
SHOWN_TOKENS = 32
STYLES = {Origin.DRAFT: "green", Origin.ROOT: "red"}
"""drafted and accepted, and sampled from the target (SpecBlock, figure 6)"""


@demo_app.command()
def demo(
    target: Annotated[Path | None, typer.Option(help="Model folder; default: the shipped models.")] = None,
    heads: Heads = None,
    json_file: JsonFile = None,
) -> None:
    """Start everything, with the shipped models if you name none, stream three answers, compare the policies."""
    console, cores = Console(), usable_cores()  # the adapter does not train here
    spec = stack_spec(target, heads, dtype="float32", policy="route", budget=DEMO_BUDGET, verifier_threads=cores)
    adaptable = any(head.kind in ADAPTED_KINDS for head in spec.heads)
    spec = replace(spec, adapt=adaptable and find_redis() is not None)
    prompts = [prompt for prompt in demo_prompts() if prompt.question_id in PROMPTS]
    more = ", Redis, an adapter" if spec.adapt else ""
    Console(stderr=True).print(f"starting a verifier, {len(spec.heads)} drafter pools{more} and an orchestrator ...")
    with measuring("demo", spec, Options(json_file=json_file, max_new_tokens=NEW_TOKENS)) as bench:
        for number, prompt in enumerate(prompts):
            stream_coloured(console, bench.client, prompt, trees=number == 0)
        ready = bench.stack.services.get(ADAPTER)
        with AdapterClient(ready.address) if ready else contextlib.nullcontext() as adapter:
            if adapter:
                adapter.pause()  # policies are compared on the same weights
            Console(stderr=True).print("\nloading the target once more, in plain transformers, to compare with ...")
            encode, names = bench.reference.text.encode, [f"single:{head.name}" for head in spec.heads]
            questions = [Question(encode(str(prompt.prompt)), prompt.category) for prompt in prompts]
            methods = [HF_GENERATE, "plain", *names, "route", "merge"]
            run_methods(bench, methods, [Cell(0.0, DEMO_BUDGET, 1)], questions)
            del bench.report.tables[1:]  # the speeds
            if adapter:
                heard = ", ".join(f"{head.queries} queries of {head.head}" for head in adapter.status())
                console.print(f"\nthe adapter, paused meanwhile, heard {heard}", highlight=False, soft_wrap=True)


def stream_coloured(console: Console, client: Client, prompt: FilePrompt, trees: bool = False) -> Completion:
    """Print a sampled answer as it comes, drafts green, roots red, its figures, and if `trees` the best step's tree."""
    console.print(Text(f"\n{prompt.category or 'prompt'}: {prompt.prompt}", style="bold"))
    answer = Accumulator()
    # Greedy answers of so small a target soon repeat themselves.
    for event in client.stream(prompt.prompt, temperature=0.7, seed=3, max_new_tokens=SHOWN_TOKENS, trees=trees):
        answer.add(event)
        if isinstance(event, Chunk):
            for piece, origin in zip(event.pieces, event.origins, strict=True):
                console.print(Text(piece, style=STYLES[origin]), end="", soft_wrap=True)
    completion = answer.completion()
    console.print(Text(f"\n{completion.summary}"), style="dim")
    if completion.trees:
        console.print("the draft tree of the step that accepted most:", style="dim")
        print_tree(completion.trees, console)
    return completion
