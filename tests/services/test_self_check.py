"""The check at load: it passes every sound model in every dtype, and finds planted faults of attention.

COPPICE_CHECKED_TARGET=FOLDER tries the same faults on a real model, COPPICE_CHECKED_TEXTS (20) texts each.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from transformers import AutoModelForCausalLM

from coppice.engine import rows as rows_module
from coppice.engine import self_check as check_module
from coppice.engine.attention import Layer, Sdpa
from coppice.engine.engine import DTYPES, Engine
from coppice.engine.ordered import Ordered
from coppice.engine.rows import PackedBatch, Piece, ancestors, pack
from coppice.engine.self_check import NotInvariant, SelfCheckError, check_invariant, roundings, self_check
from tests.services.test_engine import CONFIGS, engine_of, model_of, prefill, some_ids

Patch = pytest.MonkeyPatch
TREE_ROWS = 12


def attending(patch: Patch, change: Callable[..., Tensor]) -> None:
    """change: (attend, layer, query, key, value) -> what the layer attends to."""

    for kind in (Sdpa, Ordered):
        real = kind.attend
        patch.setattr(kind, "attend", lambda self, *inputs, real=real: change(partial(real, self), *inputs))


def of_layers(change: Callable[[Layer], Layer]) -> Callable[[Patch], None]:
    return lambda patch: attending(patch, lambda attend, layer, *inputs: attend(change(layer), *inputs))


def scores(**changed: Any) -> Callable[[Patch], None]:
    return of_layers(lambda layer: layer._replace(**changed))


def mixed_rows(patch: Patch) -> None:
    attending(patch, lambda attend, *inputs: attend(*inputs).roll(1, 1))


def shifted_keys(patch: Patch) -> None:
    attending(patch, lambda attend, layer, q, k, v: attend(layer, q, k.roll(1, 2), v.roll(1, 2)))


def sees(visible: Callable[[int], Any]) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(rows_module, "ancestors", lambda parents: visible(len(parents)) > 0)


def without_the_root(patch: Patch) -> None:
    def seen(parents: Sequence[int]) -> Any:
        visible = ancestors(parents).copy()
        if len(parents) == TREE_ROWS:
            visible[1:, 0] = False
        return visible

    patch.setattr(rows_module, "ancestors", seen)


def positions(tree: Callable[[int, int], int], prompt: int = 0) -> Callable[[Patch], None]:
    """tree: (row, depth) -> depth. prompt: added to the positions of a prompt's further chunks."""

    def packed(pieces: Sequence[Piece], layers: tuple[int, ...] = ()) -> PackedBatch:
        def moved(piece: Piece) -> Piece:
            if len(piece.tokens) == TREE_ROWS:
                return dataclasses.replace(piece, depths=[tree(*at) for at in enumerate(piece.depths)])
            further = prompt if piece.prefix_len else 0
            return dataclasses.replace(piece, depths=[depth + further for depth in piece.depths])

        return pack([moved(piece) for piece in pieces], layers)

    return lambda patch: patch.setattr(check_module, "pack", packed)


def windows(seen: Callable[[int], int | None]) -> Callable[[Patch], None]:
    """seen: a layer's window -> the one that it is given."""
    return of_layers(lambda layer: layer._replace(window=layer.window and seen(layer.window)))


FAULTS: dict[str, Callable[[Patch], None]] = {
    "no scale": scores(scaling=1.0),
    "every row of a tree sees all": sees(lambda rows: np.ones((rows, rows))),
    "a row sees all before it": sees(lambda rows: np.tri(rows)),
    "a row sees itself alone": sees(np.eye),
    "no row sees the root": without_the_root,
    "positions by row": positions(lambda row, _: row),
    "positions of a tree one too high": positions(lambda _, depth: depth + 1),
    "positions of a tree all alike": positions(lambda *_: 0),
    "rows mixed up": mixed_rows,
    "keys shifted": shifted_keys,
}
UNSEEN = {"positions of a further chunk one too high": positions(lambda _, depth: depth, prompt=1)}
"""which a model without rotation may not notice"""
OF_WINDOWS = {"window ignored": windows(lambda _: None), "window halved": windows(lambda window: window // 2)}
OF_FORMS = {"gemma2": {"no softcap": scores(softcap=None)}, "gpt-oss": {"no sinks": scores(sinks=None)}}


def faults_of(engine: Engine, name: str = "") -> dict[str, Callable[[Patch], None]]:
    return FAULTS | UNSEEN | (OF_WINDOWS if engine.layout.windows - {None} else {}) | OF_FORMS.get(name, {})


def refused(engine: Engine, seed: int = 0) -> bool:
    """Whether one text is enough to find a fault."""
    most, share = (bounds[engine.model.dtype] for bounds in (check_module.ROUNDINGS, check_module.ROWS_OFF))
    return bool((~(roundings(engine, seed) <= most)).float().mean() > share)


def engine_in(name: str, dtype: str, **settings: Any) -> Engine:
    return Engine(copy.deepcopy(model_of(name)).to(DTYPES[dtype]), kv_tokens=512, **settings)


@pytest.mark.parametrize("name", CONFIGS)
def test_it_passes_and_leaves_nothing_behind(name: str) -> None:
    engine = engine_of(name)
    self_check(engine)
    assert roundings(engine, 0).median() < 1.5
    assert (engine.pool.used_tokens, engine.pool.free_tokens) == (0, engine.pool.spare)
    table, _ = prefill(engine, "a", some_ids(5))  # and the model attends through the pool again
    assert table.num_tokens == 5
    for dtype in ("bfloat16", "float16"):
        self_check(engine_in(name, dtype))


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
    mixed_rows(monkeypatch)
    with pytest.raises(SelfCheckError, match=r"24 of 24 rows differ from eager attention by more than .* the median"):
        self_check(engine)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_wrong_in_a_tree_alone_is_not_invariant(dtype: str, monkeypatch: Patch) -> None:
    engine = engine_in("mistral-window", dtype, invariant=True)
    assert check_invariant(engine)
    for fault in FAULTS.keys() - {"no scale"} | UNSEEN.keys():
        with monkeypatch.context() as patch:
            (FAULTS | UNSEEN)[fault](patch)
            with pytest.raises(NotInvariant):
                check_invariant(engine)


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
