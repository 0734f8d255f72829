"""A step's draft tree to look at (SpecBlock, figure 7): coloured by the drafter's forward, the accepted path marked."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from coppice.pictures.style import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION
from coppice.wire.generation import StepTree

TERMINAL_COLOURS = ("green", "blue", "magenta", "cyan", "yellow")
PICTURE_COLOURS = (GREEN, BLUE, PURPLE, SKY, ORANGE)
WIDEST_LABEL = 14
INCHES_A_DEPTH, INCHES_A_LINE = 1.35, 0.32


def longest(trees: Sequence[StepTree]) -> StepTree:
    """The tree whose accepted path is the longest; the first of several."""
    return max(trees, key=lambda tree: len(tree.accepted))


def children(tree: StepTree) -> Mapping[int, list[int]]:
    """Each node's children, the likeliest first."""
    below: dict[int, list[int]] = defaultdict(list)
    for node, parent in enumerate(tree.parents, 1):
        below[parent].append(node)
    for nodes in below.values():
        nodes.sort(key=lambda node: -tree.log_probs[node - 1])
    return below


def label(tree: StepTree, node: int) -> str:
    """The text of a node, or of the root, as it can be shown on one line; its id if it has none."""
    piece, token = (tree.pieces[node - 1], tree.tokens[node - 1]) if node else (tree.root_piece, tree.root)
    shown = repr(piece)[1:-1].replace(" ", "␣") if piece else str(token)
    return shown if len(shown) <= WIDEST_LABEL else f"{shown[: WIDEST_LABEL - 1]}…"


def chance(tree: StepTree, node: int) -> float:
    """What the drafter gives a node behind its parent, from 0 to 1."""
    parent = tree.parents[node - 1]
    before = tree.log_probs[parent - 1] if parent else 0.0
    return math.exp(min(0.0, tree.log_probs[node - 1] - before))


def _colour(colours: Sequence[str], forward: int) -> str:
    """The colour of what a drafter's forward made; forwards count from 1."""
    return colours[(forward - 1) % len(colours)]


def show(tree: StepTree, console: Console) -> None:
    """Print the tree: a colour a forward, accepted nodes bold with a check mark, what the verifier left out struck."""
    below, accepted, cut = children(tree), set(tree.accepted), set(tree.cut)

    def add(branch: Tree, node: int) -> None:
        for child in below[node]:
            colour = _colour(TERMINAL_COLOURS, tree.forwards[child - 1])
            taken = child in accepted
            text = Text(label(tree, child), style=f"{'bold ' * taken}{'strike ' * (child in cut)}{colour}")
            add(branch.add(text.append(" ✓" if taken else "")), child)

    root = Tree(Text(label(tree, 0), style="red"))
    add(root, 0)
    console.print(root)
    key = Text("forward ")
    for forward in sorted(set(tree.forwards)):
        key.append(f"{forward} ", style=_colour(TERMINAL_COLOURS, forward))
    left_out = f", {len(tree.cut)} left out" if tree.cut else ""
    console.print(key.append(f"· {len(tree.tokens)} nodes, {len(tree.accepted)} accepted ✓{left_out}"))


def places(tree: StepTree) -> dict[int, tuple[float, float]]:
    """Where each node is drawn: (depth, line); a parent is beside its likeliest child, leaves have their own lines."""
    below = children(tree)
    lines = iter(range(len(tree.tokens) + 1))
    positions: dict[int, tuple[float, float]] = {}

    def place(node: int, depth: int) -> float:
        own = [place(child, depth + 1) for child in below[node]]
        line = own[0] if own else float(next(lines))
        positions[node] = (float(depth), line)
        return line

    place(0, 0)
    return positions


def save(tree: StepTree, file: Path) -> None:
    """Write the tree as a picture; its format is the file's suffix."""
    from matplotlib.figure import Figure

    at, accepted = places(tree), {0, *tree.accepted}
    deepest, lowest = (max(place[axis] for place in at.values()) for axis in (0, 1))
    size = (1.6 + INCHES_A_DEPTH * deepest, 1.1 + INCHES_A_LINE * lowest)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    for node, parent in enumerate(tree.parents, 1):
        taken = node in accepted
        # An edge goes down beside its parent and then to the right, so that no two cross.
        (left, top), (right, line) = at[parent], at[node]
        look: dict[str, Any] = {"color": BLACK if taken else "#B8B8B8", "linewidth": 2.4 if taken else 0.9}
        look["linestyle"] = ":" if node in tree.cut else "-"
        axes.plot([left, left + 0.3, right], [top, line, line], zorder=1 + taken, **look)
        shown: dict[str, Any] = {"fontsize": 6, "color": "0.35", "ha": "right", "va": "bottom"}
        axes.text(right - 0.26, line - 0.04, f"{chance(tree, node):.0%}", zorder=4, **shown)
    for node, (x, y) in at.items():
        _draw_node(axes, tree, node, (x, y), node in accepted)
    axes.set(xlim=(-0.4, deepest + 0.5), ylim=(lowest + 0.6, -0.6))
    axes.axis("off")
    figure.legend(handles=_key(tree), loc="outside lower center", ncols=5, fontsize="small", frameon=False)
    figure.savefig(file, dpi=150)


def _draw_node(axes: Any, tree: StepTree, node: int, place: tuple[float, float], taken: bool) -> None:
    colour = VERMILION if not node else _colour(PICTURE_COLOURS, tree.forwards[node - 1])
    box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": colour, "linewidth": 2.4 if taken else 1}
    look: dict[str, Any] = {"weight": "bold" if taken else "normal", "fontsize": 8, "ha": "center", "va": "center"}
    # Matplotlib would read a dollar sign as mathematics.
    axes.text(*place, label(tree, node).replace("$", r"\$"), bbox=box, zorder=3, color="black", **look)


def _key(tree: StepTree) -> list[Any]:
    """What the colours and the thick line mean."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        Patch(facecolor="white", edgecolor=VERMILION, label="root"),
        *[
            Patch(facecolor="white", edgecolor=_colour(PICTURE_COLOURS, forward), label=f"drafted by forward {forward}")
            for forward in sorted(set(tree.forwards))
        ],
        Line2D([], [], color=BLACK, linewidth=2.4, label="accepted"),
    ]
