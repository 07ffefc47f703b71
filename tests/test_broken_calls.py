"""Calls that fail on one rank when others can't be told any more (DESIGN.md section 6).

Each test is a program on several ranks; where it is wrong it ends at once, instead of waiting.
"""

import functools

import pytest

from jobs import run_job, told
from launching import LIBRARIES

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself


@pytest.fixture(params=LIBRARIES)
def launch(request, tmp_path):
    """Run a program on some ranks, and return what came of it."""
    return functools.partial(run_job, request.param, tmp_path, succeeds=None)


def test_a_signal_handler_that_raises_where_a_call_begins_leaves_nothing_closed(launch):
    """Ctrl-C comes through, and another thread's call is an error instead of a wait."""
    program = """
        import threading

        strategy = mr.MPIStrategy()
        recorder = strategy.engine.watch.recorder
        begin = recorder.begin

        def end(*arguments):
            raise TimeoutError("the limit of a step")

        def begin_when_the_signal_comes(*arguments):
            recorder.begin = begin
            signal.raise_signal(signal.SIGALRM)

        signal.signal(signal.SIGALRM, end)
        if rank == 1:
            recorder.begin = begin_when_the_signal_comes
        try:
            strategy.run(total)
        except TimeoutError as error:
            tell(error)
        try:
            signal.raise_signal(signal.SIGINT)
            tell("held")
            world.Abort(3)
        except KeyboardInterrupt:
            tell("interrupted")

        def work():
            try:
                check(strategy)
            except mr.errors.ContextError:
                tell("refused")

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(20)
        if thread.is_alive():
            tell("waits")
            world.Abort(3)
        check(strategy)
        tell("works")
        """
    done = launch(program)
    words = ("the limit of a step", "interrupted", "refused", "works")
    assert told(done) == [f"[{rank}] {word}" for rank in range(2) for word in words]


def test_an_exchange_that_failed_in_the_library_is_not_made_again(launch):
    """The others may have had all of it: a second one would meet their next one."""
    done = launch(
        """
        class FailsOnce(MPI.Intracomm):  # on the last rank, which then has the data of all
            calls = 0

            def Allreduce(self, *arguments):
                FailsOnce.calls += 1
                if FailsOnce.calls == 2 and rank == world.size - 1:
                    tell("made again")
                    world.Abort(3)
                super().Allreduce(*arguments)
                if rank == world.size - 1:
                    self.Bcast(bytearray(1), root=world.size)  # an error of the library

        strategy = mr.MPIStrategy(FailsOnce(world))
        check(strategy)
        strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", np.ones(9000)))
        """,
    )
    assert told(done) == []
    assert "invalid root" in done.stderr.lower()


def test_an_exchange_behind_the_header_that_fails_ends_the_strategy_on_all_ranks(launch):
    """Here with its error; where the others poll, as with a timeout, by a lost rank.

    All large data is moved by what fails: sums in pieces, gathered leaves, the barrier of a window
    and Alltoallv. Each has a strategy of its own.
    """
    done = launch(
        """
        def fails(name, call, **options):
            about = mr.CommunicationOptions(timeout_seconds=60, **options)
            strategy = mr.MPIStrategy(communication_options=about)
            strategy.run(call)  # the window is there
            transport = strategy.engine.transport
            exchange, count = getattr(transport, name), 0

            def fail(*arguments):
                nonlocal count
                count += 1
                if count == 2 and rank == 1:
                    raise OSError(f"the second {name}")
                return exchange(*arguments)

            setattr(transport, name, fail)
            for do in (lambda: strategy.run(call), lambda: strategy.run(call), strategy.barrier):
                try:
                    do()
                except (OSError, mr.errors.RankLostError) as error:
                    tell(f"{name}: {type(error).__name__}")

        context = mr.get_replica_context
        large = np.ones(1 << 20)
        fails("all_reduce", lambda: context().all_reduce("SUM", large))
        fails("all_gather_blocks", lambda: context().all_gather([large, large], 0))
        for name, way in (("barrier", "SHARED_MEMORY"), ("all_to_all", "ALLTOALL")):
            fails(name, lambda: context().all_reduce("SUM", large), implementation=way)
        """,
    )
    names = ("all_reduce", "all_gather_blocks", "barrier", "all_to_all")
    errors = [("RankLostError", 0), ("OSError", 1)]
    expected = [
        f"[{rank}] {name}: {error}" for error, rank in errors for name in names for _ in range(3)
    ]
    assert told(done) == expected
