"""How jobs end that go wrong (DESIGN.md sections 6 and 8, decisions 16 and 17).

Each test is a program on several ranks: no rank may be left waiting, and the launcher must say
that something went wrong.
"""

import functools
import re

import pytest

from jobs import run_job, told, tracebacks
from launching import LIBRARIES

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself


@pytest.fixture(params=LIBRARIES)
def launch(request, tmp_path):
    """Run a program on some ranks, and return what came of it."""
    return functools.partial(run_job, request.param, tmp_path)


@pytest.mark.parametrize("replicas_per_rank", [1, 2])
def test_an_uncaught_exception_of_a_replica_is_printed_once(launch, replicas_per_rank):
    """Section 8: by the rank of origin."""
    done = launch(
        f"""
        strategy = mr.MPIStrategy(replicas_per_rank={replicas_per_rank})

        def step():
            context = mr.get_replica_context()
            if context.replica_id_in_sync_group == 1:
                raise ValueError("no rows")
            return context.all_reduce("SUM", 1.0)

        strategy.run(step)
        """,
        3,
    )
    assert done.stderr.count("ValueError: no rows") == 1
    rank = 1 // replicas_per_rank
    assert f"[rank {rank} of 3] Traceback" in done.stderr
    assert f"replica 1 (rank {rank}) at train.py" in done.stderr
    assert tracebacks(done) == 1


def test_an_uncaught_mismatch_is_printed_once(launch):
    done = launch(
        """
        strategy = mr.MPIStrategy()
        strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", np.ones(2 + rank)))
        """,
        3,
    )
    assert done.stderr.count("StructureMismatchError") == 1
    assert tracebacks(done) == 1


@pytest.mark.parametrize("order", ["half, whole", "whole, half"])
@pytest.mark.parametrize("failing", ["half", "whole"])
def test_an_uncaught_exception_is_printed_by_its_rank_whatever_other_strategies_there_are(
    launch, order, failing
):
    """Also where the ranks of two strategies have other numbers; the job's own are printed."""
    done = launch(
        f"""
        communicators = {{"whole": world, "half": world.Split(rank > 0, rank)}}
        made = {{name: mr.MPIStrategy(communicators[name]) for name in "{order}".split(", ")}}

        def step():
            if rank == 1:
                raise ValueError("no rows")
            return mr.get_replica_context().all_reduce("SUM", 1.0)

        made["whole"].run(total)
        if {failing!r} == "whole" or rank > 0:
            made[{failing!r}].run(step)
        """,
        3,
    )
    assert "[rank 1 of 3] Traceback" in done.stderr
    assert done.stderr.count("ValueError: no rows") == tracebacks(done) == 1


@pytest.mark.parametrize("replicas_per_rank", [1, 2])
def test_an_uncaught_wrong_argument_is_printed_by_its_rank_with_its_line(launch, replicas_per_rank):
    """As an exception of the replica is."""
    done = launch(
        f"""
        strategy = mr.MPIStrategy(replicas_per_rank={replicas_per_rank})

        def step():
            context = mr.get_replica_context()
            if context.replica_id_in_sync_group == 3:
                return context.all_reduce("SUMM", 1.0)  # the mistake
            return context.all_reduce("SUM", 1.0)

        strategy.run(step)
        """,
        4 // replicas_per_rank,
    )
    rank = 3 // replicas_per_rank
    assert f"[rank {rank} of {4 // replicas_per_rank}] Traceback" in done.stderr
    assert tracebacks(done) == 1
    assert re.search(r"  File \".*train.py\", line \d+, in step\n.*# the mistake\n", done.stderr)


def test_ranks_that_stop_at_different_steps_print_that_once(launch, tmp_path):
    done = launch(
        f"""
        checkpoint = mr.Checkpoint(mr.MPIStrategy(), step=0)
        manager = mr.CheckpointManager(checkpoint, {str(tmp_path)!r}, save_on_signal=True)
        manager.exit_if_signalled(rank)
        """,
        3,
    )
    assert "got different steps: rank 0: 0; rank 1: 1; rank 2: 2" in done.stderr
    assert tracebacks(done) == 1


