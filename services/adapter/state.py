"""What one head's adapter remembers, on disk as one JSON file that is complete or the one before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Self

import structlog
from pydantic import BaseModel, Field, PrivateAttr, ValidationError

from coppice.adaptation.record_queue import Stream
from coppice.adaptation.records import QueryRecord
from coppice.limits import MAX_HISTORY
from coppice.weights.versions import Weights
from coppice.wire.adapter import Change, QueryPoint

from .atomic import replace_file
from .bandit import BanditState
from .drift import DriftState

PROVEN_SHARE = 15 / 16
"""of a kind's texts for a variant that pays: the rest goes on being measured against it"""
_FIRST_SPREAD = 0.16  # mean squared distance assumed of a kind of few texts
_PRIOR_DRAG = 0.15  # share of its speed that serving is expected to lose while an update trains


class Gain(BaseModel):
    """What a variant gains over what drafts for the rest of its kind of text, in the same minutes."""

    share: float = 0.0
    """of tau"""
    error: float = 0.0
    """standard error"""
    variant: int = 0
    """queries that it drafted"""
    others: int = 0
    """queries that it was compared with"""


class KindState(BaseModel):
    """All that is known of a kind."""

    centre: list[float]
    spread: float = _FIRST_SPREAD
    """mean squared distance from the centre"""
    queries: int = 0
    last: int = 0
    """number of the latest query"""
    query_s: float = 0.0
    """mean seconds of a query"""
    tau: float = 1.0
    """mean accepted length with the deployed weights"""
    variant: int = 0
    """what drafts for `share` of the texts; 0: the deployed weights"""
    share: float = 0.0
    other: int = 0
    """what drafts for the others"""
    since: int = 0
    """version of the weights that the measurements below begin with"""
    with_variant: list[float] = []
    with_other: list[float] = []
    learnt: int = 0
    """queries before the last update"""
    updates: int = 0
    failures: int = 0
    """in a row that were no better"""
    expected_gain: float | None = None
    """of the next update, share of tau; None: nothing is known of it"""

    @property
    def young(self) -> bool:
        """Whether its variant has to be measured yet."""
        return 0 < self.share < PROVEN_SHARE


class KindsState(BaseModel):
    """All kinds, by place; None: a place that no kind has."""

    kinds: list[KindState | None] = []
    queries: int = 0
    step_s: float = 0.0
    """mean time of a step while nothing is trained"""
    drag: float = _PRIOR_DRAG
    """share by which steps were longer while something was"""


log = structlog.get_logger()

FILE = "state.json"
_CHANGES = 200
_VERSIONS = 16  # whose hashes and accepted lengths are remembered


class OverwritingState(BaseModel):
    """What is known of updates that overwrite the head."""

    bandit: BanditState = BanditState()
    drift: DriftState = DriftState()


class State(BaseModel):
    """Everything that outlives the process. What records changed and how far they were read is saved together."""

    overwriting: OverwritingState = OverwritingState()
    kinds: KindsState = KindsState()
    positions: dict[Stream, Annotated[str, Field(pattern=r"^\d+-\d+$")]] = {}
    """the id of the last entry that was read of each stream"""
    numbers: dict[Stream, dict[str, int]] = {}
    """by stream and sender, the highest number of an entry that was read"""
    paused: bool = False
    live: int = 0
    """the version that is to be in use"""
    good: int = 0
    """the last version that drift control found good"""
    newest: int = 0
    """the highest number that was ever given to a version"""
    queries: int = 0
    reverts: int = 0
    hashes: dict[int, str] = {}
    taus: dict[int, tuple[int, float]] = {}
    """by version: queries that lived on it, and the mean of their accepted lengths"""
    history: list[QueryPoint] = []
    changes: list[Change] = []
    _file: Path = PrivateAttr(Path(FILE))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read what an earlier run wrote into the folder; a damaged file counts as none."""
        file = folder / FILE
        state = cls()
        if file.exists():
            try:
                state = cls.model_validate_json(file.read_bytes())
            except (ValidationError, OSError) as error:
                log.warning("the state cannot be read and starts anew", file=str(file), why=str(error)[:200])
        state._file = file
        return state

    def save(self) -> None:
        """Write it to the folder that it was loaded from."""
        replace_file(self._file, self.model_dump_json().encode())

    def next_number(self) -> int:
        """Return a number that no version had."""
        self.newest += 1
        return self.newest

    def know(self, weights: Weights, number: int | None = None) -> None:
        """Remember the hash of a version, or of another number that a replica has for the same weights."""
        self.hashes[weights.version if number is None else number] = weights.hash.hex()
        while len(self.hashes) > _VERSIONS:
            del self.hashes[min(self.hashes)]

    def lived_on(self, versions: Sequence[int]) -> int | None:
        """Return the version that a query lived on, by the first and the last that it saw.

        Numbers of the same weights as the live ones are one version, the live one. None: it lived on several, or on one
        that nobody made: drafters say what they like.
        """
        live = self.hashes.get(self.live)
        seen = {self.live if self.hashes.get(version) == live else version for version in versions}
        return seen.pop() if len(seen) == 1 and seen <= self.hashes.keys() else None

    def observe(self, record: QueryRecord, version: int | None, action: str) -> None:
        """Add a query to the history, and its tau to the mean of its version."""
        self.queries += 1
        self.history.append(QueryPoint(self.queries, record.tau, record.tokens_per_s, record.s, version, action))
        del self.history[:-MAX_HISTORY]
        if version is None:
            return
        count, mean = self.taus.get(version, (0, 0.0))
        self.taus[version] = count + 1, (mean * count + record.tau) / (count + 1)
        while len(self.taus) > _VERSIONS:
            del self.taus[min(self.taus)]

    def change(self, change: Change) -> None:
        """Add to the changes of the weights."""
        self.changes.append(change)
        del self.changes[:-_CHANGES]
