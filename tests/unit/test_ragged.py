"""What rows see, as numbers: the same as the tails say, quickly, and in as many bytes whatever the context."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.engine.kv_cache import KVPool, KVShape
from coppice.engine.rows import PackedBatch, RowTable, most_splits, pack, tail_blocks
from coppice.engine.steps import Bucket, StepInputs, padded
from tests.kernels import split_size
from tests.ragged_batches import Shape, filled_pool, random_batch, random_tree, tree_piece

GROUP = 4


def inputs_of(batch: PackedBatch, bucket: Bucket | None = None, *, spare: int = 0, block_size: int = 8) -> StepInputs:
    """A batch in its own bucket, or in a larger one."""
    table = RowTable.of(batch.tails)
    inputs = StepInputs(bucket or Bucket.of(batch, table), group=GROUP, spare=spare, block_size=block_size)
    inputs.fill(batch, table)
    return inputs


SIZES = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 40), st.integers(0, 9)), min_size=1, max_size=8)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(sizes=SIZES, seed=st.integers(0, 99))
def test_rows_see_the_slots_that_their_tails_say(sizes: list[tuple[int, int, int]], seed: int) -> None:
    pool, spare = filled_pool(Shape(), 3000)
    batch = random_batch(pool, sizes, random.Random(seed))
    inputs = inputs_of(batch, spare=spare)
    row = 0
    for session, tail in enumerate(batch.tails):
        for local, visible in enumerate(tail.visible):
            seen = np.concatenate((np.arange(tail.prefix), tail.prefix + np.flatnonzero(visible)))
            length, paged = int(inputs.length[row]), int(inputs.paged[row])
            assert (length, int(inputs.session[row])) == (len(seen), session)
            blocks = inputs.table[session].numpy()
            index = np.arange(paged)
            in_blocks = blocks[index // pool.block_size] * pool.block_size + index % pool.block_size
            assert np.array_equal(
                np.concatenate((in_blocks, inputs.tail[row, : length - paged])), tail.table.slots(seen)
            )
            own = tail.length - len(tail.visible) + local
            assert int(inputs.new_slots[row]) == tail.table.slots(np.array(own))
            row += 1
    assert (inputs.length[row:] == 0).all()
    assert (inputs.new_slots[row:] == spare).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(sizes=SIZES, seed=st.integers(0, 99))
def test_every_key_of_every_row_is_in_one_part_of_one_tile(sizes: list[tuple[int, int, int]], seed: int) -> None:
    pool, _ = filled_pool(Shape(), 3000)
    batch = random_batch(pool, sizes, random.Random(seed))
    inputs = inputs_of(batch)
    most = tail_blocks(inputs.bucket.tail)
    size = split_size((inputs.length + 63) // 64).numpy()
    times = np.zeros((len(batch.tokens), 32), np.int64)  # of each row's key blocks
    for first, end, part in inputs.tiles[1 : 1 + int(inputs.tiles[0, 0])].tolist():
        assert len(set(inputs.session[first:end].tolist())) == 1
        for row in range(first, end):
            paged, length = int(inputs.paged[row]), int(inputs.length[row])
            own = -(-length // 64) if paged == length else paged // 64  # the first block that its tail reaches into
            split = part - most
            blocks = {own + split + most} if split < 0 else range(split * size[row], min((split + 1) * size[row], own))
            for block in blocks:
                times[row, block] += 1
    wanted = np.arange(32) * 64 < inputs.length[: len(batch.tokens), None].numpy()
    assert np.array_equal(times, wanted)


def test_a_bucket_filled_twice_forgets_the_first_batch() -> None:
    pool, _ = filled_pool(Shape(), 3000)
    batch = random_batch(pool, [(50, 30, 0), (20, 9, 3)], random.Random(0))
    small = pack([tree_piece(batch.tails[1].table, 20, random_tree(3, random.Random(1)))])
    bucket = Bucket(64, 4, 16, 32, 64)
    inputs = inputs_of(batch, bucket)
    inputs.fill(small, RowTable.of(small.tails))
    fresh = inputs_of(small, bucket)
    for name in ("tokens", "positions", "new_slots", "session", "paged", "length", "keep"):
        assert torch.equal(getattr(inputs, name), getattr(fresh, name))
    used = 1 + int(fresh.tiles[0, 0])
    assert torch.equal(inputs.tiles[:used], fresh.tiles[:used])


def test_buckets_grow_by_a_half_at_most_above_64_rows() -> None:
    sizes = sorted({padded(count) for count in range(1, 513)})
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512]
    assert all(padded(size) == size for size in sizes)


def test_no_row_has_more_splits_than_are_listed_whatever_its_window() -> None:
    blocks = np.arange(1, 4097)
    splits = -(-blocks // split_size(torch.from_numpy(blocks)).numpy())
    assert (np.maximum.accumulate(splits) <= most_splits(blocks)).all()
    assert most_splits(blocks).max() == 32


def many_trees(context: int) -> tuple[PackedBatch, StepInputs]:
    """32 sessions of 61 rows, in a bucket for 33k of context."""
    pool = KVPool(layers=[KVShape(1, 1, 1)], tokens=32 * (context + 96))
    rng = random.Random(0)
    tables = [pool.allocate(str(session), context + 61) for session in range(32)]
    batch = pack([tree_piece(table, context, random_tree(61, rng)) for table in tables])
    inputs = StepInputs(Bucket(2048, 32, 64, 1056, 2048), group=GROUP, spare=0, block_size=pool.block_size)
    return batch, inputs


def milliseconds(*works: Callable[[], object], repeats: int = 40) -> list[float]:
    """Median processor time of each, in turns."""
    took: list[list[int]] = [[] for _ in works]
    for _ in range(repeats):
        for work, times in zip(works, took, strict=True):
            start = time.thread_time_ns()
            work()
            times.append(time.thread_time_ns() - start)
    return [statistics.median(times) / 1e6 for times in took]


@pytest.mark.timeout(120)
def test_filling_is_quick_and_does_not_grow_with_the_context() -> None:
    (short, inputs), (long, others) = many_trees(1000), many_trees(32_000)
    assert inputs.nbytes == others.nbytes
    numbers = np.random.default_rng(0).integers(0, 1 << 20, 100_000)
    rounds = [
        milliseconds(
            lambda: np.sort(numbers, kind="stable"),  # whose speed depends less on the processor than the other kinds
            lambda: inputs.fill(short, RowTable.of(short.tails)),
            lambda: others.fill(long, RowTable.of(long.tails)),
        )
        for _ in range(3)
    ]
    for yardstick, at_1k, at_32k in rounds:
        print(f"a sort of 100,000 numbers {yardstick:.2f} ms, fill at 1k {at_1k:.3f} ms, at 32k {at_32k:.3f} ms")
    assert min(at_1k / yardstick for yardstick, at_1k, _ in rounds) < 1 / 3
    assert min(at_32k / at_1k for _, at_1k, at_32k in rounds) < 1.1
