"""Reproducible sums where there is too little shared memory: one warning, and the same bits."""

import functools
import subprocess

import pytest

from jobs import run_job, told
from launching import LIBRARIES

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

# What the MPI libraries themselves need of it.
MIB = 64
OWN_FOLDER = f'mount -t tmpfs -o size={MIB}m tmpfs /dev/shm && exec "$@"'
PREFIX = ["unshare", "-m", "sh", "-c", OWN_FOLDER, "sh"]

PROGRAM = """
    import logging

    logging.getLogger("mpi_replica").addFilter(lambda record: tell(record.getMessage()) or False)
    reproducible = mr.CommunicationOptions(reproducible=True)
    by_window = mr.CommunicationOptions(implementation="SHARED_MEMORY")
    rows = np.random.default_rng(0).standard_normal((4, 90_001)) * 10.0 ** np.arange(-2, 2)[:, None]
    right = ((rows[0] + rows[1]) + (rows[2] + rows[3])).tobytes()

    def step(length, options=None):
        ctx = mr.get_replica_context()
        return ctx.all_reduce("SUM", rows[ctx.replica_id_in_sync_group][:length], options)

    def check_bits():
        for length in (3, 9000, 90_001):
            for result in strategy.run(step, (length,)).values:
                assert result.tobytes() == right[:length * 8], length

    with mr.MPIStrategy(num_replicas=4, communication_options=reproducible) as strategy:
        check(strategy)
        space = os.statvfs("/dev/shm")
        assert space.f_blocks * space.f_frsize == MIB << 20, "not a folder of its own"
        if rank == 0:  # what MPI needs it has now
            with open("/dev/shm/filled", "wb") as file:
                os.posix_fallocate(file.fileno(), 0, space.f_bavail * space.f_frsize - (1 << 18))
        world.Barrier()
        for _ in range(2):
            check_bits()
        for length in (3, 90_001, 3):
            try:
                strategy.run(step, (length, by_window))
            except ValueError as error:
                tell(f"error: {error}")
            check_bits()
    tell("done")
"""


def may_unshare():
    try:
        done = subprocess.run([*PREFIX, "true"], capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        return False
    return done.returncode == 0


@pytest.fixture(params=LIBRARIES)
def launch(request, tmp_path):
    if not may_unshare():
        pytest.skip("this user may not mount a folder in a namespace of its own (unshare -m)")
    return functools.partial(run_job, request.param, tmp_path, prefix=PREFIX, succeeds=True)


@pytest.mark.parametrize("ranks", [2, 3])
def test_one_rank_warns_once_and_who_insists_gets_an_error_on_every_rank(launch, ranks):
    """Two ranks need none."""
    lines = told(launch(PROGRAM.replace("MIB", str(MIB)), ranks))
    texts = {rank: [] for rank in range(ranks)}
    for line in lines:
        rank, _, text = line.partition("] ")
        texts[int(rank.removeprefix("["))].append(text)
    if ranks > 2:
        warning = texts[0].pop(0)
        assert warning.startswith("reproducible sums go by Alltoallv, which is slower than shared")
        assert " KiB are needed in /dev/shm, and " in warning
    for of_rank in texts.values():
        assert of_rank == texts[0]
        *errors, done = of_rank
        assert done == "done"
        assert len(errors) == 3
        for error in errors:
            assert error.startswith("error: implementation=SHARED_MEMORY can't be had: ")
            assert error.endswith("Use AUTO or ALLTOALL.")
