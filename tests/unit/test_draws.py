"""Draws of all rows of a forward at once: what the host draws of each alone, in torch and by the CUDA kernel."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from coppice.speculation.sampling import SamplingParams, decode_row, draw
from services.verifier import device as devices
from services.verifier.device import COLUMNS, draw_rows, tabulate
from tests.kernels import compiled_for_hopper, interpreter, keyed_argmax
from tests.reference import EFFORT

__all__ = ["interpreter"]  # a fixture

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
        drawn = draw_rows(logits.to(device), tabulate(sampled, vocab, torch.device(device))).tolist()
    plain = logits.float().numpy()
    alone = [
        draw(*decode_row(plain[row], law := LAWS[row % len(LAWS)]), law.seed, int(positions[row])) for row in numbers
    ]
    return drawn, alone


def on_the_kernel(vocab: int, rows: int) -> tuple[list[int], list[int]]:
    """The same with the CUDA kernel under Triton's interpreter, which the process chose before it imported Triton."""
    from services.verifier import draws_triton

    return drawn_and_alone(vocab, rows, torch.float32, "cpu", partial(draws_triton.draw, columns=COLUMNS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "rows"), [(150, 1_900 * EFFORT), (5_000, 100 * EFFORT)])
def test_rows_drawn_together_are_drawn_as_alone(vocab: int, rows: int, dtype: torch.dtype) -> None:
    drawn, alone = drawn_and_alone(vocab, rows, dtype, "cpu", keyed_argmax)
    assert drawn == alone


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab", "rows"), [(150, 4_900 * EFFORT), (5_000, 100 * EFFORT)])
def test_rows_drawn_on_a_device_are_drawn_as_alone(vocab: int, rows: int) -> None:
    drawn, alone = drawn_and_alone(vocab, rows, torch.bfloat16, "cuda", devices.keyed_argmax)
    assert drawn == alone


@pytest.mark.parametrize(("vocab", "rows"), [(150, 200 * EFFORT), (5_000, 20 * EFFORT)])
def test_the_kernel_draws_what_the_host_draws(vocab: int, rows: int, interpreter: ProcessPoolExecutor) -> None:
    drawn, alone = interpreter.submit(on_the_kernel, vocab, rows).result()
    assert drawn == alone


def test_the_kernel_compiles_for_hopper_without_spills(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from services.verifier.draws_triton import PART, best_of_all, best_of_parts

    pointers = {"logits": "*bf16", "highest": "*bf16", "table": "*i64", "edges": "*bf16", "lasts": "*i64"}
    of_parts = {"bests": "*fp64", "tokens": "*i32"}
    numbers = dict.fromkeys(("count", "cut", "vocab", "stride"), "i32")
    for kernel, types, constants in (
        (best_of_parts, pointers | of_parts | numbers, {"KEY": 1, "TEMPERATURE": 3, "LEAST": 5, "N": PART}),
        (best_of_all, {"highest": "*bf16", "table": "*i64", **of_parts, "drawn": "*i64", "parts": "i32"}, {"N": 128}),
    ):
        _, usage, _ = compiled_for_hopper(kernel, types, constants, [], {}, tmp_path)
        assert (usage["STACK"], usage["LOCAL"]) == (0, 0)


def test_rows_that_are_refused_draw_nothing_and_disturb_no_other() -> None:
    logits = torch.randn(9, 40, generator=torch.Generator().manual_seed(1))
    good = logits.clone()
    logits[1, 3], logits[4, 0], logits[7] = torch.nan, torch.inf, -torch.inf
    draws = tabulate([(np.arange(3, 9), np.arange(6), LAWS[4])], 40, CPU)
    with patch.object(devices, "keyed_argmax", keyed_argmax):
        drawn, expected = draw_rows(logits, draws), draw_rows(good, draws)
    expected[[1, 4, 7]] = -1
    assert torch.equal(drawn, expected)
