"""Triton's kernels without a GPU: their rule in torch, under its interpreter, and compiled for a GPU."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coppice.engine.attention import Layer
from coppice.engine.steps import StepInputs
from coppice.heads.tree import torch_gumbel, torch_hashes
from services.verifier.device import KEY, LEAST, ROW, TEMPERATURE


@torch.library.custom_op("tests::keyed_argmax", mutates_args=())
def keyed_argmax(logits: Tensor, highest: Tensor, table: Tensor, edges: Tensor, lasts: Tensor) -> Tensor:
    """`services.verifier.device.keyed_argmax` on a CPU, row by row."""
    tokens, drawn = torch.arange(logits.shape[1]), []
    for sampled in range(table.shape[1]):
        row = int(table[ROW, sampled])
        temperature, least = table[[TEMPERATURE, LEAST], sampled].view(torch.float64)
        scores = logits[row].double().sub(highest[row].double()).div(temperature)
        kept = scores >= least
        if sampled < len(edges):
            edge, last = edges[sampled], lasts[sampled]
            kept &= (logits[row] > edge) | ((logits[row] == edge) & (tokens <= last))
        scores.masked_fill_(~kept, -torch.inf)
        best = scores.add_(torch_gumbel(torch_hashes(table[KEY, sampled : sampled + 1], tokens))[0]).argmax()
        drawn.append(int(best) if bool(highest[row].abs() < torch.inf) else -1)
    return torch.tensor(drawn)


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
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, object],
    aligned: Sequence[str],
    options: Mapping[str, int],
    folder: Path,
) -> tuple[Any, dict[str, int], str]:
    """A kernel as an H100 gets it, its threads' memory, of which registers were spilled to STACK and LOCAL, and a
    listing of its instructions.

    aligned: arguments that are multiples of 16.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    place = kernel.arg_names.index
    source = ASTSource(
        kernel,
        signature={**types, **dict.fromkeys(constants, "constexpr")},
        constexprs={(place(name),): value for name, value in constants.items()},
        attrs={(place(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(options))
    (folder / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [tool, "--dump-resource-usage", "--dump-sass", folder / "kernel.cubin"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return compiled, {name: int(count) for name, count in re.findall(r"(STACK|LOCAL):(\d+)", listing)}, listing


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """The rule of `kernels.rotate` in torch's operators, which is transformers' formula."""

    def of(states: Tensor) -> Tensor:
        first, second = states.chunk(2, dim=-1)
        return states * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]

    assert len(query) == len(key) == 1  # the kernel reads one text
    return of(query), of(key)


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, inputs: StepInputs, layer: Layer
) -> Tensor:
    """The rule of `kernels.tree_attention`, of which see there, in torch's operators, as one operator."""
    rows = inputs.new_slots, inputs.session, inputs.paged, inputs.length, inputs.tail, inputs.table
    scale = q.shape[-1] ** -0.5 if layer.scaling is None else layer.scaling
    numbers = inputs.pool.block_size, layer.window or 0, scale, layer.softcap or 0.0
    out: Tensor = _tree_attention(q, k, v, keys, values, layer.sinks, *rows, *numbers)
    return out


@torch.library.custom_op("tests::tree_attention", mutates_args=("keys", "values"))
def _tree_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None, new_slots: Tensor,
    session: Tensor, paged: Tensor, length: Tensor, tail: Tensor, table: Tensor, block_size: int, window: int,
    scale: float, softcap: float,
) -> Tensor:  # fmt: skip
    keys.index_copy_(0, new_slots, k)
    values.index_copy_(0, new_slots, v)
    key = torch.arange(max(1, int(length.max())))  # (L,)
    slot = table[session[:, None], key // block_size] * block_size + key % block_size  # (T, L)
    if tail.shape[1]:
        behind = tail.gather(1, (key - paged[:, None]).clamp(0, tail.shape[1] - 1).long())
        slot = torch.where(key < paged[:, None], slot, behind)
    seen = (key < length[:, None]) & (key >= length[:, None] - (window or 1 << 30))
    queries = q.float().reshape(len(q), k.shape[1], -1, q.shape[-1])  # (T, KVH, G, D)
    scores = queries @ keys[slot].permute(0, 2, 3, 1).float() * scale  # (T, KVH, G, L)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(1, k.shape[1], -1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(-1)[..., : len(key)].nan_to_num()  # of rows that see nothing zeros
    return (weights @ values[slot].transpose(1, 2).float()).flatten(1, 2).to(q.dtype)
