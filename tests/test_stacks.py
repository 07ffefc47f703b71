"""Where a thread is, as another one sees it: its stack, whether it waits for a lock (issue 3)."""

import contextlib
import importlib.util
import os
import queue
import select
import threading

import pytest

import mpi_replica as mr
from mpi_replica.ranks.watch.stacks import place_of_thread


class World:
    """What the functions below wait for."""

    def __init__(self, folder):
        self.lock = threading.Lock()
        self.reentrant = threading.RLock()
        self.condition = threading.Condition()
        self.semaphore = threading.Semaphore(0)
        self.queue = queue.Queue()
        self.read, self.write = os.pipe()
        self.writer = -1
        self.fifo = folder / "fifo"
        os.mkfifo(self.fifo)

    @contextlib.contextmanager
    def closed(self):
        """Hold all locks; at the end let everybody go on."""
        try:
            with self.lock, self.reentrant, self.condition:
                yield
        finally:
            self.semaphore.release()
            self.queue.put(None)
            os.write(self.write, b"x")
            self.writer = os.open(self.fifo, os.O_RDWR)  # which waits for no reader

    def close(self):
        for file in (self.read, self.write, self.writer):
            os.close(file)


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    world.close()


@contextlib.contextmanager
def place_of(world, work):
    """Give the place of a thread that waits at the line of `work` that is marked."""
    thread = threading.Thread(target=work, args=(world,))
    try:
        with world.closed():
            thread.start()
            place = place_of_thread(thread.ident)
            while "# here" not in place.stack:
                assert thread.is_alive()
                place = place_of_thread(thread.ident)
            yield place
    finally:
        thread.join()


def enters(world):
    with world.lock:  # here
        pass


def enters_one_of_several(world):
    with contextlib.nullcontext(), world.lock:  # here
        pass


def enters_a_reentrant_one(world):
    with world.reentrant:  # here
        pass


def acquires(world):
    world.lock.acquire()  # here
    world.lock.release()


def acquires_for_a_time(world):
    if world.lock.acquire(timeout=1000):  # here
        world.lock.release()


def acquires_over_several_lines(world):
    world.lock.acquire(  # here
        timeout=1000,
    )
    world.lock.release()


def acquires_what_it_was_given(world):
    lock = world.lock
    lock.acquire(True, 1000)  # here
    lock.release()


def enters_a_condition(world):
    with world.condition:  # here
        pass


def takes_from_a_semaphore(world):
    with world.semaphore:  # here
        pass


def takes_from_a_queue(world):
    world.queue.get()  # here


def reads(world):
    os.read(world.read, 1)  # here


def sleeps(world):
    select.select([world.read], [], [], 1000)  # here


def opens(world):
    with open(world.fifo):  # here
        pass


def reads_while_it_has_a_lock(world):
    with threading.Lock():
        os.read(world.read, 1)  # here


def reads_before_it_acquires(world):
    os.read(world.read, 1) and world.lock.acquire() and world.lock.release()  # here


def reads_after_it_has_tried(world):
    world.lock.acquire(blocking=False) or os.read(world.read, 1)  # here


class Slow:
    def __init__(self, world):
        self.world = world

    def __enter__(self):
        os.read(self.world.read, 1)

    def __exit__(self, *exc_info):
        pass


def enters_what_waits_for_data(world):
    with Slow(world):  # here
        pass


@pytest.mark.parametrize(
    "work",
    [
        enters,
        enters_one_of_several,
        enters_a_reentrant_one,
        acquires,
        acquires_for_a_time,
        acquires_over_several_lines,
        acquires_what_it_was_given,
        enters_a_condition,
        takes_from_a_semaphore,
        takes_from_a_queue,
    ],
)
def test_a_wait_for_a_lock_is_recognised(world, work):
    with place_of(world, work) as place:
        assert place.waits_for_lock, place.stack


@pytest.mark.parametrize(
    "work",
    [
        reads,
        sleeps,
        opens,
        reads_while_it_has_a_lock,
        reads_before_it_acquires,
        reads_after_it_has_tried,
        enters_what_waits_for_data,
    ],
)
def test_another_wait_is_not_taken_for_one(world, work):
    with place_of(world, work) as place:
        assert not place.waits_for_lock, place.stack


def helper(world):
    os.read(world.read, 1)  # here


def calls_a_helper(world):
    helper(world)


def test_the_stack_shows_the_frames_from_the_outermost_to_the_innermost(world):
    """As a traceback has them."""
    with place_of(world, calls_a_helper) as place:
        lines = place.stack.splitlines()
    assert "in calls_a_helper" in lines[-4]
    assert lines[-3] == "    helper(world)"
    assert f'File "{__file__}", line {helper.__code__.co_firstlineno + 1}, in helper' in lines[-2]
    assert lines[-1] == "    os.read(world.read, 1)  # here"


def calls_through_the_package(world):
    next(iter(mr.data.Dataset.range(1).map(lambda x: helper(world) or x)))


def test_the_frames_of_the_package_are_left_out(world):
    with place_of(world, calls_through_the_package) as place:
        stack = place.stack
    assert "in calls_through_the_package" in stack
    assert "in helper" in stack
    assert os.path.dirname(mr.__file__) not in stack


def calls_deeply(world, depth=40):
    if depth:
        calls_differently(world, depth - 1)
    else:
        helper(world)


def calls_differently(world, depth):
    calls_deeply(world, depth)


def test_of_a_deep_stack_the_innermost_frames_are_shown(world):
    with place_of(world, calls_deeply) as place:
        frames = place.stack.count("  File ")
    assert 8 <= frames <= 20
    assert place.stack.endswith("# here\n")


def test_a_long_stack_is_cut_at_a_line(world, tmp_path):
    path = tmp_path / "generated.py"
    lines = ["import os", "def f0(world): os.read(world.read, 1)  # here"]
    lines += [f"def f{n + 1}(world): f{n}(world)  # {'long ' * 60}" for n in range(10)]
    path.write_text("\n".join(lines))
    spec = importlib.util.spec_from_file_location("generated", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with place_of(world, module.f10) as place:
        stack = place.stack
    assert len(stack) < 2500
    first, second, *_ = stack.splitlines()
    assert first == "  …"
    assert second.startswith(("  File ", "    def f", "    f"))
    assert stack.endswith("# here\n")


def test_a_thread_that_has_ended_is_told_so():
    ident = (
        max(thread.ident for thread in threading.enumerate()) + 1
    )  # of no thread; that of one that ended may be used again
    assert place_of_thread(ident) == ("  its thread has ended\n", False)
