"""A mistake anywhere in a program is the same error on every rank, with the line of it.

The programs are drawn (see tests/random_programs.py); mistakes.py has those that were thought of.
"""

import functools

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpi_replica as mr
from contributions import at_once, check
from everywhere import check_mistake, holds_everywhere
from random_mistakes import DISAGREEMENTS, WRONG_ARGUMENTS, wrong_argument
from random_programs import programs
from traces import Trace, results

few = hypothesis.settings(at_once, max_examples=4)


def pytest_generate_tests(metafunc):
    from mpi4py import MPI  # the fence has started it

    if "argument" in metafunc.fixturenames:
        is_alone = MPI.COMM_WORLD.size == 1  # then nothing is pickled
        names = [name for name in WRONG_ARGUMENTS if not (is_alone and "pickled" in name)]
        metafunc.parametrize("argument", names)


@pytest.fixture(scope="module")
def variables(kept_strategy):
    """One that all replicas give the same value, and one that each gives a part of."""
    summed = mr.VariableAggregation.SUM
    with kept_strategy.scope():
        return mr.Variable(np.zeros(3)), mr.Variable(np.zeros(3), aggregation=summed)


@at_once
@given(program=programs())
def test_a_right_program_finds_numpys_numbers(kept_strategy, variables, program):
    count = kept_strategy.num_replicas_in_sync
    for variable in variables:
        variable.assign(np.zeros(3))
    found, *expected = results([Trace(program, mine, count, False) for mine in range(count)])

    def step():
        context = mr.get_replica_context()
        mine_found = program.step(context, *variables, context.replica_id_in_sync_group, False)
        of_calls = [one for one in mine_found if not isinstance(one, mr.Variable)]
        for one, other in zip(of_calls, found, strict=True):
            check(one, other)

    kept_strategy.run(step)
    for variable, value in zip(variables, expected, strict=True):
        holds_everywhere(functools.partial(check, np.array(variable), value))


def check_program(data, strategy, variables, mistake, *, is_line_known=True):
    """Let a replica make the mistake in a program; the error must name the line of it."""
    program = data.draw(programs(mistake))
    count = strategy.num_replicas_in_sync
    culprit = data.draw(st.integers(0, count - 1))
    parting = program.parting(culprit, count)
    made = program.mistake(variables, parting)
    if not is_line_known:
        made = made._replace(places=(), names_both_sides=False)
    check_mistake(strategy, made, [culprit])
    strategy.verify(variables)


@pytest.mark.parametrize("mistake", DISAGREEMENTS)
@at_once
@given(data=st.data())
def test_a_disagreement_is_the_same_error_on_every_rank(kept_strategy, variables, mistake, data):
    check_program(data, kept_strategy, variables, DISAGREEMENTS[mistake])


@few
@given(data=st.data())
def test_a_wrong_argument_is_the_same_error_on_every_rank(kept_strategy, variables, argument, data):
    mistake = wrong_argument(argument)
    check_program(data, kept_strategy, variables, mistake, is_line_known=False)


@few
@given(data=st.data())
def test_a_wrong_argument_is_an_error_with_its_line(kept_strategy, variables, argument, data):
    check_program(data, kept_strategy, variables, wrong_argument(argument))
