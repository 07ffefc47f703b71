"""The threads of BLAS in reproducible strategies, on several ranks."""

import pytest
import threadpoolctl
from mpi4py import MPI

import mpi_replica as mr
from everywhere import gathered, raises_everywhere

REPRODUCIBLE = mr.CommunicationOptions(reproducible=True)
VARIABLE = "MPI_REPLICA_BLAS_THREADS"


def reproducible(**arguments):
    return mr.MPIStrategy(communication_options=REPRODUCIBLE, **arguments)


def threads():
    """Return how many threads the BLAS libraries of this rank have."""
    found = threadpoolctl.threadpool_info()
    return {info["num_threads"] for info in found if info["user_api"] == "blas"}


@pytest.fixture
def rank():
    return MPI.COMM_WORLD.rank


@pytest.fixture
def own_threads(rank):
    """Let each rank have another number of threads of BLAS."""
    with threadpoolctl.threadpool_limits(rank + 2, user_api="blas"):
        yield {rank + 2}


@pytest.mark.usefixtures("few_ranks")
@pytest.mark.parametrize("given", [None, "2"])
@pytest.mark.parametrize("layout", [{}, {"replicas_per_rank": 2}, {"num_replicas": 6}])
def test_each_replica_has_the_same_threads_in_every_layout(given, layout, own_threads, monkeypatch):
    if given is not None:
        monkeypatch.setenv(VARIABLE, given)
    with reproducible(**layout) as strategy:
        seen = strategy.experimental_local_results(strategy.run(lambda: [*threads()]))
        assert seen == ([int(given or 1)],) * len(strategy.local_replica_ids)
    assert threads() == own_threads


@pytest.mark.usefixtures("own_threads")
def test_values_that_differ_between_ranks_are_named_on_every_rank(rank, monkeypatch):
    if MPI.COMM_WORLD.size == 1:
        pytest.skip("a single rank has nobody to differ from")
    before = threads()
    last = MPI.COMM_WORLD.size - 1
    monkeypatch.setenv(VARIABLE, "7" if rank == last else "5")
    error = raises_everywhere(ValueError, reproducible)
    for word in (VARIABLE, "differs between ranks", "5", f"rank {last}: 7"):
        assert word in str(error)
    assert threads() == before
    monkeypatch.setenv(VARIABLE, "5")
    with reproducible() as strategy:
        assert gathered([*threads()]) == [[5]] * strategy.size


@pytest.mark.usefixtures("own_threads")
def test_a_bad_value_on_one_rank_is_named_on_every_rank(rank, monkeypatch):
    before = threads()
    if rank == MPI.COMM_WORLD.size // 2:
        monkeypatch.setenv(VARIABLE, "many")
    error = raises_everywhere(ValueError, reproducible)
    assert f"{VARIABLE}='many' is not a positive integer" in str(error)
    assert threads() == before


def test_ranks_that_compute_alike_are_not_warned_of(caplog):
    reproducible().close()
    assert [record.getMessage() for record in caplog.records] == []
