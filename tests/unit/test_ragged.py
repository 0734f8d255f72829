"""What rows see, as numbers, is what the tails say."""

from __future__ import annotations

import random

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coppice.engine.kv_cache import KVPool
from coppice.engine.rows import PackedBatch, RowTable, most_splits, pack, tail_blocks
from coppice.engine.steps import Bucket, StepInputs
from tests.ragged_batches import Shape, filled_pool, random_batch, random_tree, tree_piece

GROUP = 4


def inputs_of(batch: PackedBatch, pool: KVPool, bucket: Bucket | None = None) -> StepInputs:
    """A batch in its own bucket, or in a larger one."""
    table = RowTable.of(batch.tails)
    inputs = StepInputs(bucket or Bucket.of(batch, table), GROUP, pool)
    inputs.fill(batch, table)
    return inputs


def split_size(blocks: torch.Tensor) -> torch.Tensor:
    """Key blocks of a split of rows that see keys of so many: see most_splits."""
    long = (blocks + 511) // 512 * 16
    return torch.where(blocks <= 32, 4, torch.where(blocks <= 128, 8, long))


SIZES = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 40), st.integers(0, 9)), min_size=1, max_size=8)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(sizes=SIZES, seed=st.integers(0, 99))
def test_rows_see_the_slots_that_their_tails_say(sizes: list[tuple[int, int, int]], seed: int) -> None:
    pool = filled_pool(Shape(), 3000)
    batch = random_batch(pool, sizes, random.Random(seed))
    inputs = inputs_of(batch, pool)
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
    assert (inputs.new_slots[row:] == pool.spare).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(sizes=SIZES, seed=st.integers(0, 99))
def test_every_key_of_every_row_is_in_one_part_of_one_tile(sizes: list[tuple[int, int, int]], seed: int) -> None:
    pool = filled_pool(Shape(), 3000)
    batch = random_batch(pool, sizes, random.Random(seed))
    inputs = inputs_of(batch, pool)
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
    pool = filled_pool(Shape(), 3000)
    batch = random_batch(pool, [(50, 30, 0), (20, 9, 3)], random.Random(0))
    small = pack([tree_piece(batch.tails[1].table, 20, random_tree(3, random.Random(1)))])
    bucket = Bucket(64, 4, 16, 32, 64)
    inputs = inputs_of(batch, pool, bucket)
    inputs.fill(small, RowTable.of(small.tails))
    fresh = inputs_of(small, pool, bucket)
    for name in ("tokens", "positions", "new_slots", "session", "paged", "length", "keep"):
        assert torch.equal(getattr(inputs, name), getattr(fresh, name))
    used = 1 + int(fresh.tiles[0, 0])
    assert torch.equal(inputs.tiles[:used], fresh.tiles[:used])


def test_no_row_has_more_splits_than_are_listed_whatever_its_window() -> None:
    blocks = np.arange(1, 4097)
    splits = -(-blocks // split_size(torch.from_numpy(blocks)).numpy())
    assert (np.maximum.accumulate(splits) <= most_splits(blocks)).all()
    assert most_splits(blocks).max() == 32
