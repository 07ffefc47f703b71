"""Assignments that numpy refuses: an error on all ranks, and the strategy works on."""

import textwrap

import pytest

from jobs import run_job, told
from launching import LIBRARIES

pytestmark = pytest.mark.mpi_skip  # it starts ranks itself

MISTAKES = {
    "bools are subtracted": ("True", "assign_sub"),
    "structures are added": ("np.zeros(2, 'f4,i4')", "assign_add"),
}
PLACES = {
    "outside": "assign()",  # of any strategy of the program
    "above": "with strategy.scope(): assign()",
    "in replicas": "strategy.run(assign)",
    "in update": "strategy.extended.update(v, lambda _: assign())",
}
CASES = [(place, mistake) for place in PLACES for mistake in MISTAKES]


def program(place, mistake):
    value, how = MISTAKES[mistake]
    owner = "mr.get_strategy()" if place == "outside" else "strategy"
    return textwrap.dedent(
        f"""
        with mr.MPIStrategy() as strategy:
            scope = {owner}.scope()
            with scope:
                v = mr.Variable({value})

            def assign():
                v.{how}({value})

            try:
                {PLACES[place]}
            except TypeError:
                tell("{place}: {mistake}")
            with scope:
                assert float(mr.Variable(1.0)) == 1.0
            check(strategy)
            tell("alive")
        """
    )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_strategy_works_on_after_an_assignment_that_numpy_refuses(library, ranks, tmp_path):
    programs = "".join(program(*case) for case in CASES)
    done = run_job(library, tmp_path, programs, ranks, succeeds=True)
    told_by_each = [text for case in CASES for text in (": ".join(case), "alive")]
    assert told(done) == [f"[{rank}] {text}" for rank in range(ranks) for text in told_by_each]
