"""A step's draft tree to look at (SpecBlock, figure 7): coloured by the drafter's forward, the accepted path marked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from coppice.messages.generation import StepTree

TERMINAL_COLOURS = ("green", "blue", "magenta", "cyan", "yellow")
PICTURE_COLOURS = ("#2a9d5c", "#2f6fd0", "#b0419b", "#1f9fb0", "#c98a1b")
WIDEST_LABEL = 14


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
    """A node's text as it can be shown on one line; the root is its id."""
    if not node:
        return f"root {tree.root}"
    piece = tree.pieces[node - 1]
    shown = repr(piece)[1:-1] if piece else str(tree.tokens[node - 1])
    return shown if len(shown) <= WIDEST_LABEL else f"{shown[: WIDEST_LABEL - 1]}…"


def show(tree: StepTree, console: Console) -> None:
    """Print the tree: a colour a forward, accepted nodes bold with a check mark."""
    below, accepted = children(tree), set(tree.accepted)

    def add(branch: Tree, node: int) -> None:
        for child in below[node]:
            colour = TERMINAL_COLOURS[(tree.forwards[child - 1] - 1) % len(TERMINAL_COLOURS)]
            taken = child in accepted
            text = Text(label(tree, child), style=f"bold {colour}" if taken else colour)
            add(branch.add(text.append(" ✓" if taken else "")), child)

    root = Tree(Text(label(tree, 0), style="red"))
    add(root, 0)
    console.print(root)
    key = Text("forward ")
    for forward in sorted(set(tree.forwards)):
        key.append(f"{forward} ", style=TERMINAL_COLOURS[(forward - 1) % len(TERMINAL_COLOURS)])
    console.print(key.append(f"· {len(tree.tokens)} nodes, {len(tree.accepted)} accepted ✓"))


def places(tree: StepTree) -> dict[int, tuple[float, float]]:
    """Where each node is drawn: (depth, line); leaves lie on lines of their own, a parent between its children."""
    below = children(tree)
    lines = iter(range(len(tree.tokens) + 1))
    positions: dict[int, tuple[float, float]] = {}

    def place(node: int, depth: int) -> float:
        own = [place(child, depth + 1) for child in below[node]]
        line = (own[0] + own[-1]) / 2 if own else float(next(lines))
        positions[node] = (float(depth), line)
        return line

    place(0, 0)
    return positions


def save(tree: StepTree, file: Path) -> None:
    """Write the tree as a picture; its format is the file's suffix."""
    from matplotlib.figure import Figure

    at, accepted = places(tree), {0, *tree.accepted}
    deepest, lowest = (max(place[axis] for place in at.values()) for axis in (0, 1))
    figure = Figure(figsize=(2.2 + 1.5 * deepest, 1.2 + 0.34 * lowest), layout="constrained")
    axes = figure.subplots()
    for node, parent in enumerate(tree.parents, 1):
        line: dict[str, Any] = (
            {"color": "#222222", "linewidth": 2.4} if node in accepted else {"color": "#c4c4c4", "linewidth": 0.9}
        )
        axes.plot(*zip(at[parent], at[node], strict=True), zorder=1, **line)
    for node, (x, y) in at.items():
        colour = "#cc3333" if not node else PICTURE_COLOURS[(tree.forwards[node - 1] - 1) % len(PICTURE_COLOURS)]
        taken = node in accepted
        box = {
            "boxstyle": "round,pad=0.25",
            "facecolor": "white",
            "edgecolor": colour,
            "linewidth": 2.2 if taken else 1,
        }
        look: dict[str, Any] = {
            "color": colour,
            "weight": "bold" if taken else "normal",
            "fontsize": 8,
            "ha": "center",
            "va": "center",
        }
        # Matplotlib would read a dollar sign as mathematics.
        axes.text(x, y, label(tree, node).replace("$", r"\$"), bbox=box, zorder=2, **look)
    axes.set(xlim=(-0.5, deepest + 0.5), ylim=(lowest + 0.7, -0.7))
    axes.axis("off")
    figure.savefig(file, dpi=150)
