"""Settings of all tests, and what a run on several ranks needs (see fence.py)."""

from pathlib import Path

import hypothesis
import pytest

from fence import PASSED, RankFence

RANKS_FOLDER = Path(__file__).parent / "ranks"

# All ranks must draw the same examples: no random seed, no memory of earlier runs, and no limit
# that a slow rank meets and a fast one does not. One strategy serves all examples of a test.
hypothesis.settings.register_profile(
    "ranks",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=25,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.function_scoped_fixture,
    ],
)
hypothesis.settings.load_profile("ranks")


def under_mpi(config):
    return config.getoption("--with-mpi") or config.getoption("--only-mpi")


@pytest.hookimpl(trylast=True)  # the terminal reporter must be there, to be taken away
def pytest_configure(config):
    if under_mpi(config):
        from mpi4py import MPI  # starts MPI: a run without ranks needs no MPI library

        config.pluginmanager.register(RankFence(MPI.COMM_WORLD), "rank-fence")
        if MPI.COMM_WORLD.rank > 0:
            config.pluginmanager.unregister(name="terminalreporter")
        return
    for argument in config.args:
        path = (config.invocation_params.dir / argument.partition("::")[0]).resolve()
        if path.is_relative_to(RANKS_FOLDER):
            raise pytest.UsageError(
                f"{argument} needs ranks: mpiexec -n 2 python -m pytest --only-mpi {argument}"
            )


def pytest_ignore_collect(collection_path, config):
    return True if collection_path == RANKS_FOLDER and not under_mpi(config) else None


@pytest.fixture
def passed_everywhere(request):
    """Tell, at teardown, whether the test's body passed on every rank: a fixture may then end with
    collective calls, which would hang after a failure."""
    return lambda: request.node.stash.get(PASSED, False)
