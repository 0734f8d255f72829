"""Tree attention: its rule, the CPU's attention and the CUDA kernel agree, and a row's bits are its own."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from coppice.engine.attention import Layer, sdpa
from coppice.engine.kv_cache import KVPool, KVShape
from coppice.engine.rows import Piece, ancestors, pack
from coppice.engine.steps import Bucket, StepInputs
from tests.kernels import compiled_for_hopper, interpreter, tree_attention
from tests.ragged_batches import Inputs, Shape, attend, filled_pool, random_batch, random_tree, tree_piece

__all__ = ["interpreter"]  # a fixture

Sizes = Sequence[tuple[int, int, int]]  # prefix, rows and earlier rows of each session


def interpreted(*arguments: Any) -> Tensor:
    """The CUDA kernel under Triton's interpreter, which the process chose before it imported Triton."""
    from coppice.engine.kernels import tree_attention as kernel

    return kernel(*arguments)


def far_from_sdpa(function: Callable[..., Tensor], shape: Shape, sizes: Sizes, seed: int = 0) -> float:
    """The largest difference of an implementation from attention with masks over gathered keys."""
    torch.manual_seed(seed)
    pool = filled_pool(shape, 6000)
    batch = random_batch(pool, sizes, random.Random(seed))
    layer = Inputs.random(shape, len(batch.tokens))
    rows = (part.transpose(0, 1)[None] for part in (layer.q, layer.k, layer.v))
    kind = Layer(0, shape.window, None, shape.softcap, layer.sinks)
    want = sdpa(batch.tails, pool).attend(kind, *rows)[0]
    for part in pool.layers[0]:  # the rows' own, which the implementation has to write
        part[torch.from_numpy(np.concatenate([new_slots(tail) for tail in batch.tails]))] = 7.0
    return float((attend(function, batch, layer, pool, shape) - want).abs().max())


def new_slots(tail: Any) -> Any:
    """Where a session's rows write."""
    return tail.table.slots(np.arange(tail.length - len(tail.visible), tail.length))


