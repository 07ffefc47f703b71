"""Signals, stalls and losses where replicas run in greenlets, and in threads of their own.

Signals go to the main thread, which waits while a replica's own thread runs: what a handler raises
must come up in the replica all the same (decision 23).
"""

import functools
import importlib.util

import pytest

from jobs import run_job, told, tracebacks
from launching import LIBRARIES

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

SIGNALS = """
    import itertools

    strategy = mr.MPIStrategy(replicas_per_rank=2, replica_threads=THREADS)
    mine = lambda: mr.get_replica_context().replica_id_in_sync_group
    last = strategy.num_replicas_in_sync - 1

    class Alarm(Exception):
        pass

    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)

    def in_python():
        interrupt()
        for _ in itertools.count():
            pass

    def in_c():
        large = np.ones((400, 400))
        interrupt()
        for _ in range(100_000):
            large @ large

    def twice():
        for _ in range(2):
            try:
                in_python()
            except KeyboardInterrupt:
                kept.append("one")
        raise KeyboardInterrupt

    def between():  # it may come up here, or at the next call
        interrupt()

    def step(act):
        total()
        try:
            if mine() == last:
                act()
            for _ in range(200_000 if act is between else 1):
                total()
        except BaseException as error:
            kept.append(type(error).__name__)
            raise

    for act in (in_python, in_c, between, twice):
        kept = []
        try:
            strategy.run(step, (act,))
        except KeyboardInterrupt as error:
            import traceback
            text = "".join([*traceback.format_exception(error), *error.__notes__])
            assert act is between or f"in {act.__name__}" in text, text
            tell(f"{act.__name__} {sorted(set(kept))}")
        check(strategy)

    given = Alarm("of", {"two": "arguments"})

    def handler(*_):
        raise given

    def alarmed():
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        for _ in itertools.count():
            pass

    signal.signal(signal.SIGALRM, handler)
    kept = []

    def catches():
        try:
            alarmed()
        except Alarm as error:
            kept.append(error is given)
            raise

    try:
        strategy.run(step, (catches,))
    except Alarm as error:
        tell(f"alarm {error.args == given.args} {(error is given) == (rank == 1)} {True in kept}")
    check(strategy)
"""


@pytest.fixture(params=LIBRARIES)
def launch(request, tmp_path):
    """Run a program on some ranks, and return what came of it."""
    return functools.partial(run_job, request.param, tmp_path)


@pytest.fixture
def launch_openmpi(tmp_path):
    """Run a program with the first library alone."""
    return functools.partial(run_job, LIBRARIES[0], tmp_path)


@pytest.mark.parametrize("threads", [False, True], ids=["greenlets", "threads"])
def test_what_a_signals_handler_raises_comes_up_in_the_replica_that_runs(launch, threads):
    """Ctrl-C in Python, in C code, between two calls, again; and an alarm's own exception."""
    done = launch(SIGNALS.replace("THREADS", str(threads)), succeeds=True)
    lines = told(done)
    stopped = "ReplicaStopped"
    for name in ("in_python", "in_c"):
        assert f"[0] {name} ['{stopped}']" in lines
        assert f"[1] {name} ['KeyboardInterrupt', '{stopped}']" in lines
    assert f"[0] twice ['{stopped}']" in lines
    assert f"[1] twice ['KeyboardInterrupt', '{stopped}', 'one']" in lines
    assert len([line for line in lines if "between" in line]) == 2
    assert "[0] alarm True True False" in lines
    assert "[1] alarm True True True" in lines
    assert tracebacks(done) == 0


@pytest.mark.parametrize("threads", [False, True], ids=["greenlets", "threads"])
def test_a_stall_shows_where_the_replica_is(launch_openmpi, threads):
    """And so does SIGUSR2: not the lock at which the thread that called run waits for it."""
    done = launch_openmpi(
        f"""
        os.environ["MPI_REPLICA_STALL_SECONDS"] = "0.3"
        import logging, select
        strategy = mr.MPIStrategy(replicas_per_rank=2, replica_threads={threads})
        read, write = os.pipe()

        class Reports(logging.Handler):
            def emit(self, record):
                tell(record.getMessage())
                world.send(None, 1, 7)

        logging.getLogger("mpi_replica").addHandler(Reports())

        def dawdles():
            while not world.iprobe(tag=7):  # it dawdles here
                select.select([], [], [], 0.01)

        def step():
            total()
            if mr.get_replica_context().replica_id_in_sync_group == 3:
                dawdles()
            total()

        strategy.run(step)
        """,
        succeeds=True,
    )
    text = "\n".join(told(done))
    assert "in dawdles" in text
    assert "missing: replica 3 (rank 1" in text
    assert "turns.py" not in text


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_torch_that_is_imported_inside_of_a_step_is_an_error_on_all_ranks(launch_openmpi):
    done = launch_openmpi(
        """
        strategy = mr.MPIStrategy(replicas_per_rank=2)
        check(strategy)

        def step():
            import torch
            total()

        try:
            strategy.run(step)
        except mr.errors.ContextError as error:
            tell(str(error).partition(",")[0])
        check(strategy)
        """,
        succeeds=True,
    )
    text = "torch or JAX was imported inside of a step"
    assert told(done) == [f"[{rank}] {text}" for rank in (0, 1)]
