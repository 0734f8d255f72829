"""Kernels under Triton's interpreter and compiled for a GPU: they compute what their rules in torch and the CPU do.

Of tree attention a row's bits are its own; rows drawn at once are drawn as each alone.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import random
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from coppice.engine.attention import Layer, Sdpa
from coppice.engine.kv_cache import KVPool, KVShape
from coppice.engine.rows import Piece, RowTable, ancestors, most_splits, pack, tail_blocks
from coppice.engine.steps import Bucket, StepInputs
from coppice.speculation.sampling import SamplingParams, decode_row, draw
from services.verifier import device as devices
from services.verifier.device import COLUMNS, draw_rows, tabulate
from tests.kernels import (
    Shape,
    attend,
    filled_inputs,
    filled_pool,
    keyed_argmax,
    random_batch,
    random_rows,
    random_tree,
    tree_attention,
    tree_piece,
)
from tests.reference import EFFORT


def products_in_float64() -> None:
    """Have numpy, whose products the interpreter takes for a device's, sum every row alike wherever it stands.

    In float32 a BLAS may sum the last rows of a matrix in another order than the first ones, as some do on some CPUs.
    """
    single = np.matmul
    np.matmul = lambda a, b, dtype=None: single(a, b, dtype=np.float64).astype(dtype or np.float32)  # type: ignore[assignment]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process in which Triton's kernels run on the CPU."""
    pytest.importorskip("triton")
    os.environ["TRITON_INTERPRET"] = "1"
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), products_in_float64) as process:
        process.submit(os.getpid).result()
        del os.environ["TRITON_INTERPRET"]
        yield process


def compiled_for_hopper(
    folder: Path, kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], aligned: Sequence[str] = ()
) -> tuple[Any, str]:
    """A kernel as an H100 gets it, which spills no register, and a listing of its instructions.

    constants: num_warps, too, where it is not 4. aligned: arguments that are multiples of 16.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    place, constants = kernel.arg_names.index, dict(constants)
    options = {"num_warps": constants.pop("num_warps", 4)}
    source = ASTSource(
        kernel,
        signature={**types, **dict.fromkeys(constants, "constexpr")},
        constexprs={(place(name),): value for name, value in constants.items()},
        attrs={(place(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    (folder / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [tool, "--dump-resource-usage", "--dump-sass", folder / "kernel.cubin"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"(STACK|LOCAL):(\d+)", listing)) == {("STACK", "0"), ("LOCAL", "0")}
    return compiled, listing


Sizes = Sequence[tuple[int, int, int]]  # prefix, rows and earlier rows of each session


def interpreted(*arguments: Any) -> Tensor:
    """The CUDA kernel under Triton's interpreter, which the process chose before it imported Triton."""
    from coppice.engine import kernels

    return kernels.tree_attention(*arguments)


def far_from_sdpa(function: Callable[..., Tensor], shape: Shape, sizes: Sizes, seed: int = 0) -> float:
    """The largest difference of an implementation from attention with masks over gathered keys."""
    torch.manual_seed(seed)
    pool = filled_pool(shape, 6000)
    batch = random_batch(pool, sizes, random.Random(seed))
    layer = random_rows(shape, len(batch.tokens))
    *states, sinks = layer
    rows = (part.transpose(0, 1)[None] for part in states)
    kind = Layer(0, shape.window, None, shape.softcap, sinks)
    want = Sdpa(batch.tails, pool).attend(kind, *rows)[0]
    for tail in batch.tails:  # the rows' own, which the implementation has to write
        for part in pool.layers[0]:
            part[tail.table.slots(np.arange(tail.length - len(tail.visible), tail.length))] = 7.0
    return float((attend(function, batch, layer, pool, shape) - want).abs().max())