def own_bits(function: Callable[..., Tensor], shape: Shape, prefix: int, rows: int, nodes: Sequence[int]) -> bool:
    """Whether rows drafted in a tree beside other sessions are, bit for bit, plain steps behind their ancestors."""
    torch.manual_seed(0)
    rng = random.Random(prefix)
    pool = filled_pool(shape, 3000)
    tables = [pool.allocate(name, size) for name, size in (("a", 150), ("b", prefix // 2), ("c", 40))]
    pool.extend(tables[1], prefix + rows)
    parents = random_tree(rows, rng)
    others = Piece.chain(tables[0], 149, [1]), tree_piece(tables[2], 20, random_tree(9, rng))
    batch = pack([others[0], tree_piece(tables[1], prefix, parents), others[1]])
    layer = Inputs.random(shape, len(batch.tokens))
    drafted = attend(function, batch, layer, pool, shape)[1:]
    sees = ancestors(parents)
    same = []
    for node in nodes:
        (path,) = np.nonzero(sees[node])
        later, table = copy.deepcopy((pool, tables[1]))
        later.compact([(table, prefix, path[:-1].tolist())])
        later.extend(table, prefix + len(path))
        row = slice(1 + node, 2 + node)
        step = Inputs(layer.q[row], layer.k[row], layer.v[row], layer.sinks)
        plain = attend(function, pack([Piece.chain(table, prefix + len(path) - 1, [1])]), step, later, shape)
        same.append(torch.equal(plain[0], drafted[node]))
    return all(same)


SHAPES = st.builds(
    Shape,
    heads=st.sampled_from([2, 6]),
    kv=st.builds(KVShape, st.just(2), st.sampled_from([8, 12]), st.sampled_from([8, 5])),
    window=st.sampled_from([None, 1, 30, 200]),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
)
SIZES = st.lists(
    st.tuples(st.integers(1, 330), st.one_of(st.integers(1, 8), st.sampled_from([61, 257])), st.integers(0, 6)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(shape=SHAPES, sizes=SIZES, seed=st.integers(0, 9))
def test_rows_attend_to_what_the_plans_let_them_see(shape: Shape, sizes: Sizes, seed: int) -> None:
    assert far_from_sdpa(tree_attention, shape, sizes, seed) < 1e-5


KERNEL_CASES = {
    "plain steps": (Shape(), [(300, 1, 0), (1, 1, 0), (64, 1, 0)]),
    "a tree, earlier rows": (Shape(), [(60, 12, 5)]),
    "a window": (Shape(window=70), [(130, 4, 3), (30, 3, 0)]),
    "a short window": (Shape(window=2), [(127, 6, 0)]),
    "a softcap and sinks": (Shape(softcap=2.0, sinks=True), [(61, 5, 0), (9, 3, 2)]),
    "odd heads": (Shape(6, KVShape(2, 20, 12)), [(70, 5, 0)]),
    "more rows than a tile": (Shape(8, KVShape(1, 16, 16)), [(3, 1, 0), (40, 10, 0)]),
    "a tile in cuts": (Shape(8, KVShape(1, 68, 12)), [(70, 6, 0)]),
    "a split's border": (Shape(2, KVShape(1, 16, 16)), [(250, 9, 2)]),
}


@pytest.mark.parametrize("case", KERNEL_CASES)
def test_the_kernel_computes_what_the_plans_do(case: str, interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(far_from_sdpa, interpreted, *KERNEL_CASES[case]).result() < 1e-5


def rotated_alike(dtype: torch.dtype, dim: int) -> bool:
    """Whether rotations of parts of one product, as joined layers answer, have the stock formula's bits."""
    from coppice.engine import kernels

    query, key, _ = torch.randn(1, 5, 8 * dim, dtype=dtype).split((4 * dim, 2 * dim, 2 * dim), -1)
    query, key = (states.view(1, 5, -1, dim).transpose(1, 2) for states in (query, key))
    cos, sin = torch.randn(2, 1, 5, dim, dtype=dtype)
    ours, stock = kernels.rotate(query, key, cos, sin), apply_rotary_pos_emb(query, key, cos, sin)
    return all(map(torch.equal, ours, stock)) and all(states.transpose(1, 2).is_contiguous() for states in ours)


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 8), (torch.float32, 96), (torch.float16, 96)])
def test_the_kernel_rotates_as_models_do(dtype: torch.dtype, dim: int, interpreter: ProcessPoolExecutor) -> None:
    """In 16 bits by float16, since the interpreter cuts bfloat16 off."""
    assert interpreter.submit(rotated_alike, dtype, dim).result()


@pytest.mark.parametrize(
    ("prefix", "window", "dtype"), [(125, 66, torch.float32), (250, None, torch.bfloat16), (60, None, torch.bfloat16)]
)
def test_a_drafted_row_has_the_bits_of_a_plain_step(
    prefix: int, window: int | None, dtype: torch.dtype, interpreter: ProcessPoolExecutor
) -> None:
    shape = Shape(2, KVShape(1, 16, 16), dtype=dtype, window=window)
    assert interpreter.submit(own_bits, interpreted, shape, prefix, 18, [0, 7, 12, 17]).result()


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(64, torch.bfloat16), (128, torch.bfloat16), (64, torch.float32), (128, torch.float32)],
    ids=str,
)
def test_the_kernel_compiles_for_hopper_without_spills(dim: int, dtype: torch.dtype, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from coppice.engine.kernels import shape_of, sum_parts

    q, stored = (torch.empty(1, heads, dim, dtype=dtype) for heads in (32, 8))
    inputs = StepInputs(Bucket(1, 1, 16, 1024, 1), 4, KVPool(layers=[KVShape(1, 1, 1)], tokens=32, block_size=32))
    constants = shape_of(q, stored, inputs) | {"CAPPED": False}
    options = {name: constants.pop(name) for name in ("num_warps",)}
    types = dict.fromkeys(("q", "keys", "values"), {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype])
    types |= dict.fromkeys(("sums", "tops", "weights"), "*fp32")
    types |= dict.fromkeys(("session", "paged", "length", "tail", "table", "tiles"), "*i32")
    types |= {"q_row": "i32", "q_head": "i32", "window": "i32", "scale": "fp32", "softcap": "fp32"}
    aligned = [name for name, kind in types.items() if kind[0] == "*" or name in ("q_row", "q_head")]
    compiled, usage, listing = compiled_for_hopper(sum_parts, types, constants, aligned, options, tmp_path)
    assert (usage["STACK"], usage["LOCAL"]) == (0, 0)
    assert compiled.metadata.shared <= 227 * 1024 // 2  # two programs on a processor
    if dtype == torch.bfloat16:
        assert "HGMMA" in listing
        assert "LDGSTS" in listing  # keys are under way while others are used
