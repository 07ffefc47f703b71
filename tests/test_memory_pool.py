"""Results get the memory of results that are gone, and never that of one that is seen."""

import contextlib
import gc
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi_replica.core import memory_pool
from mpi_replica.core.memory_pool import MemoryPool

MIB = 1 << 20


def address(array):
    return array.__array_interface__["data"][0]


def spare_bytes(pool):
    pool._take_back()
    return sum(block.memory.size for _, block in pool._spare)


def test_the_memory_of_a_result_that_is_gone_is_that_of_the_next_one():
    pool = MemoryPool()
    first = pool.lend(MIB)
    place = address(first)
    del first
    assert address(pool.lend(MIB)) == place


@pytest.mark.parametrize(
    "view_of",
    [
        lambda array: array[5:7],
        lambda array: array.view("f8").reshape(-1, 2).T,
        lambda array: memoryview(array)[1:3],
        lambda array: np.frombuffer(array, "i2")[::2],
        lambda array: np.asarray(array[::3]),
        lambda array: [[array[9:]]],
    ],
)
def test_whatever_shows_a_result_keeps_its_memory(view_of):
    pool = MemoryPool()
    result = pool.lend(MIB)
    place, seen = address(result), view_of(result)
    del result
    gc.collect()
    assert address(pool.lend(MIB)) != place
    del seen
    assert place in map(address, [pool.lend(MIB), pool.lend(MIB)])


@given(
    st.lists(st.tuples(st.sampled_from(["lend", "drop", "end"]), st.integers(0, 7)), max_size=60)
)
def test_results_that_live_never_share_memory_and_spare_memory_is_bounded(history):
    pool, alive, most = MemoryPool(), [], 0
    for number, (what, which) in enumerate(history):
        if what == "lend":
            size = (which % 4 + 1) * 3 * MIB
            array = pool.lend(size)
            assert array.size == size
            array[:: 1 << 16] = number % 256
            alive.append((array, number % 256))
        elif what == "drop" and alive:
            del alive[which % len(alive)]
        elif what == "end":
            pool.end_call()
        array = None  # which would keep the last one
        lent = sum(array.size for array, _ in alive)
        most = max(most, lent)
        assert lent + spare_bytes(pool) <= most + 16 * MIB
        array = None
        for array, value in alive:
            assert (array[:: 1 << 16] == value).all()
        array = None


def test_memory_that_is_of_no_use_goes_after_sixteen_calls():
    pool = MemoryPool()
    pool.lend(MIB)  # which nobody keeps
    for _ in range(16):
        pool.end_call()
    assert spare_bytes(pool) == MIB
    pool.end_call()
    assert spare_bytes(pool) == 0


def test_memory_that_is_used_in_each_call_stays():
    pool = MemoryPool()
    place = address(pool.lend(MIB))
    for _ in range(100):
        assert address(pool.lend(MIB)) == place
        pool.end_call()


def test_where_memory_is_short_what_is_spare_is_given_back_first(monkeypatch):
    pool = MemoryPool()
    pool.lend(MIB)
    allocate, tries = memory_pool._allocated, []

    def short(size_bytes):
        tries.append(len(pool._spare))
        if tries[-1]:
            raise MemoryError
        return allocate(size_bytes)

    monkeypatch.setattr(memory_pool, "_allocated", short)
    assert pool.lend(2 * MIB).size == 2 * MIB
    assert tries == [1, 0]


def test_what_can_not_be_had_is_not_counted():
    pool = MemoryPool()
    kept = pool.lend(MIB)
    with pytest.raises(MemoryError):
        pool.lend(1 << 60)
    assert (pool._lent_bytes, pool._most_lent_bytes) == (kept.size, kept.size)


def test_a_closed_pool_keeps_nothing_and_its_results_live_on():
    pool = MemoryPool()
    result = pool.lend(MIB)
    pool.lend(2 * MIB)
    result[:] = 7
    pool.close()
    assert spare_bytes(pool) == 0
    assert (result == 7).all()
    del result
    assert spare_bytes(pool) == 0


def test_results_outlive_their_pool():
    pool = MemoryPool()
    result = pool.lend(4 * MIB)
    result[:] = 7
    del pool
    gc.collect()
    others = [np.zeros(4 * MIB, np.uint8) for _ in range(4)]
    assert (result == 7).all()
    assert not any(np.may_share_memory(result, other) for other in others)


def test_results_may_die_in_any_thread():
    pool, results, enough = MemoryPool(), [], threading.Event()

    def drop():
        while not (enough.is_set() and not results):
            with contextlib.suppress(IndexError):
                results.pop()

    threads = [threading.Thread(target=drop) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(2000):
            result = pool.lend(MIB // 2)
            result[0] = result[-1] = number % 256
            assert result[0] == result[-1] == number % 256
            results.append(result)
            del result
            pool.end_call()
    finally:
        enough.set()
        for thread in threads:
            thread.join()
    pool._take_back()
    assert not pool._lent
    assert pool._lent_bytes == 0
