"""The engine says what the model says: packed rows against plain forwards of the same weights."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

from coppice.engine import modules, steps
from coppice.engine.attention import Sdpa, UnsupportedModel, using
from coppice.engine.engine import Engine
from coppice.engine.kv_cache import BlockTable, KVPool, KVShape, OutOfBlocks
from coppice.engine.loading import load_engine
from coppice.engine.modules import fuse, merge_launches
from coppice.engine.rows import PackedBatch, Piece, pack
from coppice.engine.self_check import self_check
from coppice.engine.steps import Bucket, StepInputs, Steps, TappedModel, graph_buckets
from tests.kernels import rotate, tree_attention
from tests.pretend import FREE, LAUNCHES, record
from tests.reference import check_pool

VOCAB = 150
# Larger weights than a fresh model's, so that attention matters to the logits.
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=None),
    "mistral-window": lambda: transformers.MistralConfig(**SMALL, sliding_window=7),
    "gemma": lambda: transformers.GemmaConfig(**SMALL),
    "gemma2": lambda: transformers.Gemma2Config(
        **SMALL, sliding_window=9, query_pre_attn_scalar=12, attn_logit_softcapping=4.0, final_logit_softcapping=9.0
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=256, initializer_range=0.25, bos_token_id=1,
        eos_token_id=2,
    ),
    # They do not hand keyword arguments, or their window, to their attention.
    "stablelm": lambda: transformers.StableLmConfig(**SMALL),
    "phimoe": lambda: transformers.PhimoeConfig(**SMALL, num_local_experts=4, sliding_window=7),
    # Attention of another form: sinks and windows; keys wider than values; a result that is viewed.
    "gpt-oss": lambda: transformers.GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=7),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4, "head_dim": 4}, q_lora_rank=16, kv_lora_rank=12, qk_rope_head_dim=4,
        qk_nope_head_dim=6, v_head_dim=7, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=1,
        topk_group=1, moe_intermediate_size=16, first_k_dense_replace=1,
    ),
    "afmoe": lambda: transformers.AfmoeConfig(
        **SMALL, num_experts=4, num_experts_per_tok=2, num_shared_experts=1, moe_intermediate_size=16,
        num_dense_layers=1, sliding_window=7, global_attn_every_n_layers=3,
    ),
}  # fmt: skip
BACKENDS = ("sdpa", "ordered", "steps")


@cache
def model_of(name: str) -> transformers.PreTrainedModel:
    """The reference: stock attention, never given to an engine."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    model.generation_config.eos_token_id = None
    return model.eval()


def engine_of(name: str, backend: str = "sdpa", kv_tokens: int = 2048, **settings: Any) -> Engine:
    """By `steps` it runs as on a device, the kernels' rules in torch in place of the kernels: see `kernel_rules`."""
    model = copy.deepcopy(model_of(name))
    if backend == "steps":
        fuse(model, packed=False)
        merge_launches(model)
    engine = Engine(model, kv_tokens=kv_tokens, block_size=8, invariant=backend == "ordered", **settings)
    if backend == "steps":
        engine.steps = Steps(TappedModel(model, engine.info.layers), engine.pool, engine.layout.group)
    return engine


@pytest.fixture(autouse=True)
def kernel_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' rules in torch in place of the kernels."""
    monkeypatch.setattr(steps, "tree_attention", tree_attention)
    monkeypatch.setattr(modules, "rotate", rotate)


def some_ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=count)


