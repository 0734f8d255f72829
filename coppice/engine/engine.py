"""The target behind one boundary: forward(PackedBatch) -> logits and features. Knows nothing of requests or sampling.

Everything here, loading included, runs on one thread of the caller's choice: two OpenMP pools fight.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from coppice.config.model_size import GIB
from coppice.engine.attention import using
from coppice.engine.attention_plan import any_order, plan_forward
from coppice.engine.batch import PackedBatch, Piece, pack
from coppice.engine.clock import Clock
from coppice.engine.context import Context
from coppice.engine.graphs import Eager, Runner, best_runner, graph_buckets
from coppice.engine.kv_cache import BLOCK_SIZE, BlockTable, KVPool
from coppice.engine.kv_layout import read_layout
from coppice.engine.launches import merge_launches
from coppice.engine.linear import fuse, prepack, weight_bytes
from coppice.engine.ordered_plan import by_row, ordered_plans
from coppice.engine.ragged import Bucket, Ragged, padded
from coppice.engine.static import StaticStep, Taps

_RUN = 64  # words that are summed to one
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def fingerprint(model: nn.Module) -> bytes:
    """SHA-256 over every parameter's and buffer's name, dtype, shape, and the sums of its bits as integers.

    Each sum is of 64 words that lie one behind the other, so that rows which change places are noticed too. Sums of
    integers do not depend on their order: every device and number of threads finds the same. It tells loads apart that
    differ by mistake; somebody who means harm could make two that it takes for one. Of a model whose tensors lie on
    several ranks each finds what one that has it all does; they have to ask together.
    """
    digest = hashlib.sha256()
    with torch.inference_mode():
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            words = _words(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
            end = len(words) // _RUN * _RUN
            for sums in (words[:end].view(-1, _RUN).sum(1), words[end:]):
                digest.update(sums.cpu().numpy().tobytes())
    return digest.digest()


def _words(tensor: Tensor) -> Tensor:
    """A tensor's bits as the widest integers that it can be cut into, (n,)."""
    flat = tensor.contiguous().reshape(-1)
    width = next(width for width in _WORDS if flat.nbytes % width == 0)
    if flat.storage_offset() * flat.element_size() % width:
        flat = flat.clone()
    return flat.view(_WORDS[width])


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def call_directly(model: nn.Module, hooked: Collection[nn.Module] = ()) -> None:
    """Have a model's modules called as their `forward`, and their parts found as plain attributes.

    A call of nn.Module looks into four dictionaries for hooks, and a part is searched in three more; all these are cold
    whenever the weights of a layer have gone through the caches. Left to torch are modules that are `hooked` later or
    already, those that are called in a way of their own, whole models, which transformers knows by their class, and
    buffers, which some modules replace. A part is still replaced by assignment, and by nothing else.
    """
    for module in model.modules():
        kind: Any = type(module)
        replaced = "forward" in module.__dict__  # such a forward may exchange the module's parameters meanwhile
        module.__dict__.update(module._modules if replaced else module._modules | module._parameters)
        own = replaced or kind.__call__ is not nn.Module.__call__
        watched = module in hooked or any(map(module.__dict__.get, _HOOKS))
        if not (own or watched or isinstance(module, PreTrainedModel)):
            module.__class__ = _direct(kind)


@cache
def _direct(kind: type[nn.Module]) -> type[nn.Module]:
    """The class with its `forward` as the call."""
    return type(kind.__name__, (kind,), {"__call__": kind.forward, "__module__": kind.__module__})


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class EngineInfo:
    """What is served. vocab_size is the width of the logits: every token id is below it."""

    vocab_size: int
    context: Context
    layers: int
    hidden_size: int
    eos_ids: tuple[int, ...]
    dtype: str
    feature_layers: tuple[int, ...]  # those drafters want by default
    weights_hash: bytes  # the fingerprint of what was loaded

    @property
    def max_context(self) -> int:
        """Tokens of the longest text."""
        return self.context.tokens


