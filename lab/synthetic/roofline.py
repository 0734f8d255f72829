"""What a device makes of a target of some shape, beside the time in which its memory moves what a forward reads.

Weights are random: a forward takes as long as one of trained ones. A copy in the same run says how fast memory is.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from coppice.engine.engine import Engine
from coppice.engine.rows import Piece, pack
from coppice.stack.spec import StackSpec
from coppice.testing.reference import Reference
from coppice.training.progress import Progress
from lab.asking import GREEDY
from lab.bare import Bare
from lab.report import Report
from lab.synthetic.measure import SyntheticPlan, expected_lines, measure_bare, measure_pipeline

REPEATS = 15
COPIED = {"cuda": 1 << 30, "cpu": 1 << 27}  # bytes, more than any cache holds
GENERATED = 128  # tokens of transformers' prompt, and of its answer
STATIC: Any = {"cache_implementation": "static"}


@dataclass(frozen=True)
class Cell:
    """Forwards of one size."""

    sessions: int
    rows: int
    context: int


CELLS = (
    Cell(1, 1, 1024),
    Cell(1, 61, 1024),
    Cell(8, 31, 1024),
    Cell(32, 1, 1024),
    Cell(8, 1, 32_768),
)


def run_gpu(spec: StackSpec, plan: SyntheticPlan, report: Report) -> None:
    """Add forwards beside the roofline, drafts, steps of the services and transformers' own decoding to the report."""
    device = torch.device(report.device)
    report.figures |= {"torch": torch.__version__, "device_name": device_name(device)}
    with Progress("parts", len(CELLS) + 4) as progress:
        progress.say("forwards")
        forwards(spec, CELLS, report, progress.add)
        progress.say("drafts")
        times = measure_bare(spec, plan, sorted({1, plan.budget + 1}), progress)
        report.rows = expected_lines(spec, plan, times)
        report.add_figures("expected", "expected of bare forwards, drafts and the profile", report.rows)
        _release(device)
        progress.say("the services")
        steps = measure_pipeline(spec, plan, times, report, progress)
        report.add_figures("pipeline", "milliseconds a step of the services, one session", steps)
        _release(device)
        progress.say("transformers")
        tokens_per_s = static_generate(spec, plan)
        progress.add()
    report.add_figures("generate", "transformers' generate with a static cache", [{"tokens/s": tokens_per_s}])


def forwards(spec: StackSpec, cells: Sequence[Cell], report: Report, done: Callable[[], None]) -> None:
    """Time forwards of each size, and compare them with the time of a copy of as many bytes as they read."""
    most = max(cells, key=lambda cell: cell.sessions * (cell.context + cell.rows))
    engine = Bare(spec, spec.settings(), most.sessions, most.context + most.rows).engine
    speed, lines = bytes_a_second(engine.pool.device), []
    for cell in cells:
        took, read = forward_s(engine, cell), bytes_read(engine, cell)
        lines.append(
            {
                "sessions": cell.sessions,
                "rows": cell.rows,
                "context": cell.context,
                "ms": took * 1e3,
                "GB read": read / 1e9,
                "roofline ms": read / speed * 1e3,
                "over roofline": took * speed / read,
            }
        )
        done()
    report.add_figures("roofline", f"forwards; memory moves {speed / 1e9:.0f} GB/s in a copy", lines)


def forward_s(engine: Engine, cell: Cell) -> float:
    """Median seconds of forwards over random trees of one size, whose rows are all wanted."""
    tree, tables, took = random.Random(0), [], []  # noqa: S311
    parents = [-1, *(tree.randrange(max(0, row - 12), row) for row in range(1, cell.rows))]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    try:
        for number in range(cell.sessions):
            tables.append(engine.pool.allocate(f"roofline-{number}", cell.context + cell.rows))
        pieces = [Piece(table, cell.context, [0] * cell.rows, parents, depths, range(cell.rows)) for table in tables]
        for _ in range(3 + REPEATS):
            began = time.perf_counter()
            engine.forward(pack(pieces))
            took.append(time.perf_counter() - began)
    finally:
        for table in tables:
            engine.pool.free(table)
    return median(took[3:])


def bytes_read(engine: Engine, cell: Cell) -> int:
    """Bytes that a forward of one size cannot do without: the weights, and the keys and values of its sessions."""
    embedding: Any = engine.model.get_input_embeddings()
    output: Any = engine.model.get_output_embeddings()
    weights = sum(tensor.numel() * tensor.dtype.itemsize for tensor in _weights(engine.model))
    if embedding.weight is not output.weight:
        weights -= embedding.weight.nbytes  # of which a forward reads a few rows
    token = sum(part[0].nbytes for layer in engine.pool.layers for part in layer)
    return weights + cell.sessions * (cell.context + cell.rows) * token


def _weights(model: torch.nn.Module) -> list[Tensor]:
    """Every matrix of a model once, those that several layers share included."""
    matrices: dict[int, Tensor] = {}
    for module in model.modules():
        shared = getattr(module, "fused", None)
        own = (shared.weight,) if shared is not None else tuple(module.parameters(recurse=False))
        matrices |= {id(tensor): tensor for tensor in own}
    return list(matrices.values())


def bytes_a_second(device: torch.device) -> float:
    """How many bytes memory reads and writes in a second of a long copy."""
    size = COPIED.get(device.type, COPIED["cpu"])
    source, target, took = torch.ones(size, dtype=torch.uint8, device=device), None, []
    target = torch.empty_like(source)
    for _ in range(REPEATS):
        _wait(device)
        began = time.perf_counter()
        target.copy_(source)
        _wait(device)
        took.append(time.perf_counter() - began)
    return 2 * size / median(took)


def static_generate(spec: StackSpec, plan: SyntheticPlan) -> float:
    """Tokens a second of transformers alone, with a cache of fixed size: on CUDA it compiles the forward for one."""
    verifier, prompt = spec.settings().verifier, plan.ids(GENERATED, 2)
    reference = Reference(spec.target, verifier.dtype, verifier.device)
    for _ in range(3):  # the first two compile
        answer = reference.generate(prompt, GENERATED, GREEDY, drafting=STATIC)
    return (answer.new_tokens - 1) / answer.decode_s


def device_name(device: torch.device) -> str:
    """What a device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _release(device: torch.device) -> None:
    """Give memory of what is over back to the device: the next part loads the target again."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