def test_an_uncaught_exception_in_a_thread_that_communicates_ends_the_job(launch):
    """Section 8: the others would wait for it for ever."""
    done = launch(
        """
        import threading
        strategy = mr.MPIStrategy()

        def work():
            check(strategy)
            if rank == 1:
                raise OSError("the loader broke")
            check(strategy)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        """
    )
    assert done.stderr.count("OSError: the loader broke") == 1


def test_ranks_that_end_together_are_no_error(launch):
    """Also without close(), with two strategies, and where they end in their own time."""
    done = launch(
        """
        one, other = mr.MPIStrategy(), mr.MPIStrategy(replicas_per_rank=2)
        check(other)
        check(one)
        world.Barrier()
        tell("done")
        """,
        3,
        succeeds=True,
    )
    assert told(done) == [f"[{rank}] done" for rank in range(3)]
    assert done.stderr.strip() == ""


def test_sys_exit_in_a_replica_ends_every_rank_with_its_status(launch):
    """Decision 16."""
    done = launch(
        """
        strategy = mr.MPIStrategy(replicas_per_rank=2)

        def step():
            context = mr.get_replica_context()
            context.all_reduce("SUM", 1.0)
            if context.replica_id_in_sync_group == 3:
                sys.exit(3)
            context.all_reduce("SUM", 1.0)

        try:
            strategy.run(step)
        except SystemExit as error:
            tell(error.code)
            raise
        """
    )
    assert told(done) == ["[0] 3", "[1] 3"]
    assert done.returncode == 3
    assert tracebacks(done) == 0


def test_an_interrupt_ends_every_rank(launch):
    """Decision 16: printed once."""
    done = launch(
        """
        strategy = mr.MPIStrategy()

        def step():
            for turn in range(1000):
                total()
                if turn == 10 and rank == 1:
                    os.kill(os.getpid(), signal.SIGINT)

        try:
            strategy.run(step)
        except KeyboardInterrupt:
            tell("interrupted")
            raise
        """,
        3,
    )
    assert told(done) == [f"[{rank}] interrupted" for rank in range(3)]
    assert len(re.findall(r"^KeyboardInterrupt", done.stderr, re.MULTILINE)) <= 1


def test_a_second_interrupt_while_one_is_held_aborts(launch):
    """Decision 16: the other rank never comes, so that the first is never told.

    It writes where it is before it is ended (issue 3).
    """
    done = launch(
        """
        strategy = mr.MPIStrategy()
        check(strategy)
        if rank == 1:
            world.recv(source=0)  # never sent
        exchange = strategy.engine.transport.exchange

        def interrupted(*args):
            signal.raise_signal(signal.SIGINT)
            tell("held")
            signal.raise_signal(signal.SIGINT)
            tell("not reached")
            return exchange(*args)

        strategy.engine.transport.exchange = interrupted
        check(strategy)
        """
    )
    assert told(done) == ["[0] held"]
    assert re.search(
        r"^\[rank 1 of 2\] the job is aborted: it is at\n(  .*\n)*?"
        r"    +world.recv\(source=0\)  # never sent\n",
        done.stderr,
        re.MULTILINE,
    )


# The last rank waits for a message, and the others for it. `CALL` is what they call, `LATE` what it
# does after the message came.
TIMEOUT = """
    options = mr.CommunicationOptions(timeout_seconds=0.5)

    def large():
        return mr.get_replica_context().all_reduce("SUM", np.ones(9000))

    def with_options():
        return mr.get_replica_context().all_reduce("SUM", 1.0, options)

    strategy = mr.MPIStrategy(communication_options=GIVEN)
    check(strategy)
    if rank < world.size - 1:
        try:
            strategy.run(CALL)
        except mr.errors.CollectiveTimeoutError as error:
            assert isinstance(error, TimeoutError)
            tell(repr(str(error)))
            for again in (
                lambda: strategy.run(total),
                lambda: strategy.run(lambda: 1),
                lambda: strategy.extended.broadcast_to(1.0),
            ):
                try:
                    again()
                except mr.errors.CollectiveTimeoutError as same:
                    tell(same is error)
            strategy.close()
            tell("closed")
        if rank == 0:
            world.send("go on", world.size - 1)
    else:
        world.recv(source=0)
        LATE
        tell("came late")
    world.Barrier()
"""


