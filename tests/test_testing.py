"""What a user's tests do on several ranks with `mpi_replica.testing`.

Each launch runs a user's small project, with tests that go wrong in many ways.
"""

import math
import re
import subprocess
import sys
import textwrap
import types
import xml.etree.ElementTree as ET

import pytest

from launching import LIBRARIES, ROOT, rank_environment, run_ranks
from mpi_replica.testing import _limit_seconds
from mpi_replica.testing.arrivals import Arrival, failure, judge

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

LIMIT_SECONDS = 60
FENCE_SECONDS = 4  # half of it is waited in one test

CONFTEST = """
    pytest_plugins = ["mpi_replica.testing"]
"""

HEAD = """
    import os
    import unittest
    import pytest
    from mpi4py import MPI
    import mpi_replica as mr

    world = MPI.COMM_WORLD
    rank = world.rank

    def check(strategy):
        one = strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", 1.0))
        found = set(strategy.experimental_local_results(one))
        assert found == {strategy.num_replicas_in_sync}
"""


def on(*jobs):
    return [job for job in jobs if job[0] in LIBRARIES]


def environment():
    return {
        "PYTHONPATH": str(ROOT),
        "MPI_REPLICA_TEST_FENCE": str(FENCE_SECONDS),
        "PYTEST_ADDOPTS": "-p no:hypothesispytest --color=no",
    }


@pytest.fixture
def launch(tmp_path):
    """Run pytest on some ranks in a project with these files; fail where it does not end."""

    def run(library, ranks, files, *arguments):
        write(tmp_path, files)
        own = tmp_path / ".temp"  # ranks that remove at once what others have left there warn of it
        own.mkdir(exist_ok=True)
        done = run_ranks(
            library,
            ranks,
            ["-m", "pytest", "--junitxml=report.xml", *arguments],
            timeout_seconds=LIMIT_SECONDS,
            env=environment() | {"PYTEST_DEBUG_TEMPROOT": str(own)},
            cwd=tmp_path,
        )
        if re.search("MPIEXEC_TIMEOUT|timeout after|time ?limit", done.stderr, re.IGNORECASE):
            pytest.fail(f"the job did not end by itself\n{done.stdout}\n{done.stderr}")
        return done

    return run


def write(folder, files):
    for name, text in ({"conftest.py": CONFTEST} | files).items():
        head = HEAD if name.startswith("test_") else ""
        (folder / name).write_text(textwrap.dedent(head) + textwrap.dedent(text))


def outcomes(folder):
    """Return (outcome, text) by the name of a test, as the report of rank 0 has them."""
    found = {}
    for case in ET.parse(folder / "report.xml").iter("testcase"):
        entry = found.setdefault(case.get("name"), ["passed", ""])
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                expected = child.get("type") == "pytest.xfail"
                entry[0] = "xfailed" if expected else child.tag
                entry[1] += f"{child.get('message')}\n{child.text}"
    return found


def summary(done):
    """Return the counts of the last line of the report, which rank 0 alone writes."""
    (line,) = re.findall(r"^=+ (.*) in [\d.]+s.* =+$", done.stdout, re.MULTILINE)
    return line


