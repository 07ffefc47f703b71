"""What the tests of the seed documents share; they run on several ranks."""

import numpy as np

import mpi_replica as mr


def two_replicas(passed_everywhere):
    """Yield a strategy with two replicas, as the pages have, whatever the number of ranks.

    They are on two ranks, or on one that is left over.
    """
    from mpi4py import MPI  # starts MPI, so not when this file is imported

    ranks = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank // 2)
    strategy = mr.MPIStrategy(ranks, num_replicas=2)
    yield strategy
    if passed_everywhere():
        strategy.close()
        ranks.Free()


def context():
    return mr.get_replica_context()


def replica_id():
    return context().replica_id_in_sync_group


def each(strategy, result):
    """Return (replica id, its value) for each replica of this rank."""
    values = strategy.experimental_local_results(result)
    return list(zip(strategy.local_replica_ids, values, strict=True))


def assert_arrays(result, expected):
    np.testing.assert_array_equal(result, expected, strict=True)


def assert_works_on(strategy, caught):
    """Assert that the ranks raised the same error, and that the next collective is right."""
    error = caught.value
    text = f"{type(error).__name__}: {error}"
    texts = strategy.run(lambda: context().all_gather(np.array([text]), axis=0))
    for _, found in each(strategy, texts):
        assert found.tolist() == [text] * strategy.num_replicas_in_sync
    ids = strategy.run(lambda: context().all_reduce("SUM", replica_id()))
    for _, total in each(strategy, ids):
        assert total == sum(range(strategy.num_replicas_in_sync))
