"""`coppice adapter status|pause|resume|rollback`: tables for people, and a picture of what updates did."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from typer import Option

from coppice.client.adapter import STANDING_BY, AdapterClient, plain
from coppice.commands.options import file
from coppice.limits import MAX_HISTORY
from coppice.v1 import adapter_pb2 as pb

app = typer.Typer(help="Look at the adapter, and steer it.", no_args_is_help=True, add_completion=False)

Address = Annotated[str | None, Option(help="HOST:PORT; default COPPICE_ADAPTER_ADDRESS, else 127.0.0.1:50061.")]
Head = Annotated[str, Option(help="The head's name; default: all of them.")]
PICTURES = (".png", ".svg")
PLOT = file("--plot", f"Draw tau and tokens/s of the latest queries ({', '.join(PICTURES)}).", *PICTURES)


@app.command()
def status(
    address: Address = None,
    head: Head = "",
    as_json: Annotated[bool, Option("--json", help="Print one JSON object, the latest queries included.")] = False,
    plot: Annotated[Path | None, PLOT] = None,
) -> None:
    """Show what the adapter did and knows, and which weights every drafter uses."""
    with AdapterClient(address) as client:
        heads = client.status(head, MAX_HISTORY if as_json or plot else 0)
    if plot:
        draw(heads, plot)
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


_LATEST = 8
_OTHERS = {True: "others", False: "does not answer"}  # weights that are not as wanted, of who is reachable
Cells = Sequence[str | int]


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
    tables: dict[str, list[Cells]] = {
        "arm, gain per signal, updates": [
            (arm.action, f"{arm.value:+.3f}" if arm.HasField("value") else "not measured", arm.updates)
            for arm in status.actions
        ],
        "kind, queries, tau, drafted by, gain, texts, another update": [_of_kind(kind) for kind in status.kinds],
        "replica, version, weights": [
            (each.address, each.version, "as wanted" if each.current else _OTHERS[each.reachable])
            for each in status.replicas
        ],
        "version, queries, tau": [
            (each.version, each.queries, f"{each.tau:.2f}") for each in status.versions[-_LATEST:]
        ],
        "after query, change, version, train s, sync s, why": [
            (each.query, each.what, each.version, f"{each.train_s:.1f}", f"{each.sync_s:.2f}", each.why)
            for each in status.changes[-_LATEST:]
        ],
    }
    for columns, rows in tables.items():
        table = Table(*columns.split(", "), box=box.SIMPLE_HEAD)
        for row in rows:
            table.add_row(*map(str, row))
        if rows:
            console.print(table)


def _of_kind(kind: pb.KindStatus) -> Cells:
    """The row of a kind of text; another update's savings and costs are seconds of serving."""
    other, variant = (f"variant {number}" if number else "deployed" for number in (kind.other, kind.variant))
    drafted_by = f"{variant} {kind.share:.0%}, {other}" if kind.share else other
    gain = f"{kind.gain:+.1%} ± {kind.error:.1%} of {kind.measured}" if kind.measured else ""
    update = f"saves {kind.saves_s:.1f} s, costs {kind.costs_s:.1f} s"
    return kind.kind, kind.queries, f"{kind.tau:.2f}", drafted_by, gain, kind.texts, update


SMOOTHING = 15  # queries of a moving mean
ARM_COLOURS = {"skip": "0.75", "head": "#E69F00", "full": "#0072B2"}  # Okabe and Ito's
CHANGES = {
    "pays": ("variant pays", "#009E73"),
    "head": ("head-only update", ARM_COLOURS["head"]),
    "full": ("full update", ARM_COLOURS["full"]),
    **dict.fromkeys(("loses", "revert", "rollback"), ("taken back", "#D55E00")),
}
"""changes of weights: their names in the legend, and colours"""


def draw(heads: Sequence[pb.HeadStatus], file: Path) -> None:
    """Draw tau and tokens/s along each head's queries, coloured by what a query was for; lines are changes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(11, 4.6 * max(1, len(heads))), layout="constrained")
    panels = figure.subplots(max(1, len(heads)), 2, squeeze=False)
    for status, row in zip(heads, panels, strict=False):
        for panel, name in zip(row, ("tau", "tokens_per_s"), strict=True):
            _draw(panel, status, name)
            panel.set(xlabel="query", ylabel=name.replace("_per_", "/"))
            panel.set_ylim(bottom=0)
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        row[0].set_title(f"{status.head} ({status.policy})", loc="left")
        row[0].legend(fontsize="small", frameon=False)
    figure.savefig(file, dpi=120)


def _draw(panel: Any, status: pb.HeadStatus, name: str) -> None:
    queries = [(point.query, getattr(point, name), point.action) for point in status.history]
    for action, colour in ARM_COLOURS.items():
        if of_arm := [(query, value) for query, value, arm in queries if arm == action]:
            panel.scatter(*zip(*of_arm, strict=True), s=8, color=colour, label=f"query: {action}")
    values = [value for _, value, _ in queries]
    means = [statistics.fmean(values[max(0, end - SMOOTHING) : end]) for end in range(1, len(values) + 1)]
    panel.plot([query for query, *_ in queries], means, color="black", label=f"mean of {SMOOTHING} queries")
    labels = set[str]()
    for change in status.changes:
        if change.query >= min((query for query, *_ in queries), default=0):
            label, colour = CHANGES.get(change.what, (change.what, "0.5"))
            panel.axvline(change.query, linewidth=1, alpha=0.8, color=colour, label=None if label in labels else label)
            labels.add(label)
