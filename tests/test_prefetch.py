"""prefetch: what a program sees is the same, and its threads end with what they read for."""

import gc
import itertools
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from datasets import WatchedRows, lists, readers_since
from mpi_replica.data import AUTOTUNE, Dataset


@pytest.fixture
def readers():
    """A function that returns the threads that read ahead, of those begun in this test."""
    before = set(threading.enumerate())
    return lambda: readers_since(before)


def test_so_many_elements_are_read_ahead_and_no_more(readers):
    for size in (1, 3):
        rows = WatchedRows(20)
        iterator = iter(Dataset.from_source(rows).prefetch(size))
        for taken in range(1, 6):
            next(iterator)
            assert rows.events[taken + size - 1].wait(timeout=60)
            assert len(rows.read) == taken + size
        assert threading.current_thread() not in rows.threads
        iterator.close()
        assert readers() == []
        assert len(rows.read) == 5 + size


def test_autotune_reads_two_ahead():
    assert repr(Dataset.range(3).prefetch(AUTOTUNE)) == repr(Dataset.range(3).prefetch(2))


def test_making_an_iterator_reads_nothing_and_starts_no_thread(readers):
    rows = WatchedRows(5)
    dataset = Dataset.from_source(rows).batch(2).prefetch(2)
    iterators = [iter(dataset), dataset.batches(), dataset.batches(start=1)]
    assert (rows.read, readers()) == ([], [])
    del iterators
    assert len(dataset) == 3


def test_the_thread_ends_with_the_dataset(readers):
    dataset = Dataset.range(50).batch(4).prefetch(3)
    for _ in range(3):
        list(dataset)
        assert readers() == []


def test_the_thread_ends_where_a_loop_is_left(readers):
    for batch in Dataset.range(50).batch(4).prefetch(3):
        if batch[0] > 10:
            break
    assert readers() == []


def test_the_thread_ends_where_an_iterator_is_forgotten(readers):
    iterator = iter(Dataset.range(50).prefetch(3))
    next(iterator)
    assert len(readers()) == 1
    del iterator
    assert readers() == []
    ring = [iter(Dataset.range(50).prefetch(3))]
    next(ring[0])
    ring.append(ring)
    del ring
    gc.collect()
    assert readers() == []


def test_each_iterator_has_a_thread_of_its_own(readers):
    dataset = Dataset.range(50).shuffle(seed=1).prefetch(2)
    first, second = iter(dataset), iter(dataset)
    pairs = [(next(first).item(), next(second).item()) for _ in range(20)]
    assert len(readers()) == 2
    plain = Dataset.range(50).shuffle(seed=1)
    orders = [lists(itertools.islice(plain, 20)) for _ in range(2)]
    assert [list(order) for order in zip(*pairs, strict=True)] == orders
    first.close(), second.close()
    assert readers() == []


def test_an_exception_comes_after_the_elements_before_it(readers):
    def rows():
        yield from range(3)
        raise OSError("disk gone")

    iterator = iter(Dataset.from_generator(rows).prefetch(5))
    assert [next(iterator).item() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="disk gone") as caught:
        next(iterator)
    assert caught.value.__notes__ == [
        "Raised for element 3 of from_generator("
        "test_an_exception_comes_after_the_elements_before_it.<locals>.rows)."
    ]
    with pytest.raises(StopIteration):
        next(iterator)
    assert readers() == []


def test_a_generator_is_closed_by_the_thread_that_ran_it():
    closed = []

    def rows():
        try:
            yield from range(100)
        finally:
            closed.append(threading.current_thread().name)

    iterator = iter(Dataset.from_generator(rows).prefetch(2))
    next(iterator)
    iterator.close()
    assert closed == ["mpi_replica-prefetch"]


def test_the_thread_has_the_settings_of_the_one_who_iterates():
    dataset = Dataset.range(4).map(lambda x: np.float64(1) / np.float64(x)).prefetch(1)
    with np.errstate(all="raise"), pytest.raises(FloatingPointError):
        list(dataset)
    with np.errstate(all="ignore"):
        assert lists(dataset)[0] == np.inf


def test_verbs_after_it_read_ahead_too_where_they_go_on_element_by_element():
    here = threading.current_thread()
    for verbs in (
        lambda dataset: dataset.repeat(2),
        lambda dataset: dataset.take(4),
        lambda dataset: dataset.skip(1),
        lambda dataset: dataset.concatenate(dataset),
        lambda dataset: dataset.map(lambda x: x),
        lambda dataset: dataset.filter(lambda x: True),
        lambda dataset: Dataset.zip(dataset, dataset),
    ):
        rows = WatchedRows(6)
        list(verbs(Dataset.from_source(rows).prefetch(2)))
        assert here not in rows.threads


def test_what_is_asked_for_by_position_is_read_when_it_is_asked():
    rows = WatchedRows(6)
    dataset = Dataset.from_source(rows).prefetch(2).batch(4)
    assert [(n, part.tolist()) for n, part in dataset.batches(lambda n: slice(1, 2))] == [
        (4, [1]),
        (2, [5]),
    ]
    assert rows.read == [1, 5]


# What no test can do to itself: to end a program, and to fork.


def run(program):
    code = "from mpi_replica.data import Dataset\nimport os, sys, threading\n"
    done = subprocess.run(
        # From Python 3.12 on who forks is warned of other threads.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_program_ends_with_iterators_that_are_still_open():
    text = run("""
        iterator = iter(Dataset.range(100).batch(2).map(lambda x: x, 2).prefetch(2))
        print(next(iterator))
        other = iter(Dataset.range(100).repeat().prefetch(1))
        print(next(other))
    """)
    assert text == "[0 1]\n0\n"


@pytest.mark.parametrize("ahead", ["map(read).prefetch(2)", "map(read, 2)"])
def test_a_program_ends_while_a_read_never_returns(ahead):
    text = run(f"""
        begun = threading.Event()
        def read(number):
            if number == 1:
                begun.set()
                threading.Event().wait()
            return number
        iterator = iter(Dataset.range(9).{ahead})
        print(next(iterator))
        begun.wait()
    """)
    assert text == "0\n"


def test_an_iterator_taken_over_a_fork_is_an_error_and_no_hang():
    text = run("""
        dataset = Dataset.range(9).map(lambda x: x + 1, 2).prefetch(2)
        iterator = iter(dataset)
        next(iterator)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                next(iterator)
            except RuntimeError as error:
                print(error)
            print(sum(dataset))
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)
        print(sum(iterator))
    """)
    assert "begun before a fork" in text
    assert text.splitlines()[1:] == ["45", "44"]


def test_a_distributed_iterator_that_reads_ahead_goes_on_over_a_fork():
    text = run("""
        import mpi_replica as mr
        options = mr.InputOptions(experimental_per_replica_buffer_size=2)
        strategy = mr.get_strategy()
        dataset = strategy.experimental_distribute_dataset(Dataset.range(6).batch(2), options)
        iterator = iter(dataset)
        next(iterator)
        child = os.fork()
        rows = [strategy.experimental_local_results(step)[0].tolist() for step in iterator]
        if child == 0:
            print(rows)
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)
        print(rows)
    """)
    assert text == "[[2, 3], [4, 5]]\n" * 2
