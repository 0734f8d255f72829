"""The lm head on tiny random models: what it drafts is the model's own opinion; the contract of every kind."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from tokenizers import Tokenizer as Codec
from tokenizers.models import BPE
from torch import Tensor
from transformers import AutoModelForCausalLM, MistralConfig

from coppice.config.sections import HEAD_KINDS, TRAINED_KINDS, DrafterSettings
from coppice.engine.engine import ForwardOutput
from coppice.engine.kv_cache import KVPool
from coppice.engine.rows import PackedBatch
from coppice.errors import InvalidField, Overloaded
from coppice.heads.base import DraftJob, Growth, Head, build_head, served_head
from coppice.heads.lm import PREFILL_ROWS, LanguageModelHead, common_width, tokenizer_hash
from coppice.heads.ngram import NgramHead
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree, TreeError
from coppice.testing import HeadContract
from coppice.wire.drafter import Advance, OpenDraft
from tests.reference import check_pool
from tests.tiny import add_mtp, make_target
from tests.unit.test_feature_heads import VOCAB as HEADS_VOCAB
from tests.unit.test_feature_heads import Slow, Tokens, assert_same, drafted, save_random

VOCAB = 120
TINY_TARGET = {"vocab": VOCAB, "max_len": 640, "tokenizer": False}
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=1.0, seed=9)
WARM = SamplingParams(temperature=0.7, top_k=10, seed=4)


@pytest.fixture(scope="module")
def heads(target: Path) -> Any:
    """`heads(top_k=4, depth=5)` is the head with these settings, made once."""

    @cache
    def head_of(**settings: Any) -> LanguageModelHead:
        settings = {"kv_tokens": 4096, "top_k": 4, "depth": 5, "threads": 1} | settings
        head = build_head(DrafterSettings(kind="lm", path=str(target), **settings))
        assert isinstance(head, LanguageModelHead)
        return head

    return head_of


def is_empty(pool: KVPool) -> None:
    assert (pool.used_tokens, pool.free_tokens) == (0, pool.spare)
    check_pool(pool)


@pytest.fixture
def head(heads: Any) -> Iterator[LanguageModelHead]:
    """The usual one; after each test it must be empty again once its sessions are closed."""
    made = heads()
    yield made
    for key in list(made._sessions):
        made.close(key)
    is_empty(made.engine.pool)


def some_ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


def opened(head: LanguageModelHead, key: int, ids: Sequence[int], want_q_rows: bool = False) -> int:
    for _ in head.open(key, OpenDraft("s", list(ids), GREEDY, want_q_rows=want_q_rows)):
        pass
    return key


def drafts(head: LanguageModelHead, jobs: Sequence[DraftJob]) -> list[Growth]:
    """One complete growth for each job."""
    grown = [growth for part in head.draft(jobs) for growth in part]
    assert sorted(growth.job for growth in grown) == list(range(len(jobs)))
    assert all(growth.last for growth in grown)
    return sorted(grown, key=lambda growth: growth.job)


def draft(head: LanguageModelHead, job: DraftJob) -> DraftTree:
    return drafts(head, [job])[0].nodes


def logits_after(model: Any, ids: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([list(ids)])).logits[0, -1]


class SlowModel(Slow):
    """A plain forward for each node."""

    def __init__(self, model: Any, ids: Sequence[int], top_k: int, depth: int) -> None:
        self.model, self.text, self.depth, self.said = model, ids, depth, {}
        self.settings, self.ids = DrafterSettings(kind="lm", top_k=top_k), torch.arange(VOCAB)

    def logits(self, text: Any, start: int, job: DraftJob, path: Tokens) -> Tensor:
        return logits_after(self.model, [*self.text, job.root, *path])


def is_the_models(
    head: LanguageModelHead, model: Any, ids: Sequence[int], job: DraftJob, top_k: int, depth: int
) -> None:
    """The head drafts what the slow reference does."""
    (tree,) = drafted(head, [job])
    assert_same(tree, SlowModel(model, ids, top_k, depth).tree(None, 0, job), job.budget)


@pytest.mark.parametrize("budget", [3, 64])
@pytest.mark.parametrize(("sampling", "coupled"), [(GREEDY, True), (SAMPLED, False), (WARM, True)])
def test_a_tree_is_the_one_plain_forwards_of_its_paths_grow(
    head: LanguageModelHead, model: Any, sampling: SamplingParams, coupled: bool, budget: int
) -> None:
    ids = some_ids(17, budget)
    job = DraftJob(opened(head, 1, ids), 5, len(ids), budget, sampling, coupled)
    assert len(draft(head, job)) == min(budget, 4 + 4 * 4 * 4)
    is_the_models(head, model, ids, job, 4, 5)


def test_a_window_reaches_over_the_trees_own_levels(tmp_path: Path) -> None:
    make_target(tmp_path, VOCAB, max_len=64, window=3, tokenizer=False)
    head = LanguageModelHead(DrafterSettings(kind="lm", path=str(tmp_path), kv_tokens=512, top_k=3, depth=6))
    ids = some_ids(11)
    job = DraftJob(opened(head, 0, ids), 5, len(ids), 40, GREEDY)
    is_the_models(head, AutoModelForCausalLM.from_pretrained(tmp_path).eval(), ids, job, 3, 6)


def test_a_forward_that_failed_spoils_no_later_draft(head: LanguageModelHead, monkeypatch: pytest.MonkeyPatch) -> None:
    text = some_ids(12)
    opened(head, 0, text)
    head.advance(0, Advance([5, 6, 7]))
    job = DraftJob(0, 7, 15, 20, GREEDY)
    with monkeypatch.context() as broken:
        broken.setattr(head.engine, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            draft(head, job)
    fresh = DraftJob(opened(head, 1, [*text, 5, 6, 7]), 7, 15, 20, GREEDY)
    assert_same(*drafted(head, [job, fresh]), 20)


def test_a_step_computes_what_is_new(head: LanguageModelHead, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    forward = head.engine.forward

    def counted(batch: PackedBatch, *beside: Any) -> ForwardOutput:
        rows.append(len(batch.tokens))
        return forward(batch, *beside)

    monkeypatch.setattr(head.engine, "forward", counted)
    length = PREFILL_ROWS + 60
    text = some_ids(length)
    opened(head, 0, text)
    assert rows == [PREFILL_ROWS, 60]
    for committed in ([], [5, 6, 7], [8]):
        head.advance(0, Advance(committed))
        text += committed
        length = len(text)
        rows.clear()
        draft(head, DraftJob(0, 3, length, 64, GREEDY))
        assert rows == [len(committed) + 1, 4, 4, 4, 4]  # what was committed and the root, then a level each
        rows.clear()
        is_the_models(head, model, text, DraftJob(0, 3, length, 64, GREEDY), 4, 5)
        assert rows[0] == 1


@pytest.mark.parametrize("budget", [3, 40])
def test_q_rows_are_what_the_chains_tokens_were_sampled_from(head: LanguageModelHead, model: Any, budget: int) -> None:
    ids = some_ids(14)
    opened(head, 0, ids, want_q_rows=True)
    for seed in range(3):
        sampling = SamplingParams(temperature=0.8, seed=seed)
        job = DraftJob(0, 5, 14, budget, sampling, want_q_rows=True)
        growth = drafts(head, [job])[0]
        tree, rows = growth.nodes, growth.q_rows
        assert rows is not None
        assert rows.shape == (min(budget, 5), VOCAB)  # as long as asked for, whatever was drawn
        assert tree.parents.tolist() == list(range(len(rows)))
        np.testing.assert_allclose(rows.sum(1), 1, rtol=1e-5)
        assert (rows >= 0).all()
        for at, row in enumerate(rows):
            text = [*ids, 5, *tree.tokens[:at].tolist()]
            expected = (logits_after(model, text) / 0.8).softmax(-1)
            np.testing.assert_allclose(row, expected, atol=1e-4)
        drafted = rows[np.arange(len(rows)), tree.tokens]
        np.testing.assert_allclose(tree.log_probs, np.log(drafted).cumsum(), rtol=1e-3)


def test_a_session_that_outgrows_the_model_drafts_nothing(heads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    head = heads()
    monkeypatch.setattr(head, "max_context", 20)
    lengths = (14, 15, 300)
    jobs = [DraftJob(opened(head, key, some_ids(length)), 3, length, 9, GREEDY) for key, length in enumerate(lengths)]
    assert [len(growth.nodes) for growth in drafts(head, jobs)] == [9, 0, 0]
    head.advance(0, Advance([3, 4]))
    assert len(draft(head, DraftJob(0, 3, 16, 9, GREEDY))) == 0
    for key in range(3):
        head.close(key)
    is_empty(head.engine.pool)


def test_without_kv_room_opening_is_refused_and_drafting_is_left_out(heads: Any) -> None:
    head = heads(kv_tokens=320)  # ten blocks
    opened(head, 0, some_ids(200))
    with pytest.raises(Overloaded):
        opened(head, 1, some_ids(120))
    opened(head, 2, some_ids(90))
    head.close(1)  # what never opened may be closed
    jobs = [DraftJob(0, 3, 200, 9, GREEDY), DraftJob(2, 3, 90, 9, GREEDY)]
    assert [len(growth.nodes) for growth in drafts(head, jobs)] == [9, 0]  # the last block is taken by the first
    head.close(0)
    assert len(draft(head, jobs[1])) == 9
    head.close(2)
    head.close(2)
    is_empty(head.engine.pool)


def with_vocabulary(folder: Path, width: int, *marks: str, first: str = "a") -> Path:
    """A draft model's folder of which only configuration and tokenizer count: 20 ids are first, first+1, ..., marks."""
    folder.mkdir()
    MistralConfig(vocab_size=width).save_pretrained(folder)
    codec = Codec(BPE(vocab={chr(ord(first) + at): at for at in range(20)}, merges=[]))
    codec.add_special_tokens(list(marks))
    codec.save(str(folder / "tokenizer.json"))
    return folder


