"""`coppice demo`: the whole pipeline on one machine, three answers in colour, then what each policy gains, and proof.

Green tokens were drafted and accepted, red ones are roots, sampled from the target (SpecBlock, figure 6).
"""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from coppice.client.adapter import AdapterClient
from coppice.client.client import Client
from coppice.client.completion import Accumulator, Completion
from coppice.commands.generate import print_tree
from coppice.commands.options import Heads, JsonFile, stack_spec
from coppice.config.sections import ADAPTED_KINDS
from coppice.machine import usable_cores
from coppice.prompts import FilePrompt, demo_prompts
from coppice.stack.launch import ADAPTER
from coppice.stack.redis_server import find_server
from coppice.wire.generation import Chunk, Origin
from lab.measuring import measuring
from lab.options import Options, Question
from lab.run import HF_GENERATE, Cell, run_methods

NEW_TOKENS = 64
BUDGET = 8  # in float32 on a CPU every row of a forward costs: a small tree gains more than the default one
PROMPTS = (10, 24, 41)  # shipped ones by number, one of each category, that are short
SHOWN_TOKENS = 32
STYLES = {Origin.DRAFT: "green", Origin.ROOT: "red"}


def demo(
    target: Annotated[Path | None, typer.Option(help="Model folder; default: the shipped models.")] = None,
    heads: Heads = None,
    json_file: JsonFile = None,
) -> None:
    """Start everything, with the shipped models if you name none, stream three answers, compare the policies."""
    console, cores = Console(), usable_cores()  # the adapter does not train here
    spec = stack_spec(target, heads, dtype="float32", policy="route", budget=BUDGET, verifier_threads=cores)
    adaptable = any(head.kind in ADAPTED_KINDS for head in spec.heads)
    spec = replace(spec, adapt=adaptable and find_server() is not None)
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
            run_methods(bench, methods, [Cell(0.0, BUDGET, 1)], questions)
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
