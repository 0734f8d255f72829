"""The contract of heads: every kind of this package keeps it, and a head that breaks it is found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from coppice.config.sections import HEAD_KINDS, TRAINED_KINDS, DrafterSettings
from coppice.errors import InvalidField
from coppice.heads.base import DraftJob, Growth, Head, build_head
from coppice.heads.ngram import NgramHead
from coppice.speculation.tree import TreeError
from coppice.testing import HeadContract
from coppice.wire.drafter import Advance, OpenDraft
from tests.tiny import add_mtp, make_target
from tests.unit.test_feature_heads import VOCAB, save_random


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, and heads of random weights by kind."""
    folder = tmp_path_factory.mktemp("models")
    add_mtp(make_target(folder / "target", VOCAB, layers=8, tokenizer=False))
    make_target(folder / "lm", VOCAB, seed=1, tokenizer=False)
    for kind in TRAINED_KINDS:
        save_random(folder / kind, kind)
    return folder


class TestEveryKind(HeadContract):
    """The contract, kept by the kinds of this package."""

    vocab_size = VOCAB

    @pytest.fixture(autouse=True, params=HEAD_KINDS)
    def of_a_kind(self, request: pytest.FixtureRequest, models: Path) -> None:
        path = str(models / request.param) if (models / request.param).exists() else ""
        target = str(models / "target")
        small = {"top_k": 4, "depth": 4, "kv_tokens": 1024, "threads": 1}
        self.settings = DrafterSettings(kind=request.param, path=path, target=target, **small)

    def make_head(self) -> Head:
        return build_head(self.settings)


# --- heads that break it ---


class _Deaf(NgramHead):
    def advance(self, key: int, advance: Advance) -> None:
        pass


class _Clinging(NgramHead):
    def open(self, key: int, opening: OpenDraft) -> Iterator[None]:
        if key not in self._models:
            yield from super().open(key, opening)

    def close(self, key: int) -> None:
        pass


class _OneText(NgramHead):
    def open(self, key: int, opening: OpenDraft) -> Iterator[None]:
        yield from super().open(0, opening)

    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        yield from super().draft([replace(job, key=0) for job in jobs])


class _Learning(NgramHead):
    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        for part in super().draft(jobs):
            yield part
            self._models[jobs[part[0].job].key].extend(part[0].nodes.tokens.tolist())


class _Rising(NgramHead):
    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        for (grown,) in super().draft(jobs):
            yield [replace(grown, nodes=replace(grown.nodes, log_probs=-1 / (1 + grown.nodes.depths()[1:])))]


class _Seeded(NgramHead):
    def draft(self, jobs: Sequence[DraftJob]) -> Iterator[list[Growth]]:
        yield from super().draft([replace(job, root=job.sampling.seed % 6) for job in jobs])


class _Warm(NgramHead):
    def warm_up(self) -> None:
        self._depth = 1


BROKEN = {
    _Deaf: "a_session_that_advanced_drafts_as_a_fresh_one",
    _Clinging: "a_closed_session_is_forgotten",
    _OneText: "sessions_know_nothing_of_each_other",
    _Learning: "drafting_leaves_no_trace",
    _Rising: "trees_are_valid",
    _Seeded: "greedy_drafts_know_no_seed",
    _Warm: "drafting_leaves_no_trace",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_head_that_breaks_the_contract_is_found(broken: type[NgramHead], models: Path) -> None:
    class Contract(HeadContract):
        vocab_size = VOCAB

        def make_head(self) -> Head:
            return broken(DrafterSettings(kind="bigram", target=str(models / "target")))

    with pytest.raises((AssertionError, TreeError)):
        getattr(Contract(), f"test_{BROKEN[broken]}")()


def test_a_packages_builder_that_raises_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(settings: DrafterSettings) -> Head:
        raise FileNotFoundError(2, "No such file", "table.json")

    monkeypatch.setattr("coppice.heads.base.extension", lambda *_: build)
    with pytest.raises(InvalidField, match=r"^drafter.kind: mine cannot be built: FileNotFoundError: .*table.json'$"):
        build_head(DrafterSettings.model_construct(kind="mine"))