MISTAKES = {
    # A plugin that shuffles the tests, and another way on each rank.
    "conftest.py": CONFTEST
    + """
    import os, random

    def pytest_collection_modifyitems(items):
        rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
        mixed = [item for item in items if item.path.name == "test_mistakes.py"]
        others = [item for item in items if item not in mixed]
        random.Random(int(rank)).shuffle(mixed)
        items[:] = mixed + others
    """,
    "test_mistakes.py": """
    def test_good(strategy):
        check(strategy)

    @pytest.mark.parametrize("strategy", [{"replicas_per_rank": 2}], indirect=True)
    def test_two_replicas_a_rank(strategy):
        assert strategy.num_replicas_in_sync == 2 * world.size
        check(strategy)

    def test_fails_on_one_while_others_wait(strategy):
        print(f"printed by rank {rank}")
        assert rank != 1, "the data of rank 1 are wrong"
        check(strategy)

    def test_fails_on_all(strategy):
        assert [rank] == ["text"]

    def test_raises_with_a_strategy_of_its_own():
        with mr.MPIStrategy() as strategy:
            if rank == 2:
                raise KeyError("of rank 2")
            check(strategy)

    def test_ends_early_on_one(strategy):
        if rank > 0:
            check(strategy)

    def test_is_skipped_on_one(strategy):
        if rank == 1:
            pytest.skip("no data on rank 1")
        check(strategy)

    @pytest.mark.skipif(True, reason="on all ranks")
    def test_is_skipped_on_all(strategy):
        check(strategy)

    @pytest.mark.xfail(strict=True, raises=ValueError, reason="known")
    def test_fails_on_one_as_expected(strategy):
        if rank == 1:
            raise ValueError
        check(strategy)

    @pytest.mark.xfail(strict=True, reason="known")
    def test_passes_unexpectedly(strategy):
        check(strategy)

    class TestOfUnittest(unittest.TestCase):
        @unittest.expectedFailure
        def test_of_unittest_fails_on_one_as_expected(self):
            assert rank != 1

        @unittest.expectedFailure
        def test_of_unittest_passes_unexpectedly(self):
            pass

    @pytest.fixture
    def broken(strategy):
        if rank == 1:
            raise OSError("no file on rank 1")

    def test_setup_fails_on_one(strategy, broken):
        check(strategy)

    @pytest.fixture
    def broken_before():
        if rank == 1:
            raise OSError("no folder on rank 1")

    def test_setup_fails_on_one_before_the_strategy(broken_before, strategy):
        check(strategy)

    @pytest.mark.skipif(rank == 1, reason="not on rank 1")
    def test_a_mark_skips_setup_on_one(strategy):
        check(strategy)

    def test_fails_on_one_before_it_asks_for_the_strategy(request):
        assert rank != 1, "too early"
        check(request.getfixturevalue("strategy"))

    @pytest.fixture
    def broken_later(strategy):
        yield
        if rank == 2:
            raise OSError("nothing to remove on rank 2")

    def test_teardown_fails_on_one(strategy, broken_later):
        check(strategy)

    def test_subtest_fails_on_one(strategy, subtests):
        with subtests.test("of rank 1"):
            assert rank != 1, "subtest"
        with subtests.test("of all"):
            check(strategy)

    @pytest.fixture
    def checked(subtests):
        for number in range(rank + 1):  # ranks need not have the same ones
            with subtests.test(number=number):
                assert number < 2, "subtest of a fixture"

    def test_subtest_fails_in_setup_on_one(strategy, checked):
        check(strategy)

    @pytest.fixture
    def skipped(subtests):
        with subtests.test("before a skip"):
            assert rank != 2, "subtest and skip"
        pytest.skip("not today")

    def test_subtest_fails_before_a_skip_in_setup(skipped):
        pass

    @pytest.mark.mpi(min_size=9)
    def test_needs_more_ranks(strategy):
        check(strategy)

    @pytest.mark.mpi_xfail
    def test_fails_under_mpi(strategy):
        assert rank == 0
        check(strategy)

    @pytest.mark.mpi_skip
    def test_is_not_for_mpi(strategy):
        check(strategy)
    """,
    "test_modules.py": """
    @pytest.fixture(scope="module")
    def shared():
        strategy = mr.MPIStrategy()
        yield strategy
        strategy.close()

    @pytest.fixture(scope="module")
    def broken():
        if rank == 1:
            raise OSError("no table on rank 1")

    def test_fails_beside_a_shared_strategy(shared):
        assert rank != 1

    def test_shared_strategy_works_on(shared):
        check(shared)

    def test_module_fixture_fails_on_one(broken):
        check(mr.MPIStrategy())

    def test_it_fails_again(broken):
        check(mr.MPIStrategy())
    """,
}

