"""A step's tree on the terminal."""

from __future__ import annotations

import io

from rich.console import Console

from coppice.commands.generate import print_tree
from coppice.wire.generation import StepTree

TREE = StepTree(
    root=7,
    tokens=(4, 5, 6, 8, 9),
    parents=(0, 0, 1, 1, 3),
    log_probs=(-0.1, -2.0, -0.4, -3.0, -0.9),
    forwards=(1, 1, 1, 1, 2),
    pieces=(" the", "$x$", " cat", "\n", ""),
    accepted=(1, 3),
    root_piece=" ",
)


def test_the_terminal_shows_the_tree_that_accepted_most_with_forwards_and_path() -> None:
    other = StepTree(1, (2,), (0,), (-1.0,), (1,), ("x",), (1,))
    plain = io.StringIO()
    print_tree([other, TREE, other], Console(file=plain, width=80, color_system=None))
    lines = plain.getvalue().splitlines()
    assert [line.strip("│├└─ ") for line in lines[:6]] == ["␣", "␣the ✓", "␣cat ✓", "9", "\\n", "$x$"]
    assert "5 nodes, 2 accepted" in lines[-1]
