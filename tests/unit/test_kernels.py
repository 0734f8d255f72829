"""Kernels in Triton's interpreter and compiled for a GPU, and modules in faster forms: they compute what stock ones do.

Of tree attention a row's bits are its own; rows drawn at once are drawn as each alone; other modules are left alone.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import random
import re
import subprocess
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from coppice.engine import modules
from coppice.engine.attention import Layer, Sdpa
from coppice.engine.kv_cache import KVPool, KVShape
from coppice.engine.modules import FusedLinear, PackedLinear, call_directly, fuse, merge_launches, pays, prepack
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
    pytest.importorskip("triton")
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


@settings(max_examples=15, deadline=None, derandomize=True)
@given(shape=SHAPES, sizes=SIZES, seed=st.integers(0, 9))
def test_rows_attend_to_what_the_plans_let_them_see(shape: Shape, sizes: Sizes, seed: int) -> None:
    assert far_from_sdpa(tree_attention, shape, sizes, seed) < 1e-5


@settings(max_examples=20, deadline=None, derandomize=True)
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
    "plain steps and a tree, earlier rows": (Shape(), [(300, 1, 0), (1, 1, 0), (61, 6, 3)]),
    "a window, a softcap and sinks": (Shape(window=70, softcap=2.0, sinks=True), [(130, 4, 3), (30, 3, 0)]),
    "odd heads and a short window": (Shape(6, KVShape(2, 20, 12), window=2), [(127, 6, 0)]),
    "a tile in cuts": (Shape(8, KVShape(1, 68, 12)), [(70, 4, 0)]),
    "a split's border": (Shape(2, KVShape(1, 16, 16)), [(252, 5, 2)]),
    "more rows than a tile": (Shape(8, KVShape(1, 16, 16)), [(3, 9, 0)]),
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


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 8), (torch.float16, 96)])
def test_the_kernel_rotates_as_models_do(dtype: torch.dtype, dim: int, interpreter: ProcessPoolExecutor) -> None:
    """In 16 bits by float16, since the interpreter cuts bfloat16 off."""
    assert interpreter.submit(rotated_alike, dtype, dim).result()


@pytest.mark.parametrize(("prefix", "window", "dtype"), [(125, 66, torch.float32), (252, None, torch.bfloat16)])
def test_a_drafted_row_has_the_bits_of_a_plain_step(
    prefix: int, window: int | None, dtype: torch.dtype, interpreter: ProcessPoolExecutor
) -> None:
    shape = Shape(2, KVShape(1, 16, 16), dtype=dtype, window=window)
    assert interpreter.submit(own_bits, interpreted, shape, prefix, 10, [0, 5, 9]).result()


@pytest.mark.parametrize(("dim", "dtype"), [(128, torch.bfloat16), (128, torch.float32)], ids=str)
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
@pytest.mark.parametrize(("vocab", "rows"), [(150, 900 * EFFORT), (5_000, 60 * EFFORT)])
def test_rows_drawn_together_are_drawn_as_alone(vocab: int, rows: int, device: str, dtype: torch.dtype) -> None:
    argmax = keyed_argmax if device == "cpu" else devices.keyed_argmax
    drawn, alone = drawn_and_alone(vocab, rows, dtype, device, argmax)
    assert drawn == alone


@pytest.mark.parametrize(("vocab", "rows"), [(150, 100 * EFFORT), (5_000, 10 * EFFORT)])
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


# --- modules in faster forms ---


ROUNDING = {torch.bfloat16: 2**-7, torch.float32: 2**-18}


@pytest.fixture(params=ROUNDING, ids=str)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """One that is packed; float32 as on a processor where that is faster."""
    if request.param is torch.bfloat16 and not pays(torch.bfloat16):
        pytest.skip("this processor has no bfloat16 in oneDNN")
    if not torch.backends.mkldnn.is_available():
        pytest.skip("no oneDNN in this torch")
    monkeypatch.setattr(modules, "pays", lambda _: True)
    return request.param


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 200), nn.SiLU(), nn.Linear(200, 64, bias=False)).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("rows", [1, 17, 300])
def test_packed_layers_answer_within_a_rounding_of_stock_ones(rows: int, dtype: torch.dtype) -> None:
    stock = _model(dtype)
    packed = deepcopy(stock)
    prepack(packed)
    assert [type(layer) for layer in packed] == [PackedLinear, nn.SiLU, PackedLinear]
    x = torch.randn(2, rows, 96, dtype=dtype)
    answer = packed(x)
    torch.testing.assert_close(answer, stock(x), rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


def test_a_packed_model_gives_its_matrices_back_and_takes_new_ones(dtype: torch.dtype) -> None:
    stock = _model(dtype)
    packed = deepcopy(stock)
    prepack(packed)
    prepack(packed)  # changes nothing
    assert torch.equal(packed[2].weight.to_dense(), stock[2].weight)
    packed.load_state_dict({**packed.state_dict(), "2.weight": -stock[2].weight}, assign=True)
    prepack(packed)
    x = torch.randn(3, 96, dtype=dtype)
    torch.testing.assert_close(packed(x), -stock(x), rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


class _Projections(nn.Module):
    """Grouped-query attention's, by the names that Hugging Face models have for them."""

    def __init__(self, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj = nn.Linear(96, 64, bias=bias), nn.Linear(96, 32, bias=bias)
        self.v_proj, self.o_proj = nn.Linear(96, 32, bias=bias), nn.Linear(64, 96, bias=bias)
        self.to(dtype).requires_grad_(False)

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        """Of `x`, the keys of `other` if there is one."""
        return torch.cat([self.q_proj(x), self.k_proj(x if other is None else other), self.v_proj(x)], dim=-1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 13])
