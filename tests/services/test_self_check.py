"""The check at load: it passes every sound model in every dtype, and finds planted faults of attention; and the bits
that an invariant engine promises.

COPPICE_CHECKED_TARGET=FOLDER tries the same faults on a real model, COPPICE_CHECKED_TEXTS (20) texts each.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from coppice.engine import rows as rows_module
from coppice.engine import self_check as check_module
from coppice.engine.attention import Layer, Sdpa, UnsupportedModel
from coppice.engine.engine import DTYPES, Engine
from coppice.engine.loading import load_engine
from coppice.engine.ordered import Ordered
from coppice.engine.rows import PackedBatch, Piece, ancestors, pack
from coppice.engine.self_check import check_invariant, roundings, self_check
from coppice.testing.tiny_models import save_tiny
from tests.services.test_engine import CONFIGS, VOCAB, Tree, model_of

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]
TREE_ROWS = 12


def attending(change: Callable[..., Tensor]) -> Fault:
    """change: (attend, layer, query, key, value) -> what the layer attends to."""

    def plant(patch: Patch) -> None:
        for kind in (Sdpa, Ordered):
            real = kind.attend
            patch.setattr(kind, "attend", lambda self, *inputs, real=real: change(partial(real, self), *inputs))

    return plant


def of_layers(change: Callable[[Layer], Layer]) -> Fault:
    return attending(lambda attend, layer, *inputs: attend(change(layer), *inputs))


def scores(**changed: Any) -> Fault:
    return of_layers(lambda layer: layer._replace(**changed))


MIXED_ROWS = attending(lambda attend, *inputs: attend(*inputs).roll(1, 1))
SHIFTED_KEYS = attending(lambda attend, layer, q, k, v: attend(layer, q, k.roll(1, 2), v.roll(1, 2)))


def sees(visible: Callable[[int], Any]) -> Fault:
    return lambda patch: patch.setattr(rows_module, "ancestors", lambda parents: visible(len(parents)) > 0)


def without_the_root(patch: Patch) -> None:
    def seen(parents: Sequence[int]) -> Any:
        visible = ancestors(parents).copy()
        if len(parents) == TREE_ROWS:
            visible[1:, 0] = False
        return visible

    patch.setattr(rows_module, "ancestors", seen)


def positions(tree: Callable[[int, int], int], prompt: int = 0) -> Fault:
    """tree: (row, depth) -> depth. prompt: added to the positions of a prompt's further chunks."""

    def packed(pieces: Sequence[Piece], layers: tuple[int, ...] = ()) -> PackedBatch:
        def moved(piece: Piece) -> Piece:
            if len(piece.tokens) == TREE_ROWS:
                return dataclasses.replace(piece, depths=[tree(*at) for at in enumerate(piece.depths)])
            further = prompt if piece.prefix_len else 0
            return dataclasses.replace(piece, depths=[depth + further for depth in piece.depths])

        return pack([moved(piece) for piece in pieces], layers)

    return lambda patch: patch.setattr(check_module, "pack", packed)


def windows(seen: Callable[[int], int | None]) -> Fault:
    """seen: a layer's window -> the one that it is given."""
    return of_layers(lambda layer: layer._replace(window=layer.window and seen(layer.window)))


