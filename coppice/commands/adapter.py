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

from coppice.client.adapter import STANDING_BY, AdapterClient, plain
from coppice.commands.options import picture
from coppice.limits import MAX_HISTORY
from coppice.v1 import adapter_pb2 as pb

app = typer.Typer(help="Look at the adapter, and steer it.", no_args_is_help=True, add_completion=False)

Address = Annotated[str | None, typer.Option(help="HOST:PORT; default COPPICE_ADAPTER_ADDRESS, else 127.0.0.1:50061.")]
Head = Annotated[str, typer.Option(help="The head's name; default: all of them.")]


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
    head: Annotated[str, typer.Option(help="The head's name; may be left out when there is one.")] = "",
    version: Annotated[
        int | None, typer.Option(min=0, help="0: the head as it was deployed; default: the last good one.")
    ] = None,
) -> None:
    """Put earlier weights back on every drafter, as a new version."""
    with AdapterClient(address) as client:
        print(f"version {client.rollback(head, version)} is in use")


SMOOTHING = 15
"""Queries of a moving mean"""
HEAD_ONLY, FULL, PAYS, TAKEN_BACK = "#E69F00", "#0072B2", "#009E73", "#D55E00"
"""colours of Okabe and Ito's"""
ARM_COLOURS = {"skip": "0.75", "head": HEAD_ONLY, "full": FULL}
_CHANGES = {
    "pays": ("variant pays", PAYS),
    "loses": ("taken back", TAKEN_BACK),
    "head": ("head-only update", HEAD_ONLY),
    "full": ("full update", FULL),
    "revert": ("taken back", TAKEN_BACK),
    "rollback": ("taken back", TAKEN_BACK),
}
_LATEST = 8


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
    actions = Table("arm", "gain per signal", "updates", box=box.SIMPLE_HEAD)
    for arm in status.actions:
        value = f"{arm.value:+.3f}" if arm.HasField("value") else "not measured"
        actions.add_row(arm.action, value, str(arm.updates))
    kinds = Table("kind", "queries", "tau", "drafted by", "gain", "texts", "another update", box=box.SIMPLE_HEAD)
    for kind in status.kinds:
        gain = f"{kind.gain:+.1%} ± {kind.error:.1%} of {kind.measured}" if kind.measured else ""
        kinds.add_row(
            str(kind.kind), str(kind.queries), f"{kind.tau:.2f}", _drafted_by(kind), gain, str(kind.texts), _next(kind)
        )
    replicas = Table("replica", "version", "weights", box=box.SIMPLE_HEAD)
    for replica in status.replicas:
        weights = "as wanted" if replica.current else "others" if replica.reachable else "does not answer"
        replicas.add_row(replica.address, str(replica.version), weights)
    versions = Table("version", "queries", "tau", box=box.SIMPLE_HEAD)
    for version in status.versions[-_LATEST:]:
        versions.add_row(str(version.version), str(version.queries), f"{version.tau:.2f}")
    changes = Table("after query", "change", "version", "train s", "sync s", "why", box=box.SIMPLE_HEAD)
    for change in status.changes[-_LATEST:]:
        times = (f"{change.train_s:.1f}", f"{change.sync_s:.2f}")
        changes.add_row(str(change.query), change.what, str(change.version), *times, change.why)
    for table in (actions, kinds, replicas, versions, changes):
        if table.row_count:
            console.print(table)


def _drafted_by(kind: pb.KindStatus) -> str:
    names = [f"variant {number}" if number else "deployed" for number in (kind.variant, kind.other)]
    return f"{names[0]} {kind.share:.0%}, {names[1]}" if kind.share else names[1]


def _next(kind: pb.KindStatus) -> str:
    """Say what another update would save and cost, in seconds of serving."""
    return f"saves {kind.saves_s:.1f} s, costs {kind.costs_s:.1f} s"


def change_look(what: str, named: set[str]) -> dict[str, Any]:
    """The colour of a change of weights, and its name in the legend unless it is among `named`, where it is added."""
    meaning, colour = _CHANGES.get(what, (what, "0.5"))
    label = None if meaning in named else meaning
    named.add(meaning)
    return {"color": colour, "label": label}


def moving_mean(values: Sequence[float], width: int = SMOOTHING) -> list[float]:
    """Return the mean of each value and the `width` - 1 before it."""
    return [statistics.fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


def draw(heads: Sequence[pb.HeadStatus], file: Path) -> None:
    """Draw tau and tokens/s along each head's queries, coloured by what a query was for; lines are changes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(11, 4.6 * max(1, len(heads))), layout="constrained")
    panels = figure.subplots(2 * max(1, len(heads)), 1, squeeze=False)[:, 0]
    for number, status in enumerate(heads):
        upper, lower = panels[2 * number : 2 * number + 2]
        for panel, name in ((upper, "tau"), (lower, "tokens_per_s")):
            _draw(panel, status.history, status.changes, name)
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        upper.set_title(f"{status.head} ({status.policy})", loc="left")
        upper.legend(loc="lower right", bbox_to_anchor=(1, 1), fontsize="small", ncols=8, frameon=False)
        lower.set(xlabel="query")
    figure.savefig(file, dpi=120)


def _draw(panel: Any, history: Sequence[pb.QueryPoint], changes: Sequence[pb.Change], name: str) -> None:
    values = [getattr(point, name) for point in history]
    for action, colour in ARM_COLOURS.items():
        at = [number for number, point in enumerate(history) if point.action == action]
        if at:
            places = [history[number].query for number in at], [values[number] for number in at]
            panel.scatter(*places, s=8, color=colour, label=f"query: {action}")
    queries = [point.query for point in history]
    panel.plot(queries, moving_mean(values), color="black", label=f"mean of {SMOOTHING} queries")
    first, named = history[0].query if history else 0, set[str]()
    for change in changes:
        if change.query >= first:
            panel.axvline(change.query, linewidth=1, alpha=0.8, **change_look(change.what, named))
    panel.set(ylabel=name.replace("_per_", "/"))
    panel.set_ylim(bottom=0)