def test_fused_layers_have_the_bits_of_packed_ones_and_keep_nothing(bias: bool, rows: int, dtype: torch.dtype) -> None:
    stock = _Projections(dtype, bias)
    apart, together = deepcopy(stock), deepcopy(stock)
    fuse(together)
    prepack(together)
    prepack(apart)
    assert [type(layer) for layer in together.children()] == [FusedLinear, FusedLinear, FusedLinear, PackedLinear]
    x, y = torch.randn(2, 1, rows, 96, dtype=dtype).unbind()
    for arguments in ((x,), (x, y), (y, x), (x,)):
        assert torch.equal(together(*arguments), apart(*arguments))
    last = weakref.ref(z := x + y)
    together(z)
    del z
    assert last() is None
    for name in ("q_proj", "k_proj", "v_proj"):
        assert torch.equal(together.get_submodule(name).weight, stock.get_submodule(name).weight)


def test_layers_of_another_class_or_size_are_left_alone(dtype: torch.dtype) -> None:
    class Routed(nn.Linear):
        """Whoever subclasses may read the matrix."""

    prepack(routed := nn.Sequential(Routed(32, 32)).to(dtype))
    assert type(routed[0]) is Routed
    model = _Projections(dtype)
    model.v_proj = nn.Linear(64, 32, bias=False).to(dtype)
    fuse(model)
    assert all(type(layer) is nn.Linear for layer in model.children())


# Launches on CUDA.


class Centred(LlamaRMSNorm):
    """Keeps the names of a norm and computes another one."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


class Scaled(nn.Module):
    """Has a norm's parameters and is none."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, left: Tensor, right: float = 2.0) -> Tensor:
        return self.weight * left * right


NORMS = [
    *((modules.merge_norms, kind, kind is Gemma3RMSNorm) for kind in (Gemma3RMSNorm, LlamaRMSNorm, CohereLayerNorm)),
    *((merge_launches, kind, True) for kind in (LlamaRMSNorm, Olmo2RMSNorm, nn.RMSNorm)),
    *((merge_launches, kind, False) for kind in (Gemma2RMSNorm, CohereLayerNorm, Centred, Scaled, nn.LayerNorm)),
]


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("merge", "kind", "merged"), NORMS)
def test_a_norm_becomes_one_operator_and_others_stay_what_they_are(
    merge: Any, kind: Any, merged: bool, kept: torch.dtype
) -> None:
    """On the CPU with the same bits, on CUDA within a rounding."""
    stock, model = (nn.Sequential(kind(48, eps=1e-3)).to(kept) for _ in range(2))
    for module in (stock, model):
        module[0].weight.data = torch.linspace(-1, 2, 48).to(kept)
    merge(model)
    assert (type(model[0]) is not kind) == merged
    assert isinstance(model[0], kind) or merge is modules.merge_norms
    states = torch.randn(2, 7, 48).to(kept) / 50
    rounding = 0.0 if merge is modules.merge_norms or not merged else {torch.float32: 1e-6, torch.bfloat16: 2**-7}[kept]
    torch.testing.assert_close(model(states), stock(states), rtol=rounding, atol=rounding)


# Direct calls.


class Gate(nn.Module):
    """A layer with parts, one of them optional, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4, bias=False), None
        self.scale = nn.Parameter(torch.full((4,), 1.5))

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(states).relu()) * self.scale
        return out if self.norm is None else self.norm(out)


def test_direct_calls_answer_the_same_until_a_part_is_replaced() -> None:
    model, states = nn.Sequential(Gate(), nn.LayerNorm(4), Gate()), torch.randn(3, 4)
    expected, parts = model(states), {name: value.clone() for name, value in model.state_dict().items()}
    call_directly(model)
    assert torch.equal(model(states), expected)
    assert model.state_dict().keys() == parts.keys()
    assert all(torch.equal(value, parts[name]) for name, value in model.state_dict().items())
    gate = model[2]
    assert isinstance(gate, Gate)
    gate.scale = nn.Parameter(torch.full((4,), 3.0))
    assert torch.equal(model(states), 2 * expected)
    gate.down = nn.Linear(8, 4)
    gate.down.weight.data.zero_()
    gate.down.bias.data.zero_()
    assert torch.equal(model(states), torch.zeros(3, 4))
