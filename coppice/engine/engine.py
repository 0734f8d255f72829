"""The target behind one boundary: forward(PackedBatch) -> logits and features. Knows nothing of requests or sampling.

Everything here, loading included, runs on one thread of the caller's choice: two OpenMP pools fight.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from coppice.engine.attention import UnsupportedModel, using
from coppice.engine.attention_plan import plan_forward
from coppice.engine.batch import PackedBatch, Piece, pack
from coppice.engine.context import Context
from coppice.engine.direct import call_directly
from coppice.engine.fingerprint import fingerprint
from coppice.engine.kv_cache import BLOCK_SIZE, BlockTable, KVPool
from coppice.engine.kv_layout import read_layout
from coppice.engine.linear import fuse, prepack

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

    forward_ns: time inside the model's forward, nanoseconds.
    """

    logits: Tensor
    features: Tensor | None
    forward_ns: int


class Engine:
    """A causal language model with a paged KV pool."""

    def __init__(self, model: PreTrainedModel, *, kv_tokens: int, block_size: int = BLOCK_SIZE) -> None:
        """Take over a model: it attends through the pool, of `kv_tokens`, from now on. Raises UnsupportedModel."""
        self.model = model.train(False).requires_grad_(False)
        layout = read_layout(model)
        self.layout = layout
        self.pool = KVPool(
            layers=layout.layers,
            tokens=kv_tokens,
            block_size=block_size,
            dtype=model.dtype,
            device=model.device,
        )
        count = len(layout.layers)
        self._decoder_layers = _decoder_layers(model, count)
        self._tapped: tuple[int, ...] = ()
        self._taps: list[RemovableHandle] = []  # one for each layer of `_tapped`
        self._hidden: dict[int, Tensor] = {}
        self.info = EngineInfo(
            vocab_size=layout.vocab_size,
            context=Context.of(model.config.get_text_config(), kv_tokens),
            layers=count,
            hidden_size=model.config.get_text_config().hidden_size,
            eos_ids=_eos_ids(model),
            dtype=str(model.dtype).removeprefix("torch."),
            feature_layers=default_feature_layers(count),
            weights_hash=fingerprint(model),
        )
        fuse(model)
        prepack(model)
        # Their inputs are hidden states that hooks keep.
        output: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        call_directly(model, {*self._decoder_layers, output})

    def forward(self, batch: PackedBatch) -> ForwardOutput:
        """One pass over all rows; their keys and values are in the pool afterwards.

        The tables have room for the rows of all pieces. Raises ValueError for feature layers the model does not
        have.
        """
        for index in batch.feature_layers:
            # The last hidden state is left out: transformers gives it after the final norm.
            if not 0 <= index < self.info.layers:
                raise ValueError(f"feature layer {index} is not among 0..{self.info.layers - 1} of this model")
        device = self.pool.device
        # All rows wanted is the common case, and then nothing needs picking.
        keep: int | Tensor = 0 if len(batch.logits_to_keep) == len(batch.tokens) else batch.logits_to_keep.to(device)
        with torch.inference_mode():
            plans = plan_forward(batch, self.pool, self.layout.groups)
            tokens, positions = batch.tokens.to(device)[None], batch.positions.to(device)[None]
            start = time.perf_counter_ns()
            self._tap(batch.feature_layers)
            with using(plans.__getitem__):
                logits = self.model(
                    input_ids=tokens,
                    attention_mask=_present(len(batch.tokens), device),
                    position_ids=positions,
                    use_cache=False,
                    logits_to_keep=keep,
                ).logits
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            forward_ns = time.perf_counter_ns() - start
            wanted = tuple(map(self._hidden.__getitem__, batch.feature_layers))
            self._hidden.clear()
            features = torch.cat(wanted, dim=-1)[0] if wanted else None
        return ForwardOutput(logits[0], features, forward_ns)

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
                    self.forward(batch)
                    took.append(time.perf_counter_ns() - start)
            finally:
                for table in tables:
                    self.pool.free(table)
            timings[count] = int(statistics.median(took))
        return timings

    def _tap(self, wanted: tuple[int, ...]) -> None:
        """Have forwards leave these hidden states in `_hidden`: layer i's input is hidden_states[i]. Most forwards want
        those of the one before.
        """
        if wanted == self._tapped:
            return
        for handle in self._taps:
            handle.remove()

        def tap(index: int) -> RemovableHandle:
            def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                self._hidden[index] = args[0] if args else kwargs["hidden_states"]

            return self._decoder_layers[index].register_forward_pre_hook(keep, with_kwargs=True)

        self._tapped, self._taps = wanted, [tap(index) for index in wanted]


@lru_cache(256)
def _present(rows: int, device: torch.device) -> Tensor:
    """(1, rows) true. Says that nothing is padding; without it transformers searches the positions for packed texts of
    its own.
    """
    return torch.ones(1, rows, dtype=torch.bool, device=device)


def default_feature_layers(count: int) -> tuple[int, int, int]:
    """The hidden states that EAGLE-3 and SpecBlock read of a target with `count` layers; 0 is the embeddings.

    They are 2, count // 2 and count - 3, as published, where these are in order: from seven layers on. Below, they
    move down and apart until they are three that exist; a target of fewer than three layers repeats one.
    """
    low = max(0, min(2, count - 3))
    middle = min(max(low + 1, count // 2), count - 1)
    return low, middle, min(max(middle + 1, count - 3), count - 1)


def _decoder_layers(model: PreTrainedModel, count: int) -> nn.ModuleList:
    """The text model's outermost list of `count` modules: lists inside a layer (experts) come later in the walk, and a
    vision tower, which may be as deep, is outside the decoder.
    """
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    for module in chain(decoder.modules(), model.modules()):  # some call their output layer the decoder
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UnsupportedModel(f"{type(model).__name__} has no list of {count} decoder layers")


def _eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    for config in (model.generation_config, model.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
    return ()
