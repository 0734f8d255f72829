"""Predicted outputs: what came of the tokens that a client expects in the answer."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from coppice.errors import InvalidField

from .step import Draft, Step

KIND = "lookup"
"""of heads that draft from a prediction, and from a client's earlier texts"""


def check_usable(kinds: Collection[str]) -> None:
    """Raise InvalidField when no head that is asked drafts from a prediction; "" is the kind of one never reached."""
    if not {KIND, ""}.intersection(kinds):
        asked = ", ".join(sorted(kinds)) or "none"
        raise InvalidField("prediction", f"a {KIND} head drafts from it; heads asked are of kind: {asked}")


class PredictionUse:
    """The places of a prediction whose tokens one head drafted."""

    def __init__(self) -> None:
        self._verified: set[int] = set()
        self._accepted: set[int] = set()

    def learn(self, step: Step, draft: Draft) -> None:
        """Take in what the step verified and accepted of the head's draft, whose tree was chosen or is part of it."""
        numbers = {
            edge: number
            for number, edge in enumerate(zip(draft.tree.parents.tolist(), draft.tree.tokens.tolist(), strict=True), 1)
        }
        own = {0: 0}  # the draft's number of each chosen node
        chosen = step.choice.tree
        for number, edge in enumerate(zip(chosen.parents.tolist(), chosen.tokens.tolist(), strict=True), 1):
            parent, token = edge
            if parent in own and (own[parent], token) in numbers:
                own[number] = numbers[own[parent], token]
        places = {number: draft.predicted[at - 1] for number, at in own.items() if 0 < at <= len(draft.predicted)}
        self._verified |= _known(places, step.verified.tolist())
        self._accepted |= _known(places, step.judged.accepted)

    @property
    def accepted(self) -> int:
        """Tokens of the prediction that were accepted, each counted once."""
        return len(self._accepted)

    @property
    def rejected(self) -> int:
        """Tokens of the prediction that were verified and never accepted, each counted once."""
        return len(self._verified - self._accepted)


def _known(places: dict[int, int], nodes: Iterable[int]) -> set[int]:
    """The places of some nodes, but for those that are of none."""
    return {place for node in nodes if (place := places.get(node, 0))}
