"""Who decides in each step of a request: which heads draft, which tree is verified, and what is learnt from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from coppice.speculation.policy import Choice, Policy
from coppice.speculation.tree import prune

from .step import Step


class StepPolicy(ABC):
    """The decisions of one request. A step comes to `heads`, `more`, `choose`, `observe` and `learn`, in this order."""

    policy: Policy
    """how the trees of the present step become one"""

    @property
    def soon(self) -> Sequence[int]:
        """Heads that the request will probably ask soon: their streams are opened before they are asked."""
        return ()

    @abstractmethod
    def heads(self, step: Step) -> Sequence[int]:
        """Pick the heads that the step asks for drafts."""

    def budget(self, most: int, hint: int | None) -> int:
        """How many nodes a step drafts: at a hint of 0 still one, to see what it gains."""
        return most if hint is None else min(most, max(1, hint))

    def more(self, step: Step) -> Sequence[int]:
        """Pick further heads to ask, now that the drafts of the first ones are here."""
        return ()

    def choose(self, step: Step) -> Choice:
        """Make the tree to verify of the drafts. The only tree that was asked for is taken as it is."""
        if len(step.asked) == 1 and len(tree := step.drafts[step.asked[0]].scored):
            return Choice(prune(tree, step.budget)[0], step.asked[0])
        return self.policy.choose([draft.scored for draft in step.drafts], step.budget)

    def observe(self, step: Step) -> None:  # noqa: B027  # to remember nothing is common
        """Take in what the step took and gained, before the next one is decided."""

    def learn(self, step: Step) -> None:  # noqa: B027
        """Learn from the step what no other step waits for."""

    def close(self) -> None:  # noqa: B027
        """End the request, which may have failed or never begun."""


class FixedPolicy(StepPolicy):
    """Asks the same heads in every step."""

    def __init__(self, policy: Policy, heads: Sequence[int], whole_tree: bool = False) -> None:
        """whole_tree: the budget is kept whatever the verifier hints. It hints by all texts; a prediction is of one."""
        self.policy = policy
        self._heads, self._whole_tree = heads, whole_tree

    def heads(self, step: Step) -> Sequence[int]:
        """All of them."""
        return self._heads

    def budget(self, most: int, hint: int | None) -> int:
        """As the verifier hints, unless the whole tree is to be verified."""
        return most if self._whole_tree else super().budget(most, hint)
