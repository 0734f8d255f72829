"""What the commands of `coppice bench` share: options, a running stack, prompts, the end of a report."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from coppice.bench.reference import Reference
    from coppice.bench.report import Report
    from coppice.client.client import Client
    from coppice.prompts.files import FilePrompt
    from coppice.stack.launch import Stack
    from coppice.stack.spec import StackSpec

T = TypeVar("T", int, float)

Target = Annotated[Path | None, typer.Option(help="Model folder; default: the demo's target and heads.")]
Heads = Annotated[
    list[str] | None, typer.Option("--heads", metavar="NAME=KIND[:DIR]", help="Draft heads (repeatable).")
]
Prompts = Annotated[Path | None, typer.Option(help="JSON lines or .txt; default: the prompts that come with Coppice.")]
Count = Annotated[int, typer.Option("--n", min=1, help="Prompts used.")]
NewTokens = Annotated[int, typer.Option(min=2, help="Tokens made for each prompt, past end-of-text ids too.")]
Methods = Annotated[list[str] | None, typer.Option(help="Policies or head names (repeatable); default: all.")]
Category = Annotated[
    str | None, typer.Option(metavar="NAME,...", help="Keep the prompts of these categories, such as code,maths.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the keyed noise and of the prompts' order.")]
Dtype = Annotated[str | None, typer.Option(help="float32 or bfloat16.")]
Rounds = Annotated[int, typer.Option(min=1, help="Alternating rounds; medians are reported.")]
MarkdownFile = Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Also write the tables there.")]
Plots = Annotated[Path | None, typer.Option("--plots", metavar="DIR", help="Also draw PNGs into this folder.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the figures as JSON.")]


@contextmanager
def measuring(
    command: str,
    spec: StackSpec,
    json_file: Path | None,
    kind: type[Report] | None = None,
    markdown: Path | None = None,
) -> Iterator[tuple[Console, Stack, Report]]:
    """A running stack and a report that is printed and written at the end; exits 1 when a check failed."""
    from rich.console import Console

    from coppice.bench.report import Check, Report
    from coppice.stack.launch import Stack

    console = Console()
    stack = Stack(spec)
    told = stack.settings.verifier
    report = (kind or Report)(command, told.dtype, told.threads, told.device)
    with stack:
        yield console, stack, report
    report.checks.append(Check("processes not stopped cleanly", len(stack.unclean), "0", not stack.unclean))
    finish(console, report, json_file, markdown)


def spec_of(target: Path | None, heads: list[str] | None, dtype: str | None) -> StackSpec:
    from coppice.stack.options import stack_spec

    return stack_spec(target, heads, dtype=dtype, port=0)


def shipped_heads(methods: Sequence[str]) -> list[str] | None:
    """The shipped heads that methods name; None when they name none."""
    from coppice.stack.spec import SHIPPED_HEADS

    named = {head for method in methods for head in re.split("[,:+/]", method)}
    return [head for head in SHIPPED_HEADS if head in named or (head == "lm" and "hf-assisted" in named)] or None


def prompts_of(
    file: Path | None, count: int, client: Client, category: str | None = None
) -> list[str | tuple[int, ...]]:
    """The first `count` prompts of a file or of Coppice's own; random ids for a target without a tokenizer."""
    return [one.prompt for one in file_prompts(file, count, client, category)]


def file_prompts(file: Path | None, count: int, client: Client, category: str | None = None) -> list[FilePrompt]:
    """As prompts_of, with what the file says of each."""
    from coppice.prompts.files import FilePrompt, demo_prompts, read_prompts

    model = client.describe()
    if file is None and not model.has_tokenizer:
        rng = random.Random(0)  # noqa: S311
        return [
            FilePrompt(tuple(rng.randrange(model.vocab_size) for _ in range(8 + 5 * number))) for number in range(count)
        ]
    found = read_prompts(file) if file else demo_prompts()
    if category:
        found = [prompt for prompt in found if prompt.category in category.split(",")]
        if not found:
            raise typer.BadParameter(f"no prompt is of {category!r}", param_hint="--category")
    if file is None:
        found = spread(found, count)
    return found[:count]


def spread(prompts: list[FilePrompt], count: int) -> list[FilePrompt]:
    """`count` prompts taken from all categories in turn."""
    by_category: dict[str, list[FilePrompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    turns = zip_longest(*by_category.values())
    return [prompt for turn in turns for prompt in turn if prompt is not None][:count]


def prompt_ids(
    file: Path | None, count: int, client: Client, reference: Reference, category: str | None = None
) -> list[tuple[int, ...]]:
    prompts = prompts_of(file, count, client, category)
    return [reference.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def numbers(option: str, text: str, kind: type[T]) -> tuple[T, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers", param_hint=f"--{option}") from None


def reference_of(spec: StackSpec) -> Reference:
    from coppice.bench.reference import Reference

    told = spec.settings().verifier
    return Reference(spec.target, told.dtype, told.device, told.threads)


def offline(command: str, spec: StackSpec) -> tuple[Console, Report]:
    """A report of something measured without a stack."""
    from rich.console import Console

    from coppice.bench.report import Report

    told = spec.settings().verifier
    return Console(), Report(command, "float32", told.threads, "cpu")


def finish(console: Console, report: Report, json_file: Path | None, markdown: Path | None = None) -> None:
    """Print and write a report; exits 1 when a check failed."""
    report.print(console)
    if markdown:
        report.write_markdown(markdown)
    if json_file:
        report.write(json_file)
    if not report.ok:
        raise typer.Exit(1)


def encode(target: Path, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
    from tokenizers import Tokenizer

    if isinstance(prompt, str):
        return tuple(Tokenizer.from_file(str(target / "tokenizer.json")).encode(prompt).ids)
    return prompt
