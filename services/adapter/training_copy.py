"""The training copy of a head with its versions on disk. Everything here runs on the one thread that owns torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from coppice.adaptation.learner import BadState, Learner, Update
from coppice.heads.feature_head import target_ids
from coppice.weights.versions import Weights
from services.adapter.versions import BadVersion, Version, Versions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from coppice.adaptation.records import Kind, Sample
    from coppice.config.settings import Settings

log = structlog.get_logger()

LEARNER_FILE = "learner.safetensors"


class Copies:
    """theta_train, what it was deployed as, and what each version holds."""

    versions: Versions
    """since `open`"""

    def __init__(self, path: str, settings: Settings, folder: Path) -> None:
        """Load the head of `path`; `folder`, not touched before `open`, keeps its versions. Raises InvalidField."""
        self._learner = Learner(path, settings.adapter.target, settings.learner)
        self._folder, self._keep_versions = folder, settings.adapter.versions_kept
        self.checkpoint = Weights.of(self._learner.deployed())
        self.live = self.checkpoint
        self.vocab_size = self._learner.config.vocab_size
        self.draft_ids = frozenset(target_ids(self._learner.student.model, self._learner.config).tolist())
        """target ids that the output layer can be taught"""

    def open(self, number: int) -> int:
        """Go on from a version that was live before a restart; returns the one that is, 0 when nothing fits.

        A damaged file is no reason not to start: the last good version that can be read takes its place.
        """
        self.versions = Versions(self._folder, self._keep_versions)
        if not number:
            return 0
        try:
            version, tensors = self.versions.load(number)
        except BadVersion as error:
            log.warning("a version cannot be read; going back to the last good one", why=str(error))
            found, tensors = self.versions.load_good()
            if found is None:
                return 0
            version = found
        self.live = self.checkpoint.changed(tensors, version.number)
        try:
            self._learner.load(self._folder / LEARNER_FILE)
            if self.checkpoint.changed(self._learner.changed(), version.number).hash == self.live.hash:
                return version.number
        except BadState as error:
            log.warning("the optimiser starts anew", why=str(error))
        self._learner.revert(tensors)
        return version.number

    def train(self, kind: Kind, samples: Sequence[Sample], number: int, anchored: bool) -> tuple[Update, Weights]:
        """One update, written to disk as version `number`, not in use anywhere yet. Raises FloatingPointError."""
        update = self._learner.step(kind, samples, anchored=anchored)
        weights = self.checkpoint.changed(self._learner.changed(), number)
        if weights.hash != self.live.hash:
            self._keep(weights)
        return update, weights

    def restore(self, back_to: int, number: int) -> Weights:
        """Earlier values as version `number`; the training copy has them too. Raises BadVersion."""
        tensors = self.versions.load(back_to)[1] if back_to else {}
        self._learner.revert(tensors)
        weights = self.checkpoint.changed(tensors, number)
        self._keep(weights)
        return weights

    def stop(self) -> None:
        """From any thread: an update that is under way ends with Interrupted."""
        self._learner.stopped.set()

    def again(self, number: int) -> Weights:
        """The live values as version `number`; the training copy has them too, and no update that was refused."""
        weights = self.live.changed({}, number)
        self._learner.revert(self._since_deployed(weights))
        self._keep(weights)
        return weights

    def _since_deployed(self, weights: Weights) -> dict[str, Tensor]:
        return {name: weights.tensors[name] for name in weights.differing(self.checkpoint)}

    def _keep(self, weights: Weights) -> None:
        record = Version(weights.version, self.live.version, weights.hash.hex())
        self.versions.save(record, self._since_deployed(weights))
        self._learner.save(self._folder / LEARNER_FILE)