FAULTS: dict[str, Fault] = {
    "no scale": scores(scaling=1.0),
    "every row of a tree sees all": sees(lambda rows: np.ones((rows, rows))),
    "a row sees all before it": sees(lambda rows: np.tri(rows)),
    "a row sees itself alone": sees(np.eye),
    "no row sees the root": without_the_root,
    "positions by row": positions(lambda row, _: row),
    "positions of a tree one too high": positions(lambda _, depth: depth + 1),
    "positions of a tree all alike": positions(lambda *_: 0),
    "rows mixed up": MIXED_ROWS,
    "keys shifted": SHIFTED_KEYS,
}
UNSEEN = {"positions of a further chunk one too high": positions(lambda _, depth: depth, prompt=1)}
"""which a model without rotation may not notice"""
OF_WINDOWS = {"window ignored": windows(lambda _: None), "window halved": windows(lambda window: window // 2)}
OF_FORMS = {"gemma2": {"no softcap": scores(softcap=None)}, "gpt-oss": {"no sinks": scores(sinks=None)}}


def faults_of(engine: Engine, name: str = "") -> dict[str, Fault]:
    return FAULTS | UNSEEN | (OF_WINDOWS if engine.layout.windows - {None} else {}) | OF_FORMS.get(name, {})


def refused(engine: Engine, seed: int = 0) -> bool:
    """Whether one text is enough to find a fault."""
    most, share = (bounds[engine.model.dtype] for bounds in (check_module.ROUNDINGS, check_module.ROWS_OFF))
    return bool((~(roundings(engine, seed) <= most)).float().mean() > share)


def engine_in(name: str, dtype: str, **settings: Any) -> Engine:
    return Engine(copy.deepcopy(model_of(name)).to(DTYPES[dtype]), kv_tokens=4096, **settings)


@pytest.mark.parametrize(("number", "name"), [*enumerate(CONFIGS)])
def test_it_passes_and_leaves_nothing_behind(number: int, name: str) -> None:
    for dtype in ("float32", ("bfloat16", "float16")[number % 2]):
        engine = engine_in(name, dtype)
        self_check(engine)
        assert (engine.pool.used_tokens, engine.pool.free_tokens) == (0, engine.pool.spare)
        last_step(engine, "a", [5] * 5, 5, random.Random(0))  # and the model attends through the pool again
    assert roundings(engine_in(name, "float32"), 0).median() < 1.5


@pytest.mark.parametrize(
    ("name", "dtype", "invariant"),
    [
        ("llama", "bfloat16", True),
        ("mistral-window", "bfloat16", False),
        ("gemma2", "float16", False),
        ("gemma2", "float32", True),
        ("gpt-oss", "bfloat16", False),
    ],
)
def test_it_finds_planted_faults(name: str, dtype: str, invariant: bool, monkeypatch: Patch) -> None:
    engine = engine_in(name, dtype, invariant=invariant)
    assert not refused(engine)
    for fault, plant in faults_of(engine, name).items():
        with monkeypatch.context() as patch:
            plant(patch)
            assert refused(engine), fault
    assert engine.pool.free_tokens == engine.pool.spare


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_faulty_engine_is_refused_in_figures(dtype: str, monkeypatch: Patch) -> None:
    engine = engine_in("llama", dtype)
    MIXED_ROWS(monkeypatch)
    with pytest.raises(UnsupportedModel, match=r"24 of 24 rows differ from eager attention by more than .* the median"):
        self_check(engine)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_wrong_in_a_tree_alone_is_not_invariant(dtype: str, monkeypatch: Patch) -> None:
    engine = engine_in("mistral-window", dtype, invariant=True)
    assert check_invariant(engine)
    for fault in FAULTS.keys() - {"no scale"} | UNSEEN.keys():
        with monkeypatch.context() as patch:
            (FAULTS | UNSEEN)[fault](patch)
            with pytest.raises(UnsupportedModel, match="something else of the same text"):
                check_invariant(engine)


# Invariant engines: the same bits of a text, however it came in and whatever is beside it.


def last_step(engine: Engine, name: str, text: list[int], room: int, choose: random.Random) -> Piece:
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
        step = last_step(engine, name, [*prefix, 0], room, choose)
        pieces.append(tree.piece(engine, step.table, len(prefix)))
        texts += [prefix + tree.text(row) for row in range(len(tree.tokens))]
    output = engine.forward(pack(pieces, (1,)))
    assert output.features is not None
    for piece in pieces:
        engine.pool.free(piece.table)
    return list(zip(texts, output.logits.clone(), output.features.clone(), strict=True))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*product(["gemma2"], DTYPES), ("llama", "float32"), ("qwen3", "bfloat16"), ("mistral-window", "float16")],
)
def test_a_drafted_row_has_the_bits_of_the_committed_one(name: str, dtype: str) -> None:
    engine = engine_in(name, dtype, invariant=True)
    for seed in range(3):
        rows = drafted(engine, seed)
        choose = random.Random(-seed)
        for text, logits, features in choose.sample(rows, min(8, len(rows))):
            hole = engine.pool.allocate("hole", choose.randrange(1, 99))
            beside = last_step(engine, "beside", text[: choose.randrange(1, len(text) + 1)], len(text), choose)
            engine.pool.free(hole)
            step = last_step(engine, "committed", text, len(text), choose)
            output = engine.forward(pack([beside, step], (1,)))
            assert output.features is not None
            assert torch.equal(output.logits[1], logits)
            assert torch.equal(output.features[1], features)
            for piece in (step, beside):
                engine.pool.free(piece.table)


def test_two_loads_name_the_same_bits_and_others_promise_none(tmp_path: Path) -> None:
    model_of("llama").save_pretrained(tmp_path)
    first, second = (load_engine(tmp_path, dtype="bfloat16", kv_tokens=1024, invariant=True) for _ in range(2))
    assert first.bits_hash == second.bits_hash
    assert len(first.bits_hash) == 32
    assert load_engine(tmp_path, dtype="bfloat16", kv_tokens=1024).bits_hash == b""


def test_what_depends_on_other_rows_is_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    engine = engine_in("llama", "float32", invariant=True)
    act = engine.model.model.layers[1].mlp.act_fn
    with monkeypatch.context() as patch:
        patch.setattr(type(act), "__call__", lambda _, states: F.silu(states) * (1 + 1e-6 * states.shape[1]))
        with pytest.raises(UnsupportedModel, match="something else of the same text"):
            check_invariant(engine)
    check_invariant(engine)
    with pytest.raises(UnsupportedModel, match="something else of the same text"):  # it sums in any order
        check_invariant(engine_in("llama", "float32"))
    save_tiny("mixtral", "", tmp_path)
    with pytest.raises(UnsupportedModel, match="experts"):
        load_engine(tmp_path, kv_tokens=1024, invariant=True)


@pytest.mark.timeout(0)
@pytest.mark.skipif("COPPICE_CHECKED_TARGET" not in os.environ, reason="names no target")
@pytest.mark.parametrize("dtype", DTYPES)
def test_planted_faults_of_a_real_target(dtype: str, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(os.environ["COPPICE_CHECKED_TARGET"], dtype=DTYPES[dtype])
    engine, texts = Engine(model, kv_tokens=4096), int(os.environ.get("COPPICE_CHECKED_TEXTS", "20"))
    counts = Counter[str]()
    for seed in range(texts):
        for fault, plant in ({"sound": lambda _: None} | faults_of(engine)).items():
            with monkeypatch.context() as patch:
                plant(patch)
                counts[fault] += refused(engine, seed)
        with capsys.disabled():
            print(f"\n{dtype}: {seed + 1} texts, refused", dict(counts), flush=True)
    assert counts.pop("sound") == 0
    assert min(counts.values()) == texts
