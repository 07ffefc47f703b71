"""Settings of all tests. On several ranks `mpi_replica.testing` holds them together."""

import signal
from pathlib import Path

import hypothesis
import pytest

pytest_plugins = ["mpi_replica.testing"]

RANKS_FOLDER = Path(__file__).parent / "ranks"

# What a file of tests has that launches ranks.
LAUNCH = {
    "run_ranks",
    "pass_on_ranks",
    "room_for",
    "run_job",
    "run_to_its_end",
    "Place",
    "joined_hosts",
    "HOSTS",
}

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


def pytest_configure(config):
    # A shell has its background jobs ignore Ctrl-C, nohup the end of a terminal: and so would all
    # that the tests start, of which some shall get these signals.
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    if under_mpi(config):
        return
    for argument in config.args:
        path = (config.invocation_params.dir / argument.partition("::")[0]).resolve()
        if path.is_relative_to(RANKS_FOLDER):
            raise pytest.UsageError(
                f"{argument} needs ranks: mpiexec -n 2 python -m pytest --only-mpi {argument}"
            )


def pytest_ignore_collect(collection_path, config):
    return True if collection_path == RANKS_FOLDER and not under_mpi(config) else None


def pytest_collection_modifyitems(items):
    # pytest-xdist begins by giving each worker as many tests, one behind the other. Launches wait
    # for each other (`launching.room_for`), most of all for long ones: so they do not hold up all
    # workers, and none is left alone at the end.
    def order(item):
        names = vars(item.module)
        is_long = "pass_on_ranks" in names or item.path.name.startswith("test_array_library")
        return (not is_long, LAUNCH.isdisjoint(names))

    items.sort(key=order)
