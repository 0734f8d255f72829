"""A step's draft tree to look at (SpecBlock, figure 7): coloured by the drafter's forward, the accepted path marked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from coppice.messages.generation import StepTree

COLOURS = ("green", "blue", "magenta", "cyan", "yellow")
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
            colour = COLOURS[(tree.forwards[child - 1] - 1) % len(COLOURS)]
            taken = child in accepted
            text = Text(label(tree, child), style=f"bold {colour}" if taken else colour)
            add(branch.add(text.append(" ✓" if taken else "")), child)

    root = Tree(Text(label(tree, 0), style="red"))
    add(root, 0)
    console.print(root)
    key = Text("forward ")
    for forward in sorted(set(tree.forwards)):
        key.append(f"{forward} ", style=COLOURS[(forward - 1) % len(COLOURS)])
    console.print(key.append(f"· {len(tree.tokens)} nodes, {len(tree.accepted)} accepted ✓"))
