"""Policies: which heads draft in a step, and which tree is verified."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from coppice.errors import InvalidField
from coppice.machine import extension, extensions
from coppice.speculation.tree import DraftTree, prune, union

POLICIES = ("plain", "route", "merge", "auto")  # and single:HEAD
ADDED = "coppice.policies"  # the entry points under which packages add policies: a Chooser each
NO_HEAD = -1
UNION = -2


@dataclass(frozen=True, slots=True)
class Choice:
    """The tree to verify, and where it came from: an index of the policy's heads, NO_HEAD or UNION."""

    tree: DraftTree
    routed: int


Chooser = Callable[[Sequence[DraftTree], int], Choice]
"""makes the tree to verify of the heads' trees, not all of them empty, within a budget of nodes"""


def policy_names() -> tuple[str, ...]:
    """The policies of this package and of installed ones, beside single:HEAD; the first one needs no heads."""
    return (*POLICIES, *(name for name in extensions(ADDED) if name not in POLICIES))


@dataclass(frozen=True, slots=True)
class Policy:
    """A parsed policy: its name and the heads that draft under it."""

    name: str
    heads: tuple[str, ...]
    chooser: Chooser | None = None  # of a policy that a package adds

    @classmethod
    def parse(cls, name: str, heads: Sequence[str]) -> Self:
        """Read `name` for a deployment with these heads: all, or some as in `route:A/B`. Raises InvalidField."""
        if name == "plain":
            return cls(name, ())
        kind, colon, named = name.partition(":")
        single = kind == "single" and bool(colon)
        if not single and kind not in policy_names()[1:]:
            raise InvalidField("policy", f"{name[:80]!r} is not one of {', '.join((*policy_names(), 'single:HEAD'))}")
        chosen = [named] if single else named.split("/") if colon else list(heads)
        for head in chosen:
            if head not in heads:
                raise InvalidField("policy", f"there is no head {head!r}; heads are {', '.join(heads) or 'none'}")
        if colon and not single and (len(chosen) < 2 or len(set(chosen)) < len(chosen)):
            raise InvalidField("policy", f"{name[:80]!r} is to name two heads or more, each once")
        if not chosen:
            raise InvalidField("policy", f"{kind} needs heads and this deployment has none")
        ours = single or kind in POLICIES
        return cls(name if single else kind, tuple(chosen), None if ours else extension(ADDED, kind, "policy"))

    @classmethod
    def default(cls, heads: Sequence[str]) -> Self:
        """Route between several heads, use a single one, decode plainly without any."""
        if len(heads) > 1:
            return cls.parse("route", heads)
        return cls.parse(f"single:{heads[0]}" if heads else "plain", heads)

    def choose(self, trees: Sequence[DraftTree], budget: int) -> Choice:
        """Route to one head's tree of calibrated scores, or merge all, in `budget` nodes; empty: the head has none."""
        if not any(map(len, trees)):
            return Choice(DraftTree.empty(), NO_HEAD)
        if self.chooser is not None:
            return self.chooser(trees, budget)
        if self.name == "merge":
            return Choice(prune(union(trees), budget)[0], UNION)
        cut = [prune(tree, budget)[0] for tree in trees]
        at = route(cut)
        return Choice(cut[at], at)


def route(trees: Sequence[DraftTree]) -> int:
    """Index of the tree with the best mean of the confidences exp(s_i) of its nodes (Dual-Draft Routing, section 5).

    That of an empty tree is 0; ties go to the first. Raises ValueError without trees. Calibrate the trees before: heads
    are as confident as they were trained to be.
    """
    return int(np.argmax([float(np.exp(t.log_probs, dtype=np.float64).sum()) / max(1, len(t)) for t in trees]))
