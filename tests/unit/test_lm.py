"""The `lm` head on tiny random models: what it drafts is the model's own opinion, alone or together, early or late."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
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

from coppice.config.sections import DrafterSettings
from coppice.engine.engine import ForwardOutput
from coppice.engine.kv_cache import KVPool
from coppice.engine.rows import PackedBatch
from coppice.errors import InvalidField, Overloaded
from coppice.heads.base import DraftJob, Growth, build_head, served_head
from coppice.heads.lm import PREFILL_ROWS, LanguageModelHead, common_width, tokenizer_hash
from coppice.speculation.sampling import SamplingParams
from coppice.speculation.tree import DraftTree
from coppice.wire.drafter import Advance, OpenDraft
from tests.reference import check_pool
from tests.tiny import make_target
from tests.unit.test_feature_heads import Slow, Tokens, assert_same, drafted

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
@pytest.mark.parametrize(("sampling", "coupled"), [(GREEDY, True), (SAMPLED, True), (SAMPLED, False), (WARM, True)])
def test_a_tree_is_the_one_plain_forwards_of_its_paths_grow(
    head: LanguageModelHead, model: Any, sampling: SamplingParams, coupled: bool, budget: int
) -> None:
    ids = some_ids(17, budget)
    job = DraftJob(opened(head, 1, ids), 5, len(ids), budget, sampling, coupled)
    assert len(draft(head, job)) == min(budget, 4 + 4 * 4 * 4)
    is_the_models(head, model, ids, job, 4, 5)


def test_a_window_reaches_over_the_trees_own_levels(tmp_path: Path) -> None:
    make_target(tmp_path, VOCAB, max_len=64, window=3, tokenizer=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    head = LanguageModelHead(DrafterSettings(kind="lm", path=str(tmp_path), kv_tokens=512, top_k=3, depth=6))
    ids = some_ids(11)
    job = DraftJob(opened(head, 0, ids), 5, len(ids), 40, GREEDY)
    assert draft(head, job).depths().max() > 3
    is_the_models(head, model, ids, job, 3, 6)


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
    opened(head, 0, some_ids(14))
    opened(head, 1, some_ids(15))
    opened(head, 2, some_ids(300))
    jobs = [DraftJob(key, 3, length, 9, GREEDY) for key, length in ((0, 14), (1, 15), (2, 300))]
    assert [len(growth.nodes) for growth in drafts(head, jobs)] == [9, 0, 0]
    head.advance(0, Advance([3, 4]))
    assert len(draft(head, DraftJob(0, 3, 16, 9, GREEDY))) == 0
    for key in range(3):
        head.close(key)
    is_empty(head.engine.pool)


@pytest.mark.parametrize("width", [50, 9999])
def test_wider_heads_draft_the_targets_ids(
    width: int, heads: Any, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coppice.heads.lm.common_width", lambda *_: width)
    head = heads(target=str(target), name=f"for {width}")
    assert head.description.vocab_size == width
    opened(head, 0, [1, 2, 3])
    tree = draft(head, DraftJob(0, 4, 3, 64, GREEDY))
    assert len(tree) > 0
    assert tree.tokens.max() < min(width, VOCAB)
    head.close(0)


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


def with_vocabulary(folder: Path, width: int, tokens: int, first: str = "a") -> Path:
    """A draft model's folder of which only configuration and tokenizer count: ids 0.. are first, first+1, ..."""
    folder.mkdir()
    MistralConfig(vocab_size=width).save_pretrained(folder)
    vocab = {chr(ord(first) + at): at for at in range(tokens)}
    Codec(BPE(vocab=vocab, merges=[])).save(str(folder / "tokenizer.json"))
    return folder


def with_marks(folder: Path, *marks: str) -> None:
    """Add tokens behind the others to a folder's tokenizer."""
    codec = Codec.from_file(str(folder / "tokenizer.json"))
    codec.add_special_tokens(list(marks))
    codec.save(str(folder / "tokenizer.json"))


def test_a_draft_model_of_another_vocabulary_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    target = with_vocabulary(tmp_path / "target", 24, 20)
    same = with_vocabulary(tmp_path / "same", 24, 20)
    padded = with_vocabulary(tmp_path / "padded", 21, 20)
    other = with_vocabulary(tmp_path / "other", 24, 20, "b")
    with_marks(target, "<user>", "<end>")
    with_marks(same, "<user>")
    with_marks(padded, "<user>", "<stop>")
    swapped = with_vocabulary(tmp_path / "swapped", 24, 20)
    with_marks(swapped, "<end>", "<user>")
    assert [common_width(folder, target) for folder in (same, padded)] == [24, 24]
    with pytest.raises(InvalidField, match=r"they differ in token '<end>', id 20$"):
        common_width(swapped, target)
    with pytest.raises(InvalidField, match=r"tokenizer is not the target's: they differ in token 'a', id 0$"):
        build_head(DrafterSettings(kind="lm", path=str(other), target=str(target)))
    assert tokenizer_hash(other) != tokenizer_hash(target)
    (same / "config.json").write_text("{}")
    with pytest.raises(InvalidField, match=r"drafter.path: .*same holds no model \(config.json has no model_type"):
        build_head(DrafterSettings(kind="lm", path=str(same), target=str(target)))
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
