"""Steps over inputs at fixed addresses: they say what the engine says of the same batch, in few launches."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

from coppice.engine import steps
from coppice.engine.engine import Engine
from coppice.engine.modules import fuse, merge_launches
from coppice.engine.rows import PackedBatch, Piece, pack
from coppice.engine.steps import Bucket, StepInputs, Steps, TappedModel, graph_buckets
from coppice.testing.tiny_models import VOCAB, save_tiny
from tests.pretend import FREE, LAUNCHES, record
from tests.services.test_engine import SMALL, Tree, kernel_rules

__all__ = ["kernel_rules"]
pytestmark = pytest.mark.usefixtures("kernel_rules")

LAYERS = (1, 3)
BUCKET = Bucket(rows=48, sessions=4, tail=16, blocks=8, kept=48)
ARCHITECTURES = {
    **dict.fromkeys(("qwen3_moe", "phi3", "olmo2", "glm4"), ""),
    **dict.fromkeys(("gemma3_text", "smollm3", "cohere2"), "window"),
}


def engine_of(model: PreTrainedModel) -> Engine:
    """An engine whose pool is full of numbers."""
    engine = Engine(model, kv_tokens=1024)
    torch.manual_seed(0)
    for part in (part for layer in engine.pool.layers for part in layer):
        part.normal_()
    return engine


def some_batch(engine: Engine, seed: int, layers: tuple[int, ...] = LAYERS) -> PackedBatch:
    """Trees of one to three sessions, of which some rows' logits are wanted. Borrows the pool."""
    choose, pieces = random.Random(seed), []
    for session in range(choose.randrange(1, 4)):
        prefix, tree = choose.randrange(90), Tree(choose.randrange(1, 13), seed)
        table = engine.pool.allocate(f"s{session}", prefix + len(tree.tokens))
        keep = sorted(choose.sample(range(len(tree.tokens)), choose.randrange(1, len(tree.tokens) + 1)))
        pieces.append(Piece(table, prefix, tree.tokens, tree.parents, tree.depths, keep))
    batch = pack(pieces, layers)
    for piece in pieces:
        blocks = piece.table.blocks
        engine.pool.free(piece.table)
        piece.table.blocks = blocks
    return batch


def steps_of(engine: Engine) -> Steps:
    """What an engine on a device would run."""
    return Steps(TappedModel(engine.model, engine.info.layers), engine.pool, engine.layout.group)


