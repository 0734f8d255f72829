"""What one head's adapter remembers: one JSON file and the latest versions of the weights.

Every file is complete or the one before: written beside its place, flushed, renamed into it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import structlog
from pydantic import BaseModel, Field, PrivateAttr, ValidationError, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from coppice.limits import MAX_HISTORY
from coppice.signals.records import QueryRecord, Stream
from coppice.weights.variants import in_deployed
from coppice.weights.versions import Weights
from coppice.wire.adapter import Change, QueryPoint

from .decide import BanditState
from .paper import PaperState

log = structlog.get_logger()

FILE = "state.json"
_CHANGES = 200
_VERSIONS = 16  # whose hashes and accepted lengths are remembered
_NAME = re.compile(r"version-(\d{8,})\.safetensors")


class BadFile(ValueError):
    """A file is not there, is not what was written, or is of other weights."""


def replace_file(file: Path, data: bytes) -> None:
    """Replace the file by `data`."""
    partial = file.with_name(f".{file.name}.partial")
    with partial.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    os.replace(partial, file)


def _read_safetensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and the metadata of a file. Raises BadFile."""
    try:
        with safe_open(file, "pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise BadFile(f"{file}: {error}") from None


class Versions:
    """A folder of at most `most` versions. The newest and the good one are never deleted to make room."""

    def __init__(self, folder: Path, deployed: Weights, most: int = 8) -> None:
        """`deployed` are the weights that versions are changes of; they are version 0, and have no file."""
        if most < 2:
            raise ValueError("the newest and the good version need two places")
        self.folder, self.deployed, self._most = folder, deployed, most
        self.good = 0
        """the version to go back to"""
        folder.mkdir(parents=True, exist_ok=True)
        for partial in folder.glob(".*.partial"):  # of a process that ended meanwhile
            partial.unlink()

    def numbers(self) -> list[int]:
        """List the versions on disk, ascending."""
        matches = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def save(self, weights: Weights) -> None:
        """Write the tensors that differ from version 0, complete or not at all; the oldest versions make room.

        Raises ValueError for a number that is there already.
        """
        if weights.version < 1 or weights.version in self.numbers():
            raise ValueError(f"version {weights.version} is there already")
        changed = {name: weights.tensors[name].contiguous() for name in weights.differing(self.deployed)}
        replace_file(self._file(weights.version), save(changed, {"weights_hash": weights.hash.hex()}))
        numbers = self.numbers()
        old = [number for number in numbers if number not in (numbers[-1], self.good)]
        for number in old[: max(0, len(numbers) - self._most)]:
            self._file(number).unlink()

    def load(self, number: int) -> Weights:
        """Read a version.

        Raises BadFile when there is none, its file is damaged, it is of another head, or of an adapter that overwrote
        the head's own tensors, as those before variants did.
        """
        if not number:
            return self.deployed
        file = self._file(number)
        changed, facts = _read_safetensors(file)
        if overwritten := [name for name in changed if in_deployed(name)]:
            raise BadFile(f"{file} overwrites {overwritten[0]}, as adapters before variants did; it is not read")
        weights = self.deployed.changed(changed, number)
        if weights.hash.hex() != facts.get("weights_hash"):
            raise BadFile(f"{file} is damaged or of another head")
        return weights

    def _file(self, number: int) -> Path:
        return self.folder / f"version-{number:08d}.safetensors"


class State(BaseModel):
    """Everything that outlives the process. What records changed and how far they were read is saved together."""

    bandit: BanditState = BanditState()
    paper: PaperState = PaperState()
    positions: dict[Stream, Annotated[str, Field(pattern=r"^\d+-\d+$")]] = {}
    """the id of the last entry that was read of each stream"""
    numbers: dict[Stream, dict[str, int]] = {}
    """by stream and sender, the highest number of an entry that was read"""
    paused: bool = False
    live: int = 0
    """the version that is to be in use"""
    good: int = 0
    """the last version that was found good"""
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

    @model_validator(mode="before")
    @classmethod
    def _read_earlier_format(cls, values: Any) -> Any:
        """Take the kinds of text of an adapter that measured variants by accepted lengths, without its measurements."""
        if isinstance(values, dict) and "kinds" in values:
            values["bandit"] = values.pop("kinds")
            for kind in filter(None, values["bandit"].get("kinds", ())):
                kind["with_variant"] = kind["with_other"] = []
        return values

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
