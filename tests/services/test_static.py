"""Steps over inputs at fixed addresses: traced as one graph, they say what the engine says of the batch's own plan."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

from coppice.engine import engine as engine_module
from coppice.engine import graphs, launches, launches_triton
from coppice.engine.batch import PackedBatch, Piece, pack
from coppice.engine.engine import Engine
from coppice.engine.graphs import CompiledStep, Eager, Graphs, Make, best_runner, graph_buckets, why_no_graph
from coppice.engine.launches import merge_launches
from coppice.engine.linear import fuse
from coppice.engine.ragged import Bucket, Ragged
from coppice.testing.tiny_models import VOCAB, save_tiny
from tests.reference import EFFORT
from tests.services.test_engine import Tree

LAYERS = (1, 3)
BUCKET = Bucket(rows=48, sessions=4, tail=16, blocks=8, kept=48)
ARCHITECTURES = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "phi3", "olmo2", "granite", "glm4"), ""),
    **dict.fromkeys(("mistral", "gemma2", "gemma3_text", "smollm3", "cohere2", "gpt_oss"), "window"),
}


def model_of(kind: str, folder: Path) -> PreTrainedModel:
    save_tiny(kind, ARCHITECTURES[kind], folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def engine_of(model: PreTrainedModel) -> Engine:
    """An engine whose pool is full of numbers."""
    engine = Engine(model, kv_tokens=512)
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


class Held:
    """In place of a CUDA graph: runs the step that it would replay."""

    def __init__(self, step: graphs.Step, _: object) -> None:
        self.inputs, self.feature_layers, self.run = step.inputs, step.feature_layers, step
        self.graph = SimpleNamespace(pool=lambda: None)

    def __call__(self) -> Any:
        return self.run()


class Compiled:
    """Steps whose forward torch.compile makes one full graph of."""

    def __init__(self, make: Make, backend: str = "inductor") -> None:
        self.step = cache(lambda bucket, layers: CompiledStep(make(bucket, layers), backend))


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs that replay nothing, and nothing compiled before or after."""
    monkeypatch.setattr(graphs, "Captured", Held)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def said_by(engine: Engine, runner: graphs.Runner | None, batch: PackedBatch) -> tuple[Tensor, ...]:
    """Logits, and features where they are wanted."""
    engine.runner = runner
    output = engine.forward(batch)
    return (output.logits.clone(),) if output.features is None else (output.logits.clone(), output.features.clone())


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_step_is_one_graph_and_says_what_the_engine_says(kind: str, tmp_path: Path, held: None) -> None:
    model = model_of(kind, tmp_path)
    fuse(model, packed=False)  # as on CUDA
    merge_launches(model)
    engine = engine_of(model)
    made = (Eager(engine.static_step), Compiled(engine.static_step, backend="eager"))
    static = [Graphs(runner, [BUCKET], LAYERS) for runner in made]
    for seed in range(5):
        batch = some_batch(engine, seed)
        plain, *answers = (said_by(engine, runner, batch) for runner in (None, *static))
        for answer in answers:
            for ours, wanted in zip(answer, plain, strict=True):
                assert ours.shape == wanted.shape
                assert (ours - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert counters["graph_break"] == {}
    assert counters["stats"]["unique_graphs"] <= 2


@pytest.fixture
def llama() -> PreTrainedModel:
    return tiny(LlamaConfig, 4)


def tiny(kind: Callable[..., Any], layers: int) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        kind(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, intermediate_size=48, max_position_embeddings=256, initializer_range=0.2,
        )
    )  # fmt: skip


def test_a_batch_goes_to_the_smallest_graph_that_holds_it(llama: PreTrainedModel, held: None) -> None:
    engine = engine_of(llama)
    captured = Graphs(Eager(engine.static_step), graph_buckets(8), (1, 2, 3))

    def taken(*sizes: int, layers: tuple[int, ...] = LAYERS) -> int:
        step = captured.step(Bucket(*sizes), layers)
        return step.inputs.bucket.rows if isinstance(step, Held) else 0

    assert taken(1, 1, 0, 8, 1) == 1
    assert taken(4, 4, 0, 2, 4) == 4
    assert taken(64, 1, 16, 4, 64) == 64
    assert taken(64, 1, 16, 4, 64, layers=()) == 64
    assert taken(192, 8, 32, 8, 192) == 192
    assert taken(96, 96, 0, 1, 96) == 96
    assert taken(96, 1, 96, 4, 96) == 0  # what a row sees behind its prefix
    assert taken(512, 1, 0, 8, 1) == 0  # rows
    assert taken(4, 1, 0, 16, 4) == 0  # the text
    assert taken(4, 1, 0, 4, 4, layers=(0, 1)) == 0  # features
    for layers in ((), (2,), (3, 1), (0,)):
        batch = some_batch(engine, 3, layers)
        plain, static = (said_by(engine, runner, batch) for runner in (None, captured))
        torch.testing.assert_close(static, plain, rtol=1e-4, atol=1e-4)


def test_every_tree_that_a_graph_has_rows_for_fits_in_it() -> None:
    for bucket in graph_buckets(8):
        for sessions in {1, min(3, bucket.rows), bucket.rows}:
            rows = bucket.rows // sessions
            deepest = max(0, min(rows - 2, graphs.GRAPH_TAIL))
            assert bucket.holds(Bucket(bucket.rows, sessions, deepest, 8, bucket.rows))


