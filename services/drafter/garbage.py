"""Trees that nobody may verify, for the failpoint drafter.garbage."""

from __future__ import annotations

import numpy as np

from coppice.speculation.tree import DraftTree


def garbage(tree: DraftTree) -> DraftTree:
    """A tree of as many nodes that nobody may verify: a forward parent, an id that is none, a score that is no number.

    tree: n nodes; an empty one gets one node, whose id is none.
    """
    n = max(1, len(tree))
    parents, scores = np.arange(n), np.full(n, -0.5, np.float32)
    tokens = np.resize(tree.tokens, n) if len(tree) else np.zeros(n, np.int64)
    which = int(tokens.sum()) % 3 if n > 1 else 1
    if which == 0:
        parents[0] = n
    elif which == 1:
        tokens[0] = 2**31 - 1
    else:
        scores[-1] = np.nan
    return DraftTree(tokens, parents, scores)
