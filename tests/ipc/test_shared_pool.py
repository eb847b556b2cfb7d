"""The shared memory file: blocks that do not overlap, all of them given back."""

import random

import numpy as np
import pytest

from serve.ipc.shared_pool import TENSOR_ALIGNMENT_BYTES, SharedPool, map_pool


@pytest.fixture
def pool():
    found = SharedPool(1 << 20)
    yield found
    found.close()


def test_blocks_are_aligned_apart_and_given_back(pool):
    rng = random.Random(0)
    held = {}
    for number in range(500):
        if held and rng.random() < 0.45:
            block, mark = held.popitem()
            assert (pool.array(block.offset_bytes, "uint8", (block.size_bytes,)) == mark).all()
            pool.free(block)
        elif block := pool.allocate(rng.randrange(1, 20_000)):
            assert block.offset_bytes % TENSOR_ALIGNMENT_BYTES == 0
            pool.array(block.offset_bytes, "uint8", (block.size_bytes,))[:] = number % 256
            held[block] = number % 256
    assert pool.used_bytes >= sum(block.size_bytes for block in held)
    for block, mark in held.items():
        assert (pool.array(block.offset_bytes, "uint8", (block.size_bytes,)) == mark).all()
        pool.free(block)
    assert pool.used_bytes == 0
    assert pool.allocate(pool.capacity_bytes) is not None


def test_a_full_pool_has_no_block(pool):
    whole = pool.allocate(pool.capacity_bytes)
    assert pool.allocate(1) is None
    assert pool.allocate(0) is None
    pool.free(whole)
    empty = pool.allocate(0)
    assert pool.array(empty.offset_bytes, "float32", (0, 5)).shape == (0, 5)


def test_what_one_mapping_writes_another_reads(pool):
    block = pool.allocate(800)
    pool.array(block.offset_bytes, "int64", (10, 10))[3, 4] = 42
    other = map_pool(pool.fd, pool.capacity_bytes)
    seen = np.frombuffer(other, np.int64, 100, block.offset_bytes)
    assert seen[34] == 42


def test_an_array_outlives_the_pool():
    pool = SharedPool(1 << 16)
    array = pool.array(pool.allocate(80).offset_bytes, "float64", (10,))
    array[:] = 1.5
    pool.close()
    assert array.sum() == 15


def test_a_closed_pool_holds_nothing():
    pool = SharedPool(1 << 16)
    assert pool.allocate(100) is not None
    assert pool.used_bytes >= 100
    pool.close()
    assert pool.used_bytes == 0