@dataclass(frozen=True)
class ForwardOutput:
    """logits: (R, V). features: (T, len(feature_layers) * H), or None when none were asked for; both model dtype.

    beside: the numbers that were sent along, where the logits are. On CUDA a forward may still be under way, and the
    next one overwrites all three.
    """

    logits: Tensor
    features: Tensor | None
    clock: Clock
    beside: Tensor | None = None

    @property
    def forward_ns(self) -> int:
        """Time inside the model's forward, nanoseconds. Waits until it is over."""
        return self.clock.ns


class Engine:
    """A causal language model with a paged KV pool."""

    bits_hash: bytes = b""
    """of what some rows say, once it is known that bits depend on a row's text alone"""
    memory: str = ""
    """what takes how much of it"""

    def __init__(
        self, model: PreTrainedModel, *, kv_tokens: int, block_size: int = BLOCK_SIZE, invariant: bool = False
    ) -> None:
        """Take over a model: it attends through the pool, of `kv_tokens`, from now on. Raises UnsupportedModel.

        invariant: a row's bits depend on the tokens up to it alone, where `check_invariant` finds no fault.
        """
        self.model = model.train(False).requires_grad_(False)
        on_gpu = model.device.type == "cuda"
        layout = read_layout(model)
        self.layout = layout
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
        count = len(layout.layers)
        self._taps = Taps(model, count)
        self.tell: Callable[[PackedBatch], None] | None = None
        """has a model's other ranks do the forward that this one is about to do"""
        self.info = EngineInfo(
            vocab_size=layout.vocab_size,
            context=Context.of(model.config.get_text_config(), kv_tokens),
            layers=count,
            hidden_size=model.config.get_text_config().hidden_size,
            eos_ids=_eos_ids(model),
            dtype=str(model.dtype).removeprefix("torch."),
            feature_layers=default_feature_layers(count),
            weights_hash=weights_hash,
        )
        self.runner: Runner | None = Eager(self.static_step) if on_gpu else None  # None: by the batch's own plan
        if not (invariant and on_gpu):
            fuse(model, packed=not on_gpu)
        prepack(model)
        self.invariant = invariant
        if invariant:
            by_row(model)
        kv = sum(keys.nbytes + values.nbytes for keys, values in self.pool.layers)
        self.memory = (
            f"weights {weights / GIB:.2f} GiB, copies of them for products {(weight_bytes(model) - weights) / GIB:.2f} "
            f"GiB, KV of {kv_tokens} tokens {kv / GIB:.2f} GiB"
        )
        if on_gpu:
            merge_launches(model)
        # Their inputs are hidden states that hooks keep.
        output: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        call_directly(model, {*self._taps.layers, output})

    @property
    def on_device(self) -> bool:
        """Whether what a forward answers lies elsewhere than in the host's memory."""
        return self.pool.device.type != "cpu"

    def forward(self, batch: PackedBatch, beside: NDArray[np.int64] | None = None) -> ForwardOutput:
        """One pass over all rows; their keys and values are in the pool afterwards.

        The tables have room for the rows of all pieces. beside: numbers for whoever reads the output, at most BESIDE a
        row, which come to a device with what the forward reads. Raises ValueError for feature layers the model does
        not have.
        """
        for index in batch.feature_layers:
            # The last hidden state is left out: transformers gives it after the final norm.
            if not 0 <= index < self.info.layers:
                raise ValueError(f"feature layer {index} is not among 0..{self.info.layers - 1} of this model")
        if self.tell is not None:
            self.tell(batch)
        if self.runner is not None:
            return self._run_static(self.runner, batch, beside)
        # All rows wanted is the common case, and then nothing needs picking.
        keep: int | Tensor = 0 if len(batch.logits_to_keep) == len(batch.tokens) else batch.logits_to_keep
        with torch.inference_mode():
            plans = plan_forward(batch, self.pool, self.layout.groups, ordered_plans if self.invariant else any_order)
            clock = Clock(self.pool.device)
            self._taps.want(batch.feature_layers)
            with using(plans.__getitem__):
                logits = self.model(
                    input_ids=batch.tokens[None],
                    attention_mask=_present(len(batch.tokens)),
                    position_ids=batch.positions[None],
                    use_cache=False,
                    logits_to_keep=keep,
                ).logits
            clock.stop()
            features = self._taps.take()
        return ForwardOutput(logits[0], features, clock, None if beside is None else torch.from_numpy(beside))

    def _run_static(self, runner: Runner, batch: PackedBatch, beside: NDArray[np.int64] | None) -> ForwardOutput:
        ragged = Ragged.of(batch.tails)
        step = runner.step(Bucket.of(batch, ragged), batch.feature_layers)
        told = step.inputs.fill(batch, ragged, beside)
        clock = Clock(self.pool.device)
        logits, features = step()
        clock.stop()
        if features is not None and step.feature_layers != batch.feature_layers:
            parts = features.chunk(len(step.feature_layers), dim=-1)
            wanted = [parts[step.feature_layers.index(layer)] for layer in batch.feature_layers]
            features = torch.cat(wanted, dim=-1) if wanted else None
        kept, rows = len(batch.logits_to_keep), len(batch.tokens)
        return ForwardOutput(logits[:kept], None if features is None else features[:rows], clock, told)

    def static_step(self, bucket: Bucket, feature_layers: tuple[int, ...]) -> StaticStep:
        """A step of this model for any batch that a bucket holds."""
        return StaticStep(self.model, self.pool, self.layout.groups, self._taps, bucket, feature_layers)

    def capture(self) -> str:
        """Have a CUDA device replay graphs of the steps from now on; returns why it cannot, "" when it does."""
        blocks = padded(-(-min(self.info.max_context, self.pool.spare) // self.pool.block_size))
        self.runner, why = best_runner(self.static_step, graph_buckets(blocks), self.info.feature_layers)
        return why

    def timings(
        self, rows: Sequence[int], *, sessions: int = 1, context: int = 300, repeats: int = 15
    ) -> dict[int, int]:
        """Median nanoseconds of a bare forward, plan included, for each number of rows a session.

        Borrows room for sessions * (context + rows) tokens from the pool; raises OutOfBlocks when there is none.
        """
        timings: dict[int, int] = {}
        for count in rows:
            tables: list[BlockTable] = []
            try:
                tables += (self.pool.allocate(f"timing-{s}", context + count) for s in range(sessions))
                batch = pack([Piece.chain(table, context, [0] * count, range(count)) for table in tables])
                took: list[int] = []
                for _ in range(repeats):
                    start = time.perf_counter_ns()
                    self.forward(batch).clock.wait()
                    took.append(time.perf_counter_ns() - start)
            finally:
                for table in tables:
                    self.pool.free(table)
            timings[count] = int(statistics.median(took))
        return timings


@lru_cache(256)
def _present(rows: int) -> Tensor:
    """(1, rows) true. Says that nothing is padding; without it transformers searches the positions for packed texts of
    its own.
    """
    return torch.ones(1, rows, dtype=torch.bool)


def default_feature_layers(count: int) -> tuple[int, int, int]:
    """The hidden states that EAGLE-3 and SpecBlock read of a target with `count` layers; 0 is the embeddings.

    They are 2, count // 2 and count - 3, as published, where these are in order: from seven layers on. Below, they
    move down and apart until they are three that exist; a target of fewer than three layers repeats one.
    """
    low = max(0, min(2, count - 3))
    middle = min(max(low + 1, count // 2), count - 1)
    return low, middle, min(max(middle + 1, count - 3), count - 1)


def _eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    for config in (model.generation_config, model.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
    return ()