def answers(engine: Engine, runs: Steps | None, batch: PackedBatch) -> tuple[Tensor, ...]:
    """Logits, and features where the batch names layers."""
    engine.steps = runs
    output = engine.forward(batch)
    return (output.logits.clone(),) if output.features is None else (output.logits.clone(), output.features.clone())


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs that run the forward which they would replay."""
    monkeypatch.setattr(Steps, "record", record)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_step_says_what_the_engine_says(kind: str, tmp_path: Path, recorded: None) -> None:
    save_tiny(kind, ARCHITECTURES[kind], tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    fuse(model, packed=False)  # as on CUDA
    merge_launches(model)
    engine = engine_of(model)
    replayed = steps_of(engine)
    assert replayed.capture([BUCKET], LAYERS) == ""
    batch = some_batch(engine, 0)
    plain = answers(engine, None, batch)
    for runs in (steps_of(engine), replayed):
        for ours, theirs in zip(answers(engine, runs, batch), plain, strict=True):
            assert ours.shape == theirs.shape
            assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.fixture
def llama() -> PreTrainedModel:
    return tiny(LlamaConfig, 4)


def tiny(kind: Callable[..., Any], layers: int) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(kind(**{**SMALL, "vocab_size": VOCAB, "num_hidden_layers": layers}))


def test_a_batch_goes_to_the_smallest_graph_that_holds_it(llama: PreTrainedModel, recorded: None) -> None:
    engine = engine_of(llama)
    runs = steps_of(engine)
    assert runs.capture(graph_buckets(8), (1, 2, 3)) == ""
    rows = " ".join(str(inputs.bucket.rows) for inputs in runs.graphs)
    assert rows == "1 2 4 8 16 32 64 96 128 192 256 384 512 768"
    replayed: list[int] = []
    for inputs in runs.graphs:
        inputs.graph.replay = partial(
            lambda rows, replay: (replayed.append(rows), replay()), inputs.bucket.rows, inputs.graph.replay
        )
    # Layers in any order, none, one twice, and one that the graphs do not leave.
    for layers, uses in (((), True), ((2,), True), ((3, 1, 3), True), ((0,), False)):
        batch = some_batch(engine, 3, layers)
        torch.testing.assert_close(answers(engine, runs, batch), answers(engine, None, batch), rtol=1e-4, atol=1e-4)
        rows = len(batch.tokens)
        assert [rows <= bucket < 2 * rows for bucket in replayed] == [True] * uses
        replayed.clear()
    table = engine.pool.allocate("long", 800)
    answers(engine, runs, pack([Piece.chain(table, 0, [5] * 769)]))
    answers(engine, runs, pack([Piece.chain(table, 799, [5])]))
    assert replayed == []  # more rows, and more blocks, than any graph has


def test_every_tree_that_a_graph_has_rows_for_fits_in_it() -> None:
    for bucket in graph_buckets(8):
        for sessions in {1, min(3, bucket.rows), bucket.rows}:
            rows = bucket.rows // sessions
            deepest = max(0, min(rows - 2, steps.GRAPH_TAIL))
            assert bucket.holds(Bucket(bucket.rows, sessions, deepest, 8, bucket.rows))


def test_what_cannot_be_recorded_is_run(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(llama)
    runs, batch = steps_of(engine), some_batch(engine, 3)

    def record(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(Steps, "record", record)
    assert runs.capture([BUCKET], LAYERS) == "RuntimeError: operation not permitted when stream is capturing"
    torch.testing.assert_close(answers(engine, runs, batch), answers(engine, None, batch), rtol=1e-4, atol=1e-4)


def test_a_step_without_a_batch_writes_to_no_session(llama: PreTrainedModel) -> None:
    engine = engine_of(llama)
    before = [part[:-1].clone() for layer in engine.pool.layers for part in layer]
    steps_of(engine)._run(StepInputs(BUCKET, engine.layout.group, engine.pool), LAYERS)
    assert all(map(torch.equal, before, (part[:-1] for layer in engine.pool.layers for part in layer)))


class Launches(TorchDispatchMode):
    """Counts what a GPU would launch: operators that are no views, and of our own what they are known to launch."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator._schema.name.partition("::")[2]
        if name == "rms_norm" and not args[0].is_contiguous():
            self.counts["contiguous"] += 1  # CUDA's form copies first
        if name in ("contiguous", "to") or not (operator.is_view or name in FREE):
            self.counts[name] += LAUNCHES.get(name, 1)
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "most"), [(LlamaConfig, 14), (Qwen3Config, 18)])
def test_a_layer_is_few_launches(kind: Callable[..., Any], most: int) -> None:
    counted: list[Counter[str]] = []
    for layers in (4, 5):
        plain, model = (tiny(kind, layers).to(torch.bfloat16) for _ in range(2))
        expected = engine_of(plain)
        fuse(model, packed=False)
        merge_launches(model)
        engine = engine_of(model)
        batch = some_batch(engine, 1)
        run = steps_of(engine).prepare(batch)
        with Launches() as mode:
            logits = run()[0]
        plain = expected.forward(batch).logits
        assert (logits - plain).abs().max() < 0.05 * plain.abs().max()
        counted.append(mode.counts)
    assert sum((counted[1] - counted[0]).values()) <= most


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_replay_their_steps(dtype: torch.dtype, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    engine = engine_of(llama.to("cuda", dtype))
    assert engine.capture() == ""
    replayed: Any = engine.steps
    memory = torch.cuda.memory_allocated()
    for seed in range(30):
        batch = some_batch(engine, seed, engine.info.feature_layers)
        again = answers(engine, replayed, batch)
        with monkeypatch.context() as patch:  # padded alike: products have the bits of their number of rows
            patch.setattr(replayed, "_replayed", replayed._run)
            assert all(map(torch.equal, again, answers(engine, replayed, batch)))
    assert torch.cuda.memory_allocated() - memory < 2**24
