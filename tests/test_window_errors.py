"""A rank that fails while the window of reproducible sums is made: too late to tell the others."""

import functools

import pytest

from jobs import run_job, told
from launching import LIBRARIES

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

PROGRAM = """
    options = mr.CommunicationOptions(reproducible=True)
    strategy = mr.MPIStrategy(num_replicas=4, communication_options=options)
    check(strategy)
    transport = strategy.engine.transport
    made = getattr(transport, METHOD)

    def fails(*arguments, **settings):
        if AFTER:
            made(*arguments, **settings)
        raise MemoryError(f"there is none on rank {rank}")

    def step():
        return mr.get_replica_context().all_reduce("SUM", np.ones(90_000))

    if rank == 1:
        setattr(transport, METHOD, fails)
    try:
        strategy.run(step)
    except BaseException as error:
        tell(type(error).__name__)
        raise
"""


@pytest.fixture(params=LIBRARIES)
def launch(request, tmp_path):
    return functools.partial(run_job, request.param, tmp_path)


@pytest.mark.parametrize(
    ("method", "after"),
    [("open_shared_memory", False), ("all_gather_bytes", False), ("open_shared_memory", True)],
)
def test_the_job_ends_with_that_error(launch, method, after):
    program = PROGRAM.replace("METHOD", repr(method)).replace("AFTER", repr(after))
    done = launch(program, 3)
    assert "MemoryError: there is none on rank 1" in done.stderr
    lines = set(told(done))
    assert "[1] MemoryError" in lines
    # The others are told of it, or are ended where they wait inside of the library.
    assert lines <= {"[0] RankLostError", "[1] MemoryError", "[2] RankLostError"}
