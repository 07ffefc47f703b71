"""Reproducible strategies fix the threads of BLAS, and give back what was before."""

import gc
import importlib.util
import itertools
import os
import subprocess
import sys
import textwrap

import pytest
import threadpoolctl

import mpi_replica as mr
from launching import FOREIGN

REPRODUCIBLE = mr.CommunicationOptions(reproducible=True)

# Programs that begin with this can tell how many threads each BLAS library has.
HEAD = """
    import os, sys
    import numpy as np
    import mpi_replica as mr

    def threads():
        from threadpoolctl import threadpool_info

        found = {info["filepath"]: info["num_threads"] for info in threadpool_info()}
        return [found[path] for path in sorted(found)]

    reproducible = mr.CommunicationOptions(reproducible=True)
"""


def threads():
    """Return how many threads the BLAS libraries of this process have."""
    found = threadpoolctl.threadpool_info()
    return {info["num_threads"] for info in found if info["user_api"] == "blas"}


def reproducible():
    return mr.MPIStrategy(num_replicas=2, communication_options=REPRODUCIBLE)


def run_python(program, **variables):
    """Run a program in a process of its own; return what it printed."""
    limits = ("OMP_", "OPENBLAS_", "MKL_", "BLIS_")
    env = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN + limits)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(HEAD) + textwrap.dedent(program)],
        env=env | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(done.stderr, pytrace=False)
    return done.stdout


@pytest.fixture
def three_threads():
    """Let BLAS have three threads, whatever the environment says."""
    with threadpoolctl.threadpool_limits(3, user_api="blas"):
        if threads() != {3}:
            pytest.skip("numpy's BLAS library is none whose threads can be set")
        yield


@pytest.mark.usefixtures("three_threads")
class TestThreads:
    def test_a_reproducible_strategy_has_one_thread_while_it_is_open(self):
        with reproducible() as strategy:
            assert threads() == {1}
            assert strategy.run(threads).values == ({1}, {1})
        assert threads() == {3}

    def test_a_variable_gives_another_number(self, monkeypatch):
        monkeypatch.setenv("MPI_REPLICA_BLAS_THREADS", "2")
        with reproducible():
            assert threads() == {2}
        assert threads() == {3}

    def test_variables_of_the_libraries_say_nothing_to_a_reproducible_strategy(self, monkeypatch):
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            monkeypatch.setenv(name, "3")
        with reproducible():
            assert threads() == {1}

    def test_another_strategy_leaves_the_threads_alone(self, monkeypatch):
        monkeypatch.setenv("MPI_REPLICA_BLAS_THREADS", "many")  # not even read
        options = mr.CommunicationOptions(reproducible=False)
        with mr.MPIStrategy(communication_options=options) as strategy:
            strategy.run(lambda: None, options=REPRODUCIBLE)
            assert threads() == {3}

    @pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
    def test_the_last_one_that_is_closed_gives_back_what_was_before(self, order):
        strategies = [reproducible() for _ in order]
        for turn in order:
            assert threads() == {1}
            strategies[turn].close()
            strategies[turn].close()  # a second one does nothing
        assert threads() == {3}

    def test_one_that_ends_with_an_error_gives_back_what_was_before(self):
        with pytest.raises(ZeroDivisionError), reproducible() as strategy:
            strategy.run(lambda: 1 / 0)
        assert threads() == {3}

    def test_one_that_could_not_be_made_changes_nothing(self):
        with pytest.raises(ValueError, match="num_replicas"):
            mr.MPIStrategy(num_replicas=0, communication_options=REPRODUCIBLE)
        assert threads() == {3}

    def test_one_that_was_never_closed_gives_back_what_was_before_when_it_is_collected(self):
        strategy = reproducible()
        assert threads() == {1}
        del strategy
        gc.collect()
        assert threads() == {3}

    def test_a_number_that_changed_while_one_is_open_is_an_error(self, monkeypatch):
        with reproducible():
            monkeypatch.setenv("MPI_REPLICA_BLAS_THREADS", "2")
            with pytest.raises(ValueError, match=r"fixed the threads of BLAS at 1\. Close it"):
                reproducible()
            assert threads() == {1}
        with reproducible():
            assert threads() == {2}

    def test_a_strategy_that_was_closed_limits_nothing_any_more(self):
        strategy = reproducible()
        strategy.close()
        mr.get_strategy().run(lambda: None)
        assert threads() == {3}


@pytest.mark.parametrize("given", ["many", "0", "-1", "", "2.0"])
def test_a_variable_that_is_no_number_of_threads_is_named(given, monkeypatch):
    monkeypatch.setenv("MPI_REPLICA_BLAS_THREADS", given)
    with pytest.raises(ValueError, match="MPI_REPLICA_BLAS_THREADS") as caught:
        reproducible()
    assert f"={given!r} is not a positive integer" in str(caught.value)


def test_a_library_that_is_loaded_later_is_limited_too_and_gets_its_own_number_back():
    if importlib.util.find_spec("scipy") is None:
        pytest.skip("needs scipy, which has a BLAS library of its own")
    program = """
        before = threads()
        with mr.MPIStrategy(num_replicas=2, communication_options=reproducible) as strategy:
            step = lambda: str(threads())
            strategy.run(step)
            import scipy.linalg.blas
            loaded = threads()
            print(len(loaded) > len(before), min(before) > 1, max(loaded) > 1)
            print(*strategy.run(step).values)
            strategy.run(step)
        print(len(set(threads())), set(threads()) == set(before))
    """
    is_new, inside, after = run_python(program).splitlines()
    if is_new != "True True True":
        pytest.skip("needs two cores, and a scipy with a BLAS library of its own")
    assert inside == "[1, 1] [1, 1]"
    assert after == "1 True"


def test_products_have_the_same_bits_whatever_the_environment_says_of_threads():
    program = """
        import hashlib

        def product():
            rng = np.random.default_rng(mr.get_replica_context().replica_id_in_sync_group)
            digest = hashlib.sha256()
            for n in (7, 64, 257, 600):
                left, right = rng.standard_normal((2, n, n))
                digest.update(left @ right)
                digest.update(left @ right[0])
            return digest.hexdigest()

        with mr.MPIStrategy(num_replicas=2, communication_options=reproducible) as strategy:
            print(*strategy.run(product).values)
    """
    texts = {run_python(program, OPENBLAS_NUM_THREADS=number) for number in ("1", "2", "3")}
    assert len(texts) == 1
    assert len(set(texts.pop().split())) == 2


def test_other_programs_do_not_import_what_limits_threads():
    program = """
        with mr.MPIStrategy(num_replicas=2) as strategy:
            strategy.run(lambda: mr.get_replica_context().all_reduce("SUM", np.ones(3)))
        print("threadpoolctl" in sys.modules)
    """
    assert run_python(program) == "False\n"