class Asking(nn.Module):
    """A layer that asks the host for a number."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.layer(states)
        return out if float(states.sum()) > 0 else -out


def test_what_cannot_be_replayed_is_refused_with_the_reason(llama: PreTrainedModel, held: None) -> None:
    engine = engine_of(llama)
    step = engine.static_step(BUCKET, LAYERS)
    before = [part[:-1].clone() for layer in engine.pool.layers for part in layer]
    assert why_no_graph(step) == ""
    assert all(map(torch.equal, before, (part[:-1] for layer in engine.pool.layers for part in layer)))
    runner, why = best_runner(engine.static_step, [BUCKET], LAYERS)
    assert (type(runner), why) == (Eager, "a device of kind cpu replays nothing")
    llama.model.layers[2].mlp = Asking(llama.model.layers[2].mlp)
    assert "LlamaForCausalLM is not one graph: " in why_no_graph(engine.static_step(BUCKET, LAYERS))
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 64}
    llama.config.rope_parameters = rope
    assert why_no_graph(step) == "rope kind dynamic rotates by the longest text of a batch"


class Launches(TorchDispatchMode):
    """Counts what a GPU would launch: operators that are no views, and of our own what they are known to launch."""

    OWN = MappingProxyType({"tree_attention": 3})
    FREE = frozenset(
        {
            *("view", "_unsafe_view", "reshape", "transpose", "t", "permute", "expand", "unsqueeze", "squeeze"),
            *("slice", "select", "narrow", "split", "split_with_sizes", "chunk", "unbind", "alias", "detach"),
            *("empty", "new_empty", "empty_like"),
        }
    )

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator._schema.name.partition("::")[2]
        if name == "rms_norm" and not args[0].is_contiguous():
            self.counts["contiguous"] += 1  # CUDA's form copies first
        if name not in self.FREE:
            self.counts[name] += self.OWN.get(name, 1)
        return operator(*args, **(kwargs or {}))

    def one(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as one launch."""

        def launch(*args: Any) -> Any:
            self.counts[name] += 1
            with _disable_current_modes():
                return function(*args)

        return launch


def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """The stock formula."""

    def of(states: Tensor) -> Tensor:
        first, second = states.chunk(2, dim=-1)
        return states * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]

    return of(query), of(key)


@pytest.mark.parametrize(("kind", "most"), [(LlamaConfig, 13), (Qwen3Config, 17)])
def test_a_layer_is_few_launches(kind: Callable[..., Any], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[Counter[str]] = []
    for layers in (4, 5):
        plain, model = (tiny(kind, layers).to(torch.bfloat16) for _ in range(2))
        expected = engine_of(plain)
        fuse(model, packed=False)
        merge_launches(model)
        engine = engine_of(model)
        batch = some_batch(engine, 1)
        mode = Launches()
        with monkeypatch.context() as patch:
            patch.setattr(launches, "_launches", lambda _: True)
            patch.setattr(launches_triton, "rotate", mode.one("rotate", rotated))
            patch.setattr(launches_triton, "gate", mode.one("gate", lambda gate, up: nn.functional.silu(gate) * up))
            step = engine.static_step(BUCKET, LAYERS)
            step.inputs.fill(batch, Ragged.of(batch.tails))
            with mode:
                logits = step().logits[: len(batch.logits_to_keep)]
        wanted = expected.forward(batch).logits
        assert (logits - wanted).abs().max() < 0.05 * wanted.abs().max()
        counted.append(mode.counts)
    assert sum((counted[1] - counted[0]).values()) <= most


@pytest.mark.skipif(EFFORT == 1, reason="compiles C++ for a minute; make proof does")
@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
def test_inductor_fuses_a_layer_to_few_launches(
    kind: Callable[..., Any], held: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "prepack", lambda _: None)  # which CPUs alone do
    counted: list[Counter[str]] = []
    for layers in (3, 4):
        model = tiny(kind, layers)
        fuse(model, packed=False)
        step = Compiled(engine_of(model).static_step).step(BUCKET, (1,))
        with torch.backends.mkldnn.flags(enabled=False):
            _, (code, *_) = run_and_get_code(step)
        body = code.partition("def call")[2]
        calls = Counter(re.findall(r"(extern_kernels|tree_attention|cpp_fused)[\w.]*\(", body))
        counted.append(calls + Counter({"tree_attention": 2 * calls["tree_attention"]}))
    assert counted[1]["tree_attention"] == 3 * 4
    assert sum((counted[1] - counted[0]).values()) <= 14


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_replay_what_their_steps_compute(dtype: torch.dtype, llama: PreTrainedModel) -> None:
    engine = engine_of(llama.to("cuda", dtype))
    assert engine.capture() == ""
    captured = engine.runner
    assert isinstance(captured, Graphs)
    memory = torch.cuda.memory_allocated()
    for seed in range(30):
        batch = some_batch(engine, seed, engine.info.feature_layers)
        replayed, ran = (said_by(engine, runner, batch) for runner in (captured, captured.otherwise))
        for again, first in zip(replayed, ran, strict=True):
            assert torch.equal(again, first)
    assert torch.cuda.memory_allocated() - memory < 2**24
