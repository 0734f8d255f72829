"""What one head's adapter remembers, on disk as one JSON file that is complete or the one before."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import structlog
from pydantic import BaseModel, PrivateAttr, ValidationError

from coppice.adaptation.bandit import BanditState, Trigger
from coppice.adaptation.records import QueryRecord
from coppice.limits import MAX_HISTORY
from coppice.messages.adapter import Change, QueryPoint
from coppice.weights.atomic import replace_file
from coppice.weights.versions import Weights
from services.adapter.drift import DriftState

log = structlog.get_logger()

FILE = "state.json"
_CHANGES = 200
_VERSIONS = 16  # whose hashes and accepted lengths are remembered


class Canary(BaseModel):
    """A version that one replica uses: (tau, tokens/s) of queries on it, and of those on the old one meanwhile."""

    version: int
    trigger: Trigger
    train_s: float
    queries: int = 0
    """that ended meanwhile, on whatever version"""
    old: list[tuple[float, float]] = []
    new: list[tuple[float, float]] = []


class Memory(BaseModel):
    """Everything that outlives the process."""

    bandit: BanditState = BanditState()
    drift: DriftState = DriftState()
    paused: bool = False
    live: int = 0
    """version that is to be in use"""
    good: int = 0
    """the last one that drift control found good"""
    newest: int = 0
    """highest number that was ever given to a version"""
    queries: int = 0
    reverts: int = 0
    canary: Canary | None = None
    hashes: dict[int, str] = {}
    taus: dict[int, tuple[int, float]] = {}
    """by version: queries that lived on it, and the mean of their accepted lengths"""
    history: list[dict[str, Any]] = []
    changes: list[dict[str, Any]] = []
    _file: Path = PrivateAttr(Path(FILE))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """What an earlier run wrote into the folder; nothing of a file that is damaged."""
        file = folder / FILE
        memory = cls()
        if file.exists():
            try:
                memory = cls.model_validate_json(file.read_bytes())
            except (ValidationError, OSError) as error:
                log.warning("the state cannot be read and starts anew", file=str(file), why=str(error)[:200])
        memory._file, memory.canary = file, None  # a canary is over with the process that watched it
        return memory

    def save(self) -> None:
        """Write it down."""
        replace_file(self._file, self.model_dump_json().encode())

    def next_number(self) -> int:
        """A number no version had."""
        self.newest += 1
        return self.newest

    def know(self, weights: Weights, number: int | None = None) -> None:
        """Remember the hash of a version, or of another number that a replica has for the same weights."""
        self.hashes[weights.version if number is None else number] = weights.hash.hex()
        while len(self.hashes) > _VERSIONS:
            del self.hashes[min(self.hashes)]

    def same_as_live(self, version: int) -> int:
        """The live version's number where its weights are the same, else the number itself."""
        same = version in self.hashes and self.hashes[version] == self.hashes.get(self.live)
        return self.live if same else version

    def went_back(self, version: int) -> None:
        """A restart found other weights than it left: what was measured is not about them."""
        self.live = self.good = version
        self.bandit = BanditState(queries=self.bandit.queries, version=version)
        self.drift = DriftState()

    def observe(self, record: QueryRecord, version: int | None, action: str) -> float | None:
        """Add a query to the history; returns the mean tau of its version."""
        self.queries += 1
        point = QueryPoint(self.queries, record.tau, record.tokens_per_s, record.s, version, action)
        self.history.append(asdict(point))
        del self.history[:-MAX_HISTORY]
        if version is None:
            return None
        count, mean = self.taus.get(version, (0, 0.0))
        mean = (mean * count + record.tau) / (count + 1)
        self.taus[version] = count + 1, mean
        while len(self.taus) > _VERSIONS:
            del self.taus[min(self.taus)]
        return mean

    def change(self, change: Change) -> None:
        """Add to what was changed."""
        self.changes.append(asdict(change))
        del self.changes[:-_CHANGES]
