"""One rank's process ends, or is interrupted, while the others go on (DESIGN.md section 8).

The first, a middle or the last rank; the others must not wait for ever, the launcher must say that
something went wrong, and what went wrong is printed once, with the rank that it happened on.
"""

import functools
import os
import re
import select
import signal
import time

import pytest

from jobs import LIMIT_SECONDS, run_job, told, tracebacks
from launching import LIBRARIES

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself


@pytest.fixture(params=LIBRARIES)
def library(request):
    return request.param


@pytest.fixture
def launch(library, tmp_path):
    """Run a program on some ranks, and return what came of it."""
    return functools.partial(run_job, library, tmp_path)


def program(ends, culprit, replicas=1, waits="check(strategy)"):
    """Return a program that ends on one rank, while the others wait for it."""
    return f"""
    strategy = mr.MPIStrategy(replicas_per_rank={replicas})
    check(strategy)
    if rank == {culprit}:
        {ends}
    else:
        try:
            {waits}
        except mr.errors.RankLostError as error:
            tell(error)
            try:
                check(strategy)
            except mr.errors.RankLostError as again:
                assert again is error
                tell("again")
            raise
        tell("went on")
    """


def named(rank, replicas):
    """Return how an error names the replicas of a rank."""
    first = rank * replicas
    ids = f"replica {first}" if replicas == 1 else f"replicas {first}-{first + replicas - 1}"
    return f"{ids} (rank {rank})"


def check_others_lost_it(done, ranks, culprit, replicas):
    """All ranks that are left have one error, which names the one that has ended; return it."""
    left = [rank for rank in range(ranks) if rank != culprit]
    lines = told(done)
    assert sorted(line[:3] for line in lines) == [f"[{rank}]" for rank in left for _ in range(2)]
    (text,) = {line[4:] for line in lines if not line.endswith("again")}
    assert f"the program has ended on {named(culprit, replicas)}" in text
    return text


@pytest.mark.parametrize(
    ("ranks", "culprit", "replicas", "ends"),
    [
        (3, 0, 1, "pass"),
        (3, 1, 2, "sys.exit(0)"),
        (3, 2, 1, "sys.exit()"),
        (2, 0, 2, "pass"),
        (4, 2, 1, "sys.exit(0)"),
    ],
)
def test_a_rank_whose_program_ends_early_is_told_to_the_others(
    launch, ranks, culprit, replicas, ends
):
    """RankLostError names it and the call that waits, and comes again at every further call."""
    done = launch(program(ends, culprit, replicas), ranks)
    check_others_lost_it(done, ranks, culprit, replicas)
    reporter = 1 if culprit == 0 else 0
    assert tracebacks(done) == 1
    assert f"[rank {reporter} of {ranks}] Traceback" in done.stderr
    assert re.search(
        r"this rank waits in all_reduce\(SUM, float64\[\]\) at train\.py:\d+", done.stderr
    )


RAISES = "raise OSError('no space left')"
INTERRUPTED = "os.kill(os.getpid(), signal.SIGINT)"


@pytest.mark.parametrize(
    ("ranks", "culprit", "replicas", "ends", "waits"),
    [
        (3, 0, 2, RAISES, "check(strategy)"),
        (3, 1, 1, INTERRUPTED, "check(strategy)"),
        (3, 2, 1, RAISES, "strategy.extended.broadcast_to(1)"),
        (2, 1, 1, RAISES, "strategy.gather(strategy.run(lambda: np.ones(2)), axis=0)"),
        (4, 0, 1, RAISES, "strategy.run(lambda: None)"),
    ],
)
def test_an_uncaught_exception_outside_of_run_ends_the_job(
    launch, ranks, culprit, replicas, ends, waits
):
    """Printed once, by the rank of origin, without python -m mpi4py; the others hear of it."""
    done = launch(program(ends, culprit, replicas, waits), ranks)
    text = check_others_lost_it(done, ranks, culprit, replicas)
    error = "KeyboardInterrupt" if ends == INTERRUPTED else "OSError: no space left"
    assert f"ended with {error}" in text
    assert f"[rank {culprit} of {ranks}] Traceback" in done.stderr
    assert "train.py" in done.stderr
    assert f"\n{error}\n" in done.stderr
    assert tracebacks(done) == 1


