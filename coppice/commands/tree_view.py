"""A step's draft tree to look at (SpecBlock, figure 7): coloured by the drafter's forward, the accepted path marked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from coppice.wire.generation import StepTree

TERMINAL_COLOURS = ("green", "blue", "magenta", "cyan", "yellow")
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
    """The text of a node, or of the root, as it can be shown on one line; its id if it has none."""
    piece, token = (tree.pieces[node - 1], tree.tokens[node - 1]) if node else (tree.root_piece, tree.root)
    shown = repr(piece)[1:-1].replace(" ", "␣") if piece else str(token)
    return shown if len(shown) <= WIDEST_LABEL else f"{shown[: WIDEST_LABEL - 1]}…"


def _colour(forward: int) -> str:
    """The colour of what a drafter's forward made; forwards count from 1."""
    return TERMINAL_COLOURS[(forward - 1) % len(TERMINAL_COLOURS)]


def show(tree: StepTree, console: Console) -> None:
    """Print the tree: a colour a forward, accepted nodes bold with a check mark, what the verifier left out struck."""
    below, accepted, cut = children(tree), set(tree.accepted), set(tree.cut)

    def add(branch: Tree, node: int) -> None:
        for child in below[node]:
            colour = _colour(tree.forwards[child - 1])
            taken = child in accepted
            text = Text(label(tree, child), style=f"{'bold ' * taken}{'strike ' * (child in cut)}{colour}")
            add(branch.add(text.append(" ✓" if taken else "")), child)

    root = Tree(Text(label(tree, 0), style="red"))
    add(root, 0)
    console.print(root)
    key = Text("forward ")
    for forward in sorted(set(tree.forwards)):
        key.append(f"{forward} ", style=_colour(forward))
    left_out = f", {len(tree.cut)} left out" if tree.cut else ""
    console.print(key.append(f"· {len(tree.tokens)} nodes, {len(tree.accepted)} accepted ✓{left_out}"))