def plain_logits(name: str, ids: list[int]) -> Tensor:
    """(len(ids), V): one causal forward of the stock model."""
    with torch.inference_mode():
        return model_of(name)(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def prefill(engine: Engine, session: str, ids: list[int], chunk: int = 1000) -> tuple[BlockTable, Tensor]:
    """A session that holds ids, and the logits (V,) after the last of them."""
    table = engine.pool.allocate(session, len(ids))
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        logits = engine.forward(pack([Piece.chain(table, start, part, [len(part) - 1])])).logits
    return table, logits[0]


class Tree:
    """A random tree of n rows; every row hangs below one of `reach` earlier ones."""

    def __init__(self, rows: int, seed: int, reach: int = 4) -> None:
        choose = random.Random(seed)
        self.tokens = some_ids(rows, seed)
        self.parents = [-1] + [choose.randrange(max(0, row - reach), row) for row in range(1, rows)]
        self.depths = [len(self.path(row)) - 1 for row in range(rows)]

    def path(self, row: int) -> list[int]:
        return ([] if self.parents[row] < 0 else self.path(self.parents[row])) + [row]

    def text(self, row: int) -> list[int]:
        return [self.tokens[step] for step in self.path(row)]

    def piece(self, engine: Engine, table: BlockTable, prefix_len: int) -> Piece:
        engine.pool.extend(table, prefix_len + len(self.tokens))
        return Piece(table, prefix_len, self.tokens, self.parents, self.depths, range(len(self.tokens)))


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    assert actual.argmax(-1).tolist() == expected.argmax(-1).tolist()


def check_rows(logits: Tensor, name: str, texts: list[list[int]]) -> None:
    """Rows say what plain forwards of their whole texts say."""
    assert_same(logits, torch.stack([plain_logits(name, text)[-1] for text in texts]))


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *product(("sdpa", "steps"), CONFIGS),
        *(("ordered", name) for name in ("qwen3", "mistral-window", "gemma2", "gpt2")),
    ],
)
def test_rows_say_what_plain_forwards_of_their_texts_say(backend: str, name: str) -> None:
    """Sessions of several lengths, some in scattered blocks: trees, chains longer than windows and plain steps, alone
    and beside a prompt's chunk, before and after the KV of accepted paths was moved.
    """
    engine, texts = engine_of(name, backend), [some_ids(length, length) for length in (61, 5, 17, 1)]
    self_check(engine)
    tables = []
    for number, text in enumerate(texts):
        table, logits = prefill(engine, f"s{number}", text, chunk=10)
        check_rows(logits[None], name, [text])
        tables.append(table)
    for table in tables[::2]:
        force_scattered(engine, table)
    for seed in range(2):
        trees = [Tree(14, seed), Tree(1, 9 + seed), Tree(20, seed, reach=1), Tree(6, 5 + seed)]
        lengths = [len(text) for text in texts]
        pieces = [tree.piece(engine, *place) for tree, *place in zip(trees, tables, lengths, strict=True)]
        paths = [
            [text + tree.text(row) for row in range(len(tree.tokens))] for tree, text in zip(trees, texts, strict=True)
        ]
        check_rows(engine.forward(pack(pieces[:1])).logits, name, paths[0])
        prompt = some_ids(70, 40 + seed)
        chunk = Piece.chain(engine.pool.allocate(f"p{seed}", 70), 0, prompt, [69])
        beside = engine.forward(pack([*pieces[:2], chunk, *pieces[2:]])).logits
        check_rows(beside, name, [*paths[0], *paths[1], prompt, *paths[2], *paths[3]])
        kept = [tree.path(len(tree.tokens) - 1) for tree in trees]
        engine.pool.compact(zip(tables, lengths, kept, strict=True))
        texts = [path[-1] for path in paths]
        assert [table.num_tokens for table in tables] == [*map(len, texts)]
    assert [table.consecutive for table in tables[::2]] == [False, False]