PASSED = ["test_good", "test_two_replicas_a_rank[strategy0]", "test_shared_strategy_works_on"]
SKIPPED = ["test_is_skipped_on_all", "test_needs_more_ranks", "test_is_not_for_mpi"]
XFAILED = [
    "test_fails_on_one_as_expected",
    "test_of_unittest_fails_on_one_as_expected",
    "test_fails_under_mpi",
]
FAILED = {
    "test_fails_on_one_while_others_wait": [
        "rank 1: AssertionError: the data of rank 1 are wrong",
        "ranks 0, 2 stopped, rank 1 failed",
        "waits in all_reduce(SUM, float64[], with a timeout) at test_mistakes.py:",
        "--- Captured stdout call\nprinted by rank 1",
    ],
    "test_fails_on_all": ["assert [0] == ['text']", "assert [1] == ['text']", "[2] == ['text']"],
    "test_raises_with_a_strategy_of_its_own": ["rank 2 failed", "KeyError: 'of rank 2'"],
    "test_ends_early_on_one": ["rank 0 passed, ranks 1-2 stopped", "RankLostError", "all_reduce("],
    "test_is_skipped_on_one": ["rank 1 skipped", "no data on rank 1"],
    "test_passes_unexpectedly": ["[XPASS(strict)] known"],
    "test_of_unittest_passes_unexpectedly": ["Unexpected success"],
    "test_setup_fails_on_one": ["ranks 0, 2 passed, rank 1 failed", "OSError: no file on rank 1"],
    "test_setup_fails_on_one_before_the_strategy": [
        "ranks 0, 2 stopped, rank 1 failed",
        "OSError: no folder on rank 1",
        "waits in the fixture `strategy`",
    ],
    "test_a_mark_skips_setup_on_one": ["ranks 0, 2 stopped, rank 1 skipped", "not on rank 1"],
    "test_fails_on_one_before_it_asks_for_the_strategy": [
        "ranks 0, 2 stopped, rank 1 failed",
        "AssertionError: too early",
    ],
    "test_teardown_fails_on_one": ["ranks 0-1 passed, rank 2 failed", "to remove on rank 2"],
    "test_subtest_fails_on_one": ["ranks 0, 2 passed, rank 1 failed", "AssertionError: subtest"],
    "test_subtest_fails_in_setup_on_one": [
        "ranks 0-1 passed, rank 2 failed",
        "AssertionError: subtest of a fixture",
    ],
    "test_subtest_fails_before_a_skip_in_setup": [
        "ranks 0-1 skipped, rank 2 failed",
        "AssertionError: subtest and skip",
    ],
    "test_fails_beside_a_shared_strategy": ["rank 1 failed", "assert 1 != 1"],
    "test_module_fixture_fails_on_one": ["rank 1 failed", "OSError: no table on rank 1"],
    "test_it_fails_again": ["rank 1 failed", "OSError: no table on rank 1"],
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_goes_wrong_on_one_rank_goes_wrong_on_all_and_the_next_test_runs(
    library, launch, tmp_path
):
    done = launch(library, 3, MISTAKES, "--with-mpi")
    told = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 1, told
    found = outcomes(tmp_path)
    expected = dict.fromkeys(PASSED, "passed") | dict.fromkeys(SKIPPED, "skipped")
    expected |= dict.fromkeys(XFAILED, "xfailed") | dict.fromkeys(FAILED, "failure")
    for name in FAILED:
        if "setup" in name or "teardown" in name or "module_fixture" in name or "again" in name:
            expected[name] = "error"
    assert {name: outcome for name, (outcome, _) in found.items()} == expected, told
    for name, texts in FAILED.items():
        for text in texts:
            assert text in found[name][1], f"{name}: {found[name][1]}"
    # The body of a test whose setup failed on one rank ran on none, so nobody waited in it.
    assert "waits in" not in found["test_setup_fails_on_one"][1]
    # 18 tests fail, one of them after its body has passed.
    assert summary(done) == "10 failed, 4 passed, 3 skipped, 3 xfailed, 8 errors"
    check_failures_come_again(LIBRARIES[-1], launch, tmp_path)


def check_failures_come_again(library, launch, tmp_path):
    done = launch(library, 2, {}, "--with-mpi", "--lf", "-x", "-p", "mpi_replica.testing")
    assert "run-last-failure: rerun previous 18 failures" in done.stdout, done.stdout + done.stderr
    assert re.search(r"1 (failed|error)", summary(done))
    assert "stopping after 1 failures" in done.stdout


STUCK = {
    "test_stuck.py": """
    def test_fails():
        assert rank != 2, "seen before"

    def test_stuck():
        if rank == int(os.environ["STUCK"]):
            world.Barrier()  # the others do not call it
        assert rank != 2, "the reason"

    def test_never_runs(strategy):
        check(strategy)
    """
}


@pytest.mark.parametrize(("library", "stuck"), on(("openmpi", 1), ("mpich", 0)))
def test_a_rank_that_does_not_come_is_named_with_its_stack_and_the_job_ends(
    library, stuck, launch, tmp_path, monkeypatch
):
    monkeypatch.setenv("STUCK", str(stuck))
    done = launch(library, 3, STUCK)
    told = f"{done.stdout}\n{done.stderr}"
    assert done.returncode != 0
    if stuck:  # rank 0 came, and reports as ever
        found = outcomes(tmp_path)
        assert list(found) == ["test_fails", "test_stuck"], told
        text = found["test_stuck"][1]
        assert "test_stuck.py::test_stuck (call): ranks 0, 2 waited 4 s" in text
        assert summary(done) == "2 failed"
    else:
        text = done.stderr
        assert "[rank 1 of 3] test_stuck.py::test_stuck (call): ranks 1-2 waited 4 s" in text, told
        assert "failed earlier: test_stuck.py::test_fails" in text
        assert "AssertionError: seen before" in text
    last = r"last call test_stuck.py::test_stuck, \d.* ago; it is now at\n"
    assert re.search(rf"rank {stuck}, host \S+, pid \d+, {last}", text), text
    assert "_pytest" not in text  # the stack begins at the test
    assert re.search(r"test_stuck.py\", line \d+, in test_stuck\n +world.Barrier\(\)", text), text
    assert "AssertionError: the reason" in text
    assert "test_never_runs" not in told


BUSY = """
    import threading

    @pytest.fixture
    def own():
        with mr.MPIStrategy() as strategy:
            yield strategy

    def test_busy(WHOSE, monkeypatch):
        monkeypatch.setattr("time.monotonic", lambda: 1000.0)  # as for the code under test
        if rank == 1:
            threading.Event().wait()
        WHOSE.barrier()
"""


@pytest.mark.parametrize(
    ("library", "whose"), on(("openmpi", "own"), ("openmpi", "strategy"), ("mpich", "strategy"))
)
def test_a_rank_that_never_comes_to_a_call_of_a_strategy_is_named_and_the_job_ends(
    library, whose, launch, tmp_path
):
    """All others wait in that call: none is at the end of the test."""
    done = launch(library, 3, {"test_busy.py": BUSY.replace("WHOSE", whose)})
    assert done.returncode != 0
    text = outcomes(tmp_path)["test_busy"][1]
    assert "CollectiveTimeoutError" in text
    assert re.search(r"test_busy.py\", line \d+, in test_busy\n +threading.Event\(\).wait", text), (
        text
    )


PATCHED = {
    "test_patched.py": """
    from time import perf_counter
    from unittest import mock
    import numpy as np

    NAMES = [
        *("os.getpid", "os.getppid", "time.sleep", "time.time", "time.monotonic"),
        *("time.perf_counter", "time.time_ns", "time.monotonic_ns", "time.perf_counter_ns"),
    ]

    def be_late():
        until = perf_counter() + 0.1
        while perf_counter() < until:
            pass

    def refuse(*_):
        pytest.fail("this is for the code under test alone")

    @pytest.mark.parametrize("name", NAMES)
    def test_of_a_name(strategy, monkeypatch, name):
        monkeypatch.setattr(name, refuse)  # until the ranks have met behind this
        if rank == 1:
            be_late()
        check(strategy)
        if rank == 0:
            be_late()

    def test_of_all_names(monkeypatch, tmp_path):
        for name in NAMES:
            monkeypatch.setattr(name, refuse)
        with mr.MPIStrategy(replicas_per_rank=2) as strategy:
            check(strategy)
            rows = mr.data.Dataset.from_tensor_slices(np.arange(8.0)).map(abs, 2).batch(4)
            steps = iter(strategy.experimental_distribute_dataset(rows.prefetch(1)))
            assert len(list(steps)) == 2
            folder = strategy.gather_objects(str(tmp_path))[0]
            manager = mr.CheckpointManager(mr.Checkpoint(strategy, x=np.ones(3)), folder)
            manager.save(1)
            assert manager.restore_or_initialize()

    @mock.patch("os.getpid", return_value=4242)
    @mock.patch("time.monotonic", side_effect=[0.0, 11.0])
    def test_of_a_mock(clock, getpid, strategy):
        import time
        assert os.getpid() == 4242
        start = time.monotonic()
        check(strategy)
        assert time.monotonic() - start > 10

    def test_behind_them(strategy):
        check(strategy)
    """
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_test_may_patch_clocks_sleeps_and_the_pid(library, launch):
    done = launch(library, 2, PATCHED)
    assert summary(done) == "12 passed", done.stdout + done.stderr


UNPRINTABLE = {
    "test_stuck.py": """
    import sys

    def test_fails():
        sys.stdout = None
        raise OSError("caf\\udce9")  # a name that is no UTF-8, as os.listdir gives it

    def test_stuck():
        if rank == 0:
            world.Barrier()  # the others do not call it
    """
}


FORKS = {
    "test_forks.py": """
        def leaves(how):
            if how == "fails":
                assert os.getpid() == 0, "not the rank"
            elif how == "exits":
                raise SystemExit(0)
            elif how == "ends the session":
                pytest.exit("enough")

        @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of other threads
        @pytest.mark.parametrize("how", ["fails", "exits", "ends the session", "returns"])
        def test_forks(strategy, how):
            child = os.fork() if rank == 1 else -1
            if child == 0:
                return leaves(how)
            if child > 0:
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
            check(strategy)
    """
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_forked_child_that_leaves_its_test_ends_and_says_so(library, launch):
    """It would come to the others as its rank, which comes as well."""
    done = launch(library, 2, FORKS, "-p", "no:pytest_mpi")
    assert summary(done) == "4 passed", done.stdout + done.stderr
    for how in ("fails", "exits", "returns"):
        place = f"test_forks.py::test_forks[{how}] (call)"
        assert f"{place}: a child that was forked here has left the test" in done.stderr
    assert "AssertionError: not the rank" in done.stderr
    assert "Exit: enough" in done.stderr


@pytest.mark.parametrize("library", LIBRARIES[:1])
def test_the_job_ends_whatever_an_earlier_test_has_done(library, launch):
    done = launch(library, 2, UNPRINTABLE, "-s")
    assert done.returncode != 0
    assert r"OSError: caf\udce9" in done.stderr, done.stderr
    assert "[rank 1 of 2] test_stuck.py::test_stuck (call): rank 1 waited 4 s" in done.stderr


@pytest.mark.parametrize("library", LIBRARIES[:1])
def test_without_watchers_it_is_said_that_nobody_knows_where_a_rank_is(
    library, launch, tmp_path, monkeypatch
):
    monkeypatch.setenv("STUCK", "1")
    monkeypatch.setenv("MPI_REPLICA_WATCH", "0")
    done = launch(library, 2, STUCK)
    assert done.returncode != 0
    text = outcomes(tmp_path)["test_stuck"][1]
    assert "test_stuck.py::test_stuck (call): rank 0 waited 4 s" in text
    assert "It is not known where the others are" in text


INTERRUPTED = {
    "test_interrupted.py": """
    def test_fails():
        assert rank == 0, "seen before"

    @pytest.fixture(scope="module")
    def shared():
        with mr.MPIStrategy() as strategy:
            yield strategy
            strategy.barrier()

    @pytest.fixture(scope="module")
    def other():
        with mr.MPIStrategy() as strategy:
            yield strategy
            strategy.barrier()

    def test_interrupted(shared, other, strategy):
        if rank == 1:
            raise KeyboardInterrupt
        check(strategy)

    def test_never_runs(strategy):
        check(strategy)
    """
}


OF_OTHER_RANKS = """
    import signal, threading, warnings

    def test_that_warns(strategy):
        warnings.warn("met everywhere")
        if rank:
            warnings.warn("half precision", RuntimeWarning)

    def test_that_prints(strategy):
        print("a clue of rank", rank)
        assert strategy.gather_objects(rank) == (0, 1) or rank != 1

    @pytest.fixture
    def alarm():
        def late(number, frame):
            raise TimeoutError("too late")
        handler = signal.signal(signal.SIGALRM, late)
        yield
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)

    def test_with_an_alarm(alarm, strategy):
        if rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 2)
            threading.Event().wait(30)
        signal.setitimer(signal.ITIMER_REAL, 1)  # while it waits for rank 0 at the end

    def test_behind_it(strategy):
        strategy.barrier()

    @pytest.fixture(scope="module")
    def two():
        with mr.MPIStrategy() as one, mr.MPIStrategy() as other:
            yield one, other

    def test_that_fails(two):
        if rank == 1:
            raise ValueError("the cause")
        two[0].barrier()

    def test_of_the_first(two):
        two[0].barrier()

    def test_of_the_second(two):
        two[1].barrier()
"""


@pytest.mark.parametrize("library", LIBRARIES[:1])
def test_what_other_ranks_met_is_in_the_report(library, launch, tmp_path):
    done = launch(library, 3, {"test_others.py": OF_OTHER_RANKS})
    found = outcomes(tmp_path)
    assert "RuntimeWarning: half precision (on ranks 1-2)" in done.stdout
    assert done.stdout.count("met everywhere") == 2  # the warning, and its line
    assert found["test_that_warns"][0] == "passed"
    text = found["test_that_prints"][1]
    assert "a clue of rank 0" in text
    assert "a clue of rank 1" in text
    assert "TimeoutError: too late" in found["test_with_an_alarm"][1]
    assert found["test_behind_it"] == ["passed", ""]
    assert "test_of_the_first" not in found["test_of_the_second"][1]


START_FAILS = {
    "conftest.py": CONFTEST
    + """
    def pytest_sessionstart():
        from mpi4py import MPI
        if MPI.COMM_WORLD.rank == 1:
            raise ValueError("no session here")

    def pytest_unconfigure():
        from mpi4py import MPI
        if MPI.COMM_WORLD.rank == 0:
            raise ValueError("no end here")
    """,
    "test_anything.py": """
    def test_never_runs():
        pass
    """,
}


@pytest.mark.parametrize("library", LIBRARIES[:1])
def test_a_session_that_does_not_start_on_one_rank_ends_on_all_and_says_why(library, launch):
    done = launch(library, 2, START_FAILS)
    assert done.returncode != 0
    assert "rank 1 ended the session: INTERNALERROR" in done.stdout
    assert "ValueError: no session here" in done.stdout
    assert "TypeError" not in done.stdout + done.stderr
    assert "did not come" not in done.stdout + done.stderr


@pytest.mark.parametrize("library", LIBRARIES[:1])
def test_an_interrupt_on_one_rank_ends_the_session_of_all_with_their_report(
    library, launch, tmp_path
):
    done = launch(library, 2, INTERRUPTED)
    told = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == int(pytest.ExitCode.INTERRUPTED), told
    assert "rank 1 ended the session: KeyboardInterrupt" in done.stdout, told
    assert "the others stop at test_interrupted.py::test_interrupted (call)" in done.stdout
    assert "AssertionError: seen before" in outcomes(tmp_path)["test_fails"][1]
    assert done.stdout.count("fixtures at the end: RankLostError: this strategy was given up") == 2
    assert "test_never_runs" not in told


DIFFERENT_TESTS = """
    @pytest.mark.parametrize("x", [0, 1, 2 + rank])
    def test_number(x):
        assert x >= 0
"""
SKIPPED_MODULE = """
    if rank == 1:
        pytest.skip("no data here", allow_module_level=True)

    def test_anything():
        pass
"""
NOT_IMPORTED = """
    if rank == 1:
        raise ImportError("only on rank 1")

    def test_anything():
        pass
"""


@pytest.mark.parametrize(
    ("library", "text", "promises"),
    on(
        (
            "openmpi",
            DIFFERENT_TESTS,
            [
                "the ranks collected different tests",
                "rank 0: 3 tests, 1 of them not on all ranks: test_collected.py::test_number[2]",
                "rank 1: 3 tests, 1 of them not on all ranks: test_collected.py::test_number[3]",
            ],
        ),
        (
            "mpich",
            SKIPPED_MODULE,
            [
                "rank 0: 1 tests",
                "rank 1: 0 tests\n  skipped test_collected.py: no data here\nSkip a module on all",
            ],
        ),
        (
            "mpich",
            NOT_IMPORTED,
            [
                "ERROR collecting test_collected.py",
                "E   ImportError: only on rank 1",
                "ERROR test_collected.py - on rank 1: ImportError: only on rank 1",
            ],
        ),
    ),
    ids=lambda value: value if value in LIBRARIES else "",
)
def test_ranks_that_do_not_collect_the_same_run_nothing(library, text, promises, launch):
    done = launch(library, 2, {"test_collected.py": text})
    assert done.returncode == int(pytest.ExitCode.INTERRUPTED), done.stdout + done.stderr
    for promise in promises:
        assert promise in done.stdout, done.stdout + done.stderr
    assert summary(done) == "1 error"


EXITS_IN_IMPORT = """
    import sys

    if rank == 1:
        sys.exit("no data here")

    def test_anything():
        pass
"""


@pytest.mark.parametrize("library", LIBRARIES[:1])
def test_a_rank_that_exits_while_a_module_is_imported_says_why_on_rank_0(library, launch):
    done = launch(library, 2, {"test_collected.py": EXITS_IN_IMPORT})
    told = done.stdout + done.stderr
    assert done.returncode != 0
    assert "rank 1 ended the session: SystemExit: no data here" in done.stdout, told
    assert "collected different tests" not in told


FAILS_BEFORE_A_STRATEGY = """
    import mpi_replica as mr

    if rank == 1:
        raise OSError("no table here")
    strategy = mr.MPIStrategy()

    def test_anything():
        pass
"""


@pytest.mark.parametrize("library", LIBRARIES[:1])
def test_why_a_rank_has_left_a_module_is_told_where_another_one_waits_for_it_there(library, launch):
    done = launch(library, 2, {"test_collected.py": FAILS_BEFORE_A_STRATEGY})
    told = done.stdout + done.stderr
    assert done.returncode != 0, told
    assert "no table here" in told


BROKEN_CONFTEST = """
    import os

    if "0" in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):
        raise RuntimeError("no conftest on rank 0")
    pytest_plugins = ["mpi_replica.testing"]
"""


@pytest.mark.parametrize("library", LIBRARIES[-1:])
def test_a_rank_that_never_starts_does_not_hang_the_others(library, launch):
    files = {"conftest.py": BROKEN_CONFTEST, "test_good.py": "def test_good(): pass"}
    done = launch(library, 2, files)
    assert done.returncode != 0
    assert "RuntimeError: no conftest on rank 0" in done.stderr


ALONE = {
    "test_alone.py": """
    import sys
    import mpi_replica as mr

    def test_alone(strategy):
        assert strategy.size == 1
        assert strategy.num_replicas_in_sync == 3
        strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", 1.0))

    def test_no_mpi_was_started():
        assert "mpi4py.MPI" not in sys.modules

    def test_fails(strategy):
        strategy.run(lambda: 1 / 0)
    """
}


def run_alone(folder, env, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=folder,
        env=rank_environment(LIMIT_SECONDS, environment() | env),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_without_a_launcher_there_is_one_rank_and_no_mpi(tmp_path):
    (tmp_path / "conftest.py").write_text(textwrap.dedent(CONFTEST))
    (tmp_path / "test_alone.py").write_text(textwrap.dedent(ALONE["test_alone.py"]))
    done = run_alone(tmp_path, {"MPI_REPLICA_NUM_REPLICAS": "3"}, "-p", "no:pytest_mpi")
    assert summary(done) == "1 failed, 2 passed", done.stdout + done.stderr
    assert "mpi_replica: " not in done.stdout


@pytest.mark.parametrize("given", ["soon", "0", "-1"])
def test_a_limit_that_is_no_time_is_refused(given, tmp_path):
    done = run_alone(tmp_path, {"MPI_REPLICA_TEST_FENCE": given}, "-p", "mpi_replica.testing")
    assert done.returncode == int(pytest.ExitCode.USAGE_ERROR)
    assert f"MPI_REPLICA_TEST_FENCE={given!r} is not a positive number of seconds" in done.stderr


def test_a_limit_beyond_what_a_timer_knows_is_none(monkeypatch):
    monkeypatch.setenv("MPI_REPLICA_TEST_FENCE", "1e12")
    assert _limit_seconds(types.SimpleNamespace(getoption=lambda name: False)) == math.inf


@pytest.mark.parametrize(
    ("kinds", "outcome"),
    [
        (["passed", "passed"], None),
        (["skipped", "skipped"], None),
        (["xpassed", "xpassed"], None),
        (["failed", "failed"], "failed"),
        (["passed", "failed"], "failed"),
        (["passed", "skipped"], "failed"),
        (["skipped", "stopped"], "failed"),
        (["passed", "stopped"], "failed"),
        (["failed", "xfailed"], "failed"),
        (["skipped", "xfailed"], "failed"),
        (["passed", "xpassed"], "failed"),
        (["passed", "xfailed"], "xfailed"),
        (["stopped", "xfailed"], "xfailed"),
        (["xpassed", "xfailed"], "xfailed"),
    ],
)
def test_one_outcome_follows_from_those_of_all_ranks(kinds, outcome):
    for order in (kinds, kinds[::-1]):
        assert judge([Arrival("here", kind) for kind in order]) == outcome


def test_the_same_text_of_several_ranks_is_told_once():
    arrivals = [Arrival("here", "failed", text, text) for text in ("low", "high", "low")]
    outputs = ["", "", ""]
    report = failure(arrivals, 1, own="high, in colours", outputs=outputs, place=("test_a.py", 3))
    assert str(report) == "ranks 0-2 failed\n\n--- ranks 0, 2\nlow\n\n--- rank 1\nhigh, in colours"
    crash = report.reprcrash
    assert (crash.message, crash.path, crash.lineno) == ("rank 0: low", "test_a.py", 3)
    assert str(report.reprcrash) == "rank 0: low"  # which --tb=line prints
