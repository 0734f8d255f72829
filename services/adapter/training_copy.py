"""The training copy of a head with its versions on disk. Everything here runs on the one thread that owns torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from coppice.adaptation.records import Widths
from coppice.weights.variants import in_deployed, variant_name
from coppice.weights.versions import Weights

from .atomic import BadFile
from .fitting import Fit, fit
from .learner import Learner, Update

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from coppice.adaptation.records import Kind, Sample
    from coppice.config.settings import Settings
import re
from pathlib import Path

from .atomic import read_safetensors, replace_safetensors

_NAME = re.compile(r"version-(\d{8,})\.safetensors")


class Versions:
    """A folder of at most `keep` versions. The newest and the good one are never deleted to make room."""

    def __init__(self, folder: Path, deployed: Weights, keep: int = 8) -> None:
        """`deployed` are the weights that versions are changes of; they are version 0, and have no file."""
        if keep < 2:
            raise ValueError("the newest and the good version need two places")
        self.folder, self.deployed, self.keep = folder, deployed, keep
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
        changed = {name: weights.tensors[name] for name in weights.differing(self.deployed)}
        replace_safetensors(self._file(weights.version), changed, {"weights_hash": weights.hash.hex()})
        numbers = self.numbers()
        old = [number for number in numbers if number not in (numbers[-1], self.good)]
        for number in old[: max(0, len(numbers) - self.keep)]:
            self._file(number).unlink()

    def load(self, number: int) -> Weights:
        """Read a version. Raises BadFile when there is none, its file is damaged or it is of another head."""
        if not number:
            return self.deployed
        file = self._file(number)
        changed, facts = read_safetensors(file)
        weights = self.deployed.changed(changed, number)
        if weights.hash.hex() != facts.get("weights_hash"):
            raise BadFile(f"{file} is damaged or of another head")
        return weights

    def _file(self, number: int) -> Path:
        return self.folder / f"version-{number:08d}.safetensors"


log = structlog.get_logger()

LEARNER_FILE = "learner.safetensors"


class TrainingCopy:
    """The weights in training, those that are live, and every version on disk."""

    versions: Versions
    """set by `open`"""

    def __init__(self, path: str, settings: Settings, folder: Path) -> None:
        """Load the head of `path`; `folder`, not touched before `open`, keeps its versions. Raises InvalidField."""
        self._learner = Learner(path, settings.adapter.target, settings.learner)
        self._folder, self._versions_kept = folder, settings.adapter.versions_kept
        self.deployed = Weights.of(self._learner.deployed())
        self.live = self.deployed
        """what drafters are to use"""
        config = self._learner.config
        self.widths = Widths(config.vocab_size, config.hidden_size, config.feature_width)
        self.draft_ids = self._learner.vocabulary.target_ids
        """target ids that the output layer can be taught"""

    def open(self, live: int, good: int) -> int:
        """Go on from the version that was live before a restart; returns the version that is live now.

        A damaged file is no reason not to start: the good version takes its place, or version 0.
        """
        self.versions = Versions(self._folder, self.deployed, self._versions_kept)
        for number in (live, good, 0):
            try:
                self.live = self.versions.load(number)
                break
            except BadFile as error:
                log.warning("a version cannot be read; going back to the last good one", why=str(error))
        self.versions.good = good if self.live.version == live else self.live.version
        self._learner.revert(self._changed(self.live))
        try:
            if live:
                self._learner.load(self._folder / LEARNER_FILE)
        except BadFile as error:
            log.warning("the optimiser starts anew", why=str(error))
        return self.live.version

    def train(self, kind: Kind, samples: Sequence[Sample], number: int, anchored: bool) -> tuple[Update, Weights]:
        """Make one update and write it to disk as version `number`; nobody uses it yet. Raises FloatingPointError."""
        update = self._learner.step(kind, samples, anchored=anchored)
        weights = self.deployed.changed(self._learner.changed(), number)
        if weights.hash != self.live.hash:
            self._save(weights)
        return update, weights

    def learn(
        self, variant: int, begin: int, texts: Sequence[Sample], held_out: Sequence[Sample], rest: Callable[[], None]
    ) -> tuple[Fit, dict[str, Tensor]]:
        """Learn `variant` from texts, beginning with the live values of variant `begin`; nobody uses it yet.

        Also returns all tensors that the variant is made of. Raises FloatingPointError, Interrupted.
        """
        live = self.live.tensors
        names = [name for name in live if in_deployed(name)]
        result = fit(
            self._learner,
            {name: live.get(variant_name(begin, name), live[name]) for name in names},
            texts,
            held_out,
            rest,
        )
        stale = {name: live[name] for name in names if variant_name(variant, name) in live}
        tensors = stale | result.tensors
        return result, {variant_name(variant, name): tensor for name, tensor in tensors.items()}

    def add(self, tensors: Mapping[str, Tensor], number: int) -> Weights:
        """Write the live weights with some tensors added or replaced to disk as version `number`."""
        weights = self.live.changed(tensors, number)
        self.versions.save(weights)
        return weights

    def restore(self, back_to: int | None, number: int) -> Weights:
        """Give an earlier version's values, None: the live ones, the new `number`; training goes on from them.

        Raises BadFile.
        """
        earlier = self.live if back_to is None else self.versions.load(back_to)
        weights = earlier.changed({}, number)
        self._learner.revert(self._changed(weights))
        self._save(weights)
        return weights

    def renumber(self, number: int) -> Weights:
        """Give the live values the new `number`; what is in training goes on."""
        weights = self.live.changed({}, number)
        self.versions.save(weights)
        return weights

    def stop(self) -> None:
        """Let an update that is under way end with Interrupted. Any thread may call this."""
        self._learner.stopped.set()

    def _changed(self, weights: Weights) -> dict[str, Tensor]:
        return {name: weights.tensors[name] for name in weights.differing(self.deployed) if in_deployed(name)}

    def _save(self, weights: Weights) -> None:
        self.versions.save(weights)
        self._learner.save(self._folder / LEARNER_FILE)