def test_a_draft_model_of_another_vocabulary_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    target = with_vocabulary(tmp_path / "target", 24, "<user>", "<end>")
    same = with_vocabulary(tmp_path / "same", 24, "<user>")
    padded = with_vocabulary(tmp_path / "padded", 21, "<user>", "<stop>")
    other = with_vocabulary(tmp_path / "other", 24, first="b")
    swapped = with_vocabulary(tmp_path / "swapped", 24, "<end>", "<user>")
    assert [common_width(folder, target) for folder in (same, padded)] == [24, 24]
    with pytest.raises(InvalidField, match=r"they differ in token '<end>', id 20$"):
        common_width(swapped, target)
    with pytest.raises(InvalidField, match=r"tokenizer is not the target's: they differ in token 'a', id 0$"):
        build_head(DrafterSettings(kind="lm", path=str(other), target=str(target)))
    assert tokenizer_hash(other) != tokenizer_hash(target)
    (padded / "tokenizer.json").unlink()
    assert tokenizer_hash(padded) == b""
    with pytest.raises(InvalidField, match="vocab_size is 21, the target's is 24"), capture_logs() as logs:
        build_head(DrafterSettings(kind="lm", path=str(padded), target=str(target)))
    assert [(line["event"][:17], line["folder"]) for line in logs] == [("no tokenizer.json", str(padded))]


