"""The status of adapted heads for people: tables, and a picture of what updates did to tau and tokens/s."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from coppice.messages.adapter import STANDING_BY, Change, HeadStatus, QueryPoint

SMOOTHING = 15
"""Queries of a moving mean"""
ACTION_COLOURS = {"skip": "0.8", "head": "tab:orange", "full": "tab:blue"}
CHANGE_COLOURS = {"head": "tab:orange", "full": "tab:blue", "revert": "tab:red", "rollback": "tab:red"}
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
    for table in (actions, replicas, versions, changes):
        if table.row_count:
            console.print(table)


def moving_mean(values: Sequence[float], width: int = SMOOTHING) -> list[float]:
    """Return the mean of each value and the `width` - 1 before it."""
    return [statistics.fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


def draw(heads: Sequence[HeadStatus], file: Path) -> None:
    """Draw tau and tokens/s along each head's queries, coloured by what a query was for; lines are changes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6 * max(1, len(heads))), layout="constrained")
    panels = figure.subplots(2 * max(1, len(heads)), 1, squeeze=False)[:, 0]
    for number, status in enumerate(heads):
        for panel, name in ((panels[2 * number], "tau"), (panels[2 * number + 1], "tokens_per_s")):
            _draw(panel, status.history, status.changes, name)
        panels[2 * number].set(title=f"{status.head} ({status.policy})")
        panels[2 * number + 1].set(xlabel="query")
    figure.savefig(file, dpi=120)


def _draw(panel: Any, history: Sequence[QueryPoint], changes: Sequence[Change], name: str) -> None:
    for action, colour in ACTION_COLOURS.items():
        points = [point for point in history if point.action == action]
        panel.scatter(
            [point.query for point in points],
            [getattr(point, name) for point in points],
            s=8,
            color=colour,
            label=action,
        )
    panel.plot(
        [point.query for point in history],
        moving_mean([getattr(point, name) for point in history]),
        color="black",
        label=f"mean of {SMOOTHING}",
    )
    first = history[0].query if history else 0
    for change in changes:
        if change.query >= first:
            panel.axvline(change.query, color=CHANGE_COLOURS.get(change.what, "0.5"), linewidth=0.8, alpha=0.7)
    panel.set(ylabel=name.replace("_per_", "/"))
    panel.legend(loc="upper right", fontsize="small", ncols=4)
