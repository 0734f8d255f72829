"""An open or a step on its way through the worker."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from coppice.engine.batch import Piece
from coppice.messages.steps import VerifyStep
from coppice.speculation.tree import DraftTree, prune

from .session import Session


@dataclass
class Job:
    """What one session waits for; a step's tree loses the nodes there is no room for and those that do not pay."""

    answer: asyncio.Future[Any]
    arrived: int
    session: Session | None = None
    step: VerifyStep | None = None
    """None for the opening of a session"""
    started: int = 0
    forward_ns: int = 0
    tree: DraftTree = field(default_factory=DraftTree.empty)
    verified: tuple[int, ...] = ()
    """the sender's numbers of the tree's nodes, when some were left out"""
    answered: bool = False

    @property
    def opened(self) -> Session:
        """The session. Raises ValueError before it was admitted."""
        if self.session is None:
            raise ValueError("the session is not open yet")
        return self.session

    @property
    def prefill_left(self) -> list[int]:
        """Prompt ids whose KV is still missing (prefill only)."""
        return self.opened.request.ids[self.opened.committed_len :]

    @property
    def whole(self) -> bool:
        """Whether no node may be left out: the sender says so, or sampled them, and a choice would change their law."""
        return self.step is not None and (self.step.whole_tree or self.step.q_rows is not None)

    def cut(self, budget: int) -> None:
        """Leave out all but the `budget` likeliest nodes."""
        if budget < len(self.tree):
            numbers = self.verified or range(1, len(self.tree) + 1)
            self.tree, kept = prune(self.tree, budget)
            self.verified = tuple(map(numbers.__getitem__, (kept - 1).tolist()))

    def piece(self) -> Piece:
        """Root and tree as rows: node i is row i, so parents are the tree's own numbers."""
        assert self.step
        assert self.session
        return Piece(
            table=self.session.table,
            prefix_len=self.session.committed_len,
            tokens=[self.step.root, *self.tree.tokens.tolist()],
            parents=[-1, *self.tree.parents.tolist()],
            depths=self.tree.depths().tolist(),
            keep=range(len(self.tree) + 1),
        )
