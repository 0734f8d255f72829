"""A forward over inputs at fixed addresses that asks the host for nothing: a CUDA device records it and replays it.

Every batch runs in a bucket, padded to numbers of rows, sessions and blocks of which there are few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from coppice.engine.attention import Attention, Layer, UnsupportedModel, one_line, using
from coppice.engine.kv_cache import KVPool
from coppice.engine.rows import KEY_BLOCK, NOTHING, TILE, Ints, PackedBatch, RowTable, most_splits, tail_blocks

GRAPH_ROWS, GRAPH_TAIL = 768, 64
"""rows, and tail entries of a row, up to which steps are captured: launches of 512 rows take twice an H100's time"""
_STEPS = 32  # inputs that are kept for buckets without a graph, the latest ones


def padded(count: int) -> int:
    """The least size of a bucket that holds `count`: powers of two, and from 64 on also what lies halfway."""
    power = 1 << max(0, count - 1).bit_length()
    return power * 3 // 4 if power >= 128 and count <= power * 3 // 4 else power


def tile_rows(group: int) -> int:
    """Rows of a tile, where each key head has `group` query heads."""
    return max(1, TILE // group)


class Bucket(NamedTuple):
    """What a forward is padded to: rows, sessions, tail entries of a row, blocks of a session, rows with logits."""

    rows: int
    sessions: int
    tail: int
    blocks: int
    kept: int

    @classmethod
    def of(cls, table: RowTable, kept: int) -> Bucket:
        """The least bucket for a batch whose rows see this, so many of which are kept."""
        tail = int((table.length - table.paged).max())
        rows, sessions, blocks, kept = map(padded, (len(table.session), *table.table.shape, kept))
        return cls(rows, sessions, padded(tail) if tail else 0, blocks, kept)

    def holds(self, other: Bucket) -> bool:
        """Whether what fits in `other` fits in this one."""
        return all(mine >= size for mine, size in zip(self, other, strict=True))


class StepInputs:
    """What one forward reads, at fixed addresses on its device, whatever the batch, and how its rows attend: by the
    kernels, which read the pool through the sessions' tables.

    tokens, positions, new_slots: (rows,) int64. session, paged, length: (rows,) int32. tail: (rows, tail) int32, slots.
    table: (sessions, blocks) int32. keep: (kept,) int64. tiles: (1 + C, 3) int32, of which tiles[0, 0] are in use
    behind the first: first row, end row, and the part of the rows' keys, which is a key block of their tail, or above
    tail_blocks(tail) a split. Padding rows have length 0 and write to the pool's slot `spare`; what is kept is padded
    with row 0. beside: (B,) int64, for whoever reads the forward's output. On a CUDA device they are filled through
    pinned memory by one copy. graph: of a forward over them, every replay of which overwrites `output`.
    """

    tokens: Tensor
    positions: Tensor
    new_slots: Tensor
    session: Tensor
    paged: Tensor
    length: Tensor
    tail: Tensor
    table: Tensor
    keep: Tensor
    tiles: Tensor
    beside: Tensor
    graph: Any = None
    output: tuple[Tensor, Tensor | None]

    def __init__(self, bucket: Bucket, group: int, pool: KVPool, beside: int = 0) -> None:
        """Inputs of a model of at most `group` query heads a key head. beside: B, how many numbers are sent along."""
        self.bucket, self.group, self.pool = bucket, group, pool
        rows, sessions, tail, blocks, kept = bucket
        tiles = min(rows, (rows + sessions * (tile_rows(group) - 1)) // tile_rows(group))
        splits = int(most_splits(-(-blocks * pool.block_size // KEY_BLOCK)))
        layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            **dict.fromkeys(("tokens", "positions", "new_slots"), ((rows,), torch.int64)),
            **dict.fromkeys(("session", "paged", "length"), ((rows,), torch.int32)),
            "tail": ((rows, tail), torch.int32),
            "table": ((sessions, blocks), torch.int32),
            "keep": ((kept,), torch.int64),
            "tiles": ((1 + tiles * splits + rows * tail_blocks(tail), 3), torch.int32),
            "beside": ((beside,), torch.int64),
        }
        # Parts of one buffer, each at a multiple of 16 bytes, as wide loads want; on the CPU it is its own copy.
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in layout.values()]
        ends = np.cumsum([-(-size // 16) * 16 for size in sizes]).tolist()
        on_cuda = pool.device.type == "cuda"
        self._host = torch.zeros(ends[-1], dtype=torch.uint8, pin_memory=on_cuda)
        self._device = self._host.to(pool.device)
        self._copied: Any = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]
        self._arrays: dict[str, NDArray[Any]] = {}
        for start, size, (name, (shape, dtype)) in zip((0, *ends), sizes, layout.items(), strict=False):
            here, there = (part[start : start + size].view(dtype).view(shape) for part in (self._host, self._device))
            self._arrays[name] = here.numpy()
            setattr(self, name, there)
        self.new_slots.fill_(pool.spare)  # a forward without a batch harms nobody

    def fill(self, batch: PackedBatch, table: RowTable, beside: Ints = NOTHING) -> Tensor:
        """Take a batch, which the bucket holds, and what its rows see; returns where the numbers `beside` them are."""
        if self._copied is not None:
            self._copied.synchronize()  # the latest copy has read what is written now
        into, tiles = self._arrays, self._tiles(table)
        row, place, slot = table.tail
        into["tail"][row, place] = slot
        into["table"][: table.table.shape[0], : table.table.shape[1]] = table.table
        into["tiles"][0, 0] = len(tiles)
        into["tiles"][1 : 1 + len(tiles)] = tiles
        for name, values in (
            ("tokens", batch.tokens.numpy()),
            ("positions", batch.positions.numpy()),
            ("keep", batch.logits_to_keep.numpy()),
            *((name, getattr(table, name)) for name in ("new_slots", "session", "paged", "length")),
        ):
            into[name][: len(values)] = values
            into[name][len(values) :] = self.pool.spare if name == "new_slots" else 0
        into["beside"][: len(beside)] = beside
        size = self._host.nbytes - into["beside"].nbytes + beside.nbytes
        if self._device is not self._host:
            self._device[:size].copy_(self._host[:size], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return self.beside[: len(beside)]

    def attend(self, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query (1, H, T, D), key (1, KVH, T, D) and value (1, KVH, T, V) of the rows -> (1, T, H, V)."""
        rows = (states[0].transpose(0, 1) for states in (query, key, value))
        return tree_attention(*rows, *self.pool.layers[layer.number], self, layer)[None]

    def _tiles(self, table: RowTable) -> Ints:
        """(C, 3): the rows and parts of their keys that are worked on together, those of most work first."""
        size, most = tile_rows(self.group), tail_blocks(self.bucket.tail)
        counts = np.bincount(table.session)
        tiles = -(-counts // size)
        end = np.cumsum(counts)
        first = np.repeat(end - counts, tiles) + _ranges(tiles) * size
        longest = np.maximum.reduceat(table.length, first)
        splits = most_splits(-(-longest // KEY_BLOCK))
        last = np.minimum(first + size, np.repeat(end, tiles))
        shared = np.stack((first.repeat(splits), last.repeat(splits), most + _ranges(splits)), axis=1)
        row = np.flatnonzero(table.length > table.paged)
        blocks = (table.length[row] - 1) // KEY_BLOCK - table.paged[row] // KEY_BLOCK + 1
        row = row.repeat(blocks)
        return np.concatenate((shared, np.stack((row, row + 1, _ranges(blocks)), axis=1)))


def _ranges(counts: Ints) -> Ints:
    """0 to count - 1 for each count, one behind the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def tree_attention(*inputs: Any) -> Tensor:
    """`kernels.tree_attention`, of which see there."""
    from coppice.engine import kernels  # Triton comes with torch for CUDA only

    return kernels.tree_attention(*inputs)


class TappedModel:
    """A model whose forward also answers hidden states: number i is layer i's input, and behind those of all layers are
    the last one's output and the final norm's.
    """

    def __init__(self, model: PreTrainedModel, count: int) -> None:
        """Of `count` decoder layers. Raises UnsupportedModel."""
        self.model, self.layers = model, decoder_layers(model, count)
        self._tapped: tuple[int, ...] = ()
        self._handles: list[RemovableHandle] = []  # one for each of `_tapped`
        self._hidden: dict[int, Tensor] = {}

    def __call__(
        self, attention: Attention, tokens: Tensor, positions: Tensor, keep: Tensor | int, layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Logits (R, V) of the rows `keep`, 0 for all of the (T,) tokens, and (T, n * H) of n hidden states, `layers`,
        side by side; None where there are none.
        """
        if layers != self._tapped:
            self._tap(layers)
        with torch.inference_mode(), using(attention):
            logits = self.model(
                input_ids=tokens[None],
                attention_mask=_present(len(tokens), tokens.device),
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=keep,
            ).logits
            states = [self._hidden[index] for index in layers]
            self._hidden.clear()
            return logits[0], torch.cat(states, dim=-1)[0] if states else None

    def _tap(self, layers: tuple[int, ...]) -> None:
        """Have the next forwards keep these hidden states. Most keep those of the one before."""
        for handle in self._handles:
            handle.remove()
        self._tapped = layers
        behind = dict(enumerate((self.layers[-1], self.model.get_decoder()), len(self.layers)))  # type: ignore[no-untyped-call]
        self._handles = [
            behind[index].register_forward_hook(partial(self._keep_output, index))
            if index in behind
            else self.layers[index].register_forward_pre_hook(partial(self._keep, index), with_kwargs=True)
            for index in layers
        ]

    def _keep(self, index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._hidden[index] = args[0] if args else kwargs["hidden_states"]

    def _keep_output(self, index: int, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._hidden[index] = output if isinstance(output, Tensor) else output[0]


@cache
def _present(rows: int, device: torch.device) -> Tensor:
    """(1, rows) true: nothing is padding. Without it transformers searches the positions for packed texts."""
    return torch.ones(1, rows, dtype=torch.bool, device=device)


def decoder_layers(model: PreTrainedModel, count: int) -> nn.ModuleList:
    """The text model's outermost list of `count` modules: lists inside a layer (experts) come later in the walk, and a
    vision tower, which may be as deep, is outside the decoder.
    """
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    for module in chain(decoder.modules(), model.modules()):  # some call their output layer the decoder
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UnsupportedModel(f"{type(model).__name__} has no list of {count} decoder layers")


class Steps:
    """Forwards of a model on a device: replayed where a graph holds the batch, else run in the least bucket."""

    def __init__(self, model: TappedModel, pool: KVPool, group: int) -> None:
        """group: the most query heads that a layer has for each key head."""
        self.graphs: list[StepInputs] = []  # the smallest first, all with the hidden states of the same layers
        self._model, self._pool, self._group, self._layers = model, pool, group, tuple[int, ...]()
        self._inputs = lru_cache(_STEPS)(lambda bucket: StepInputs(bucket, group, pool))

    def prepare(self, batch: PackedBatch) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """Send a batch to the device. What is returned runs it as TappedModel; later forwards overwrite the answer."""
        table, layers = RowTable.of(batch.tails), batch.feature_layers
        bucket = Bucket.of(table, len(batch.logits_to_keep))
        graphs = self.graphs if set(layers) <= set(self._layers) else []
        inputs = next((inputs for inputs in graphs if inputs.bucket.holds(bucket)), None) or self._inputs(bucket)
        inputs.fill(batch, table)

        def run() -> tuple[Tensor, Tensor | None]:
            logits, features = self._run(inputs, layers) if inputs.graph is None else self._replayed(inputs, layers)
            rows, kept = len(batch.tokens), len(batch.logits_to_keep)
            return logits[:kept], None if features is None else features[:rows]

        return run

    def capture(self, buckets: Sequence[Bucket], layers: tuple[int, ...]) -> str:
        """Have the device replay these buckets' forwards from now on; returns why it cannot, "" when it does."""
        graphs: list[StepInputs] = []
        try:
            for bucket in sorted(buckets, reverse=True):  # the smaller ones fit in the largest one's memory
                inputs = StepInputs(bucket, self._group, self._pool)
                self.record(inputs, layers, graphs[0].graph.pool() if graphs else None)
                graphs.insert(0, inputs)
        except Exception as error:  # of torch, Triton or the driver
            return one_line(error)
        self.graphs, self._layers = graphs, layers
        return ""

    def record(self, inputs: StepInputs, layers: tuple[int, ...], memory: Any) -> None:
        """Record a forward over inputs that no batch has filled yet. memory: of another graph, whose output is read
        before this one runs. Raises an error of torch, Triton or the driver where the forward asks the host.
        """
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run(inputs, layers)  # libraries and Triton prepare themselves outside the graph
        torch.cuda.current_stream().wait_stream(stream)
        inputs.graph = torch.cuda.CUDAGraph()
        # Threads that serve may use the device meanwhile.
        with torch.cuda.graph(inputs.graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
            inputs.output = self._run(inputs, layers)

    def _run(self, inputs: StepInputs, layers: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        return self._model(inputs, inputs.tokens, inputs.positions, inputs.keep, layers)

    def _replayed(self, inputs: StepInputs, layers: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        inputs.graph.replay()
        logits, features = inputs.output
        if features is None or not layers or layers == self._layers:
            return logits, features if layers else None
        parts = features.chunk(len(self._layers), dim=-1)
        return logits, torch.cat([parts[self._layers.index(layer)] for layer in layers], dim=-1)


def graph_buckets(blocks: int) -> list[Bucket]:
    """What steps are captured for, where a session has so many blocks at most: plain steps and trees of up to
    GRAPH_ROWS rows, all with logits. Texts of every length share a bucket, since it costs them nothing but a copy.
    """
    sizes = sorted({padded(count) for count in range(1, GRAPH_ROWS + 1)})
    # A session has a row at least, and of two rows neither has a tail.
    return [Bucket(rows, rows, padded(min(rows, GRAPH_TAIL)) if rows > 2 else 0, blocks, rows) for rows in sizes]
