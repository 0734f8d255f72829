"""The status of adapted heads for people: tables, and a picture of what updates did to tau and tokens/s."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from coppice.pictures.style import FAMILIES, GREEN, VERMILION
from coppice.wire.adapter import STANDING_BY, Change, HeadStatus, KindStatus, QueryPoint

SMOOTHING = 15
"""Queries of a moving mean"""
ACTION_COLOURS = {"skip": "0.75", "learn": "0.75", "head": FAMILIES["head"], "full": FAMILIES["full"]}
_CHANGES = {
    "variant": ("new variant", FAMILIES["bandit"]),
    "pays": ("variant pays", GREEN),
    "loses": ("taken back", VERMILION),
    "head": ("head-only update", FAMILIES["head"]),
    "full": ("full update", FAMILIES["full"]),
    "revert": ("taken back", VERMILION),
    "rollback": ("taken back", VERMILION),
}
_LATEST = 8


def show(status: HeadStatus, console: Console) -> None:
    """Print one head as text."""
    if status.doing == STANDING_BY and not status.weights_hash:
        console.print(f"[bold]{status.head}[/bold]: {STANDING_BY}; another adapter is active, or redis is away")
        return
    paused = ", paused" if status.paused else ""
    console.print(
        f"[bold]{status.head}[/bold]: policy {status.policy}{paused}, {status.doing}; version {status.version} "
        f"({status.weights_hash.hex()[:12]}), last good {status.good_version}; {status.queries} queries, "
        f"{status.events} events, {status.reverts} reverts",
        highlight=False,
    )
    actions = Table("action", "tokens/s per s", "updates", "samples", box=box.SIMPLE_HEAD)
    for one in status.actions:
        value = "not measured" if one.value is None else f"{one.value:+.3f} ± {one.error:.3f}"
        actions.add_row(one.action, value, str(one.updates), f"{one.samples} of {one.capacity}")
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


def _drafted_by(kind: KindStatus) -> str:
    names = [f"variant {number}" if number else "deployed" for number in (kind.variant, kind.other)]
    return f"{names[0]} {kind.share:.0%}, {names[1]}" if kind.share else names[1]


def _next(kind: KindStatus) -> str:
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


def draw(heads: Sequence[HeadStatus], file: Path) -> None:
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


def _draw(panel: Any, history: Sequence[QueryPoint], changes: Sequence[Change], name: str) -> None:
    values = [getattr(point, name) for point in history]
    for action, colour in ACTION_COLOURS.items():
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
