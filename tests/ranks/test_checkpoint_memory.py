"""What saving and restoring take beside the state, and what they leave alone in memory."""

import functools
import gc
import itertools
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import mpi_replica as mr
from checkpoints import on_read, replica_id, restored, save, variable
from mpi_replica import VariableAggregation as Aggregation

COUNT = 1_250_000  # of 8 bytes: 10 MB
# A block of files has 4 MiB. And the interpreter's table of names, in which keys that are read
# stand, takes 1.9 MB at once where it has got too small: in any test.
MOST_BYTES = 8 << 20


@pytest.fixture
def traced():
    """Return what measures an action: how far its peak lies above what there is before it."""

    def taken(action):
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        action()
        return tracemalloc.get_traced_memory()[1] - before

    tracemalloc.start()
    yield taken
    tracemalloc.stop()


def numbers(count=COUNT, dtype="f8"):
    return (np.arange(count) % 31 + 1).astype(dtype)


CHANGED = {
    "variable": lambda strategy: variable(strategy, numbers()),
    "variable of bfloat16": lambda strategy: variable(
        strategy, numbers(4 * COUNT, ml_dtypes.bfloat16)
    ),
    "several variables": lambda strategy: [
        variable(strategy, numbers(COUNT // 2).reshape(2, -1)) for _ in range(2)
    ],
    "variable that was assigned to": lambda strategy: (
        variable(strategy, numbers()).assign_add(numbers()).assign(numbers())
    ),
    "contiguous": lambda strategy: numbers(),
    "Fortran": lambda strategy: np.asfortranarray(numbers().reshape(-1, 500)),
    "strided": lambda strategy: numbers(2 * COUNT)[::2],
    "backwards": lambda strategy: numbers().reshape(500, -1)[::-1, ::-1],
    "bfloat16": lambda strategy: numbers(4 * COUNT, ml_dtypes.bfloat16),
    "scalars": lambda strategy: [np.float64(i) for i in range(100)],
}


@pytest.mark.parametrize("what", CHANGED)
def test_saving_and_restoring_take_a_few_mib_beside_the_state(strategy, path, traced, what):
    checkpoint = mr.Checkpoint(strategy, state=CHANGED[what](strategy))
    assert traced(lambda: checkpoint.save(path)) < MOST_BYTES
    assert traced(lambda: checkpoint.restore(path)) < MOST_BYTES


READ = {
    "sum of floats": (Aggregation.SUM, "f8"),
    "sum of integers": (Aggregation.SUM, "i8"),
    "mean": (Aggregation.MEAN, "f8"),
    "first": (Aggregation.ONLY_FIRST_REPLICA, "i8"),
}


@pytest.mark.parametrize("what", READ)
def test_restoring_what_is_synchronized_on_read_takes_a_few_mib_beside_the_state(
    strategy, path, traced, what
):
    """Saving takes the combined value beside: there is none before."""
    aggregation, dtype = READ[what]
    total = on_read(strategy, aggregation, numbers(dtype=dtype))
    strategy.run(lambda: total.assign_add(numbers(dtype=dtype)))  # each replica has its own array
    checkpoint = mr.Checkpoint(total=total)
    checkpoint.save(path)
    for _ in range(2):
        assert traced(lambda: checkpoint.restore(path)) < MOST_BYTES


def bytes_read():
    """How many bytes this process has read from files, so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not tell")
def test_what_two_names_hold_is_compared_once_however_deep_it_is(strategy, path):
    array = numbers()
    nest = functools.reduce(lambda inner, _: {"inner": inner}, range(6), array)
    checkpoint = mr.Checkpoint(strategy, one=nest, other=nest)
    checkpoint.save(path)
    before = bytes_read()
    checkpoint.restore(path)
    assert checkpoint.one is checkpoint.other
    # Each of the two is checked by a rank, compared, and read.
    assert bytes_read() - before < 7 * array.nbytes


def test_nothing_of_earlier_calls_stays_in_memory(strategy, path, traced):
    """Also while no garbage is collected. One round learns; Python's names take more in one."""
    checkpoint = mr.Checkpoint(
        strategy,
        arrays=[np.full(1, i) for i in range(300)],
        replaced=mr.Mirrored(numbers(100_000)),
    )
    checkpoint.save(path)
    checkpoint.restore(path)
    gc.collect()
    gc.disable()
    held = [tracemalloc.get_traced_memory()[0]]
    try:
        for step in range(15):
            checkpoint.save(path.with_name(f"trained-{step}"))
            checkpoint.restore(path.with_name(f"trained-{step}"))
            if step % 5 == 4:
                held.append(tracemalloc.get_traced_memory()[0])
    finally:
        gc.enable()
    assert min(after - before for before, after in itertools.pairwise(held)) < 100_000


# What must not change


def test_values_that_were_read_before_stay_what_they_were(strategy, path):
    v = variable(strategy, numbers())
    save(strategy, path, v=v)
    holders = {
        "value": lambda: v.value(),
        "array": lambda: np.asarray(v),
        "part": lambda: v[7:9],
        "in a replica": lambda: strategy.experimental_local_results(strategy.run(v.value))[0],
        "buffer": lambda: memoryview(v.value()),
        "reshaped": lambda: np.reshape(v, (2, -1)).T,
    }
    for name, hold in holders.items():
        v.assign(-numbers())
        held = hold()
        restored(strategy, path, v=v)
        assert (np.asarray(held) < 0).all(), name
        assert (np.asarray(v) == numbers()).all()
        del held


def test_a_restored_value_is_read_only(strategy, path):
    v = variable(strategy, numbers())
    save(strategy, path, v=v)
    restored(strategy, path, v=v)
    with pytest.raises(ValueError, match="read-only"):
        v.value()[0] = 5
    with pytest.raises(ValueError, match="WRITEABLE"):
        v.value().flags.writeable = True


@pytest.mark.parametrize("what", READ)
def test_components_of_a_rank_are_apart_after_restoring(strategy, path, what):
    aggregation, dtype = READ[what]
    total = on_read(strategy, aggregation, numbers(7, dtype))
    save(strategy, path, total=total)
    restored(strategy, path, total=total)

    def components():
        parts = strategy.run(lambda: np.asarray(total))
        return list(strategy.experimental_local_results(parts))

    before = components()
    copies = [part.copy() for part in before]
    strategy.run(lambda: total.assign_add(np.full(7, 1 + replica_id()).astype(dtype)))
    for i, old, copy, new in zip(
        strategy.local_replica_ids, before, copies, components(), strict=True
    ):
        assert (old == copy).all()
        assert (new == copy + 1 + i).all()
    restored(strategy, path, total=total)
    assert [list(part) for part in components()] == [list(copy) for copy in copies]
