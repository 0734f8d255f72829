"""Predicted outputs: what came of the tokens that a client expects in the answer."""

from __future__ import annotations

from collections.abc import Collection

from coppice.errors import InvalidField
from coppice.speculation.tree import paths

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
        """Take in what the step verified, and its text took, of a head's draft that was chosen or is part of it."""
        drafted = dict(zip(paths(draft.tree), draft.predicted, strict=False))
        places = [drafted.get(path, 0) for path in paths(step.choice.tree)]
        self._verified |= {places[node - 1] for node in step.verified.tolist()} - {0}
        self._accepted |= {places[node - 1] for node in step.judged.accepted[: step.num_accepted]} - {0}

    @property
    def accepted(self) -> int:
        """Tokens of the prediction that were accepted, each counted once."""
        return len(self._accepted)

    @property
    def rejected(self) -> int:
        """Tokens of the prediction that were verified and never accepted, each counted once."""
        return len(self._verified - self._accepted)