def test_a_draft_model_padded_otherwise_drafts_for_the_target(tmp_path: Path) -> None:
    small = make_target(tmp_path / "small", 260, max_len=256)
    large = make_target(tmp_path / "large", 300, max_len=512)
    settings = DrafterSettings(kind="lm", path=str(small), target=str(large), kv_tokens=2048, threads=1)
    with capture_logs() as logs:
        head = served_head(settings)
    assert [(line["tokens"], line["target"]) for line in logs if "longer texts" in line["event"]] == [(256, 512)]
    assert isinstance(head, LanguageModelHead)
    assert head.description.vocab_size == 300
    assert head.description.tokenizer_hash == tokenizer_hash(large)
    opened(head, 0, [1, 299, 3], want_q_rows=True)  # 299: a row that no token has
    (growth,) = drafts(head, [DraftJob(0, 298, 3, 4, SAMPLED, want_q_rows=True)])
    assert growth.q_rows is not None
    assert growth.q_rows.shape == (4, 300)
    assert not growth.q_rows[:, 260:].any()
    head.advance(0, Advance([298, 299]))
    assert len(draft(head, DraftJob(0, 7, 5, 9, GREEDY))) == 9


# --- the contract: every kind keeps it, and a head that breaks it is found ---


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, and heads of random weights by kind."""
    folder = tmp_path_factory.mktemp("models")
    add_mtp(make_target(folder / "target", HEADS_VOCAB, layers=8, tokenizer=False))
    make_target(folder / "lm", HEADS_VOCAB, seed=1, tokenizer=False)
    for kind in TRAINED_KINDS:
        save_random(folder / kind, kind)
    return folder


class TestEveryKind(HeadContract):
    """The contract, kept by the kinds of this package."""

    vocab_size = HEADS_VOCAB

    @pytest.fixture(autouse=True, params=HEAD_KINDS)
    def of_a_kind(self, request: pytest.FixtureRequest, models: Path) -> None:
        path = str(models / request.param) if (models / request.param).exists() else ""
        target = str(models / "target")
        small = {"top_k": 3, "depth": 3, "kv_tokens": 1024, "threads": 1}
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
        vocab_size = HEADS_VOCAB

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
