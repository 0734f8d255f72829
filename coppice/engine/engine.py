"""The target behind one boundary: forward(PackedBatch) -> logits and features. Knows nothing of requests or sampling.

Everything here, loading included, runs on one thread of the caller's choice: two OpenMP pools fight.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from coppice.config.model import GIB
from coppice.engine.attention import NAME, Attention, Layer, LayerMask, Sdpa, UnsupportedModel, one_line
from coppice.engine.attention import using as attending
from coppice.engine.kv_cache import KVPool, KVShape
from coppice.engine.modules import call_directly, fuse, merge_launches, merge_norms, prepack, weight_bytes
from coppice.engine.ordered import Ordered, by_row
from coppice.engine.rows import PackedBatch, Piece, Tail, pack
from coppice.engine.states import Cache, Plan, Probe, States, adopt, using
from coppice.engine.steps import Steps, TappedModel, graph_buckets, padded
from coppice.limits import BLOCK_SIZE, MAX_CONTEXT

R = TypeVar("R")
_SUMMED, _TURNS = 1 << 26, 5  # numbers of 4 bytes, more than caches hold
_RUN = 512  # bytes, 64 words that are summed to one


def fingerprint(model: nn.Module) -> bytes:
    """SHA-256 over every parameter's and buffer's name, dtype, shape, and the sums of its bits as integers.

    Each sum is of 64 words in a row, so that rows which change places are noticed too, and the same on every device and
    with any number of threads. It tells loads apart that differ by mistake, not by malice. The ranks of a model have to
    ask together; each finds what one that has it all does.
    """
    digest = hashlib.sha256()
    with torch.inference_mode():
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            data = whole.contiguous().reshape(-1).view(torch.uint8)
            if data.storage_offset() % 8:
                data = data.clone()
            end = len(data) // _RUN * _RUN
            for part in (data[:end].view(torch.int64).view(-1, _RUN // 8).sum(1), data[end:]):
                digest.update(part.cpu().numpy().tobytes())
    return digest.digest()


class Clock:
    """Runs work and adds up how long it takes: on a CUDA device what the device does, in the order of the stream."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []  # nanoseconds, or events

    def __call__(self, work: Callable[..., R], *inputs: Any) -> R:
        start = self._now()
        outputs = work(*inputs)
        self._spans.append((start, self._now()))
        return outputs

    def taken(self) -> int:
        """Nanoseconds of all work since this was last asked; waits until a device is done with it."""
        spans, self._spans = self._spans, []
        took = 0
        for start, end in spans:
            if self._on_cuda:
                end.synchronize()
            took += int(start.elapsed_time(end) * 1e6) if self._on_cuda else end - start
        return took

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter_ns()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Context:
    """A number of positions, and what it was cut by where the configuration promises more."""

    tokens: int
    cut_by: str = ""

    @classmethod
    def of(cls, config: Any, otherwise: int) -> Context:
        """What a text model's configuration allows; `otherwise` where it names no limit."""
        promised = longest = int(getattr(config, "max_position_embeddings", None) or otherwise)
        cut_by = ""
        rope = getattr(config, "rope_parameters", None) or {}
        # Where kinds of layers differ, each has parameters of its own.
        for kind in [rope] if "rope_type" in rope else filter(None, rope.values()):
            first = int(kind.get("original_max_position_embeddings") or longest)
            # These depend on the longest text of a batch: beyond their first length, sessions would change each other.
            if kind.get("rope_type") in ("dynamic", "longrope") and first < longest:
                longest = first
                cut_by = f"rope kind {kind['rope_type']} would let longer texts change each other; {promised} promised"
        return cls(longest, cut_by)

    def served(self, kv_tokens: int) -> Context:
        """What a verifier with so many KV tokens serves of it."""
        room = kv_tokens // BLOCK_SIZE * BLOCK_SIZE
        if min(room, MAX_CONTEXT) >= self.tokens:
            return self
        return Context(room, f"verifier.kv_tokens is {kv_tokens}") if room < MAX_CONTEXT else Context(MAX_CONTEXT)

    def __str__(self) -> str:
        return f"{self.tokens} tokens ({self.cut_by})" if self.cut_by else f"{self.tokens} tokens"


