"""An invariant engine says the same bits of a text, however it came in and whatever is beside it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from coppice.engine.engine import Engine
from coppice.engine.loading import load_engine
from coppice.engine.ordered import RowsLinear, by_rows
from coppice.engine.rows import Piece, pack
from coppice.engine.self_check import NotInvariant, check_invariant
from coppice.testing.tiny_models import VOCAB, save_tiny
from tests.services.test_engine import Tree

KINDS = {"llama": "", "qwen3": "", "mistral": "window", "gemma2": "window"}
DTYPES = ("float32", "bfloat16", "float16")


def engine_of(kind: str, folder: Path, dtype: str, *, invariant: bool = True) -> Engine:
    save_tiny(kind, KINDS[kind], folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    return Engine(model, kv_tokens=4096, invariant=invariant)


def prefill(engine: Engine, name: str, text: list[int], room: int, choose: random.Random) -> Piece:
    """The session's last token as a step, behind the others in chunks of any size."""
    table, at = engine.pool.allocate(name, room), 0
    while at < len(text) - 1:
        chunk = text[at : at + choose.choice((1, 3, 50, 200))][: len(text) - 1 - at]
        engine.forward(pack([Piece.chain(table, at, chunk)]))
        at += len(chunk)
    return Piece.chain(table, at, text[at:], [0])


def drafted(engine: Engine, seed: int) -> list[tuple[list[int], Tensor, Tensor]]:
    """Texts that end with a row of a tree, and the logits and features of that row, verified beside other trees."""
    choose, pieces, texts = random.Random(seed), [], []
    for session in range(choose.choice((1, 2, 4))):
        prefix = [choose.randrange(VOCAB) for _ in range(choose.choice((1, 30, 60, 120, 127, 128)))]
        tree = Tree(choose.choice((1, 2, 12, 40, 100)), seed)
        name, room = f"drafted-{session}", len(prefix) + len(tree.tokens)
        step = prefill(engine, name, [*prefix, 0], room, choose)
        pieces.append(tree.piece(engine, step.table, len(prefix)))
        texts += [prefix + tree.text(row) for row in range(len(tree.tokens))]
    output = engine.forward(pack(pieces, (1,)))
    assert output.features is not None
    for piece in pieces:
        engine.pool.free(piece.table)
    return list(zip(texts, output.logits.clone(), output.features.clone(), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_drafted_row_has_the_bits_of_the_committed_one(kind: str, dtype: str, tmp_path: Path) -> None:
    engine = engine_of(kind, tmp_path, dtype)
    for seed in range(3):
        rows = drafted(engine, seed)
        choose = random.Random(-seed)
        for text, logits, features in choose.sample(rows, min(8, len(rows))):
            hole = engine.pool.allocate("hole", choose.randrange(1, 99))
            beside = prefill(engine, "beside", text[: choose.randrange(1, len(text) + 1)], len(text), choose)
            engine.pool.free(hole)
            step = prefill(engine, "committed", text, len(text), choose)
            output = engine.forward(pack([beside, step], (1,)))
            assert output.features is not None
            assert torch.equal(output.logits[1], logits)
            assert torch.equal(output.features[1], features)
            for piece in (step, beside):
                engine.pool.free(piece.table)


def test_two_loads_name_the_same_bits_and_others_promise_none(tmp_path: Path) -> None:
    save_tiny("llama", "", tmp_path)
    first, second = (load_engine(tmp_path, dtype="bfloat16", kv_tokens=1024, invariant=True) for _ in range(2))
    assert first.bits_hash == second.bits_hash
    assert len(first.bits_hash) == 32
    assert load_engine(tmp_path, dtype="bfloat16", kv_tokens=1024).bits_hash == b""


def test_what_depends_on_other_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("llama", tmp_path / "llama", "float32")
    act = engine.model.model.layers[1].mlp.act_fn
    with monkeypatch.context() as patch:
        patch.setattr(type(act), "__call__", lambda _, states: F.silu(states) * (1 + 1e-6 * states.shape[1]))
        with pytest.raises(NotInvariant, match="something else of the same text"):
            check_invariant(engine)
    check_invariant(engine)
    with pytest.raises(NotInvariant):  # it sums in any order
        check_invariant(engine_of("llama", tmp_path / "llama", "float32", invariant=False))
    save_tiny("mixtral", "", tmp_path / "mixtral")
    with pytest.raises(NotInvariant, match="experts"):
        load_engine(tmp_path / "mixtral", kv_tokens=1024, invariant=True)


@pytest.mark.parametrize("width", [48, 64, 768])
def test_functions_of_numbers_know_no_neighbours(width: int) -> None:
    states = torch.randn(1, 700, width)
    whole = by_rows(F.silu, states)
    torch.testing.assert_close(whole, F.silu(states))
    for first, count in ((0, 1), (3, 5), (7, 43), (100, 599)):
        assert torch.equal(
            by_rows(F.silu, states[:, first : first + count].contiguous()), whole[:, first : first + count]
        )


def test_products_of_matrices_that_are_not_packed_know_no_neighbours() -> None:
    layer = nn.Linear(40, 24)
    expected = layer(states := torch.randn(2, 25, 40))
    layer.__class__ = RowsLinear
    torch.testing.assert_close(layer(states), expected)
    for rows in (0, 1, 7, 16, 25):
        assert torch.equal(layer(states[:, :rows]), layer(states)[:, :rows])
