"""`coppice adapter status|pause|resume|rollback`."""

import json
from typing import Annotated

import typer
from rich.console import Console
from typer import Option

from coppice.client.adapter import STANDING_BY, AdapterClient, plain
from coppice.limits import MAX_HISTORY
from coppice.v1 import adapter_pb2 as pb

app = typer.Typer(help="Look at the adapter, and steer it.", no_args_is_help=True, add_completion=False)

Address = Annotated[str | None, Option(help="HOST:PORT; default COPPICE_ADAPTER_ADDRESS, else 127.0.0.1:50061.")]
Head = Annotated[str, Option(help="The head's name; default: all of them.")]


@app.command()
def status(
    address: Address = None,
    head: Head = "",
    as_json: Annotated[bool, Option("--json", help="Print one JSON object, the latest queries included.")] = False,
) -> None:
    """Show what the adapter did and knows, and which weights every drafter uses."""
    with AdapterClient(address) as client:
        heads = client.status(head, MAX_HISTORY if as_json else 0)
    if as_json:
        print(json.dumps({"heads": [plain(of_head) for of_head in heads]}))
        return
    for of_head in heads:
        show(of_head, Console())


@app.command()
def pause(address: Address = None, head: Head = "") -> None:
    """Stop training and asking for samples; the weights in use stay."""
    with AdapterClient(address) as client:
        client.pause(head)


@app.command()
def resume(address: Address = None, head: Head = "") -> None:
    """Go on training."""
    with AdapterClient(address) as client:
        client.resume(head)


@app.command()
def rollback(
    address: Address = None,
    head: Annotated[str, Option(help="The head's name; may be left out when there is one.")] = "",
    version: Annotated[int | None, Option(min=0, help="0: as it was deployed; default: the last good one.")] = None,
) -> None:
    """Put earlier weights back on every drafter, as a new version."""
    with AdapterClient(address) as client:
        print(f"version {client.rollback(head, version)} is in use")


_LATEST = 8  # of each kind of entry that are shown


def show(status: pb.HeadStatus, console: Console) -> None:
    """Print one head as text."""
    if status.doing == STANDING_BY:
        console.print(f"[bold]{status.head}[/bold]: {STANDING_BY}; another adapter is active, or redis is away")
        return
    paused = ", paused" if status.paused else ""
    console.print(
        f"[bold]{status.head}[/bold]: policy {status.policy}{paused}, {status.doing}; version {status.version} "
        f"({status.weights_hash.hex()[:12]}), last good {status.good_version}; {status.queries} queries, "
        f"{status.events} events, {status.reverts} reverts",
        highlight=False,
    )
    for name in ("actions", "kinds", "replicas", "versions", "changes"):
        for each in getattr(status, name)[-_LATEST:]:
            fields = [
                (key, f"{value:.3g}" if isinstance(value, float) else value) for key, value in plain(each).items()
            ]
            line = ", ".join(f"{key} {value}" for key, value in fields if value is not None)
            console.print(f"  {name[:-1]}: {line}", highlight=False, soft_wrap=True, markup=False)