def force_scattered(engine: Engine, table: BlockTable) -> None:
    """Have another session take the block right after the session's, so that it must grow elsewhere."""
    pool = engine.pool
    others = [pool.allocate(f"other {table.session} {n}", 1) for n in range(pool.free_tokens // pool.block_size)]
    for other in others:
        if other.blocks[0] != table.blocks[-1] + 1:
            pool.free(other)
    pool.extend(table, table.capacity + 1)


class Levels:
    """A random tree below a prefix, one level a forward; rows lie behind the prefix in the order of their levels."""

    def __init__(self, engine: Engine, name: str, prefix: list[int], seed: int) -> None:
        self.tree, self.prefix = Tree(20, seed, reach=2), prefix
        self.table: BlockTable = prefill(engine, name, prefix)[0]
        engine.pool.extend(self.table, len(prefix) + 20)
        depths = self.tree.depths
        self.levels = [[row for row in range(20) if depths[row] == depth] for depth in range(max(depths) + 1)]

    def piece(self, level: int) -> Piece:
        """The rows of one level; the first is the root, which continues the prefix."""
        rows, tokens = self.levels[level], [self.tree.tokens[row] for row in self.levels[level]]
        done = [row for earlier in self.levels[:level] for row in earlier]
        visible = np.array([np.isin(done, self.tree.path(row)) for row in rows])
        positions = len(self.prefix) + np.array([self.tree.depths[row] for row in done], np.int64)
        parents, depths = [-1] * len(rows), [level] * len(rows)
        return Piece(self.table, len(self.prefix), tokens, parents, depths, range(len(rows)), (visible, positions))

    def expected(self, name: str, level: int) -> Tensor:
        """(rows, V) from a plain causal forward over prefix and path of each row."""
        return torch.stack([plain_logits(name, self.prefix + self.tree.text(row))[-1] for row in self.levels[level]])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2"])
def test_levels_of_a_tree_say_what_plain_forwards_of_their_paths_say(name: str, backend: str) -> None:
    """A level a forward: of one session in scattered blocks, then of several packed; paths are longer than windows."""
    engine = engine_of(name, backend)
    grown, *others = (
        Levels(engine, f"s{seed}", some_ids(length, seed), seed) for seed, length in ((7, 20), (0, 3), (1, 40))
    )
    force_scattered(engine, grown.table)
    assert len(grown.levels) > 9
    for level in range(len(grown.levels)):
        assert_same(engine.forward(pack([grown.piece(level)])).logits, grown.expected(name, level))
        packed = [grown, *(other for other in others if level < len(other.levels))]
        logits = engine.forward(pack([levels.piece(level) for levels in packed])).logits
        assert_same(logits, torch.cat([levels.expected(name, level) for levels in packed]))


def test_only_the_rows_asked_for_have_logits() -> None:
    engine, tree = engine_of("qwen3"), Tree(9, seed=2)
    table, _ = prefill(engine, "a", some_ids(12))
    piece = tree.piece(engine, table, 12)
    every = engine.forward(pack([piece])).logits
    for keep in ([0, 3, 8], []):
        assert_same(engine.forward(pack([replace(piece, keep=keep)])).logits, every[keep])


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt2"])
def test_features_are_the_hidden_states_of_a_plain_forward(name: str) -> None:
    config = CONFIGS[name]()
    config.num_hidden_layers = 6
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    engine = Engine(copy.deepcopy(model), kv_tokens=256)
    assert engine.info.feature_layers == (2, 3, 4)
    ids = some_ids(25)
    with torch.inference_mode():
        hidden = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    table = engine.pool.allocate("a", 25)
    chunks = [Piece.chain(table, 0, ids[:20]), Piece.chain(table, 20, ids[20:])]
    for layers in ((0,), (2, 3, 3), (1, 5)):
        features: list[Any] = [engine.forward(pack([chunk], layers)).features for chunk in chunks]
        expected = torch.cat([hidden[layer][0] for layer in layers], dim=-1)
        torch.testing.assert_close(torch.cat(features), expected, atol=1e-4, rtol=1e-4)
    assert engine.forward(pack(chunks[1:])).features is None


def test_an_unknown_attention_argument_is_refused() -> None:
    engine = engine_of("llama")
    table = engine.pool.allocate("a", 1)
    attention = Sdpa(pack([Piece.chain(table, 0, [5])]).tails, engine.pool)
    row = torch.tensor([[5]])
    with torch.inference_mode(), using(attention):
        engine.model(input_ids=row, position_ids=row, use_cache=False)
        with pytest.raises(UnsupportedModel, match="position_bias"):
            engine.model(input_ids=row, position_ids=row, use_cache=False, position_bias=torch.zeros(4))
        with pytest.raises(UnsupportedModel, match="causal"):
            engine.model(input_ids=row, position_ids=row, use_cache=False, is_causal=False)


def test_a_folder_is_loaded_checked_and_described(tmp_path: Path) -> None:
    model = copy.deepcopy(model_of("gemma2"))
    model.generation_config.eos_token_id = [2, 5]
    model.save_pretrained(tmp_path)
    engine = load_engine(tmp_path, kv_tokens=100)
    info = engine.info
    assert (info.vocab_size, info.context.tokens, info.layers, info.hidden_size) == (VOCAB, 256, 3, 32)
    assert (info.eos_ids, info.dtype, engine.pool.free_tokens) == ((2, 5), "float32", 128)
    assert engine.timing(4, sessions=2, context=10, repeats=2) > 0
    assert engine.speed() == ""
    assert "of weights at" in engine.speed(summed=64)
    assert engine.pool.free_tokens == engine.pool.spare
    assert load_engine(tmp_path, kv_tokens=256, dtype="bfloat16").info.dtype == "bfloat16"


@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="the system shows no maps")
def test_what_a_folders_file_holds_is_in_memory_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "pays", lambda _: torch.backends.mkldnn.is_available())
    model = model_of("llama")
    model.save_pretrained(tmp_path)
    engine = load_engine(tmp_path, kv_tokens=256)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    ids = some_ids(9)
    assert_same(prefill(engine, "a", ids)[1], plain_logits("llama", ids)[-1])