def own_bits(function: Callable[..., Tensor], shape: Shape, prefix: int, rows: int, nodes: Sequence[int]) -> bool:
    """Whether rows drafted in a tree beside other sessions are, bit for bit, plain steps behind their ancestors."""
    torch.manual_seed(0)
    rng = random.Random(prefix)
    pool = filled_pool(shape, 3000)
    other, drafting = pool.allocate("a", 150), pool.allocate("b", prefix // 2)
    pool.extend(drafting, prefix + rows)
    parents = random_tree(rows, rng)
    batch = pack([Piece.chain(other, 149, [1]), tree_piece(drafting, prefix, parents)])
    layer = random_rows(shape, len(batch.tokens))
    drafted = attend(function, batch, layer, pool, shape)[1:]
    same = []
    for node in nodes:
        (path,) = np.nonzero(ancestors(parents)[node])
        later, table = copy.deepcopy((pool, drafting))
        later.compact([(table, prefix, path[:-1].tolist())])
        later.extend(table, prefix + len(path))
        q, k, v = (part[1 + node : 2 + node] for part in layer[:3])
        step = pack([Piece.chain(table, prefix + len(path) - 1, [1])])
        plain = attend(function, step, (q, k, v, layer[3]), later, shape)
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


@settings(max_examples=40, deadline=None, derandomize=True)
@given(sizes=SIZES, seed=st.integers(0, 99))
def test_every_key_of_every_row_is_in_one_part_of_one_tile(sizes: Sizes, seed: int) -> None:
    pool = filled_pool(Shape(), 6000)
    batch = random_batch(pool, sizes, random.Random(seed))
    inputs = filled_inputs(batch, pool, 4)
    most = tail_blocks(inputs.bucket.tail)
    size = split_size((inputs.length.numpy() + 63) // 64)
    times = np.zeros((len(batch.tokens), 32), np.int64)  # of each row's key blocks
    for first, end, part in inputs.tiles[1 : 1 + int(inputs.tiles[0, 0])].tolist():
        assert len(set(inputs.session[first:end].tolist())) == 1
        for row in range(first, end):
            paged, length = int(inputs.paged[row]), int(inputs.length[row])
            own = -(-length // 64) if paged == length else paged // 64  # the first block that its tail reaches into
            split = part - most
            blocks = {own + split + most} if split < 0 else range(split * size[row], min((split + 1) * size[row], own))
            for block in blocks:
                times[row, block] += 1
    assert np.array_equal(times, np.arange(32) * 64 < inputs.length[: len(batch.tokens), None].numpy())


def split_size(blocks: Any) -> Any:
    """Key blocks of a split of rows that see keys of so many: see most_splits."""
    return np.where(blocks <= 32, 4, np.where(blocks <= 128, 8, (blocks + 511) // 512 * 16))


def test_no_row_has_more_splits_than_are_listed_whatever_its_window() -> None:
    blocks = np.arange(1, 4097)
    splits = -(-blocks // split_size(blocks))
    assert (np.maximum.accumulate(splits) <= most_splits(blocks)).all()
    assert most_splits(blocks).max() == 32


def test_a_bucket_filled_twice_forgets_the_first_batch() -> None:
    pool = filled_pool(Shape(), 3000)
    batch = random_batch(pool, [(50, 30, 0), (20, 9, 3)], random.Random(0))
    small = pack([tree_piece(batch.tails[1].table, 20, random_tree(3, random.Random(1)))])
    bucket = Bucket(64, 4, 16, 32, 64)
    inputs, fresh = filled_inputs(batch, pool, 4, bucket), filled_inputs(small, pool, 4, bucket)
    inputs.fill(small, RowTable.of(small.tails))
    for name in ("tokens", "positions", "new_slots", "session", "paged", "length", "keep"):
        assert torch.equal(getattr(inputs, name), getattr(fresh, name))
    used = 1 + int(fresh.tiles[0, 0])
    assert torch.equal(inputs.tiles[:used], fresh.tiles[:used])
    assert (fresh.length[3:] == 0).all()
    assert (fresh.new_slots[3:] == pool.spare).all()


KERNEL_CASES = {
    "plain steps": (Shape(), [(300, 1, 0), (1, 1, 0), (64, 1, 0)]),
    "a tree, earlier rows": (Shape(), [(61, 6, 3)]),
    "a window": (Shape(window=70), [(130, 4, 3), (30, 3, 0)]),
    "a short window": (Shape(window=2), [(127, 6, 0)]),
    "a softcap and sinks": (Shape(softcap=2.0, sinks=True), [(61, 5, 0), (9, 3, 2)]),
    "odd heads": (Shape(6, KVShape(2, 20, 12)), [(70, 3, 0)]),
    "more rows than a tile": (Shape(8, KVShape(1, 16, 16)), [(3, 9, 0)]),
    "a tile in cuts": (Shape(8, KVShape(1, 68, 12)), [(70, 4, 0)]),
    "a split's border": (Shape(2, KVShape(1, 16, 16)), [(252, 5, 2)]),
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


@pytest.mark.parametrize(("prefix", "window", "dtype"), [(125, 66, torch.float32), (252, None, torch.bfloat16)])
def test_a_drafted_row_has_the_bits_of_a_plain_step(
    prefix: int, window: int | None, dtype: torch.dtype, interpreter: ProcessPoolExecutor
) -> None:
    shape = Shape(2, KVShape(1, 16, 16), dtype=dtype, window=window)
    assert interpreter.submit(own_bits, interpreted, shape, prefix, 10, [0, 5, 9]).result()


@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.bfloat16), (128, torch.bfloat16), (128, torch.float32)], ids=str)
def test_the_kernel_compiles_for_hopper_without_spills(dim: int, dtype: torch.dtype, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from coppice.engine.kernels import shape_of, sum_parts

    q, stored = (torch.empty(1, heads, dim, dtype=dtype) for heads in (32, 8))
    inputs = StepInputs(Bucket(1, 1, 16, 1024, 1), 4, KVPool(layers=[KVShape(1, 1, 1)], tokens=32, block_size=32))
    types = dict.fromkeys(("q", "keys", "values"), {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype])
    types |= dict.fromkeys(("sums", "tops", "weights"), "*fp32")
    types |= dict.fromkeys(("session", "paged", "length", "tail", "table", "tiles"), "*i32")
    types |= {"q_row": "i32", "q_head": "i32", "window": "i32", "scale": "fp32", "softcap": "fp32"}
    aligned = [name for name, kind in types.items() if kind[0] == "*" or name in ("q_row", "q_head")]
    constants = shape_of(q, stored, inputs) | {"CAPPED": False}
    compiled, listing = compiled_for_hopper(tmp_path, sum_parts, types, constants, aligned)
    assert compiled.metadata.shared <= 227 * 1024 // 2  # two programs on a processor
    if dtype == torch.bfloat16:
        assert "HGMMA" in listing
        assert "LDGSTS" in listing  # keys are under way while others are used


# Draws.

CPU = torch.device("cpu")
LAWS = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    for seed, (temperature, top_k, top_p, min_p) in enumerate(
        [
            *((0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 20, 1.0, 0.0), (1.3, 3, 0.9, 0.0), (1.0, 0, 0.95, 0.0)),
            *((2.0, 0, 1.0, 0.05), (1.0, 50, 0.8, 0.02), (0.3, 0, 0.1, 0.0), (10.0, 1, 1.0, 0.0)),
            (1.0, 5_000, 1e-12, 0),
        ],
        start=2**63 - 5,
    )
]


def drawn_and_alone(
    vocab: int, rows: int, dtype: torch.dtype, device: str, argmax: Callable[..., Any]
) -> tuple[list[int], list[int]]:
    """The tokens of random rows of all laws, drawn together and each alone on the host; half of the rows have ties
    everywhere.
    """
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.normal(size=(rows, vocab)).astype(np.float32) * 3)
    logits[::2] = (logits[::2] * 2).round() / 2
    logits[::5, ::3] = -torch.inf
    logits = logits.to(dtype)
    numbers, positions = np.arange(rows), rng.integers(0, 2**17, rows)
    sampled = [(numbers[at :: len(LAWS)], positions[at :: len(LAWS)], law) for at, law in enumerate(LAWS) if at]
    with patch.object(devices, "keyed_argmax", argmax):
        drawn = draw_rows(logits.to(device), tabulate(sampled, [], vocab, torch.device(device))).tolist()
    plain = logits.float().numpy()
    alone = [
        draw(*decode_row(plain[row], law := LAWS[row % len(LAWS)]), law.seed, int(positions[row])) for row in numbers
    ]
    return drawn, alone


def on_the_kernel(vocab: int, rows: int) -> tuple[list[int], list[int]]:
    """The same with the CUDA kernel under Triton's interpreter, which the process chose before it imported Triton."""
    from services.verifier import draws_triton

    return drawn_and_alone(vocab, rows, torch.float32, "cpu", partial(draws_triton.draw, columns=COLUMNS))


ON_GPU = pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cpu", torch.bfloat16), ON_GPU])
@pytest.mark.parametrize(("vocab", "rows"), [(150, 1_900 * EFFORT), (5_000, 100 * EFFORT)])
def test_rows_drawn_together_are_drawn_as_alone(vocab: int, rows: int, device: str, dtype: torch.dtype) -> None:
    argmax = keyed_argmax if device == "cpu" else devices.keyed_argmax
    drawn, alone = drawn_and_alone(vocab, rows, dtype, device, argmax)
    assert drawn == alone


@pytest.mark.parametrize(("vocab", "rows"), [(150, 200 * EFFORT), (5_000, 20 * EFFORT)])
def test_the_kernel_draws_what_the_host_draws(vocab: int, rows: int, interpreter: ProcessPoolExecutor) -> None:
    drawn, alone = interpreter.submit(on_the_kernel, vocab, rows).result()
    assert drawn == alone


def test_rows_that_are_refused_draw_nothing_and_disturb_no_other() -> None:
    logits = torch.randn(9, 40, generator=torch.Generator().manual_seed(1))
    good = logits.clone()
    logits[1, 3], logits[4, 0], logits[7] = torch.nan, torch.inf, -torch.inf
    draws = tabulate([(np.arange(3, 9), np.arange(6), LAWS[4])], [], 40, CPU)
    with patch.object(devices, "keyed_argmax", keyed_argmax):
        drawn, expected = draw_rows(logits, draws), draw_rows(good, draws)
    expected[[1, 4, 7]] = -1
    assert torch.equal(drawn, expected)


def test_the_draws_compile_for_hopper_without_spills(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from services.verifier.draws_triton import PART, best_of_all, best_of_parts

    of_rows = {"highest": "*bf16", "table": "*i64"}
    of_parts = {"bests": "*fp64", "tokens": "*i32"}
    types = {"logits": "*bf16", **of_rows, "edges": "*bf16", "lasts": "*i64", **of_parts}
    types |= dict.fromkeys(("count", "cut", "vocab", "stride"), "i32")
    compiled_for_hopper(tmp_path, best_of_parts, types, {"KEY": 1, "TEMPERATURE": 3, "LEAST": 5, "N": PART})
    compiled_for_hopper(tmp_path, best_of_all, {**of_rows, **of_parts, "drawn": "*i64", "parts": "i32"}, {"N": 128})
