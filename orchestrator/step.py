"""One step of a request as a record, and who decides in it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from coppice.speculation.policy import NO_HEAD, Choice, Policy
from coppice.speculation.tree import DraftTree, IntArray, prune
from coppice.wire.verifier import Verdict

from .heads import Draft

NOTHING = Choice(DraftTree.empty(), NO_HEAD)


@dataclass(slots=True)
class Step:
    """A step from its question to its verdict. Heads are numbers into the request's list of heads.

    The instants, of `perf_counter_ns`, say when its parts ended; each part begins where the one before it ends.
    """

    number: int
    """1 for the first step of a request"""
    hint: int | None
    """how many nodes the last verdict said to draft; None: any number"""
    drafts: list[Draft]
    """one a head, NO_DRAFT where it was not asked or sat the step out"""
    root: int = -1
    budget: int = 0
    """nodes to draft at most"""
    asked: tuple[int, ...] = ()
    """heads that the policy asks"""
    opening: bool = False
    """whether an asked head had to prefill in this step"""
    choice: Choice = NOTHING
    verdict: Verdict = field(init=False)
    offered: tuple[int, ...] = ()
    """the target's tokens behind the root: the accepted drafts, and the next root unless the text has ended"""
    num_tokens: int = 0
    """tokens that the text took; it may have ended before the last ones"""
    began_at: int = field(default_factory=time.perf_counter_ns)
    asked_at: int = 0
    """the questions for drafts are encoded"""
    drafted_at: int = 0
    """the drafts are here, or the wait for them is over"""
    chosen_at: int = 0
    sent_at: int = 0
    """the verifier's question is encoded"""
    answered_at: int = 0
    committed_at: int = 0

    @property
    def num_accepted(self) -> int:
        """Accepted drafts that the text took."""
        return min(self.num_tokens, len(self.verdict.accepted))

    @property
    def num_verified(self) -> int:
        """How many of the chosen tree's nodes were verified."""
        return len(self.verdict.verified) if self.verdict.pruned else len(self.choice.tree)

    @property
    def verified(self) -> IntArray:
        """Their numbers, ascending."""
        verdict = self.verdict
        return np.array(verdict.verified if verdict.pruned else range(1, len(self.choice.tree) + 1), np.int64)

    @property
    def draft_ns(self) -> int:
        """How long drafting took, from the step's beginning; 0 when nobody was asked."""
        return self.drafted_at - self.began_at if self.asked else 0

    @property
    def transport_ns(self) -> int:
        """Time of the verifier's question and answer, beside the verifier's own."""
        return self.answered_at - self.chosen_at - self.verdict.timings.total_ns

    @property
    def took_ns(self) -> int:
        """Time from the commit before to this step's."""
        return self.committed_at - self.began_at


class StepPolicy:
    """The decisions of one request. A step comes to `heads`, `choose`, `observe` and `learn`, in this order.

    This one asks the same heads in every step.
    """

    def __init__(self, policy: Policy, heads: Sequence[int], whole_tree: bool = False, predicted: bool = False) -> None:
        """whole_tree: verify every node that is drafted, whether or not it pays. predicted: a head drafts from a
        prediction, of which the verifier's hint, made of all texts, says nothing.
        """
        self.policy, self.whole_tree = policy, whole_tree
        self._asks, self._keeps_budget = heads, whole_tree or predicted

    @property
    def soon(self) -> Sequence[int]:
        """Heads that the request will probably ask soon: their streams are opened before they are asked."""
        return ()

    def heads(self, step: Step) -> Sequence[int]:
        """Pick the heads that the step asks for drafts."""
        return self._asks

    def budget(self, most: int, hint: int | None) -> int:
        """How many nodes a step drafts: at a hint of 0 still one, to see what it gains."""
        return most if hint is None or self._keeps_budget else min(most, max(1, hint))

    def choose(self, step: Step) -> Choice:
        """Make the tree to verify of the drafts. The only tree that was asked for is taken as it is."""
        if not step.asked:
            return NOTHING
        if len(step.asked) == 1 and len(tree := step.drafts[step.asked[0]].scored):
            return Choice(prune(tree, step.budget)[0], step.asked[0])
        return self.policy.choose([draft.scored for draft in step.drafts], step.budget)

    def observe(self, step: Step) -> None:
        """Take in what the step took and gained, before the next one is decided."""

    def learn(self, step: Step) -> None:
        """Learn from the step what no other step waits for."""

    def close(self) -> None:
        """End the request, which may have failed or never begun."""