# The pool.


@pytest.fixture
def pool() -> Iterator[KVPool]:
    pool = KVPool(layers=[KVShape(1, 4, 4), KVShape(2, 6, 3)], tokens=64 * 8, block_size=8)
    yield pool
    check_pool(pool)


def test_accounting_is_exact_and_returns_to_zero(pool: KVPool) -> None:
    choose, tables = random.Random(0), {}
    for step in range(600):
        session = f"s{choose.randrange(12)}"
        table = tables.get(session)
        try:
            if table is None:
                tables[session] = pool.allocate(session, choose.randrange(1, 80))
            elif choose.random() < 0.3:
                pool.free(tables.pop(session))
            else:
                pool.extend(table, table.num_tokens + choose.randrange(20))
        except OutOfBlocks:
            pass
        check_pool(pool)
        assert pool.used_tokens == sum(table.num_tokens for table in tables.values())
        assert pool.spare - pool.free_tokens == 8 * sum(len(table.blocks) for table in tables.values()), step
    with pytest.raises(ValueError, match="already"):
        pool.allocate(next(iter(tables)), 10)
    for table in tables.values():
        pool.free(table)
    with pytest.raises(ValueError, match="no such"):
        pool.free(table)
    assert (pool.used_tokens, pool.free_tokens) == (0, 512)


def test_a_few_growing_sessions_stay_consecutive(pool: KVPool) -> None:
    tables = [pool.allocate(f"s{s}", 8) for s in range(4)]
    for length in range(9, 60):
        for table in tables:
            pool.extend(table, length)
    assert all(table.consecutive for table in tables)


def test_compaction_moves_every_layer_and_skips_what_lies_right(pool: KVPool) -> None:
    table = pool.allocate("a", 30)
    slots = torch.from_numpy(table.slots(np.arange(30)))
    stored = [part for layer in pool.layers for part in layer]
    for number, part in enumerate(stored):
        part[slots] = 100.0 * number + torch.arange(30.0)[:, None, None].expand(30, *part.shape[1:])
    pool.compact([(table, 10, [0, 1, 3, 6, 7])])
    for number, part in enumerate(stored):
        assert (part[slots[:15], -1, -1] - 100 * number).tolist() == [*range(12), 13, 16, 17]
    assert [tuple(part.shape[1:]) for part in stored] == [(1, 4), (1, 4), (2, 6), (2, 3)]
    views = pool.read(8, 16)
    assert all(torch.equal(view[0].transpose(0, 1), part[8:24]) for view, part in zip(views, stored, strict=True))
    before = [part.clone() for part in stored]
    pool.compact([(table, 10, [0, 1, 2])])
    assert all(map(torch.equal, stored, before))
    assert table.num_tokens == 13


# Steps over inputs at fixed addresses: they say what the engine says of the same batch, in few launches.

LAYERS = (1, 3)
BUCKET = Bucket(rows=48, sessions=4, tail=16, blocks=8, kept=48)


def full_engine_of(model: PreTrainedModel) -> Engine:
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


@pytest.fixture
def llama() -> PreTrainedModel:
    return tiny(LlamaConfig, 4)


def tiny(kind: Callable[..., Any], layers: int) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(kind(**{**SMALL, "num_hidden_layers": layers}))


def test_a_batch_goes_to_the_smallest_graph_that_holds_it(llama: PreTrainedModel, recorded: None) -> None:
    engine = full_engine_of(llama)
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
    engine = full_engine_of(llama)
    runs, batch = steps_of(engine), some_batch(engine, 3)

    def record(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(Steps, "record", record)
    assert runs.capture([BUCKET], LAYERS) == "RuntimeError: operation not permitted when stream is capturing"
    torch.testing.assert_close(answers(engine, runs, batch), answers(engine, None, batch), rtol=1e-4, atol=1e-4)


def test_a_step_without_a_batch_writes_to_no_session(llama: PreTrainedModel) -> None:
    engine = full_engine_of(llama)
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
        expected = full_engine_of(plain)
        fuse(model, packed=False)
        merge_launches(model)
        engine = full_engine_of(model)
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
    engine = full_engine_of(llama.to("cuda", dtype))
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
