"""The options of `coppice doctor` and `coppice demo`. What works is imported when they are called."""

from pathlib import Path
from typing import Annotated

import typer

from coppice.bench.options import Heads, JsonFile, file
from coppice.commands.generate import Address


def doctor(
    address: Address = None,
    target: Annotated[
        Path | None, typer.Option(help="A model's folder: does it fit the device that the settings name?")
    ] = None,
    architectures: Annotated[
        bool, typer.Option("--architectures", help="Try a tiny random model of every causal LM class instead.")
    ] = False,
    markdown: Annotated[
        Path | None, file("--markdown", "Write the table of --architectures; goes on after a stop.")
    ] = None,
) -> None:
    """Look for what is needed here, and for a server."""
    from rich.console import Console

    from coppice.commands.doctor import doctor as run

    if architectures:
        from coppice.commands.architectures import architectures as try_all

        raise typer.Exit(0 if try_all(Console(), markdown) else 1)
    raise typer.Exit(0 if run(Console(), address, target) else 1)


def demo(
    target: Annotated[Path | None, typer.Option(help="Model folder; default: the shipped models.")] = None,
    head: Heads = None,
    json_file: JsonFile = None,
    svg: Annotated[Path | None, file("--svg", "Also save what is shown as a picture.")] = None,
) -> None:
    """Start everything, with the shipped models if you name none, stream three answers, compare the policies."""
    from rich.console import Console

    from coppice.commands.demo import demo as run

    console = Console(record=svg is not None)
    good = run(console, json_file, target, head)
    if svg:
        console.save_svg(str(svg), title="coppice demo")
    raise typer.Exit(0 if good else 1)