@dataclass(frozen=True)
class EngineInfo:
    """What is served. vocab_size is the width of the logits: every token id is below it."""

    vocab_size: int
    context: Context  # of the longest text
    layers: int
    hidden_size: int
    eos_ids: tuple[int, ...]
    dtype: str
    feature_layers: tuple[int, ...]  # those drafters want by default
    weights_hash: bytes  # the fingerprint of what was loaded


@dataclass(frozen=True)
class ForwardOutput:
    """logits: (R, V). features: (T, len(feature_layers) * H), or None when none were asked for; both model dtype.

    On CUDA a forward may still be under way, and the next one overwrites both.
    """

    logits: Tensor
    features: Tensor | None
    clock: Clock

    @cached_property
    def forward_ns(self) -> int:
        """Time inside the model's forward, nanoseconds. Waits until it is over."""
        return self.clock.taken()


class KVLayout:
    """What a model's attention needs of the pool, noted in a forward that it answers with zeros.

    layers: what each layer keeps of a token, nothing where it does not attend. windows: those that some layer has, None
    being none. group: the most query heads that a layer has for each key head. vocab_size: the width of the logits.
    states: the layers that keep a state of the text, and what each keeps.
    """

    def __init__(self) -> None:
        self.layers: list[KVShape] = []
        self.numbers: list[int] = []
        self.windows: set[int | None] = set()
        self.group, self.vocab_size = 1, 0
        self.states: list[tuple[Any, Cache]] = []

    def attend(self, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        (_, heads, rows, dim), (_, kv_heads, *kept) = query.shape, key.shape
        if value.shape[1] != kv_heads or heads % kv_heads or kept != [rows, dim] or value.shape[2] != rows:
            raise UnsupportedModel(f"layer {layer.number} attends with {heads} heads from {key.shape} to {value.shape}")
        self.layers.append(KVShape(kv_heads, dim, value.shape[3]))
        self.numbers.append(layer.number)
        self.windows.add(layer.window)
        self.group = max(self.group, heads // kv_heads)
        return value.new_zeros(1, rows, heads, value.shape[3])


def read_layout(model: PreTrainedModel) -> KVLayout:
    """Run one row through a model, on the meta device too, whose state layers run packed from then on. Raises
    UnsupportedModel where a pool cannot serve it.
    """
    name = type(model).__name__
    layout, probe = KVLayout(), Probe()
    try:
        keeping = adopt(model)
        if not keeping and getattr(model, "_is_stateful", False):  # as transformers says
            raise UnsupportedModel("it keeps a state of the text in a form that is not known here")
        model.set_attn_implementation(NAME)
        row = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        with torch.inference_mode(), attending(layout), using(probe):
            present = torch.ones_like(row, dtype=torch.bool)
            logits = model(
                input_ids=row, attention_mask=present, position_ids=row, use_cache=False, logits_to_keep=0
            ).logits
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name}: {error}") from None
    except Exception as error:
        reads = isinstance(error, AttributeError | TypeError) and LayerMask.__name__ in str(error)
        reason = "it computes with its mask" if reads else one_line(error)
        raise UnsupportedModel(f"{name} cannot run packed: {reason}") from error
    count = model.config.get_text_config().num_hidden_layers
    places = dict(zip(layout.numbers, layout.layers, strict=True))
    once = len(places) == len(layout.numbers) and places.keys() <= set(range(count))
    if not once or not (keeping or len(places) == count):
        often = "more than once in one" if keeping else "not exactly once in each"
        raise UnsupportedModel(f"{name} attends {often} of its {count} layers")
    layout.layers = [places.get(number, KVShape(0, 0, 0)) for number in range(count)]
    layout.states = [(layer, probe.caches[number]) for number, layer in enumerate(keeping)]
    layout.vocab_size = logits.shape[-1]
    return layout


class Engine:
    """A causal language model with a paged KV pool."""

    bits_hash: bytes = b""  # of what some rows say, once it is known that bits depend on a row's text alone
    memory: str = ""  # what takes how much of it
    states: States | None = None  # of layers that keep one of the text

    def __init__(
        self, model: PreTrainedModel, *, kv_tokens: int, block_size: int = BLOCK_SIZE, invariant: bool = False
    ) -> None:
        """Take over a model: it attends through the pool, of `kv_tokens`, from now on. Raises UnsupportedModel.

        invariant: a row's bits depend on the tokens up to it alone, where `check_invariant` finds no fault.
        """
        self.model = model.train(False).requires_grad_(False)
        on_gpu = model.device.type == "cuda"
        layout = self.layout = read_layout(model)
        weights = weight_bytes(model)
        weights_hash = fingerprint(model)  # while there is room: of a model on several ranks it puts tensors together
        self.pool = KVPool(
            layers=layout.layers,
            tokens=kv_tokens,
            block_size=block_size,
            # In order, CPUs multiply keys and values as float32.
            dtype=torch.float32 if invariant and not on_gpu else model.dtype,
            device=model.device,
        )
        count, ends = len(layout.layers), getattr(model.generation_config, "eos_token_id", None)
        if layout.states:
            self.states = self.pool.states = States(layout.states, model.device, invariant)
        self._tapped = TappedModel(model, count)
        self.tell: Callable[[PackedBatch], None] | None = None  # has other ranks do the forward to come
        self.info = EngineInfo(
            vocab_size=layout.vocab_size,
            context=Context.of(model.config.get_text_config(), kv_tokens),
            layers=count,
            hidden_size=model.config.get_text_config().hidden_size,
            eos_ids=tuple(ends) if isinstance(ends, (list, tuple)) else () if ends is None else (ends,),
            dtype=str(model.dtype).removeprefix("torch."),
            feature_layers=default_feature_layers(count),
            weights_hash=weights_hash,
        )
        self.steps = Steps(self._tapped, self.pool, layout.group) if on_gpu else None
        """of a device; None on the CPU"""
        self._attention: Callable[[Sequence[Tail], KVPool], Attention] = Ordered if invariant else Sdpa
        if not (invariant and on_gpu):
            fuse(model, packed=not on_gpu)
        prepack(model)
        if invariant:
            by_row(model)
        embedding: Any = model.get_input_embeddings()
        output: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self.bytes_read = weight_bytes(model) - (0 if embedding.weight is output.weight else embedding.weight.nbytes)
        kv = sum(keys.nbytes + values.nbytes for keys, values in self.pool.layers)
        self.memory = (
            f"weights {weights / GIB:.2f} GiB, copies of them for products {(weight_bytes(model) - weights) / GIB:.2f} "
            f"GiB, KV of {kv_tokens} tokens {kv / GIB:.2f} GiB"
        )
        if self.states is not None:
            self.memory += f", states {self.states.bytes_each / 2**20:.2f} MiB a session"
        (merge_launches if on_gpu else merge_norms)(model)
        # Their inputs are hidden states that hooks keep.
        call_directly(model, {*self._tapped.layers, output})

    @property
    def on_device(self) -> bool:
        """Whether what a forward answers lies elsewhere than in the host's memory."""
        return self.pool.device.type != "cpu"

    def forward(self, batch: PackedBatch) -> ForwardOutput:
        """One pass over all rows, whose keys and values are in the pool afterwards; the tables have room for them.

        Feature layer i is what layer i reads; behind them come the last one's output and the final norm's.
        """
        if self.tell is not None:
            self.tell(batch)
        run = self.steps.prepare(batch) if self.steps is not None else self._prepare(batch)
        clock = Clock(self.pool.device)
        if self.states is None:
            return ForwardOutput(*clock(run), clock)
        with Plan(self.states, batch).running():
            return ForwardOutput(*clock(run), clock)

    def _prepare(self, batch: PackedBatch) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """As Steps.prepare, on the CPU."""
        with torch.inference_mode():
            attention = self._attention(batch.tails, self.pool)
        # All rows wanted is the common case, and then nothing needs picking.
        keep = 0 if len(batch.logits_to_keep) == len(batch.tokens) else batch.logits_to_keep
        return partial(self._tapped, attention, batch.tokens, batch.positions, keep, batch.feature_layers)

    def capture(self, beside: Sequence[int] = ()) -> str:
        """Have the CUDA device replay graphs of the steps from now on, which also give the feature layers `beside` the
        default ones; returns why it cannot, "" when it does.
        """
        assert self.steps is not None
        if self.states is not None:
            return "the model keeps states of texts, whose rows are stepped level by level"
        blocks = padded(-(-min(self.info.context.tokens, self.pool.spare) // self.pool.block_size))
        return self.steps.capture(graph_buckets(blocks), (*self.info.feature_layers, *beside))

    def timing(self, rows: int, *, sessions: int = 1, context: int = 300, repeats: int = 15) -> int:
        """Median nanoseconds of a forward, plan included, of so many rows a session. Raises OutOfBlocks."""
        with ExitStack() as stack:
            borrowed = (self.pool.borrow(f"timing-{s}", context + rows) for s in range(sessions))
            tables = [stack.enter_context(table) for table in borrowed]
            pieces = [Piece.chain(table, context, [0] * rows, range(rows)) for table in tables]
            if self.states is not None:  # they step over a tree's levels; what they hold changes no time
                above, depths = (
                    [(row - 1) // 2 for row in range(rows)],
                    [row.bit_length() - 1 for row in range(1, rows + 1)],
                )
                pieces = [replace(piece, parents=above, depths=depths, certain=False) for piece in pieces]
                self.states.pretend(tables, context)
            batch = pack(pieces)
            took: list[int] = []
            for _ in range(repeats):
                start = time.perf_counter_ns()
                _ = self.forward(batch).forward_ns  # waits for a device
                took.append(time.perf_counter_ns() - start)
        return int(statistics.median(took))

    def speed(self, rows: int = 16, context: int = 32, summed: int = _SUMMED) -> str:
        """How fast a forward on the CPU reads weights, beside memory, and what rows cost; "" where caches hold them."""
        if self.on_device or self.bytes_read < 4 * summed:
            return ""
        memory, turns = torch.ones(summed), list[tuple[int, ...]]()
        for _ in range(_TURNS):
            start = time.perf_counter_ns()
            memory.sum()
            read = time.perf_counter_ns() - start
            turns.append((read, *(self.timing(count, context=context, repeats=1) for count in (1, rows))))
        reading, row, several = (statistics.median(times) for times in zip(*turns, strict=True))
        return (
            f"a forward of one row reads {self.bytes_read / 1e9:.2f} GB of weights at {self.bytes_read / row:.1f} "
            f"GB/s, memory is read at {memory.nbytes / reading:.1f}; {rows} rows take {several / row:.2f} of its time"
        )


def default_feature_layers(count: int) -> tuple[int, int, int]:
    """The hidden states that EAGLE-3 and SpecBlock read of a target with `count` layers; 0 is the embeddings.

    They are 2, count // 2 and count - 3, as published, where these are in order: from seven layers on. Below, they
    move down and apart until they are three that exist; a target of fewer than three layers repeats one.
    """
    low = max(0, min(2, count - 3))
    middle = min(max(low + 1, count // 2), count - 1)
    return low, middle, min(max(middle + 1, count - 3), count - 1)
