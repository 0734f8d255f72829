"""`coppice adapter status|pause|resume|rollback`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coppice.commands.options import picture

if TYPE_CHECKING:
    from coppice.adaptation.client import AdapterClient

app = typer.Typer(help="Look at the adapter, and steer it.", no_args_is_help=True, add_completion=False)

Address = Annotated[str | None, typer.Option(help="HOST:PORT; default COPPICE_ADAPTER_ADDRESS, else 127.0.0.1:50061.")]
Head = Annotated[str, typer.Option(help="The head's name; default: all of them.")]


def _client(address: str | None) -> "AdapterClient":
    from coppice.adaptation.client import AdapterClient

    return AdapterClient(address)


@app.command()
def status(
    address: Address = None,
    head: Head = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, the latest queries included.")
    ] = False,
    plot: Annotated[Path | None, picture("--plot", "Draw tau and tokens/s of the latest queries")] = None,
) -> None:
    """Show what the adapter did and knows, and which weights every drafter uses."""
    from coppice.limits import MAX_HISTORY

    with _client(address) as client:
        heads = client.status(head, MAX_HISTORY if as_json or plot else 0)
    if plot:
        from coppice.adaptation.picture import draw

        draw(heads, plot)
    if as_json:
        values = [asdict(status) | {"weights_hash": status.weights_hash.hex()} for status in heads]
        print(json.dumps({"heads": values}))
        return
    from rich.console import Console

    from coppice.adaptation.picture import show

    for status in heads:
        show(status, Console())


@app.command()
def pause(address: Address = None, head: Head = "") -> None:
    """Stop training and asking for samples; the weights in use stay."""
    with _client(address) as client:
        client.pause(head)


@app.command()
def resume(address: Address = None, head: Head = "") -> None:
    """Go on training."""
    with _client(address) as client:
        client.resume(head)


@app.command()
def rollback(
    address: Address = None,
    head: Annotated[str, typer.Option(help="The head's name; may be left out when there is one.")] = "",
    version: Annotated[
        int | None, typer.Option(min=0, help="0: the head as it was deployed; default: the last good one.")
    ] = None,
) -> None:
    """Put earlier weights back on every drafter, as a new version."""
    with _client(address) as client:
        print(f"version {client.rollback(head, version)} is in use")
