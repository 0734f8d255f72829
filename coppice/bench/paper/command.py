"""The command `coppice bench paper`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coppice.bench.options import Heads, JsonFile, Prompts, Target, finish, report_of, spec_of
from coppice.bench.paper.tables import TABLES, compute_of, read_options


def paper(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="; ".join(f"{name}: {table.shows}" for name, table in TABLES.items()) + "."
        ),
    ],
    target: Target = None,
    heads: Heads = None,
    prompts: Prompts = None,
    n: Annotated[int | None, typer.Option("--n", min=1, help="Prompts used, texts, or drafts timed.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=2, help="Tokens made for each prompt.")] = None,
    budget: Annotated[int | None, typer.Option(min=1, help="Nodes of every tree.")] = None,
    temperatures: Annotated[str | None, typer.Option(help="Comma-separated.")] = None,
    only: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="The variants of ablate, or the kinds of baselines.")
    ] = None,
    data: Annotated[list[str] | None, typer.Option("--data", help="As for `coppice train head`.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Where trained heads and recorded answers are kept.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens that every head learns from.")] = None,
    device: Annotated[str | None, typer.Option(help="A torch device to train on.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    json_file: JsonFile = None,
) -> None:
    """One of the papers' tables, measured on these models. Each table takes some of the options, and says which."""
    given = {option: value for option, value in context.params.items() if value}
    given.pop("json_file", None)
    options = read_options(given.pop("name"), given)

    from rich.console import Console

    spec = spec_of(options.target, options.heads, options.dtype)
    console, report = Console(), report_of(f"bench paper {name}", spec)
    with console.status("starting") as status:
        compute_of(name)(spec, options, report, lambda line: status.update(line))
    finish(console, report, json_file)