def timeout_program(given, call, late="pass"):
    program = TIMEOUT.replace("GIVEN", given).replace("CALL", call)
    return program.replace("LATE", late)


@pytest.mark.parametrize(("given", "call"), [("options", "total"), ("None", "with_options")])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_never_comes_is_a_timeout_and_that_is_final(launch, ranks, given, call):
    """Section 6: every later call raises at once; close() is local."""
    # Beside another job a rank may have no CPU in the half second in which it can say where it is.
    done = launch(timeout_program(given, call), ranks, alone=True)
    texts = set()
    for rank in range(ranks - 1):
        mine = [line[4:] for line in told(done) if line.startswith(f"[{rank}]")]
        (text,) = (line for line in mine if "all_reduce" in line)
        texts.add(text)
        assert sorted(mine) == sorted([text, "True", "True", "True", "closed"])
    (text,) = texts
    waiting = {2: "waiting: replica 0 (rank 0)", 3: "waiting: replicas 0-1 (ranks 0-1)"}[ranks]
    for word in ("0.5 s", "train.py:", waiting, f"missing: replica {ranks - 1} (rank", "recv"):
        assert word in text
    assert f"[{ranks - 1}] came late" in told(done)


@pytest.mark.parametrize("call", ["total", "large"])
def test_a_rank_that_comes_late_to_a_call_that_was_given_up_is_not_left_waiting(launch, call):
    """Section 6: with timeout_seconds it polls too, and gives up."""
    late = f"""try:
            strategy.run({call})
        except mr.errors.CollectiveTimeoutError as error:
            tell("gave up")"""
    done = launch(timeout_program("options", call, late))
    assert "[1] gave up" in told(done)
    assert "[1] came late" in told(done)


def test_the_end_of_a_forked_child_is_local(launch):
    """Section 8: hooks, atexit and close() do nothing in it."""
    done = launch(
        """
        import atexit

        strategy = mr.MPIStrategy()
        check(strategy)
        child = os.fork()
        if child == 0:
            try:
                check(strategy)
            except mr.errors.ContextError as error:
                tell(error)
            strategy.close()
            try:
                raise ValueError("in the child of rank %d" % rank)
            except ValueError:
                sys.excepthook(*sys.exc_info())
            atexit._run_exitfuncs()
            os._exit(7)  # as multiprocessing ends its children
        tell(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        check(strategy)
        strategy.close()
        tell("done")
        """,
        succeeds=True,
    )
    for rank in range(2):
        text, *rest = (line for line in told(done) if line.startswith(f"[{rank}]"))
        assert "forked child" in text
        assert rest == [f"[{rank}] 7", f"[{rank}] done"]
        # Python writes a traceback in parts, and those of the children may mix.
        assert done.stderr.count(f"in the child of rank {rank}") == 1


@pytest.mark.parametrize("threads", [False, True], ids=["greenlets", "threads"])
def test_an_abandoned_replica_does_not_keep_the_program_from_ending(launch, threads):
    """Decision 17: it is never resumed, and its code does not run again."""
    done = launch(
        f"""
        strategy = mr.MPIStrategy(replicas_per_rank=2, replica_threads={threads})

        def step():
            context = mr.get_replica_context()
            context.all_reduce("SUM", 1.0)
            if context.replica_id_in_sync_group == 3:
                raise ValueError("the cause")
            while True:
                try:
                    context.all_reduce("SUM", 1.0)
                except BaseException:
                    pass

        try:
            strategy.run(step)
        except ValueError as error:
            tell(any("abandoned" in note for note in error.__notes__))
        check(strategy)
        """,
        succeeds=True,
    )
    assert told(done) == ["[0] True", "[1] True"]
    assert "was abandoned" in done.stderr
