"""The options of `coppice doctor`, which imports what it needs when it is called."""

from pathlib import Path
from typing import Annotated

import typer

from coppice.commands.generate import Address


def doctor(
    address: Address = None,
    target: Annotated[
        Path | None, typer.Option(help="A model's folder: does it fit the device that the settings name?")
    ] = None,
) -> None:
    """Look for what is needed here, and for a server."""
    from rich.console import Console

    from coppice.commands.doctor import doctor as run

    raise typer.Exit(0 if run(Console(), address, target) else 1)
