"""Collectives in functions that solvers of scipy call back."""

import sys

import numpy as np
import pytest
from mpi4py import MPI

import mpi_replica as mr
from everywhere import check_works, raises_everywhere, shares_ranks

integrate = pytest.importorskip("scipy.integrate", reason="scipy is not installed")
optimize = pytest.importorskip("scipy.optimize", reason="scipy is not installed")

TIMES = np.linspace(0, 3, 30)


def of_ode(name):
    def solve(rate, call):
        def slope(_, y):
            call()
            return -rate * y

        solver = integrate.ode(slope).set_integrator(name)
        return solver.set_initial_value([1.0]).integrate(2.0)[0]

    return solve


def odeint(rate, call):
    def slope(y, _):
        call()
        return -rate * y

    return integrate.odeint(slope, [1.0], [0.0, 2.0])[-1, 0]


def residuals(rate, call):
    def differences(p):
        call()
        return p[0] * np.exp(-p[1] * TIMES) - np.exp(-rate * TIMES)

    return differences


def leastsq(rate, call):
    return np.exp(-2 * optimize.leastsq(residuals(rate, call), [2.0, 1.0])[0][1])


def least_squares(method):
    def solve(rate, call):
        found = optimize.least_squares(residuals(rate, call), [2.0, 1.0], method=method)
        return np.exp(-2 * found.x[1])

    return solve


def fsolve(rate, call):
    differences = residuals(rate, call)
    return np.exp(-2 * optimize.fsolve(lambda p: differences(p)[[0, -1]], [2.0, 1.0])[1])


def cobyqa(rate, call):
    def square(p):
        call()
        return (p[0] - rate) ** 2

    found = optimize.minimize(square, [1.0], method="COBYQA", options={"maxfev": 40})
    return np.exp(-2 * found.x[0])


KEEP_STATE = {
    "odeint": odeint,
    "lsoda": of_ode("lsoda"),
    "leastsq": leastsq,
    "least_squares, lm": least_squares("lm"),
    "fsolve": fsolve,
}
# Keeps it, too, and goes on to call when a call has raised: what comes of that depends on Python.
DOPRI5 = {"dopri5": of_ode("dopri5")}
OTHERS = {"least_squares, trf": least_squares("trf")}


def solved(strategy, solve):
    """Return what each local replica finds for a rate of its own, in a number of calls of its own.

    One that has come to its end makes the calls of the others with them.
    """

    def step():
        context = mr.get_replica_context()

        def count(number):
            options = mr.CommunicationOptions(name="who still calls")
            return context.all_reduce("SUM", number, options=options)

        rate = 0.5 + 0.3 * context.replica_id_in_sync_group
        found = solve(rate, lambda: count(1))
        while count(0):
            pass
        return found

    return strategy.experimental_local_results(strategy.run(step))


def expected(strategy):
    return [np.exp(-2 * (0.5 + 0.3 * i)) for i in strategy.local_replica_ids]


@pytest.mark.parametrize("solver", KEEP_STATE)
def test_replicas_that_share_a_thread_are_not_in_a_solver_that_keeps_its_state(strategy, solver):
    """Each would go on with that of another one; on ranks of one replica it is right."""
    has_threads = strategy.replica_threads or not sys.modules.keys().isdisjoint({"torch", "jax"})
    if not shares_ranks(strategy) or has_threads:
        found = solved(strategy, KEEP_STATE[solver])
        np.testing.assert_allclose(found, expected(strategy), rtol=1e-4)
        return
    error = raises_everywhere(mr.errors.ContextError, lambda: solved(strategy, KEEP_STATE[solver]))
    assert "inside of scipy." in str(error)
    assert "replica_threads=True" in str(error)
    check_works(strategy)


@pytest.mark.parametrize("solver", [*KEEP_STATE, *DOPRI5, *OTHERS])
def test_in_threads_of_their_own_they_are(solver):
    solve = {**KEEP_STATE, **DOPRI5, **OTHERS}[solver]
    with mr.MPIStrategy(MPI.COMM_SELF, num_replicas=3, replica_threads=True) as alone:
        found = solved(alone, solve)
        np.testing.assert_allclose(found, expected(alone), rtol=1e-4)


@pytest.mark.parametrize("replica_threads", [False, True], ids=["greenlets", "threads"])
def test_replicas_of_a_rank_are_not_in_a_solver_that_holds_a_lock(replica_threads):
    """They would wait for it for ever, in threads, too; on ranks of one replica it is right."""
    with mr.MPIStrategy(replica_threads=replica_threads) as of_ranks:
        found = solved(of_ranks, cobyqa)
        np.testing.assert_allclose(found, expected(of_ranks), rtol=1e-3)
    with mr.MPIStrategy(MPI.COMM_SELF, num_replicas=2, replica_threads=replica_threads) as alone:
        with pytest.raises(mr.errors.ContextError, match="holds a lock while it calls back"):
            solved(alone, cobyqa)
        check_works(alone)


@pytest.mark.parametrize("solver", OTHERS)
def test_they_may_be_in_other_solvers(strategy, solver):
    found = solved(strategy, OTHERS[solver])
    np.testing.assert_allclose(found, expected(strategy), rtol=1e-4)
