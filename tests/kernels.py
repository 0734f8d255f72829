"""Triton's kernels without a GPU: under its interpreter, and compiled for one."""

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