def test_an_uncaught_exception_ends_those_too_that_wait_for_something_else(launch):
    """They can't be told in a call that is not the package's."""
    done = launch(program(RAISES, 1, waits="world.Barrier()"))
    assert done.told == []
    assert "[rank 1 of 2] Traceback" in done.stderr
    assert tracebacks(done) == 1


@pytest.mark.parametrize(
    ("ranks", "culprit", "status"), [(3, 0, 5), (3, 1, 0), (3, 2, 5), (2, 1, 0), (4, 1, 5)]
)
def test_a_process_that_ends_without_a_word_leaves_nobody_waiting(
    library, launch, ranks, culprit, status
):
    """The launcher ends the others. MPICH's then reports success where the process did."""
    lies = library == "mpich" and status == 0
    ends = f"os._exit({status})"
    done = launch(program(ends, culprit), ranks, succeeds=None if lies else False)
    assert "went on" not in "".join(done.told)


@pytest.mark.parametrize("who", ["rank == 1", "True"])
def test_an_interrupt_in_a_step_ends_every_rank(launch, who):
    """Decision 16: printed once, whether one rank gets it or all, each at another time."""
    done = launch(
        f"""
        strategy = mr.MPIStrategy()

        def step():
            for turn in range(1000):
                total()
                if turn == 10 + rank and {who}:
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
    assert len(re.findall(r"^\[rank \d of 3\] Traceback", done.stderr, re.MULTILINE)) <= 1


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_at_the_launcher_ends_the_job(library, launch, tmp_path, times):
    """A terminal sends it to the launcher, which ends the ranks or passes it on.

    MPICH's may report success where it comes twice.
    """

    def interrupt(launcher):
        deadline = time.monotonic() + LIMIT_SECONDS
        while len(list(tmp_path.glob("told-*"))) < 3:
            assert time.monotonic() < deadline, "the ranks did not start"
            assert launcher.poll() is None, "the job has ended"
            time.sleep(0.01)
        for _ in range(times):
            os.killpg(launcher.pid, signal.SIGINT)

    done = launch(
        """
        def step():
            total()
            tell("ready")
            while True:
                total()

        mr.MPIStrategy().run(step)
        """,
        3,
        meanwhile=interrupt,
        succeeds=None if library == "mpich" and times == 2 else False,
    )
    assert len(re.findall(r"^\[rank \d of 3\] Traceback", done.stderr, re.MULTILINE)) <= 1


def test_an_interrupt_of_a_rank_that_is_ending_is_not_lost(launch):
    """Decision 16: it is held while the rank tells the others that it ends."""
    done = launch(
        """
        strategy = mr.MPIStrategy()
        check(strategy)
        begin = strategy.engine.transport.begin_exchange

        def interrupted(*args):
            if rank == 1:
                signal.raise_signal(signal.SIGINT)
            return begin(*args)

        strategy.engine.transport.begin_exchange = interrupted
        """
    )
    assert done.returncode == 130
    assert "Exception ignored" not in done.stderr


def test_a_rank_that_ends_the_job_does_not_wait_for_ever_for_a_launcher_that_is_stopped(
    launch, tmp_path
):
    """Open MPI 5.0.11 waits in MPI_Abort for its answer, also where it has gone just then."""
    end = tmp_path / "end"
    os.mkfifo(end)

    def wait_for_the_end(_):
        reads = os.open(end, os.O_RDONLY | os.O_NONBLOCK)  # no end before somebody has written
        ended, *_ = select.select([reads], [], [], LIMIT_SECONDS / 2)
        os.close(reads)
        _, launcher_of_rank = (tmp_path / "told-0").read_text().split()
        os.kill(int(launcher_of_rank), signal.SIGCONT)
        assert ended

    launch(
        f"""
        from mpi_replica.ranks import abort

        abort._SECONDS_TO_ABORT = 0.1
        mr.MPIStrategy()
        tell(os.getppid())
        held = open({str(end)!r}, "w")
        os.kill(os.getppid(), signal.SIGSTOP)
        abort.abort_job(MPI, 3)
        """,
        1,
        meanwhile=wait_for_the_end,
    )
