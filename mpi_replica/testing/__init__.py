"""A pytest plugin for tests on several ranks: a failure on one rank is one on all, and none hangs.

Name it in the ``conftest.py`` at the top of the tests, or with ``-p mpi_replica.testing``::

    pytest_plugins = ["mpi_replica.testing"]

A test is written as for one rank, and every rank runs it::

    def test_sum(strategy):
        total = strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", 1))
        assert set(strategy.experimental_local_results(total)) == {strategy.num_replicas_in_sync}

Start it with ``mpiexec -n 4 python -m pytest``, or without a launcher: then there is one rank, and
the plugin starts no MPI. It works beside pytest-mpi, with its options and marks, and without.

Between the parts of a test (setup, body, teardown) the ranks meet, and before the fixture
`strategy` makes one. What fails on one rank fails on all, with the texts of all ranks; what is
skipped on some only has failed; what is expected to fail has failed as expected where one rank did.
Rank 0 alone reports and writes files, also of warnings that it has not met itself. Where ranks
collect different tests, or one ends its session (an interrupt, `pytest.exit`), all stop, and say
why.

A rank that waits in a collective call of a strategy, which a rank with a failure does not make,
gets a `RankLostError`; one that waits for a rank which is busy elsewhere gets a
`CollectiveTimeoutError`, after the time that is said below, or after the ``timeout_seconds`` of its
strategy. A rank that waits elsewhere, for instance in a raw MPI call, can't be called back: after
the time ``MPI_REPLICA_TEST_FENCE`` (seconds, 30 by default) the others say who is missing and where
it is, report, and end the job. So no rank may need that much longer for a part of a test than
another; after half of that time the others give up all strategies. Where all ranks wait elsewhere
nobody is left to tell: ``faulthandler_timeout`` of pytest shows their stacks.

Fixtures
--------
strategy
    An `MPIStrategy` over all ranks, for one test. Parameters of `MPIStrategy` can be given:
    ``@pytest.mark.parametrize("strategy", [{"replicas_per_rank": 2}], indirect=True)``.
passed_everywhere
    A function that tells, at teardown, whether the body of the test passed on all ranks. Only then
    may the fixtures of a test make collective calls at their end.

Notes
-----
Ranks must collect the same tests: parameters come from no set of strings, unless PYTHONHASHSEED is
set, and from no random number. A plugin that shuffles tests is fine: the order of rank 0 holds.
With hypothesis use a profile with ``derandomize=True`` and ``database=None``, so that all ranks
draw the same examples, with ``deadline=None``, since a slow rank would go through them again alone,
and with ``suppress_health_check=[HealthCheck.function_scoped_fixture]`` for the fixture `strategy`.
An example must hold or fail on all ranks, or they look for a smaller one
apart: assert what ``strategy.gather_objects`` gives of all. pytest-xdist can't be used on several
ranks. With ``--pdb`` no limit holds.
"""

from __future__ import annotations

import faulthandler
import importlib
import math
import os
import threading
from collections.abc import Callable, Generator, Iterator

import pytest

from ..core.exceptions import LaunchError
from ..core.options import CommunicationOptions
from ..ranks.launch import launcher_variable, open_transport
from ..ranks.transport import Transport
from ..strategy.mpi_strategy import MPIStrategy
from .fence import Fence
from .plugin import BODY_PASSED, RankFence, quieten

# Where a test patches clocks or the pid, what is imported in it would keep what stands for these.
for _later in ("checkpoint", "data", "strategy.elastic.attempts"):
    importlib.import_module(f"mpi_replica.{_later}")

__all__ = ["passed_everywhere", "strategy"]

_FENCE = "rank-fence"
_LIMIT = "MPI_REPLICA_TEST_FENCE"
_LIMIT_SECONDS = "30"


@pytest.hookimpl(tryfirst=True)  # before other plugins open files that rank 0 alone shall write
def pytest_configure(config: pytest.Config) -> None:
    """Starts the fence, where there are several ranks."""
    limit_seconds = _limit_seconds(config)
    if config.getoption("dist", "no") != "no" and (launcher := launcher_variable()) is not None:
        raise pytest.UsageError(
            f"pytest-xdist (-n) and ranks can't be used together, and {launcher} in the environment"
            " says that an MPI launcher has started this process. Drop one of them."
        )
    transport = _open_when_all_ranks_have_started(limit_seconds)
    if transport.size == 1:
        transport.close()
        return
    if transport.rank > 0:
        quieten(config, transport.rank)
    config.pluginmanager.register(RankFence(Fence(transport, limit_seconds)), _FENCE)


def _open_when_all_ranks_have_started(limit_seconds: float) -> Transport:
    # A rank that stops before this, at an error in conftest.py, is one that MPI waits for, without
    # the lock of the interpreter: no thread of ours would run. This writes where it waits, and
    # ends the process.
    if not math.isinf(limit_seconds):
        faulthandler.dump_traceback_later(limit_seconds, exit=True, file=2)
    try:
        return open_transport()
    except LaunchError as error:
        raise pytest.UsageError(str(error)) from error
    finally:
        faulthandler.cancel_dump_traceback_later()


def _limit_seconds(config: pytest.Config) -> float:
    if config.getoption("usepdb") or config.getoption("trace"):
        return math.inf
    text = os.environ.get(_LIMIT, _LIMIT_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise pytest.UsageError(f"{_LIMIT}={text!r} is not a positive number of seconds")
    return seconds if seconds <= threading.TIMEOUT_MAX else math.inf  # no timer takes more


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Notes whether the body passed; the fence, if there is one, does so after this."""
    report = yield
    if call.when == "call":
        item.stash[BODY_PASSED] = report.passed
    return report


@pytest.fixture
def passed_everywhere(request: pytest.FixtureRequest) -> Callable[[], bool]:
    """Tell, at teardown, whether the test's body passed on every rank."""
    stash = request.node.stash
    return lambda: bool(stash.get(BODY_PASSED, False))


@pytest.fixture
def strategy(
    request: pytest.FixtureRequest, passed_everywhere: Callable[[], bool]
) -> Iterator[MPIStrategy]:
    """Give a strategy over all ranks, for one test; its calls wait no longer than the ranks do."""
    fence = request.config.pluginmanager.get_plugin(_FENCE)
    if fence is not None:
        fence.come_to_strategy(request.node)  # to make one is collective
    parameters = dict(getattr(request, "param", {}))
    # The fence has a limit for all strategies, but not where there is no watcher.
    if fence is not None and not math.isinf(fence.limit_seconds):
        limit = CommunicationOptions(timeout_seconds=fence.limit_seconds)
        given = parameters.get("communication_options")
        parameters["communication_options"] = limit if given is None else limit.merge(given)
    strategy = MPIStrategy(**parameters)
    yield strategy
    if passed_everywhere():
        strategy.close()  # collective
    else:
        strategy._close_here()
